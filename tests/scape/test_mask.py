"""Masks: exact counts, the tie rule, both encodings."""
import numpy
import pytest
import torch

from ds_scape.kernels import impl_reference as reference
from ds_scape.sync import mask as masks
from ds_scape.sync import sparse_reduce
from ds_scape.sync.partition import Layout, Segment, TensorSlot, flat_layout
from zipscape.errors import ZipScapeError


def generator(seed):
    return torch.Generator().manual_seed(seed)


def by_sorting(scores, overdue, segments):
    """The rule said in another way: sort by (not overdue, -score, index) and take the first."""
    chosen = [False] * len(scores)
    for start, stop, count in segments:
        order = sorted(range(start, stop), key=lambda i: (not overdue[i], -scores[i], i))
        for i in order[:count]:
            chosen[i] = True
    return torch.tensor(chosen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("levels", [2, 5, 10 ** 6])
def test_selection_is_the_sorted_one(dtype, levels):
    n = 600
    scores = torch.randint(0, levels, (n,), generator=generator(levels)).to(dtype) * 1e-5
    overdue = torch.rand(n, generator=generator(1)) < 0.1
    segments = (Segment(0, 200, 20), Segment(200, 205, 5), Segment(210, 500, 3), Segment(500, 501, 1), Segment(520, 590, 69))
    chosen = masks.select(scores, overdue, segments)
    assert torch.equal(chosen, by_sorting(scores.tolist(), overdue.tolist(), segments))
    for start, stop, count in segments:
        assert int(chosen[start:stop].sum()) == count
    for start, stop in ((205, 210), (501, 520), (590, 600)):
        assert not chosen[start:stop].any(), "padding was selected"


def test_all_zero_scores_take_the_lowest_indices():
    chosen = masks.select(torch.zeros(10), torch.zeros(10, dtype=torch.bool), (Segment(2, 10, 3),))
    assert chosen.nonzero().view(-1).tolist() == [2, 3, 4]


def test_a_segment_that_sends_nothing():
    assert not masks.select(torch.ones(6), torch.ones(6, dtype=torch.bool), (Segment(0, 6, 0),)).any()


def test_zero_scores_come_last_but_overdue_ones_before_all():
    scores = torch.tensor([0.0, 3.0, 0.0, -0.0, 1e-38, float("inf")])
    overdue = torch.tensor([False, False, False, True, False, False])
    assert masks.select(scores, overdue, (Segment(0, 6, 4),)).tolist() == [False, True, False, True, True, True]


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 65535, 65536, 65537, 200001])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.9, 1.0])
def test_encodings_round_trip(numel, share):
    mask = torch.rand(numel, generator=generator(numel)) < share
    packed = reference.pack_bits(mask)
    assert packed.numel() == -(-numel // 8) and torch.equal(reference.unpack_bits(packed, numel), mask)
    ones = int(mask.sum())
    packed = reference.pack_indices(mask, ones + 3)
    assert packed.numel() == reference.index_bytes(numel, ones + 3) and torch.equal(reference.unpack_indices(packed, numel), mask)


def test_bits_are_lowest_first():
    assert reference.pack_bits(torch.tensor([True] + [False] * 8 + [True])).tolist() == [1, 2]


def layout(world_size, density, numel=150_000):
    slots = [TensorSlot(0, numel, 2), TensorSlot(numel, 30, 1)]
    return Layout((flat_layout(slots, numel + 30 + 2 * world_size - (numel + 30) % (2 * world_size), world_size, density),
                   flat_layout([TensorSlot(0, 40, 1)], 48, world_size, density)), world_size)


@pytest.mark.parametrize("density, expected", [(0.1, "bits"), (0.01, "indices"), (0.06, "indices"), (0.07, "bits")])
def test_the_smaller_encoding_is_taken(density, expected):
    codec = masks.MaskCodec(layout(2, density), "auto")
    assert codec.encoding == expected
    sizes = {e: masks.MaskCodec(layout(2, density), e).num_bytes for e in ("bits", "indices")}
    assert codec.num_bytes == min(sizes.values())


@pytest.mark.parametrize("encoding", ["bits", "indices"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_codec_adds_the_dense_tensors(encoding, world_size):
    whole = layout(world_size, 0.05)
    codec, flat = masks.MaskCodec(whole, encoding), whole.flats[0]
    for rank in range(world_size):
        scores = torch.rand(flat.partition_numel, generator=generator(rank))
        chosen = masks.select(scores, scores > 2, flat.segments[rank])
        message = codec.encode(chosen, rank)
        assert message.dtype == torch.uint8 and message.numel() == codec.num_bytes
        (positions,) = codec.decode(message, rank)
        assert torch.equal(positions, chosen.nonzero().view(-1)) and len(positions) == flat.count(rank, dense=False)


@pytest.mark.parametrize("encoding", ["bits", "indices"])
def test_a_corrupt_message_is_an_error(encoding):
    whole = layout(1, 0.05)
    codec, flat = masks.MaskCodec(whole, encoding), whole.flats[0]
    scores = torch.rand(flat.partition_numel, generator=generator(0))
    message = codec.encode(masks.select(scores, scores > 2, flat.segments[0]), 0)
    for position in (0, 1, 3):
        broken = message.clone()
        broken[position] ^= 0x81
        with pytest.raises(ZipScapeError):
            codec.decode(broken, 0)


class LateCounts:
    """Kernels whose counts are waited for, as on a GPU. ``seen``: what happened, in order."""

    def __init__(self):
        self.seen = []

    def unpack_mask(self, *args):
        positions, found = masks.REFERENCE.unpack_mask(*args)
        self.seen.append("unpacked")
        return positions, (self.seen.append("waited") or count for count in found)


def test_all_masks_are_unpacked_before_the_host_waits():
    """And who sent what is corrupt is said."""
    whole, kernels = layout(3, 0.05), LateCounts()
    codec, flat = masks.MaskCodec(whole, "indices", kernels), whole.flats[0]
    chosen = [masks.select(x, x > 2, flat.segments[rank]) for rank, x in enumerate(
        torch.rand(flat.partition_numel, generator=generator(seed)) for seed in range(3))]
    messages = torch.stack([masks.MaskCodec(whole, "indices").encode(mask, rank) for rank, mask in enumerate(chosen)])
    for (positions,), mask in zip(codec.decode_all(messages), chosen, strict=True):
        assert torch.equal(positions, mask.nonzero().view(-1))
    assert kernels.seen == 3 * ["unpacked"] + 3 * ["waited"]
    messages[1, 0] ^= 1
    with pytest.raises(ZipScapeError, match="the partition of rank 1"):
        codec.decode_all(messages)


@pytest.mark.parametrize("numel", [100_000, (1 << 31) - 1, 1 << 31, (1 << 31) + 9, (1 << 32) - 1, 1 << 32])
@pytest.mark.parametrize("num", [0, 1, 2, 3, 127, 128, 5000])
def test_positions_are_found_with_and_without_a_sign(num, numel):
    """In the types that such partitions have; from both sides of 2^31, and from one alone."""
    dtype, random = reference.position_dtype((numel,)), numpy.random.default_rng(num)
    for low, high in ((0, numel), (numel // 2, numel), (max(0, numel // 2 - 5000), min(numel, numel // 2 + 5000))):
        positions = numpy.unique(random.integers(low, high, num))
        ends = numpy.concatenate([random.integers(0, numel + 1, 40), positions[:9], positions[-9:] + 1, [0, numel // 2, numel]])
        ends = ends.clip(0, numel)
        found = sparse_reduce.num_below(torch.from_numpy(positions).to(dtype), torch.from_numpy(ends), numel)
        assert found.dtype == torch.int64 and found.tolist() == numpy.searchsorted(positions, ends).tolist()
        assert reference.places(torch.from_numpy(positions).to(dtype)).tolist() == positions.tolist()
