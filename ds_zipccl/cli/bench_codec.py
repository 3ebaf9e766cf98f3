"""``ds_zipccl bench codec``: ratio and speed of every implementation, against the bounds of the data and of the memory."""
import re
import statistics
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from ds_zipccl.cli import bench_data, bench_rivals, bench_subjects
from ds_zipccl.cli.bench_timing import interleaved
from ds_zipccl.codec import format as fmt
from ds_zipccl.codec.analysis import best_window_escapes, exponent_entropy, needed_bytes, shannon_ratio
from ds_zipccl.codec.dtypes import BY_TORCH, TABLE
from ds_zipccl.codec.window import measured_lo
from ds_zipccl.errors import KernelError
from ds_zipccl.kernels import loader, ops
from zipscape.errors import ZipScapeError, describe
from zipscape.machine import write_json

HELP = "the codec alone: ratio, GB/s, per cent of the copy floor, exactness"
DESCRIPTION = """Every implementation on every kind of data. ratio: raw bytes / bytes of the frame; needed: the same without unused
escape slots; 1 window: the best with one window a block; bound: Shannon's, for H bits an exponent. GB/s: 1e9 raw bytes a second.
floor: per cent of the speed a copy allows = (bytes read + bytes written) / the speed of a copy of the tensor, measured in turns with
it. Every result is verified: exit status 1 if an element is wrong."""
DTYPES = {row.name.replace("bfloat", "bf").replace("float", "fp"): row.torch_dtype for row in TABLE}          # bf16, fp16, fp32
COLUMNS = ("impl", "level", "dtype", "data", "window", "MiB", "path", "ratio", "needed", "1 window", "bound", "H bits", "comp GB/s",
           "floor", "dec GB/s", "floor", "wrong")


def add_arguments(parser) -> None:
    names = ",".join(bench_data.DISTRIBUTIONS)
    parser.add_argument("--impl", metavar="LIST", default=None,
                        help=f"of {', '.join(loader.NAMES)}, {', '.join(bench_rivals.RIVALS)} (default: all that work here, without the "
                             "slow reference)")
    parser.add_argument("--dtype", metavar="LIST", default=",".join(DTYPES), help=f"default {','.join(DTYPES)}")
    parser.add_argument("--dist", metavar="LIST", default=None, help=f"of {names} (default: all; none if files are given), or none")
    parser.add_argument("--file", metavar="PATH", action="append", default=[],
                        help="weights of a model: .pt, .pth, .bin, .safetensors, or a folder of them; may be repeated")
    parser.add_argument("--gradients", metavar="PATH", action="append", default=[], help="gradients, in the same kinds of file")
    parser.add_argument("--size", metavar="LIST", default="16M", help="raw bytes, with K, M or G for KiB, MiB, GiB (default 16M)")
    parser.add_argument("--window", choices=("block", "sigma", "both"), default="block",
                        help="block: each block's own mean; sigma: one given window from the tensor's standard deviation, as in the paper "
                             "and under `window: sigma` (block where it has none: data that are not finite)")
    parser.add_argument("--level", metavar="LIST", default="1",
                        help="compression levels, 1 or 1,2 (default 1); 2 where dtype and kernels have it, with --window block only")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: torch's choice)")
    parser.add_argument("--repeat", type=int, default=7, help="measurements of each (default 7)")
    parser.add_argument("--best", action="store_true", help="take the best instead of the median, on a machine that is busy otherwise")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")


def parse_size(text: str) -> int:
    """"16M" -> 16777216. Raises ZipScapeError."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text.strip().upper())
    if not match or not int(match[1]):
        raise ZipScapeError(describe("--size", got=text, expected="a number of bytes above 0, or with K, M or G: 64K, 16M, 1G"))
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]


def _words(text: str, known, option: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in known:
            raise ZipScapeError(describe(option, got=word, expected=f"a list of {', '.join(known)}"))
    return list(dict.fromkeys(words))


def _implementations(text: str | None, device: str) -> list[str]:
    if text is None:
        usable = [name for name, devices, _ in loader.PREFERENCE if device in devices and name != "reference" and loader.load(name) is None]
        return (usable or ["reference"]) + [name for name, reason in bench_rivals.of_device(device).items() if reason is None]
    names = _words(text, (*loader.NAMES, *bench_rivals.RIVALS), "--impl")
    for name in names:
        rival = bench_rivals.RIVALS.get(name)
        if rival is None:
            loader.resolve(name, device)
        elif device != rival.device:
            raise KernelError(describe(f"{name} is measured with --device {rival.device} only", got=device))
        elif rival.absent():
            raise KernelError(describe(f"{name} cannot be measured", got=rival.absent()))
    return names


def _absent(args) -> list[dict]:
    """A row for each rival that is not measured, with the reason: those not installed, and dtypes that one does not take."""
    rows = []
    for name, reason in bench_rivals.of_device(args.device).items():
        if reason:
            rows.append({"op": "none", "impl": name, "path": "absent", "reason": reason})
            continue
        refusals = {dtype: bench_rivals.RIVALS[name].refuses(DTYPES[dtype]) for dtype in _words(args.dtype, DTYPES, "--dtype")}
        rows += [{"op": "none", "impl": name, "dtype": dtype, "path": "absent", "reason": why} for dtype, why in refusals.items() if why]
    return rows


def _datasets(args):
    """(name, function of dtype and numel -> tensor) of all data asked for."""
    files = [("weights", path) for path in args.file] + [("gradients", path) for path in args.gradients]
    named = args.dist if args.dist is not None else "none" if files else ",".join(bench_data.DISTRIBUTIONS)
    for name in [] if named == "none" else _words(named, bench_data.DISTRIBUTIONS, "--dist"):
        yield name, lambda dtype, numel, name=name: bench_data.synthetic(name, dtype, numel, args.device, args.seed)
    for kind, path in files:
        tensors = bench_data.load_tensors(path)
        yield (f"{kind}:{Path(path).name}",
               lambda dtype, numel, tensors=tensors: bench_data.sample(tensors, dtype, numel, args.device))


def _data_facts(x: torch.Tensor) -> dict:
    entropy = exponent_entropy(x)
    best = needed_bytes(best_window_escapes(x), BY_TORCH[x.dtype], x.numel())
    return {"entropy_bits": entropy, "shannon_ratio": shannon_ratio(entropy, BY_TORCH[x.dtype]), "best_window_ratio": x.nbytes / best}


def measure(x: torch.Tensor, subject: bench_subjects.Subject, repeat: int, best: bool) -> list[dict]:
    """The two rows, compress and decompress, of one subject; without the fields that say what it is."""
    target, device = torch.empty_like(x), x.device.type
    functions = {"copy": lambda: target.copy_(x), "compress": subject.compress, "decompress": subject.decompress}
    times = {name: [] for name in functions}
    untimed_input = type(subject).prepare_compress is not bench_subjects.Subject.prepare_compress
    for _ in range(repeat if untimed_input else 1):
        subject.prepare_compress()
        for name, values in interleaved(functions, device, 1 if untimed_input else repeat, 0 if untimed_input else 2).items():
            times[name] += values
    decoded, plain = subject.decoded(), x.view(torch.uint8)
    wrong = x.numel() if decoded.numel() != plain.numel() else int((decoded != plain).view(-1, x.element_size()).any(1).sum())
    take = min if best else statistics.median
    moved = x.nbytes + subject.facts["wire_bytes"]
    rows = []
    for op in ("compress", "decompress"):
        time_us, copy_us = take(times[op]), take(times["copy"])
        rows.append({"op": op, "bytes": x.nbytes, "time_us": time_us, "time_us_min": min(times[op]), "copy_us": copy_us,
                     "algbw": x.nbytes / time_us / 1e3, "floor_percent": 100 * copy_us * moved / (2 * x.nbytes) / time_us,
                     "ratio": x.nbytes / subject.facts["wire_bytes"], "needed_ratio": x.nbytes / subject.facts["needed_bytes"],
                     "wrong": wrong, **subject.facts})
    return rows


def _cases(args):
    implementations, dtypes = _implementations(args.impl, args.device), _words(args.dtype, DTYPES, "--dtype")
    sizes, windows = [parse_size(s) for s in args.size.split(",")], ("block", "sigma") if args.window == "both" else (args.window,)
    levels = [int(level) for level in _words(args.level, [str(level) for level in fmt.LEVELS], "--level")]
    for dist, make in _datasets(args):
        for name in dtypes:
            for size in dict.fromkeys(sizes):
                x = make(DTYPES[name], max(1, size // DTYPES[name].itemsize))
                facts = {"dtype": name, "dist": dist, **_data_facts(x)}
                for implementation in implementations:
                    rival = bench_rivals.RIVALS.get(implementation)
                    if rival and rival.refuses(x.dtype):
                        continue
                    if rival:
                        yield x, implementation, "-", "-", facts
                        continue
                    known = set(BY_TORCH[x.dtype].levels) & set(ops.kernel_set(implementation).levels)
                    for level in [level for level in levels if level in known]:
                        for window in windows:
                            if window == "block" or fmt.LEVELS[level].given_window:
                                yield x, implementation, level, window, facts
                if x.nbytes < size - DTYPES[name].itemsize:
                    break                    # the file has no more: larger sizes would be the same again


def run(args) -> int:
    if args.repeat < 1 or (args.threads is not None and args.threads < 1):
        raise ZipScapeError(describe("--repeat and --threads", got=f"{args.repeat}, {args.threads}", expected="1 or more"))
    if args.device == "cuda" and not torch.cuda.is_available():
        raise KernelError(describe("there is no CUDA device", got=f"torch {torch.__version__} sees none", todo="use --device cpu"))
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    console = Console()
    if not console.is_terminal:
        console = Console(width=170)         # a file or a pipe has no width: nothing is to be cut off
    rows = []
    with console.status("") as status:
        for x, implementation, level, window, facts in _cases(args):
            status.update(f"{implementation} {facts['dtype']} {facts['dist']} {x.nbytes >> 10} KiB")
            if implementation in bench_rivals.RIVALS:
                subject = bench_subjects.rival(x, implementation, torch.get_num_threads())
            else:
                subject = bench_subjects.ours(x, implementation, measured_lo(x) if window == "sigma" else -1, level)
            rows += [{"op": row.pop("op"), "impl": implementation, "level": level, "window": window, **facts, **row}
                     for row in measure(x, subject, args.repeat, args.best)]
            subject.close()
    console.print(_table(rows, args))
    absent = _absent(args) if args.impl is None else []
    for row in absent:
        console.print(f"{row['impl']}{' ' + row['dtype'] if 'dtype' in row else ''}: not measured: {row['reason']}", highlight=False)
    if args.json:
        rivals = {row["impl"] for row in rows} & set(bench_rivals.RIVALS)
        settings = {"device": args.device, "threads": torch.get_num_threads(), "repeat": args.repeat, "seed": args.seed,
                    "statistic": "best" if args.best else "median",
                    "rivals": {name: bench_rivals.RIVALS[name].version() for name in sorted(rivals)}}
        write_json(args.json, {"settings": settings, "rows": rows + absent}, command="ds_zipccl " + " ".join(sys.argv[1:]))
        console.print(f"written to {args.json}")
    wrong = sum(row["wrong"] for row in rows)
    if wrong:
        print(f"ds_zipccl: {wrong} elements were decoded wrongly", file=sys.stderr)
    return 1 if wrong else 0


def _table(rows: list[dict], args) -> Table:
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    table = Table(title=f"ds_zipccl bench codec: {where}, {'best' if args.best else 'median'} of {args.repeat}", title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in COLUMNS[:5] + ("path",) else "right", no_wrap=True)
    for comp, dec in zip(rows[::2], rows[1::2], strict=True):
        table.add_row(comp["impl"], str(comp["level"]), comp["dtype"], comp["dist"], comp["window"], f"{comp['bytes'] / 2**20:.4g}",
                      comp["path"], f"{comp['ratio']:.3f}", f"{comp['needed_ratio']:.3f}", f"{comp['best_window_ratio']:.3f}",
                      f"{comp['shannon_ratio']:.3f}", f"{comp['entropy_bits']:.2f}", f"{comp['algbw']:.3g}",
                      f"{comp['floor_percent']:.0f} %", f"{dec['algbw']:.3g}", f"{dec['floor_percent']:.0f} %", str(comp["wrong"]))
    return table
