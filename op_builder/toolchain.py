"""Finding compilers and running them: the only place that starts a compiler process."""

import functools
import os
import shlex
import shutil
import signal
import subprocess

from zipscape.errors import BuildError, describe

_COMPILE_TIMEOUT_S = 600.0
_ADVICE = {
    "c++": "install a C++17 compiler (Debian, Ubuntu: apt-get install g++) or name one in the variable CXX",
    "nvcc": "install the CUDA toolkit, put its nvcc on PATH, or name its folder in the variable CUDA_HOME",
}
_CANDIDATES = {"c++": ("c++", "g++", "clang++"), "nvcc": ("nvcc",)}
_VARIABLES = {"c++": ("ZIPSCAPE_CXX", "CXX"), "nvcc": ("ZIPSCAPE_NVCC", "NVCC")}


def find(kind: str) -> list:
    """Command of the compiler as a list of words. kind: "c++" or "nvcc". Raises BuildError if there is none.

    ZIPSCAPE_CXX and ZIPSCAPE_NVCC name one for our libraries alone, CXX and NVCC for everybody's.
    """
    variable = next((name for name in _VARIABLES[kind] if os.environ.get(name, "").strip()), None)
    if variable:
        named = shlex.split(os.environ[variable])
        if shutil.which(named[0]):
            return named
        raise BuildError(describe(
            f"The {kind} compiler named by the variable {variable} was not found", got=os.environ[variable],
            expected="a command that exists on this machine", todo=f"correct or unset {variable}"))
    for candidate in _CANDIDATES[kind]:
        path = shutil.which(candidate) or (_nvcc_in_toolkit() if kind == "nvcc" else None)
        if path:
            return [path]
    raise BuildError(describe(
        f"No {kind} compiler was found", expected=f"one of {', '.join(_CANDIDATES[kind])} on PATH", todo=_ADVICE[kind]))


def _nvcc_in_toolkit():
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    return next((path for path in (shutil.which(os.path.join(home, "bin", "nvcc")) for home in homes if home) if path),
                None)


@functools.cache
def version(command: tuple) -> str:
    """What the compiler says of itself; part of the cache key, so that an upgrade rebuilds. Raises BuildError."""
    return run([*command, "--version"], what=f"{command[0]} --version", timeout_s=60.0)


def run(command, *, what: str, timeout_s: float = _COMPILE_TIMEOUT_S) -> str:
    """Run a compiler and return its output (stdout and stderr together).

    Raises BuildError with that output if it fails, or if it takes longer than timeout_s seconds (then its whole
    process group is ended).
    """
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True)
    except OSError as error:
        raise BuildError(describe(f"{what}: the compiler could not be started", got=str(error),
                                  where=shlex.join(command))) from error
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise BuildError(describe(f"{what}: the compiler did not finish in {timeout_s:g} s",
                                  where=shlex.join(command))) from error
    if process.returncode != 0:
        raise BuildError(f"{what}: the compiler failed with status {process.returncode}. "
                         f"Command: {shlex.join(command)}\n{output.strip()}")
    return output
