"""The sub-pool room of a class of calls: grows after an overflow, shrinks with hysteresis, gives up and tries again."""
from ds_zipccl.codec.format import DEFAULT_SPILL_PER_TILE
from ds_zipccl.collectives.capacity import RETRY_AFTER, SHRINK_AFTER, Capacity

GIVE_UP_BYTES = 12288        # 3/16 of a full BF16 tile


def full_tiles(first_spill: float = 0.0) -> Capacity:
    return Capacity.of(10 * 32768, 2, first_spill)


def test_gaussian_data_keeps_the_default():
    capacity = full_tiles()
    for _ in range(3 * SHRINK_AFTER):
        assert capacity.next_call() == DEFAULT_SPILL_PER_TILE
        capacity.observe(need=0, overflow=False)


def test_overflow_raises_the_room_above_the_need():
    capacity = full_tiles()
    capacity.observe(need=1800, overflow=True)
    assert 1800 * 1.1 <= capacity.next_call() <= 1800 * 1.13 + 64


def test_shrinks_only_after_a_run_of_low_needs():
    capacity = full_tiles(1 / 32)
    for _ in range(SHRINK_AFTER - 1):
        capacity.observe(need=500, overflow=False)
        assert capacity.next_call() == 2048
    capacity.observe(need=500, overflow=False)
    assert 500 <= capacity.next_call() <= 640


def test_never_grows_without_an_overflow():
    """The room was enough, so a need near it is no reason to send more."""
    capacity = full_tiles(1 / 32)
    for _ in range(2 * SHRINK_AFTER):
        capacity.observe(need=2040, overflow=False)
        assert capacity.next_call() == 2048


def test_alternating_needs_do_not_thrash():
    capacity = full_tiles()
    overflows = 0
    for i in range(200):
        need, offered = (3000 if i % 5 == 0 else 30), capacity.next_call()
        overflow = need > offered
        overflows += overflow
        capacity.observe(need, overflow)
    assert overflows == 1


def test_incompressible_data_is_left_alone_and_tried_again():
    capacity = full_tiles()
    capacity.observe(need=GIVE_UP_BYTES + 1, overflow=True)
    assert [capacity.next_call() for _ in range(RETRY_AFTER)] == [None] * RETRY_AFTER
    assert capacity.next_call() == DEFAULT_SPILL_PER_TILE


def test_rows_shorter_than_a_tile_give_up_earlier():
    small = Capacity.of(3000, 2, 0.0)
    small.observe(need=1126, overflow=True)
    assert small.next_call() is None
    small = Capacity.of(3000, 2, 0.0)
    small.observe(need=1125, overflow=True)
    assert small.next_call() >= 1125


def test_ranks_that_see_the_same_words_stay_equal():
    history = [(31, False), (20000, True), (29, False), (900, True), (20, False)] * 20
    first, second = full_tiles(), full_tiles()
    offers = []
    for capacity in (first, second):
        seen = []
        for need, overflow in history:
            seen.append(capacity.next_call())
            capacity.observe(need, overflow)
        offers.append(seen)
    assert offers[0] == offers[1] and first == second


def test_an_overflow_of_a_given_window_that_served_until_now_is_no_sign_of_need():
    """It is measured anew; only an overflow of the very next call says that the data does not compress."""
    capacity = Capacity(give_up_bytes=1000, given_windows=True)
    before = capacity.spill_per_tile
    capacity.observe(10, False)
    capacity.observe(5000, True)
    assert capacity.next_call() == before
    capacity.observe(5000, True)
    assert capacity.next_call() is None
    block = Capacity(give_up_bytes=1000)
    block.observe(10, False)
    block.observe(5000, True)
    assert block.next_call() is None
