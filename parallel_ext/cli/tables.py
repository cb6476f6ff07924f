"""Tables as people read them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH_OF_A_FILE = 200  # columns where the output is no terminal
_ON_THE_RIGHT = {
    *("tensors", "numbers", "bytes", "times", "difference", "relative"),
    *("weights", "gradients", "optimizer", "gathered", "activations", "peak"),
}


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows under their columns; numbers and sizes stand on the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    rows = [[str(value) for value in row] for row in rows]
    for column in columns:
        right = "right" if column in _ON_THE_RIGHT else "left"
        table.add_column(column, justify=right, overflow="fold")
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else WIDTH_OF_A_FILE
    Console(width=width, highlight=False, markup=False, emoji=False).print(table)
