"""Comparison by bits, and data that makes errors visible: position dependent, random, adversarial."""
import torch

_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_ints(t: torch.Tensor) -> torch.Tensor:
    """The bit patterns, flat."""
    return t.detach().contiguous().view(-1).view(_INT[t.element_size()])


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor, where: str = "") -> None:
    """Equal shape, dtype and bits; names the first differing index with both patterns."""
    assert got.dtype == expected.dtype and got.shape == expected.shape, f"{where}: {got.dtype} {tuple(got.shape)}"
    a, b = as_ints(got), as_ints(expected)
    if not torch.equal(a, b):
        i = int((a != b).nonzero()[0])
        mask = (1 << 8 * got.element_size()) - 1
        raise AssertionError(f"{where}: {int((a != b).sum())} of {a.numel()} elements differ, first at {i}: "
                             f"got {int(a[i]) & mask:#x}, expected {int(b[i]) & mask:#x}")


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)          # the same data on every device


def gaussian(numel: int, seed: int, dtype=torch.bfloat16, sigma: float = 0.02) -> torch.Tensor:
    data = torch.randn(numel, generator=_generator(seed), device="cpu")
    return (data * sigma).to(dtype).to(torch.get_default_device())


def random_bits(numel: int, seed: int, dtype=torch.bfloat16) -> torch.Tensor:
    """Every bit pattern equally likely: NaNs with payloads, infinities and denormals included."""
    itemsize = torch.empty((), dtype=dtype).element_size()
    data = torch.randint(0, 256, (numel * itemsize,), generator=_generator(seed), dtype=torch.uint8, device="cpu")
    return data.view(dtype).to(torch.get_default_device())


def specials(numel: int, seed: int) -> torch.Tensor:
    """BF16 Gaussians sprinkled with +-0, +-Inf, NaN payloads, denormals and the largest finite values."""
    x = gaussian(numel, seed)
    patterns = torch.tensor([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001, 0x8001, 0x007F, 0x7F7F, 0xFF7F],
                            dtype=torch.int32, device="cpu").to(torch.int16)
    generator = _generator(seed + 1)
    at = torch.randperm(numel, generator=generator, device="cpu")[:max(1, numel // 20)]
    chosen = patterns[torch.randint(0, len(patterns), (at.numel(),), generator=generator, device="cpu")]
    x.view(torch.int16)[at.to(x.device)] = chosen.to(x.device)
    return x


def all_bf16_patterns() -> torch.Tensor:
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
