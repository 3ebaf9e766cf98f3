"""The demo's picture: loss curves of the three runs, and bytes per step, logical against wire."""
import matplotlib

matplotlib.use("Agg")  # no screen needed

from matplotlib import pyplot

INK, NATIVE, CONTROL, ZIPPED, RAW = "#222222", "#9ecae1", "#2171b5", "#d94801", "#9e9e9e"


def plot(path, runs, steps, setting, report):
    """Writes a PNG. runs: native, control, zipped; steps: [(raw_bytes, wire_bytes)] of the zipped run."""
    style = {"font.size": 12, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
             "grid.alpha": 0.25, "text.color": INK, "axes.labelcolor": INK}
    with pyplot.rc_context(style):
        figure, (loss_axes, byte_axes) = pyplot.subplots(1, 2, figsize=(13, 5.2), layout="constrained")
        _plot_losses(loss_axes, runs, setting, report)
        _plot_bytes(byte_axes, steps, sum(row.get("overflows", 0) for row in report["rows"]))
        figure.suptitle(f"The same training, native and zipped: ZeRO-3, bf16, {setting['ranks']} ranks over "
                        f"{setting['transport']}", fontsize=15)
        figure.savefig(path, dpi=130)
        pyplot.close(figure)


def _plot_losses(axes, runs, setting, report):
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
