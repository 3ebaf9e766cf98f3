"""The end of a program: no thread of ours or of gloo's is in C++ for Python when Python ends (C++ would end the process by an abort)."""
import subprocess
import sys
import threading
import time

import pytest

from ds_zipccl.collectives import completer

SCRIPT = """
import atexit, sys, types
slept = []
atexit.register(lambda: print(slept))
import torch, torch.distributed as dist
from ds_zipccl.collectives import gloo_exit
from ds_zipccl.collectives.group_state import GroupState
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
if sys.argv[2] == "ours":
    states = [GroupState(dist.group.WORLD, torch.device("cpu")) for _ in range(2)]
gloo_exit.time = types.SimpleNamespace(sleep=slept.append)
"""


@pytest.mark.parametrize("whose, slept", [("ours", "[0.2]"), ("native", "[]")])
def test_programs_that_we_serve_wait_once_for_gloo_to_let_go(whose, slept, tmp_path):
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "store"), whose], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout.strip() == slept, (done.stdout, done.stderr[-2000:])


class Busy:
    """In C++, as it were, for 0.3 s."""

    def __init__(self):
        self.begun, self.ended = threading.Event(), False

    def push_on(self) -> bool:
        self.begun.set()
        time.sleep(0.3)
        self.ended = True
        return False


def test_the_thread_that_looks_after_calls_has_ended_when_the_program_goes_on():
    watch, state = completer.Watch(), Busy()
    watch.add(state)
    watch.wake()
    assert state.begun.wait(10)
    watch.end()
    assert state.ended and not watch._thread.is_alive()
