"""``ds_scape estimate``: bytes, memory and step time of SCAPE on a given model and cluster, beside dense ZeRO. Bytes and memory come from
ds_scape/sync/traffic.py and ds_scape/optimizer/memory.py, which tests compare with what is really sent and kept; the time is bytes over a
link's speed and no more."""
from rich import box
from rich.console import Console
from rich.table import Table

from ds_scape.optimizer import memory
from ds_scape.optimizer.ranking import fit_beside_the_exchange, own_gradients_hold_the_exchange
from ds_scape.sync.partition import Layout, TensorSlot, flat_layout
from ds_scape.sync.traffic import dense_zero_bytes, step_bytes
from zipscape.errors import ConfigError, describe
from zipscape.machine import write_json
from zipscape.quantities import check_above_zero, check_share, parse_count

HELP = "bytes, memory and step time on a given model and cluster, without running anything"
DESCRIPTION = """What one rank sends per step, keeps beyond dense ZeRO, and how long a step would take: a calculation, not a measurement.
Without --link and --step-time the times are left out. What the calculation leaves out is printed below its table."""
WEIGHT_BYTES = 2
VALUE_BYTES = {"bf16": 2, "fp32": 4}
DENSE, ALL_REDUCED = "dense, reduce-scatter", "dense, all-reduce"
#: {title: columns}: two tables, since one would be too wide for a terminal.
TABLES = {"MB that a rank sends per step": ("values", "weights", "mask", "all", "times less"),
          "GB that a rank keeps beyond dense ZeRO, and seconds": ("device", "host", "exposed", "step", "speedup")}

#: What the numbers do not know. Printed with them.
LEFT_OUT = (
    "SCAPE's own arithmetic (choosing, packing and applying coordinates) and the smaller optimizer step: measure a step for that.",
    "Latency: every message is its bytes over --link, as if they were one. Links are taken as equal, unshared and never idle.",
    "Overlap, but for SCAPE's mask, which travels behind the next forward and backward pass, and for what --overlap says of the dense "
    "gradients.",
    "Tensors of one dimension, which are always dense, parameter groups with a density of their own, and frozen parameters: all "
    "parameters count as one matrix with 16-bit weights.",
    "Of the memory: 8 MiB for the norm. The rest is what a step with masks needs at its most, beyond dense ZeRO 1 with Adam.",
    "Steps of the dense warm-up, and the first one: they send as much as dense ZeRO with a reduce-scatter.",
    "Quality: whether the loss is good enough at this density, or after how many steps, is not part of it.",
)
OFFLOAD_LEFT_OUT = ("Offload: its whole passage counts as exposed, both directions of the host link at once; the first pieces really "
                    "come in behind the backward pass, and the last go back behind the next forward pass. Two buffers are counted.")


def add_arguments(parser) -> None:
    parser.add_argument("--params", required=True, metavar="N", help="parameters of the model: 350M, 1.8B, 124439808")
    parser.add_argument("--ranks", type=int, default=8, metavar="W", help="data-parallel ranks (default 8)")
    parser.add_argument("--density", default="0.1,0.01", metavar="LIST", help="share of coordinates per step (default 0.1,0.01)")
    parser.add_argument("--link", type=float, metavar="GB/S", help="what a rank can send per second, in 1e9 bytes: 10 Gbit/s are 1.25")
    parser.add_argument("--step-time", type=float, metavar="S", help="seconds of a step without any communication")
    parser.add_argument("--overlap", type=float, default=0.0, metavar="SHARE",
                        help="share of the dense gradient exchange that is hidden behind the backward pass, 0 to 1 (default 0)")
    parser.add_argument("--mask-encoding", choices=("auto", "bits", "indices"), default="auto", help="default auto, the smaller one")
    parser.add_argument("--values-dtype", choices=tuple(VALUE_BYTES), default="bf16", help="gradient values on the wire (default bf16)")
    parser.add_argument("--offload", action="store_true", help="residuals in host memory")
    parser.add_argument("--host-link", type=float, default=20.0, metavar="GB/S",
                        help="between device and host in each direction, with --offload (default 20)")
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")


def _densities(text: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < density <= 1 for density in found):
        raise ConfigError(describe("--density", got=text, expected="numbers above 0 and up to 1: 0.1 or 0.1,0.01"))
    return found


def _check(args) -> None:
    if args.ranks < 1:
        raise ConfigError(describe("--ranks", got=args.ranks, expected="1 or more"))
    check_above_zero(args, "link", "step_time", "host_link")
    check_share(args, "overlap")


def layout_of(num_params: int, num_ranks: int, density: float) -> Layout:
    """One matrix in one flat buffer, padded as ZeRO pads it."""
    padded = -(-num_params // (2 * num_ranks)) * 2 * num_ranks
    return Layout((flat_layout([TensorSlot(0, num_params, 2)], padded, num_ranks, density),), num_ranks)


def rows_of(args) -> list[dict]:
    """One row per way to train: bytes that a rank sends per step, by kind; bytes it keeps beyond dense ZeRO; seconds."""
    num_params = parse_count(args.params)
    densities = _densities(args.density)
    _check(args)
    layout = layout_of(num_params, args.ranks, densities[0])
    weights = dense_zero_bytes(layout, WEIGHT_BYTES) // 2
    gradients = {DENSE: weights, ALL_REDUCED: dense_zero_bytes(layout, WEIGHT_BYTES, reduce_scatter=False) - weights}
    rows = [_row(what, None, {"norm": 0, "values": values, "weights": weights, "mask": 0}, {"device": 0, "host": 0, "passing": 0}, args)
            for what, values in gradients.items()]
    for density in densities:
        layout = layout_of(num_params, args.ranks, density)
        # Padding is in the last partition: its rank owns least and sends most.
        sent = step_bytes(layout, args.ranks - 1, dense=False, value_bytes=VALUE_BYTES[args.values_dtype], weight_bytes=WEIGHT_BYTES,
                          encoding=args.mask_encoding)
        sizes = memory.Sizes(value=VALUE_BYTES[args.values_dtype], weight=WEIGHT_BYTES)
        rows.append(_row(f"SCAPE {density:g}", density, sent, _memory(layout, args.offload, sizes, args.mask_encoding), args))
    for row in rows:
        row["ratio"] = rows[0]["wire_bytes"] / row["wire_bytes"] if row["wire_bytes"] else None
        row["speedup"] = rows[0]["step_s"] / row["step_s"] if row["step_s"] else None
    return rows


def _memory(layout: Layout, offload: bool, sizes: memory.Sizes, encoding: str) -> dict[str, int]:
    """At its most during a step with masks; the norm's buffer is left out. "passing": what comes from the host per step."""
    kept = memory.kept_bytes(layout, sizes, encoding)
    device = kept["masks"] + memory.masked_step_bytes(layout, sizes, encoding, offloaded=offload, chunk=0)
    stored, ranks = kept["residual"] + kept["ages"], layout.world_size
    if not offload:
        return {"device": device + stored, "host": 0, "passing": 0}
    # The latter where there is room for every tensor.
    is_once = fit_beside_the_exchange(layout, 0, sizes.residual, sizes.gradient, sizes.value, sizes.age) or ranks > 1 and (
        own_gradients_hold_the_exchange(layout, 0, sizes.gradient, sizes.value, sizes.residual, sizes.weight, sizes.age))
    once_more = 0 if is_once else kept["residual"] // ranks + kept["ages"]
    return {"device": device + memory.buffer_bytes(layout), "host": stored, "passing": stored + once_more}


def _row(what: str, density: float | None, sent: dict, memory: dict, args) -> dict:
    """exposed_s: communication that nothing runs beside, as far as the model knows."""
    row = {"what": what, "density": density, **{f"{kind}_bytes": num for kind, num in sent.items()}, "wire_bytes": sum(sent.values()),
           "device_bytes": memory["device"], "host_bytes": memory["host"], "exposed_s": None, "step_s": None}
    if args.link is not None and args.step_time is not None:
        seconds = {kind: num / (args.link * 1e9) for kind, num in sent.items()}
        # What can run beside it hides a transfer only as long as it lasts.
        hidden = min(args.step_time, seconds["mask"] if density else args.overlap * seconds["values"])
        offload = memory["passing"] / (args.host_link * 1e9)
        row["exposed_s"] = sum(seconds.values()) - hidden + offload
        row["step_s"] = args.step_time + row["exposed_s"]
    return row


def run(args) -> int:
    rows = rows_of(args)
    console = Console()
    console.print(f"{args.params} parameters, {args.ranks} ranks: calculated, nothing was run")
    for (title, columns), cells in zip(TABLES.items(), (_traffic_cells, _time_cells), strict=True):
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("", *columns):
            table.add_column(name, justify="right" if name else "left")
        for row in rows:
            table.add_row(row["what"], *cells(row))
        console.print(table)
    left_out = [*LEFT_OUT, *[OFFLOAD_LEFT_OUT] * args.offload]
    console.print(f'Compared with "{DENSE}"; "{ALL_REDUCED}" is what DeepSpeed 0.19.8 does in ZeRO-1 and 2. Not in these numbers:',
                  highlight=False)
    for line in left_out:
        console.print(f"- {line}", highlight=False)
    if args.json:
        settings = {key: value for key, value in vars(args).items() if key not in ("json", "command")}
        write_json(args.json, {"settings": settings, "rows": rows, "left_out": left_out}, command="ds_scape estimate")
        console.print(f"written to {args.json}")
    return 0


def _traffic_cells(row: dict) -> list[str]:
    return [*(f"{row[f'{kind}_bytes'] / 1e6:,.2f}" for kind in ("values", "weights", "mask", "wire")), _text(row["ratio"], ".2f")]


def _time_cells(row: dict) -> list[str]:
    return [*(f"{row[f'{where}_bytes'] / 1e9:,.3f}" for where in ("device", "host")), *(_text(row[f"{what}_s"], ".4g") for what in (
        "exposed", "step")), _text(row["speedup"], ".2f")]


def _text(number: float | None, form: str) -> str:
    return "-" if number is None else format(number, form)
