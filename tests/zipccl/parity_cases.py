"""All implementations write the same frames and read them, in a process of its own as Triton decides at import whether it runs on a CPU:
``python parity_cases.py DTYPE LEVEL EMULATED_CUDA_LIBRARY``."""
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.append(str(Path(__file__).parents[2]))            # for ``tests``; last, so that the installed packages are used

import torch

from ds_zipccl.codec import format as fmt
from ds_zipccl.codec.dtypes import TABLE
from ds_zipccl.errors import FrameError
from ds_zipccl.kernels import impl_cpu, impl_reference, impl_triton
from tests.helpers import interpreted
from tests.helpers.bits import assert_same_bits
from tests.helpers.emulated import EmulatedCuda
from tests.zipccl.codec_cases import data
from zipscape.errors import BuildError
from zipscape.op_builder.zipccl import ZIPCCL_CPU

KINDS = ("gaussian", "10% zeros", "specials")              # a row each
CAPACITIES = {1: (20, 4096), 2: (60, 8192)}                # bytes of slots a block, of sub-pool a tile: tiles spill


def implementations(library: Path) -> dict:
    sets = {"reference": impl_reference, "CUDA, emulated": EmulatedCuda(library), "Triton, interpreted": impl_triton.load()}
    for isa in impl_cpu.ISAS:
        try:
            sets[f"CPU, {isa}"] = impl_cpu.CpuKernels(ZIPCCL_CPU.load(), isa)
        except BuildError as error:
            print(f"CPU, {isa}: {error}")
    return sets


def sound(reader) -> None:
    getattr(reader, "raise_on_error", lambda device: None)("cpu")


def frames_of(writer, x: torch.Tensor, g) -> tuple[torch.Tensor, int]:
    frames, status = torch.full((x.shape[0], fmt.align(g.frame_bytes)), 0xA5, dtype=torch.uint8), torch.full((1,), -1, dtype=torch.int32)
    writer.encode(x, frames, status, g)
    return frames, int(status)


def main():
    interpreted.spare_time()
    dtype, level = next(row for row in TABLE if row.name == sys.argv[1]), int(sys.argv[2])
    sets = implementations(Path(sys.argv[3]))
    numel = 1500
    g = fmt.layout(dtype, numel, *CAPACITIES[level], level=level)
    x = torch.stack([data(kind, dtype.torch_dtype, numel, i) for i, kind in enumerate(KINDS)])
    x[:, 100:140] = -0.0                                   # their sum is -0
    written = {name: frames_of(writer, x, g) for name, writer in sets.items()}
    expected, status = written["reference"]
    assert not status & fmt.OVERFLOW_BIT and status >> 17, "a spill was meant to be, and no overflow"
    total = torch.empty_like(x[0])
    impl_reference.decode_reduce(expected, x[1], 1, total, g)
    for writer, (frames, its_status) in written.items():
        assert its_status == status, (writer, its_status, status)
        assert_same_bits(frames, expected, writer)
    for name, reader in sets.items():                      # of one writer's frames: all have the same bytes
        out = torch.full_like(x, 1.5)
        reader.decode(expected, out, g)
        sound(reader)
        assert_same_bits(out, x, f"{name} reads")
        out = torch.full_like(total, 1.5)
        reader.decode_reduce(expected, x[1], 1, out, g)
        sound(reader)
        assert_same_bits(out, total, f"{name} sums")
    frames = expected.clone()
    frames[2, g.tiles_offset + 18] ^= 4                    # the first block's number of escapes, or of bytes
    for name, reader in sets.items():
        try:
            reader.decode(frames, torch.empty_like(x), g)
            sound(reader)
        except FrameError:
            continue
        raise AssertionError(f"{name} takes a corrupt frame")
    print(f"{len(sets)} implementations: {', '.join(sets)}")


if __name__ == "__main__":
    main()
