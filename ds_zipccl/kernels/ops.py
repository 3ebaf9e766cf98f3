"""The codec's kernels: declared once, implemented by name.

A *kernel set* is a module (or object) with three functions; ``impl_*.py`` files register theirs. The torch operators
``torch.ops.zipccl.*`` (with fake functions, so that torch.compile and opcheck know them) dispatch to the set that is
named in the call: an explicit name never falls back to another.

Shapes, for ``n = geometry.numel`` elements per frame and ``P`` pieces:

``encode(x, frames, status, g, skip=-1)``
    ``x`` [P, n] float (each row contiguous), ``frames`` [P, stride] uint8 with stride >= g.frame_bytes, ``status``
    int32 [1]. Writes ``frames[i, :g.frame_bytes]`` for every i but ``skip``, and to ``status`` the largest need of the
    frames in bits 0..15, bit 16 if any of them overflowed, their largest spill need in bits 17..30 (docs/format.md, section 6).
``decode(frames, out, g, skip=-1)``
    Writes ``out`` [P, n] from ``frames`` but for row ``skip``. Raises FrameError on a corrupt or overflowed frame.
``decode_reduce(frames, own, own_index, out, g)``
    ``out`` [n] = the sum over the P rows in row order, where row ``own_index`` is taken from ``own`` [n] and the others
    from their frames. fp32 accumulator that starts as row 0's value (so -0 + -0 stays -0), one rounding to nearest even
    at the end, NaN results are the canonical quiet NaN (BF16 0x7fc0). ``out`` must not overlap ``frames``; it may be
    ``own``.

On a GPU everything is queued on the current stream and nothing waits for it; on a CPU the functions return when done.

``bind_encode``, ``bind_decode``, ``bind_decode_reduce``: the same for calls that come again and again with the same frames. All but the
tensors is checked and decided once; what comes back takes the rows as one dense tensor. A kernel set may bring its own, which then take
addresses alone; for the others the plain functions are called with views.
"""
from types import SimpleNamespace

import torch

from ds_zipccl.errors import KernelError
from ds_zipccl.kernels.geometry import Geometry
from zipscape.errors import describe

FUNCTIONS = ("encode", "decode", "decode_reduce")
BINDERS = ("bind_encode", "bind_decode", "bind_decode_reduce")
_SETS: dict[str, SimpleNamespace] = {}


def register(name: str, functions, device_types: tuple[str, ...]) -> None:
    """Makes a kernel set available under ``name`` for tensors on the given device types.

    A set whose decode cannot raise without waiting for its device also has ``raise_on_error(device)``, which waits and raises
    FrameError for what was decoded since the last call; ``None`` where decode raises by itself. ``isa`` (CPU) or ``built_by`` (GPU), where
    a set has it, says which of its builds is in use. ``levels``, where it is not (1,): the compression levels it knows. ``launch_calls``
    (launch_calls.LaunchCalls, with ``workspace``, ``unread_word``), where a set has it: what a call queues can be prepared.
    """
    _SETS[name] = SimpleNamespace(name=name, device_types=device_types, raise_on_error=getattr(functions, "raise_on_error", None),
                                  built=getattr(functions, "isa", None) or getattr(functions, "built_by", None),
                                  levels=getattr(functions, "levels", (1,)),
                                  launcher=functions if getattr(functions, "launch_calls", None) is not None else None,
                                  **{f: getattr(functions, f) for f in FUNCTIONS},
                                  **{f: getattr(functions, f, None) for f in BINDERS})


def kernel_set(name: str) -> SimpleNamespace:
    """The set registered under ``name``. Raises KernelError when there is none (loader.py builds and registers
    them)."""
    if name not in _SETS:
        raise KernelError(describe("no such kernel set is loaded", got=name, expected=sorted(_SETS)))
    return _SETS[name]


def _check(name: str, g: Geometry, *tensors: torch.Tensor) -> SimpleNamespace:
    chosen = kernel_set(name)
    if g.level not in chosen.levels:
        raise KernelError(describe(f"kernel set {name!r} does not know this compression level", got=g.level,
                                   expected=" or ".join(map(str, chosen.levels))))
    for t in tensors:
        if t.device.type not in chosen.device_types:
            raise KernelError(describe(f"kernel set {name!r} does not serve this device", got=str(t.device),
                                       expected=" or ".join(chosen.device_types)))
        if t.stride(-1) != 1 and t.numel() > 1:
            raise KernelError(describe("kernel argument is not contiguous in its last dimension", got=tuple(t.stride())))
    return chosen


def _constants(g: Geometry) -> list[int]:
    return g.flatten()


_constants._dynamo_marked_constant = True           # what torch.compiler.assume_constant_result does, after importing the whole compiler


def encode(x: torch.Tensor, frames: torch.Tensor, status: torch.Tensor, g: Geometry, skip: int = -1, *, kernels: str) -> None:
    """Encodes the rows of ``x`` (module docstring) with the named kernel set."""
    chosen = _check(kernels, g, x, frames, status)
    if x.shape != (frames.shape[0], g.numel) or frames.shape[1] < g.frame_bytes:
        raise KernelError(describe("encode: shapes do not match", got=(tuple(x.shape), tuple(frames.shape)),
                                   expected=f"[P, {g.numel}] and [P, >= {g.frame_bytes}]"))
    if torch.compiler.is_compiling():
        torch.ops.zipccl.encode(x, frames, status, _constants(g), skip, kernels)
    else:
        chosen.encode(x, frames, status, g, skip)


def decode(frames: torch.Tensor, out: torch.Tensor, g: Geometry, skip: int = -1, *, kernels: str) -> None:
    """Decodes the frames into the rows of ``out`` (module docstring) with the named kernel set."""
    chosen = _check(kernels, g, frames, out)
    if out.shape != (frames.shape[0], g.numel) or frames.shape[1] < g.frame_bytes:
        raise KernelError(describe("decode: shapes do not match", got=(tuple(frames.shape), tuple(out.shape)),
                                   expected=f"[P, >= {g.frame_bytes}] and [P, {g.numel}]"))
    if torch.compiler.is_compiling():
        torch.ops.zipccl.decode(frames, out, _constants(g), skip, kernels)
    else:
        chosen.decode(frames, out, g, skip)


def decode_reduce(frames: torch.Tensor, own: torch.Tensor, own_index: int, out: torch.Tensor, g: Geometry, *,
                  kernels: str) -> None:
    """Sums decoded frames and ``own`` in row order into ``out`` (module docstring) with the named kernel set."""
    chosen = _check(kernels, g, frames, own, out)
    if own.shape != (g.numel,) or out.shape != (g.numel,) or frames.shape[1] < g.frame_bytes \
            or not 0 <= own_index < frames.shape[0]:
        raise KernelError(describe("decode_reduce: shapes do not match",
                                   got=(tuple(frames.shape), tuple(own.shape), own_index, tuple(out.shape)),
                                   expected=f"[P, >= {g.frame_bytes}], [{g.numel}], 0..P-1, [{g.numel}]"))
    if torch.compiler.is_compiling():
        torch.ops.zipccl.decode_reduce(frames, own, own_index, out, _constants(g), kernels)
    else:
        chosen.decode_reduce(frames, own, own_index, out, g)


def rows_of(x: torch.Tensor, offset: int, num_rows: int, g: Geometry) -> torch.Tensor:
    """[num_rows, n] of a dense tensor: its elements in the order of memory, from ``offset`` on."""
    return x.as_strided((num_rows, g.numel), (g.numel, 1), x.storage_offset() + offset)


def enough(t: torch.Tensor, numel: int) -> None:
    """What a bound function that takes addresses must know of a tensor."""
    if t.numel() < numel:
        raise KernelError(describe("a tensor is too small for the call it was given to", got=t.numel(), expected=f">= {numel} elements"))


def bind_encode(frames: torch.Tensor, status: torch.Tensor, g: Geometry, skip: int = -1, offset: int = 0, *, kernels: str):
    """A function of a dense tensor ``x``, which encodes the rows that begin at its element ``offset``."""
    chosen, num_rows = _check(kernels, g, frames, status), frames.shape[0]
    if frames.shape[1] < g.frame_bytes:
        raise KernelError(describe("encode: frames are too small", got=tuple(frames.shape), expected=f"[P, >= {g.frame_bytes}]"))
    if chosen.bind_encode is not None:
        return chosen.bind_encode(frames, status, g, skip, offset)
    return lambda x: chosen.encode(rows_of(x, offset, num_rows, g), frames, status, g, skip)


def bind_decode(frames: torch.Tensor, g: Geometry, skip: int = -1, offset: int = 0, *, kernels: str):
    """A function of a dense tensor ``out``, which fills the rows that begin at its element ``offset``."""
    chosen, num_rows = _check(kernels, g, frames), frames.shape[0]
    if frames.shape[1] < g.frame_bytes:
        raise KernelError(describe("decode: frames are too small", got=tuple(frames.shape), expected=f"[P, >= {g.frame_bytes}]"))
    if chosen.bind_decode is not None:
        return chosen.bind_decode(frames, g, skip, offset)
    return lambda out: chosen.decode(frames, rows_of(out, offset, num_rows, g), g, skip)


def bind_decode_reduce(frames: torch.Tensor, own_index: int, g: Geometry, offset: int = 0, *, kernels: str):
    """A function of two dense tensors: ``x``, at whose element ``offset`` the own row begins, and ``out`` [n]."""
    chosen = _check(kernels, g, frames)
    if frames.shape[1] < g.frame_bytes or not 0 <= own_index < frames.shape[0]:
        raise KernelError(describe("decode_reduce: shapes do not match", got=(tuple(frames.shape), own_index),
                                   expected=f"[P, >= {g.frame_bytes}], 0..P-1"))
    if chosen.bind_decode_reduce is not None:
        return chosen.bind_decode_reduce(frames, own_index, g, offset)
    return lambda x, out: chosen.decode_reduce(frames, rows_of(x, offset, 1, g)[0], own_index, rows_of(out, 0, 1, g)[0], g)


# The same three as torch operators: what torch.compile sees in place of pointers and threads.
_LIBRARY = torch.library.Library("zipccl", "DEF")
_LIBRARY.define("encode(Tensor x, Tensor(a!) frames, Tensor(b!) status, int[] geometry, int skip, str kernels) -> ()")
_LIBRARY.define("decode(Tensor frames, Tensor(a!) out, int[] geometry, int skip, str kernels) -> ()")
_LIBRARY.define("decode_reduce(Tensor frames, Tensor own, int own_index, Tensor(a!) out, int[] geometry, str kernels) -> ()")


@torch.library.impl(_LIBRARY, "encode", "CompositeExplicitAutograd")
def _encode_op(x, frames, status, geometry, skip, kernels):
    kernel_set(kernels).encode(x, frames, status, Geometry.unflatten(geometry), skip)


@torch.library.impl(_LIBRARY, "decode", "CompositeExplicitAutograd")
def _decode_op(frames, out, geometry, skip, kernels):
    kernel_set(kernels).decode(frames, out, Geometry.unflatten(geometry), skip)


@torch.library.impl(_LIBRARY, "decode_reduce", "CompositeExplicitAutograd")
def _decode_reduce_op(frames, own, own_index, out, geometry, kernels):
    kernel_set(kernels).decode_reduce(frames, own, own_index, out, Geometry.unflatten(geometry))


for _name in FUNCTIONS:
    torch.library.register_fake(f"zipccl::{_name}", lambda *args: None, lib=_LIBRARY)      # they only write what they are given
