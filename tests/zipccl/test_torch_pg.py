"""Backend "zipccl" of torch.distributed, without DeepSpeed: operations, groups, training; world sizes 1, 2 and 3."""
import json
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

import ds_zipccl
from ds_zipccl.backend import torch_batch, torch_calls, torch_pg, torch_session
from ds_zipccl.backend.torch_pg import FORWARDED, ZipProcessGroup
from ds_zipccl.collectives.transport import abort_backend
from tests.helpers import late_threads
from tests.helpers.ranks import assert_ok, case_names
from zipscape.errors import ConfigError

OPERATIONS, GROUPS, TRAINING = (f"tests.zipccl.torch_pg_{name}cases" for name in ("", "group_", "train_"))
RUNS = [(world_size, module, case) for module, worlds in ((OPERATIONS, (1, 2, 3)), (GROUPS, (2, 3)), (TRAINING, (2, 3)))
        for world_size in worlds for case in case_names(module)]


@pytest.mark.parametrize("world_size, module, case", RUNS, ids=[f"{world_size}-{case}" for world_size, _, case in RUNS])
def test_on_ranks(world_size, module, case):
    assert_ok(module, case_names(module), world_size, case)


#: What a group inherits from torch's ProcessGroup: about the group itself or its native backends, which both groups share.
INHERITED = {"_get_backend", "_register_backend", "_set_default_backend", "_device_types", "_get_backend_name", "_backend_id", "_id",
             "_get_sequence_number_for_group", "_set_sequence_number_for_group", "_has_hooks", "_register_on_completion_hook",
             "_wait_for_pending_works", "_enable_collectives_timing", "_set_group_name", "_set_group_desc", "group_name", "group_desc",
             "bound_device_id", "rank", "size", "name", "boxed", "unbox", "set_timeout", "merge_remote_group", "split_group",
             "use_pg_for_symm_mem_rendezvous", "_pybind11_conduit_v1_", "BackendType"}


def test_every_method_of_torchs_group_is_accounted_for():
    """C59: nothing that communicates is inherited, and no name of the original is missing. A new torch with a new method fails here."""
    names = {name for name, value in vars(ProcessGroup).items() if not name.startswith("__") and (callable(value) or name.islower())}
    ours = {name for name in vars(ZipProcessGroup) if not name.startswith("__")}
    assert names - ours - INHERITED == set(), "neither overridden nor known to be harmless"
    overridden = {*torch_calls.METHODS, *FORWARDED, "_start_coalescing", "_end_coalescing", "shutdown", "abort", "get_group_store"}
    assert overridden & names <= ours


def test_short_forms_are_left_to_torch():
    """Tensors in place of lists, roots in place of options: never misread, so never zipped."""
    x, y = torch.ones(2, 3), torch.ones(4, 3)
    for method, args in (("allreduce", (x,)), ("broadcast", (x, 0)), ("allgather", ([x, x], x)), ("reduce_scatter", (x, [x, x])),
                         ("allreduce", ([x], dist.ReduceOp.SUM)), ("_reduce_scatter_base", (x, y, dist.ReduceOp.SUM))):
        asked = torch_calls.understand(method, args, {})
        assert asked.output is None, method
    assert torch_calls.understand("allreduce", ([x],), {}).output is x


@pytest.mark.parametrize("bound, ranks, called", [("cuda:1", [1, 2], "some"), ("cuda:1", [], "some"), (None, [1, 2], "some"),
                                                ("cuda:1", [1, 2], c10d._hash_ranks_to_str([1, 2]))])
def test_subgroups_of_a_bound_world_are_split_from_it(bound, ranks, called, monkeypatch):
    """Where torch has all other ranks take part in that split: not of one that only its own ranks make, which has a hashed name."""
    made = []

    class Nccl:
        Options, supports_splitting = SimpleNamespace, True

        def __init__(self, store, rank, size, settings):
            self.settings, self.connected = settings, []
            self.eager_connect_single_device = self.connected.append
            made.append(self)

        def _set_sequence_number_for_group(self):
            pass

    class Gloo(Nccl):
        options = SimpleNamespace()

        def __init__(self, *_, timeout):
            pass

    source = object.__new__(Nccl)
    world = SimpleNamespace(bound_device_id=bound, _get_backend=lambda device: source)
    for name, value in (("ProcessGroupNCCL", Nccl), ("ProcessGroupGloo", Gloo), ("is_nccl_available", lambda: True),
                        ("is_initialized", lambda: True)):
        monkeypatch.setattr(dist, name, value, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(c10d, "_get_default_group", lambda: world)
    options = SimpleNamespace(store=dist.HashStore(), group_rank=0, group_size=2, timeout=9, group_id=called, global_ranks_in_group=ranks)
    assert [device for device, *_ in torch_pg._native_backends(options, None)] == ["cpu", "cuda"]
    if bound and ranks and called == "some":
        assert made[0].settings.split_from is source and made[0].settings.split_color == c10d._process_group_color([1, 2])
        assert made[0].connected == ["cuda:1"]
    else:
        assert not hasattr(made[0].settings, "split_from") and made[0].connected == []


@pytest.mark.parametrize("can", [True, False])
def test_batches_are_coalesced_where_the_backend_can(can, monkeypatch):
    """torch coalesces a batch on plain groups only; over NCCL, sends one by one would wait for each other for ever."""
    calls = []

    class Backend:
        supports_coalescing = can

    class Group:
        def _get_backend(self, device):
            return Backend

        def _start_coalescing(self, device):
            calls.append("start")

        def _end_coalescing(self, device):
            calls.append("end")
            return "work"

    class Op:
        tensor, tag, group_peer = torch.ones(1), 0, 1

        def __init__(self, op, group):
            self.op, self.group = op, group

    def isend(tensor, group, tag, group_dst):
        calls.append("isend")

    def irecv(tensor, group, tag, group_src):
        calls.append("irecv")

    c10d = torch_batch.c10d
    monkeypatch.setattr(c10d, "isend", isend)
    monkeypatch.setattr(c10d, "_check_p2p_op_list", lambda ops: None)
    monkeypatch.setattr(c10d, "batch_isend_irecv", lambda ops: [calls.append("torch's")])
    monkeypatch.setattr(dist, "batch_isend_irecv", c10d.batch_isend_irecv)
    torch_batch.batch_through_coalescing(Group)
    torch_batch.batch_through_coalescing(Group)
    group = Group()
    works = dist.batch_isend_irecv([Op(isend, group), Op(irecv, group)])
    assert calls == (["start", "isend", "irecv", "end"] if can else ["torch's"])
    assert works == (["work"] if can else [None])


def test_all_communicators_of_a_group_are_told_to_end_before_any_has_ended():
    """NCCL's abort waits for all kernels on the device, whatever communicator they belong to."""
    both, ended = threading.Barrier(2), []

    class Backend:
        def abort(self):
            both.wait(20)
            ended.append(self)

    group, side = Backend(), Backend()
    ZipProcessGroup.abort(SimpleNamespace(_backends=[("cuda", None, group)], _leave=lambda at_once: abort_backend(side, "cuda")))
    assert group in ended


@pytest.fixture
def no_settings(monkeypatch):
    monkeypatch.setattr(torch_session, "_configured", None)
    monkeypatch.delenv("ZIPCCL_CONFIG", raising=False)


def test_settings_are_the_scripts_else_the_environments_else_the_defaults(no_settings, monkeypatch, tmp_path):
    assert torch_session.settings().enabled and torch_session.settings().collectives.all_gather == "adaptive"
    section = {"collectives": "always", "min_bytes": 7}
    whole = tmp_path / "ds_config.json"
    whole.write_text(json.dumps({"train_batch_size": 8, "zipccl": section}))
    alone = tmp_path / "zipccl.json"
    alone.write_text(json.dumps(section))
    for text in (json.dumps(section), str(whole), str(alone)):
        monkeypatch.setenv("ZIPCCL_CONFIG", text)
        config = torch_session.settings()
        assert (config.enabled, config.min_bytes, config.collectives.all_gather) == (True, 7, "always")
    ds_zipccl.configure(min_bytes=9)
    assert torch_session.settings().min_bytes == 9 and torch_session.settings().collectives.all_gather == "adaptive"
    ds_zipccl.configure(enabled=False)
    assert set(torch_session.settings().collectives.model_dump().values()) == {"never"}


@pytest.mark.parametrize("text", ["{", "no/such/file.json", '{"min_bytes": -1}', '{"zipccl": {"colectives": "always"}}'])
def test_wrong_settings_name_the_variable(text, no_settings, monkeypatch):
    monkeypatch.setenv("ZIPCCL_CONFIG", text)
    with pytest.raises(ConfigError, match="ZIPCCL_CONFIG"):
        torch_session.settings()


SCRIPT = """
import sys
sys.modules["deepspeed"] = None         # importing it fails
import torch, torch.distributed as dist
{first}
dist.init_process_group("zipccl")
rank, world = dist.get_rank(), dist.get_world_size()
out = torch.empty(world * 3000, dtype=torch.bfloat16)
data = torch.randn(3000).bfloat16()
work = dist.all_gather_into_tensor(out, data, async_op=True)
assert torch.equal(out.view(world, -1)[rank], data) or work.wait()
import ds_zipccl
assert "torch._dynamo" not in sys.modules, "torch's compiler was imported, which takes seconds"
if rank == 0:
    print("zipped", ds_zipccl.statistics()["all_gather_into_tensor"]["calls_zipped"])
{last}
"""


@pytest.mark.parametrize("first, last, environment", [
    ("", "dist.destroy_process_group()", {}),
    ("", "work = dist.all_gather_into_tensor(out, data, async_op=True)", {}),       # ends with a call in flight and nothing destroyed
    ("import ds_zipccl", "dist.destroy_process_group()", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}),
], ids=["entry point alone", "no destroy", "by import"])
def test_a_plain_script_without_deepspeed(first, last, environment, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(first=first, last=last))
    settings = {"ZIPCCL_CONFIG": '{"collectives": "always", "min_bytes": 0}', "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)],
                          capture_output=True, text=True, timeout=200,
                          env=os.environ | settings | environment | late_threads.environment(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "zipped 1" in done.stdout


def test_the_backend_is_registered_by_import_torch_and_loads_nothing():
    code = ("import sys, torch, torch.distributed as dist; "
            "print(dist.is_backend_available('zipccl'), dist.Backend.default_device_backend_map['cpu'], 'ds_zipccl' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["True", "gloo", "False"], done.stderr[-2000:]
