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
        _plot_bytes(byte_axes, steps)
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


def _plot_bytes(axes, steps):
    numbers = range(1, len(steps) + 1)
    raw, wire = ([step[i] / 1e6 for step in steps] for i in (0, 1))
    axes.plot(numbers, raw, color=RAW, linewidth=2.5, label="logical (what native sends)")
    axes.plot(numbers, wire, color=ZIPPED, linewidth=2.5, label="on the wire (zipped)")
    axes.fill_between(numbers, wire, raw, color=RAW, alpha=0.15)
    axes.set(title="Bytes that rank 0 sends", xlabel="optimizer step", ylabel="MB per step")
    axes.set_ylim(0, 1.25 * max([*raw, *wire, 1e-9]))
    if sum(wire):
        axes.annotate(f"ratio {sum(raw) / sum(wire):.3f} over the run", (0.5, 0.08), xycoords="axes fraction",
                      ha="center", fontsize=13, color=ZIPPED)
    axes.legend(frameon=False, loc="upper center", ncols=2)
