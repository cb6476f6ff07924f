"""Which layers of a model equal others, so that a few of them tell of all."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Repeated:
    """The first layers of a model, of which some consecutive ones are repeated by what follows.

    Attributes:
        run: how many layers there are, which tell of all.
        middle: the numbers of those among them that are repeated; none where nothing is.
        further: how often they are.
    """

    run: int
    middle: range
    further: int

    @classmethod
    def of(cls, kinds: Sequence[Hashable]) -> Repeated:
        """Return the fewest layers that tell of all.

        Some layers may come first that are like no others, then a pattern three times or more
        often, and perhaps its beginning once more. The pattern is run three times: what the second
        one adds, each further one adds.

        Args:
            kinds: of each layer; equal ones are equal in all that is asked.

        Example:
            >>> Repeated.of("dmmmmmm")
            Repeated(run=4, middle=range(2, 3), further=3)
            >>> Repeated.of("llfllfllfllfl")
            Repeated(run=10, middle=range(3, 6), further=1)
            >>> Repeated.of("abc")
            Repeated(run=3, middle=range(0, 0), further=0)
        """
        total = len(kinds)
        best = cls(total, range(0), 0)
        for length in range(1, total // 4 + 1):
            first = total - length
            while first and kinds[first - 1] == kinds[first - 1 + length]:
                first -= 1
            times, more = divmod(total - first, length)
            run = first + 3 * length + more
            if times > 3 and run < best.run:
                best = cls(run, range(first + length, first + 2 * length), times - 3)
        return best

    def numbers(self, layer: int) -> range:
        """Return the numbers that a layer which is run stands for, its own among them."""
        added = self.further * len(self.middle)
        if layer in self.middle:
            return range(layer, layer + added + 1, len(self.middle))
        own = layer if layer < self.middle.start else layer + added
        return range(own, own + 1)
