"""``ds_zipccl estimate``: what compression would gain on a given model and cluster: bytes over a link's speed, and the codec's time. The
switch measures on the real link; this is for deciding whether to try."""
import math

from rich import box
from rich.console import Console
from rich.table import Table

from zipscape.errors import ConfigError, describe
from zipscape.machine import write_json
from zipscape.quantities import check_above_zero, check_share, parse_count

HELP = "what compression would gain on a given model and cluster: calculated, nothing is run"
WEIGHT_BYTES = 2            # BF16: what ZeRO sends, gradients too
LEFT_OUT = (
    "Latency and host time: every collective is its bytes over --link. Calls below some MiB are slower zipped; adaptive leaves them "
    "native.",
    "The model's layers: parameters and gradients count as large calls. FP32 and FP16 tensors go native and are not in it.",
    "What --overlap hides, it hides of every collective alike, native and zipped, and of the codec too, which slows the arithmetic down "
    "that it hides behind.",
    "A reduce-scatter travels as an all-to-all, which NCCL carries more slowly than its own reduce-scatter over some links.",
    "Data: random bits don't shrink, and overflows are sent again. --ratio 1.41 is a Gaussian tensor at level 1, 1.48 at level 2.",
)


def add_arguments(parser) -> None:
    parser.add_argument("--params", required=True, metavar="N", help="parameters of the model: 350M, 7B, 124439808")
    parser.add_argument("--ranks", type=int, default=8, metavar="W", help="data-parallel ranks (default 8)")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3, help="ZeRO stage (default 3)")
    parser.add_argument("--all-to-all", metavar="N", help="BF16 elements that a rank passes to MoE's all-to-alls per step: 400M")
    parser.add_argument("--link", type=float, metavar="GB/S", help="what a rank can send per second, in 1e9 bytes: 10 Gbit/s are 1.25")
    parser.add_argument("--step-time", type=float, metavar="S", help="seconds of a step without any communication")
    parser.add_argument("--overlap", type=float, default=0.0, metavar="SHARE",
                        help="share of the communication that is hidden behind arithmetic, 0 to 1 (default 0)")
    parser.add_argument("--ratio", type=float, default=1.41, help="raw bytes / bytes sent, of what is compressed (default 1.41)")
    parser.add_argument("--codec-speed", type=float, default=2000.0, metavar="GB/S",
                        help="raw bytes compressed, or decompressed, per second, in 1e9 bytes (default 2000: an H200; "
                             "ds_zipccl bench codec measures it)")
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")


def collectives(num_params: int, ranks: int, stage: int, all_to_all: int = 0) -> list[dict]:
    """Of one rank and step: ``op``; ``native_bytes`` and ``raw_bytes``, sent natively and, uncompressed, by us; ``coded_bytes``, which the
    codec goes through, both ways."""
    share = (ranks - 1) / ranks
    whole, gathers = WEIGHT_BYTES * num_params, 2 if stage == 3 else 1
    sent = math.ceil(share * whole)
    exchanged = math.ceil(share * WEIGHT_BYTES * all_to_all)
    # A gather encodes its own shard once and decodes the others'; a reduce-scatter and an all-to-all encode for every other rank.
    rows = [{"op": "all_gather", "native_bytes": gathers * sent, "raw_bytes": gathers * sent,
             "coded_bytes": gathers * (whole // ranks + sent) if ranks > 1 else 0},
            {"op": "reduce_scatter", "native_bytes": sent * (1 if stage == 3 else 2), "raw_bytes": sent, "coded_bytes": 2 * sent}]
    return rows + [{"op": "all_to_all", "native_bytes": exchanged, "raw_bytes": exchanged, "coded_bytes": 2 * exchanged}] * bool(exchanged)


def rows_of(args) -> list[dict]:
    """One row per way to train."""
    check_above_zero(args, "link", "step_time", "codec_speed")
    check_share(args, "overlap")
    if args.ranks < 1:
        raise ConfigError(describe("--ranks", got=args.ranks, expected="1 or more"))
    if not 1 <= args.ratio <= 2:
        raise ConfigError(describe("--ratio", got=args.ratio, expected="a number from 1 to 2"))
    all_to_all = parse_count(args.all_to_all, "--all-to-all") if args.all_to_all else 0
    calls = collectives(parse_count(args.params), args.ranks, args.stage, all_to_all)
    native = [(call["native_bytes"], 0) for call in calls]
    zipped = [(call["raw_bytes"] / args.ratio, call["coded_bytes"]) for call in calls]
    chosen = [ours if _is_chosen(call["op"], theirs, ours, args) else theirs
              for call, theirs, ours in zip(calls, native, zipped, strict=True)]
    rows = [_row(what, ways, args) for what, ways in (("native", native), ("zipped, adaptive", chosen), ("zipped, always", zipped))]
    for row in rows:
        row["ratio"] = rows[0]["wire_bytes"] / row["wire_bytes"] if row["wire_bytes"] else None
        row["speedup"] = rows[0]["step_s"] / row["step_s"] if row["step_s"] else None
    return rows


def _is_chosen(op: str, native: tuple[float, int], zipped: tuple[float, int], args) -> bool:
    """By the switch: no reductions whose sums would have another order than natively, and nothing that is not faster."""
    if op == "reduce_scatter" and args.ranks > 2:
        return False
    return not args.link or _seconds(zipped, args) < _seconds(native, args)


def _seconds(way: tuple[float, int], args) -> float:
    sent, coded = way
    return (sent / args.link + coded / args.codec_speed) / 1e9


def _row(what: str, ways: list[tuple[float, int]], args) -> dict:
    row = {"op": "step", "what": what, "ranks": args.ranks, "stage": args.stage, "wire_bytes": math.ceil(sum(sent for sent, _ in ways)),
           "exposed_s": None, "step_s": None}
    if args.link and args.step_time:
        total = sum(_seconds(way, args) for way in ways)
        row["exposed_s"] = total - min(args.step_time, args.overlap * total)
        row["step_s"] = args.step_time + row["exposed_s"]
    return row


def run(args) -> int:
    rows = rows_of(args)
    console = Console()
    title = f"{args.params} parameters, {args.ranks} ranks, ZeRO-{args.stage}: calculated, nothing was run"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "GB sent per step", "times less", "exposed s", "step s", "speedup"):
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        table.add_row(row["what"], f"{row['wire_bytes'] / 1e9:,.3f}", _text(row["ratio"], ".2f"), _text(row["exposed_s"], ".4g"),
                      _text(row["step_s"], ".4g"), _text(row["speedup"], ".2f"))
    console.print(table)
    console.print("native: what DeepSpeed 0.19.8 sends, all_reduces of gradients in ZeRO-1 and 2. Not in these numbers:", highlight=False)
    for line in LEFT_OUT:
        console.print(f"- {line}", highlight=False)
    if args.json:
        settings = {key: value for key, value in vars(args).items() if key not in ("json", "command", "local_rank")}
        write_json(args.json, {"settings": settings, "rows": rows, "left_out": LEFT_OUT}, command="ds_zipccl estimate")
        console.print(f"written to {args.json}")
    return 0


def _text(number: float | None, form: str) -> str:
    return "-" if number is None else format(number, form)
