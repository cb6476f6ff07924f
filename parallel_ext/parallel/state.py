"""The state of a parallel model: how it is sharded over the ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from parallel_ext.nn.fsdp_gradients import FSDPGradients
from parallel_ext.nn.grad_sync import PartialGradients
from parallel_ext.nn.leaf_sums import LeafSums
from parallel_ext.nn.loss import BalanceOfLeaves
from parallel_ext.nn.replicas import ReplicaCycle
from parallel_ext.nn.routing import Routing
from parallel_ext.nn.routing_counter import RoutingCounter
from parallel_ext.ops.group import Range
from parallel_ext.parallel.input_agreement import Agreement
from parallel_ext.parallel.joining import Key, remember
from parallel_ext.parallel.plan import Plan
from parallel_ext.sharding._torch_private import own_modules
from parallel_ext.sharding.layout import ModelLayout
from parallel_ext.sharding.named_shards import to_shards
from parallel_ext.sharding.shards import LocalShard, Marker

STATE_NAME = "parallel_ext_local_shards"
"""Name under which a parallel model holds its :class:`ParallelState`.

It stands in every ``state_dict()``, so that a model which is not parallel refuses the shards of one
by this name.
"""


class ParallelState(nn.Module):
    """The state of one parallel model: mesh, layout and options; has no parameters.

    Attributes:
        mesh: the ranks.
        spec: the names of its modules.
        layout: where every parameter lives.
        vocab_range: the ids of this rank.
        vocab_sizes: number of ids of every tp rank.
        agreement: compares inputs before a forward; None when switched off or not needed.
        around: what the tp ranks are to compare of the forward that runs around a decoder, by name.
        forward_around_ran: whether our forward of a model around a decoder has begun, and the
            decoder's has not.
        vocab_multiple_of, training_logits, fused_loss, invariant, sequence_parallel: options of
            ``parallelize``; ``sequence_parallel`` is False at tp = 1.
        partials: sums the partial gradients of replicated parameters; None with one rank.
        routings: those of the layers with a mixture of experts.
        routing_counter: counts what they choose; None unless ``RoutingMetrics`` asks for it.
        adapted: whether LoRA was added; its modules then join the agreement.
        zero: the stage that ``data_parallel`` was given; None before.
        reduced_by_caller: whether ``no_data_parallel`` was called.
        in_leaf: whether a leaf of ``train_leaves`` runs, which sums losses and gradients over dp.
        leaf_loop: the loop whose leaves are not all through, None between batches.
        leaf_is_batch: whether the losses of that leaf are those of a batch of its own.
        balance: the load balancing loss of the batch whose leaves run, if they have one.
        fsdp_sharded: names of the parameters that ``data_parallel`` has sharded over dp ranks.
        leaf_sums: sums what FSDP shards over the leaves under ``px.Invariant``; else None.
        fsdp_gradients: what FSDP holds back under ``no_sync``; None without FSDP.
        generates: whether ``generate`` is running.
        counts_share: whether ``num_items_in_batch`` is divided by the number of dp ranks, for a
            module around the model that computes losses of its own.
        replicas_over_dp: what of the parameters the dp ranks compare next.
        own_forward: the function that stands for the class's forward in the instance.
        forward_ran: whether ``own_forward`` has begun in this call; False only where another
            forward stands there and has not called it yet.
        drops: whether the model has dropout outside of what is sharded.
    """

    def __init__(
        self, plan: Plan, partials: PartialGradients | None, routings: list[Routing]
    ) -> None:
        super().__init__()
        mesh, options = plan.mesh, plan.options
        self.mesh, self.spec = mesh, plan.spec
        self.vocab_multiple_of = options.vocab_multiple_of
        self.training_logits, self.fused_loss = options.training_logits, options.fused_loss
        self.invariant, self.sequence_parallel = options.invariant, plan.sequence_parallel
        if self.invariant is not None:
            self.fused_loss = True  # of blocks of the vocabulary
        self.agreement: Agreement | None = None
        self.around: dict[str, object] = {}
        self.forward_around_ran = False
        if options.agreement and mesh.tp_size > 1:
            vocab_size = plan.vocab_ranges[-1][1]
            deferred = mesh.device.type != "cpu"
            self.agreement = Agreement(mesh, vocab_size, deferred, plan.layout.buffers)
        self.set_vocabulary(plan.layout, plan.vocab_ranges)
        self.partials, self.routings = partials, routings
        self.routing_counter: RoutingCounter | None = None
        self.adapted = False
        self.zero: int | None = None
        self.reduced_by_caller = False
        self.in_leaf = self.leaf_is_batch = False
        self.leaf_loop: object | None = None
        self.balance: BalanceOfLeaves | None = None
        self.fsdp_sharded: frozenset[str] = frozenset()
        self.leaf_sums: LeafSums | None = None
        self.fsdp_gradients: FSDPGradients | None = None
        self.generates = self.counts_share = False
        ranks = range(mesh.tp_rank, mesh.world_size, mesh.tp_size)
        self.replicas_over_dp = ReplicaCycle(tuple(ranks), mesh.world_size, plan.layout.buffers)
        self.own_forward: Callable[..., Any] | None = None
        self.forward_ran = True
        self.drops = False

    def set_vocabulary(self, layout: ModelLayout, vocab_ranges: Sequence[Range]) -> None:
        """Set where every parameter lives, and the vocabulary range of each tp rank."""
        self.layout = layout
        self.vocab_range = vocab_ranges[self.mesh.tp_rank]
        self.vocab_sizes = [stop - start for start, stop in vocab_ranges]
        if self.agreement is not None:
            self.agreement.vocab_size = vocab_ranges[-1][1]

    @property
    def experts_span_dp(self) -> bool:
        """Return whether the gradient of an expert has parts on several dp ranks."""
        mesh = self.mesh
        return bool(self.routings) and mesh.dp_size > 1 and max(mesh.ep_size, mesh.tp_size) > 1

    @property
    def forwards_together(self) -> bool:
        """Return whether a dp rank's forward needs the forwards of the other dp ranks."""
        within = 1 if self.invariant is None else self.mesh.tp_size  # where ranks have one batch
        return self.mesh.dp_size > 1 and (self.mesh.ep_size > within or self.zero is not None)

    @property
    def trains_by_leaves(self) -> bool:
        """Return whether trainers and accelerate run their batches as leaves."""
        return self.invariant is not None and self.invariant.leaves > 1

    @property
    def trains_apart(self) -> bool:
        """Return whether nothing sums the gradients of the dp ranks, so that each trains alone."""
        by_caller = self.reduced_by_caller or self.in_leaf
        summed = self.zero is not None and self.invariant is None
        return self.mesh.dp_size > 1 and not summed and not by_caller

    def get_extra_state(self) -> Marker:
        """Return which shards this rank holds, in numbers that :func:`_in_words` names."""
        mesh = self.mesh
        tp = mesh.tp_rank, mesh.tp_size
        ep = (mesh.ep_rank, mesh.ep_size) if self.routings else (0, 1)
        dp = (mesh.dp_rank, mesh.dp_size) if self.fsdp_sharded else (0, 1)
        return torch.tensor([*tp, *ep, *dp]).as_subclass(Marker)

    def check_marker(self, marker: torch.Tensor, what: str) -> None:
        """Raise a RuntimeError unless a marker says that the shards beside it are this rank's."""
        own = self.get_extra_state()
        if marker.tolist() != own.tolist():
            raise RuntimeError(
                f"this {what} holds the shards of {_in_words(marker)}, but this process is "
                f"{_in_words(own)}; load what this rank has saved on the same layout, full "
                "tensors, or a checkpoint of px.save_checkpoint"
            )

    def _load_from_state_dict(self, *_: Any) -> None:
        """Load nothing: :func:`check_state_dict` looks at the marker before anything is loaded."""


def _in_words(marker: torch.Tensor) -> str:
    names = ("tp_rank", "tp_size", "ep_rank", "ep_size", "dp_rank", "dp_size")
    numbers = marker.tolist()
    if len(numbers) != len(names):
        return f"{numbers}, which no parallel model has written"
    return ", ".join(f"{name}={number}" for name, number in zip(names, numbers, strict=True))


def check_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: object
) -> None:
    """Raise if this rank cannot load a ``state_dict``, before anything of it is loaded.

    Such are the shards of another rank, and full tensors after ``data_parallel``.
    """
    state: ParallelState = getattr(model, STATE_NAME)
    to_shards(model)  # into which it is loaded, whatever FSDP has gathered
    marker = state_dict.get(f"{prefix}{STATE_NAME}._extra_state")
    if isinstance(marker, torch.Tensor):  # torch puts an object there beside full tensors
        state.check_marker(marker, "state_dict")
    full = [
        name
        for name in sorted(state.fsdp_sharded)
        if isinstance(value := state_dict.get(prefix + name), torch.Tensor)
        and not (isinstance(value, LocalShard) or hasattr(value, "device_mesh"))
    ]
    if full:
        raise RuntimeError(
            f"{full[0]} is sharded over the dp ranks, but the state_dict holds a plain tensor; "
            "load the state_dict before px.data_parallel, or a checkpoint by px.load_checkpoint"
        )


_parallel_models: WeakValueDictionary[Key, nn.Module] = WeakValueDictionary()


class Remembered:
    """A mark by which :func:`parallel_models` finds the model that holds it, and its copies.

    Args:
        model: a parallel HuggingFace model, which is to hold it as an attribute.
        copied: the mark of the model of which it is a copy; None if of none.

    Attributes:
        original: a number that a model and its copies have.
        count: of all models of this process that have become parallel.
    """

    count = 0

    def __init__(self, model: nn.Module, copied: Remembered | None = None) -> None:
        self._model = model
        self._key = remember(model, copied._key if copied else ())
        self.original = copied.original if copied else self._key[0]
        _parallel_models[self._key] = model
        Remembered.count += 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Remembered:
        return Remembered(copy.deepcopy(self._model, memo), self)  # which is being copied


def parallel_models() -> list[nn.Module]:
    """Return the HuggingFace models of this process that are parallel, first those made first.

    So they have one order on all ranks, which communicate for one model after the other.
    """
    return list(_parallel_models.values())


def copies_of(model: nn.Module) -> list[nn.Module]:
    """Return the parallel models that were copied from a model, or from what it is a copy of."""
    original = model.parallel_ext_remembered.original
    return [
        each
        for each in parallel_models()
        if each is not model and each.parallel_ext_remembered.original == original
    ]


def own_state(module: nn.Module) -> ParallelState | None:
    """Return the state that a module itself holds, though wrappers forward attributes; or None."""
    return own_modules(module).get(STATE_NAME)


def is_parallel(model: nn.Module) -> bool:
    """Return whether a model was parallelized, perhaps inside wrappers."""
    return any(own_state(module) is not None for module in model.modules())


def model_of(model: nn.Module) -> nn.Module:
    """Return the HuggingFace model that was parallelized, also from inside wrappers.

    Raises:
        TypeError: the model was not parallelized.
    """
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if own_state(module) is not None:
            return module
    raise TypeError(
        f"{type(model).__name__} is not a parallel model; call px.parallelize(model, mesh) first"
    )


def state_of(model: nn.Module) -> ParallelState:
    """Return the state of the parallel model that :func:`model_of` finds, or raise as it does."""
    return getattr(model_of(model), STATE_NAME)
