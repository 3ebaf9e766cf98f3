"""Triton's interpreter, for processes that run its kernels on a CPU."""
from triton.runtime import interpreter


def spare_time() -> None:
    """At every call of a function within a kernel the interpreter looks through its whole language, and replaces what the kernel's launch
    has replaced already: two fifths of its time. Now only launches do. Versions that do this otherwise are left alone."""
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
    numpy_type = getattr(interpreter, "_get_np_dtype", None)
    if numpy_type is not None:          # it makes a table of all types at every call; the type of a block's elements decides
        known = {}

        def numpy_type_of(type):
            name = type.scalar.name
            if name not in known:
                known[name] = numpy_type(type)
            return known[name]

        interpreter._get_np_dtype = numpy_type_of
