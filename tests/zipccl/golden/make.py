"""Writes the golden frames of the current format version: ``python -m tests.zipccl.golden.make``.

A file that exists is never rewritten, only compared: frames of a released version must stay readable for ever. A change of the
format is a new version, with a new folder. Exit status 1 when an existing file differs from what the reference kernels make today.
"""
import sys
import zlib
from pathlib import Path

from ds_zipccl.codec.format import VERSION
from tests.zipccl.golden.cases import CASES, golden_frame

FOLDER = Path(__file__).parent


def path_of(name: str, version: int = VERSION) -> Path:
    return FOLDER / f"v{version}" / f"{name}.frame.z"


def read(path: Path) -> bytes:
    """The frame in a golden file, which is zlib-compressed to keep the checkout small."""
    return zlib.decompress(path.read_bytes())


def main() -> int:
    differing = []
    for case in CASES:
        path, frame = path_of(case.name), bytes(golden_frame(case, "reference").tolist())
        if path.exists():
            differing += [path.name] if read(path) != frame else []
            continue
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(zlib.compress(frame, 9))
        print(f"written: {path.relative_to(FOLDER)} ({len(frame)} bytes of frame)")
    if differing:
        print(f"NOT rewritten, they differ from what is encoded now: {', '.join(differing)}", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
