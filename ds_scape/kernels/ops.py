"""SCAPE's kernels: declared once, implemented by name.

A *kernel set* is a module (or object) with the functions below; ``impl_*.py`` files register theirs. The reference takes every device and
float dtype; the others take contiguous tensors whose state (weights, momentum, residual, q) is fp32, and give the same bits. NaNs are NaNs
in all of them, with any payload; where they decide an order (``select``), their payload is that of the reference on the same device.

P: elements of a partition. n: elements of whatever is meant. k: coordinates that are sent. Positions ascend, each
stands once; they are 4 bytes without a sign, in int32 (impl_reference.places), and int64 where a part has 2^32 elements or more.

``pack_mask(mask, dense, encoding, max_ones)``
    bool [n] -> the message, uint8, without the coordinates in ``dense`` (tuple of (start, stop), ascending): "bits", ceil(n / 8) bytes,
    lowest bit first; or "indices", per block of 65,536 its number of ones (uint32), then the 16-bit offsets of at most max_ones ones inside
    their blocks, ascending, the rest 0.
``unpack_mask(message, numel, dense, encoding, sizes, counts)``
    The inverse with ``dense`` put back in, cut into parts of ``sizes`` elements (they sum up to numel): (positions in each part, how many
    ones each part has, an iterable). Where that is not ``counts`` the message is corrupt and the positions mean nothing; -1: it contradicts
    itself.
``enter(residual, gradient, factor, index, values, first, square, own_start, beta2)``
    residual [n] += factor * gradient [n] (None: nothing enters; the product is rounded to fp32 first), then what is sent is taken out:
    values = residual in the values' dtype, residual -= values, at the positions ``index - first`` (None: everywhere; values None: nothing
    is taken). With ``square`` [P], q = beta2 * q + (1 - beta2) * g^2 from the gradient's elements from own_start on, as they enter.
``track_square(square, gradient, factor, beta2)``
    That last part alone, gradient [P].
``scatter(target, index, values)``
    target[index] = values, one dtype.
``take_ages(last_sync, index, first, step, out)``
    out [k] = last_sync at the positions ``index - first`` (None: everywhere), which becomes ``step`` there.
``mark_overdue(rank_by, last_sync, step, max_age)``
    The sign of rank_by [n] becomes negative where step - last_sync >= max_age, positive elsewhere.
``select(rank_by, square, last_sync, step, max_age, segments, chosen=None, empty=None, hints=None)``
    bool [P], ``chosen`` or a new tensor: per segment (start, stop, count) exactly ``count`` coordinates: those with step - last_sync >=
    max_age first, then by |rank_by| / (sqrt(square) + 1e-9) (square None: by rank_by, >= 0), ties by lowest index. NaN is above all.
    Segments ascend; what lies outside of them is False. empty(numel, dtype): makes what is needed beside it, aligned to 16 bytes. hints: a
    dict, empty at first, in which a set keeps what makes the next choice of the same kind faster, whatever it is; the choice is the same.
    (Kernels.select also takes no last_sync: then first are those whose rank_by has a sign.)
``owner_step(weight, momentum, last_sync, mean_value, index, step, tables, decay, lr, beta2, eps, catch_up, out)``
    The rule of docs/scape.md for the coordinates at ``index`` (None: all): weight and momentum [P] are moved in place from
    mean_value [k], last_sync ([P], or [k]: of these coordinates alone) becomes ``step``, out [k] gets the new weights. tables: four
    tensors [max_age + 1] (A, 1 - A, c, a - c by age); decay: [H + 1] products by age, None: no decay. Ages beyond a table count as its
    last entry. last_sync: int32, or int16, which is the step's number modulo 65,536: then ages, here from 1 to 65,536 and for ``select``
    from 0, are right up to there.
``sum_of_squares(tensor)``
    float64 [1]. Element i is added to lane i % L, one after another, L being 2^19 or the power of two that is enough; then the upper half
    of the lanes to the lower one, until one is left. Squares and sums are in double precision.
``dense_step(weight, momentum, gradient, lr, kept, taken, beta2, eps, decay, correction)``
    One AdamS step, all [n]: m's weight ``kept``, the gradient's ``taken``; weight *= decay; both uses of m are divided by ``correction``.

Numbers (lr, factor, ...) are Python floats that are rounded to the state's dtype once. On a GPU everything is queued on the current stream;
nothing waits for it but who reads how many ones unpack_mask found.
"""
import logging
from collections import Counter
from types import SimpleNamespace

import torch

from ds_scape.errors import KernelError
from ds_scape.kernels import impl_reference
from zipscape.errors import describe

log = logging.getLogger("ds_scape")
FUNCTIONS = ("pack_mask", "unpack_mask", "enter", "track_square", "scatter", "take_ages", "mark_overdue", "select", "owner_step",
             "dense_step", "sum_of_squares")
_STATE = (torch.float32,)
_DATA = (torch.float32, torch.bfloat16, torch.float16)
_SETS: dict[str, SimpleNamespace] = {}

#: (operation, reason) -> number of calls of this process that the reference did in place of another set.
fallbacks: Counter = Counter()


def register(name: str, functions, device_types: tuple[str, ...]) -> None:
    """Makes a kernel set available under ``name`` for tensors on the given device types. ``isa`` (CPU) or ``built_by`` (GPU), where it has
    one, says which of its builds is in use."""
    _SETS[name] = SimpleNamespace(name=name, device_types=device_types,
                                  built=getattr(functions, "isa", None) or getattr(functions, "built_by", None),
                                  **{f: getattr(functions, f) for f in FUNCTIONS})


def kernel_set(name: str) -> SimpleNamespace:
    """The set registered under ``name``. Raises KernelError when there is none (loader.py builds and registers them)."""
    if name not in _SETS:
        raise KernelError(describe("no such kernel set is loaded", got=name, expected=sorted(_SETS)))
    return _SETS[name]


register("reference", impl_reference, ("cpu", "cuda"))


class Kernels:
    """The operations with the sets that were chosen, by device type: what an optimizer calls (loader.choose makes it)."""

    def __init__(self, names: dict[str, str], explicit: str | None = None):
        """names: device type -> set; the reference for all others. explicit: the set that was asked for by name: it never falls back, what
        it cannot take is a KernelError."""
        self.names, self._explicit = dict(names), explicit
        self._sets = {device_type: kernel_set(name) for device_type, name in names.items()}

    def __deepcopy__(self, memo):
        return self

    def _for(self, operation: str, state: tuple, data: tuple = (), others: tuple = ()):
        """The function to call, by the tensors that are given: of the state, data of any float dtype, others."""
        first = next(t for t in (*state, *data, *others) if t is not None)
        chosen = self._sets.get(first.device.type)
        if chosen is None or chosen.name == "reference":
            return getattr(impl_reference, operation)
        reason = _unsuitable(first.device, state, data, others)
        if reason is None:
            return getattr(chosen, operation)
        if chosen.name == self._explicit:
            raise KernelError(describe(f"kernels {chosen.name!r} were asked for and cannot do {operation}", got=reason,
                                       todo='set "kernels": "best" to let the reference do what they cannot'))
        if not fallbacks[operation, reason]:
            log.warning("kernels %r cannot do %s here, the slower reference does: %s", chosen.name, operation, reason)
        fallbacks[operation, reason] += 1
        return getattr(impl_reference, operation)

    def pack_mask(self, mask, dense, encoding, max_ones) -> torch.Tensor:
        return self._for("pack_mask", (), (), (mask,))(mask, dense, encoding, max_ones)

    def unpack_mask(self, message, numel, dense, encoding, sizes, counts):
        return self._for("unpack_mask", (), (), (message,))(message, numel, dense, encoding, sizes, counts)

    def enter(self, residual, gradient, factor, index=None, values=None, *, first=0, square=None, own_start=0, beta2=0.0) -> None:
        function = self._for("enter", (residual, square), (gradient, values), (index,))
        function(residual, gradient, factor, index, values, first, square, own_start, beta2)

    def track_square(self, square, gradient, factor, *, beta2) -> None:
        self._for("track_square", (square,), (gradient,))(square, gradient, factor, beta2)

    def sum_of_squares(self, tensor) -> torch.Tensor:
        return self._for("sum_of_squares", (), (tensor,))(tensor)

    def scatter(self, target, index, values) -> None:
        self._for("scatter", (), (target, values), (index,))(target, index, values)

    def take_ages(self, last_sync, index, first, step, out) -> None:
        self._for("take_ages", (), (), (last_sync, index, out))(last_sync, index, first, step, out)

    def mark_overdue(self, rank_by, last_sync, step, max_age) -> None:
        self._for("mark_overdue", (rank_by,), (), (last_sync,))(rank_by, last_sync, step, max_age)

    def select(self, rank_by, square, last_sync, step, max_age, segments, chosen=None, empty=None, hints=None) -> torch.Tensor:
        if last_sync is None:               # read as a step's number, -1 - x is at least 0 where x has the sign
            last_sync, step, max_age = impl_reference.upper_halves(rank_by), -1, 0
        function = self._for("select", (rank_by, square), (), (last_sync, chosen))
        return function(rank_by, square, last_sync, step, max_age, segments, chosen, empty, hints)

    def owner_step(self, weight, momentum, last_sync, mean_value, index, step, tables, decay, *, lr, beta2, eps, catch_up, out) -> None:
        function = self._for("owner_step", (weight, momentum, mean_value, decay, *tables), (out,), (last_sync, index))
        function(weight, momentum, last_sync, mean_value, index, step, tables, decay, lr, beta2, eps, catch_up, out)

    def dense_step(self, weight, momentum, gradient, *, lr, kept, taken, beta2, eps, decay, correction=1.0) -> None:
        self._for("dense_step", (weight, momentum, gradient))(weight, momentum, gradient, lr, kept, taken, beta2, eps, decay, correction)


def _unsuitable(device, state, data, others) -> str | None:
    """Why the sets other than the reference cannot take these tensors. Sizes are the caller's affair."""
    for dtypes, tensors in ((_STATE, state), (_DATA, data), (None, others)):
        for t in tensors:
            if t is None:
                continue
            if dtypes is not None and t.dtype not in dtypes:
                return f"{t.dtype} where it takes {' or '.join(map(str, dtypes))}"
            if t.device != device:
                return "tensors on different devices"
            if not t.is_contiguous():
                return "a tensor that is not contiguous"
    return None


REFERENCE = Kernels({})
