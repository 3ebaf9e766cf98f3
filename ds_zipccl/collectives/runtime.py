"""Carries out calls: decides native or zipped, runs the chosen path, keeps the counters. Knows no host framework."""
import functools
import logging
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from ds_zipccl.collectives import (  # noqa: F401  importing registers
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    parts,
    reduce_scatter,
    reduce_scatter_uneven,
    streams,
    switch,
)
from ds_zipccl.collectives import launch as launching
from ds_zipccl.collectives.check import check
from ds_zipccl.collectives.group_state import GroupState
from ds_zipccl.collectives.launch import STATUS_BYTES, Launch  # noqa: F401  others count status words too
from ds_zipccl.collectives.native_calls import NativeCalls, signature
from ds_zipccl.collectives.registry import Call, CollectiveSpec, specs
from ds_zipccl.collectives.views import as_sum, contiguous
from ds_zipccl.collectives.work import DoneWork, Pending, ZipWork
from ds_zipccl.collectives.workspace import Workspace
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.stats import Stats

log = logging.getLogger("ds_zipccl")


class Runtime:
    """One per process and configuration. All methods are called with tensors of one device type."""

    def __init__(self, config: ZipcclConfig, kernels: dict[str, str], stats: Stats | None = None):
        """``kernels``: name of the kernel set per device type, from ``kernels.loader.resolve``."""
        self.config, self.kernels = config, kernels
        self.stats = stats or Stats()
        self.workspace = Workspace(config.max_workspace_bytes)
        self._specs = specs(internal=True)
        self._groups: dict[str, dict[str, GroupState]] = {}         # by group name and device type
        self._seen_reasons: set[tuple[str, str]] = set()
        self._native_calls = NativeCalls()
        self.stats.sections["switch"] = self._switch_report

    def run(self, call: Call, reason_against: Callable[[], str | None] | None = None) -> dist.Work | None:
        """Launches ``call`` zipped and returns its Work; returns None where the caller must use its native collective.

        ``reason_against()``: why the front finds the call not eligible (None: it is); not asked for calls that went native before. Must be
        called by all ranks of the group in the same order.
        """
        self.settle(call.group)
        key = signature(call) if self.config.integrity == "off" else None
        known = self._native_calls.find(key, self.config.reprobe_calls)
        if known is not None:
            self.stats.native(call.op, known.reason, known.raw_bytes)
            return None
        spec = self._specs[call.op]
        reason = reason_against() if reason_against else None
        if self.config.integrity != "off" and call.world_size > 1 and call.device.type in self.kernels:
            check(spec, call, self.state(call.group, call.device))
        if reason is None:
            state = self.state(call.group, call.device)
            reason = self._choose(spec, call, state)
        if reason is None:
            inner, store = contiguous(call)
            inner = as_sum(inner)
            pieces = parts.cut(spec, inner, self.config)
            if len(pieces) > 1:
                return self._run_parts(call, pieces, state, store)
            started = self._start(spec, inner, state, call.outputs, store)
            if not isinstance(started, str):
                work, raw_bytes, wire_bytes = started
                self.stats.zipped(call.op, raw_bytes, wire_bytes)
                return work
            reason = started
        keeps_arithmetic = reason == "incompressible" and spec.reduces and call.world_size > 2
        raw_bytes = 0 if spec.internal and not keeps_arithmetic else spec.raw_bytes(call)
        self.native(call.op, reason, raw_bytes)
        if not spec.pairwise:
            self._native_calls.remember(key, reason, raw_bytes,
                                        state.measured(call.op, call.dtype) if reason == "native_is_faster" else None)
        if keeps_arithmetic:                    # it must not depend on whether the data compresses
            spec.uncompressed(inner)
            store()
            return DoneWork(call.outputs)
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
        self._native_calls.forget()
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

    def abort(self, group: dist.ProcessGroup) -> None:
        """Drops the communicators of ``group`` at once; the calls in flight on it fail. On this rank alone."""
        self._native_calls.forget()
        for state in self._groups.pop(group.group_name, {}).values():
            state.abort("its group was aborted")

    def state(self, group: dist.ProcessGroup, device: torch.device) -> GroupState:
        """A group may serve CPU and GPU tensors; each kind needs a side channel of its own."""
        states = self._groups.setdefault(group.group_name, {})
        state = states.get(device.type)
        if state is None or state.group is not group:
            if state is not None and state.group is not None:
                state.abort("another group has its name, so it was destroyed")
            self._forget_gone()
            state = states[device.type] = GroupState(group, device)
        return state

    def _forget_gone(self) -> None:
        for states in self._groups.values():
            for kind in [kind for kind, state in states.items() if state.group is None]:
                del states[kind]

    def _choose(self, spec: CollectiveSpec, call: Call, state: GroupState) -> str | None:
        """None: zipped. Else the reason for native."""
        choice = getattr(self.config.collectives, spec.family)
        if choice == "always":
            return None
        if spec.reduces and call.world_size > 2 and self.config.deterministic_reduce:
            return "deterministic_reduce"
        run_zipped = functools.partial(self._run_to_end, spec, state=state)
        decide = switch.pairs_are_measured if spec.pairwise else switch.choose
        return None if decide(spec, call, run_zipped, state, self.config) else "native_is_faster"

    def _switch_report(self) -> tuple[dict, dict]:
        """A section of the step log: (no counters, from how many bytes on calls of each group are zipped)."""
        return {}, {name: report for name, states in self._groups.items() for state in states.values() if (report := state.switch_report())}

    def _launch(self, spec: CollectiveSpec, call: Call, state: GroupState, trial: bool = False) -> Launch:
        return Launch(spec=spec, config=self.config, choice=getattr(self.config.collectives, spec.family),
                      kernels=self.kernels[call.device.type], workspace=self.workspace, state=state, device=call.device, trial=trial)

    def _run_parts(self, call: Call, pieces: list[Call], state: GroupState, store) -> parts.PartsWork:
        """``call`` in ``pieces``, counted as one. A piece that is not zipped is carried out at once, as raw bytes."""
        num_zipped = raw_total = wire_total = 0
        ends_raw = False

        def launch(piece: Call) -> ZipWork | None:
            nonlocal num_zipped, raw_total, wire_total, ends_raw
            spec, is_last = self._specs[piece.op], piece is pieces[-1]
            state.settle()
            started = self._start(spec, piece, state, call.outputs, store if is_last else lambda: None, call.op)
            if not isinstance(started, str):
                work, raw_bytes, wire_bytes = started
                num_zipped, raw_total, wire_total = num_zipped + 1, raw_total + raw_bytes, wire_total + wire_bytes
                return work
            if spec.uncompressed is not None:
                spec.uncompressed(piece)
            else:
                spec.native(piece).wait()
            raw_bytes, ends_raw = spec.raw_bytes(piece), is_last
            raw_total, wire_total = raw_total + raw_bytes, wire_total + raw_bytes
            return None

        work = parts.PartsWork(pieces, launch, call.outputs, state)
        if num_zipped:
            self.stats.zipped(call.op, raw_total, wire_total)
        else:
            self.native(call.op, "incompressible", raw_total)
        if ends_raw:
            work.wait()
            store()
        return work

    def _start(self, spec: CollectiveSpec, call: Call, state: GroupState, outputs, store,
               op: str | None = None) -> tuple[ZipWork, int, int] | str:
        """Launches a zipped call: (its Work, raw bytes, wire bytes), or returns the reason why not. ``store()``: fills the user's
        ``outputs`` from the call's. ``op``: under whose name an overflow is counted, the call's own by default."""
        launch = self._launch(spec, call, state)
        started = launching.start(spec, call, launch)
        if isinstance(started, str):
            return started

        def on_words(words: list[int]) -> None:
            resent_bytes = started.on_words(words)
            if resent_bytes is not None:
                self.stats.overflow(op or call.op, resent_bytes)
                launch.forget_windows()

        def finish() -> None:
            started.finish()
            store()

        pending = self._pending(call, state, launch, replace(started, on_words=on_words, finish=finish), outputs)
        state.add(pending)
        return ZipWork(pending, state), started.raw_bytes, started.wire_bytes

    @staticmethod
    def _pending(call: Call, state: GroupState, launch: Launch, started: launching.Started, outputs=()) -> Pending:

        def keep_tensors(step):
            """``step``, which uses the user's tensors, perhaps on another stream than the one they were allocated on."""

            def run(*args):
                result = step(*args)
                for t in (*call.inputs, *call.outputs, *outputs):
                    streams.keep(t)
                return result

            return run

        return Pending(words=started.words, status_work=started.status_work, payload_work=started.payload_work,
                       finish=keep_tensors(started.finish), on_words=keep_tensors(started.on_words), release=launch.release,
                       outputs=outputs, two_phases=started.two_phases, streams_of=state)

    def _run_to_end(self, spec: CollectiveSpec, call: Call, state: GroupState) -> bool:
        """A zipped call that is not counted and leaves no trace in the capacities, for probes; False where it is none."""
        launch = self._launch(spec, call, state, trial=True)
        started = launching.start(spec, call, launch)
        if isinstance(started, str):
            return False
        self._pending(call, state, launch, started).finish()
        return True
