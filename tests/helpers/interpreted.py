"""Triton's interpreter, for processes that run its kernels on a CPU."""
import inspect
import re

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def spare_time() -> None:
    """Leaves out what the interpreter does again and again, or for nothing; results stay the same. Versions that do this otherwise are
    left alone."""
    _replace_the_language_once()
    _look_up_types_of_numpy()
    _check_no_overflow_that_is_not_reported()
    _know_shapes()


def _check_no_overflow_that_is_not_reported() -> None:
    """Sums and products are made a second time, in 64 bits, and compared; what that finds is thrown away unless kernels are debugged."""
    check, assert_on = (getattr(TritonSemantic, name, None) for name in ("binary_op_sanitize_overflow_impl", "device_assert"))
    if check is None or assert_on is None or "options.debug" not in inspect.getsource(assert_on):
        return

    def checked(self, *args):
        return check(self, *args) if self.builder.options.debug else None

    TritonSemantic.binary_op_sanitize_overflow_impl = checked


def _know_shapes() -> None:
    """Every tensor and every type of one makes objects of its shape: of the few shapes that there are."""
    of_tensor, of_type, shapes, types = tl.tensor.__init__, tl.block_type.__init__, {}, {}
    wants = {of_tensor: {"handle", "shape", "numel", "type", "dtype"}, of_type: {"element_ty", "shape", "numel", "name"}}
    if any(set(re.findall(r"self\.(\w+) = ", inspect.getsource(function))) != names for function, names in wants.items()):
        return

    def tensor(self, handle, type):
        shape = tuple(type.shape) if type.is_block() else ()
        if shape in shapes:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = shapes[shape]
        else:
            of_tensor(self, handle, type)
            shapes[shape] = self.shape, self.numel

    def block_type(self, element_ty, shape):
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key in types:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = types[key]
        else:
            of_type(self, element_ty, shape)
            types[key] = self.shape, self.numel, self.name

    tl.tensor.__init__, tl.block_type.__init__ = tensor, block_type


def _replace_the_language_once() -> None:
    """At every call of a function within a kernel the interpreter looks through its whole language, and replaces what the kernel's launch
    has replaced already: two fifths of its time. Now only launches do."""
    patch, scope = getattr(interpreter, "_patch_lang", None), getattr(interpreter, "_LangPatchScope", None)
    if patch is None or scope is None:
        return
    replaced = set()                    # modules of the language, while a kernel runs

    class Launch(scope):
        def restore(self):
            super().restore()
            replaced.clear()

    def once(function):
        languages = {id(value) for value in function.__globals__.values() if value is interpreter.tl or value is interpreter.tl.core}
        if languages <= replaced:
            return scope()
        replaced.update(languages)
        return patch(function)

    interpreter._LangPatchScope, interpreter._patch_lang = Launch, once


def _look_up_types_of_numpy() -> None:
    """A table of all types is made at every call; the type of a block's elements decides."""
    numpy_type = getattr(interpreter, "_get_np_dtype", None)
    if numpy_type is not None:
        known = {}

        def numpy_type_of(type):
            name = type.scalar.name
            if name not in known:
                known[name] = numpy_type(type)
            return known[name]

        interpreter._get_np_dtype = numpy_type_of
