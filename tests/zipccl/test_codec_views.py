"""Any alignment and strides: views at odd offsets are exact, inputs may be strided, outputs must be contiguous (C14)."""
import pytest
import torch

from ds_zipccl.codec.codec import Codec, compress, decompress
from tests.helpers.bits import assert_same_bits
from tests.zipccl.codec_cases import BF16, DTYPES, Guarded, data, guarded_copy, unzip, zip_frame


@DTYPES
def test_element_offsets(kernels, dtype):
    """C14: input, frame and output each at offsets 1 to 17 of a larger tensor."""
    for offset in range(1, 18):
        x = data("specials", dtype, 2100 + 53 * offset, offset)
        view = guarded_copy(x, offset)
        assert view.storage_offset() != 0
        frame = zip_frame(view, kernels)
        assert_same_bits(frame, zip_frame(x, kernels), f"{kernels} frame at offset {offset}")
        moved = guarded_copy(frame, offset)
        assert_same_bits(unzip(moved, x, kernels, offset=18 - offset), x, f"{kernels} offset {offset}")


@DTYPES
def test_frames_at_odd_addresses(kernels, dtype):
    """Encoding straight into a frame that is not aligned."""
    x = data("gaussian", dtype, 3000, 1).view(1, -1)
    codec = Codec.of(dtype, 3000, "cpu", kernels=kernels)
    expected, status = codec.empty_frames(1, "cpu"), torch.zeros(1, dtype=torch.int32)
    codec.encode(x, expected, status)
    for offset in range(1, 18):
        frame = Guarded(codec.frame_bytes, offset=offset)
        codec.encode(x, frame.data.view(1, -1), status)
        frame.assert_untouched()
        assert_same_bits(frame.data, expected[0], f"{kernels} offset {offset}")


@DTYPES
def test_odd_splits_of_one_tensor(kernels, dtype):
    """C14: a batch of odd pieces of one flat tensor, decoded into the same odd pieces of another."""
    x, out = data("gaussian", dtype, 20000, 2), Guarded(20000, dtype)
    sizes = [1, 3, 1023, 2049, 7, 4097, 12820]
    assert sum(sizes) == 20000
    for piece, target in zip(x.split(sizes), out.data.split(sizes), strict=True):
        decompress(compress(piece, kernels=kernels), target, kernels=kernels)
    out.assert_untouched()
    assert_same_bits(out.data, x)


def strided(base: torch.Tensor):
    yield "transposed", base.view(60, 100).t()
    yield "every third", base[::3]
    yield "columns", base.view(60, 100)[:, 7:55]
    yield "expanded", base[:100].expand(30, 100)
    yield "flipped halves", base.view(2, 3000).flip(0)
    yield "channels last", base.view(2, 3, 10, 100).to(memory_format=torch.channels_last)
    yield "permuted", base.view(10, 20, 30).permute(2, 0, 1)


@DTYPES
def test_strided_inputs(kernels, dtype):
    """C14: what is compressed is the tensor in its logical order."""
    for name, view in strided(data("gaussian", dtype, 6000, 3)):
        frame = compress(view, kernels=kernels)
        assert_same_bits(frame, compress(view.clone(memory_format=torch.contiguous_format), kernels=kernels), name)
        out = torch.empty(view.shape, dtype=dtype)
        assert_same_bits(decompress(frame, out, kernels=kernels), view.contiguous(), name)


@DTYPES
def test_strided_outputs_are_refused(kernels, dtype):
    """Silently filling a copy would be worse than an error; nothing is written."""
    x = data("gaussian", dtype, 6000, 4)
    for name, view in strided(x.clone()):
        if view.is_contiguous() or name == "expanded":
            continue
        before = view.clone()
        with pytest.raises(ValueError, match="contiguous output"):
            decompress(compress(view, kernels=kernels), view, kernels=kernels)
        assert_same_bits(view.contiguous(), before.contiguous(), name)


def test_a_contiguous_slice_is_filled_in_place(kernels):
    whole, x = data("random bits", BF16, 9000, 5), data("gaussian", BF16, 3000, 6)
    before = whole.clone()
    decompress(compress(x, kernels=kernels), whole.view(3, 3000)[1], kernels=kernels)
    assert_same_bits(whole[3000:6000], x)
    assert_same_bits(torch.cat([whole[:3000], whole[6000:]]), torch.cat([before[:3000], before[6000:]]))
