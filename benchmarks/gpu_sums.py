"""Sums of BF16 rows on one GPU, round after round, a copy measured in each: how much of what gpu_codec.py says of a call is the run's.

    python benchmarks/gpu_sums.py [--rounds 6] [--json FILE]

Rows, floors and GPU time as in gpu_codec.py (level 1, CUDA kernels); compress at 16 MiB besides.
"""
import argparse
import json
from pathlib import Path

import gpu_codec
import sum_floor

from ds_zipccl.kernels import impl_cuda


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    impl, sum_floor.triton = impl_cuda.load(), None        # no plain sums beside them
    for i in range(args.rounds):
        for size in (64 * gpu_codec.MIB, 16 * gpu_codec.MIB, 256 * gpu_codec.MIB):
            gpu_codec.row(op="round", number=i)
            copy = gpu_codec.copy_speed(size)
            print(f"round {i}, copy at {size // gpu_codec.MIB} MiB: {copy / 1e9:.0f} GB/s read + written", flush=True)
            if size == 16 * gpu_codec.MIB:
                gpu_codec.speed_of("cuda", impl, gpu_codec.BF16, "gauss", size, copy, 1)
            for rows in (8, 4, 3, 2):
                gpu_codec.reduce_speed_of("cuda", impl, gpu_codec.BF16, rows, size, copy, 1)
        if args.json:
            args.json.write_text(json.dumps(gpu_codec.ROWS))


if __name__ == "__main__":
    main()
