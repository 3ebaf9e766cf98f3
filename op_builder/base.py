"""Native libraries with a plain C interface: built at first use, cached, loaded through ctypes.

No torch headers are involved, so a build takes seconds and does not depend on torch's version. The cache file's name
holds a hash of everything that goes into it: a changed source, flag or compiler makes another file, never a stale one.
"""

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import tempfile
import threading
import time
from pathlib import Path

from zipscape.errors import BuildError, describe
from zipscape.op_builder import cuda_arch, cuda_toolkit, lock, prebuilt, toolchain

log = logging.getLogger("zipscape")

#: Bit-exactness forbids reassociation and contraction; the machine that built may not be the one that runs, so the
#: choice between SIMD paths is made at run time, inside the sources.
CXX_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-fno-fast-math", "-pthread")
NVCC_FLAGS = ("-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC,-ffp-contract=off", "-fmad=false")
_FORBIDDEN_FLAGS = ("-ffast-math", "-Ofast", "-march=native", "-use_fast_math", "--use_fast_math", "-mtune=native")
_LOCK_WAIT_S = 120.0
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


def csrc_dir() -> Path:
    """Folder of the sources: csrc/ of a checkout, zipscape/csrc of an installed wheel."""
    return Path(__file__).resolve().parent.parent / "csrc"


def cache_dir() -> Path:
    """Folder of built libraries: $ZIPSCAPE_CACHE, else ~/.cache/zipscape."""
    named = os.environ.get("ZIPSCAPE_CACHE")
    return Path(named).absolute() if named else Path.home() / ".cache" / "zipscape"


class NativeLibrary:
    """One shared library made from csrc.

    name: also the file name's first part. sources: paths relative to csrc. flags: added to the standard ones.
    compiler: "c++" or "nvcc". headers: paths relative to csrc that no source includes by name (those that are
    included with quotes are found by themselves). csrc: another source folder, for tests.
    """

    def __init__(self, name, sources, *, flags=(), compiler="c++", headers=(), csrc=None, lock_wait_s=_LOCK_WAIT_S):
        bad = [flag for flag in flags if flag in _FORBIDDEN_FLAGS]
        if bad:
            raise ValueError(describe(f"Native library {name!r} asks for flags that break bit-exactness or portability",
                                      got=" ".join(bad), expected=f"none of {' '.join(_FORBIDDEN_FLAGS)}"))
        self.name = name
        self.compiler = compiler
        self.flags = (*(NVCC_FLAGS if compiler == "nvcc" else CXX_FLAGS), *flags)
        self._sources = tuple(sources)
        self._headers = tuple(headers)
        self._csrc = Path(csrc) if csrc is not None else None
        self._lock_wait_s = lock_wait_s
        self._loading = threading.Lock()
        self._handle = None
        self._error = None
        self._passed_over = ""          # why a prebuilt library that is there is not taken

    @property
    def is_cuda(self) -> bool:
        return self.compiler == "nvcc"

    def arches(self) -> tuple:
        """GPU architectures that the library which load() takes has code for (none for a C++ library). Raises BuildError."""
        path = self._prebuilt()
        return prebuilt.Record.of(path).code_for() if path else self._wanted_arches()

    def _wanted_arches(self) -> tuple:
        return cuda_arch.for_this_machine() if self.is_cuda else ()

    @property
    def csrc(self) -> Path:
        return self._csrc or csrc_dir()

    def source_paths(self) -> list:
        """Absolute paths of the sources."""
        return [self.csrc / source for source in self._sources]

    def load(self) -> ctypes.CDLL:
        """The loaded library, built if need be; the same object on every call. Raises BuildError.

        A build that failed is not tried again in this process: the same error is raised.
        """
        with self._loading:
            if self._error is not None:
                raise self._error
            if self._handle is None:
                try:
                    self._handle = self._open_prebuilt() or self._open(self.build())
                except BuildError as error:
                    self._error = BuildError(f"{error} {self._passed_over}") if self._passed_over else error
                    raise self._error from error.__cause__
                except OSError as error:            # disk full, cache not writable: no reason to end a training either
                    self._error = BuildError(describe(
                        f"The native library {self.name!r} could not be built", got=str(error), where=str(cache_dir()),
                        todo="make room there, or name another folder in the variable ZIPSCAPE_CACHE"))
                    raise self._error from error
            return self._handle

    def build(self) -> Path:
        """Path of the built library; compiles if it is not there. Raises BuildError.

        Any number of processes may call this at once: normally one compiles and the others take its file.
        """
        path = self._prebuilt()
        if path:
            return path
        target = self._target()
        if target.exists():
            return target
        folder = _writable(target.parent)
        target = folder / target.name
        failure = target.with_suffix(".err")
        begin_ns = time.time_ns()

        def failed_meanwhile():
            try:
                return failure.stat().st_mtime_ns >= begin_ns
            except FileNotFoundError:
                return False

        with lock.bounded(target.with_suffix(".lock"), self._lock_wait_s,
                          lambda: target.exists() or failed_meanwhile()):
            if target.exists():
                return target
            if failed_meanwhile():  # the rank that compiled has the compiler's words for all of us
                raise BuildError(failure.read_text())
            try:
                self.compile(target)
            except BuildError as error:
                with contextlib.suppress(OSError):      # the note is for the other processes; ours has the error
                    _write_atomically(failure, str(error))
                raise
        return target

    def available(self) -> tuple:
        """(True, "") if load() can be expected to work, else (False, reason). Compiles nothing."""
        if self._handle is not None:
            return True, ""
        try:
            if self._error is not None:
                raise self._error
            if self.is_cuda:
                cuda_arch.for_everybody()       # a wrong list is an error before any build
            if not self._prebuilt():
                self.source_key()
                self._command()
        except BuildError as error:
            return False, str(error)
        return True, ""

    def built(self):
        """Path of the library if it is built already (beside the package or in the cache), else None."""
        try:
            path = self._prebuilt() or self._target()
        except BuildError:
            return None
        return path if path.exists() else None

    def prebuild(self, folder=None) -> Path:
        """Build ahead of time into `folder` (default: beside the package), where build() looks first.

        The file works on machines without a compiler as long as sources and flags are the same.
        """
        folder = Path(folder) if folder is not None else prebuilt.folder()
        folder.mkdir(parents=True, exist_ok=True)
        arches = cuda_arch.for_everybody() if self.is_cuda else ()
        path = self.compile(folder / f"{self.name}-{self.source_key()}.so", arches)
        version = toolchain.version(tuple(self._command()))
        toolkit = cuda_toolkit.release(version) if self.is_cuda else ""
        prebuilt.Record(f"nvcc {toolkit}" if toolkit else version.splitlines()[0], toolkit, ";".join(map(str, arches))).write(path)
        return path

    def state(self) -> dict:
        """What is there, for a report; compiles nothing.

        Keys: installed ("prebuilt", "compiled" or None), path, compiler, arches (GPU architectures as text, or None), compatible (load()
        can be expected to work), reason (why not, or why a prebuilt library is not taken).
        """
        compatible, reason = self.available()
        row = {"installed": None, "path": None, "compiler": None, "arches": None, "compatible": compatible, "reason": reason or None}
        if not compatible:
            return row
        path = self._prebuilt()
        if path:
            record = prebuilt.Record.of(path)
            row.update(installed="prebuilt", path=str(path), compiler=record.compiler)
        else:
            path = self.built()
            version = toolchain.version(tuple(self._command()))
            row.update(installed="compiled" if path else None, path=str(path) if path else None,
                       compiler=f"nvcc {cuda_toolkit.release(version)}" if self.is_cuda else version.splitlines()[0])
        row.update(arches=cuda_arch.text(self.arches()) or None, reason=self._passed_over or None)
        return row

    def compile(self, target, arches=None) -> Path:
        """Compile to the path `target`, atomically: nobody ever sees half a file. arches: see arches(). Raises BuildError."""
        target, arches = Path(target), self._wanted_arches() if arches is None else arches
        with tempfile.TemporaryDirectory(prefix=f".{self.name}-", dir=target.parent) as folder:
            output = Path(folder) / target.name
            command = [*self._command(), *self.flags, *cuda_arch.flags(arches), f"-I{self.csrc}",
                       *map(str, self.source_paths()), "-o", str(output)]
            toolchain.run(command, what=f"Building the native library {self.name!r}")
            os.replace(output, target)
        return target

    def source_key(self) -> str:
        """Hash of the sources, the headers they include, the flags and the machine type. Raises BuildError."""
        digest = hashlib.sha256()
        for part in (self.name, self.compiler, *self.flags, platform.machine()):
            digest.update(part.encode() + b"\0")
        for path in self._all_files():
            content = path.read_bytes()
            digest.update(f"{path.relative_to(self.csrc).as_posix()} {len(content)}\0".encode() + content)
        return digest.hexdigest()[:24]

    def key(self) -> str:
        """source_key() together with the GPU architectures, the C library's and the compiler's version. Raises BuildError if there is
        no compiler."""
        command = self._command()
        parts = [self.source_key(), *cuda_arch.flags(self._wanted_arches()), *platform.libc_ver(), *command,
                 toolchain.version(tuple(command))]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]

    def _all_files(self) -> list:
        csrc, found = self.csrc, {}
        todo = [csrc / path for path in (*self._sources, *self._headers)]
        missing = [str(path) for path in todo if not path.is_file()]
        if missing:
            raise BuildError(describe(
                f"Sources of the native library {self.name!r} are missing", got=", ".join(missing),
                expected="the folder csrc beside op_builder", todo="install zipscape again from a complete source"))
        while todo:
            path = todo.pop()
            if path in found:
                continue
            found[path] = True
            for name in _INCLUDE.findall(path.read_bytes()):
                candidates = (path.parent / os.fsdecode(name), csrc / os.fsdecode(name))
                todo += [c.resolve() for c in candidates if c.is_file() and csrc.resolve() in c.resolve().parents][:1]
        return sorted(found)

    def _target(self) -> Path:
        return cache_dir() / f"{self.name}-{self.key()}.so"

    def _command(self) -> list:
        """The compiler. Raises BuildError if there is none that goes with torch."""
        command = toolchain.find(self.compiler)
        version = toolchain.version(tuple(command))
        if self.is_cuda:
            cuda_toolkit.check(cuda_toolkit.release(version), f"{command[0]}'s")
        return command

    def _prebuilt(self):
        """The library beside the package, if it is of these sources and suits this machine."""
        if self._handle is None and not self._passed_over:
            self._passed_over = self._refusal()
        path = self._prebuilt_path()
        return path if path.exists() and not self._passed_over else None

    def _prebuilt_path(self) -> Path:
        return prebuilt.folder() / f"{self.name}-{self.source_key()}.so"

    def _refusal(self) -> str:
        """Why the prebuilt library is not taken; "" if it is, or if the package has none at all."""
        path = self._prebuilt_path()
        if not path.exists():
            others = sorted(other.name for other in path.parent.glob(f"{self.name}-*.so"))
            return describe("The prebuilt library is of other sources", got=", ".join(others), expected=path.name) if others else ""
        try:
            prebuilt.Record.of(path).check()
        except BuildError as error:
            return f"The prebuilt library was passed over: {error}"
        return ""

    def _open_prebuilt(self):
        path = self._prebuilt()
        if path:
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:        # for instance an older C library than on the machine that built
                self._passed_over = describe("The prebuilt library was passed over: it cannot be loaded", got=str(error))
                log.warning("%s: %s", self.name, self._passed_over)
        return None

    def _open(self, path) -> ctypes.CDLL:
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            raise BuildError(describe(
                f"The native library {self.name!r} was built but cannot be loaded", got=str(error), where=str(path),
                todo="delete that file; if it comes back, report it with this message")) from error


def _writable(folder: Path) -> Path:
    """The folder, made if need be; where that is not possible (read-only home) one for this process alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    except OSError:
        pass
    return _private_dir()


_private = None


def _private_dir() -> Path:
    global _private
    if _private is None:
        import atexit
        _private = Path(tempfile.mkdtemp(prefix="zipscape-"))
        atexit.register(shutil.rmtree, _private, ignore_errors=True)
    return _private


def _write_atomically(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        file.write(text)
    os.replace(file.name, path)
