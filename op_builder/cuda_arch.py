"""GPU architectures: which ones a CUDA build is for, and whether a build runs on a device.

TORCH_CUDA_ARCH_LIST decides, in the words that torch takes: "8.0;9.0+PTX", "Ampere Hopper". Unset (or "native"), it is the visible
devices, and where there are none sm_80 and sm_90 with PTX for what comes after.
"""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from zipscape.errors import BuildError, describe

VARIABLE = "TORCH_CUDA_ARCH_LIST"
OLDEST = (8, 0)             # what the kernels need
DEFAULT = "8.0;9.0+PTX"
#: As in torch.utils.cpp_extension; those that are older than OLDEST count as known and are left out of a build.
_NAMED = {
    "Kepler+Tesla": "3.7", "Kepler": "3.5+PTX", "Maxwell+Tegra": "5.3", "Maxwell": "5.0;5.2+PTX", "Pascal": "6.0;6.1+PTX",
    "Volta+Tegra": "7.2", "Volta": "7.0+PTX", "Turing": "7.5+PTX", "Ampere+Tegra": "8.7", "Ampere": "8.0;8.6+PTX", "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX", "Blackwell+Tegra": "11.0", "Blackwell": "10.0;10.3;12.0;12.1+PTX"}
_ENTRY = re.compile(r"(\d+)\.(\d)(a?)(\+PTX)?")
_DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg")
_QUERY = """
import ctypes
cuda, count, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int()
if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0:
    for index in range(count.value):
        values = ctypes.c_int(), ctypes.c_int()
        cuda.cuDeviceGet(ctypes.byref(device), index)
        for value, attribute in zip(values, (75, 76)):      # COMPUTE_CAPABILITY_MAJOR, _MINOR
            cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        print(values[0].value, values[1].value)
"""


class Arch(NamedTuple):
    """Code for one architecture. suffix "a": only for exactly that one; ptx: also as PTX, which later ones can run."""
    major: int
    minor: int
    suffix: str = ""
    ptx: bool = False

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}{self.suffix}{'+PTX' if self.ptx else ''}"

    def runs_on(self, capability: tuple) -> bool:
        """capability: (major, minor) of a device. Machine code runs on later minors of its major, PTX on everything later."""
        own = (self.major, self.minor)
        if self.suffix:
            return capability == own
        return own <= capability and (self.ptx or self.major == capability[0])


def parse(text: str) -> tuple:
    """The Archs of a list, sorted, each once. Raises BuildError that names the text if it is malformed, or if all are too old."""
    found = {}
    for word in text.replace(" ", ";").split(";"):
        for entry in _NAMED.get(word, word).split(";"):
            match = _ENTRY.fullmatch(entry)
            if entry and not match:
                raise BuildError(describe(
                    f"{VARIABLE} has an entry that is no GPU architecture", got=f"{word!r} in {text!r}",
                    expected=f'entries like "8.0" or "9.0+PTX", or of {", ".join(_NAMED)}, separated by semicolons or spaces',
                    todo=f"correct or unset {VARIABLE}"))
            if match:
                key = int(match[1]), int(match[2]), match[3]
                found[key] = found.get(key, False) or bool(match[4])
    arches = tuple(Arch(*key, ptx) for key, ptx in sorted(found.items()) if key[:2] >= OLDEST)
    if not arches:
        raise BuildError(describe(f"{VARIABLE} names no GPU that the CUDA kernels can run on", got=repr(text),
                                  expected="at least one of compute capability 8.0 or newer", todo=f"add one, or unset {VARIABLE}"))
    return arches


def named() -> str | None:
    """The variable's value, None where it leaves the choice to us."""
    text = os.environ.get(VARIABLE, "").strip()
    return None if text in ("", "native") else text


def for_everybody() -> tuple:
    """What a build for other machines is made for: the variable's list, else DEFAULT. Raises BuildError like ``parse``."""
    return parse(named() or DEFAULT)


def for_this_machine() -> tuple:
    """What a build for this process is made for. Raises BuildError like ``parse``."""
    text = named()
    if text is None:
        text = ";".join(f"{major}.{minor}" for major, minor in visible() if (major, minor) >= OLDEST)
    return parse(text or DEFAULT)


def visible() -> list:
    """Compute capabilities (major, minor) of the devices this process may use, each once; empty if there is none."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return sorted({torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())})
    return list(_ask_driver(os.environ.get("CUDA_VISIBLE_DEVICES")))


@functools.cache
def _ask_driver(visible_devices) -> tuple:
    """In a process of its own: one that has started CUDA cannot be forked any more."""
    if not any(Path(file).exists() for file in _DEVICE_FILES):
        return ()
    try:
        output = subprocess.run([sys.executable, "-S", "-c", _QUERY], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(sorted({tuple(map(int, line.split())) for line in output.splitlines()}))


def flags(arches: tuple) -> list:
    """nvcc's arguments."""
    found = []
    for arch in arches:
        number = f"{arch.major}{arch.minor}{arch.suffix}"
        code = f"[sm_{number},compute_{number}]" if arch.ptx else f"sm_{number}"
        found += ["-gencode", f"arch=compute_{number},code={code}"]
    return found


def text(arches: tuple) -> str:
    """"8.0, 9.0+PTX"."""
    return ", ".join(map(str, arches))


def check(arches: tuple, capability: tuple, device: str) -> None:
    """Raises BuildError unless a library with this code runs on the device (its name is for the message)."""
    if not any(arch.runs_on(capability) for arch in arches):
        raise BuildError(describe(
            f"The CUDA kernels were not built for {device}", got=f"code for {text(arches)}",
            expected=f"code for compute capability {capability[0]}.{capability[1]}",
            todo=f"add {capability[0]}.{capability[1]} to {VARIABLE} or unset it, and start again: they are then built anew"))
