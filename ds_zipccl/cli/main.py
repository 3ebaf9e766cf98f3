"""The ``ds_zipccl`` command."""
import argparse
import sys

from ds_zipccl.cli import bench, estimate, ranks, report
from zipscape.errors import ZipScapeError
from zipscape.machine import check_files

COMMANDS = {"bench": bench, "estimate": estimate, "report": report}


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand; returns the exit status. Errors of ours are printed as one paragraph, without a traceback."""
    parser = argparse.ArgumentParser(prog="ds_zipccl", description="Losslessly compressed collectives for DeepSpeed and torch.")
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)          # from DeepSpeed's launcher; LOCAL_RANK says it too
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=module.HELP, description=module.HELP))
    args = parser.parse_args(argv)
    try:
        if ranks.writes_results():              # else a launcher ends the others
            check_files(args, "json", "markdown")
        return COMMANDS[args.command].run(args)
    except ZipScapeError as error:
        print(f"ds_zipccl: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
