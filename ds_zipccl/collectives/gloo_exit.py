"""The end of a program whose groups are gloo's.

A collective has returned before gloo's thread lets go of its tensors, which takes Python's lock. Python ends a thread that asks for it
while Python itself ends (up to 3.13), and C++ answers that with an abort: "terminate called without an active exception". Destroying a
group waits for its threads, unless something still holds it, as DeepSpeed's engines do. Any script on gloo has this, natively too; one
that we serve shall not end so.
"""
import atexit
import functools
import time

LETS_GO_S = 0.2             # a thread that was about to let go has had its turn by then, on a busy machine too


@functools.cache
def wait_at_exit() -> None:
    """Once in a process."""
    atexit.register(lambda: time.sleep(LETS_GO_S))
