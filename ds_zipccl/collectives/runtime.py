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
from ds_zipccl.collectives.cost import ONE_SIDED, WAYS, ZIPPED
from ds_zipccl.collectives.group_state import GroupState
from ds_zipccl.collectives.launch import STATUS_BYTES, Flight, Kind, Launch  # noqa: F401  others count status words too
from ds_zipccl.collectives.native_calls import NativeCalls, list_signature, signature
from ds_zipccl.collectives.one_sided import Router
from ds_zipccl.collectives.registry import Call, CollectiveSpec, specs
from ds_zipccl.collectives.repeats import Repeats
from ds_zipccl.collectives.views import is_plain, simplified
from ds_zipccl.collectives.work import DoneWork, Pending, ZipWork
from ds_zipccl.collectives.workspace import Workspace
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.stats import Stats

log = logging.getLogger("ds_zipccl")

MAX_KINDS = 4096
_NO_STATES: dict[str, GroupState] = {}


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
        self.native_calls = NativeCalls(self.stats, config.look_calls)
        self.known_native = self.native_calls.shown             # for fronts that look into it
        self._kinds: dict[tuple, Kind] = {}
        self.repeats = Repeats(config.look_calls)
        self.again = self.repeats.again                        # the first step of ``run``
        self.held: str | None = None                            # why all calls go native for now (held.py)
        self._one_sided = Router(config, kernels, self.stats)
        self._one_sided.price = lambda call: self._known_kind(self._key(call), call)
        self._one_sided.repeat = lambda *which: self.repeats.one_sided(*which, self._one_sided)
        self.stats.sections["switch"] = self._switch_report
        self.stats.sections["switch_times"] = self._switch_times
        self.stats.sections["words"] = self._words_report

    def run(self, call: Call, reason_against: Callable[[], str | None] | None = None) -> dist.Work | None:
        """Launches ``call`` zipped and returns its Work; returns None where the caller must use its native collective.

        ``reason_against()``: why the front finds the call not eligible (None: it is); not asked for calls that went native before. Must be
        called by all ranks of the group in the same order, but for calls that ``native_calls.find`` finds.
        """
        return self.again(call) or self.decide(call, reason_against)

    def decide(self, call: Call, reason_against: Callable[[], str | None] | None = None) -> dist.Work | None:
        """``run`` of a call that ``again`` has nothing for."""
        decided, flight = self.repeats.launch(call)
        if flight is not None:
            return self._counted(flight, self._launched(flight, decided.state, call.outputs, None, call.op))
        self.advance(call.group)
        known = self.native_calls.find_any(call) if decided is None else None
        if known is not None:
            self.before_native(call.group, call.device)
            self.show_native(call.group)
            known.add(call.reduce_op, call.root)
            return None
        key = self._key(call) if decided is None else None
        spec, kind = self._specs[call.op], decided or self._known_kind(key, call)
        if kind is not None:
            reason, state = None, kind.state
        else:
            reason = reason_against() if reason_against else None
            if self.config.asks_each_call and call.world_size > 1 and call.device.type in self.kernels:
                check(spec, call, self.state(call.group, call.device), self.config.nan_check != "off")
            state = None if reason else self.state(call.group, call.device)
        if reason is None and self._one_sided.wanted:
            work = self._run_one_sided(spec, call, state, kind, key)
            if work is not None:
                return work
        if reason is None and decided is None:
            reason = self._choose(spec, call, state, kind)
            if reason is ONE_SIDED:
                work, reason = self._run_one_sided(spec, call, state, kind, key), None
                if work is not None:
                    return work
        if reason is None:
            inner, store = call, None
            if kind is None:
                inner, store = simplified(call)
                pieces = parts.cut(spec, inner, self.config)
                if len(pieces) > 1:
                    return self._run_parts(call, pieces, state, store)
                kind = self._new_kind(key, spec, call, state) if inner is call else self._kind_of_ours(spec, inner, state)
            started = self._start(spec, inner, state, call.outputs, store, kind=kind)
            if not isinstance(started, str):
                work, flight = started
                if inner is call and kind is not None and not self._one_sided.wanted:
                    self.repeats.remember(call, kind, flight, self._groups[call.group.group_name], self._one_sided.is_choice(spec, call))
                return self._counted(flight, work)
            reason = started
        self.before_native(call.group, call.device)
        keeps_arithmetic = reason == "incompressible" and spec.reduces and call.world_size > 2
        raw_bytes = 0 if spec.internal and not keeps_arithmetic else spec.raw_bytes(call)
        self.native(call.op, reason, raw_bytes)
        self.remember_native(spec, call, reason, raw_bytes, state)
        if keeps_arithmetic:                    # it must not depend on whether the data compresses
            spec.uncompressed(inner)
            if store is not None:
                store()
            return DoneWork(call.outputs)
        return None

    def _run_one_sided(self, spec: CollectiveSpec, call: Call, state: GroupState, kind: Kind | None, key: tuple | None) -> dist.Work | None:
        """None: over the process group."""
        work = self._one_sided.run(spec, call, state)
        if work is not None and (kind := kind or self._new_kind(key, spec, call, state)) is not None:
            self.repeats.remember_one_sided(call, kind, self._groups[call.group.group_name], self._one_sided, self.stats)
        return work

    def remember_native(self, spec: CollectiveSpec, call: Call, reason: str, raw_bytes: int, state: GroupState | None) -> None:
        """An all-to-all of equal pieces, or of lists, is remembered where the switch found all of them slower, which both ends of a pair
        know alike; not on a CPU, where a rank without zipped pieces takes part in the others' words."""
        if self.config.asks_each_call:
            return
        measured = None
        if spec.pairwise:
            if reason != "native_is_faster" or call.device.type != "cuda":
                return
            measured = state.measured("pair", call.dtype)
            if measured.costs is None:          # nobody has asked for them yet
                return
        elif reason == "native_is_faster":
            measured = state.measured(call.op, call.dtype)
        if call.root is not None:
            raw_bytes = spec.raw_bytes(replace(call, root=call.rank))
        self.native_calls.remember(call, reason, raw_bytes, measured)
        self.show_native(call.group)

    def show_native(self, group: dist.ProcessGroup) -> None:
        """A call that comes into flight meanwhile, in another thread, hides them again; so does this, if it came just before."""
        self.native_calls.show(group)
        if any(state.in_flight for state in self._groups.get(group.group_name, _NO_STATES).values()):
            self.native_calls.hide(id(group))

    def _known_kind(self, key: tuple | None, call: Call) -> Kind | None:
        """What was found out when such a call could be zipped, if it holds for this one too: all but this is in ``signature``."""
        kind = self._kinds.get(key)
        if kind is None or not is_plain(call.output) or call.input is not call.output and not is_plain(call.input):
            return None
        if kind.shapes is not None and kind.shapes != (call.output.shape, call.input.shape):
            return None
        return None if kind.on_gpu and streams.is_capturing() else kind

    def _key(self, call: Call) -> tuple | None:
        """By which calls of one kind are known; None: such a call may not come again, or all ranks check each."""
        return None if self.config.asks_each_call else signature(call) or list_signature(call)

    def _kind_of_ours(self, spec: CollectiveSpec, call: Call, state: GroupState) -> Kind | None:
        """Of a call that is ours, not the user's: nothing follows from it for his."""
        key = self._key(call)
        key = key and ("ours", *key)
        return self._known_kind(key, call) or self._new_kind(key, spec, call, state)

    def _new_kind(self, key: tuple | None, spec: CollectiveSpec, call: Call, state: GroupState) -> Kind | None:
        if key is None or spec.pairwise and isinstance(call.input, tuple) or not is_plain(call.output) or not is_plain(call.input):
            return None
        if len(self._kinds) >= MAX_KINDS:
            self._kinds.clear()
        kind = self._kinds[key] = Kind(spec, self._launch(spec, call, state))
        if spec.pairwise:                       # torch splits the first dimension
            kind.shapes = call.output.shape, call.input.shape
        return kind

    @property
    def router(self) -> Router:
        """To the one-sided transport."""
        return self._one_sided

    def native(self, op: str, reason: str, raw_bytes: int) -> None:
        """Counts a native call and logs each new reason once."""
        self.stats.native(op, reason, raw_bytes)
        if (op, reason) not in self._seen_reasons:
            self._seen_reasons.add((op, reason))
            log.debug("%s goes native: %s", op, reason)

    def settle(self, group: dist.ProcessGroup) -> None:
        """Settles the calls in flight on ``group``: before the host waits for its ranks in a call that is none of ours."""
        for state in self._groups.get(group.group_name, _NO_STATES).values():
            if state.in_flight and state.group is group:
                state.settle()

    def settle_all(self) -> None:
        """The same on all groups, in an order that all ranks share."""
        for name in sorted(self._groups):
            for state in self._groups[name].values():
                state.settle()

    def advance(self, group: dist.ProcessGroup) -> None:
        """Before any call on the group or its channels, zipped or native."""
        for state in self._groups.get(group.group_name, _NO_STATES).values():
            if state.in_flight and state.group is group:
                state.advance()

    def before_native(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Without a GPU a native call may hold the host, while another rank waits for something from it: the group's thread would have to
        find that nobody else does it."""
        if device.type == "cpu":
            self.settle(group)

    def close(self, group: dist.ProcessGroup | None = None) -> None:
        """Completes what is in flight on ``group`` (None: on all) and drops its communicators, whatever fails; then
        raises the first failure. All ranks of the group at the same point."""
        # By name, not by age: ranks meet their groups in different orders, and a resend needs both ends.
        self.native_calls.forget(group)
        names = sorted(self._groups) if group is None else [group.group_name]
        failures = []
        for name in names:
            for state in self._groups.pop(name, {}).values():
                for close in (functools.partial(self._one_sided.close, state), state.close):
                    try:
                        close()
                    except Exception as error:
                        failures.append(error)
                self._forget_calls(state)
        if group is None:
            self.workspace.clear()
        if failures:
            raise failures[0]

    def _forget_calls(self, state: GroupState) -> None:
        """What was made ready for the calls of a group that ends."""
        self._one_sided.abort(state)
        self.repeats.forget(state)
        self._kinds = {key: kind for key, kind in self._kinds.items() if kind.state is not state}
        self.workspace.drop(lambda flight: flight.launch.state is state)

    def abort(self, group: dist.ProcessGroup) -> None:
        """Drops the communicators of ``group`` at once; the calls in flight on it fail. On this rank alone."""
        self.native_calls.forget(group)
        for state in self._groups.pop(group.group_name, {}).values():
            state.abort("its group was aborted")
            self._forget_calls(state)

    def state(self, group: dist.ProcessGroup, device: torch.device) -> GroupState:
        """A group may serve CPU and GPU tensors; each kind needs a side channel of its own."""
        states = self._groups.setdefault(group.group_name, {})
        state = states.get(device.type)
        if state is None or state.group is not group:
            if state is not None and state.group is not None:
                state.abort("another group has its name, so it was destroyed")
                self._forget_calls(state)
            self._forget_gone()
            state = states[device.type] = GroupState(group, device)
            state.when_busy = self.native_calls.hiding(group)
        return state

    def _forget_gone(self) -> None:
        for states in self._groups.values():
            for kind in [kind for kind, state in states.items() if state.group is None]:
                self._forget_calls(states.pop(kind))

    def measure(self, op: str, dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device) -> bool:
        """What such calls cost, ahead of the first one, if the switch will be asked; whether it was measured. All ranks of the group."""
        spec, state = self._specs[op], self.state(group, device)
        call, measured = spec.make_call(group, 1, dtype, device), state.measured("pair" if spec.pairwise else op, dtype)
        if measured.costs is not None or not switch.decides(spec, call, self.config, self._one_sided):
            return False
        run_zipped, router = functools.partial(self._run_to_end, spec, state=state, kinds={}), self._one_sided
        switch.measure_now(measured, spec, call, run_zipped, state, self.config, router if router.is_measured else None)
        self.workspace.drop(lambda flight: flight.launch.trial)
        return True

    def _choose(self, spec: CollectiveSpec, call: Call, state: GroupState, kind: Kind | None) -> str | None:
        """None: zipped; ONE_SIDED: the same over symmetric memory. Else the reason for native."""
        if kind is not None and kind.choice is not None and kind.choice.holds(self.config.look_calls):
            return ONE_SIDED if kind.choice.way == ONE_SIDED else None
        choice, router = getattr(self.config.collectives, spec.family), self._one_sided
        if choice == "always" and not router.is_choice(spec, call):
            return None
        if choice != "always" and spec.reduces and call.world_size > 2 and self.config.deterministic_reduce:
            return "deterministic_reduce"
        kinds: dict[int, tuple] = {}
        run_zipped = functools.partial(self._run_to_end, spec, state=state, kinds=kinds)
        choose = switch.choose_for_pairs if spec.pairwise else switch.choose
        way = choose(spec, call, run_zipped, state, self.config, router if router.is_measured else None)
        if kinds:
            self.workspace.drop(lambda flight: flight.launch.trial)
        if kind is not None:
            kind.choice = switch.zipped_again(spec, call, state, way) if way in WAYS else None
        if way == ONE_SIDED:
            return ONE_SIDED
        return None if way == ZIPPED or choice == "always" else "native_is_faster"

    def _switch_report(self) -> tuple[dict, dict]:
        """A section of the step log: (no counters, from how many bytes on calls of each group are zipped)."""
        return {}, {name: report for name, states in self._groups.items() for state in states.values() if (report := state.switch_report())}

    def _switch_times(self) -> tuple[dict, dict]:
        """The same: (no counters, what was measured since this was asked last)."""
        return {}, {name: times for name, states in self._groups.items() for state in states.values() if (times := state.new_times())}

    def _words_report(self) -> tuple[dict, dict]:
        """A section of the step log: (no counters, how each group's status words go)."""
        return {}, {name: state.side.words_go_by for name, states in self._groups.items() for state in states.values()}

    def _launch(self, spec: CollectiveSpec, call: Call, state: GroupState, trial: bool = False) -> Launch:
        return Launch(spec=spec, config=self.config, choice=getattr(self.config.collectives, spec.family),
                      kernels=self.kernels[call.device.type], workspace=self.workspace, state=state, device=call.device,
                      stats=None if trial else self.stats, trial=trial)

    def _run_parts(self, call: Call, pieces: list[Call], state: GroupState, store) -> parts.PartsWork:
        """``call`` in ``pieces``, counted as one. A piece that is not zipped is carried out at once, as raw bytes."""
        num_zipped = raw_total = wire_total = 0
        ends_raw = False

        def launch(piece: Call) -> ZipWork | None:
            nonlocal num_zipped, raw_total, wire_total, ends_raw
            spec, is_last = self._specs[piece.op], piece is pieces[-1]
            state.advance()
            started = self._start(spec, piece, state, call.outputs, store if is_last else None, call.op,
                                  self._kind_of_ours(spec, piece, state))
            if not isinstance(started, str):
                work, flight = started
                num_zipped, raw_total, wire_total = num_zipped + 1, raw_total + flight.raw_bytes, wire_total + flight.wire_bytes
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
            if store is not None:
                store()
        return work

    def _start(self, spec: CollectiveSpec, call: Call, state: GroupState, outputs, store, op: str | None = None,
               kind: Kind | None = None) -> tuple[ZipWork, Flight] | str:
        """Launches a zipped call: (its Work, its flight), or returns the reason why not. ``store()``: fills the user's ``outputs`` from the
        call's. ``op``: under whose name an overflow is counted, the call's own by default."""
        launch = self._launch(spec, call, state) if kind is None else kind.launch
        flight = launching.start(spec, call, launch, kind)
        if isinstance(flight, str):
            return flight
        return self._launched(flight, state, outputs, store, op or call.op), flight

    @staticmethod
    def _launched(flight: Flight, state: GroupState, outputs, store, op: str) -> ZipWork:
        flight.outputs, flight.store, flight.op = outputs, store, op
        pending = Pending.of_flight(flight, state)
        state.add(pending)
        return ZipWork.of(pending, state)

    def _counted(self, flight: Flight, work: ZipWork) -> ZipWork:
        self.stats.zipped(flight.op, flight.raw_bytes, flight.wire_bytes)
        return work

    def _run_to_end(self, spec: CollectiveSpec, call: Call, state: GroupState, kinds: dict[int, tuple]) -> bool:
        """A zipped call that is not counted and leaves no trace in the capacities, for probes; False where it is none. ``kinds``: of the
        probes so far, by id: one that is repeated must cost what a repeated call costs, not what a first one does."""
        kind, known = kinds.get(id(call), (None, None))
        if known is not None and (work := self.again(call, known)) is not None:
            return work.wait()
        self._known_kind(self._key(call), call)     # finding out how a call goes is part of its price
        state.settle()                              # what is sent again must not come between
        kind = kind or Kind(spec, self._launch(spec, call, state, trial=True))
        flight = launching.start(spec, call, kind.launch, kind)
        if isinstance(flight, str):
            return False
        Pending.of_flight(flight, state).finish()
        kinds[id(call)] = kind, known or self.repeats.known_as(call, kind, flight, self._groups[call.group.group_name])
        return True
