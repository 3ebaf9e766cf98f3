"""C functions of our libraries as functions of CPython's own kind (csrc/zipccl/python.h), without its headers."""
import ctypes
import sys

_P = ctypes.c_void_p
_FASTCALL = 0x80                        # METH_FASTCALL: of Python's stable interface since 3.10
_FROM_PYTHON = ("PyLong_AsUnsignedLongLong", "PyLong_FromLong", "PyEval_SaveThread", "PyEval_RestoreThread")


class _Definition(ctypes.Structure):
    """CPython's PyMethodDef."""
    _fields_ = [("name", ctypes.c_char_p), ("function", _P), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p)]


_kept: list[_Definition] = []           # functions need theirs as long as they are


def functions(library: ctypes.CDLL, prefix: str, *names: str) -> list | None:
    """Functions that take ints, and return one, for each C function ``prefix``_NAME_python; ``prefix``_python is told of Python's own
    first. None: this is another Python than CPython."""
    if sys.implementation.name != "cpython":
        return None
    table = (_P * len(_FROM_PYTHON))(*[ctypes.cast(getattr(ctypes.pythonapi, name), _P) for name in _FROM_PYTHON])
    getattr(library, f"{prefix}_python")(table)
    new = ctypes.PYFUNCTYPE(ctypes.py_object, _P, _P, _P)(("PyCFunction_NewEx", ctypes.pythonapi))
    definitions = [_Definition(name.encode(), ctypes.cast(getattr(library, f"{prefix}_{name}_python"), _P), _FASTCALL) for name in names]
    _kept.extend(definitions)
    return [new(ctypes.addressof(each), None, None) for each in definitions]
