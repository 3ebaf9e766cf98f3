"""What the memory of a GPU gives to a sum over rows that decodes nothing: so many streams in, one out, in Triton.

A copy reads as much as it writes; decode_reduce of 8 rows reads five to six bytes for each that it writes. ``sum_us`` times a kernel with
the second pattern and the same bytes, to stand beside the copy floor.
"""
import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

SHAPES = ((512, 4), (1024, 4), (1024, 8), (2048, 8), (4096, 8))          # words of the output a program, warps


if triton is not None:
    @triton.jit
    def add_streams(own, streams, out, stride, ROWS: tl.constexpr, N: tl.constexpr, PART: tl.constexpr):
        """A program adds to N words of ``own`` the PART words that each of ROWS - 1 streams has for them; all are loaded first."""
        p, i = tl.program_id(0).to(tl.int64), tl.arange(0, N)
        total = tl.load(own + p * N + i)
        places, exists = tl.multiple_of(streams + p * PART, 16) + i, i < PART
        words = ()
        for r in tl.static_range(ROWS - 1):
            words = words + (tl.load(places + r * stride, mask=exists, other=0),)
        for r in tl.static_range(ROWS - 1):
            total += words[r]
        tl.store(out + p * N + i, total)


def sum_us(rows: int, size: int, stream_bytes: int, num_sets: int, graph_us) -> tuple[float, int]:
    """Microseconds of the best shape, and the bytes it moves: an own row of ``size`` bytes, ``rows`` - 1 of ``stream_bytes``, an output of
    ``size``. ``graph_us``: times a list of calls."""
    best, moved = float("inf"), 0
    words, generator = size // 4, torch.Generator("cuda").manual_seed(rows)
    stride = -(-stream_bytes // 512) * 128

    def random(*shape):
        return torch.randint(1 << 20, shape, dtype=torch.int32, device="cuda", generator=generator)

    sets = [(random(words), random(rows - 1, stride), torch.zeros(words, dtype=torch.int32, device="cuda")) for _ in range(num_sets)]
    for n, warps in SHAPES:
        programs = words // n
        part = stream_bytes // programs // 16 * 4          # words, so that every program's start on 16 bytes

        def call(own, streams, out, n=n, warps=warps, programs=programs, part=part):
            add_streams[programs,](own, streams, out, stride, rows, n, part, num_warps=warps)

        for own, streams, out in sets[:1]:
            call(own, streams, out)
            expected = own.view(programs, n).clone()
            expected[:, :part] += streams[:, :programs * part].sum(0, dtype=torch.int32).view(programs, part)
            if not torch.equal(out, expected.view(-1)):
                raise AssertionError(f"the sum of {rows} streams is wrong for programs of {n} words")
        us = graph_us([lambda s=s: call(*s) for s in sets])
        if us < best:
            best, moved = us, 2 * size + 4 * (rows - 1) * part * programs
    return best, moved
