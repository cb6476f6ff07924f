"""Run a HuggingFace script on several ranks: ``torchrun ... -m parallel_ext.run script.py``."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import warnings
from collections.abc import Sequence

from parallel_ext.interplay.patch import DDP_TIMEOUT_S, patch
from parallel_ext.parallel import joining
from parallel_ext.parallel.state import Remembered


def main(arguments: Sequence[str] | None = None) -> None:
    """Call :func:`parallel_ext.patch`, then run a script with its own arguments as ``__main__``.

    Args:
        arguments: of the command line; those of the process when None.
    """
    parser = argparse.ArgumentParser(
        prog="python -m parallel_ext.run",
        description="Run a HuggingFace script whose models become parallel when it loads them.",
    )
    parser.add_argument("--tp", type=int, default=1, help="ranks that share one model")
    parser.add_argument("--ep", type=int, default=1, help="ranks over which experts are sharded")
    parser.add_argument("--zero", type=int, default=2, choices=(2, 3), help="stage over dp ranks")
    parser.add_argument(
        "--plain",
        action="append",
        default=[],
        metavar="CLASS",
        help="a class of models that each rank loads whole; may be given several times",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=DDP_TIMEOUT_S,
        help="seconds that a rank waits for others; %(default)g by default",
    )
    parser.add_argument("script", nargs=argparse.PARSER, help="the script, and its arguments")
    asked = parser.parse_args(arguments)
    own = asked.script[asked.script[0] == "--" :]
    of_model = {"tp": asked.tp, "ep": asked.ep, "zero": asked.zero}
    mesh = patch(**of_model, plain=asked.plain, timeout=asked.timeout)
    sys.argv = own
    sys.path[0] = os.path.dirname(os.path.abspath(own[0]))
    try:
        script = runpy.run_path(own[0], run_name="__main__")
    except SystemExit as left:
        if left.code:
            joining.stop()  # the others need not wait for this rank's end
        elif mesh.rank == 0 and mesh.world_size > 1:
            _warn_of_whole_models(own[0])
        joining.end()
        raise
    joining.end()
    del script  # whose models may be saved until here
    if mesh.rank == 0 and mesh.world_size > 1:
        _warn_of_whole_models(own[0])


def _warn_of_whole_models(script: str) -> None:
    if not Remembered.count:
        warnings.warn(
            f"{script}: no model has become parallel in this process; each rank has done the whole "
            "work, or other processes have",
            stacklevel=1,
        )


if __name__ == "__main__":
    main()
