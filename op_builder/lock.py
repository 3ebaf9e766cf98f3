"""A lock between processes that never makes anybody wait for ever."""

import contextlib
import logging
import os
import time

try:
    import fcntl
except ImportError:  # no POSIX locks on this system: everybody compiles for himself
    fcntl = None

log = logging.getLogger("zipscape")
_POLL_S = 0.05


@contextlib.contextmanager
def bounded(path, wait_s: float, is_done):
    """Hold the lock file `path` if that is possible within wait_s seconds; yields whether it is held.

    is_done: called while waiting; when it returns true there is nothing left to wait for. The kernel frees the lock of
    an owner that died, so a stale file blocks nobody. Where locks do not work (some network file systems) or a living
    owner is stuck, the caller goes on without: the lock saves work, correctness comes from the atomic rename.
    """
    if fcntl is None:
        yield False
        return
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:             # for instance another user's, in a cache that is shared
        yield False
        return
    try:
        yield _acquire(handle, path, wait_s, is_done)
    finally:
        os.close(handle)


def _acquire(handle, path, wait_s, is_done) -> bool:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if is_done():
                return False
            if time.monotonic() >= deadline:
                log.warning("waited %g s in vain for the lock %s, which a living process holds: going on without it", wait_s, path)
                return False
        except OSError:
            return False
        time.sleep(_POLL_S)
