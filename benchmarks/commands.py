"""Runs the commands that tables are made of, each in its own time; one that fails leaves what it had written and a row with the reason."""
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil  # DeepSpeed needs it too

from ds_zipccl.cli.bench_step import TRANSPORTS as TRANSPORTS

ROOT = Path(__file__).resolve().parent.parent
DS_ZIPCCL = "-m", "ds_zipccl.cli.main"


def measure(op: str, arguments: list[str], environment: dict[str, str], limit: int, *, ranks: int = 0, show: bool = False) -> dict:
    """What ``python ARGUMENTS --json FILE`` writes there but for "meta"; its "rows" in any case. Where it has another status than 0, or is
    not done after ``limit`` seconds, the last row is {"op", "error", "command"}.

    ``ranks``: start so many of it here, as ranks of one GPU, instead of letting it spawn them. ``show``: its output on this one's.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, errors = Path(folder) / "rows.json", Path(folder) / "errors"
        command = [sys.executable, *arguments, "--json", str(path)]
        reason = _run(command, environment, limit, ranks, show, errors) if limit > 0 else "left out: the time was over"
        try:
            found = json.loads(path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):       # the second: stopped while it wrote
            found = []
    found = {"rows": found} if isinstance(found, list) else found
    found.pop("meta", None)
    if reason:
        found["rows"].append({"op": op, "error": reason, "command": shell(arguments)})
    return found


def shell(arguments: list[str]) -> str:
    """The command as one would type it in the checkout."""
    words = ["ds_zipccl", *arguments[2:]] if tuple(arguments[:2]) == DS_ZIPCCL else ["python", *arguments]
    return " ".join(word.removeprefix(f"{ROOT}/") for word in words)


def _run(command: list[str], environment: dict[str, str], limit: int, ranks: int, show: bool, errors: Path) -> str:
    """Why it failed; "" if it did not. Nothing of it runs on afterwards: a rank may be stuck where its parent's end does not reach it."""
    processes, statuses, end = [], [None], time.monotonic() + limit
    with errors.open("w") as error_file:
        try:
            for own in _on_one_gpu(ranks) if ranks else [{}]:
                processes.append(subprocess.Popen(command, env=os.environ | environment | own, stdout=None if show else subprocess.DEVNULL,
                                                  stderr=error_file))
            while None in statuses and not any(statuses) and time.monotonic() < end:
                time.sleep(0.05)
                statuses = [process.poll() for process in processes]
        finally:
            for process in processes:
                _end(process)
    failed = [status for status in statuses if status]
    if failed:
        return f"status {failed[0]}: {errors.read_text(errors='replace')[-500:]}"
    return f"not done after {limit} s" if None in statuses else ""


def _end(process: subprocess.Popen) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.kill()
        for child in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.wait()


def _on_one_gpu(ranks: int) -> Iterator[dict[str, str]]:
    """What a launcher would tell each rank. NCCL takes two ranks of a GPU if it believes them to be on two hosts; then they use sockets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for rank in map(str, range(ranks)):
        yield {"RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
               "NCCL_HOSTID": f"h{rank}"}
