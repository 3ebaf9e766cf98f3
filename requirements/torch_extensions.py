"""DeepSpeed compiles one helper of its own when it starts on a CPU; do that once, in the set-up, and keep it unlocked.

Two reasons: it takes about a minute in which a first training run seems to hang, and torch guards such builds with a
lock file that survives a killed process and then blocks every later run for ever.
"""

import os
import subprocess
from pathlib import Path

_BUILD = """
from deepspeed.accelerator import get_accelerator
if get_accelerator().device_name() == "cpu":
    get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)
"""
_BUILT = "zipscape-built"


def prepare(python: Path, folder: Path, say) -> None:
    """Remove stale locks in `folder` (torch's TORCH_EXTENSIONS_DIR) and build the helper if that was not done yet."""
    for lock in folder.glob("*/lock"):
        if not _is_open(lock):
            lock.unlink(missing_ok=True)
    marker = folder / _BUILT
    if marker.exists():
        return
    say("building DeepSpeed's CPU helper (once, about a minute)")
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder), "ZIPSCAPE_DISABLE": "1",
                   "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    try:
        done = subprocess.run([python, "-c", _BUILD], env=environment, capture_output=True, text=True, timeout=900)
        output = done.stdout + done.stderr if done.returncode else ""
    except subprocess.TimeoutExpired:
        output = "it did not end within 15 minutes"
    if output:
        say(f"that failed; DeepSpeed will try again by itself. The end of its message:\n{output[-2000:]}")
    else:
        marker.touch()


def _is_open(path: Path) -> bool:
    """Whether some process holds the file open, as the owner of torch's lock does; True where that can't be told."""
    if not Path("/proc/self/fd").exists():
        return True
    target = str(path.resolve())
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link) == target:
                return True
        except OSError:  # that process is gone, or not ours
            continue
    return False
