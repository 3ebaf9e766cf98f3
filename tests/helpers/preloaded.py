"""What the server of forked ranks does before the first fork (processes.py): what would cost each rank seconds."""
import functools
import gc
import importlib

import cpuinfo
import deepspeed  # noqa: F401 - first: the hooks of both packages run when it is imported

#: What DeepSpeed's engines and the cases import later, the largest part of it torch's compiler.
for name in ("deepspeed.runtime.zero.muon.muon_optimizer", "pytest", "torch._dynamo", "torch.distributed.fsdp", "ds_scape",
             "ds_zipccl.backend.front"):
    importlib.import_module(name)

# A fork ends without an end of Python.
importlib.import_module("ds_zipccl.collectives.gloo_exit").LETS_GO_S = 0

# DeepSpeed asks twice for each operation that it loads; each answer takes a new Python more than half a second.
cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
cpuinfo.get_cpu_info()

# DeepSpeed collects garbage with each engine, which would look at every object of all these modules, and copy their pages in each rank.
gc.collect()
gc.freeze()
