"""The commands of ``parallel-ext``, their options and exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from parallel_ext.cli import convert, diff, inspect, merge, plan, verify
from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.version import VERSION


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of ``parallel-ext``.

    Returns:
        The exit code: 0; 1 where ``verify`` finds damage, ``diff`` a difference or ``plan`` nothing
        that fits; 2 for wrong use and for what cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="parallel-ext", description="Plan a training; look at what was saved; merge; convert."
    )
    parser.add_argument("--version", action="version", version=f"parallel_ext {VERSION}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (plan, inspect, verify, diff, merge, convert):
        name, text = command.__name__.rpartition(".")[2], command.__doc__.splitlines()[0]
        own = commands.add_parser(name, help=text, description=text)
        own.add_argument("--json", action="store_true", help="print JSON instead of tables")
        command.add_arguments(own)
        own.set_defaults(run=command.run)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except (CheckpointError, OSError, ValueError, NotImplementedError) as error:
        print(f"parallel-ext: {error}", file=sys.stderr)
        return 2
