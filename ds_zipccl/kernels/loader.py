"""Builds and registers kernel sets, and chooses one: by name, or the best for a device. No choice falls back
silently."""
import functools
import logging

from ds_zipccl.errors import KernelError
from ds_zipccl.kernels import impl_reference, ops
from zipscape.errors import BuildError, describe

log = logging.getLogger("ds_zipccl")

# best first; each entry: name, device types it serves, module with load() -> functions
PREFERENCE = (("cpu", ("cpu",), "impl_cpu"), ("cuda", ("cuda",), "impl_cuda"), ("triton", ("cuda",), "impl_triton"),
              ("reference", ("cpu", "cuda"), "impl_reference"))
NAMES = tuple(name for name, _, _ in PREFERENCE)

ops.register("reference", impl_reference, ("cpu", "cuda"))


@functools.cache
def load(name: str) -> str | None:
    """Builds (at first use) and registers the set ``name``. Returns None, or why it is not available: tried once a
    process."""
    if name == "reference":
        return None
    for known, device_types, module in PREFERENCE:
        if known == name:
            try:
                functions = __import__(f"ds_zipccl.kernels.{module}", fromlist=["load"]).load()
            except BuildError as error:
                return str(error)
            ops.register(name, functions, device_types)
            return None
    return f"there is no kernel set of this name; known: {', '.join(NAMES)}"


def resolve(requested: str, device_type: str, level: int = 1) -> str:
    """The name of the kernel set to use on ``device_type`` ("cpu" or "cuda") at a compression level.

    ``requested`` "best" takes the first available of PREFERENCE and logs once what it had to pass over; any other name
    is taken literally. Raises KernelError when the named set is not available, does not serve the device or does not know the level.
    """
    if requested != "best":
        reason = load(requested)
        if reason is None and device_type not in ops.kernel_set(requested).device_types:
            reason = f"it serves {' and '.join(ops.kernel_set(requested).device_types)} tensors, not {device_type}"
        if reason is None and level not in ops.kernel_set(requested).levels:
            reason = f"it knows level {' and '.join(map(str, ops.kernel_set(requested).levels))} alone, not level {level}"
        if reason is not None:
            raise KernelError(describe(f"kernels {requested!r} were asked for and cannot be used", got=reason,
                                       todo='repair the build, or set "kernels": "best" to take what works'))
        return requested
    return _best(device_type, level)


@functools.cache
def _best(device_type: str, level: int) -> str:
    for name, device_types, _ in PREFERENCE:
        if device_type not in device_types:
            continue
        reason = load(name)
        if reason is None:
            if level in ops.kernel_set(name).levels:
                return name
            reason = f"they do not know level {level}"
        log.warning("kernels %r are not available, slower ones are used: %s", name, reason)
    raise KernelError(describe("no kernel set serves this device", got=device_type, expected="cpu or cuda"))


def report() -> dict[str, dict]:
    """What is available: {name: {"available": bool, "devices": [...], "built": str or None, "reason": str or None}}.

    Builds what is not built yet; "built" says which instruction set or compiler is in use.
    """
    rows = {}
    for name, device_types, _ in PREFERENCE:
        reason = load(name)
        built = ops.kernel_set(name).built if reason is None else None
        rows[name] = {"available": reason is None, "devices": list(device_types), "built": built, "reason": reason}
    return rows
