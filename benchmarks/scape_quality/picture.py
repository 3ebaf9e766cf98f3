"""The rows of finished runs as a table and as curves."""
from pathlib import Path


def last_steps(rows: list[dict]) -> dict[tuple[int, int], set[int]]:
    """{(seed, steps): the points in the last twentieth of the steps that all these rows have}; the last one if there are none."""
    common = {}
    for row in rows:
        key, steps = (row["job"]["seed"], row["job"]["steps"]), {point["step"] for point in row["curve"]}
        common[key] = common.get(key, steps) & steps
    return {key: {step for step in steps if step >= 0.95 * key[1]} or {max(steps)} for key, steps in common.items() if steps}


def end(row: dict, part: str, steps: set[int], number: str = "loss") -> float:
    """Mean over these steps' points; ``train``: of the training loss since the point before."""
    last = [point for point in row["curve"] if point["step"] in steps]
    return sum(point["train"] if part == "train" else point[part][number] for point in last) / len(last)


def chosen(rows: list[dict]) -> dict[str, float]:
    """{name: learning rate} with the least loss on the part ``tune``, of the runs with the lowest seed."""
    first, last = min((row["job"]["seed"] for row in rows), default=0), last_steps(rows)
    tried = [row for row in rows if row["job"]["seed"] == first]
    return {name: min((row for row in tried if row["job"]["name"] == name),
                      key=lambda row: end(row, "tune", last[first, row["job"]["steps"]]))["job"]["lr"]
            for name in sorted({row["job"]["name"] for row in tried})}


def table(rows: list[dict]) -> str:
    """Markdown: means over the last twentieth of the steps. A star marks the chosen learning rates; the losses beside those of dense AdamS
    and AdamW with their chosen ones, seed by seed."""
    lines = ["| run | seed | lr | epochs | train | tune | report | accuracy | against AdamS, train / report | against AdamW |",
             "|---|---|---|---|---|---|---|---|---|---|"]
    rows = [row for row in rows if row["curve"]]
    best, last = chosen(rows), last_steps(rows)
    dense = {(row["job"]["name"], row["job"]["seed"], row["job"]["steps"]): row for row in rows
             if row["job"]["lr"] == best.get(row["job"]["name"])}

    def gap(row, key, to: str) -> str:
        steps, base = last[key], dense.get((to, *key))
        return " / ".join(f"{end(row, part, steps) - end(base, part, steps):+.4f}" for part in ("train", "report")) if base else "-"

    for row in sorted(rows, key=lambda row: (row["job"]["name"], row["job"]["seed"], row["job"]["lr"])):
        job = row["job"]
        key = job["seed"], job["steps"]
        star = " *" if best.get(job["name"]) == job["lr"] else ""
        losses = " | ".join(f"{end(row, part, last[key]):.4f}" for part in ("train", "tune", "report"))
        lines.append(f"| {job['name']} | {job['seed']} | {job['lr']:g}{star} | {row['epochs']:.2f} | {losses} | "
                     f"{end(row, 'report', last[key], 'accuracy'):.4f} | {gap(row, key, 'adams')} | {gap(row, key, 'adamw')} |")
    return "\n".join(lines)


def plot(rows: list[dict], path: Path) -> None:
    """Of the chosen learning rates, by step: training loss, loss on held-out files, and the latter less dense AdamS's of the same seed.
    One colour a kind of run, dashed for even seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    best = chosen(rows)
    rows = [row for row in rows if best.get(row["job"]["name"]) == row["job"]["lr"]]
    dense = {(row["job"]["seed"], point["step"]): point["report"]["loss"] for row in rows if row["job"]["name"] == "adams"
             for point in row["curve"]}
    figure, axes = pyplot.subplots(1, 3, figsize=(17, 5))
    names, late = sorted({row["job"]["name"] for row in rows}), [0.0]
    for row in rows:
        job, curve = row["job"], row["curve"]
        label = job["name"] if row is next(r for r in rows if r["job"]["name"] == job["name"]) else None
        style = dict(color=f"C{names.index(job['name']) % 10}", linestyle="-" if job["seed"] % 2 else "--", linewidth=1.2, label=label)
        steps, report = [point["step"] for point in curve], [point["report"]["loss"] for point in curve]
        axes[0].plot(steps, [point["train"] for point in curve], **style)
        axes[1].plot(steps, report, **style)
        bases = [dense.get((job["seed"], step)) for step in steps]
        against = [(step, loss - base) for step, loss, base in zip(steps, report, bases, strict=True) if base is not None]
        axes[2].plot([step for step, _ in against], [gap for _, gap in against], **style)
        late += [gap for step, gap in against if step >= 0.2 * job["steps"]]
    axes[2].set_ylim(min(late) - 0.005, min(max(late) + 0.005, 0.2))            # what ends far above would make all others one line
    titles = "training loss (mean since the point before)", "loss on held-out files", "loss on held-out files less dense AdamS's"
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="step", ylabel="nats per token")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    for axis in axes[:2]:
        axis.set_ylim(top=min(5.0, axis.get_ylim()[1]))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
