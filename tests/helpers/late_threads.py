"""Threads of C++ that are late, as on a machine that is busy: each sleeps after it has told others that something is done."""
import subprocess
from pathlib import Path

from zipscape.op_builder import toolchain

LATE_US = 3000
SOURCE = r"""
#include <condition_variable>
#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

void std::condition_variable::notify_all() noexcept {
  static auto real = reinterpret_cast<void (*)(void *)>(dlsym(RTLD_NEXT, "_ZNSt18condition_variable10notify_allEv"));
  real(this);
  if (syscall(SYS_gettid) != getpid()) usleep(LATE_US);
}
"""


def environment(folder: Path) -> dict[str, str]:
    """Variables for a process (Linux, libstdc++); what they name is in ``folder``."""
    library = folder / "late.so"
    subprocess.run([*toolchain.find("c++"), "-x", "c++", "-O1", "-fPIC", "-shared", f"-DLATE_US={LATE_US}", "-", "-o", str(library),
                    "-Wl,--no-as-needed", "-lstdc++", "-ldl"], input=SOURCE, text=True, check=True, timeout=100)
    return {"LD_PRELOAD": str(library)}
