"""The kernels as torch operators: schemas, fakes, torch.compile; and the checks in front of them."""
import pytest
import torch

from ds_zipccl.codec.codec import Codec
from ds_zipccl.errors import KernelError
from ds_zipccl.kernels import loader, ops
from ds_zipccl.kernels.geometry import Geometry
from tests.helpers.bits import assert_same_bits, gaussian


def pieces(numel=5000, rows=2):
    codec = Codec.of(torch.bfloat16, numel, "cpu", kernels="reference")
    x = gaussian(rows * numel, seed=3).view(rows, numel)
    return codec, x, codec.empty_frames(rows, "cpu").zero_(), torch.zeros(1, dtype=torch.int32)


def test_operators_pass_opcheck():
    codec, x, frames, status = pieces()
    flat = codec.geometry.flatten()
    torch.library.opcheck(torch.ops.zipccl.encode.default, (x, frames, status, flat, -1, "reference"))
    codec.encode(x, frames, status)
    torch.library.opcheck(torch.ops.zipccl.decode.default, (frames, torch.empty_like(x), flat, -1, "reference"))
    torch.library.opcheck(torch.ops.zipccl.decode_reduce.default, (frames, x[0].clone(), 0, torch.empty_like(x[0]), flat, "reference"))


def test_compiled_code_sees_operators():
    codec, x, frames, status = pieces()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def there_and_back(x, frames, status):
        out = torch.empty_like(x)
        ops.encode(x, frames, status, codec.geometry, kernels="reference")
        ops.decode(frames, out, codec.geometry, kernels="reference")
        return out

    assert_same_bits(there_and_back(x, frames, status), x)


def test_geometry_survives_flattening():
    geometry = pieces()[0].geometry
    assert Geometry.unflatten(geometry.flatten()) == geometry


def test_skipped_row_is_left_alone():
    codec, x, frames, status = pieces(rows=3)
    frames[1].fill_(0xAA)
    codec.encode(x, frames, status, skip=1)
    assert bool((frames[1] == 0xAA).all())
    out = torch.full_like(x, 7.0)
    codec.decode(frames, out, skip=1)
    assert_same_bits(out[0], x[0])
    assert_same_bits(out[2], x[2])
    assert bool((out[1] == 7).all())


@pytest.mark.parametrize("call, words", [
    (lambda c, x, f, s: ops.encode(x, f[:, :100], s, c.geometry, kernels="reference"), "shapes do not match"),
    (lambda c, x, f, s: ops.encode(x[:, :-1], f, s, c.geometry, kernels="reference"), "shapes do not match"),
    (lambda c, x, f, s: ops.encode(x, f, s, c.geometry, kernels="nonesuch"), "no such kernel set"),
    (lambda c, x, f, s: ops.encode(x.t().contiguous().t(), f, s, c.geometry, kernels="reference"), "not contiguous"),
    (lambda c, x, f, s: ops.decode(f, x[:1], c.geometry, kernels="reference"), "shapes do not match"),
    (lambda c, x, f, s: ops.decode_reduce(f, x[0], 2, x[1], c.geometry, kernels="reference"), "shapes do not match"),
    (lambda c, x, f, s: ops.encode(x.to("meta"), f, s, c.geometry, kernels="reference"), "does not serve this device"),
])
def test_misuse_is_named(call, words):
    with pytest.raises(KernelError, match=words):
        call(*pieces())


def test_explicit_kernels_never_fall_back():
    with pytest.raises(KernelError, match="were asked for"):
        loader.resolve("cuda", "cpu")
    with pytest.raises(KernelError, match="were asked for"):
        loader.resolve("nonesuch", "cpu")
    assert loader.resolve("reference", "cpu") == "reference"
