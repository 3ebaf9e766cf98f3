"""Wheels of this checkout and environments they are installed in."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = ("setup.py", "pyproject.toml", "README.md", "MANIFEST.in", "zipscape", "ds_zipccl", "ds_scape", "op_builder", "csrc")
_BUILD = "import sys, setuptools.build_meta as backend; print(getattr(backend, sys.argv[1])(sys.argv[2]))"


def run(*command, cwd, **environment) -> str:
    """Standard output of a command that must succeed. PYTHONPATH is not inherited."""
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], cwd=cwd, env={**inherited, **environment}, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_of_checkout(folder: Path) -> Path:
    """Building in place would leave files that the next wheel picks up."""
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "prebuilt"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, folder)
    return folder


def build(what: str, source: Path, folder: Path, **environment) -> Path:
    """The sdist or wheel that build_sdist or build_wheel makes of ``source``, in ``folder``."""
    return folder / run(sys.executable, "-c", _BUILD, what, folder, cwd=source, **environment).splitlines()[-1]


def fresh_environment(folder: Path, *install) -> Path:
    """The Python of a new environment that sees this one's packages but not its editable zipscape: .pth files do not nest."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    purelib = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    outer = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (Path(purelib) / "outer.pth").write_text("\n".join(outer))
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", *install, cwd=folder)
    return python
