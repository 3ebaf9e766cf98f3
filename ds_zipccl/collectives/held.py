"""A Runtime all of whose calls go native for a while, whatever the switch says of them, and then go again as it says.

All ranks hold and release at the same point of their programs. Meanwhile nothing counts for the switch: ranks agree afterwards as before.
"""
import functools
from collections.abc import Callable

from ds_zipccl.collectives.registry import Call, specs
from ds_zipccl.collectives.runtime import Runtime

SPECS = specs(internal=True)


def hold(runtime: Runtime, reason: str) -> None:
    """Every call from now on goes native, counted with this reason where it has no other."""
    runtime.held = reason
    runtime.again, runtime.decide = _nothing, functools.partial(_decide, runtime)
    runtime.native_calls.forget()


def release(runtime: Runtime) -> None:
    """Undoes ``hold``."""
    if runtime.held is not None:
        runtime.held, runtime.again = None, runtime.repeats.again
        del runtime.decide                                  # the class's is found again
        runtime.native_calls.forget()


def _nothing(*_) -> None:
    """Of ``Runtime.again``."""


def _decide(runtime: Runtime, call: Call, reason_against: Callable[[], str | None] | None = None) -> None:
    """Stands for ``Runtime.decide``."""
    runtime.advance(call.group)
    runtime.before_native(call.group, call.device)
    known = runtime.native_calls.find_any(call)
    if known is not None:
        runtime.show_native(call.group)
        known.add(call.reduce_op, call.root)
        return
    spec, reason = SPECS[call.op], (reason_against() if reason_against else None) or runtime.held
    raw_bytes = 0 if spec.internal else spec.raw_bytes(call)
    runtime.native(call.op, reason, raw_bytes)
    runtime.remember_native(spec, call, reason, raw_bytes, None)
