"""What a parallel model knows about how it is spread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from parallel_ext.agreement import Agreement
from parallel_ext.held_gradients import HeldGradients
from parallel_ext.layout import ModelLayout, Range
from parallel_ext.mesh import Mesh
from parallel_ext.models.table import ModelTable
from parallel_ext.moe import Routing
from parallel_ext.partial_gradients import PartialGradients
from parallel_ext.routing_counter import RoutingCounter

STATE_NAME = "parallel_ext_local_shards"
"""Name under which a parallel model holds its :class:`ParallelState`.

It stands in every ``state_dict()``, so that a model which is not parallel refuses the shards of one
by this name.
"""


class ParallelState(nn.Module):
    """How one model is spread; has no parameters.

    Attributes:
        mesh: the ranks.
        table: the names of its modules.
        layout: where every parameter lives.
        vocab_range: the ids of this rank.
        vocab_sizes: number of ids of every tp rank.
        vocab_multiple_of: boundaries between their rows are multiples of this.
        agreement: compares inputs before a forward; None when switched off or not needed.
        training_logits: whether training with labels returns logits.
        partials: sums the partial gradients of replicated parameters; None with one rank.
        routings: those of the layers with a mixture of experts.
        routing_counter: counts what they choose; None unless ``RoutingMetrics`` asks for it.
        adapted: whether LoRA was added; its modules then join the agreement.
        zero: the stage that ``data_parallel`` was given; None before.
        dealt: names of the parameters that it has sharded over dp ranks.
        held: the gradients that FSDP holds back under ``no_sync``; None without FSDP.
        generates: whether ``generate`` is running.
    """

    def __init__(
        self,
        mesh: Mesh,
        table: ModelTable,
        layout: ModelLayout,
        vocab_ranges: tuple[Range, ...],
        vocab_multiple_of: int,
        agreement: Agreement | None,
        training_logits: bool,
        partials: PartialGradients | None,
        routings: list[Routing],
    ) -> None:
        super().__init__()
        self.mesh, self.table = mesh, table
        self.vocab_multiple_of = vocab_multiple_of
        self.agreement, self.training_logits = agreement, training_logits
        self.set_vocabulary(layout, vocab_ranges)
        self.partials, self.routings = partials, routings
        self.routing_counter: RoutingCounter | None = None
        self.adapted = False
        self.zero: int | None = None
        self.dealt: frozenset[str] = frozenset()
        self.held: HeldGradients | None = None
        self.generates = False

    def set_vocabulary(self, layout: ModelLayout, vocab_ranges: Sequence[Range]) -> None:
        """Where every parameter lives, and the ids of the tp ranks, from now on."""
        self.layout = layout
        self.vocab_range = vocab_ranges[self.mesh.tp_rank]
        self.vocab_sizes = [stop - start for start, stop in vocab_ranges]
        if self.agreement is not None:
            self.agreement.vocab_size = vocab_ranges[-1][1]

    @property
    def forwards_together(self) -> bool:
        """Whether a dp rank's forward needs those of the others."""
        return self.mesh.dp_size > 1 and (self.mesh.ep_size > 1 or self.zero is not None)

    def get_extra_state(self) -> dict[str, int]:
        mesh = self.mesh
        state = {"tp_rank": mesh.tp_rank, "tp_size": mesh.tp_size}
        if self.routings:
            state |= {"ep_rank": mesh.ep_rank, "ep_size": mesh.ep_size}
        return state

    def set_extra_state(self, state: dict[str, int]) -> None:
        if state != self.get_extra_state():
            raise RuntimeError(
                f"this state_dict holds the shards of {state}, but this process is "
                f"{self.get_extra_state()}; load a full state_dict or a saved directory instead"
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # A full state_dict, which no parallel model wrote, loads as well.
        if self.zero is not None and self.mesh.dp_size > 1:
            raise RuntimeError("load the state_dict before px.data_parallel shards the parameters")
        key = prefix + "_extra_state"
        if key in state_dict:
            self.set_extra_state(state_dict[key])


def model_of(model: nn.Module) -> nn.Module:
    """The HuggingFace model that was parallelized, also inside wrappers such as PEFT's.

    Raises:
        TypeError: the model was not parallelized.
    """
    for module in model.modules():
        if STATE_NAME in module._modules:  # wrappers forward attributes
            return module
    raise TypeError(
        f"{type(model).__name__} is not a parallel model; call px.parallelize(model, mesh) first"
    )


def state_of(model: nn.Module) -> ParallelState:
    """How a parallel model is spread, also inside wrappers such as PEFT's.

    Raises:
        TypeError: the model was not parallelized.
    """
    return getattr(model_of(model), STATE_NAME)
