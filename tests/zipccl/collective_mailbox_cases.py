"""Cases run on every rank by test_collectives.py: whole calls whose status words go through shared memory, and through a channel."""
import contextlib
import os

import torch
import torch.distributed as dist

from ds_zipccl.collectives import mailbox_meeting
from ds_zipccl.collectives.registry import specs
from tests.helpers.bits import assert_same_bits
from tests.zipccl import collective_fault_cases, collective_order_cases
from tests.zipccl.collective_helpers import AG, begin, runtime
from tests.zipccl.collective_repeat_cases import begin_ours, call_and_result, check

OPS = tuple(specs(internal=True))


@contextlib.contextmanager
def environment(name, value):
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def make_calls(live, rank, world, group, turns):
    """Calls of all forms, some of which overflow, three in flight, in an order of the rank's own."""
    for turn in range(turns):
        flying = []
        for i, op in enumerate(OPS):
            call, result = call_and_result(op, rank, world, 3000, 50 * turn + i, noise=turn == 2 and i % 3 == 0, group=group)
            flying.append((*begin_ours(live, call), call, result))
            if len(flying) == 3 or op == OPS[-1]:
                for work, ours, call, result in reversed(flying) if (rank + turn) % 2 else flying:
                    work.wait()
                    check(call, ours, result, f"{call.op}, turn {turn}")
                flying = []
    assert sum(row["overflows"] for row in live.stats.snapshot().values()) >= 2


def way(live, group):
    return live.state(group, torch.get_default_device()).side.words_go_by


def case_words_through_shared_memory(rank, world):
    group = dist.new_group(list(range(world)))
    with environment("ZIPCCL_MAILBOX", "1"), runtime() as live:
        make_calls(live, rank, world, group, 5)
        assert way(live, group) == "mailbox"
        box = live.state(group, torch.get_default_device()).side._meeting.box
        assert box._count > 8 and len(box._pair_counts) == 2 * (world - 1) and min(box._pair_counts.values()) > 4


def case_one_rank_without_a_mailbox_is_enough(rank, world):
    """All others use the channel too."""
    group = dist.new_group(list(range(world)))
    with environment("ZIPCCL_MAILBOX", "0" if rank == world - 1 else "1"), runtime() as live:
        make_calls(live, rank, world, group, 4)
        assert way(live, group) == "off"


def case_a_mailbox_after_many_calls(rank, world):
    """As it is outside tests on a CPU: nobody waits in a launch for the agreement. The ranks wait for calls in different orders."""
    group, lag = dist.new_group(list(range(world))), mailbox_meeting.LAG
    mailbox_meeting.LAG = 20
    try:
        with environment("ZIPCCL_MAILBOX", "1"), runtime() as live:
            flying, seen = [], set()
            for turn in range(50):
                call, result = call_and_result(AG, rank, world, 2000, turn, group=group)
                flying.append((begin(live, call)[0], call, result))
                seen.add(way(live, group))
                if len(flying) == 5:
                    for work, call, result in reversed(flying) if rank % 2 else flying:
                        work.wait()
                        assert_same_bits(call.output, result, turn)
                    flying = []
            on_gpu = torch.get_default_device().type == "cuda"
            assert seen == {"mailbox"} | (set() if on_gpu else {"not_agreed"})
    finally:
        mailbox_meeting.LAG = lag


def case_faults_and_orders_over_channels(rank, world):
    """What most cases of the other modules do through shared memory."""
    orders, faults = collective_order_cases, collective_fault_cases
    with environment("ZIPCCL_MAILBOX", "0"):
        for case in (orders.case_two_groups_waited_for_in_different_orders, orders.case_a_ring_of_groups_of_two,
                     faults.case_many_in_flight_waited_in_reverse, faults.case_overflows_on_all_and_alternating):
            case(rank, world)
