"""The capacity of a class of calls: grows after an overflow, shrinks with hysteresis, gives up and tries again."""
from ds_zipccl.codec.format import DEFAULT_ESCAPES_PER_BLOCK
from ds_zipccl.collectives.capacity import GIVE_UP_NEED, RETRY_AFTER, SHRINK_AFTER, Capacity


def test_gaussian_data_keeps_the_default():
    capacity = Capacity()
    for _ in range(3 * SHRINK_AFTER):
        assert capacity.next_call() == DEFAULT_ESCAPES_PER_BLOCK
        capacity.observe(need=30, overflow=False)


def test_overflow_raises_the_capacity_above_the_need():
    capacity = Capacity()
    capacity.observe(need=73, overflow=True)
    assert 73 <= capacity.next_call() <= 73 + 8


def test_shrinks_only_after_a_run_of_low_needs():
    capacity = Capacity()
    capacity.observe(need=200, overflow=True)
    high = capacity.next_call()
    for _ in range(SHRINK_AFTER - 1):
        capacity.observe(need=50, overflow=False)
        assert capacity.next_call() == high
    capacity.observe(need=50, overflow=False)
    assert 50 <= capacity.next_call() < 64


def test_alternating_needs_do_not_thrash():
    capacity = Capacity()
    overflows = 0
    for i in range(200):
        need, offered = (120 if i % 5 == 0 else 30), capacity.next_call()
        overflow = need > offered
        overflows += overflow
        capacity.observe(need, overflow)
    assert overflows == 1


def test_incompressible_data_is_left_alone_and_tried_again():
    capacity = Capacity()
    capacity.observe(need=GIVE_UP_NEED + 1, overflow=True)
    assert [capacity.next_call() for _ in range(RETRY_AFTER)] == [None] * RETRY_AFTER
    assert capacity.next_call() == DEFAULT_ESCAPES_PER_BLOCK


def test_ranks_that_see_the_same_words_stay_equal():
    history = [(31, False), (500, True), (29, False), (90, True), (20, False)] * 20
    first, second = Capacity(), Capacity()
    offers = []
    for capacity in (first, second):
        seen = []
        for need, overflow in history:
            seen.append(capacity.next_call())
            capacity.observe(need, overflow)
        offers.append(seen)
    assert offers[0] == offers[1] and first == second
