"""Which calls go over the one-sided transport (symmetric.py), and why others do not. The same on every rank of a group."""
import itertools
import json
import logging
from collections.abc import Callable

import torch
import torch.distributed as dist

from ds_zipccl.codec.format import DEFAULT_SPILL_PER_TILE
from ds_zipccl.collectives import symmetric, symmetric_plan, views
from ds_zipccl.collectives.pairs import reason_for_raw
from ds_zipccl.collectives.registry import Call, CollectiveSpec
from ds_zipccl.collectives.switch import free_bytes
from ds_zipccl.collectives.transport import group_timeout
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.stats import Stats
from zipscape import environment

log = logging.getLogger("ds_zipccl")
_COUNT = itertools.count()          # torch knows memory by names that are used once in a process
#: Where nobody asked for the transport it is tried only while this many times its memory are free besides: who fills his GPU keeps it.
LEFT_FREE = 3
#: Why a call that could go one-sided goes over its process group, beside symmetric.why_not's reasons.
REASONS = {
    "collective": "only all_gather_into_tensor, reduce_scatter_tensor and all_to_all_single",
    "splits": "an all_to_all_single with split lists, or any while split_lists allows some ranks to pass them and others not",
    "average": "an average over a number of ranks that is no power of two",
    "deterministic_reduce": "beyond 2 ranks an adaptive reduction keeps its arithmetic on every machine",
    "device": "not on a GPU, or its kernels are not those of CUDA",
    "integrity": "the frames carry no checksum and are not decoded again",
    "window": "the paper's windows belong to the process group's calls",
    "small_memory": "the symmetric memory has no room for a tile of each rank's",
}


class OneSided:
    """One group's transport. ``open`` and ``close`` by all ranks at the same call; they wait for all of them.

    ``transport`` is None before the first, after the second, and where ``why_not`` says why the group has none.
    """

    def __init__(self, device: torch.device, store: dist.Store, num_bytes: int, left_free: int = 0):
        """``store``: no other use of it has the prefix "one_sided". ``num_bytes`` of memory on every GPU, where ``left_free`` bytes more
        are free."""
        self.transport: symmetric.SymmetricTransport | None = None
        self.why_not: str | None = None
        self.num_overflows = 0                  # of transports that are gone
        self.name = ""                          # the group's, while it has one
        self._device, self._store, self._num_bytes, self._left_free, self._num_opened = device, store, num_bytes, left_free, 0

    def open(self, group: dist.ProcessGroup) -> None:
        """What ranks are is asked once, whether they have memory each time. Never raises for what a group cannot do."""
        if self.transport is not None or self.why_not not in (None, "no_memory"):
            return
        first, self._num_opened = self._num_opened == 0, self._num_opened + 1
        if group.size() > symmetric.MAX_RANKS:
            self.why_not = "too_many_ranks"
            return
        store = dist.PrefixStore(f"one_sided/{self._num_opened}", self._store)

        def agree(name: str, record: dict) -> str | None:
            return symmetric.why_not(exchange(dist.PrefixStore(name, store), group.rank(), group.size(), record))

        self.why_not = agree("places", symmetric.place_of(self._device)) if first else None
        if self.why_not is None:                # only now, for it may mean to compile
            self.why_not = agree("kernels", symmetric.kernels_of()) if first else None
        if self.why_not is None:
            self._open(group, store, agree)

    @property
    def held_bytes(self) -> int:
        """Of symmetric memory on this GPU."""
        return 0 if self.transport is None else self._num_bytes

    def _open(self, group: dist.ProcessGroup, store: dist.Store, agree) -> None:
        reserved, record, free = None, {}, free_bytes(self._device) if self._left_free else None
        if free is not None and free < self._num_bytes + self._left_free:
            record["no_memory"] = f"{free} bytes are free"
        else:
            try:
                reserved = symmetric.reserve(self._device, self._num_bytes)
            except RuntimeError as error:
                record["no_memory"] = str(error)
        self.why_not, transport, record = agree("memory", record), None, {}
        if self.why_not is not None:
            return
        try:
            transport = symmetric.open_transport(group, self._device, reserved, dist.PrefixStore("addresses", store),
                                                 f"zipccl/{group.group_name}/{next(_COUNT)}", group_timeout(group, self._device))
        except Exception as error:              # torch's, of many kinds: a container that forbids it, a driver that cannot
            log.info("symmetric memory of group %s", group.group_name, exc_info=True)
            record["not_opened"] = str(error)
        self.why_not = agree("opened", record)
        if self.why_not is None:
            self.transport, self.name = transport, group.group_name
            log.info("symmetric memory of group %s: %d bytes on each GPU", self.name, self._num_bytes)
        elif transport is not None:
            transport.abort()

    def close(self) -> None:
        """Waits for the calls in flight, and gives the memory back."""
        if self.transport is not None:
            self._end("close")
            log.info("symmetric memory of group %s: given back", self.name)

    def abort(self) -> None:
        """At once, on this rank alone."""
        self._end("abort")

    def _end(self, how: str) -> None:
        transport, self.transport = self.transport, None
        if transport is not None:
            getattr(transport, how)()
            self.num_overflows += transport.num_overflows


def exchange(store: dist.Store, rank: int, world_size: int, record: dict) -> list[dict]:
    """All ranks' records, in rank order."""
    store.set(f"record/{rank}", json.dumps(record))
    return [json.loads(store.get(f"record/{peer}")) for peer in range(world_size)]


def memory_bytes(config: ZipcclConfig) -> int:
    """Of each group's symmetric memory on a GPU. ``ZIPCCL_SYMMETRIC_BYTES`` is for tests."""
    return min(config.max_workspace_bytes, environment.number("ZIPCCL_SYMMETRIC_BYTES"))


def ranges_of_row(config: ZipcclConfig, dtype: torch.dtype, numel: int, world_size: int) -> list[tuple[int, int]]:
    """From where to where frames of a row are made that may be sent one-sided: a message each (``symmetric.plan``)."""
    cut = None if config.transport == "process_group" else symmetric_plan.plan(
        dtype, numel, world_size, True, DEFAULT_SPILL_PER_TILE, memory_bytes(config) - symmetric_plan.words_bytes(world_size))
    starts = (0,) if cut is None else cut.starts
    return list(zip(starts, (*starts[1:], numel), strict=True))


def reason_by_kind(config: ZipcclConfig, kernels: str | None, name: str, call: Call) -> str | None:
    """Why calls of the collective ``name``, on ``call``'s device and with its reduction, are not for the transport, whatever their sizes
    and groups: a key of REASONS, or None. ``kernels``: the set for the device."""
    if name not in _LAUNCH:
        return "collective"
    if call.device.type != "cuda" or kernels != "cuda":
        return "device"
    if name == "all_to_all_single" and config.split_lists != "all_or_none":
        return "splits"
    if config.integrity != "off":
        return "integrity"
    if config.window != "block":
        return "window"
    return "average" if views.averages(call) and call.world_size & (call.world_size - 1) else None


def reason_against(config: ZipcclConfig, kernels: str | None, spec: CollectiveSpec, call: Call) -> str | None:
    """The same of an eligible call."""
    reason = reason_by_kind(config, kernels, spec.name, call)
    if reason is not None:
        return reason
    if call.input_splits is not None or call.output_splits is not None:
        return "splits"
    if spec.reduces and call.world_size > 2 and config.deterministic_reduce and getattr(config.collectives, spec.family) != "always":
        return "deterministic_reduce"
    # Of an all-to-all nobody has looked yet whether its pieces are worth it; a bound on frames does not concern calls in parts.
    small = reason_for_raw(spec.row_numel(call), call.dtype, spec.whole_numel(call), config) if spec.pairwise else None
    return small if small != "max_workspace_bytes" else None


class Router:
    """Sends the calls of one Runtime over the transport, where they can go, and has the switch measure it."""

    def __init__(self, config: ZipcclConfig, kernels: dict[str, str], stats: Stats):
        """``wanted``: all calls go one-sided that can; ``is_measured``: those that the switch finds faster so."""
        self.wanted, self.is_measured = config.transport == "symmetric_memory", config.transport == "adaptive"
        self._config, self._kernels, self._stats = config, kernels, stats
        self._groups: dict[int, OneSided] = {}             # by id of the group's state
        self._num_overflows = 0                            # of groups that are gone
        self.price: Callable[[Call], object] = lambda call: None           # what finding out how a call goes costs before it comes here
        #: What makes a call that was made before again, None: nothing shorter.
        self.repeat: Callable[[Call, object], Callable | None] = lambda call, state: None
        if self.wanted:
            self._tell()

    def reason_against(self, spec: CollectiveSpec, call: Call) -> str | None:
        """Why an eligible call cannot go there, whatever its group."""
        return reason_against(self._config, self._kernels.get(call.device.type), spec, call)

    def is_choice(self, spec: CollectiveSpec, call: Call) -> bool:
        """Whether the switch has to choose even for an eligible call that must be zipped."""
        return self.is_measured and self.reason_against(spec, call) is None

    def run(self, spec: CollectiveSpec, call: Call, state) -> dist.Work | None:
        """Launches an eligible call and counts it; None, counted with the reason: it goes over its process group. ``state``: the group's;
        all ranks come here with the same calls in the same order."""
        reason = self.reason_against(spec, call)
        if reason is None:
            one_sided = self._opened(call.group, call.device, state)
            reason = one_sided.why_not
        if reason is None:
            state.settle()                      # what is sent again must be queued on all ranks before what waits for peers
            work = _launch(spec.name, one_sided.transport, call)
            if work is not None:
                self._stats.zipped(spec.name, spec.raw_bytes(call), work.sent_bytes, one_sided=True)
                return work
            reason = "small_memory"
        self._stats.not_one_sided(spec.name, reason)
        return None

    def known(self, call: Call, state) -> symmetric.Known | None:
        """To make calls like this one, which ``run`` has just launched; None: not by one call of C."""
        transport = None if views.averages(call) else self._opened(call.group, call.device, state).transport
        known = getattr(transport, "known", None)
        return known and known(_LAUNCH[call.op], _whole(call.output), _whole(call.input))

    def _opened(self, group: dist.ProcessGroup, device: torch.device, state, again: bool = False) -> OneSided:
        """``again``: where there was no memory, ranks look anew whether there is some."""
        one_sided = self._groups.get(id(state))
        if one_sided is None:
            num_bytes = memory_bytes(self._config)
            one_sided = self._groups[id(state)] = OneSided(device, state.side.store, num_bytes,
                                                           LEFT_FREE * num_bytes if self.is_measured else 0)
        if one_sided.transport is None and (again or one_sided.why_not is None):
            one_sided.open(group)
            if one_sided.transport is not None:
                self._tell()
        return one_sided

    def prober(self, spec: CollectiveSpec, call: Call, state) -> Callable[[Call], bool] | None:
        """What carries out the switch's test calls for such calls: whether it could. None, counted and logged with the reason: the group
        or its calls can't go there. All ranks at the same call, for the transport is opened."""
        name = "all_to_all_single" if spec.pairwise else spec.name            # lists and splits of test calls are equal pieces too
        reason = reason_by_kind(self._config, self._kernels.get(call.device.type), name, call)
        if reason is None:
            one_sided = self._opened(call.group, call.device, state, again=True)
            reason = one_sided.why_not
        if reason is not None:
            if reason not in ("collective", "device"):          # which nobody expects
                self._stats.not_one_sided(spec.name, reason)
                log.info("%s on group %s is not measured one-sided: %s", spec.name, call.group.group_name, REASONS.get(reason, reason))
            return None

        again: dict[int, Callable] = {}             # what makes a test call again, as known calls are made

        def run(test: Call) -> bool:
            work = again[id(test)]() if id(test) in again else None
            if work is None:
                self.price(test)
                self.reason_against(spec, test)
                state.settle()
                work = _launch(name, one_sided.transport, test)
                if work is not None and (known := self.repeat(test, state)) is not None:
                    again[id(test)] = known
            return work is not None and work.wait()

        return run

    def for_rows(self, call: Call, state, again: bool = False) -> tuple[symmetric.SymmetricTransport | None, str | None]:
        """(the group's transport, for ``gather_rows`` of calls like ``call``; why there is none). All ranks at the same call.
        ``again``: see ``_opened``."""
        reason = reason_by_kind(self._config, self._kernels.get(call.device.type), call.op, call)
        if reason is not None:
            return None, reason
        one_sided = self._opened(call.group, call.device, state, again)
        return one_sided.transport, one_sided.why_not

    def keep_what_wins(self, state) -> None:
        """After something was measured, by all ranks: no memory is kept that no call of the group uses."""
        if not self.wanted and not state.goes_one_sided() and (one_sided := self._groups.get(id(state))) is not None:
            one_sided.close()

    def close(self, state) -> None:
        """Of a group, all ranks at the same point; waits for the calls in flight."""
        self._end(state, OneSided.close)

    def abort(self, state) -> None:
        """Of a group, if it has not been closed: at once, on this rank alone."""
        self._end(state, OneSided.abort)

    def _end(self, state, end) -> None:
        one_sided = self._groups.pop(id(state), None)
        if one_sided is not None:
            end(one_sided)
            self._num_overflows += one_sided.num_overflows

    def _tell(self) -> None:
        self._stats.sections |= {"one_sided": self._section, "symmetric_memory": self._memory}

    def _memory(self) -> tuple[dict, dict]:
        """A section of the step log: ({}, {group: bytes that it holds on this GPU})."""
        return {}, {group.name: group.held_bytes for group in self._groups.values() if group.held_bytes}

    def _section(self) -> tuple[dict, dict]:
        """A section of the step log: (frames that this rank has sent raw since they overflowed, groups that have the transport)."""
        transports = [group.transport for group in self._groups.values() if group.transport is not None]
        ended = self._num_overflows + sum(group.num_overflows for group in self._groups.values())
        return {"overflows": ended + sum(t.num_overflows for t in transports)}, {"num_groups": len(transports)}


def _launch(name: str, transport: symmetric.SymmetricTransport, call: Call) -> symmetric.SymmetricWork | None:
    call = views.as_sum(call)
    return getattr(transport, _LAUNCH[name])(_whole(call.output), _whole(call.input))


def _whole(tensors) -> torch.Tensor:
    """[n] of a tensor, or of a list whose rows lie one after another."""
    return views.flat(tensors if isinstance(tensors, torch.Tensor) else views.as_rows(list(tensors)))


#: The transport's method, by collective.
_LAUNCH = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "all_to_all_single": "all_to_all"}
