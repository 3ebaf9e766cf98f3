"""Makes the tables of benchmarks/results again that need several GPUs of one host, part by part.

    python benchmarks/tables.py [--list] [--resume] [--out runs/tables] [PART ...]
    python benchmarks/tables.py links:sockets steps:3/1.3b trace              # these, in this order

A part is one command with a time of its own. Its rows, machine, versions, revision, environment and command go to a JSON file as soon as
it ends; a part that fails or is not done in time is kept, with the rows that it had written and the reason, and the next one begins.
PART: a name of --list, the first words of one, or a pattern (* for any text); without any, all, those first that say most.

steps:KIND/MODEL/TRANSPORT is one `ds_zipccl bench step` with all token counts, smallest first; what its time was too short for is in the
file, as "left_out". The files can be put together by its --merge. KIND: a ZeRO stage; 3late, 3late4: with ZIPCCL_LATE=1, 4; zeropp;
scape99, scape90: beside dense ScapeAdamS, with offload and ZipCCL and without. --tokens and --runs are then in the part's name too:
steps:3/1.3b/host/2048.

--device cpu: small and over gloo, to see that it runs; --dry-run does that on GPUs. --one-gpu: all ranks on one GPU, over sockets.
"""
import argparse
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent))
try:
    from commands import DS_ZIPCCL, ROOT, TRANSPORTS, measure, shell

    from ds_zipccl.cli.step_runs import RUNS
    from zipscape.machine import write_json
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("ds_zipccl", "zipscape"):
        raise
    sys.exit(f"{error}: the package is not installed here. In the checkout: pip install -e . (without a network, where "
             "setuptools is there: pip install --no-deps --no-build-isolation -e .)")

BENCH = f"{' '.join(DS_ZIPCCL)} bench"

# Multicast over NVLink is off, for native calls too, as in the tables so far.
ENVIRONMENTS = TRANSPORTS | {
    "as_is": {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"},
    "sockets_tuned": TRANSPORTS["sockets"] | {
        "NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4", "NCCL_P2P_NET_CHUNKSIZE": "1048576",
        "NCCL_MIN_P2P_NCHANNELS": "8", "NCCL_MAX_P2P_NCHANNELS": "8"}}
NETWORK = "sockets", "sockets_tuned"            # what two ranks of one GPU can use
LINKS = {"as_is": "--rivals sum,raw,frames --calls 1,8 --transport adaptive", "host": "--rivals sum --calls 1,8",
         "sockets": "--rivals sum --calls 1 --place out", "sockets_tuned": "--rivals sum --calls 1 --place out"}
LARGE = 32768           # tokens: of a GPU's 140 GiB 1.3b takes 86 by itself, and another engine of SCAPE's 23 more


@dataclass(frozen=True)
class Kind:
    """``runs``: of all token counts; ``large``: in place of them from LARGE on; ``tried``: last, with the first token count: each
    adaptive run makes about 40 steps, which over sockets take longer than all others of that count. ``limit``: seconds."""
    stage: int
    runs: str
    large: str | None = None
    tried: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    limit: int = 240


def _adamw(stage: int) -> Kind:
    always = "native,zipped,one_sided,again,silent"
    return Kind(stage, f"{always},native_late,zipped_late", always, "native,adaptive,native_late,adaptive_late")


def _scape(name: str) -> Kind:
    others = f"{name}_zipped,{name}_offload,{name}_offload_zipped,{name}_ahead"
    return Kind(1, f"adams,{name},adams_again,adams_zipped,{others},adams_silent", f"adams,{name},adams_silent")


KINDS = {"3": Kind(3, "native,zipped,cached,one_sided,again,silent", None, "native,adaptive"),
         "3late": Kind(3, "native,zipped,again", environment={"ZIPCCL_LATE": "1"}, limit=180),
         "3late4": Kind(3, "native,zipped,again", environment={"ZIPCCL_LATE": "4"}, limit=180),
         "1": _adamw(1), "2": _adamw(2), "scape99": _scape("scape99"), "scape90": _scape("scape90"),
         "zeropp": Kind(3, "native,zeropp,again", limit=300)}            # DeepSpeed compiles its operations first


#: Only what any file system, archive or copying program takes.
FILE_NAMES = str.maketrans({":": "_", "/": "_", ",": "-"})


@dataclass(frozen=True)
class Part:
    """``arguments``: of python, but for --json. ``limit``: seconds. ``ranks``: of one GPU, to be started; 0: the command does it."""
    name: str
    arguments: list[str]
    environment: dict[str, str]
    limit: int
    ranks: int = 0

    def __str__(self) -> str:
        settings = "".join(f"{name}={value} " for name, value in self.environment.items())
        started = f"{self.ranks} times, with a launcher's variables, LOCAL_RANK=0 and NCCL_HOSTID=h$RANK: " if self.ranks else ""
        return f"{self.name}  [{self.limit} s]  {started}{settings}{shell(self.arguments)}"


def told_apart(found: dict, part: Part) -> dict:
    """What a command has found; rows of ``bench step`` and what it left out with what it can't know, behind the transport, by which --merge
    groups rows."""
    notes = "".join([f", {name}={value}" for name, value in part.environment.items() if name == "ZIPCCL_LATE"]
                    + [", all ranks on one GPU"] * (part.ranks > 0))
    rows = [row | {"transport": row["transport"] + notes} if row.get("op") == "step" else row for row in found["rows"]]
    left_out = [text.replace(" ", f"{notes} ", 1) for text in found.get("left_out", ())] if part.name.startswith("steps:") else None
    return found | {"rows": rows} | ({"left_out": left_out} if left_out else {})


def _token_counts(text: str) -> tuple[str, ...]:
    if not all(word.isdecimal() and int(word) > 0 for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text}: expected a list of numbers")
    return tuple(sorted(set(text.split(",")), key=int))


def _run_names(text: str) -> tuple[str, ...]:
    if unknown := [name for name in text.split(",") if name not in RUNS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected a list of {', '.join(RUNS)}")
    return tuple(text.split(","))


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", metavar="PART", nargs="*")
    parser.add_argument("--list", action="store_true", help="say each part's name, limit, environment and command, and run nothing")
    parser.add_argument("--out", type=Path, default=Path("runs/tables"), help="folder of the JSON files (runs/tables)")
    parser.add_argument("--resume", action="store_true",
                        help="leave out parts whose file is there, also of failed ones: delete it to try again")
    parser.add_argument("--tokens", metavar="LIST", type=_token_counts, help="of steps (2048,8192,32768)")
    parser.add_argument("--runs", metavar="LIST", type=_run_names, help="of steps, in place of what a kind has, at all token counts; "
                        "one-sided ones over NVLink only")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit", type=int, help="no part has more seconds than so many")
    parser.add_argument("--seconds", type=int,
                        help="for everything: a part whose limit is more than what is left does not begin, and has no file")
    parser.add_argument("--revision", help="of the sources, where git can't say")
    parser.add_argument("--one-gpu", action="store_true", help="all ranks on one GPU, over sockets; only parts that can")
    parser.add_argument("--dry-run", action="store_true", help="small sizes, a tiny model, one round")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    args.dry_run = args.dry_run or args.device == "cpu"
    return args


class Plan:
    """All parts, those first that say most."""

    def __init__(self, args):
        self._args, self._on_gpu, self._small = args, args.device == "cuda", args.dry_run

    def __iter__(self) -> Iterator[Part]:
        yield from self._links()
        yield from self._steps("tiny" if self._small else "1.3b")
        yield from self._scripts()
        if not self._small:
            yield from self._steps("350m")

    def _transports(self, *names: str) -> list[str]:
        """Those of ``names`` that there are here: over gloo NCCL's settings say nothing."""
        if not self._on_gpu:
            return ["as_is"]
        return [name for name in names if name in NETWORK or not self._args.one_gpu]

    def _part(self, name: str, arguments: str, environment: dict[str, str], limit: int) -> Part:
        """``{soft_limit}`` in ``arguments``: when the command itself is to begin nothing more, so that it can still end."""
        limit = min(limit, self._args.limit or limit)
        words = arguments.format(soft_limit=max(10, limit - 45)).split()
        return Part(name, [str(ROOT / word) if word.startswith("benchmarks/") else word for word in words], environment, limit)

    def _with_ranks(self, name: str, arguments: str, environment: dict[str, str], limit: int) -> Part:
        """Of a command that spawns its ranks with --ranks, and takes a launcher's."""
        part = self._part(name, f"{arguments} --device {self._args.device}", environment, limit)
        if self._args.one_gpu:
            return replace(part, ranks=self._args.ranks)
        return replace(part, arguments=[*part.arguments, "--ranks", str(self._args.ranks)])

    def _links(self) -> Iterator[Part]:
        for transport in self._transports(*LINKS):
            sizes = ("-b 64K -e 64K --iters 5 --op all_gather_into_tensor,reduce_scatter_tensor" if self._small else
                     "-b 64K -e 1G --seconds 0.3 --limit {soft_limit}")
            yield self._with_ranks(f"links:{transport}", f"{BENCH} collectives --choice adaptive,always -f 4 {sizes} "
                             f"{LINKS[transport]}", ENVIRONMENTS[transport], 240)

    def _steps(self, model: str) -> Iterator[Part]:
        args = self._args
        asked = "".join(f"/{','.join(words)}" for words in (args.tokens, args.runs) if words)
        for transport, (name, kind) in itertools.product(self._transports("sockets", "host", "as_is"), KINDS.items()):
            cells = self._cells(model, kind, transport)
            if not cells or name == "zeropp" and not self._on_gpu:       # DeepSpeed has its operations on GPUs only
                continue
            # Over sockets a step takes seconds.
            turns = f"--rounds 4 {'--steps 1 --warmup 2 --skip 0' if transport == 'sockets' else '--steps 2 --warmup 3'}"
            if self._small:
                turns = "--rounds 1 --steps 1 --warmup 2 --seq-len 256 --min-bytes 0 --bucket-size 50000"
            yield self._with_ranks(f"steps:{name}/{model}/{transport}{asked}", f"{BENCH} step --cells {' '.join(cells)} "
                                   f"--transports {transport} {turns} --seconds {{soft_limit}}",
                                   ENVIRONMENTS[transport] | kind.environment, kind.limit)

    def _cells(self, model: str, kind: Kind, transport: str) -> list[str]:
        """Of ``bench step``, in order; none where of the runs that are asked for the stage has none."""
        args, tokens = self._args, self._args.tokens
        if tokens is None:              # ranks that share a GPU have not the memory for more
            tokens = ("256",) if self._small else ("2048",) if args.one_gpu else ("2048", "8192", "32768")
        num_small = len([number for number in tokens if int(number) < LARGE])
        if args.runs:
            found = [(tokens, args.runs)]
        elif kind.large:
            found = [(tokens[:num_small], kind.runs.split(",")), (tokens[num_small:], kind.large.split(","))]
        else:
            found = [(tokens, kind.runs.split(","))]
        if kind.tried and not args.runs:
            found.append((tokens[:1], kind.tried.split(",")))
        found = [(numbers, [name for name in names if self._has(kind, name, transport)]) for numbers, names in found]
        return [f"{model}/{kind.stage}/{','.join(numbers)}/{','.join(names)}" for numbers, names in found if numbers and names]

    @staticmethod
    def _has(kind: Kind, name: str, transport: str) -> bool:
        """One-sided calls do not ask NCCL what they may use: they are measured where it may use all."""
        section = RUNS[name].zipccl
        return kind.stage in RUNS[name].stages and (transport == "as_is" or not isinstance(section, dict) or "transport" not in section)

    def _scripts(self) -> Iterator[Part]:
        args, device = self._args, f"--device {self._args.device}"
        sizes, size = ("64K --calls 2", "256K --side 64 --rounds 2") if self._small else ("4M,64M", "256M")
        for transport in self._transports("host", "as_is", "sockets"):
            by = "symmetric_memory" if transport == "as_is" and self._on_gpu else "process_group"
            yield self._with_ranks(f"trace:{transport}", f"benchmarks/call_trace.py --sizes {sizes} --transport {by}",
                                   ENVIRONMENTS[transport], 120)
        sms = " --sms 0,64,32" if self._on_gpu else ""
        for transport in self._transports("host", "as_is"):
            yield self._with_ranks(f"interference:{transport}", f"benchmarks/interference.py --size {size}{sms}",
                                   ENVIRONMENTS[transport], 240)
        limits = " --sms 0,96,64,32,16" if self._on_gpu else ""
        alone = f"--ranks 1 --ways copies,kernels --size {size}{limits} {device}"
        yield self._part("interference:kernels", f"benchmarks/interference.py {alone}", {}, 120)
        if not args.one_gpu:
            small = " --dry-run" if self._small else ""
            there = "" if self._on_gpu else f" --ranks {args.ranks} --transports as_is"
            scaling = self._part("scaling", f"benchmarks/scaling.py {device}{small}{there} --seconds {{soft_limit}}", {}, 600)
            yield replace(scaling, arguments=[*scaling.arguments, "--out", str(args.out / "scaling")])
        numel = "200K --repeat 2" if self._small else "200M"
        yield self._part("offload", f"benchmarks/scape_offload.py --ranks {args.ranks} --numel {numel}", {}, 300)
        size, numel = ("64K --repeat 1", "1M --density 0.1 --repeat 1") if self._small else ("16M,256M", "16M,200M")
        yield self._part("codec:bench", f"{BENCH} codec {device} --size {size}", {}, 240)
        if self._on_gpu:
            yield self._part("codec:gpu", f"benchmarks/gpu_codec.py{' --quick' if self._small else ''}", {}, 400)
        yield self._part("codec:scape", f"benchmarks/scape_kernels.py {device} --numel {numel}", {}, 240)


def chosen(parts: list[Part], patterns: list[str]) -> list[Part]:
    """Those that one of ``patterns`` names, in the order of these. Raises SystemExit for one that names none."""
    found = []
    for pattern in patterns:
        named = [part for part in parts if fnmatch(part.name, pattern) or fnmatch(part.name, pattern + "[:/]*")]
        if not named:
            raise SystemExit(f"no part is called {pattern} here; --list says what there is")
        found += [part for part in named if part not in found]
    return found if patterns else parts


def revision() -> str | None:
    """Of the checkout; "-dirty" where files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def main(argv=None) -> int:
    args = parse(argv)
    parts, start, failed = chosen(list(Plan(args)), args.parts), time.monotonic(), False
    if args.list:
        print("\n".join(map(str, parts)))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    facts = {"revision": args.revision or revision(), "device": args.device}
    for part in parts:
        path = args.out / (part.name.translate(FILE_NAMES) + ".json")
        if args.resume and path.exists():
            print(f"{part.name}: {path} is there", flush=True)
            continue
        began = time.monotonic()
        if args.seconds is not None and start + args.seconds - began < part.limit:
            print(f"{part.name}: left out, {start + args.seconds - began:.0f} s are left", flush=True)
            continue
        print(f"== {part}", flush=True)
        found = measure(part.name, part.arguments, part.environment, part.limit, ranks=part.ranks, show=True)
        found = told_apart(found, part)
        seconds, errors = time.monotonic() - began, [row["error"] for row in found["rows"] if "error" in row]
        failed = failed or bool(errors)
        found = {"part": part.name, **facts, "environment": part.environment, "limit_s": part.limit, "took_s": round(seconds, 1), **found}
        new = path.with_suffix(".new")
        write_json(new, found, command=shell(part.arguments))
        os.replace(new, path)                       # whole or not at all: --resume takes it for done
        print(f"== {part.name}: {len(found['rows'])} rows, {seconds:.0f} s{''.join('; ' + error for error in errors)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))         # else what runs would run on
    sys.exit(main())
