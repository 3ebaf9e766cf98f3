"""CRC-32 of a tensor's bytes, the same number everywhere: by zlib on a CPU, by torch operators on another device.

CRC-32/ISO-HDLC is the checksum of zlib, gzip and PNG (reflected polynomial EDB88320, start and end XOR FFFFFFFF).
"""
import functools
import zlib

import torch

NONE, CRC32 = 0, 1                           # the frame header's checksum kinds (docs/format.md, section 3)
_POLYNOMIAL = 0xEDB88320
_ONES = 0xFFFFFFFF
_PIECE_BYTES = 1 << 26                       # the folding below takes 2 to 3 times this much memory


def crc32(data: torch.Tensor, start: int = 0) -> int:
    """CRC-32 of contiguous uint8 ``data`` [bytes]; ``start`` is the CRC of what came before (0: nothing did)."""
    if data.device.type == "cpu":
        return zlib.crc32(memoryview(data.numpy()), start)
    return crc32_by_folding(data, start)


def crc32_by_folding(data: torch.Tensor, start: int = 0) -> int:
    """The same, in parallel on the data's device.

    The register after 32-bit words w[0..n-1] is the sum over i of w[i] x^(32 (n - i)), modulo the polynomial, over
    GF(2). So neighbours fold together, left * x^(32 * distance) + right, until one word is left.
    """
    whole = data.numel() // 4 * 4
    register = start ^ _ONES
    for first in range(0, whole, _PIECE_BYTES):
        register = _fold(data[first:min(first + _PIECE_BYTES, whole)], register)
    return zlib.crc32(bytes(data[whole:].tolist()), register ^ _ONES)


def _fold(piece: torch.Tensor, register: int) -> int:
    """The register after the words of ``piece`` (a positive multiple of 4 bytes)."""
    num_words = piece.numel() // 4
    levels = (num_words - 1).bit_length()
    words = torch.zeros(1 << levels, dtype=torch.int32, device=piece.device)      # zeros in front change nothing
    words.view(torch.uint8)[-piece.numel():] = piece
    words[-num_words] ^= _signed(register)
    for level in range(levels):
        words = _times_power(words[0::2], level).bitwise_xor_(words[1::2])
    return int(_times_power(words, 0)) & _ONES


def _times_power(words: torch.Tensor, level: int) -> torch.Tensor:
    """words * x^(32 * 2^level)"""
    tables = _tables(level, words.device)
    product = tables[0].index_select(0, words & 255)
    for i in (1, 2, 3):
        product ^= tables[i].index_select(0, words >> 8 * i & 255)
    return product


@functools.cache
def _tables(level: int, device: torch.device) -> torch.Tensor:
    """int32 [4, 256]: the products of x^(32 * 2^level) with each value of each byte of a word."""
    columns = _power(level)
    rows = [[_signed(_apply(columns, value << 8 * i)) for value in range(256)] for i in range(4)]
    return torch.tensor(rows, dtype=torch.int32, device=device)


@functools.cache
def _power(level: int) -> tuple[int, ...]:
    """The map w -> w * x^(32 * 2^level) as the images of the 32 bits."""
    if level >= 0:
        half = _power(level - 1)
        return tuple(_apply(half, image) for image in half)
    columns = (_POLYNOMIAL, *(1 << i for i in range(31)))                         # x^1, reflected: bit 0 is x^31
    for _ in range(4):
        columns = tuple(_apply(columns, image) for image in columns)
    return columns                                                                # x^16 = x^(32 * 2^-1)


def _apply(columns: tuple[int, ...], word: int) -> int:
    image = 0
    for bit, column in enumerate(columns):
        if word >> bit & 1:
            image ^= column
    return image


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
