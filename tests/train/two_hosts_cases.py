"""Cases run by test_two_hosts.py on every rank of two hosts, which torchrun has started: ``python -m tests.train.two_hosts_cases FOLDER
CASE...``. What became of a case on a rank goes to FOLDER/CASE.RANK. Stage 3 comes last: F.linear stays replaced."""
import logging
import os
import socket
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ds_zipccl
from ds_zipccl.collectives import mailbox_meeting, switch
from tests.helpers.bits import assert_same_bits, gaussian
from tests.scape import zero_cases as scape_cases
from tests.train import zero_cases
from tests.zipccl import collective_mailbox_cases, torch_pg_train_cases
from tests.zipccl.collective_helpers import AG, RS, gathered, launch, runtime
from tests.zipccl.torch_pg_helpers import ZIPPED, count, torchs_collectives
from tests.zipccl.torch_pg_helpers import launch as launch_by_torch

BF16 = torch.bfloat16
TIMEOUT_S = 60


def from_all(value) -> list:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def my_host(rank: int, world: int) -> list[int]:
    """The ranks of this rank's host: torchrun numbers them host by host."""
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    first = rank // local * local
    return list(range(first, first + local))


def case_there_are_two_hosts(rank, world):
    """Else nothing here says anything: names, networks and /dev/shm differ, the kernel (boot_id) is one."""
    here = my_host(rank, world)
    for seen in from_all(socket.gethostname()), from_all(socket.gethostbyname(socket.gethostname())), from_all(mailbox_meeting._host()):
        assert [other for other in range(world) if seen[other] == seen[rank]] == here, seen
    assert len({boot for boot, _ in from_all(mailbox_meeting._host())}) == 1


def case_words_cross_hosts_by_the_channel(rank, world):
    """And by shared memory among ranks of one host, at the same time; results are checked bit by bit, overflows included."""
    texts, here = [], my_host(rank, world)
    local, everybody = len(here), dist.new_group(list(range(world)))
    mine = [dist.new_group(list(range(first, first + local))) for first in range(0, world, local)][rank // local]
    with mock.patch.object(mailbox_meeting.log, "info", lambda text, *rest: texts.append(text % rest)), runtime() as live:
        collective_mailbox_cases.make_calls(live, rank, world, everybody, 3)
        assert collective_mailbox_cases.way(live, everybody) == "hosts"
        if local > 1:
            for turn in range(4):
                out = torch.empty(local, 3000, dtype=BF16)
                launch(live, AG, out.view(-1), gaussian(3000, seed=100 * turn + rank), mine).wait()
                assert_same_bits(out, torch.stack([gaussian(3000, seed=100 * turn + other) for other in here]), f"on one host, turn {turn}")
            assert collective_mailbox_cases.way(live, mine) == "mailbox"
        assert collective_mailbox_cases.way(live, everybody) == "hosts"
    assert sum(mailbox_meeting.REASONS["hosts"] in text for text in texts) == 1, texts
    assert not [name for name in os.listdir(mailbox_meeting.FOLDER) if name.startswith(mailbox_meeting.PREFIX)]


def case_adaptive_zips_on_a_slow_link(rank, world):
    """100 Mbit/s, of which the codec is many times as fast. (Probes of 16 MiB would take 20 s here.)"""
    assert world == 2
    with mock.patch.dict(switch.PROBE_SIZES, cpu=(1 << 18, 1 << 20)), runtime(collectives="adaptive") as live:
        for op in AG, RS:
            data = gaussian(1 << 16 if op == AG else 1 << 17, seed=rank)
            out = torch.empty(1 << 17 if op == AG else 1 << 16, dtype=BF16)
            work = launch(live, op, out, data)
            assert work is not None, f"{op} goes native: {live.stats.snapshot()}"
            work.wait()
            if op == AG:
                assert_same_bits(out, gathered(data, world), op)
        (state,) = live._groups[dist.group.WORLD.group_name].values()
        report = state.switch_report()
        assert len(set(map(str, from_all(report)))) == 1, report
        assert report.keys() == {f"{AG} bfloat16", f"{RS} bfloat16"} and max(report.values()) <= 1 << 18, report


def case_torch_backend_equals_native(rank, world):
    """A group of backend "zipccl": every collective on exactly summable inputs, and DDP; its settings must agree."""
    ds_zipccl.configure(**ZIPPED)
    ours, native = dist.new_group(backend="zipccl"), dist.new_group(backend="gloo")
    for op, spec in torchs_collectives().items():
        output, data = spec.make_tensors(rank, world, 3000, BF16, torch.device("cpu"))
        options = {"root": world - 1} if op == "broadcast" else {}
        before, results = count(op), []
        for group in ours, native:
            out = data.clone() if op in ("all_reduce", "broadcast") else _like(output)
            launch_by_torch(op, out, data, group, **options).wait()
            results.append(torch.cat([piece.view(-1) for piece in out]) if isinstance(out, list | tuple) else out)
        assert_same_bits(*results, op)
        assert count(op) == before + 1, ds_zipccl.statistics()[op]
    runs = []
    for group in ours, native:
        model = DistributedDataParallel(torch_pg_train_cases.Net().to(BF16), process_group=group)
        runs.append((torch_pg_train_cases.train(model, BF16), torch_pg_train_cases.sha(model.parameters())))
    assert runs[0][0][0] == runs[1][0][0] and (world > 2 or runs[0] == runs[1])
    assert len(set(from_all(runs[0][1]))) == 1


def _like(tensors):
    return [torch.zeros_like(t) for t in tensors] if isinstance(tensors, list | tuple) else torch.zeros_like(tensors)


def case_scape_trains_alike_everywhere(rank, world):
    """Dense steps and sparse ones equal the simulation of all workers after every step, weights are the same on every rank."""
    engine = scape_cases.initialize(scape_cases.settings(1, optimizer={"params": {"dense_warmup_steps": 2}}))
    _, outcomes = scape_cases.train_beside_simulation(engine, 6)
    assert outcomes[0].dense and not outcomes[-1].dense
    assert len(set(from_all(torch_pg_train_cases.sha(engine.module.parameters())))) == 1
    engine.destroy()


def case_settings_that_differ_are_one_error(rank, world):
    text = zero_cases._refused({**zero_cases.ZIPPED, "min_bytes": 1024 * (1 + (rank == world - 1))}, rank, world)
    assert "min_bytes" in text and f"rank {world - 1}" in text, text
    zero_cases.case_wrong_section_on_one_rank_is_an_error_on_all(rank, world)


def case_zero_3_equals_native(rank, world):
    """With its gradients at 2 ranks; beyond, with gathers alone, and the sum is the documented one."""
    if world == 2:
        zero_cases.compare(3, "bf16", world)
        return
    only_gathers = {**zero_cases.ZIPPED, "collectives": {"all_gather": "always", "reduce_scatter": "never"}}
    native, zipped = (zero_cases.train(zero_cases.settings(3, "bf16", **section), 3) for section in ({}, {"zipccl": only_gathers}))
    assert native[:2] == zipped[:2] and zipped[2][AG]["calls_zipped"] > 0 == zipped[2][RS]["calls_zipped"]
    zero_cases.case_stage_3_uses_the_rank_order_sum(rank, world)


def main(folder: str, *names: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("ds_zipccl").setLevel(logging.INFO)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank, world = dist.get_rank(), dist.get_world_size()
    for name in names:
        try:
            globals()[name](rank, world)
            outcome = "ok"
        except BaseException:
            outcome = traceback.format_exc()
        Path(folder, f"{name}.{rank}").write_text(outcome)
        if outcome != "ok":
            os._exit(1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
