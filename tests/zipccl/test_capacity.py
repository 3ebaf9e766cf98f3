"""The sub-pool room of a class of calls: grows after overflows, shrinks with hysteresis, gives up, tries again; what launches wait for."""
from random import Random

import pytest
import torch

from ds_zipccl.codec.format import DEFAULT_SPILL_PER_TILE
from ds_zipccl.collectives.capacity import CALM_AFTER, LAG, RETRY_AFTER, SHRINK_AFTER, Capacity

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
    capacity = full_tiles()
    capacity.observe(need=2000, overflow=True)
    room = capacity.next_call()
    for _ in range(SHRINK_AFTER - 1):
        capacity.observe(need=500, overflow=False)
        assert capacity.next_call() == room > 2000
    capacity.observe(need=500, overflow=False)
    assert 500 <= capacity.next_call() <= 640


def test_a_first_room_that_was_a_guess_goes_down_as_soon_as_the_class_is_calm():
    """... and only then: afterwards as any other."""
    capacity = full_tiles(1 / 32)
    for i in range(CALM_AFTER):
        assert capacity.next_call() == 2048
        capacity.observe(need=500 + i, overflow=False)
    room = capacity.next_call()
    assert 500 < room <= 640
    for _ in range(SHRINK_AFTER - CALM_AFTER - 1):
        capacity.observe(need=200, overflow=False)
        assert capacity.next_call() == room
    overflowed = full_tiles(1 / 32)
    overflowed.observe(need=2100, overflow=True)
    for _ in range(SHRINK_AFTER - 1):
        overflowed.observe(need=100, overflow=False)
        assert overflowed.next_call() > 2100


@pytest.mark.parametrize("first_spill", [0.0, 1 / 32])
def test_who_looks_ahead_finds_what_others_find(first_spill):
    """Ranks that take account of calls at different times, as early as they know of them or when they must: the same rooms for every call.
    The need of call n is known to a rank a few launches later."""
    random = Random(int(64 * first_spill))
    for _ in range(30):
        needs = [random.choice((100, 300, 300, 300, 900, 2500)) if random.random() < 0.2 else 100 for _ in range(150)]
        ranks = [full_tiles(first_spill) for _ in range(3)]
        known: list[list] = [[] for _ in ranks]
        num_ahead = 0
        for need in needs:
            rooms = []
            for rank, capacity in enumerate(ranks):
                while (missing := capacity.overdue()) is not None:
                    for told, number, overflow in known[rank]:
                        if told is missing:
                            told.num_bytes, told.overflow = number, overflow
                    capacity.take_account()
                rooms.append(capacity.next_call())
                if rooms[-1] is not None:
                    known[rank].append((capacity.launched(), need, need > rooms[-1]))
                for told, number, overflow in known[rank][:-random.randrange(1, LAG) or None]:
                    told.num_bytes, told.overflow = number, overflow
                for _ in range(rank):                                   # rank 0 never does
                    before = len(capacity.under_way)
                    clear = capacity.look_ahead()
                    num_ahead += len(capacity.under_way) < before
                    assert clear == (capacity.overdue() is None)
            assert len(set(rooms)) == 1, rooms
        assert num_ahead > 20


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


def launch(capacity):
    """A call as ``launch.start`` makes it: (room, need). Everything that it must not go without must be known."""
    while (overdue := capacity.overdue()) is not None:
        assert overdue.is_known(), "the launch would wait"
        capacity.take_account()
    return capacity.next_call(), capacity.launched()


def fill(need, num_bytes, overflow=False):
    need.num_bytes, need.overflow = num_bytes, overflow


def test_launches_wait_only_in_new_classes_and_after_overflows():
    capacity = full_tiles()
    for _ in range(CALM_AFTER):
        _, need = launch(capacity)
        assert capacity.overdue() is need, "the next call of a new class waits for this one"
        fill(need, 10)
    needs = [launch(capacity)[1] for _ in range(LAG)]
    with pytest.raises(AssertionError, match="would wait"):
        launch(capacity)
    fill(needs[0], 1800, overflow=True)
    with pytest.raises(AssertionError, match="would wait"):             # an overflow: all that is in flight counts before the next
        launch(capacity)
    for need in needs[1:]:
        fill(need, 900)
    assert 1800 * 1.1 <= launch(capacity)[0] <= 1800 * 1.13 + 64


def test_rooms_do_not_depend_on_when_needs_become_known():
    """One rank knows each need at once, others when they are asked for it, or now and then."""
    generator = torch.Generator().manual_seed(5)
    wanted = [int(torch.randint(0, 6000, (1,), generator=generator)) if i % 11 == 10 else 40 for i in range(400)]

    def rooms(knows_at_once) -> list:
        capacity, unknown, found = full_tiles(), [], []
        for i, num_bytes in enumerate(wanted):
            while (overdue := capacity.overdue()) is not None:
                for need, spill, offered in unknown if not overdue.is_known() else ():
                    fill(need, spill, spill > offered)
                capacity.take_account()
            room = capacity.next_call()
            found.append(room)
            if room is not None:
                unknown.append((capacity.launched(), num_bytes, room))
            if knows_at_once(i):
                for need, spill, offered in unknown:
                    fill(need, spill, spill > offered)
                unknown = []
        return found

    first = rooms(lambda i: True)
    assert first == rooms(lambda i: False) == rooms(lambda i: i % 3 == 0) and len(set(first)) > 4


def test_a_call_that_failed_leaves_no_trace():
    capacity, other = full_tiles(), full_tiles()
    capacity.launched()
    capacity.take_account()
    assert capacity == other and capacity.overdue() is None
