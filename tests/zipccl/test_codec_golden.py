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
from tests.zipccl.codec_cases import header_of, unzip, zip_frame
from tests.zipccl.golden.cases import CASES, golden_frame, golden_input
from tests.zipccl.golden.make import FOLDER, path_of, read

BY_NAME = {case.name: case for case in CASES}
STORED = sorted(FOLDER.glob("v*/*.frame.z"))


def tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.mark.parametrize("path", STORED, ids=lambda p: f"{p.parent.name}-{p.name.removesuffix('.frame.z')}")
def test_every_version_decodes(kernels, path):
    """C10: frames written by any released version."""
    x = golden_input(BY_NAME[path.name.removesuffix(".frame.z")])
    assert_same_bits(unzip(tensor(read(path)), x, kernels), x, f"{kernels} {path.name}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_encoders_make_the_stored_bytes(kernels, case):
    """C16: catches what a round trip cannot, such as two lanes swapped on both ways."""
    assert_same_bits(golden_frame(case, kernels), tensor(read(path_of(case.name))), f"{kernels} {case.name}")


def test_nothing_is_missing():
    assert {path.name.removesuffix(".frame.z") for path in STORED if path.parent.name == f"v{fmt.VERSION}"} == set(BY_NAME)
    assert {path.parent.name for path in STORED} == {f"v{version}" for version in range(1, fmt.VERSION + 1)}
    text = (FOLDER.parents[2] / "docs" / "format.md").read_text()
    versions = re.findall(r"^\| (\d+) \| zipscape", text[text.index("## 9. Versions"):], re.MULTILINE)
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


def test_worked_example_byte_by_byte(kernels):
    expected = worked_example()
    assert len(expected) == 1664
    x = torch.tensor([1.0, -80.0, 0.0078125], dtype=torch.bfloat16)
    assert_same_bits(golden_frame(BY_NAME["bf16_worked_example"], kernels), tensor(expected), kernels)
    assert_same_bits(unzip(tensor(expected), x, kernels), x, kernels)


@pytest.mark.parametrize("name", ["bf16_three_blocks", "fp16_two_blocks", "fp32_two_blocks"])
def test_permuted_inputs_make_other_frames(kernels, name):
    """C16: no two positions are alike: swapping elements within a word, a lane, between lanes, pairs or blocks shows."""
    x, expected, capacity = golden_input(BY_NAME[name]), tensor(read(path_of(name))), BY_NAME[name].capacity
    assert_same_bits(zip_frame(x, kernels, capacity), expected)
    for at, other in ((0, 1), (2, 4), (7, 8), (8, 24), (100, 356), (1023, 1024), (3, 1027)):
        swapped = as_ints(x).clone()
        swapped[[at, other]] = swapped[[other, at]]
        assert not torch.equal(swapped, as_ints(x))
        assert not torch.equal(zip_frame(swapped.view(x.dtype), kernels, capacity), expected), (at, other)
