"""Stored frames: they decode for ever, today's encoders make the same bytes, and the worked example of docs/format.md holds (C10 C16)."""
import re
import struct

import pytest
import torch

from ds_zipccl.codec import format as fmt
from ds_zipccl.codec.analysis import exponents
from ds_zipccl.codec.codec import decompress
from ds_zipccl.errors import FrameError
from tests.helpers.bits import as_ints, assert_same_bits
from tests.zipccl.codec_cases import LEVELS, header_of, unzip, zip_frame
from tests.zipccl.golden.cases import CASES, golden_frame, golden_input
from tests.zipccl.golden.make import FOLDER, path_of, read

BY_NAME = {case.name: case for case in CASES}
STORED = sorted(FOLDER.glob("v*/*.frame.z"))


def tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def with_levels(items, name_of):
    """Parameters with the level of the case of each item's name."""
    return [pytest.param(item, BY_NAME[name_of(item)].level, id=name_of(item)) for item in items]


@pytest.mark.parametrize("path, level", with_levels(STORED, lambda path: path.name.removesuffix(".frame.z")))
def test_every_version_decodes(kernels, path, level):
    """C10: frames written by any released version."""
    x = golden_input(BY_NAME[path.name.removesuffix(".frame.z")])
    assert_same_bits(unzip(tensor(read(path)), x, kernels), x, f"{kernels} {path.name}")


@pytest.mark.parametrize("case, level", with_levels(CASES, lambda case: case.name))
def test_encoders_make_the_stored_bytes(kernels, case, level):
    """C16: catches what a round trip cannot, such as two lanes swapped on both ways."""
    assert_same_bits(golden_frame(case, kernels), tensor(read(path_of(case.name))), f"{kernels} {case.name}")


def test_nothing_is_missing():
    assert {path.name.removesuffix(".frame.z") for path in STORED if path.parent.name == f"v{fmt.VERSION}"} == set(BY_NAME)
    assert {path.parent.name for path in STORED} == {f"v{version}" for version in range(1, fmt.VERSION + 1)}
    text = (FOLDER.parents[2] / "docs" / "format.md").read_text()
    versions = re.findall(r"^\| (\d+) \| zipscape", text[text.index("## 10. Versions"):], re.MULTILINE)
    assert [int(v) for v in versions] == list(range(1, fmt.VERSION + 1))


def test_the_inputs_exercise_the_format():
    """The cases are what their names say: spill, zero mode, spread, escapes, partial blocks, checksums."""
    need = {name: header_of(tensor(read(path_of(name)))).need for name in BY_NAME}
    assert need["bf16_three_blocks"] > 5 and need["bf16_two_tiles_with_spill"] > 6 and need["bf16_worked_example"] == 2
    assert (as_ints(golden_input(BY_NAME["bf16_zero_mode"])) & 0x7F80 == 0).float().mean() > 0.3
    assert read(path_of("bf16_zero_mode"))[fmt.HEADER_BYTES + 17] == 1
    for name in ("bf16_three_blocks", "bf16_spread", "bf16_zero_mode", "bf16_spread_zero_mode"):
        e = exponents(golden_input(BY_NAME[name]))[:1024].double()
        assert (e[e > 0].var(correction=0) > 3) == ("spread" in name), name
    assert header_of(tensor(read(path_of("bf16_checksum")))).mode == fmt.MODE_ZIPPED
    assert header_of(tensor(read(path_of("level2_checksum")))).mode == fmt.MODE_ZIPPED_2
    modes = {name: {read(path_of(name))[fmt.HEADER_BYTES + 17 + 4 * block] for block in range(3)}
             for name in ("level2_three_blocks", "level2_spread", "level2_few_zeros", "level2_many_zeros")}
    assert {0, 1} <= modes["level2_three_blocks"] and modes["level2_spread"] == {0}
    assert modes["level2_few_zeros"] & {2, 3} and modes["level2_many_zeros"] & {4, 5}
    assert need["level2_spread"] > 90 and need["level2_two_tiles_with_spill"] > 60


def test_another_version_is_refused(kernels):
    """C10: the version byte of another library, then a header cut short."""
    frame = tensor(read(path_of("bf16_three_blocks")))
    frame[4] = fmt.VERSION + 1
    with pytest.raises(FrameError, match=f"another format version.*{fmt.VERSION + 1}.*same zipscape version"):
        decompress(frame, torch.empty(2500, dtype=torch.bfloat16), kernels=kernels)
    with pytest.raises(FrameError, match="shorter than its header"):
        decompress(tensor(read(path_of("bf16_three_blocks")))[:127], torch.empty(2500, dtype=torch.bfloat16), kernels=kernels)


def worked_example() -> bytes:
    """docs/format.md, section 8, written down by hand from sections 3 to 6."""
    header = b"ZCCL" + bytes([1, 1, 0, 0]) + struct.pack("<QHHI", 3, 35, 0, 2) + bytes(104)
    codes = [[1, 1] for _ in range(16)]                      # [pair][half] of lane 0: absent elements are code 1
    codes[0][0], codes[0][1], codes[1][0] = 4, 0, 0          # 1.0; -80.0 and 2^-7 are escapes
    words = [0, 0, 0]
    for pair in range(15):
        for half in range(2):
            words[pair % 3] |= codes[pair][half] << 3 * (pair // 3) + 16 * half
    for half in range(2):
        for k in range(3):
            words[k] |= (codes[15][half] >> k & 1) << 15 + 16 * half
    ones = [0, 0, 0]                                         # the other lanes: all absent
    for pair in range(15):
        ones[pair % 3] |= 1 << 3 * (pair // 3) | 1 << 3 * (pair // 3) + 16
    ones[0] |= 1 << 15 | 1 << 31
    tile = struct.pack("<IIII", 2, 0, 0, 0) + struct.pack("<BBH", 123, 0, 2) + bytes.fromhex("7885")
    tile += bytes(128 - len(tile))
    for k in range(3):
        tile += struct.pack("<32I", words[k], *[ones[k]] * 31)
    remainders = bytes([0x00, 0xA0, 0x00])                   # sign and mantissa of 3F80, C2A0, 3C00
    return header + tile + remainders + bytes(1024 - 3)


def worked_example_at_level_2() -> bytes:
    """The same elements by section 9: first code 2 is exponent 127, that of absent elements too; 133 and 120 are nibbles 14 and 7."""
    header = b"ZCCL" + bytes([1, 1, 3, 0]) + struct.pack("<QHHI", 3, 95, 0, 4) + bytes(104)
    tile = struct.pack("<IIII", 4, 0, 0, 0) + struct.pack("<BBH", 124, 0, 4) + bytes.fromhex("700E0000")
    tile += bytes(128 - len(tile)) + struct.pack("<64I", 0xAAA8A8AA, *[0xAAAAAAAA] * 63)
    return header + tile + bytes([0x00, 0xA0, 0x00]) + bytes(1024 - 3)


@LEVELS
def test_worked_examples_byte_by_byte(kernels, level):
    expected = worked_example_at_level_2() if level == 2 else worked_example()
    assert len(expected) == (1536 if level == 2 else 1664)
    x = torch.tensor([1.0, -80.0, 0.0078125], dtype=torch.bfloat16)
    assert_same_bits(golden_frame(BY_NAME[("bf16" if level == 1 else "level2") + "_worked_example"], kernels), tensor(expected), kernels)
    assert_same_bits(unzip(tensor(expected), x, kernels), x, kernels)


PERMUTED = ("bf16_three_blocks", "fp16_two_blocks", "fp32_two_blocks", "level2_three_blocks")


@pytest.mark.parametrize("name, level", with_levels(PERMUTED, str))
def test_permuted_inputs_make_other_frames(kernels, name, level):
    """C16: no two positions are alike: swapping elements within a word, a lane, between lanes, pairs or blocks shows."""
    x, expected, capacity = golden_input(BY_NAME[name]), tensor(read(path_of(name))), BY_NAME[name].capacity
    assert_same_bits(zip_frame(x, kernels, capacity, level=level), expected)
    for at, other in ((0, 1), (2, 4), (7, 8), (8, 24), (100, 356), (1023, 1024), (3, 1027)):
        swapped = as_ints(x).clone()
        swapped[[at, other]] = swapped[[other, at]]
        assert not torch.equal(swapped, as_ints(x))
        assert not torch.equal(zip_frame(swapped.view(x.dtype), kernels, capacity, level=level), expected), (at, other)
