"""All ranks agree before the first collective, through the rendezvous store.

A collective cannot be used for this: a rank that is missing or runs another version would hang it. The store works
with any set of ranks. Each rank publishes one JSON record and counts itself in. The last one to come reads all records
and publishes a verdict; everybody else waits for that one key, so the store's work grows with the number of ranks, not
its square. Where a rank never comes, the first to lose patience publishes the verdict. The first verdict counts: so
all ranks raise the same text, however late they are.
"""

import json
import time
from datetime import timedelta

from zipscape.errors import HandshakeError, describe

#: Fields that must be equal on every rank.
_EQUAL_FIELDS = ("version", "config_hash", "enabled")
#: How long impatient ranks leave the verdict to the first of them, in seconds.
_GRACE_S = 5.0


def announce(store, rank: int, record: dict, *, name: str, world_size: int = 0) -> None:
    """Publish this rank's record without waiting, so that ranks which do wait can name the difference.

    store: any torch.distributed Store. record: as in agree(), usually {"version", "config_hash": None, "error": None,
    "enabled": False}: a rank whose script has no section of ours. world_size: if given and this rank is the last to
    come, it publishes the verdict, which saves the others their wait.
    """
    store.set(_key(name, rank), json.dumps(record))
    if store.add(_key(name, "num_ranks"), 1) == world_size:
        _judge(store, world_size, name, None)


def agree(store, rank: int, world_size: int, record: dict, *, name: str, timeout_s: float = 60.0) -> list:
    """Publish this rank's record, wait for all ranks, and return all records in rank order.

    store: any torch.distributed Store shared by the ranks. record: JSON-able, with keys version (str), config_hash
    (str), error (str or None), enabled (bool); further keys are handed through. A "config" dict among them is used to
    name the fields that differ. name: not used before on this store; all ranks give the same.
    timeout_s: longest wait in seconds for the other ranks, counted from this rank's call; a few more may pass until
    the ranks that gave up have agreed on who is missing.

    Raises HandshakeError with the same text on every rank: ranks with an error, ranks that did not come in time, ranks
    that differ in version, config_hash or enabled. No rank may start a collective before this call returned.
    """
    verdict_key = _key(name, "verdict")
    try:
        announce(store, rank, record, name=name, world_size=world_size)
        if not _wait(store, verdict_key, timeout_s):
            is_first = store.add(_key(name, "num_impatient"), 1) == 1
            if is_first or not _wait(store, verdict_key, _GRACE_S):
                _judge(store, world_size, name, timeout_s)
        verdict = json.loads(store.get(verdict_key))
    except Exception as error:
        raise HandshakeError(describe(
            f"Handshake {name!r} failed: the rendezvous store did not answer",
            got=f"{type(error).__name__}: {error}", where=f"rank {rank} of {world_size}",
            todo="check that the process which holds the store (rank 0, or the launcher) is alive and reachable",
        )) from error
    if verdict["problem"]:
        raise HandshakeError(verdict["problem"])
    return verdict["records"]


def next_meeting(store, rank: int, world_size: int, *, name: str) -> int:
    """How often this rank has come to a meeting of this name and number of ranks before: the same number on every rank
    where all come equally often, in any order and without waiting.

    Makes key names that are never used twice, also where the store outlives the groups that meet through it. Every rank
    counts for itself: in one common counter a rank that comes twice before another has come once would be taken for
    that other one.
    """
    return store.add(_key(name, f"meetings/{world_size}/{rank}"), 1) - 1


def _key(name: str, leaf) -> str:
    return f"zipscape/{name}/{leaf}"


def _wait(store, key: str, timeout_s: float) -> bool:
    """True once the key is there, False after timeout_s. The store blocks for us: no polling."""
    timeout_s = max(timeout_s, 0.001)  # 0 would mean no limit
    begin = time.monotonic()
    try:
        store.wait([key], timedelta(seconds=timeout_s))
        return True
    except Exception:
        # Stores raise different kinds for a time-out; one that failed early is broken, not late.
        if time.monotonic() - begin < 0.9 * timeout_s:
            raise
    return False


def _judge(store, world_size: int, name: str, timeout_s) -> None:
    """Publish a verdict on what the store holds, unless there is one already. timeout_s: None if all have come."""
    keys = [_key(name, rank) for rank in range(world_size)]
    absent = _absent(store, keys, 0, world_size)
    if absent and timeout_s is None:
        return  # some rank counted itself in twice: leave it to the ranks that wait
    present = sorted(set(range(world_size)) - set(absent))
    records = dict(zip(present, _read(store, [keys[rank] for rank in present]), strict=True))
    problem = _problem(records, absent, world_size, name, timeout_s)
    verdict = {"problem": problem, "records": [] if problem else [records[rank] for rank in range(world_size)]}
    store.compare_set(_key(name, "verdict"), "", json.dumps(verdict))


def _absent(store, keys, begin, end) -> list:
    """By halves, since check() answers for a list as a whole: a few calls per absent key, not one per rank."""
    if begin == end or store.check(keys[begin:end]):
        return []
    if end - begin == 1:
        return [begin]
    middle = (begin + end) // 2
    return _absent(store, keys, begin, middle) + _absent(store, keys, middle, end)


def _read(store, keys) -> list:
    """Records under keys that are present; one round trip where the store can."""
    if keys and store.has_extended_api():
        values = store.multi_get(keys)
    else:
        values = [store.get(key) for key in keys]
    return [json.loads(value) for value in values]


def _problem(records: dict, absent: list, world_size: int, name: str, timeout_s) -> str:
    """The text every rank raises, or "" if there is nothing wrong. Pure function of what the store holds."""
    problems = []
    errors = {}
    for rank, record in records.items():
        if record.get("error") is not None:
            errors.setdefault(str(record["error"]), []).append(rank)
    problems += [f"{_ranks(ranks)} reported an error: {text}" for text, ranks in errors.items()]
    if absent:
        problems.append(f"{_ranks(absent)} did not answer within {timeout_s:g} s")
    # A rank with an error often has no hash to compare; its error is the news.
    healthy = {rank: record for rank, record in records.items() if record.get("error") is None}
    differences = {field: _difference(healthy, field) for field in _EQUAL_FIELDS}
    if differences["enabled"]:
        del differences["config_hash"]      # of a rank that has no section: its settings are no news
    problems += [text for text in differences.values() if text]
    if not problems:
        return ""
    what = f"Handshake {name!r} of {world_size} ranks failed before training: " + "; ".join(problems)
    if len(problems) == 1 and len(errors) == 1:
        return describe(what)               # which says by itself what to do
    return describe(
        what,
        expected="every rank with the same zipscape version, the same configuration and no error",
        todo="use one environment and one ds_config.json on all ranks and look at the first error of the ranks named")


def _difference(records: dict, field: str) -> str:
    values = _values(records, field)
    if not values:
        return ""
    text = f"{field} differs: {values}"
    if field == "config_hash":
        text += _differing_fields(records)
    return text


def _values(records: dict, field: str) -> str:
    """Which rank has which value; "" where all have the same."""
    groups = {}
    for rank, record in records.items():
        groups.setdefault(json.dumps(record.get(field), sort_keys=True), []).append(rank)
    return ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in groups.items()) if len(groups) > 1 else ""


def _differing_fields(records: dict) -> str:
    """The configuration fields behind a differing hash, with their values, if the records carry their configuration."""
    configs = {rank: record.get("config") for rank, record in records.items()}
    if not all(isinstance(config, dict) for config in configs.values()):
        return ""
    differing = {name: _values(configs, name) for name in sorted({key for config in configs.values() for key in config})}
    differing = {name: values for name, values in differing.items() if values}
    if not differing:
        return ""
    return f" (fields: {', '.join(differing)}): " + ", ".join(f"{name} = {values}" for name, values in differing.items())


def _ranks(ranks: list) -> str:
    """[0, 1, 2, 5] -> "ranks 0-2, 5": stays short at a thousand ranks."""
    ranks = sorted(ranks)
    spans = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
