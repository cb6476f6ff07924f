"""Cases of functions of other packages on a parallel model: each is a row of docs/interplay.md.

The cases stand in ``interplay_*.py``; ``make interplay-page`` writes their table.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from reference import Tiny, gradients_of, parallel, quietly, shard_differences, worst
from reference_mixtral import Layout, batches
from torch import nn

import parallel_ext as px
from parallel_ext.sharding.slices import local_part

PAGE = Path(__file__).parents[2] / "docs" / "interplay.md"
PACKAGES = ("torch", "transformers", "peft", "accelerate")
MODULES = ("torch", "checkpoint", "transformers", "peft", "accelerate")
_BEGIN, _END = (
    "<!-- the table: make interplay-page -->\n",
    "<!-- end of the table -->\n",
)


@dataclass(frozen=True)
class Spread:
    """How a case's model is spread."""

    tp: int = 2
    dp: int = 1
    zero: int | None = None

    def __str__(self) -> str:
        return f"tp={self.tp}, dp={self.dp}" + (f", zero={self.zero}" if self.zero else "")


TP = (Spread(),)
DATA_PARALLEL = (Spread(1, 2, 2), Spread(1, 2, 3), Spread(2, 2, 3))
EVERYWHERE = TP + DATA_PARALLEL
ONCE_A_STAGE = (*TP, Spread(1, 2, 2), Spread(2, 2, 3))  # of cases that take seconds


@dataclass(frozen=True)
class Case:
    """A function, or several that do one thing, and what they do.

    Attributes:
        names: as one imports them.
        exact: whether they are as in one process; else they are refused.
        text: how they are, or the call to use instead, which stands in the error.
        function: gets a :class:`Trial`.
        spreads: how its model is spread.
    """

    names: tuple[str, ...]
    exact: bool
    text: str
    function: Callable[[Trial], None]
    spreads: tuple[Spread, ...]

    @property
    def key(self) -> str:
        return self.function.__name__

    def run(self, spread: Spread, folder: Path) -> None:
        """Run the case on every rank of a job; it raises where the page would be wrong."""
        trial = Trial(spread, folder)
        if self.exact:
            with quietly():
                self.function(trial)
            return
        before = {name: local_part(p).clone() for name, p in trial.model.named_parameters()}
        try:
            with quietly():
                self.function(trial)
        except Exception as error:
            if self.text not in str(error):
                raise AssertionError(f"the refusal does not say {self.text!r}") from error
        else:
            raise AssertionError(f"{', '.join(self.names)} was not refused")
        for name, parameter in trial.model.named_parameters():
            if not torch.equal(local_part(parameter), before[name]):
                raise AssertionError(f"{name} changed before the refusal")
        with torch.no_grad():
            trial.model(**trial.own)  # as if nothing had been


CASES: list[Case] = []


def _add(
    names: Iterable[str], exact: bool, text: str, spreads: tuple[Spread, ...]
) -> Callable[[Callable[[Trial], None]], Callable[[Trial], None]]:
    def decorate(function: Callable[[Trial], None]) -> Callable[[Trial], None]:
        CASES.append(Case(tuple(names), exact, text, function, spreads))
        return function

    return decorate


def exact(*names: str, how: str = "as in one process", spreads: tuple[Spread, ...] = TP) -> Any:
    """A case of functions that do what they do in one process."""
    return _add(names, True, how, spreads)


def refused(*names: str, instead: str, spreads: tuple[Spread, ...] = TP) -> Any:
    """A case of functions that raise on every rank, with these words, before anything changes."""
    return _add(names, False, instead, spreads)


class Trial:
    """What a case works with: a parallel model beside the plain one of which it was made."""

    tiny = Tiny(layers=1)

    def __init__(self, spread: Spread, folder: Path) -> None:
        self.spread, self.folder = spread, folder
        with quietly():
            self.mesh = Layout(spread.dp, spread.tp, 1).mesh()
        self.whole, of_ranks = batches(self.tiny, spread.dp)
        self.own = of_ranks[self.mesh.dp_rank]

    @cached_property
    def reference(self) -> Any:
        return self.tiny.model()

    @cached_property
    def model(self) -> Any:
        return self.another()

    def another(self, seed: int = 1) -> Any:
        """A further parallel model."""
        with quietly():
            model = parallel(self.tiny.model(seed), self.mesh)
            return (
                px.data_parallel(model, self.mesh, self.spread.zero) if self.spread.zero else model
            )

    def backward(self) -> None:
        """Let both models have gradients."""
        self.reference(**self.whole).loss.backward()
        self.model(**self.own).loss.backward()

    def equal(self, gradients: bool = False, tolerance: float = 1e-10) -> None:
        """Raise unless all parameters, or gradients, are those of the plain model."""
        full = dict(self.reference.named_parameters())
        if gradients:
            full = gradients_of(self.reference)
        error, name = worst(shard_differences(self.model, full, gradients))
        if not error <= tolerance:
            raise AssertionError(f"{name} differs by {error:.1e}")


def close(ours: Any, theirs: Any, tolerance: float = 1e-10) -> None:
    """Raise unless two numbers or tensors are equal but for rounding."""
    ours, theirs = torch.as_tensor(ours).double(), torch.as_tensor(theirs).double()
    if not torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance):
        raise AssertionError(f"{ours} is not {theirs}")


def expect(error: type[Exception], words: str, call: Callable[[], Any]) -> None:
    """Raise unless a call raises an error with these words."""
    try:
        call()
    except error as raised:
        close(words in str(raised), True)
    else:
        raise AssertionError(f"no error says {words!r}")


def each_refused(*calls: Callable[[], Any]) -> None:
    """Every one of some calls raises; the error is that of the last."""
    for call in calls[:-1]:
        expect(NotImplementedError, "not supported on a parallel model", call)
    calls[-1]()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> float:
    """A step of training, and its loss."""
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    return loss.item()


def load_cases() -> list[Case]:
    """All cases, in the order of the page."""
    names = [f"interplay_{module}" for module in MODULES]
    for name in names:
        importlib.import_module(name)
    return sorted(CASES, key=lambda case: names.index(case.function.__module__))


def run_case(key: str, spread: Spread, folder: Path) -> None:
    """Run a case by its key, on a rank of a pool."""
    case = next(case for case in load_cases() if case.key == key)
    case.run(spread, folder)


def _package(case: Case) -> str:
    name = case.names[0]
    return "torch.distributed" if name.startswith("torch.distributed") else name.split(".")[0]


def table() -> str:
    """The tables of the page."""
    lines = []
    for package in ("torch", "torch.distributed", "transformers", "peft", "accelerate"):
        lines += ["", f"## {package}", "", "| function | | how, or instead |", "|---|---|---|"]
        for case in load_cases():
            if _package(case) == package:
                names = ", ".join(f"`{name}`" for name in case.names)
                lines.append(f"| {names} | {'exact' if case.exact else 'refused'} | {case.text} |")
    return "\n".join(lines) + "\n\n"


def versions() -> str:
    """What the cases are tried with."""
    tried = (f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return f"Tried with {', '.join(tried)}.\n"


def page(text: str, tried: str | None = None) -> str:
    """The page with its table written again.

    Args:
        text: of the page.
        tried: the versions; those that stand there when None.
    """
    before, _, rest = text.partition(_BEGIN)
    written, _, after = rest.partition(_END)
    tried = tried or written[: written.index("\n") + 1]
    return f"{before}{_BEGIN}{tried}{table()}{_END}{after}"


if __name__ == "__main__":
    import interplay  # where the cases are, and not in this script

    PAGE.write_text(interplay.page(PAGE.read_text(), versions()))
