"""Carries out calls: decides native or zipped, runs the chosen path, keeps the counters. Knows no host framework."""
import logging

import torch
import torch.distributed as dist

from ds_zipccl.codec.codec import Codec
from ds_zipccl.codec.integrity import CODECS
from ds_zipccl.collectives import all_gather, reduce_scatter, switch  # noqa: F401  importing a collective registers it
from ds_zipccl.collectives.capacity import Capacity
from ds_zipccl.collectives.group_state import GroupState
from ds_zipccl.collectives.registry import Call, CollectiveSpec, specs
from ds_zipccl.collectives.work import DoneWork, Pending, ZipWork
from ds_zipccl.collectives.workspace import Workspace
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.stats import Stats

log = logging.getLogger("ds_zipccl")
STATUS_BYTES = 4


class _Launch:
    """What a collective needs while it is launched: the group's side channel, frames from the workspace, the
    encoder."""

    def __init__(self, runtime: "Runtime", state: GroupState, device: torch.device):
        self.side = state.side
        self.status = torch.zeros(1, dtype=torch.int32, device=device)
        self._workspace, self._device, self._taken = runtime.workspace, device, []

    def take_frames(self, codec: Codec, num_rows: int) -> torch.Tensor:
        """Frames [num_rows, frame_bytes] that go back to the workspace when the call is finished."""
        buffer = self._workspace.take(num_rows * codec.frame_bytes, self._device)
        self._taken.append(buffer)
        return buffer.view(num_rows, codec.frame_bytes)

    def encode(self, codec: Codec, rows: torch.Tensor, frames: torch.Tensor, skip: int = -1) -> None:
        codec.encode(rows, frames, self.status, skip)

    def release(self) -> None:
        for buffer in self._taken:
            self._workspace.give(buffer)


class Runtime:
    """One per process and configuration. All methods are called with tensors of one device type."""

    def __init__(self, config: ZipcclConfig, kernels: dict[str, str], stats: Stats | None = None):
        """``kernels``: name of the kernel set per device type, from ``kernels.loader.resolve``."""
        self.config, self.kernels = config, kernels
        self.stats = stats or Stats()
        self.workspace = Workspace(config.max_workspace_bytes)
        self._specs = specs()
        self._groups: dict[str, dict[str, GroupState]] = {}         # by group name and device type
        self._seen_reasons: set[tuple[str, str]] = set()

    def run(self, call: Call, reason: str | None) -> dist.Work | None:
        """Launches ``call`` zipped and returns its Work; returns None where the caller must use its native collective.

        ``reason``: why the front found the call not eligible (None: it is). Must be called by all ranks of the group in
        the same order.
        """
        spec = self._specs[call.op]
        raw_bytes = spec.row_numel(call) * call.input.element_size() * (call.world_size - 1)
        self.settle(call.group)
        if reason is None:
            state = self._state(call)
            reason = self._choose(spec, call, state)
        if reason is None:
            spill = self._capacity(spec, call, state).next_call()
            if spill is not None:
                return self._launch(spec, call, state, spill, raw_bytes)
            reason = "incompressible"
        self.native(call.op, reason, raw_bytes)
        if reason == "incompressible" and spec.reduces and call.world_size > 2:
            spec.uncompressed(call)             # the arithmetic must not depend on whether the data compresses
            return DoneWork()
        return None

    def native(self, op: str, reason: str, raw_bytes: int) -> None:
        """Counts a native call and logs each new reason once."""
        self.stats.native(op, reason, raw_bytes)
        if (op, reason) not in self._seen_reasons:
            self._seen_reasons.add((op, reason))
            log.debug("%s goes native: %s", op, reason)

    def settle(self, group: dist.ProcessGroup) -> None:
        """Settles the calls in flight on ``group``: before any further collective on it, also one that is none of ours."""
        for state in self._groups.get(group.group_name, {}).values():
            if state.group is group:
                state.settle()

    def close(self, group: dist.ProcessGroup | None = None) -> None:
        """Completes what is in flight on ``group`` (None: on all) and drops its communicators, whatever fails; then
        raises the first failure. All ranks of the group at the same point."""
        # By name, not by age: ranks meet their groups in different orders, and a resend needs both ends.
        names = sorted(self._groups) if group is None else [group.group_name]
        failures = []
        for name in names:
            for state in self._groups.pop(name, {}).values():
                try:
                    state.close()
                except Exception as error:
                    failures.append(error)
        if group is None:
            self.workspace.clear()
        if failures:
            raise failures[0]

    def _state(self, call: Call) -> GroupState:
        """A group may serve CPU and GPU tensors; each kind needs a side channel of its own."""
        states = self._groups.setdefault(call.group.group_name, {})
        state = states.get(call.input.device.type)
        if state is None or state.group is not call.group:
            state = states[call.input.device.type] = GroupState(call.group, call.input.device)
        return state

    def _choose(self, spec: CollectiveSpec, call: Call, state: GroupState) -> str | None:
        """None: zipped. Else the reason for native."""
        choice = getattr(self.config.collectives, spec.family)
        if choice == "always":
            return None
        if spec.reduces and call.world_size > 2 and self.config.deterministic_reduce:
            return "deterministic_reduce"
        key = (call.op, call.input.dtype, switch.size_class(spec.whole_numel(call) * call.input.element_size()))
        if key not in state.decisions:
            state.decisions[key] = switch.probe(spec, call, lambda test: self._run_to_end(spec, test, state), state.side)
            log.info("%s of about %d bytes on group %s: %s", call.op, 1 << key[2], call.group.group_name,
                     "zipped" if state.decisions[key] else "native")
        return None if state.decisions[key] else "native_is_faster"

    @staticmethod
    def _capacity(spec: CollectiveSpec, call: Call, state: GroupState) -> Capacity:
        return state.capacity(call.op, call.input.dtype, spec.row_numel(call), spec.first_spill)

    def _codec(self, spec: CollectiveSpec, call: Call, spill_per_tile: int) -> Codec:
        device_type = call.input.device.type
        return CODECS[self.config.integrity].of(call.input.dtype, spec.row_numel(call), device_type, spill_per_tile=spill_per_tile,
                        kernels=self.kernels[device_type])

    def _launch(self, spec: CollectiveSpec, call: Call, state: GroupState, spill_per_tile: int, raw_bytes: int) -> ZipWork:
        codec = self._codec(spec, call, spill_per_tile)
        pending = self._pending(spec, call, state, codec, raw_bytes)
        state.add(pending)
        self.stats.zipped(call.op, raw_bytes, (codec.frame_bytes + STATUS_BYTES) * (call.world_size - 1))
        return ZipWork(pending, state)

    def _pending(self, spec: CollectiveSpec, call: Call, state: GroupState, codec: Codec, raw_bytes: int) -> Pending:
        device = call.input.device
        launch = _Launch(self, state, device)
        words = torch.empty(call.world_size, dtype=torch.int32, device=device)
        payload_work, finish = spec.zipped(call, launch, codec)
        status_work = state.side.all_gather(words, launch.status)

        def settled(need: int, overflow: bool) -> None:
            self._capacity(spec, call, state).observe(need, overflow)
            if overflow:
                self.stats.overflow(call.op, raw_bytes)

        def keep_input() -> None:
            if device.type == "cuda":       # read here, perhaps on another stream than the one it was allocated on
                call.input.record_stream(torch.cuda.current_stream(device))

        def finish_on_this_stream() -> None:
            finish()
            keep_input()

        def resend_on_this_stream() -> None:
            spec.resend(call, launch)
            keep_input()

        return Pending(words=words, status_work=status_work, payload_work=payload_work, finish=finish_on_this_stream,
                       resend=resend_on_this_stream, on_settled=settled, release=launch.release,
                       status_stream=state.status_stream)

    def _run_to_end(self, spec: CollectiveSpec, call: Call, state: GroupState) -> None:
        """A zipped call that is not counted and leaves no trace in the capacities: for probes."""
        codec = self._codec(spec, call, Capacity.of(spec.row_numel(call), call.input.element_size(), spec.first_spill).spill_per_tile)
        launch = _Launch(self, state, call.input.device)
        payload_work, finish = spec.zipped(call, launch, codec)
        words = torch.empty(call.world_size, dtype=torch.int32, device=call.input.device)
        state.side.all_gather(words, launch.status).wait()
        words.tolist()
        payload_work.wait()
        finish()
        launch.release()
