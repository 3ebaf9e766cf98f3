"""What prepared calls need of a kernel set (kernels/ops.py, ``launcher``), with the emulated CUDA kernels: on a CPU."""
from types import SimpleNamespace

import torch

from ds_zipccl.kernels.cuda_calls import CudaCalls
from ds_zipccl.kernels.launch_calls import LaunchCalls

NUM_DRIVER_FUNCTIONS = 5


def launcher_of(codec: CudaCalls) -> SimpleNamespace:
    library, words = codec.library, torch.zeros(1 << 12, dtype=torch.int64)
    functions = [getattr(library, f"zipccl_cuda_{name}") for name in ("encode_telling", "decode", "decode_reduce")]
    calls = LaunchCalls(library, *functions, *functions[:1] * NUM_DRIVER_FUNCTIONS)        # the driver's are not called
    return SimpleNamespace(launch_calls=calls, prints=codec.prints, workspace=lambda index, stream, num_words: words.data_ptr(), keep=words)
