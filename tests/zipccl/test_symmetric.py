"""The one-sided transport without a GPU: emulated ranks in one process take turns, one step each; results against the inputs' bits and
the rank-order sum. Races, and what links do, need GPUs."""
import ctypes
import itertools
import subprocess

import pytest
import torch

from ds_zipccl.codec.dtypes import TABLE
from ds_zipccl.codec.format import TILE_ELEMS, layout
from ds_zipccl.collectives.ring import Ring
from ds_zipccl.collectives.symmetric import NUM_IN_RING, OneSided, Way, _Job, plan, slot_bytes, why_not
from ds_zipccl.kernels.cuda_calls import CudaCalls, workspace_words
from ds_zipccl.kernels.rank_order import sum_in_order
from ds_zipccl.kernels.symmetric_calls import SymmetricCalls
from zipscape.op_builder import toolchain
from zipscape.op_builder.base import csrc_dir
from zipscape.op_builder.zipccl import ZIPCCL_CUDA, ZIPCCL_SYMMETRIC

BITS = {2: torch.int16, 4: torch.int32}
WAYS = pytest.mark.parametrize("way", Way, ids=lambda way: way.value)
PART_BYTES = 2 * TILE_ELEMS * 2                            # two tiles of BF16
TIMEOUT_NS = 10_000_000                                    # of the emulated clock, which moves when it is read


@pytest.fixture(scope="module")
def libraries(tmp_path_factory) -> tuple[CudaCalls, SymmetricCalls]:
    folder, made = tmp_path_factory.mktemp("emulated"), []
    for library, calls in ((ZIPCCL_CUDA, CudaCalls), (ZIPCCL_SYMMETRIC, SymmetricCalls)):
        target = folder / f"{library.name}.so"
        subprocess.run([*toolchain.find("c++"), "-x", "c++", "-std=c++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off",
                        "-fno-strict-aliasing", "-DZIPSCAPE_EMULATE", f"-I{csrc_dir()}", str(library.source_paths()[0]),
                        "-o", str(target)], check=True, timeout=300)
        made.append(calls(ctypes.CDLL(str(target))))
    return tuple(made)


class Ranks:
    """``world_size`` emulated ranks with ``room`` bytes of ring each."""

    def __init__(self, libraries, world_size: int, room: int):
        self.codec, self.calls = libraries
        self.world_size, self.errors = world_size, torch.zeros(world_size, dtype=torch.int32)
        self.first = self.calls.words_bytes
        self.memory = [torch.full((self.first + room + 128,), 0xA5, dtype=torch.uint8) for _ in range(world_size)]
        for memory in self.memory:
            memory[:self.first] = 0
        self.addresses = [-(-memory.data_ptr() // 128) * 128 for memory in self.memory]
        for memory, address in zip(self.memory, self.addresses, strict=True):
            memory[address - memory.data_ptr():][:self.first] = 0
        self.scratch = [torch.zeros(self.calls.scratch_bytes, dtype=torch.uint8) for _ in range(world_size)]
        self.engines = [self.calls.open(rank, self.addresses, self.scratch[rank].data_ptr(), self.errors[rank:].data_ptr(), TIMEOUT_NS)
                        for rank in range(world_size)]
        self.ends = [OneSided(self.engines[rank], self._encode, rank, self.addresses, self.first, self.first + room)
                     for rank in range(world_size)]
        self.room, self.workspace, self.num_calls = self.ends[0].ring.room, torch.zeros(4096, dtype=torch.int64), 0
        self.spill_per_tile, self.stream = 64, 0

    def _encode(self, g, x, row_stride, frames, frame_stride, num_rows, skip, stream):
        assert workspace_words(num_rows, g) <= self.workspace.numel()
        status = torch.zeros(1, dtype=torch.int32)
        self.codec.encode(g, x, row_stride, frames, frame_stride, num_rows, skip, status.data_ptr(), self.workspace.data_ptr(), stream)

    def run(self, jobs: list[_Job], dtype, row_numel: int, way: Way, order=None) -> None:
        parts = plan(dtype, row_numel, self.world_size, jobs[0].row_stride == 0, way, self.spill_per_tile, PART_BYTES, self.room)
        assert parts and sum(part.g.numel for part in parts) == row_numel
        steps = [end.messages(job, parts, way, self.stream) for end, job in zip(self.ends, jobs, strict=True)]
        ranks = list(order or range(self.world_size))
        for _ in itertools.takewhile(bool, iter(lambda: [r for r in ranks if next(steps[r], "over") != "over"], None)):
            pass
        self.num_calls += 1
        for end in self.ends:
            end.end(self.num_calls)

    def all_gather(self, way: Way, data: list[torch.Tensor]) -> list[torch.Tensor]:
        n, item = data[0].numel(), data[0].element_size()
        outs = [torch.full((self.world_size, n + 1), 3, dtype=x.dtype) for x in data]      # a gap between rows
        self.run([_Job(x.data_ptr(), 0, out.data_ptr(), (n + 1) * item) for x, out in zip(data, outs, strict=True)], data[0].dtype, n, way)
        return outs

    def all_to_all(self, way: Way, data: list[torch.Tensor]) -> list[torch.Tensor]:
        n, item = data[0].shape[1], data[0].element_size()
        outs = [torch.full_like(x, 3) for x in data]
        self.run([_Job(x.data_ptr(), n * item, out.data_ptr(), n * item) for x, out in zip(data, outs, strict=True)], data[0].dtype, n, way)
        return outs

    def reduce_scatter(self, way: Way, data: list[torch.Tensor]) -> list[torch.Tensor]:
        n, item = data[0].shape[1], data[0].element_size()
        outs = [torch.full_like(x[0], 3) for x in data]
        self.run([_Job(x.data_ptr(), n * item, out.data_ptr(), 0, x[rank].data_ptr()) for rank, (x, out) in
                  enumerate(zip(data, outs, strict=True))], data[0].dtype, n, way)
        return outs


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(BITS[a.element_size()]), b.contiguous().view(BITS[b.element_size()]))


def gaussians(seed: int, shape, dtype) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def random_bits(seed: int, shape, dtype) -> torch.Tensor:
    """Data that does not compress: every frame overflows."""
    width = 8 * dtype.itemsize - 1
    bits = torch.randint(-(1 << width), 1 << width, shape, generator=torch.Generator().manual_seed(seed))
    return bits.to(BITS[dtype.itemsize]).view(dtype)


def check_all(ranks: Ranks, way: Way, n: int, dtype, makers, seed: int) -> None:
    """The three collectives; ``makers[r]`` makes rank r's data."""
    world = ranks.world_size
    pieces = [makers[r](seed + r, (n,), dtype) for r in range(world)]
    for rank, out in enumerate(ranks.all_gather(way, pieces)):
        for r in range(world):
            assert r == rank or same_bits(out[r, :n], pieces[r]), (rank, r)
        assert bool((out[:, n] == 3).all()), "nothing may be written behind a row"
    rows = [makers[r](seed + 50 + r, (world, n), dtype) for r in range(world)]
    for rank, out in enumerate(ranks.all_to_all(way, rows)):
        for r in range(world):
            assert r == rank or same_bits(out[r], rows[r][rank]), (rank, r)
    for rank, out in enumerate(ranks.reduce_scatter(way, rows)):
        expected = torch.empty_like(out)
        sum_in_order([rows[r][rank] for r in range(world)], expected)
        assert same_bits(out, expected), rank
    assert not ranks.errors.any()


@WAYS
@pytest.mark.parametrize("world_size", [2, 3])
def test_results_are_exact(libraries, way, world_size):
    """Calls of many sizes over one ring, so that places are used again and again at other offsets; data changes with every call."""
    ranks = Ranks(libraries, world_size, NUM_IN_RING * 12 * world_size * TILE_ELEMS)
    for i, n in enumerate((1, 3, 1024, 70001, TILE_ELEMS, 5 * TILE_ELEMS + 77, 2, 40000)):
        check_all(ranks, way, n, torch.bfloat16, [gaussians] * world_size, 100 * i)
    assert ranks.ends[0].ring.num_messages > 2 * NUM_IN_RING


@WAYS
@pytest.mark.parametrize("dtype", TABLE[1:], ids=lambda row: row.name)
def test_other_dtypes(libraries, way, dtype):
    ranks = Ranks(libraries, 2, NUM_IN_RING * 20 * TILE_ELEMS)
    check_all(ranks, way, 50001, dtype.torch_dtype, [gaussians] * 2, 7)


@WAYS
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_overflows_comes_raw(libraries, way, world_size):
    """Of one rank, of all, and none again: without a word to any host."""
    ranks = Ranks(libraries, world_size, NUM_IN_RING * 12 * world_size * TILE_ELEMS)
    for i, makers in enumerate(([random_bits] + [gaussians] * (world_size - 1), [random_bits] * world_size, [gaussians] * world_size)):
        for n in (5, 2 * TILE_ELEMS + 1500):
            check_all(ranks, way, n, torch.bfloat16, makers, 1000 * i + n)


@WAYS
def test_some_parts_overflow(libraries, way):
    """Of a call in parts: parts are told apart by the receiver alone."""
    ranks = Ranks(libraries, 2, NUM_IN_RING * 24 * TILE_ELEMS)

    def mixed(seed, shape, dtype):
        data = gaussians(seed, shape, dtype)
        data[..., 2 * TILE_ELEMS:3 * TILE_ELEMS] = random_bits(seed, (*shape[:-1], TILE_ELEMS), dtype)
        return data

    check_all(ranks, way, 7 * TILE_ELEMS + 9, torch.bfloat16, [mixed, gaussians], 3)


def test_frames_made_beforehand(libraries):
    ranks, n = Ranks(libraries, 3, NUM_IN_RING * 24 * TILE_ELEMS), 5 * TILE_ELEMS + 11
    data = [gaussians(r, (n,), torch.bfloat16) for r in range(3)]
    parts = plan(torch.bfloat16, n, 3, True, Way.COPY, 64, PART_BYTES, ranks.room)
    frames = [[torch.zeros(part.frame_stride + 16, dtype=torch.uint8) for part in parts] for _ in data]
    starts = [tuple(-(-f.data_ptr() // 16) * 16 for f in mine) for mine in frames]
    for x, mine in zip(data, starts, strict=True):
        for part, frame in zip(parts, mine, strict=True):
            ranks._encode(part.g, x.data_ptr() + 2 * part.start, 0, frame, part.frame_stride, 1, -1, 0)
    for _ in range(3):                                     # they are not used up
        outs = [torch.zeros(3, n, dtype=torch.bfloat16) for _ in data]
        ranks.run([_Job(x.data_ptr(), 0, out.data_ptr(), 2 * n, made=mine) for x, out, mine in zip(data, outs, starts, strict=True)],
                  torch.bfloat16, n, Way.COPY)
        for rank, out in enumerate(outs):
            assert all(r == rank or same_bits(out[r], data[r]) for r in range(3))
    assert not ranks.errors.any()


@WAYS
def test_calls_on_two_streams_claim_places_each(libraries, way):
    """A place that one stream waited for is not free for another one."""
    ranks = Ranks(libraries, 2, NUM_IN_RING * 4 * TILE_ELEMS)
    claims = []
    engine = ranks.ends[0]._engine
    claim, engine.claim = engine.claim, lambda message, stream: (claims.append((message, stream)), claim(message, stream))
    x, out = gaussians(1, (TILE_ELEMS,), torch.bfloat16), torch.zeros(2, TILE_ELEMS, dtype=torch.bfloat16)
    job = _Job(x.data_ptr(), 0, out.data_ptr(), 2 * TILE_ELEMS)
    for call in range(40):
        ranks.stream = call % 2 + 1
        ranks.run([job, job], torch.bfloat16, TILE_ELEMS, way)
    known = {1: 0, 2: 0}
    for message, stream in claims:
        assert message > known[stream]
        known[stream] = message
    assert abs(known[1] - known[2]) <= 2 and known[1] > 20


@WAYS
def test_a_peer_that_does_not_send_is_reported(libraries, way):
    """The wait ends, and says so: on a GPU it traps."""
    ranks = Ranks(libraries, 2, NUM_IN_RING * 12 * TILE_ELEMS)
    x, out = gaussians(1, (100,), torch.bfloat16), torch.zeros(2, 100, dtype=torch.bfloat16)
    parts = plan(torch.bfloat16, 100, 2, True, way, 64, PART_BYTES, ranks.room)
    for _ in ranks.ends[0].messages(_Job(x.data_ptr(), 0, out.data_ptr(), 200), parts, way, 0):
        pass
    assert int(ranks.errors[0]) & 32


@pytest.mark.parametrize("sizes", [(128, 256, 128), (1000, 128, 128, 700), (300,)])
def test_ring_names_the_last_message_that_had_the_place(sizes):
    ring, room, taken, claimed = Ring(128, 2064), 2064, {}, 0
    for i, size in zip(range(200), itertools.cycle(sizes), strict=False):
        message, offset, before = ring.take(size)
        assert message == i + 1 and offset % 128 == 0 and 128 <= offset and offset + size <= 128 + room
        claimed = max(claimed, before)                     # by this message or an earlier one
        overlapping = [m for m, (low, high) in taken.items() if low < offset + size and offset < high and m > claimed]
        assert not overlapping, "a place is given away while an older message, not named, has it"
        taken[message] = offset, offset + size
        assert before < message
    assert claimed > 150


def record(host="a", uuid="0", seen=()) -> dict:
    return {"host": host, "uuid": uuid, "peers": dict(seen)}


def test_who_can_use_it():
    """The same answer on every rank, from all ranks' records."""
    both = [record(uuid="0", seen=[("1", True)]), record(uuid="1", seen=[("0", True)])]
    assert why_not(both, 64) is None
    assert why_not([both[0], record("b", "1", [("0", True)])], 64) == "hosts"
    assert why_not([both[0], record(uuid="1", seen=[("0", False)])], 64) == "no_peer_access"
    assert why_not([both[0], record(uuid="1")], 64) == "no_peer_access"                   # CUDA_VISIBLE_DEVICES hides the other one
    assert why_not([record(uuid="0"), record(uuid="0")], 64) == "same_gpu"
    assert why_not(both, 1) == "too_many_ranks"
    assert why_not([both[0], {**both[1], "error": "no nvcc"}], 64) == "not_built"


def test_ring_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="does not fit"):
        Ring(0, 1024).take(1025)


def test_parts_cover_rows_with_whole_tiles():
    for n in (1, TILE_ELEMS, 10 * TILE_ELEMS + 3):
        for way in Way:
            parts = plan(torch.bfloat16, n, 2, False, way, 64, PART_BYTES, 1 << 24)
            assert [part.start for part in parts] == list(range(0, n, 2 * TILE_ELEMS)) and sum(part.g.numel for part in parts) == n
            assert all(NUM_IN_RING * part.message_bytes <= 1 << 24 for part in parts)
    assert plan(torch.bfloat16, TILE_ELEMS, 2, False, Way.COPY, 64, PART_BYTES, 1 << 17) == ()
    for numel in (1, 1000, TILE_ELEMS + 1):
        g = layout(TABLE[0], numel)
        assert slot_bytes(g) >= max(g.frame_bytes, 128 + -(-numel // 1024) * 2048)
