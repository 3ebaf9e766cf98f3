"""``ds_zipccl bench ...``: the measurements that come with the package, one subcommand each."""
from ds_zipccl.cli import bench_codec, bench_collectives, bench_step

HELP = "measure: codec, collectives, step"
BENCHES = {"codec": bench_codec, "collectives": bench_collectives, "step": bench_step}


def add_arguments(parser) -> None:
    benches = parser.add_subparsers(dest="bench", required=True)
    for name, module in BENCHES.items():
        module.add_arguments(benches.add_parser(name, help=module.HELP, description=module.DESCRIPTION))


def run(args) -> int:
    return BENCHES[args.bench].run(args)
