"""Where the states of an optimizer lie: as their parameter, or as its rows or columns."""

from __future__ import annotations

from parallel_ext.layout import TensorLayout
from parallel_ext.sharded import reduced

_ROWS, _COLUMNS = -2, -1  # dimensions of a matrix, or of the matrices of a stack
_REDUCED = {"row_var": _COLUMNS, "col_var": _ROWS}  # states of Adafactor


def is_reduced(key: str) -> bool:
    """Whether Adafactor's state of this name has one number for all of a dimension."""
    return key in _REDUCED


def layout_of_state(key: str, parameter: TensorLayout) -> TensorLayout:
    """Return where a state of a parameter lies, by its name in the optimizer.

    Example:
        >>> layout_of_state("row_var", TensorLayout("weight", (5, 4))).shape
        (5, 1)
        >>> layout_of_state("exp_avg", TensorLayout("weight", (5, 4))).shape
        (5, 4)
    """
    return reduced(parameter, _REDUCED[key]) if is_reduced(key) else parameter
