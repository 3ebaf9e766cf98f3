"""The later steps of a selection (triton_select.py), over what was noted down: a program looks at the notes of ROWS tiles together, and one
after another at the elements of those tiles that could not note all their keys."""
import triton
import triton.language as tl

from ds_scape.kernels.triton_select import (
    EQUAL,
    HI,
    LO,
    NOTES,
    PREFIX,
    SIZE,
    TILE,
    WANTED,
    WORDS,
    _field,
    _keys,
    _load,
    _tiles,
    count,
    lowest,
    third_bits,
    words_of_tiles,
)


@triton.jit
def _noted(notes, t, num):
    """Of tiles t with ``num`` notes: keys, and which of them there are. Nothing of full tiles."""
    column = tl.arange(0, NOTES)[None, :]
    is_noted = column < tl.where(num <= NOTES, num, 0)[:, None]
    note = tl.load(notes + t.to(tl.int64)[:, None] * NOTES + column, is_noted, other=0)
    return note.to(tl.uint32, bitcast=True), is_noted


@triton.jit
def _prefix(state, s):
    return _field(state, s, PREFIX).to(tl.uint32, bitcast=True)


@triton.jit
def _third_digit(state, s, key, is_valid):
    """Of keys, and whether their other digits are those that are settled."""
    bits = third_bits(_field(state, s, LO), _field(state, s, HI)).to(tl.uint32)
    upper = key >> bits
    return (key - (upper << bits)).to(tl.int32), is_valid & (upper == _prefix(state, s) >> bits)


@triton.jit
def _full_tile(rank_by, square, last_sync, search_of_tile, searches, t, step, max_age, HAS_SQUARE: tl.constexpr):
    """Search, keys, places and which elements there are, of one tile."""
    s, place, first, stop, _ = _tiles(search_of_tile, searches, t, True)
    at = place + tl.arange(0, TILE)
    is_valid = (at >= first) & (at < stop)
    return s, _keys(_load(rank_by, square, last_sync, at, is_valid, HAS_SQUARE, False), step, max_age, HAS_SQUARE), at, is_valid


@triton.jit
def third(rank_by, square, last_sync, search_of_tile, searches, state, histograms, notes, num_notes, num_tiles: tl.int32, step: tl.int32,
          max_age: tl.int32, HAS_SQUARE: tl.constexpr, ROWS: tl.constexpr):
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    num = tl.load(num_notes + t, t < num_tiles, other=0)
    s = tl.load(search_of_tile + t, t < num_tiles, other=0)
    key, is_noted = _noted(notes, t, num)
    digit, is_counted = _third_digit(state, s[:, None], key, is_noted)
    count(histograms + s.to(tl.int64) * SIZE, digit, is_counted)
    if tl.max(num, 0) > NOTES:
        for one in range(tl.program_id(0) * ROWS, tl.minimum((tl.program_id(0) + 1) * ROWS, num_tiles)):
            if tl.load(num_notes + one) > NOTES:
                s_one, key_one, at_one, is_valid = _full_tile(rank_by, square, last_sync, search_of_tile, searches, one, step, max_age,
                                                         HAS_SQUARE)
                digit_one, is_counted_one = _third_digit(state, s_one, key_one, is_valid)
                histogram = histograms + s_one.to(tl.int64) * SIZE + tl.zeros((1,), tl.int32)
                count(histogram, digit_one[None, :], is_counted_one[None, :])


@triton.jit
def equal(rank_by, square, last_sync, search_of_tile, searches, state, notes, num_notes, num_equal, num_tiles: tl.int32, step: tl.int32,
          max_age: tl.int32, HAS_SQUARE: tl.constexpr, ROWS: tl.constexpr):
    """num_equal[t]: how many keys of tile t are the last one, where not all of them are taken."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    s = tl.load(search_of_tile + t, t < num_tiles, other=0)
    is_needed = (t < num_tiles) & (_field(state, s, EQUAL) != _field(state, s, WANTED))
    if tl.max(is_needed.to(tl.int32), 0) != 0:
        num = tl.load(num_notes + t, is_needed, other=0)
        key, is_noted = _noted(notes, t, num)
        is_equal = is_noted & (key == _prefix(state, s)[:, None])
        tl.store(num_equal + t, tl.sum(is_equal.to(tl.int32), 1), is_needed & (num <= NOTES))
        if tl.max(num, 0) > NOTES:
            for one in range(tl.program_id(0) * ROWS, tl.minimum((tl.program_id(0) + 1) * ROWS, num_tiles)):
                if tl.load(num_notes + one) > NOTES:
                    s_one, key_one, at_one, is_valid = _full_tile(rank_by, square, last_sync, search_of_tile, searches, one, step, max_age,
                                                             HAS_SQUARE)
                    is_equal_one = is_valid & (key_one == _prefix(state, s_one))
                    tl.store(num_equal + one, tl.sum(is_equal_one.to(tl.int32), 0))


@triton.jit
def equal_before(searches, state, num_equal, BLOCK: tl.constexpr):
    """From how many in each tile to how many before it, in place. A program for each search."""
    s = tl.program_id(0)
    if _field(state, s, EQUAL) != _field(state, s, WANTED):
        tiles = tl.load(searches + s.to(tl.int64) * 10 + 3)
        first, total = (tiles & 0xFFFFFFFF).to(tl.int32), tl.full((), 0, tl.int32)
        stop = first + (tiles >> 32).to(tl.int32)
        for begin in range(first, stop, BLOCK):
            t = begin + tl.arange(0, BLOCK)
            num = tl.load(num_equal + t, t < stop, other=0)
            tl.debug_barrier()
            tl.store(num_equal + t, total + tl.cumsum(num, 0) - num, t < stop)
            total += tl.sum(num, 0)


@triton.jit
def finish(rank_by, square, last_sync, chosen, search_of_tile, searches, state, words, notes, num_notes, before, num_tiles: tl.int32,
           step: tl.int32, max_age: tl.int32, HAS_SQUARE: tl.constexpr, ROWS: tl.constexpr):
    """before: of equal_before."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_there = t < num_tiles
    num = tl.load(num_notes + t, is_there, other=0)
    s, place, _, _, _ = _tiles(search_of_tile, searches, t, is_there)
    last, wanted = _prefix(state, s)[:, None], _field(state, s, WANTED)
    is_open = is_there & (_field(state, s, EQUAL) != wanted)
    word, ones, before_word = words_of_tiles(words, t, is_there & (num <= NOTES))
    note_at = notes + t.to(tl.int64)[:, None] * NOTES + before_word
    rank = tl.zeros((ROWS, WORDS), tl.int32)                # of a word's next equal key, where not all of them are taken
    if tl.max(is_open.to(tl.int32), 0) != 0:
        for i in range(0, tl.max(ones)):
            key = tl.load(note_at + i, i < ones, other=0).to(tl.uint32, bitcast=True)
            rank += ((i < ones) & (key == last)).to(tl.int32)
        rank = tl.load(before + t, is_open, other=0)[:, None] + tl.cumsum(rank, 1) - rank
    limit = tl.where(is_open, wanted, 1 << 30)[:, None]
    for i in range(0, tl.max(ones)):
        key = tl.load(note_at + i, i < ones, other=0).to(tl.uint32, bitcast=True)
        is_equal = (i < ones) & (key == last)
        is_taken = (i < ones) & (key > last) | is_equal & (rank < limit)
        rank += is_equal.to(tl.int32)
        tl.store(chosen + place[:, None] + lowest(word), tl.full((ROWS, WORDS), 1, tl.uint8), is_taken)
        word = word & (word - 1)
    if tl.max(num, 0) > NOTES:
        for one in range(tl.program_id(0) * ROWS, tl.minimum((tl.program_id(0) + 1) * ROWS, num_tiles)):
            if tl.load(num_notes + one) > NOTES:
                s_one, key_one, at_one, is_valid = _full_tile(rank_by, square, last_sync, search_of_tile, searches, one, step, max_age,
                                                              HAS_SQUARE)
                last_one, wanted_one = _prefix(state, s_one), _field(state, s_one, WANTED)
                is_open_one = _field(state, s_one, EQUAL) != wanted_one
                mine_one = (is_valid & (key_one == last_one)).to(tl.int32)
                rank_one = tl.load(before + one, is_open_one, other=0) + tl.cumsum(mine_one, 0) - mine_one
                is_taken_one = is_valid & (key_one > last_one) | (mine_one != 0) & (rank_one < wanted_one)
                tl.store(chosen + at_one, tl.full((TILE,), 1, tl.uint8), is_taken_one)


@triton.jit
def fill_bytes(chosen, fills, BLOCK: tl.constexpr):
    """What no search decides: (start, stop, value) each. Grid (fills, any number)."""
    row = fills + 3 * tl.program_id(0)
    stop, value = tl.load(row + 1), tl.load(row + 2)
    for begin in range(tl.load(row) + tl.program_id(1) * BLOCK, stop, tl.num_programs(1) * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(chosen + at, tl.zeros((BLOCK,), tl.uint8) + value.to(tl.uint8), at < stop)
