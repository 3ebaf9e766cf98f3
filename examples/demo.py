"""Trains the same GPT natively, natively again and zipped, and shows what changed: bytes, but no bit. Then twice more, by the dense
optimizer ScapeAdamS and by SCAPE, and shows losses and bytes. The runs: demo_runs.py.

    python examples/demo.py            # what `make demo` runs; report in runs/demo
    python examples/demo.py --quick    # a few steps only

Exit status: 0 both verdicts are good (equal and compressed; SCAPE as promised), 1 not (or a run failed), 2 wrong arguments.
"""
import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from demo_runs import RUNS, write_configs
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

EXAMPLES = Path(__file__).resolve().parent
STEP_LINE = re.compile(r"^step (\d+)/\d+ loss (\S+)")
STALL_S = 600  # DeepSpeed's first start on a CPU compiles an operation of its own, which takes minutes
LOG_TAIL_LINES = 30


def parse_args():
    parser = argparse.ArgumentParser(description="Training of the same GPT, native and zipped, compared by bits; then dense and sparse.")
    parser.add_argument("--steps", type=int,
                        help="optimizer steps per run (default 100, with --quick 8); adams and scape take 3 times as many")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine (default 2)")
    parser.add_argument("--data", help="file or folder of text (default: the Python standard library's sources)")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the report (default runs/demo)")
    parser.add_argument("--quick", action="store_true", help="8 steps, for a check that everything works")
    args = parser.parse_args()
    args.steps = args.steps if args.steps is not None else 8 if args.quick else 100
    if args.steps < 2:
        parser.error(f"--steps must be 2 or more, got {args.steps}")
    if args.ranks < 2:
        parser.error(f"--ranks must be 2 or more (one rank has nothing to send), got {args.ranks}")
    if args.data and not Path(args.data).exists():
        parser.error(f"--data {args.data}: no such file or folder")
    if find_spec("ds_zipccl") is None:
        parser.error(f"zipscape is not installed for {sys.executable}: run `make demo`, or `pip install .` first")
    return args


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch_command(args, spec):
    folder = args.out / spec.name
    launcher = Path(sys.executable).parent / "deepspeed"
    command = [str(launcher)] if launcher.exists() else [sys.executable, "-m", "deepspeed.launcher.runner"]
    command += ["--num_gpus", str(args.ranks), "--master_port", str(free_port()), str(EXAMPLES / "train_gpt.py"),
                "--deepspeed_config", str(folder / "ds_config.json"), "--out", str(folder),
                "--steps", str(args.steps * spec.length), *spec.arguments]
    return command + (["--data", args.data] if args.data else [])


def environment(on_gpu):
    """OMP_NUM_THREADS=1: the ranks share few cores, and one thread per rank also fixes the order of every sum."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return env if on_gpu else env | {"DS_ACCELERATOR": "cpu"}


def stale_lock_hint():
    """A build of torch's that was killed leaves a lock for which every later run waits for ever."""
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    locks = ", ".join(map(str, sorted(folder.rglob("lock"))))
    return f" (if no build is running, remove the lock that an interrupted one left: {locks})" if locks else ""


def run(args, spec, env, on_step):
    """Runs one training to its end; on_step(step, loss) per step. Returns seconds; exits 1 with the log's tail."""
    log_path, start = args.out / spec.name / "log.txt", time.monotonic()
    with log_path.open("w") as log:
        process = subprocess.Popen(launch_command(args, spec), stdout=log, stderr=subprocess.STDOUT, env=env,
                                   start_new_session=True)
    problem = None
    try:
        with log_path.open(errors="replace") as log:
            last_output, pending, ended = time.monotonic(), "", False
            while not ended:
                ended = process.poll() is not None  # asked before reading, so that the last lines are read too
                text = log.read()
                if text:
                    last_output = time.monotonic()
                    *lines, pending = (pending + text).split("\n")
                    for match in filter(None, map(STEP_LINE.match, lines)):
                        on_step(int(match[1]), match[2])
                elif time.monotonic() - last_output > STALL_S:
                    problem = f"has said nothing for {STALL_S} s and was stopped{stale_lock_hint()}"
                    break
                elif not ended:
                    time.sleep(0.2)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if problem is None and process.returncode:
        problem = f"failed with exit status {process.returncode}"
    if problem:
        tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
        sys.exit(f"\nThe end of {log_path}:\n{tail}\n\ndemo: the {spec.name} run {problem}; the end of its log is above.")
    return time.monotonic() - start


def run_all(args, env, console):
    """All runs, one after the other, with progress. Returns seconds per run."""
    seconds = {}
    columns = (TextColumn("{task.fields[run]:8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks = {spec.name: progress.add_task("", total=args.steps * spec.length, run=spec.name, start=False) for spec in RUNS}
        for spec in RUNS:
            name, num_steps = spec.name, args.steps * spec.length
            progress.start_task(tasks[name])
            progress.update(tasks[name], description="starting")
            if not console.is_terminal:
                print(f"{name}: starting", flush=True)

            def on_step(step, loss, name=name, num_steps=num_steps):
                progress.update(tasks[name], completed=step, description=f"loss {loss}")
                if not console.is_terminal and (step % max(1, num_steps // 10) == 0 or step == num_steps):
                    print(f"{name}: step {step}/{num_steps} loss {loss}", flush=True)

            seconds[name] = run(args, spec, env, on_step)
            progress.update(tasks[name], description=f"done in {seconds[name]:.0f} s")
            progress.stop_task(tasks[name])
    return seconds


def main():
    args, console = parse_args(), Console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("demo: stopped"))  # so that run() ends the training as well
    import demo_report  # torch and matplotlib: only once the arguments are known to be good
    import torch

    on_gpu = os.environ.get("DS_ACCELERATOR", "cuda") == "cuda" and torch.cuda.device_count() >= args.ranks
    configs = write_configs(args.out, args.ranks, args.steps)
    steps = {spec.name: args.steps * spec.length for spec in RUNS}
    console.print(f"Runs on {args.ranks} ranks: {', '.join(f'{name} ({num} steps)' for name, num in steps.items())} "
                  f"({'NCCL' if on_gpu else 'gloo on the CPU'}), logs in {args.out}/*/log.txt", soft_wrap=True)
    if not on_gpu:
        console.print("The very first run on a machine takes minutes longer: DeepSpeed compiles an op of its own.",
                      soft_wrap=True)
    try:
        seconds = run_all(args, environment(on_gpu), console)
    except KeyboardInterrupt:
        sys.exit("demo: stopped")
    setting = {"ranks": args.ranks, "steps": steps, "transport": "nccl" if on_gpu else "gloo", "configs": configs,
               "data": args.data, "run_seconds": seconds,
               "command": " ".join(["python", *map(os.path.relpath, sys.argv[:1]), *sys.argv[1:]])}
    try:
        report = demo_report.make_report(args.out, setting)
    except demo_report.DemoError as error:
        sys.exit(f"demo: {error}")
    demo_report.print_tables(report, console)
    console.print(f"Report: {args.out / 'report.md'}, {args.out / 'report.json'}, {args.out / 'report.png'}",
                  soft_wrap=True)
    sys.exit(0 if report["ok"] and report["scape"]["ok"] else 1)


if __name__ == "__main__":
    main()
