"""The demo's picture. Above: native and zipped, losses and bytes per step. Below: dense ScapeAdamS and SCAPE, the same."""
import matplotlib

matplotlib.use("Agg")  # no screen needed

from matplotlib import pyplot

INK, NATIVE, CONTROL, ZIPPED, RAW = "#222222", "#9ecae1", "#2171b5", "#d94801", "#9e9e9e"
DENSE, SCAPE = "#2171b5", "#238b45"
PARTS = {"values": "#005a32", "weights": "#41ab5d", "mask": "#c7e9c0"}


def plot(path, runs, steps, setting, report, scape):
    """Writes a PNG. runs: native, control, zipped; steps: [(raw_bytes, wire_bytes)] of the zipped run; scape: demo_scape.Comparison."""
    style = {"font.size": 12, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
             "grid.alpha": 0.25, "text.color": INK, "axes.labelcolor": INK}
    with pyplot.rc_context(style):
        figure = pyplot.figure(figsize=(13, 11), layout="constrained")
        above, below = figure.subfigures(2, 1)
        where = f"bf16, {setting['ranks']} ranks over {setting['transport']}"
        above.suptitle(f"The same training, native and zipped: ZeRO-3, {where}", fontsize=15)
        loss_axes, byte_axes = above.subplots(1, 2)
        _plot_losses(loss_axes, runs, report)
        _plot_bytes(byte_axes, steps, sum(row.get("overflows", 0) for row in report["rows"]))
        below.suptitle(f"Another optimizer, dense and at density {scape.params.density:g}: ZeRO-1, {where}", fontsize=15)
        loss_axes, byte_axes = below.subplots(1, 2)
        _plot_scape_losses(loss_axes, scape)
        _plot_scape_bytes(byte_axes, scape)
        figure.savefig(path, dpi=130)
        pyplot.close(figure)


def _plot_losses(axes, runs, report):
    # Wide below narrow, so that curves that lie on each other can all be seen.
    looks = [{"color": NATIVE, "linewidth": 7, "solid_capstyle": "round"}, {"color": CONTROL, "linewidth": 3},
             {"color": ZIPPED, "linewidth": 1.4, "linestyle": "--"}]
    labels = ["native", "native again (control)", "zipped"]
    for run, label, look in zip(runs, labels, looks, strict=True):
        axes.plot(range(1, len(run.mean_losses) + 1), run.mean_losses, label=label, **look)
    equal = "losses and parameters bit-equal" if report["bit_equal"] else "NOT bit-equal"
    axes.set(title=f"Training loss ({equal})", xlabel="optimizer step", ylabel="loss (nats per byte, mean over ranks)")
    axes.legend(frameon=False)


def _plot_bytes(axes, steps, overflows):
    numbers = range(1, len(steps) + 1)
    raw, wire = ([step[i] / 1e6 for step in steps] for i in (0, 1))
    axes.plot(numbers, raw, color=RAW, linewidth=2.5, label="logical (what native sends)")
    axes.plot(numbers, wire, color=ZIPPED, linewidth=2.5, label=f"on the wire (zipped{'; peaks: sent again' * bool(overflows)})")
    axes.fill_between(numbers, wire, raw, color=RAW, alpha=0.15)
    axes.set(title="Bytes that rank 0 sends", xlabel="optimizer step", ylabel="MB per step")
    # The first step carries the start-up as well; it must not squeeze all the others.
    top = 1.35 * max([*raw[1:], *wire[1:], 1e-9])
    axes.set_ylim(0, top)
    if raw and max(raw[0], wire[0]) > top:
        axes.annotate(f"step 1, with the start-up: {raw[0]:.1f} MB logical, {wire[0]:.1f} MB wire",
                      (0.08, 0.93), xycoords="axes fraction", fontsize=10.5)
    if sum(wire):
        axes.annotate(f"ratio {sum(raw) / sum(wire):.3f} over the run", (0.5, 0.4), xycoords="axes fraction",
                      ha="center", fontsize=14, color=ZIPPED)
    axes.legend(frameon=False, loc="lower center")


def _plot_scape_losses(axes, runs):
    """Both curves as they are (thin) and as running means, since single batches scatter more than the two optimizers differ."""
    for run, color, label in ((runs.adams, DENSE, "dense ScapeAdamS"), (runs.scape, SCAPE, "SCAPE")):
        losses = run.mean_losses
        width = max(1, len(losses) // 20)
        means = [sum(part) / len(part) for end in range(1, len(losses) + 1) if (part := losses[max(0, end - width):end])]
        axes.plot(range(1, len(losses) + 1), losses, color=color, alpha=0.25, linewidth=1)
        axes.plot(range(1, len(losses) + 1), means, color=color, linewidth=2.2, label=f"{label}: validation loss {run.val_loss:.4f}")
    axes.axvspan(0.5, runs.num_dense + 0.5, color=RAW, alpha=0.2, linewidth=0, label="dense warm-up of SCAPE")
    axes.set(title="Training loss, and its running mean (a short run)", xlabel="optimizer step",
             ylabel="loss (nats per byte, mean over ranks)")
    axes.legend(frameon=False)


def _plot_scape_bytes(axes, runs):
    parts = [[sent[part] / 1e6 for sent, _ in runs.logged] for part in PARTS]
    axes.stackplot(range(1, len(runs.logged) + 1), *parts, colors=PARTS.values(), labels=[f"SCAPE: {part}" for part in PARTS], step="mid")
    counted = [sum(row.values()) / 1e6 for row in runs.counted["adams"]]
    axes.plot(range(1, len(counted) + 1), counted, color=DENSE, linewidth=2.2, label="dense ScapeAdamS, counted (gradients all-reduced)")
    axes.axhline(runs.dense_bytes / 1e6, color=INK, linestyle="--", linewidth=1.4, label="dense ZeRO by the formula (reduce-scattered)")
    axes.set(title="Bytes that rank 0 sends", xlabel="optimizer step", ylabel="MB per step")
    axes.set_ylim(0, 1.6 * max([*counted, runs.dense_bytes / 1e6]))
    axes.legend(frameon=False, loc="upper right", fontsize=10.5)
