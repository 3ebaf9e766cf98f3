"""Has a tensor changed? Sums that are several times cheaper than encoding it again, for writers that nobody announces."""
import torch

ROW_WORDS = 32              # 64-bit words per sum: 256 bytes, 128 BF16 elements; the fingerprint has 1/32 of the tensor's size


def fingerprint(data: torch.Tensor) -> torch.Tensor:
    """int64 [about n / 128] of a contiguous 1-D tensor [n] of 2-byte elements: equal for equal bits.

    Sums of 64-bit words over rows of 256 bytes. Different with certainty when a single word of a row differs; not seen is what leaves
    every row's sum as it was: a permutation of whole words inside a row, or changes that cancel modulo 2^64. Elements before the first
    and after the last whole row are kept as they are.
    """
    halves = data.detach().view(torch.int16)
    num, lead, size = shape_of(data)
    end = lead + (num - size) // (4 * ROW_WORDS - 1) * (4 * ROW_WORDS)
    if end == lead:
        return halves.to(torch.int64)
    sums = halves[lead:end].view(torch.int64).view(-1, ROW_WORDS).sum(1)
    return torch.cat([sums, halves[:lead].to(torch.int64), halves[end:].to(torch.int64)])


def shape_of(data: torch.Tensor) -> tuple[int, int, int]:
    """(``data``'s number of 2-byte elements, those before its first row, the fingerprint's length)."""
    per_element = data.element_size() // 2
    num, lead = data.numel() * per_element, -data.storage_offset() * per_element % 4       # rows start where 64-bit words of the storage do
    return num, lead, num - max(0, num - lead) // (4 * ROW_WORDS) * (4 * ROW_WORDS - 1)


def fingerprint_bytes(numel: int) -> int:
    """Upper bound of a fingerprint's size for ``numel`` elements."""
    return 8 * (numel // (4 * ROW_WORDS) + 4 * ROW_WORDS + 3)
