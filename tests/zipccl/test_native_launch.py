"""Native calls by the group's own method: the same as by torch's functions for all who look, or left to these."""
import logging
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ProcessGroup, c10d_logger
from torch.distributed import distributed_c10d as c10d
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from ds_zipccl.backend import front
from ds_zipccl.collectives import native_launch
from ds_zipccl.collectives.native_launch import ASK, LAUNCHES, launch_of
from ds_zipccl.collectives.registry import Call, specs
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.config import ZipcclConfig

SUM, AVG, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX
FIELDS = {"all_gather_into_tensor": [{}], "all_to_all_single": [{}], "broadcast": [{"root": 0}, {"root": 2}],
          "reduce_scatter_tensor": [{}, {"reduce_op": SUM}, {"reduce_op": MAX}, {"reduce_op": AVG}],
          "all_reduce": [{}, {"reduce_op": SUM}, {"reduce_op": MAX}, {"reduce_op": AVG}]}
CASES = [(op, fields) for op in FIELDS for fields in FIELDS[op]]
DEPRECATED = pytest.mark.filterwarnings("ignore:.*deprecated")


@pytest.fixture(scope="module")
def world():
    """Rank 1 of 4, alone."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield dist.group.WORLD
    dist.destroy_process_group()


def tensors(op: str, dtype=torch.bfloat16):
    whole, part = torch.randn(8, 2).to(dtype), torch.randn(2, 2).to(dtype)
    return {"all_gather_into_tensor": (whole, part), "reduce_scatter_tensor": (part, whole)}.get(op, (whole, whole.clone()))


def direct(op, out, data, group, async_op, fields):
    data = out if op in ("all_reduce", "broadcast") else data
    return LAUNCHES[op](out, data, group, async_op, fields.get("reduce_op"), fields.get("root"))


def natively(op, out, data, group, async_op, fields):
    if op == "broadcast":
        return dist.broadcast(out, group=group, async_op=async_op, group_src=fields.get("root"))
    reduce_op = {} if fields.get("reduce_op") is None else {"op": fields["reduce_op"]}
    return getattr(dist, op)(*((out,) if op == "all_reduce" else (out, data)), group=group, async_op=async_op, **reduce_op)


class Seen(TorchDispatchMode):
    """What reaches the dispatcher: the operator, which tensors and everything else."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, tuple(map(self.plain, args)), kwargs))
        return func(*args, **(kwargs or {}))

    def plain(self, value):
        if isinstance(value, torch.Tensor):
            return value.data_ptr(), tuple(value.shape)
        if isinstance(value, (list, tuple)):
            return tuple(map(self.plain, value))
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value).group_name
            except RuntimeError:
                return str(dist.ReduceOp.unbox(value).op) if hasattr(dist.ReduceOp, "unbox") else "reduce op"
        return value


@DEPRECATED
@pytest.mark.parametrize("op,fields", CASES)
@pytest.mark.parametrize("async_op", [False, True, 1, 0])
def test_the_dispatcher_sees_the_same(world, op, fields, async_op):
    out, data = tensors(op)
    seen = []
    for way in (natively, direct):
        for group in (None, world):
            with Seen() as mode:
                work = way(op, out, data, group, async_op, fields)
            assert work is not ASK and (work is not None) == bool(async_op)
            seen.append((type(work), mode.calls))
    assert len(seen[0][1]) == 1 and all(each == seen[0] for each in seen[1:])


@DEPRECATED
@pytest.mark.parametrize("op", FIELDS)
def test_profilers_and_fake_tensors_see_the_same(world, op):
    out, data = tensors(op)
    names = []
    for way in (natively, direct):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            way(op, out, data, world, False, FIELDS[op][0])
        names.append([event.name for event in profile.events()])
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(out), mode.from_tensor(data)
            assert isinstance(way(op, *fake, world, True, FIELDS[op][0]), dist.Work)
    assert names[0] == names[1] and names[0]


def method_of(op: str) -> str:
    """The group's, by its newest name."""
    names = {"all_gather_into_tensor": ("all_gather_single", "_allgather_base"), "all_reduce": ("allreduce",),
             "reduce_scatter_tensor": ("reduce_scatter_single", "_reduce_scatter_base"),
             "all_to_all_single": ("all_to_all_single", "alltoall_base")}
    return next(name for name in names.get(op, (op,)) if hasattr(dist.ProcessGroup, name))


@DEPRECATED
@pytest.mark.parametrize("op", FIELDS)
def test_waits_where_torch_does(world, op, monkeypatch):
    (out, data), waited = tensors(op), []

    class Work:

        def wait(self):
            waited.append(self)

    work = Work()
    monkeypatch.setattr(dist.ProcessGroup, method_of(op), lambda *_: work)
    for way in (natively, direct):
        assert way(op, out, data, world, True, FIELDS[op][0]) is work and not waited
        assert way(op, out, data, world, False, FIELDS[op][0]) is None and waited == [work]
        waited.clear()


def options_of(method: str, group, run, monkeypatch) -> dict:
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(dist.ProcessGroup, method, lambda self, *args: seen.append((self, args)))
        assert run() is None
    (pg, args), = seen
    assert pg is group
    given = {name: getattr(args[-1], name) for name in dir(args[-1]) if not name.startswith("_")}
    return {name: value.op if isinstance(value, dist.ReduceOp) else value for name, value in given.items()} | {"tensors": len(args)}


@DEPRECATED
@pytest.mark.parametrize("op,fields", CASES)
def test_with_the_same_options(world, op, fields, monkeypatch):
    """A group that gives no work: nothing to wait for."""
    out, data = tensors(op)
    for async_op in (False, True):
        theirs, ours = (options_of(method_of(op), world, lambda way=way, a=async_op: way(op, out, data, world, a, fields), monkeypatch)
                        for way in (natively, direct))
        assert theirs == ours and theirs["asyncOp"] is async_op


class Tensor(torch.Tensor):
    """With torch functions of its own."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Watching(TorchFunctionMode):

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", FIELDS)
def test_what_torch_treats_differently_is_left_to_it(world, op, monkeypatch):
    out, data = tensors(op)
    fields = FIELDS[op][0]

    def ask(out=out, data=data, group=world):
        return direct(op, out, data, group, True, fields) is ASK

    assert not ask()
    assert not ask(*(torch.nn.Parameter(t, requires_grad=False) for t in (out, data)))
    assert ask(out.as_subclass(Tensor), data.as_subclass(Tensor))
    assert ask([out], [data]) and ask(None, None)
    with Watching():
        assert ask()
    if op not in ("all_reduce", "broadcast"):
        assert ask(out.float(), data) and ask(out.to(torch.complex64), data) and ask(7, data)
    with dist.distributed_c10d._coalescing_manager(world):
        if op in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
            assert ask()
    assert not ask()
    name = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}.get(op, op)
    for module, patched in ((dist, op), (c10d, name)):
        if hasattr(module, patched) and (module is dist or patched != op):
            with monkeypatch.context() as patch:
                patch.setattr(module, patched, lambda *_, **__: None)
                assert ask()
    assert not ask()


def test_a_coalesced_call_is_carried_out_with_the_others(world):
    """Between others, torch only notes it down: what comes back is what torch gives."""
    out, data = tensors("all_gather_into_tensor")
    c10d._world.pg_coalesce_state[world] = []
    try:
        assert LAUNCHES["all_gather_into_tensor"](out, data, world, True) is ASK
    finally:
        del c10d._world.pg_coalesce_state[world]


def test_a_root_that_is_none_is_left_to_torch(world):
    assert LAUNCHES["broadcast"](torch.zeros(3), None, world, True) is ASK


@DEPRECATED
def test_errors_are_torchs_and_logged_as_torch_does(world, monkeypatch):
    out, data = tensors("all_gather_into_tensor")
    seen, handler = [], logging.Handler()
    handler.emit = lambda record: seen.append(record.msg)
    c10d_logger._c10d_logger.addHandler(handler)
    for method in ("_allgather_base", "all_gather_single", "allreduce"):
        if hasattr(dist.ProcessGroup, method):
            def fails(*_):
                raise ValueError("no such thing")
            monkeypatch.setattr(dist.ProcessGroup, method, fails)
    try:
        for way in (natively, direct):
            for op in ("all_gather_into_tensor", "all_reduce"):
                with pytest.raises(ValueError, match="no such thing"):
                    way(op, out, data, world, True, {})
    finally:
        c10d_logger._c10d_logger.removeHandler(handler)
    named = {message["func_name"]: message for message in seen[:-2]}
    assert seen[-2:] == [named["all_gather_into_tensor"], named["all_reduce"]]


@pytest.mark.parametrize("op", FIELDS)
def test_for_plain_groups_types_and_versions_alone(world, op, monkeypatch):
    out, data = tensors(op)

    def launch(group=world, dtype=torch.bfloat16, device="cpu", op=op):
        return launch_of(Call(op, out.to(device, dtype), data.to(device, dtype), group, root=0))

    class Group(dist.ProcessGroup):
        pass

    asks = native_launch.ask
    assert launch() is LAUNCHES[op] is not asks
    assert launch(group=Group(0, 1)) is asks and launch(dtype=torch.complex64) is asks and launch(dtype=torch.float8_e4m3fn) is asks
    assert launch(device="meta") is asks and launch(op="all_gather") is asks
    for version, is_seen in (("2.12.0", False), ("2.14.1", False), ("2.11.3+cu130", True), ("2.13.0", True)):
        monkeypatch.setattr(torch, "__version__", version)
        assert (launch() is not asks) == is_seen


def test_every_collective_of_one_tensor_has_a_launch():
    assert {name for name, spec in specs().items() if isinstance(spec.make_tensors(0, 2, 8, torch.bfloat16, "cpu")[0], torch.Tensor)
            and isinstance(spec.make_tensors(0, 2, 8, torch.bfloat16, "cpu")[1], torch.Tensor)} == set(LAUNCHES)
    assert Runtime and native_launch.ask not in LAUNCHES.values()


def test_a_front_launches_so_what_it_knows(world, monkeypatch):
    """And has the deprecated names named by its first call alone."""
    live = Runtime(ZipcclConfig(enabled=True, min_bytes=1 << 20), {"cpu": "reference"})
    monkeypatch.setattr(live, "state", lambda *_: None)
    out, data = tensors("all_gather_into_tensor")
    asked = []

    def native(call):
        asked.append(call)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return dist.all_gather_into_tensor(call.output, call.input, group=call.group, async_op=True)

    for _ in range(3):
        with Seen() as mode:
            work = front.run(live, Call("all_gather_into_tensor", out, data, world), native)
        assert isinstance(work, dist.Work) and len(mode.calls) == 1
    with Watching():
        assert isinstance(front.run(live, Call("all_gather_into_tensor", out, data, world), native), dist.Work)
    assert len(asked) == 2 and live.stats.snapshot()["all_gather_into_tensor"]["calls_native"] == 4


@DEPRECATED
def test_a_real_backend_refuses_the_same_in_the_same_words(tmp_path):
    """Of wrong sizes and devices, which may come once a size is known: the error is what torch raises."""
    backend = dist.ProcessGroupGloo(dist.FileStore(str(tmp_path / "store"), 1), 0, 1, timedelta(seconds=20))
    group = ProcessGroup(dist.FileStore(str(tmp_path / "other"), 1), 0, 1)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    group._set_group_name("alone")
    whole, refused = torch.randn(8), 0
    wrong = {"all_gather_into_tensor": [(torch.zeros(7), whole), (torch.zeros(8, device="meta"), whole), (torch.zeros(16)[::2], whole)],
             "all_to_all_single": [(torch.zeros(7), whole)],
             "all_reduce": [(torch.zeros(16)[::2], None), (torch.zeros(8, device="meta"), None)], "broadcast": [(whole.to_sparse(), None)]}
    for op, calls in wrong.items():
        for out, data in calls:
            said = []
            for way in (natively, direct):
                try:
                    said.append(way(op, out, data, group, False, FIELDS[op][0]))
                except Exception as error:
                    said.append((type(error), str(error)))
            assert said[0] == said[1], op
            refused += said[0] is not None
    assert refused > 2
    right = torch.zeros(8)
    assert LAUNCHES["all_gather_into_tensor"](right, whole, group, False) is None and torch.equal(right, whole)
