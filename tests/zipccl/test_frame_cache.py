"""Frames that are kept (collectives/frame_cache.py, cached.py, fingerprint.py), without a host framework."""
import pytest
import torch

from ds_zipccl.collectives.fingerprint import fingerprint, fingerprint_bytes
from tests.helpers.ranks import assert_ok, case_names

MODULE = "tests.zipccl.frame_cache_cases"
ONE_SIDED = "tests.zipccl.frame_cache_one_sided_cases"
BATCHES, RANDOM = "tests.zipccl.frame_cache_batch_cases", "tests.zipccl.frame_cache_random_cases"
CASES, ONE_SIDED_CASES, BATCH_CASES, RANDOM_CASES = case_names(MODULE), case_names(ONE_SIDED), case_names(BATCHES), case_names(RANDOM)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks(world_size, case):
    assert_ok(MODULE, CASES, world_size, case)


@pytest.mark.parametrize("case", ONE_SIDED_CASES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_one_sided(world_size, case):
    assert_ok(ONE_SIDED, ONE_SIDED_CASES, world_size, case)


@pytest.mark.parametrize("case", BATCH_CASES)
def test_all_at_once(case):
    assert_ok(BATCHES, BATCH_CASES, 2, case)


@pytest.mark.parametrize("case", RANDOM_CASES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_anything_that_can_happen(world_size, case):
    assert_ok(RANDOM, RANDOM_CASES, world_size, case)


@pytest.mark.parametrize("numel", [0, 1, 3, 127, 128, 129, 1000, 4096, 70001])
@pytest.mark.parametrize("offset", [0, 1, 2, 3, 5])
def test_fingerprint_sees_every_bit(numel, offset):
    """Any flipped bit, wherever the tensor starts; equal bits at another address have the same one where words start alike."""
    store = torch.randint(-32768, 32767, (numel + 16,), dtype=torch.int16, generator=torch.Generator().manual_seed(numel))
    data = store.view(torch.bfloat16)[offset:offset + numel]
    before = fingerprint(data)
    assert before.nbytes <= fingerprint_bytes(numel)
    assert torch.equal(before, fingerprint(data))
    for position in {0, 1, numel // 3, numel // 2, numel - 2, numel - 1} & set(range(numel)):
        for bit in (0, 7, 14):
            data.view(torch.int16)[position] ^= 1 << bit
            assert not torch.equal(fingerprint(data), before), (position, bit)
            data.view(torch.int16)[position] ^= 1 << bit
    assert torch.equal(before, fingerprint(data))


def test_fingerprint_sees_rows_and_columns_change_places():
    """Sums over all would not: permuted heads, experts, neurons."""
    weight = (torch.randn(64, 512, generator=torch.Generator().manual_seed(1)) * 0.02).to(torch.bfloat16)
    before = fingerprint(weight.view(-1))
    for changed in (weight.flip(0), weight[:, torch.randperm(512, generator=torch.Generator().manual_seed(2))],
                    weight.view(64, 4, 128).flip(1).reshape(64, 512), weight.neg(), weight.t().contiguous()):
        assert not torch.equal(fingerprint(changed.reshape(-1)), before)


def test_fingerprint_does_not_see_words_change_places_in_a_row():
    """Its documented limit."""
    data = torch.arange(256, dtype=torch.float32).to(torch.bfloat16)
    moved = data.view(torch.int64).view(-1, 32).flip(1).reshape(-1).view(torch.bfloat16)
    assert not torch.equal(moved, data) and torch.equal(fingerprint(moved), fingerprint(data))
