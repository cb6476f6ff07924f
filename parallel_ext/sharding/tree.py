"""The tree over which leaves are summed, whoever holds them: that of ``csrc/base/tree.h``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Node = tuple[int, int, Any]
"""The sum of the leaves from the first number on, so many or up to the last, and its value."""


def push(nodes: list[Node], node: Node, count: int, add: Callable[[Any, Any], Any]) -> None:
    """Append a node, and merge neighbours that are both halves of a larger one.

    Args:
        nodes: of leaves that follow each other; the last one ends where ``node`` begins.

    Example:
        >>> nodes = []
        >>> for number in range(3):
        ...     push(nodes, (number, 1, str(number)), 3, lambda left, right: f"({left}+{right})")
        >>> nodes
        [(0, 4, '((0+1)+2)')]
    """
    start, width, value = node
    while True:
        while width < count <= start + width and start % (2 * width) == 0:
            width *= 2  # the right half covers nothing
        if start % (2 * width) == 0 or not nodes or nodes[-1][1] != width:
            break
        start, _, left = nodes.pop()
        value, width = add(left, value), 2 * width
    nodes.append((start, width, value))
