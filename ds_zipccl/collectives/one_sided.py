"""Which calls go over the one-sided transport (symmetric.py), and why others do not. The same on every rank of a group."""
import itertools
import json
import os

import torch
import torch.distributed as dist

from ds_zipccl.collectives import symmetric, views
from ds_zipccl.collectives.pairs import reason_for_raw
from ds_zipccl.collectives.registry import Call, CollectiveSpec
from ds_zipccl.collectives.transport import group_timeout
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.stats import Stats

_COUNT = itertools.count()          # torch knows memory by names that are used once in a process
#: Why a call that could go one-sided goes over its process group, beside symmetric.why_not's reasons.
REASONS = {
    "collective": "only all_gather_into_tensor, reduce_scatter_tensor and all_to_all_single",
    "splits": "an all_to_all_single with split lists: who passes some is for each rank to say",
    "average": "an average over a number of ranks that is no power of two",
    "deterministic_reduce": "beyond 2 ranks an adaptive reduction keeps its arithmetic on every machine",
    "device": "not on a GPU, or its kernels are not those of CUDA",
    "integrity": "the frames carry no checksum and are not decoded again",
    "window": "the paper's windows belong to the process group's calls",
    "small_memory": "the symmetric memory has no room for a tile of each rank's",
}


class OneSided:
    """One group's transport, or why there is none (``why_not``). Made by all ranks at the same call; waits for them all."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, store: dist.Store, num_bytes: int):
        """``store``: no other use of it has the prefix "one_sided". ``num_bytes`` of memory on every GPU."""
        name, store = f"zipccl/{group.group_name}/{next(_COUNT)}", dist.PrefixStore("one_sided", store)
        record, memory = symmetric.record_of(device), None
        if "error" not in record:
            try:
                memory = symmetric.reserve(device, num_bytes)
            except RuntimeError as error:
                record["no_memory"] = str(error)
        records = exchange(store, group.rank(), group.size(), record)
        self.transport, self.why_not = None, symmetric.why_not(records)
        if self.why_not is None:
            self.transport = symmetric.open_transport(group, device, memory, dist.PrefixStore("memory", store), name,
                                                      group_timeout(group, device))

    def close(self) -> None:
        """All ranks at the same point; waits for the calls in flight."""
        if self.transport is not None:
            self.transport.close()
            self.transport = None

    def abort(self) -> None:
        """At once, on this rank alone."""
        if self.transport is not None:
            self.transport.abort()
            self.transport = None


def exchange(store: dist.Store, rank: int, world_size: int, record: dict) -> list[dict]:
    """All ranks' records, in rank order."""
    store.set(f"record/{rank}", json.dumps(record))
    return [json.loads(store.get(f"record/{peer}")) for peer in range(world_size)]


def memory_bytes(config: ZipcclConfig) -> int:
    """Of each group's symmetric memory on a GPU. ``ZIPCCL_SYMMETRIC_BYTES`` is for tests."""
    return min(config.max_workspace_bytes, int(os.environ.get("ZIPCCL_SYMMETRIC_BYTES", 1 << 30)))


def reason_against(config: ZipcclConfig, kernels: str | None, spec: CollectiveSpec, call: Call) -> str | None:
    """Why an eligible call is not for the transport, whatever the group: a key of REASONS, or None. ``kernels``: the set for its device."""
    if spec.name not in _LAUNCH:
        return "collective"
    if call.device.type != "cuda" or kernels != "cuda":
        return "device"
    if config.integrity != "off":
        return "integrity"
    if config.window != "block":
        return "window"
    if call.input_splits is not None or call.output_splits is not None:
        return "splits"
    if views.averages(call) and call.world_size & (call.world_size - 1):
        return "average"
    if spec.reduces and call.world_size > 2 and config.deterministic_reduce and getattr(config.collectives, spec.family) != "always":
        return "deterministic_reduce"
    # Of an all-to-all nobody has looked yet whether its pieces are worth it; a bound on frames does not concern calls in parts.
    small = reason_for_raw(spec.row_numel(call), call.dtype, spec.whole_numel(call), config) if spec.pairwise else None
    return small if small != "max_workspace_bytes" else None


class Router:
    """Sends the calls of one Runtime over the transport, where they can go."""

    def __init__(self, config: ZipcclConfig, kernels: dict[str, str], stats: Stats):
        self.wanted = config.transport == "symmetric_memory"
        self._config, self._kernels = config, kernels
        self._groups: dict[int, OneSided] = {}             # by id of the group's state
        self._num_overflows = 0                            # of groups that are gone
        if self.wanted:
            stats.sections["one_sided"] = self._section

    def run(self, spec: CollectiveSpec, call: Call, state, stats: Stats) -> dist.Work | None:
        """Launches an eligible call and counts it; None, counted with the reason: it goes over its process group. ``state``: the group's;
        all ranks come here with the same calls in the same order."""
        reason = reason_against(self._config, self._kernels.get(call.device.type), spec, call)
        if reason is None:
            one_sided = self._groups.get(id(state))
            if one_sided is None:
                one_sided = self._groups[id(state)] = OneSided(call.group, call.device, state.side.store, memory_bytes(self._config))
            reason = one_sided.why_not
        if reason is None:
            call = views.as_sum(call)
            work = _LAUNCH[spec.name](one_sided.transport, views.flat(call.output), views.flat(call.input))
            if work is not None:
                stats.zipped(spec.name, spec.raw_bytes(call), work.sent_bytes, one_sided=True)
                return work
            reason = "small_memory"
        stats.not_one_sided(spec.name, reason)
        return None

    def close(self, state) -> None:
        """Of a group, all ranks at the same point; waits for the calls in flight."""
        self._end(state, OneSided.close)

    def abort(self, state) -> None:
        """Of a group, if it has not been closed: at once, on this rank alone."""
        self._end(state, OneSided.abort)

    def _end(self, state, end) -> None:
        one_sided = self._groups.pop(id(state), None)
        if one_sided is not None and one_sided.transport is not None:
            self._num_overflows += one_sided.transport.num_overflows
            end(one_sided)

    def _section(self) -> tuple[dict, dict]:
        """A section of the step log: (frames that this rank has sent raw since they overflowed, groups that have the transport)."""
        transports = [group.transport for group in self._groups.values() if group.transport is not None]
        return {"overflows": self._num_overflows + sum(t.num_overflows for t in transports)}, {"num_groups": len(transports)}


_LAUNCH = {
    "all_gather_into_tensor": symmetric.SymmetricTransport.all_gather,
    "reduce_scatter_tensor": symmetric.SymmetricTransport.reduce_scatter,
    "all_to_all_single": symmetric.SymmetricTransport.all_to_all,
}
