"""Runs the distributed cases (tests/helpers/ranks.py) without pytest, on GPUs above all:

    python -m tests.run_cases --device cuda --ranks 2 --seconds 500 --jobs 4 --json runs/cases.json tests.train.zero12_cases

Without names: all modules, with the cases that are made for so many ranks. Each module's cases run in processes of their own, after a case
that failed in new ones, so every case has its own outcome. Where there are fewer GPUs than ranks, all share the first one.
"""
import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Cases that say something at this number of ranks alone, beside those that are called "..._at_2".
ONLY_AT = {"case_world_of_one": 1, "case_single_process_without_zero": 1, "case_capacities_that_differ_are_named": 2,
           "case_expert_gradients_are_those_of_one_process": 4, "case_grids_equal_native": 4, "case_beside_tensor_parallelism": 4,
           "case_experts_in_tensor_parallel_parts": 4}
#: Cases that are to fail, or that go on from another run's files: their tests know how.
ONLY_IN_TESTS = {"case_capacities_that_differ_fail_natively", "case_capacities_that_differ_fail_zipped",
                 "case_universal_at_another_world_size"}
#: Cases that need their device, beside those that are called "..._on_gpus": their tests compile what stands for it on a CPU.
ON_GPUS = {"case_cuda_kernels"}
#: Cases in processes of their own: DeepSpeed keeps groups.
ALONE = {"case_beside_tensor_parallelism", "case_experts_in_tensor_parallel_parts"}


def cases_for(module: str, world_size: int, device: str) -> tuple[str, ...]:
    """The cases of a module that are made for so many ranks, on "cpu" or "cuda"."""
    from tests.helpers.ranks import case_names

    def suits(case: str) -> bool:
        if case in ONLY_IN_TESTS or device == "cpu" and (case in ON_GPUS or case.endswith("_on_gpus")):
            return False
        return ONLY_AT.get(case, 2 if case.endswith("_at_2") else world_size) == world_size

    return tuple(case for case in case_names(module) if suits(case))


def all_modules() -> list[str]:
    """Those with distributed cases. Others are not even imported: some have Triton interpreted, in all processes from then on."""
    files = sorted(path for path in ROOT.glob("tests/*/*_cases.py") if path.parent.name != "helpers")
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files
            if re.search(r"^(def )?case_\w+", path.read_text(), re.MULTILINE)]


def asked_for(words: list[str], world_size: int, device: str) -> dict[str, tuple[str, ...]]:
    """{module: cases}, of "MODULE" or "MODULE:CASE,CASE", a module also by its path. A case that is named runs whatever it is made for."""
    found = {}
    for word in words or all_modules():
        module, _, cases = word.partition(":")
        module = module.removesuffix(".py").replace("/", ".")
        names = tuple(cases.split(",")) if cases else cases_for(module, world_size, device)
        wrong = [name for name in names if not hasattr(importlib.import_module(module), name)]
        if wrong:
            raise SystemExit(f"{module} has no {', '.join(wrong)}")
        found[module] = tuple(dict.fromkeys(found.get(module, ()) + names))
    return {module: names for module, names in found.items() if names}


class Run:
    """``rows``: as they come to an end, of all modules."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.rows, self._lock = options, [], threading.Lock()
        self._ends_at = None if options.seconds is None else time.time() + options.seconds

    def module(self, module: str, names: tuple[str, ...]) -> None:
        from tests.helpers import ranks

        options = self.options
        while names:
            if self._ends_at is not None and time.time() > self._ends_at:
                for name in names:
                    self._add(module, name, ranks.left_out(ranks.TIME_IS_OVER, options.ranks))
                break
            alone = next((i for i, name in enumerate(names) if name in ALONE), len(names))
            found = ranks.results(module, names[:alone or 1], options.ranks, case_s=options.case_seconds, ends_at=self._ends_at,
                                  log=options.log, seen=lambda name, outcome: self._add(module, name, outcome))
            names = names[len(found):]
        self.write()

    def _add(self, module: str, name: str, outcome) -> None:
        longest = max((seconds for seconds in outcome.seconds if seconds is not None), default=None)
        lines = [f"{outcome.kind:8} {'' if longest is None else f'{longest:.1f} s':>8}  {module}:{name}"]
        row = {"module": module, "case": name, "outcome": outcome.kind, "seconds": outcome.seconds}
        if outcome.kind != "passed":
            row["texts"] = outcome.texts
        if outcome.kind == "left out":
            lines[0] += f": {outcome.texts[0].partition(': ')[2]}"
        if outcome.kind == "failed":
            for rank, text in enumerate(outcome.texts):
                lines += [f"    rank {rank}: {line[:300]}" for line in shortened(text, self.options.lines) if text != "ok"]
        with self._lock:
            self.rows.append(row)
            print("\n".join(lines), flush=True)

    def write(self) -> None:
        from zipscape.machine import write_json

        options = self.options
        if options.json is None:
            return
        with self._lock:
            part = Path(f"{options.json}.part")
            write_json(part, {"revision": options.revision, "device": options.device, "ranks": options.ranks, "rows": self.rows},
                       command=f"python -m tests.run_cases {' '.join(options.words)}")
            part.replace(options.json)                       # a run that is ended meanwhile leaves what was there


def shortened(text: str, num_lines: int) -> list[str]:
    """The end of a traceback; of the stacks that a signal has had written the case's own thread, where the innermost call is first."""
    lines = text.strip().splitlines()
    own = next((i for i, line in enumerate(lines) if line.startswith("Current thread")), None)
    return lines[-num_lines:] if own is None else lines[:1] + lines[own + 1:own + num_lines]


def build_libraries(device: str) -> None:
    """Ahead of the first case, whose time it would take. What cannot be built is told; a case that needs it fails or takes another way."""
    from zipscape.errors import BuildError
    from zipscape.op_builder import scape, zipccl

    def build(library) -> None:
        try:
            library.build()
        except (BuildError, OSError) as error:
            print(f"{library.name}: {error}", flush=True)

    libraries = [library for library in (*zipccl.LIBRARIES, *scape.LIBRARIES) if device == "cuda" or not library.is_cuda]
    with ThreadPoolExecutor(len(libraries)) as pool:
        list(pool.map(build, libraries))


def revision() -> str | None:
    """Of the working tree, "-dirty" behind it where files differ; None where git does not know it."""
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.run_cases", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="MODULE[:CASE,...]")
    parser.add_argument("--device", choices=["cpu", "cuda"], default=os.environ.get("ZIPSCAPE_TEST_DEVICE", "cpu"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, help="nothing new begins after so many; it is left out")
    parser.add_argument("--case-seconds", type=float, help="of each case, whatever others took; else 60, and 60 more for each job")
    parser.add_argument("--jobs", type=int, default=1, help="modules beside each other")
    parser.add_argument("--json", metavar="FILE", help="written anew after every module")
    parser.add_argument("--log", metavar="FILE", default=os.devnull, help="what ranks print; else it is dropped")
    parser.add_argument("--lines", type=int, default=6, help="of a failed rank's traceback")
    parser.add_argument("--revision", default=revision(), help="of a copy that git does not know")
    options = parser.parse_args(words)
    options.case_seconds = options.case_seconds or 60 + 60 * options.jobs
    options.words = sys.argv[1:] if words is None else words
    try:
        importlib.import_module("zipscape.op_builder")      # in a checkout alone the folder has another name
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error}: the package is not installed here. In the checkout: pip install -e . (without a network, "
                         "where setuptools is there: pip install --no-deps --no-build-isolation -e .)") from None
    # All that is imported from here on, and all ranks, see this.
    os.environ["ZIPSCAPE_TEST_DEVICE"] = options.device
    os.environ.setdefault("ZIPCCL_MAILBOX_LAG", "1")        # as in tests/zipccl/conftest.py
    importlib.import_module("tests.conftest")
    if options.device == "cuda" and not importlib.import_module("torch").cuda.device_count():
        raise SystemExit("torch sees no GPU here")
    build_libraries(options.device)
    asked, run = asked_for(options.names, options.ranks, options.device), Run(options)
    run.write()                                             # where that cannot be, it is told now
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        os.environ["SCAPE_TEST_FOLDER"] = folder            # for checkpoints
        for job in [pool.submit(run.module, module, names) for module, names in asked.items()]:
            job.result()
    count = Counter(row["outcome"] for row in run.rows)
    print(f"{count['passed']} passed, {count['failed']} failed, {count['left out']} left out", flush=True)
    return int(count["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
