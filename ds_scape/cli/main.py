"""The ``ds_scape`` command."""
import argparse
import sys

from ds_scape.cli import estimate, report
from zipscape.errors import ZipScapeError
from zipscape.machine import check_files

COMMANDS = {"estimate": estimate, "report": report}


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand; returns the exit status. Errors of ours are printed as one paragraph, without a traceback."""
    parser = argparse.ArgumentParser(prog="ds_scape", description="SCAPE: an optimizer that synchronises a small part of the coordinates.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=module.HELP, description=module.DESCRIPTION))
    args = parser.parse_args(argv)
    try:
        check_files(args, "json")
        return COMMANDS[args.command].run(args)
    except ZipScapeError as error:
        print(f"ds_scape: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
