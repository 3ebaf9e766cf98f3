"""How large calls are cut: pure functions of sizes and settings."""
import pytest

from ds_zipccl.codec.format import TILE_ELEMS
from ds_zipccl.collectives.parts import IN_FLIGHT, part_numel, ranges

MIB = 1 << 20


@pytest.mark.parametrize("world", [2, 3, 8, 64])
@pytest.mark.parametrize("row_mib", [1, 7, 63, 64, 300, 5000])
@pytest.mark.parametrize("workspace_mib", [16, 1024])
def test_parts_are_whole_tiles_and_fit(world, row_mib, workspace_mib):
    row, whole, workspace = row_mib * MIB // 2 + 5, world * (row_mib * MIB + 10), workspace_mib * MIB
    part = part_numel(row, whole, workspace)
    fits = 2 * whole <= workspace
    if part == row:
        assert fits
        return
    if part == 0:
        assert not fits and world * TILE_ELEMS * 2 > workspace // (2 * IN_FLIGHT)
        return
    assert part % TILE_ELEMS == 0 and part < row
    assert IN_FLIGHT * 2 * part * world * 2 <= workspace
    assert -(-row // part) <= 2 * whole // (workspace // (2 * IN_FLIGHT)) + 1


def test_calls_stay_whole_while_they_fit():
    assert part_numel(1 << 27, 1 << 29, 1 << 30) == 1 << 27
    assert part_numel(1 << 28, 1 << 30, 1 << 30) == 1 << 26
    assert part_numel(1 << 25, 1 << 26, 1 << 30) == 1 << 25


@pytest.mark.parametrize("numel", [0, 1, TILE_ELEMS, TILE_ELEMS + 1, 5 * TILE_ELEMS, 9 * TILE_ELEMS + 77])
@pytest.mark.parametrize("part", [TILE_ELEMS, 2 * TILE_ELEMS, 4 * TILE_ELEMS])
def test_ranges_cover_everything_once(numel, part):
    count = max(1, -(-numel // part))
    found = ranges(numel, count)
    assert len(found) == count
    assert found[0][0] == 0 and found[-1][1] == numel and all(end == start for (_, end), (start, _) in zip(found, found[1:], strict=False))
    assert all(start % TILE_ELEMS == 0 or start == numel for start, _ in found) and all(end - start <= part for start, end in found)
    assert numel == 0 or found[-1][0] < found[-1][1], "the longest row has no empty part"
