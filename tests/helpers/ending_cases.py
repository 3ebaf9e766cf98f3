"""For tests/test_ranks.py and test_run_cases.py: cases that end in each bad way there is."""
import atexit
import os
import signal
import time

import torch
import torch.distributed as dist

from tests.helpers.ranks import LeftOut


def case_fine(rank, world):
    dist.barrier()


def case_sum(rank, world):
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    assert total.item() == world * (world + 1) // 2


def case_raises_on_rank_1(rank, world):
    if rank == 1:
        raise ValueError("what rank 1 did not like")
    dist.barrier()


def case_dies_on_rank_1(rank, world):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGABRT)
    dist.barrier()


def case_rank_0_is_busy_when_rank_1_fails(rank, world):
    if rank == 1:
        raise ValueError("what rank 1 did not like")
    time.sleep(600)


def case_hangs(rank, world):
    time.sleep(600)


def case_ends_badly(rank, world):
    if rank == 1:
        atexit.register(os._exit, 3)


def case_sees_the_environment(rank, world):
    assert os.environ["ZIPSCAPE_TEST_WORD"] == "seen" and os.environ["OMP_NUM_THREADS"] == "1" == str(torch.get_num_threads())


def case_left_out(rank, world):
    raise LeftOut("needs a third hand")


def case_left_out_on_rank_1(rank, world):
    if rank == 1:
        raise LeftOut("needs a third hand")


def case_takes_two_seconds(rank, world):
    time.sleep(2)
