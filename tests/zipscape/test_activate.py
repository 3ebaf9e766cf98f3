"""Activation: `import torch` is neither broken nor slowed, and the hooks fire in every order of imports.

Each case runs in a process of its own, because it is about what happens at import.
"""

import json
import os
import subprocess
import sys

import pytest

#: Hooks that only leave a trace, put in place of the real ones before torch is imported.
TRACE = """
import sys, types
import zipscape.activate as activate
calls = []
traces = types.ModuleType("traces")
traces.note = lambda module: calls.append(module.__name__)
traces.first = lambda module: calls.append("first")
def fail(module):
    raise ZeroDivisionError("planted")
traces.fail = fail
sys.modules["traces"] = traces
activate.HOOKS.clear()
"""
ALL_OPS = "deepspeed.ops.op_builder.all_ops"


def run(code, **environment):
    """Standard output and error of a fresh interpreter; it must exit with 0."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("ZIPSCAPE_DISABLE", "RANK")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240,
                          env={**inherited, **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def last_json(output):
    return json.loads(output.strip().splitlines()[-1])


def test_hooks_fire_when_deepspeed_comes_after_torch():
    out, _ = run(TRACE + f"""
activate.HOOKS["deepspeed.runtime.engine"] = ["traces:first", "traces:note"]
activate.HOOKS["{ALL_OPS}"] = ["traces:note"]
import torch
assert not calls
import deepspeed, {ALL_OPS}, json
print(json.dumps(calls))
""")
    assert last_json(out) == ["first", "deepspeed.runtime.engine", ALL_OPS]


def test_hooks_fire_when_deepspeed_imports_torch():
    out, _ = run(TRACE + """
activate.HOOKS["deepspeed.runtime.engine"] = ["traces:note"]
assert "torch" not in sys.modules
import deepspeed, json
print(json.dumps(calls))
""")
    assert last_json(out) == ["deepspeed.runtime.engine"]


def test_hooks_run_at_once_on_modules_that_are_loaded_already():
    out, _ = run(TRACE + """
import deepspeed, json
activate.HOOKS["deepspeed.runtime.engine"] = ["traces:note"]
activate.autoload()
activate.autoload()
print(json.dumps(calls))
""", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert last_json(out) == ["deepspeed.runtime.engine"]


@pytest.mark.parametrize("first", ["ds_scape.optimizer.zero_adapter", "ds_zipccl.backend.deepspeed_hooks", "ds_zipccl.backend.zero12",
                                   "ds_zipccl.backend.zero3_params"])
def test_a_seam_may_be_imported_before_deepspeed(first):
    """The seam imports DeepSpeed, whose hooks are in that very module or in one that needs it: they run when it is whole, once each."""
    out, err = run(f"""
import json, sys
import {first}
from zipscape import activate
engine = sys.modules["deepspeed.runtime.engine"]
cls, depth = engine.DeepSpeedEngine.step, 0
while hasattr(cls, "__wrapped__"):
    cls, depth = cls.__wrapped__, depth + 1
print(json.dumps([activate.failures, activate._postponed, depth, sys.modules[{first!r}].__spec__.loader.__class__.__name__]))
""")
    assert last_json(out) == [[], [], 2, "SourceFileLoader"], err


def test_the_real_loader_is_given_back():
    out, _ = run(TRACE + """
activate.HOOKS["json.tool"] = ["traces:note"]
activate.autoload()
import json, json.tool, inspect, importlib
loaders = [type(json.tool.__loader__).__name__, type(json.tool.__spec__.loader).__name__]
inspect.getsource(json.tool)
importlib.reload(json.tool)
print(json.dumps([calls, loaders]))
""")
    assert last_json(out) == [["json.tool", "json.tool"], ["SourceFileLoader", "SourceFileLoader"]]


def test_other_import_hooks_still_work():
    """Ours asks the finders behind it, so a module that only another hook can find is found and hooked."""
    out, _ = run(TRACE + """
import importlib.abc, importlib.machinery, json
class Loader(importlib.abc.Loader):
    def exec_module(self, module): module.answer = 42
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, Loader()) if name == "made_up" else None
sys.meta_path.append(Finder())
activate.HOOKS["made_up"] = ["traces:note"]
activate.autoload()
import made_up
print(json.dumps([calls, made_up.answer]))
""")
    assert last_json(out) == [["made_up"], 42]


def test_disabled_by_the_environment():
    out, err = run(TRACE + """
activate.HOOKS["deepspeed.runtime.engine"] = ["traces:note"]
import ds_zipccl, deepspeed, json
print(json.dumps([calls, any(type(f).__module__ == "zipscape.activate" for f in sys.meta_path)]))
""", ZIPSCAPE_DISABLE="1")
    assert last_json(out) == [[], False]


def test_the_entry_point_of_the_installed_package_is_called_by_import_torch():
    out, _ = run("""
import torch, sys, json
print(json.dumps([any(type(f).__module__ == "zipscape.activate" for f in sys.meta_path),
                  [m for m in sys.modules if m.split(".")[0] in ("zipscape", "ds_zipccl", "ds_scape", "deepspeed")]]))
""")
    armed, modules = last_json(out)
    assert armed, "pip install -e . was not run in this environment"
    assert set(modules) == {"zipscape", "zipscape.activate"}, "import torch must load nothing else of ours"


@pytest.mark.parametrize("broken", [["traces:fail"], ["no_such_module:f"], ["traces:no_such_function"]])
def test_a_broken_hook_is_reported_once_and_breaks_nothing(broken):
    out, err = run(TRACE + f"""
activate.HOOKS["deepspeed.runtime.engine"] = {broken + ["traces:note"]!r}
import torch, deepspeed, json
import {ALL_OPS}
print(json.dumps([calls, len(activate.failures), activate.failures[0]]))
""")
    calls, num_failures, text = last_json(out)
    assert calls == ["deepspeed.runtime.engine"], "the hooks after the broken one still run"
    assert num_failures == 1 and broken[0] in text and "Traceback" in text
    assert err.count("zipscape could not be activated fully") == 1 and "Traceback" in err


def test_an_exception_inside_autoload_is_swallowed_and_reported_on_first_use_of_deepspeed():
    out, err = run(TRACE + """
def broken():
    raise ZeroDivisionError("planted")
activate._handle_loaded = broken
activate.HOOKS["deepspeed.runtime.engine"] = []
import torch
sys.stderr.write("torch is in\\n")
import deepspeed, json
print(json.dumps(activate.failures))
""")
    assert len(last_json(out)) == 1 and "planted" in last_json(out)[0]
    before, after = err.split("torch is in\n")
    assert "planted" not in before
    assert after.count("planted") == 1, "said when DeepSpeed is used, with the traceback, once"


def test_without_deepspeed_nothing_happens():
    out, err = run("""
import sys
sys.modules["deepspeed"] = None
import torch, json
import ds_zipccl
from zipscape import activate
print(json.dumps(activate.failures))
""")
    assert last_json(out) == [] and err == ""


def test_our_part_of_import_torch_is_below_5_ms():
    """Module loading and the entry point, the best of five fresh processes, in CPU time: other load on the machine only adds."""
    code = """
import logging, traceback, time, os, sys, json  # what torch has loaded by then
begin = time.process_time()
from zipscape.activate import autoload
autoload()
print(json.dumps((time.process_time() - begin) * 1e3))
"""
    times_ms = [last_json(run(code)[0]) for _ in range(5)]
    assert min(times_ms) < 5.0, times_ms
