"""Frames and fingerprints of many slots at once (collectives/frame_batch.py), with the CUDA kernels on a CPU, emulated. Whole caches that
work so are in test_frame_cache.py."""
import pytest
import torch

from ds_zipccl.codec.codec import Codec, split_status
from ds_zipccl.collectives.fingerprint import fingerprint, shape_of
from ds_zipccl.collectives.frame_batch import Batch, Prints
from ds_zipccl.collectives.frame_slot import Slot
from ds_zipccl.errors import KernelError
from tests.zipccl.emulated_launcher import launcher_of
from tests.zipccl.symmetric_ranks import gaussians, random_bits

NUMELS = (1, 3, 127, 128, 129, 1000, 4096, 70_001)


@pytest.fixture
def launcher(libraries):
    return launcher_of(libraries[0])


def slots_of(data: list[torch.Tensor]) -> list[Slot]:
    slots = [Slot(str(i), lambda x=x: x, x.numel(), x.dtype) for i, x in enumerate(data)]
    for i, slot in enumerate(slots):
        slot.index = i
    return slots


def parts(numels, seed: int, dtype=torch.bfloat16) -> list[torch.Tensor]:
    """That begin anywhere in one storage."""
    store, ends, found = random_bits(seed, (sum(numels) + 8 * len(numels),), dtype), 0, []
    for i, n in enumerate(numels):
        ends += i % 5
        found.append(store[ends:ends + n])
        ends += n
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fingerprints_are_the_same(launcher, dtype):
    data = parts(NUMELS, 1, dtype)
    slots, stores = slots_of(data), []
    for slot, x in zip(slots, data, strict=True):
        stores.append(torch.full((shape_of(x)[2] + 1,), 77))
        slot.print = stores[-1][:-1]
    assert all(map(Prints.can, slots, data))
    Prints(launcher, slots, data, None).make()
    for slot, x, store in zip(slots, data, stores, strict=True):
        assert torch.equal(slot.print, fingerprint(x)) and store[-1] == 77, "nothing may be written behind"


def test_every_change_is_found_where_it_is(launcher):
    data = parts(NUMELS, 2)
    slots = slots_of(data)
    for slot, x in zip(slots, data, strict=True):
        slot.print = fingerprint(x)
    differs = torch.zeros(len(slots), dtype=torch.bool)
    prints = Prints(launcher, slots, data, differs)
    prints.compare()
    assert not differs.any()
    for i, x in enumerate(data):
        n = x.numel()
        for position in {0, 1, n // 3, n // 2, n - 2, n - 1} & set(range(n)):
            for bit in (0, 14):
                x.view(torch.int16)[position] ^= 1 << bit
                prints.compare()
                assert differs.nonzero().view(-1).tolist() == [i], (i, position, bit)
                x.view(torch.int16)[position] ^= 1 << bit
                differs.zero_()
    prints.compare()
    assert not differs.any() and torch.equal(slots[-1].print, fingerprint(data[-1]))


def test_rows_that_begin_between_words_are_done_one_by_one():
    data = torch.empty(640, dtype=torch.uint8)[2:602].view(torch.bfloat16)
    elsewhere = torch.frombuffer(bytearray(802), dtype=torch.bfloat16, offset=2)         # its storage begins between words
    for x in (data, elsewhere):
        slot = slots_of([x])[0]
        slot.print = fingerprint(x)
        assert Prints.can(slot, x) == (x is data)
        slot.print = slot.print[:-1]
        assert not Prints.can(slot, x)


def test_more_than_a_kernel_takes(launcher):
    """Of many tensors each is done, and what differs is found where it is, in whichever launch."""
    data = parts([130 + i % 7 for i in range(205)], 3)
    slots = slots_of(data)
    for slot, x in zip(slots, data, strict=True):
        slot.print = torch.zeros(shape_of(x)[2], dtype=torch.int64)
    Prints(launcher, slots, data, None).make()
    assert all(torch.equal(slot.print, fingerprint(x)) for slot, x in zip(slots, data, strict=True))
    differs = torch.zeros(len(slots), dtype=torch.bool)
    for i in (0, 99, 100, 204):
        data[i].view(torch.int16)[129] ^= 1
    Prints(launcher, slots, data, differs).compare()
    assert differs.nonzero().view(-1).tolist() == [0, 99, 100, 204]


def test_frames_and_fingerprints_of_many(launcher):
    """Again and again; of one what is in it does not compress, and some words are there already."""
    numels = (5000, 70_001, 33, 40_000)
    data = [gaussians(i, (n + 3,), torch.bfloat16)[i % 3:][:n] for i, n in enumerate(numels)]
    slots = slots_of(data)
    for slot, x in zip(slots, data, strict=True):
        slot.codec = Codec.of(torch.bfloat16, x.numel(), "cpu", spill_per_tile=64)
        slot.frame, slot.print = torch.zeros(slot.codec.frame_bytes, dtype=torch.uint8), torch.zeros(shape_of(x)[2], dtype=torch.int64)
    assert all(map(Batch.can, slots, data))
    words = torch.zeros(len(slots) + 3, dtype=torch.int32)
    for slot in slots:
        slot.index += slot.index > 1                # what has index 2 is not among these
    batch = Batch(launcher, slots, data, words)
    for turn in range(3):
        for i, x in enumerate(data):
            x.copy_((random_bits if turn == 1 and i == 1 else gaussians)(10 * turn + i, (x.numel(),), torch.bfloat16))
        words.zero_()[2] = -7
        batch.run()
        for i, (slot, x) in enumerate(zip(slots, data, strict=True)):
            frame, status = torch.zeros_like(slot.frame), torch.zeros(1, dtype=torch.int32)
            slot.codec.encode(x.view(1, -1), frame.view(1, -1), status)
            assert int(words[slot.index]) == int(status) and split_status(int(status))[0] == (turn == 1 and i == 1)
            assert torch.equal(slot.print, fingerprint(x))
            if i != 1 or turn != 1:
                out = torch.empty_like(x)
                slot.codec.decode(slot.frame.view(1, -1), out.view(1, -1))
                assert torch.equal(slot.frame, frame) and torch.equal(out.view(torch.int16), x.view(torch.int16))
        assert words[[2, -2, -1]].tolist() == [-7, 0, 0], "those of others"
    assert batch.is_of(slots, data, words) and not batch.is_of(slots, data, words.clone()) and not batch.is_of(slots[:-1], data[:-1], words)
    assert not batch.is_of(slots, [*data[:-1], data[-1].clone()], words)
    slots[2].frame = slots[2].frame.clone()
    assert not batch.is_of(slots, data, words)
    slots[0].frame = None
    assert [Batch.can(slot, x) for slot, x in zip(slots, data, strict=True)] == [False, True, True, True]


def test_what_cuda_refuses_is_an_error(launcher, libraries, monkeypatch):
    data = parts((100,), 3)
    slots = slots_of(data)
    slots[0].print = fingerprint(data[0])
    prints = Prints(launcher, slots, data, None)
    monkeypatch.setattr(libraries[0], "library", type("Refusing", (), {"zipccl_cuda_prints": staticmethod(lambda *_: 700)}))
    with pytest.raises(KernelError, match="700"):
        prints.make()
