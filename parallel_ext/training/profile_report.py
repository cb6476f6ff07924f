"""What a profile of a training step holds, as a table and as a picture."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from parallel_ext.training.step_events import FIXED_PARTS, OTHER, Exchanges, group_of

_WIDTH_OF_A_FILE = 100  # columns where the output is no terminal


@dataclass(frozen=True)
class StepMemory:
    """The bytes of a training step on one rank.

    Attributes:
        parameters: of the model, and its buffers.
        optimizer: the optimizer's states.
        gradients: after backward.
        activations: what a forward leaves allocated for backward: what is saved, the loss, and
            weights that ZeRO has gathered and keeps.
        peak: the most at any moment: parameters, optimizer, and what the step allocates.
    """

    parameters: int
    optimizer: int
    gradients: int
    activations: int
    peak: int


@dataclass(frozen=True)
class RankProfile:
    """Where the time and the memory of a training step went on one rank.

    Attributes:
        seconds: of the step that was profiled.
        seconds_alone: of the step before, without a profiler.
        parts: seconds of each part; their sum is ``seconds``.
        exchanges: what was exchanged over each group of ranks, by the name of the group.
        memory: bytes.
    """

    seconds: float
    seconds_alone: float
    parts: Mapping[str, float]
    exchanges: Mapping[str, Exchanges]
    memory: StepMemory


@dataclass(frozen=True)
class StepProfile:
    """Where the time and the memory of a training step went.

    Attributes:
        ranks: of every rank, in order.
    """

    ranks: tuple[RankProfile, ...] = field(repr=False)

    @property
    def parts(self) -> list[str]:
        """Return the parts that a rank has, exchanges in the order of their groups' names."""
        names = {name for rank in self.ranks for name in rank.parts}
        return [*FIXED_PARTS[:2], *sorted(names - set(FIXED_PARTS)), *FIXED_PARTS[2:]]

    def spread(self, part: str) -> tuple[float, float]:
        """Return the least and the most seconds that a rank spends on a part."""
        seconds = [rank.parts.get(part, 0.0) for rank in self.ranks]
        return min(seconds), max(seconds)


def print_profile(found: StepProfile) -> None:
    """Print a profile as a table of its times and one of its memory."""
    # Imported when called, since importing rich draws from Python's random numbers.
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    def table(*columns: str) -> Table:
        made = Table(box=None, pad_edge=False, header_style="bold")
        for number, column in enumerate(columns):
            made.add_column(column, justify="right" if number else "left", no_wrap=True)
        return made

    first = found.ranks[0]
    times = table("time", "seconds", "share", "least", "most", "exchanges", "bytes")
    for part in found.parts:
        seconds = first.parts.get(part, 0.0)
        given = first.exchanges.get(group_of(part), Exchanges())
        counted = (str(given.times), decimal(given.num_bytes)) if given.times else ()
        spread = (f"{each:.4f}" for each in found.spread(part))
        share = f"{100 * seconds / first.seconds:.1f} %"
        times.add_row(part, f"{seconds:.4f}", share, *spread, *counted)
    steps = [rank.seconds for rank in found.ranks]
    spread = (f"{each:.4f}" for each in (min(steps), max(steps)))
    times.add_row("step", f"{first.seconds:.4f}", "100.0 %", *spread)
    memory = table("memory", "rank 0", "least", "most")
    for each in fields(StepMemory):
        of_ranks = [getattr(rank.memory, each.name) for rank in found.ranks]
        memory.add_row(each.name, *map(decimal, (of_ranks[0], min(of_ranks), max(of_ranks))))
    width = None if sys.stdout.isatty() else _WIDTH_OF_A_FILE
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    console.print(
        f"a training step on {len(found.ranks)} ranks; rank 0 took {first.seconds:.4f} s, "
        f"without the profiler {first.seconds_alone:.4f} s"
    )
    console.print(times)
    console.print(memory)


def draw_profile(found: StepProfile, path: str | os.PathLike[str]) -> None:
    """Draw a profile as PNG: the parts of each rank's time, and its memory."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2)
    ranks = [f"rank {number}" for number in range(len(found.ranks))]
    start = [0.0] * len(ranks)
    for part in found.parts:
        seconds = [rank.parts.get(part, 0.0) for rank in found.ranks]
        above.barh(
            ranks, seconds, left=start, label=part, color="lightgray" if part == OTHER else None
        )
        start = [a + b for a, b in zip(start, seconds, strict=True)]
    above.set_xlabel("seconds of the step")
    names = [each.name for each in fields(StepMemory)]
    for number, name in enumerate(names):
        of_ranks = [getattr(rank.memory, name) / 1e9 for rank in found.ranks]
        at = [rank + (number + 0.5) / (len(names) + 1) - 0.5 for rank in range(len(ranks))]
        below.barh(at, of_ranks, height=1 / (len(names) + 1), label=name)
    below.set_yticks(range(len(ranks)), ranks)
    below.set_xlabel("GB of memory")
    for axes in (above, below):
        axes.invert_yaxis()
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, format="png", dpi=120)
