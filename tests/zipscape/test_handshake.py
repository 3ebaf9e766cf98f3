"""The handshake over every kind of store; ranks are threads, each with its own connection."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from zipscape import handshake
from zipscape.errors import HandshakeError

WORLD = 4
#: Well below the time-out of 40 s. TCPStore looks up names of hosts, which alone may take 5 s on a machine without DNS.
PROMPT_S = 20.0


def tcp_store(_):
    master = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return lambda: (master, dist.TCPStore("127.0.0.1", master.port, None, False, timeout=timedelta(seconds=30)))[1]


def file_store(tmp_path):
    return lambda: dist.FileStore(str(tmp_path / "store"), WORLD)


def hash_store(_):
    store = dist.HashStore()
    return lambda: store


def prefix_store(tmp_path):
    inner = tcp_store(tmp_path)
    return lambda: dist.PrefixStore("default_pg", inner())


KINDS = [tcp_store, file_store, hash_store, prefix_store]


@pytest.fixture(params=KINDS, ids=lambda make: make.__name__)
def connect(request, tmp_path):
    return request.param(tmp_path)


@pytest.fixture
def each_kind(tmp_path):
    """Calls ``check(connect)`` for every kind of store at once: for what waits on purpose."""
    def each_kind(check):
        with ThreadPoolExecutor(len(KINDS)) as pool:
            running = {make.__name__: pool.submit(check, make(tmp_path)) for make in KINDS}
        assert {name: run.exception() for name, run in running.items()} == dict.fromkeys(running)
    return each_kind


def record(**changes):
    return {"version": "0.1.0", "config_hash": "abc", "error": None, "enabled": True, **changes}


def agree_on_all(connect, records, timeout_s=40.0, delays_s=None):
    """Outcome of each rank: the list of records, or the text of the error. A rank whose record is None never comes."""
    outcomes, times_s = [None] * len(records), [0.0] * len(records)
    connected = threading.Barrier(sum(mine is not None for mine in records))

    def rank_main(rank):
        store = connect()
        connected.wait(50)                          # connecting takes as long as it takes; the handshake's time begins here
        time.sleep((delays_s or {}).get(rank, 0.0))
        begin = time.monotonic()
        try:
            outcomes[rank] = handshake.agree(store, rank, len(records), records[rank], name="t", timeout_s=timeout_s)
        except HandshakeError as error:
            outcomes[rank] = str(error)
        times_s[rank] = time.monotonic() - begin

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank, mine in enumerate(records) if mine]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    return outcomes, times_s


def same_text(outcomes):
    texts = {outcome for outcome in outcomes if outcome is not None}
    assert len(texts) == 1, texts
    (text,) = texts
    return text


def test_all_ranks_get_all_records(connect):
    records = [record(host=f"host{rank}") for rank in range(WORLD)]
    outcomes, times_s = agree_on_all(connect, records)
    assert outcomes == [records] * WORLD
    assert max(times_s) < PROMPT_S


def test_missing_rank_is_named_in_bounded_time(each_kind):
    def check(connect):
        outcomes, times_s = agree_on_all(connect, [record(), record(), None, record()], timeout_s=1.0)
        assert "rank 2 did not answer within 1 s" in same_text(outcomes)
        assert max(times_s) < 1.0 + handshake._GRACE_S + 12.0
    each_kind(check)


@pytest.mark.parametrize("field, value", [("version", "0.2.0"), ("config_hash", "xyz"), ("enabled", False)])
def test_difference_is_named_with_its_ranks(connect, field, value):
    outcomes, _ = agree_on_all(connect, [record(), record(), record(**{field: value}), record()])
    text = same_text(outcomes)
    assert f"{field} differs" in text and "on ranks 0-1, 3" in text and "on rank 2" in text


def test_error_of_one_rank_reaches_all(connect):
    outcomes, times_s = agree_on_all(connect, [record(), record(error="min_bytes: got -1", config_hash=None)] +
                                     [record()] * 2)
    text = same_text(outcomes)
    assert "rank 1 reported an error: min_bytes: got -1" in text
    assert "config_hash differs" not in text, "a rank with an error has no hash; that is not the news"
    assert max(times_s) < PROMPT_S, "nobody waits for the time-out"


def test_rank_that_comes_too_late_says_the_same(each_kind):
    def check(connect):
        outcomes, _ = agree_on_all(connect, [record()] * WORLD, timeout_s=0.5, delays_s={3: 3.0})
        assert "rank 3 did not answer within 0.5 s" in same_text(outcomes)
    each_kind(check)


def test_late_ranks_in_time_are_fine(each_kind):
    def check(connect):
        outcomes, _ = agree_on_all(connect, [record()] * WORLD, delays_s={0: 0.5, 2: 1.0})
        assert outcomes == [[record()] * WORLD] * WORLD
    each_kind(check)


def test_announced_rank_counts_as_different_not_as_missing(connect):
    handshake.announce(connect(), 3, record(config_hash=None, enabled=False), name="t")
    outcomes, times_s = agree_on_all(connect, [record()] * 3 + [None])
    text = same_text(outcomes)
    assert "before training: enabled differs: true on ranks 0-2, false on rank 3. Expected" in text
    assert max(times_s) < PROMPT_S


def test_last_rank_that_announces_gives_the_verdict():
    store = dist.HashStore()
    thread = threading.Timer(1.0, handshake.announce, (store, 3, record(enabled=False)),
                             {"name": "t", "world_size": WORLD})
    thread.start()
    outcomes, times_s = agree_on_all(lambda: store, [record()] * 3 + [None], timeout_s=40.0)
    assert "enabled differs" in same_text(outcomes) and max(times_s) < PROMPT_S


def test_names_do_not_mix():
    store = dist.HashStore()
    for name in ("first", "second"):
        assert handshake.agree(store, 0, 1, record(config_hash=name), name=name) == [record(config_hash=name)]


def test_differing_fields_of_the_configuration_are_named():
    outcomes, _ = agree_on_all(hash_store(None), [
        record(config={"min_bytes": 1, "kernels": "cpu"}),
        record(config={"min_bytes": 2, "kernels": "cpu"}, config_hash="other")])
    assert "(fields: min_bytes): min_bytes = 1 on rank 0, 2 on rank 1. Expected" in same_text(outcomes)


def test_an_error_that_all_ranks_have_says_by_itself_what_to_do():
    outcomes, _ = agree_on_all(hash_store(None), [record(error="It is bad. What to do: mend it.")] * 2)
    assert same_text(outcomes) == ("Handshake 't' of 2 ranks failed before training: ranks 0-1 reported an error: It is bad. "
                                   "What to do: mend it.")


def test_everything_wrong_at_once_is_said_at_once():
    outcomes, _ = agree_on_all(hash_store(None), [record(), record(version="9"), record(error="bad"), None], 0.5)
    text = same_text(outcomes)
    assert all(part in text for part in ("rank 2 reported an error: bad", "rank 3 did not answer", "version differs"))


def test_last_rank_that_dies_between_coming_and_judging_blocks_nobody(monkeypatch):
    """All records are there but no verdict: after the time-out another rank gives it, and all is well."""
    store = dist.HashStore()
    judge = handshake._judge
    monkeypatch.setattr(handshake, "_judge", lambda *args: judge(*args) if args[-1] is not None else None)
    outcomes, _ = agree_on_all(lambda: store, [record()] * 3, timeout_s=0.5)
    assert outcomes == [[record()] * 3] * 3


def test_broken_store_is_an_error_not_a_wait():
    class Broken(dist.Store):
        def set(self, key, value):
            raise RuntimeError("connection reset")
    with pytest.raises(HandshakeError, match="store did not answer.*connection reset.*rank 0 of 2"):
        handshake.agree(Broken(), 0, 2, record(), name="t")


def test_a_thousand_ranks_cost_a_bounded_number_of_calls(monkeypatch):
    """Counted, not timed: the last rank reads all records in one call, finding 3 absent ones takes few checks."""
    calls = {"check": 0, "multi_get": 0}
    store = dist.HashStore()

    class Counting:
        def __getattr__(self, name):
            if name in calls:
                calls[name] += 1
            return getattr(store, name)

    absent = {17, 500, 999}
    for rank in range(1, 1000):
        if rank not in absent:
            handshake.announce(store, rank, record(), name="t")
    with pytest.raises(HandshakeError, match="ranks 17, 500, 999 did not answer"):
        handshake.agree(Counting(), 0, 1000, record(), name="t", timeout_s=0.1)
    assert calls["multi_get"] == 1 and calls["check"] < 80


def test_rank_lists_are_short():
    assert handshake._ranks([5]) == "rank 5"
    assert handshake._ranks([3, 1, 2, 9]) == "ranks 1-3, 9"
    assert handshake._ranks(list(range(1000))) == "ranks 0-999"


def test_meetings_are_counted_alike_whoever_comes_first(connect):
    """Three ranks come to five meetings each: one is done before the next has begun, and other names and sizes count apart."""
    order = [0, 0, 0, 0, 0, 2, 1, 2, 2, 1, 1, 2, 1, 1, 2]
    store, numbers = connect(), {rank: [] for rank in range(3)}
    for rank in order:
        numbers[rank].append(handshake.next_meeting(store, rank, 3, name="m"))
    assert numbers == {rank: [0, 1, 2, 3, 4] for rank in range(3)}
    assert handshake.next_meeting(store, 0, 2, name="m") == handshake.next_meeting(store, 0, 3, name="other") == 0
