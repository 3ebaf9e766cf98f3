"""The arguments of SCAPE's kernels as C structs, the same for C++ and CUDA (csrc/scape/calls.h): addresses, sizes, numbers."""
import ctypes

import torch

_I32, _I64, _PTR, _FLOAT = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
DTYPE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def _address(t: torch.Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def index_bytes(index: torch.Tensor | None) -> int:
    """Of one position."""
    return 4 if index is None else index.element_size()


class Numbers(ctypes.Structure):
    _fields_ = [(name, _FLOAT) for name in ("lr", "beta2", "rest2", "eps")]


class Enter(ctypes.Structure):
    _fields_ = [*((name, _PTR) for name in ("residual", "gradient", "index", "values", "square", "starts")),
                *((name, _I64) for name in ("num", "num_index", "first", "own_start", "own_num")),
                *((name, _I32) for name in ("gradient_dtype", "values_dtype", "index_bytes")),
                *((name, _FLOAT) for name in ("factor", "beta2", "rest2"))]


class Select(ctypes.Structure):
    _fields_ = [*((name, _PTR) for name in ("rank_by", "square", "last_sync", "chosen")), ("num", _I64),
                *((name, _I32) for name in ("step", "max_age", "last_bytes"))]


class Owner(ctypes.Structure):
    _fields_ = [*((name, _PTR) for name in ("weight", "momentum", "last_sync", "mean", "index", "kept", "taken", "moved", "gradient_moved",
                                            "decay", "out")),
                *((name, _I64) for name in ("num", "num_tables", "num_decay")),
                *((name, _I32) for name in ("step", "catch_up", "out_dtype", "index_bytes", "last_bytes", "lasts_by_place")),
                ("numbers", Numbers)]


class Dense(ctypes.Structure):
    _fields_ = [*((name, _PTR) for name in ("weight", "momentum", "gradient")), ("num", _I64),
                *((name, _FLOAT) for name in ("kept", "taken", "decay", "correction")), ("numbers", Numbers)]


class Scratch(ctypes.Structure):
    """Of select on a GPU (csrc/scape/select.cuh)."""
    _fields_ = [*((name, _PTR) for name in ("search_of_tile", "groups", "searches", "histograms", "notes", "num_notes", "num_equal",
                                            "equal_before")),
                *((name, _I64) for name in ("num_tiles", "num_groups", "num_searches", "by_fours"))]


def enter(residual, gradient, factor, index, values, first, square, own_start, beta2, starts=None) -> Enter:
    tensors = (residual, gradient, index, values, square, starts)
    return Enter(*map(_address, tensors), residual.numel(),
                 0 if index is None else index.numel(), first, own_start, 0 if square is None else square.numel(),
                 0 if gradient is None else DTYPE[gradient.dtype], 0 if values is None else DTYPE[values.dtype], index_bytes(index),
                 factor, beta2, 1 - beta2)


def select(rank_by, square, last_sync, chosen, step, max_age) -> Select:
    return Select(_address(rank_by), _address(square), _address(last_sync), _address(chosen), rank_by.numel(), step, max_age,
                  last_sync.element_size())


def ages(last_sync, index, first, step, out) -> tuple:
    """The arguments of take_ages, up to the stream or the number of threads."""
    return (_address(last_sync), last_sync.element_size(), _address(index), index_bytes(index), first, out.numel(), step, _address(out))


def owner(weight, momentum, last_sync, mean_value, index, step, tables, decay, lr, beta2, eps, catch_up, out) -> Owner:
    tensors = (weight, momentum, last_sync, mean_value, index, *tables, decay, out)
    return Owner(*map(_address, tensors), mean_value.numel(), tables[0].numel(), 0 if decay is None else decay.numel(), step, catch_up,
                 DTYPE[out.dtype], index_bytes(index), last_sync.element_size(), last_sync.numel() != weight.numel(),
                 Numbers(lr, beta2, 1 - beta2, eps))


def dense(weight, momentum, gradient, lr, kept, taken, beta2, eps, decay, correction) -> Dense:
    return Dense(_address(weight), _address(momentum), _address(gradient), weight.numel(), kept, taken, decay, correction,
                 Numbers(lr, beta2, 1 - beta2, eps))
