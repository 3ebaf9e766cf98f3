"""Make the environment that `make demo` and `make test` run in; does nothing when it is up to date.

Standard library only, Python 3.10 or newer. Uses the active virtual environment, or makes .venv in the checkout.
A suitable torch that is there already is kept; without an NVIDIA GPU no CUDA build is ever asked for. Can be
interrupted at any point and run again.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch_extensions

ROOT = Path(__file__).resolve().parent.parent
TORCH_RANGE = ((2, 11), (2, 14))  # from the first up to, not including, the second; as in pyproject.toml
TORCH_PIN = "2.13.0"
STAMP = "zipscape-environment.stamp"
EXTENSIONS = "torch_extensions"  # the Makefile exports this folder as TORCH_EXTENSIONS_DIR

#: Asked of an interpreter without importing torch, which takes seconds.
_TORCH_VERSION = ("from importlib.metadata import version, PackageNotFoundError\n"
                  "try: print(version('torch'))\n"
                  "except PackageNotFoundError: pass\n")
_SMOKE = "import torch, deepspeed, pydantic, numpy, rich, matplotlib, zipscape.op_builder.base, ds_zipccl, ds_scape"


def main() -> int:
    if sys.version_info < (3, 10):  # noqa: UP036 - the one file that a too old Python may well run
        _stop(f"Python 3.10 or newer is needed, not {platform.python_version()}: make PYTHON=python3.11 ...")
    active = os.environ.get("VIRTUAL_ENV")
    venv = Path(active) if active else ROOT / ".venv"
    with _Lock(ROOT / ".venv.lock"):
        stamp, wanted = venv / STAMP, _fingerprint()
        if not (stamp.is_file() and stamp.read_text() == wanted and _python(venv).exists()):
            if not active:
                _make_venv(venv)
            elif not _python(venv).exists():
                _stop(f"VIRTUAL_ENV names {venv}, which has no bin/python. Unset it, or make that environment again.")
            stamp.unlink(missing_ok=True)
            _install(venv)
            shutil.rmtree(venv / EXTENSIONS, ignore_errors=True)  # they belong to the torch that was there before
            stamp.write_text(wanted)
        torch_extensions.prepare(_python(venv), venv / EXTENSIONS, _say)
    return 0


def _fingerprint() -> str:
    """Everything that decides what is installed: pins, metadata, this script, the place of the checkout."""
    digest = hashlib.sha256(f"{ROOT}\0{sys.version}\0".encode())
    pins = sorted(ROOT.glob("requirements/*.txt"))
    for path in (*pins, Path(__file__).resolve(), ROOT / "pyproject.toml", ROOT / "setup.py"):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest() + "\n"


def _make_venv(venv: Path) -> None:
    python = _python(venv)
    if python.exists() and _ok([python, "-c", "import sys, pip; assert sys.prefix != sys.base_prefix"]):
        return
    if venv.exists():
        _say(f"{venv.name} is incomplete; making it again")
        shutil.rmtree(venv)
    command = [sys.executable, "-m", "venv", str(venv)]
    # A virtual environment that is not active lends nothing: the new one is made from the Python below it.
    outside = _torch_version(sys.executable) if sys.prefix == sys.base_prefix else ""
    if outside and _is_suitable(outside):
        _say(f"this machine's torch {outside} is suitable and is used")
        command.insert(3, "--system-site-packages")
    _say(f"making {venv.name}")
    if subprocess.run(command).returncode != 0:
        shutil.rmtree(venv, ignore_errors=True)
        _stop("Python could not make a virtual environment. On Debian and Ubuntu: apt-get install python3-venv")


def _install(venv: Path) -> None:
    python, folder = _python(venv), ROOT / "requirements"
    torch = _torch_version(python)
    if torch and _is_suitable(torch):
        _say(f"keeping torch {torch}")
    else:
        torch = _torch_to_install()
        _say(f"installing torch {torch}")
        if not _pip(python, f"torch=={torch}", "-c", folder / "constraints.txt"):
            _stop(_torch_advice(torch))
    torch = _torch_version(python)
    _say("installing the other requirements")
    extra = ["-r", folder / "cpu.txt"] if torch.endswith("+cpu") else []
    # setuptools first: DeepSpeed is built from source, in this environment, where it can see torch.
    steps = (
        ["setuptools", "wheel", "-c", folder / "constraints.txt"],
        ["--no-build-isolation", "-r", folder / "runtime.txt", "-r", folder / "dev.txt", *extra, f"torch=={torch}"],
        ["--no-build-isolation", "--no-deps", "-e", ROOT],
    )
    for step in steps:
        if not _pip(python, *step):
            _stop("pip could not install the requirements; its own message is above. Run the command again to go on.")
    if subprocess.run([python, "-c", _SMOKE], cwd=venv, stdout=subprocess.DEVNULL).returncode != 0:
        _stop(f"The environment {venv} was installed but does not import (see above). "
              "Remove it and run the command again.")


def _torch_to_install() -> str:
    # Elsewhere than on Linux the plain wheels are CPU builds, and there is no "+cpu".
    return TORCH_PIN if _has_nvidia_gpu() or platform.system() != "Linux" else f"{TORCH_PIN}+cpu"


def _torch_advice(torch: str) -> str:
    if "+cpu" not in torch:
        return f"pip could not install torch {torch} (its message is above). Install a torch {_range()} yourself first."
    return (f"pip does not find torch {torch}: this machine has no NVIDIA GPU, and a CUDA build of several GB is not "
            "installed for nothing. Either set PIP_EXTRA_INDEX_URL to the address of PyTorch's CPU wheel index "
            f"(the install page of PyTorch shows it under CPU), or install a torch {_range()} yourself first, in an "
            "active virtual environment; then run the command again.")


def _has_nvidia_gpu() -> bool:
    if Path("/dev/nvidia0").exists():
        return True
    smi = shutil.which("nvidia-smi")
    return bool(smi) and _ok([smi, "--list-gpus"])


def _torch_version(python) -> str:
    """Version of the torch that this interpreter sees, or "". PYTHONPATH counts, as it will when torch is used."""
    return subprocess.run([python, "-c", _TORCH_VERSION], capture_output=True, text=True).stdout.strip()


def _is_suitable(version: str) -> bool:
    try:
        release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    except ValueError:
        return False
    return TORCH_RANGE[0] <= release < TORCH_RANGE[1]


def _range() -> str:
    return ">={}.{},<{}.{}".format(*TORCH_RANGE[0], *TORCH_RANGE[1])


def _pip(python, *arguments) -> bool:
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    # DeepSpeed's own ops are built when they are first used, not here.
    environment = {**os.environ, "DS_BUILD_OPS": "0", "PIP_USER": "0"}
    done = subprocess.run(list(map(str, command)), env=environment, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        _say("failed: " + shlex.join(map(str, command)))
    return done.returncode == 0


def _python(venv: Path) -> Path:
    return venv / "bin" / "python"


def _ok(command) -> bool:
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def _say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


def _stop(text: str) -> None:
    sys.exit(f"set-up: {text}")


class _Lock:
    """One set-up at a time; a killed one leaves nothing behind that blocks."""

    def __init__(self, path):
        self._path = path

    def __enter__(self):
        self._file = open(self._path, "w")
        try:
            import fcntl
            fcntl.flock(self._file, fcntl.LOCK_EX)
        except (ImportError, OSError):
            pass

    def __exit__(self, *_):
        self._file.close()


if __name__ == "__main__":
    sys.exit(main())
