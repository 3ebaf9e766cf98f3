"""The demo's verdicts, tables and report files, made from the folders of its runs."""
import json
import statistics
from collections import Counter
from pathlib import Path

import demo_scape
from demo_compare import DemoError, differences, load_run, spread
from demo_plot import plot
from rich import box
from rich.table import Table

from zipscape.machine import describe_machine

__all__ = ["DemoError", "make_report", "print_tables", "read_traffic"]

# One control run is one sample of how far native runs lie apart, so a few times its distance is still no evidence.
SPREAD_FACTOR = 3.0


def read_traffic(log_path):
    """The zipped run's log: (per step [(raw_bytes, wire_bytes)], per op totals); rank 0's sent bytes."""
    steps, ops = [], {}
    try:
        rows = [json.loads(line) for line in Path(log_path).read_text().splitlines() if line.strip()]
        for row in rows:
            for op, counts in row["ops"].items():
                total = ops.setdefault(op, Counter(native_reasons=Counter()))
                for key in ("calls_zipped", "calls_native", "raw_bytes", "wire_bytes", "overflows"):
                    total[key] += counts[key]
                total["native_reasons"].update(counts["native_reasons"])
            steps.append(tuple(sum(c[key] for c in row["ops"].values()) for key in ("raw_bytes", "wire_bytes")))
    except FileNotFoundError as error:
        raise DemoError(f"nothing was compressed: the zipped run wrote no {log_path}. Is ZIPSCAPE_DISABLE set? "
                        "Try `ds_zipccl report`.") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DemoError(f"{log_path} is not a zipccl log ({type(error).__name__}: {error})") from error
    return steps, ops


def _compression_problem(steps, ops):
    raw, wire = sum(s[0] for s in steps), sum(s[1] for s in steps)
    reasons = "; ".join(f"{op}: {_reasons(o)}" for op, o in ops.items() if o["native_reasons"])
    if not steps:
        return "nothing was compressed: the zipped run's log has no rows"
    if not any(o["calls_zipped"] for o in ops.values()):
        return f"nothing was compressed: every call went native ({reasons or 'no reason logged'})"
    if wire >= raw:
        return f"nothing was compressed: {wire} bytes sent for {raw} logical bytes ({reasons or 'no call went native'})"
    return None


def judge(native, control, zipped):
    """(ok, bit_equal, sentences): zipped against native, and against the spread of native where the control differs."""
    control_differs, zipped_differs = differences(native, control), differences(native, zipped)
    bit_equal = not zipped_differs
    if not control_differs:
        if bit_equal:
            return True, True, ["Losses and all parameters of the three runs are bit-equal."]
        return False, False, ["NOT bit-equal: the zipped run differs from native, the control does not.",
                              *zipped_differs]
    text = ["The control (native again) differs from native: this machine does not repeat itself."]
    text += [f"control: {line}" for line in control_differs]
    if bit_equal:
        return True, True, [*text, "The zipped run is bit-equal to native all the same."]
    allowed = spread(native, control)
    nearest = tuple(map(min, spread(native, zipped), spread(control, zipped)))
    ok = all(d <= SPREAD_FACTOR * a for d, a in zip(nearest, allowed, strict=True))
    text.append(f"Largest differences, native to control: loss {allowed[0]:.3g}, parameter {allowed[1]:.3g}; "
                f"zipped to the nearer of the two: loss {nearest[0]:.3g}, parameter {nearest[1]:.3g}: "
                f"{'within' if ok else 'NOT within'} {SPREAD_FACTOR:g} times the spread of native.")
    return ok, False, text + [f"zipped: {line}" for line in zipped_differs]


def make_report(out, setting):
    """Compares the runs under out; writes report.json, report.md, report.png there; returns the report (a dict).

    setting: ranks, steps ({run: number}), transport, configs ({run: its ds_config.json}), data, run_seconds, command.
    report["ok"] is the verdict on native, control and zipped, report["scape"]["ok"] the one on the other two. DemoError when a run's
    results are missing or not finite.
    """
    out = Path(out)
    runs = [load_run(out / name, name) for name in ("native", "control", "zipped")]
    steps, ops = read_traffic(out / "zipped" / "zipccl.jsonl")
    ok, bit_equal, verdict = judge(*runs)
    problem = _compression_problem(steps, ops)
    if problem:
        ok, verdict = False, [f"FAILED: {problem}.", *verdict]
    scape = demo_scape.load(out, setting)
    scape_ok, scape_verdict = demo_scape.judge(scape)
    everyone = [*runs, scape.adams, scape.scape]
    report = {"meta": _meta(setting, runs[0]), "ok": ok, "bit_equal": bit_equal, "verdict": verdict,
              "losses_sha256": {r.name: r.losses_sha256 for r in everyone},
              "weights_sha256": {r.name: r.weights_sha256 for r in everyone},
              "rows": _run_rows(everyone, setting, steps) + _op_rows(ops, setting, len(steps)),
              "notes": _notes(setting, runs, steps),
              "scape": {"ok": scape_ok, "verdict": scape_verdict, "rows": demo_scape.byte_rows(scape), "notes": demo_scape.notes(scape),
                        "val_loss_gap": scape.scape.val_loss - scape.adams.val_loss}}
    plot(out / "report.png", runs, steps, setting, report, scape)
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "report.md").write_text(_markdown(report))
    return report


def _meta(setting, run):
    return {**describe_machine(setting["command"]),
            "num_parameters": sum(w.numel() for w in run.weights.values()), "num_tensors": len(run.weights),
            **{k: v for k, v in setting.items() if k != "command"}}


def _run_rows(runs, setting, steps):
    rows = []
    for run in runs:
        row = {"op": "step", "run": run.name, "path": "zipped" if run.name == "zipped" else "native",
               "ranks": setting["ranks"], "transport": setting["transport"], "steps": len(run.mean_losses),
               "optimizer": setting["configs"][run.name]["optimizer"]["type"],
               "zero_stage": setting["configs"][run.name]["zero_optimization"]["stage"],
               "time_us": 1e6 * _median_step_s(run), "first_loss": run.mean_losses[0],
               "last_loss": run.mean_losses[-1], "val_loss": run.val_loss,
               "wall_s": setting["run_seconds"].get(run.name)}
        if run.name == "zipped":
            raw, wire = (sum(s[i] for s in steps) / max(1, len(steps)) for i in (0, 1))
            row |= {"bytes": raw, "wire_bytes": wire, "ratio": raw / wire if wire else None}
        rows.append(row)
    return rows


def _op_rows(ops, setting, num_steps):
    """Averages per step over the zipped run; an op with both zipped and native calls counts both."""
    rows = []
    for op, total in sorted(ops.items(), key=lambda item: -item[1]["raw_bytes"]):
        raw, wire = total["raw_bytes"], total["wire_bytes"]
        rows.append({"op": op, "run": "zipped", "path": "zipped" if total["calls_zipped"] else "native",
                     "ranks": setting["ranks"], "transport": setting["transport"], "bytes": raw / num_steps,
                     "wire_bytes": wire / num_steps, "ratio": raw / wire if wire else None,
                     "calls_zipped": total["calls_zipped"], "calls_native": total["calls_native"],
                     "overflows": total["overflows"], "native_reasons": dict(total["native_reasons"])})
    return rows


def _median_step_s(run):
    """Median over all steps but the first, which also compiles and connects."""
    return statistics.median(run.step_times_s[1:])


def _reasons(total):
    return ", ".join(f"{reason} x{count}" for reason, count in total["native_reasons"].items())


def _remarks(row):
    """What the user should know of one collective: why calls went native, and what had to be sent again."""
    overflows = [f"{row['overflows']} overflows (larger than foreseen, sent again)"] if row["overflows"] else []
    return ", ".join([*(f"native: {reason} x{n}" for reason, n in row["native_reasons"].items()), *overflows])


def _notes(setting, runs, steps):
    native, control, zipped = map(_median_step_s, runs)
    pinned = setting["configs"]["zipped"]["zipccl"]["collectives"]
    notes = [f"`collectives` is pinned to `{pinned if isinstance(pinned, str) else json.dumps(pinned)}` here, so that "
             "the demo compresses on any link: within one machine the link is fast, and native may well be as fast or "
             "faster. Left alone (`adaptive`), ZipScape compresses only where its measurements say that it pays."]
    if not isinstance(pinned, str):
        notes.append("Beyond 2 ranks a zipped reduction is the documented rank-order sum, not the native order; "
                     "reductions stay native in this run so that its bits can be compared.")
    notes += [f"This is a short run ({setting['steps']['zipped']} steps of a small model): it shows that the bits stay the same, "
              "not what a long training gains. The ratio is that of this run's tensors; others have their own.",
              f"Median step on this machine and link: native {native:.3f} s, native again {control:.3f} s, "
              f"zipped {zipped:.3f} s. Two native runs differ by {max(native, control) / min(native, control) - 1:.0%} "
              "themselves; one short run each is no benchmark, and no speed-up is claimed from it.",
              "Bytes are those that rank 0 sends in the zipped run, frame headers and flags included; "
              "calls that went native count the same in both columns. Step 1 carries DeepSpeed's start-up too."]
    if len(steps) != setting["steps"]["zipped"]:
        notes.append(f"The log has {len(steps)} rows for {setting['steps']['zipped']} steps.")
    return notes


def _runs_table(report):
    header = ["run", "steps", "first", "last", "validation", "s/step", "losses", "weights"]
    rows = [[r["run"], str(r["steps"]), f"{r['first_loss']:.4f}", f"{r['last_loss']:.4f}", f"{r['val_loss']:.4f}",
             f"{r['time_us'] / 1e6:.3f}", report["losses_sha256"][r["run"]][:8],
             report["weights_sha256"][r["run"]][:8]] for r in report["rows"] if r["op"] == "step"]
    return header, rows


def _ops_table(report):
    header = ["collective", "zipped", "native", "logical MB", "wire MB", "ratio", "remarks"]
    rows = [[r["op"], str(r["calls_zipped"]), str(r["calls_native"]), *_megabytes(r), _remarks(r)]
            for r in report["rows"] if r["op"] != "step"]
    total = next(r for r in report["rows"] if r["op"] == "step" and r["path"] == "zipped")
    return header, [*rows, ["all", "", "", *_megabytes(total), ""]]


def _megabytes(row):
    ratio = f"{row['ratio']:.3f}" if row["ratio"] else "-"
    return [f"{row['bytes'] / 1e6:.4f}", f"{row['wire_bytes'] / 1e6:.4f}", ratio]


def _tables(report):
    kinds = {}
    for row in report["rows"]:
        if row["op"] == "step":
            kinds.setdefault(f"{row['optimizer']}, ZeRO-{row['zero_stage']}", []).append(row["run"])
    kinds = "; ".join(f"{', '.join(names)}: {kind}" for kind, names in kinds.items())
    yield f"Runs ({kinds}): losses, median time of a step, first digits of the sha256 of losses and weights", *_runs_table(report)
    yield "Collectives of the zipped run (rank 0: calls in the run, MB per step)", *_ops_table(report)
    yield "SCAPE beside dense ZeRO-1 (MB that rank 0 sends per step)", *demo_scape.table(report["scape"]["rows"])


def print_tables(report, console):
    """The verdict, both tables and the notes, on a rich console."""
    for title, header, rows in _tables(report):
        console.print(title, style="bold")
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        num_columns = len(header) - ("remarks" in header)  # they are long: below the table
        for i, name in enumerate(header[:num_columns]):
            table.add_column(name, justify="right" if i else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row[:num_columns])
        console.print(table)
        for row in rows:
            if len(row) > num_columns and row[-1]:
                console.print(f"{row[0]}: {row[-1]}", highlight=False, markup=False)
    console.print()
    for note in [*report["notes"], *report["scape"]["notes"]]:
        console.print(f"- {note}", highlight=False, markup=False)
    for part in (report, report["scape"]):
        console.print()
        for line in part["verdict"]:
            console.print(line, style="green" if part["ok"] else "bold red", highlight=False, markup=False)


def _without_log(section):
    return json.dumps({key: value for key, value in section.items() if key != "log"})


def _markdown(report):
    meta, machine = report["meta"], report["meta"]["machine"]
    lines = ["# ZipScape demo", ""]
    for part in (report, report["scape"]):
        headline, *details = part["verdict"]
        lines += [f"**{headline}**", "", *[f"- {line}" for line in details], *[""] * bool(details)]
    for title, header, rows in _tables(report):
        lines += [f"## {title}", "", "| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
        lines += ["| " + " | ".join(row) + " |" for row in rows] + [""]
    lines += ["![loss curves, and bytes per step](report.png)", "", "## How to read it", ""]
    lines += [f"- {note}" for note in [*report["notes"], *report["scape"]["notes"]]]
    lines += ["", "## Conditions", "",
              f"- {meta['ranks']} ranks over {meta['transport']}, "
              f"{meta['num_parameters'] / 1e6:.2f} M parameters in {meta['num_tensors']} tensors",
              f"- machine: {machine['cpu']}; GPUs: {', '.join(machine['gpus']) or 'none'}; {machine['system']}",
              f"- versions: {', '.join(f'{k} {v}' for k, v in meta['versions'].items() if v)}",
              f"- text: {meta['data'] or 'the Python standard library sources of this machine'}",
              f"- command: `{meta['command']}`, {meta['date']}",
              f"- zipccl section of the zipped run: `{_without_log(meta['configs']['zipped']['zipccl'])}`",
              f"- optimizer of the scape run: `{_without_log(meta['configs']['scape']['optimizer']['params'])}`", "",
              "## sha256", ""]
    lines += [f"- {what} {name}: `{digest}`" for what in ("losses", "weights")
              for name, digest in report[f"{what}_sha256"].items()]
    return "\n".join(lines) + "\n"
