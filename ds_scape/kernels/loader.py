"""Builds and registers kernel sets, and chooses: by name, or the best for a device. No choice falls back silently."""
import functools
import logging

from ds_scape.errors import KernelError
from ds_scape.kernels import ops
from zipscape.errors import BuildError, describe

log = logging.getLogger("ds_scape")

# best first; each entry: name, device types it serves, module with load() -> functions
PREFERENCE = (("cpu", ("cpu",), "impl_cpu"), ("cuda", ("cuda",), "impl_cuda"), ("triton", ("cuda",), "impl_triton"),
              ("reference", ("cpu", "cuda"), "impl_reference"))
NAMES = tuple(name for name, _, _ in PREFERENCE)


@functools.cache
def load(name: str) -> str | None:
    """Builds (at first use) and registers the set ``name``. Returns None, or why it is not available: tried once a process."""
    if name == "reference":
        return None
    for known, device_types, module in PREFERENCE:
        if known == name:
            try:
                functions = __import__(f"ds_scape.kernels.{module}", fromlist=["load"]).load()
            except BuildError as error:
                return str(error)
            ops.register(name, functions, device_types)
            return None
    return f"there is no kernel set of this name; known: {', '.join(NAMES)}"


@functools.cache
def choose(requested: str, device_type: str) -> ops.Kernels:
    """The operations for tensors on ``device_type`` ("cpu" or "cuda"), and for those on the host.

    requested: "best" takes the first available of PREFERENCE and logs once what it had to pass over; any other name is taken literally, for
    ``device_type``. Raises KernelError when the named set is not available or does not serve the device.
    """
    names = {device_type: _best(device_type) if requested == "best" else _named(requested, device_type)}
    names.setdefault("cpu", "reference" if requested == "reference" else _best("cpu"))
    log.info("SCAPE's kernels: %s",
             ", ".join(f"{name} ({ops.kernel_set(name).built or 'torch'}) for {kind}" for kind, name in names.items()))
    return ops.Kernels(names, None if requested == "best" else requested)


def _named(name: str, device_type: str) -> str:
    reason = load(name)
    if reason is None and device_type not in ops.kernel_set(name).device_types:
        reason = f"it serves {' and '.join(ops.kernel_set(name).device_types)} tensors, not {device_type}"
    if reason is not None:
        raise KernelError(describe(f"kernels {name!r} were asked for and cannot be used", got=reason,
                                   todo='repair the build, or set "kernels": "best" to take what works'))
    return name


@functools.cache
def _best(device_type: str) -> str:
    for name, device_types, _ in PREFERENCE:
        if device_type not in device_types:
            continue
        reason = load(name)
        if reason is None:
            return name
        log.warning("kernels %r are not available, slower ones are used: %s", name, reason)
    return "reference"                      # plain torch runs wherever torch does


def report() -> dict[str, dict]:
    """What is available: {name: {"available": bool, "devices": [...], "built": str or None, "reason": str or None}}; builds what is not
    built yet. What the reference had to do in place of another set stands in ops.fallbacks."""
    rows = {}
    for name, device_types, _ in PREFERENCE:
        reason = load(name)
        built = ops.kernel_set(name).built if reason is None else None
        rows[name] = {"available": reason is None, "devices": list(device_types), "built": built, "reason": reason}
    return rows
