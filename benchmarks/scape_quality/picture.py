"""The rows of finished runs as a table and as curves."""
from pathlib import Path


def end(row: dict, part: str, number: str = "loss") -> float:
    """Mean over the last twentieth of the steps; ``train``: of the training loss since the evaluation before."""
    last = [point for point in row["curve"] if point["step"] >= 0.95 * row["job"]["steps"]] or row["curve"][-1:]
    return sum(point["train"] if part == "train" else point[part][number] for point in last) / len(last)


def chosen(rows: list[dict]) -> dict[str, float]:
    """{name: learning rate} with the least loss on the part ``tune``, of the runs with the lowest seed."""
    first = min((row["job"]["seed"] for row in rows), default=0)
    tried = [row for row in rows if row["job"]["seed"] == first]
    return {name: min((row for row in tried if row["job"]["name"] == name), key=lambda row: end(row, "tune"))["job"]["lr"]
            for name in sorted({row["job"]["name"] for row in tried})}


def table(rows: list[dict]) -> str:
    """Markdown. A star marks the chosen learning rates; the losses beside those of dense AdamS with its chosen one, seed by seed."""
    lines = ["| run | seed | lr | steps | epochs | train | tune | report | against AdamS, train / report | accuracy |",
             "|---|---|---|---|---|---|---|---|---|---|"]
    rows = [row for row in rows if row["curve"]]
    best = chosen(rows)
    dense = {(row["job"]["seed"], row["job"]["steps"]): row for row in rows
             if row["job"]["name"] == "adams" and row["job"]["lr"] == best.get("adams")}
    for row in sorted(rows, key=lambda row: (row["job"]["name"], row["job"]["lr"], row["job"]["seed"])):
        job, base = row["job"], dense.get((row["job"]["seed"], row["job"]["steps"]))
        gaps = " / ".join(f"{end(row, part) - end(base, part):+.4f}" for part in ("train", "report")) if base else "-"
        star = " *" if best.get(job["name"]) == job["lr"] else ""
        lines.append(f"| {job['name']} | {job['seed']} | {job['lr']:g}{star} | {row['step']} | {row['epochs']:.2f} | "
                     + " | ".join(f"{end(row, part):.4f}" for part in ("train", "tune", "report"))
                     + f" | {gaps} | {end(row, 'report', 'accuracy'):.4f} |")
    return "\n".join(lines)


def plot(rows: list[dict], path: Path) -> None:
    """Training loss and loss on held-out files by step, of the chosen learning rates; one colour a kind of run, dashed for even seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    best = chosen(rows)
    rows = [row for row in rows if best.get(row["job"]["name"]) == row["job"]["lr"]]
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5))
    names = sorted({row["job"]["name"] for row in rows})
    for row in rows:
        steps, number = [point["step"] for point in row["curve"]], names.index(row["job"]["name"])
        label = row["job"]["name"] if row is next(r for r in rows if r["job"]["name"] == row["job"]["name"]) else None
        style = dict(color=f"C{number % 10}", linestyle="-" if row["job"]["seed"] % 2 else "--", linewidth=1.2, label=label)
        axes[0].plot(steps, [point["train"] for point in row["curve"]], **style)
        axes[1].plot(steps, [point["report"]["loss"] for point in row["curve"]], **style)
    for axis, title in zip(axes, ("training loss (mean since the point before)", "loss on held-out files"), strict=True):
        axis.set(title=title, xlabel="step", ylabel="nats per token")
        axis.grid(alpha=0.3)
        axis.set_ylim(top=min(5.0, axis.get_ylim()[1]))
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
