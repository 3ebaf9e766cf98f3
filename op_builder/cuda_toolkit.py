"""Whether a CUDA toolkit goes with the torch of this process: another major release does not, another minor one is only said."""

import functools
import logging
import re
import sys

from zipscape.errors import BuildError, describe

log = logging.getLogger("zipscape")


def release(version: str) -> str:
    """"13.0" from what ``nvcc --version`` prints; "" if it says nothing of the kind."""
    match = re.search(r"release (\d+\.\d+)", version)
    return match[1] if match else ""


def of_torch() -> str:
    """The release that torch was built with; "" if torch is not imported here or has no CUDA."""
    version = getattr(sys.modules.get("torch"), "version", None)
    return getattr(version, "cuda", None) or ""


def check(toolkit: str, whose: str) -> None:
    """toolkit: a release. Raises BuildError if its major differs from torch's; logs once if only the minor does."""
    theirs = of_torch()
    if not (toolkit and theirs) or toolkit == theirs:
        return
    if toolkit.split(".")[0] != theirs.split(".")[0]:
        raise BuildError(describe(
            "The CUDA toolkit is of another major release than torch's", got=f"{whose} {toolkit}", expected=f"{theirs.split('.')[0]}.x",
            todo=f"install the toolkit that goes with torch, or name its nvcc in ZIPSCAPE_NVCC; torch was built with CUDA {theirs}"))
    _say_once(toolkit, whose, theirs)


@functools.cache
def _say_once(toolkit: str, whose: str, theirs: str) -> None:
    log.warning("%s CUDA release is %s, torch's is %s: minor releases go together, nothing needs to be done", whose, toolkit, theirs)
