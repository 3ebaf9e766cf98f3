"""Libraries built ahead of time, beside the package: what a wheel made with ZIPSCAPE_PREBUILD=1 brings to machines without a compiler.

``python -m zipscape.op_builder.prebuilt 1`` builds them into the package it is run from (setup.py does so for a wheel).
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from zipscape.errors import BuildError, describe
from zipscape.op_builder import cuda_arch, cuda_toolkit, toolchain


def folder() -> Path:
    return Path(__file__).resolve().parent / "prebuilt"


@dataclass(frozen=True)
class Record:
    """How a library was built; written beside it. arches: as TORCH_CUDA_ARCH_LIST has them, "" for a C++ library; toolkit: the CUDA
    toolkit's release, "" likewise."""
    compiler: str
    toolkit: str = ""
    arches: str = ""

    def write(self, library: Path) -> None:
        library.with_suffix(".json").write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def of(cls, library: Path) -> "Record":
        """Raises BuildError if there is none that can be read."""
        try:
            return cls(**json.loads(library.with_suffix(".json").read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise BuildError(describe("A prebuilt library has no record of how it was built", got=str(error), where=str(library),
                                      todo="install zipscape again")) from None

    def code_for(self) -> tuple:
        """The GPU architectures."""
        return cuda_arch.parse(self.arches) if self.arches else ()

    def check(self) -> None:
        """Raises BuildError unless the library suits this process: its torch, its visible GPUs."""
        if self.toolkit:
            cuda_toolkit.check(self.toolkit, "the prebuilt library's")
            for capability in cuda_arch.visible():
                if capability >= cuda_arch.OLDEST:
                    cuda_arch.check(self.code_for(), capability, "a GPU of this machine")


def build(what: str, into: Path | None = None) -> list:
    """Builds ahead of time; what: "1" (C++, and CUDA where nvcc is found) or a list of "cpu", "cuda". Lines of what was done.

    Raises BuildError if a library cannot be built that was asked for.
    """
    from zipscape.op_builder import scape, zipccl
    libraries = {"cpu": (zipccl.ZIPCCL_CPU, scape.SCAPE_CPU), "cuda": (zipccl.ZIPCCL_CUDA, zipccl.ZIPCCL_SYMMETRIC, scape.SCAPE_CUDA)}
    words = list(libraries) if what == "1" else [word.strip() for word in what.split(",")]
    wrong = [word for word in words if word not in libraries]
    if wrong:
        raise BuildError(describe("ZIPSCAPE_PREBUILD names no library of ours", got=what, expected='"1", "cpu", "cuda" or "cpu,cuda"'))
    lines = []
    for library in (library for word in words for library in libraries[word]):
        if what == "1":
            try:
                toolchain.find(library.compiler)
            except BuildError as error:
                if not library.is_cuda:
                    raise
                lines.append(f"{library.name}: NOT prebuilt. {error}")
                continue
        record = Record.of(library.prebuild(into))
        lines.append(f"{library.name}: prebuilt by {record.compiler}" + (f", code for {record.arches}" if record.arches else ""))
    return lines


if __name__ == "__main__":
    try:
        print("\n".join(build(sys.argv[1])), flush=True)
    except BuildError as failure:
        sys.exit(f"ZIPSCAPE_PREBUILD: {failure}")
