"""Switching ZipScape on without touching the user's script.

The entry point "torch.backends" makes `import torch` call autoload(). It must not break or slow that import, so it
only puts a finder on sys.meta_path; the finder waits for a few modules of DeepSpeed and of torch and calls our
functions on each right after it was executed. DeepSpeed itself imports torch first, so both import orders end here.

Standard library only, nothing heavy at module level. ZIPSCAPE_DISABLE=1 turns everything off.
"""

import os
import sys

#: target module -> functions ("module:function"), each called with the freshly executed module, in this order.
HOOKS = {
    "deepspeed.runtime.engine": ["ds_zipccl.backend.deepspeed_hooks:install", "ds_scape.optimizer.deepspeed_hooks:install"],
    "deepspeed.ops.op_builder.all_ops": ["zipscape.op_builder.deepspeed_ops:register"],
    "torch.distributed.distributed_c10d": ["zipscape.activate:register_torch_backend"],
    "torch._dynamo.trace_rules": ["zipscape.activate:keep_from_compiler"],
}

#: What makes a process group of the torch.distributed backend "zipccl"; loaded when the first one is asked for.
TORCH_BACKEND = "ds_zipccl.backend.torch_pg:create"

#: What went wrong so far, one text with traceback each; `ds_zipccl report` shows it.
failures = []

_num_logged = 0

#: Whose modules import the targets themselves. While one of them is half imported, its hooks cannot be called yet.
_SEAMS = ("ds_zipccl.", "ds_scape.")
_num_seams_importing = 0
_postponed = []


def is_disabled() -> bool:
    """True if the environment turns ZipScape off (ZIPSCAPE_DISABLE set to anything but 0 or nothing)."""
    return os.environ.get("ZIPSCAPE_DISABLE", "0") not in ("", "0")


def autoload() -> None:
    """Arm the hooks; idempotent, never raises. Targets that are loaded already are handled at once."""
    try:
        if is_disabled() or any(isinstance(finder, _Finder) for finder in sys.meta_path):
            return
        # The finder goes first: whatever fails after it is still reported when DeepSpeed is used.
        sys.meta_path.insert(0, _Finder())
        _handle_loaded()
    except Exception as error:
        _note("autoload", error)


def _handle_loaded():
    for target in HOOKS:
        module = sys.modules.get(target)
        if module is None:
            continue
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            failures.append(f"{target} was half imported when zipscape was activated; its hooks did not run")
        else:
            _run_hooks(target, module)


def _run_hooks(target, module):
    """Call the target's functions; one that fails is noted and does not keep the others from running."""
    for name in HOOKS.get(target, ()):
        if _num_seams_importing and name.startswith(_SEAMS):
            _postponed.append((name, target, module))
            continue
        _run_hook(name, target, module)
    if target.startswith("deepspeed"):
        _report()


def _run_hook(name, target, module):
    try:
        _function(name)(module)
    except Exception as error:
        _note(f"{name} after the import of {target}", error)


def _function(name):
    module_name, _, function = name.partition(":")
    __import__(module_name)
    return getattr(sys.modules[module_name], function)


def register_torch_backend(c10d):
    """Make "zipccl" known to torch.distributed (the module given) without loading anything of it."""
    c10d.Backend.register_backend("zipccl", _make_process_group, extended_api=True, devices=["cpu", "cuda"])


def keep_from_compiler(trace_rules):
    """torch.compile must not trace into our calls: they wait for other ranks. The codec and its operators it may see."""
    for package in ("ds_zipccl.backend", "ds_zipccl.collectives"):
        trace_rules.add(package)


def _make_process_group(options, native_options):
    return _function(TORCH_BACKEND)(options, native_options)


def _note(what, error):
    # Imported here because it is only needed when something failed.
    import traceback
    failures.append(f"{what}: " + "".join(traceback.format_exception(type(error), error, error.__traceback__)).strip())


def _report():
    """Log each failure once. Called when DeepSpeed is in use, so that plain torch users see nothing."""
    global _num_logged
    if _num_logged == len(failures):
        return
    import logging
    new, _num_logged = failures[_num_logged:], len(failures)
    for text in new:
        logging.getLogger("zipscape").warning(
            "zipscape could not be activated fully; DeepSpeed goes on without that part. %s", text)


class _Finder:
    """Meta path finder: finds nothing itself, only wraps the loader of our targets and of our own modules."""

    def find_spec(self, name, path=None, target=None):
        if name not in HOOKS and not name.startswith(_SEAMS) or is_disabled():
            return None
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = (_Loader if name in HOOKS else _SeamLoader)(spec.loader)
                return spec
        return None


class _Loader:
    """Stands in for the real loader until the module is executed, then gives the place back and runs the hooks."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        try:
            _run_hooks(module.__name__, module)
        except Exception as error:  # the import of DeepSpeed must never fail because of us
            _note(f"hooks of {module.__name__}", error)


class _SeamLoader(_Loader):
    """The same for a module of ours: hooks that came while it was half imported run when it is whole."""

    def exec_module(self, module):
        global _num_seams_importing
        module.__spec__.loader = module.__loader__ = self._loader
        _num_seams_importing += 1
        try:
            self._loader.exec_module(module)
        finally:
            _num_seams_importing -= 1
        while _postponed and not _num_seams_importing:
            _, target, _ = hook = _postponed.pop(0)
            _run_hook(*hook)
            if target.startswith("deepspeed"):
                _report()
