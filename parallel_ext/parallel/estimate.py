"""What a training step holds in memory on one rank, from the configuration alone."""

from __future__ import annotations

import copy
import inspect
import math
import re
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel_ext import ops
from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.models.blocks import MixtureNames
from parallel_ext.models.spec import ModelSpec
from parallel_ext.nn.moe import ExpertParallelExperts
from parallel_ext.ops import ALONE, Group
from parallel_ext.parallel.parallelize import carry_out
from parallel_ext.parallel.plan import Options, Plan, layout_of
from parallel_ext.parallel.validate import check_mixture, check_servable, spec_for
from parallel_ext.sharding.layout import ModelLayout, TensorLayout

STATES = {"adamw": 2, "sgd-momentum": 1, "sgd": 0}
"""Numbers that an optimizer keeps for each parameter, in the parameter's dtype."""

_FEW = (2, 3)  # layers that are run where all are alike; what they add is the same for each
_TILE = 4096  # tokens whose logits the fused loss holds at once on a GPU


@dataclass(frozen=True)
class Step:
    """A training step to estimate.

    Attributes:
        rows: of the batch of one dp rank.
        tokens: of a row.
        dtype: of parameters, gradients, optimizer states and activations.
        optimizer: one of :data:`STATES`.
        zero: stage of :func:`data_parallel`, which is used where dp > 1.
        checkpointing: whether layers are recomputed in backward.
    """

    rows: int = 1
    tokens: int = 2048
    dtype: torch.dtype = torch.bfloat16
    optimizer: str = "adamw"
    zero: int = 2
    checkpointing: bool = False


@dataclass(frozen=True)
class Estimate:
    """The bytes of one layout.

    Attributes:
        tp, ep, dp: its sides.
        weights, gradients, optimizer: (largest, smallest) of a rank between two steps, exact.
        gathered: what ZeRO holds beside them in a step; 0 at dp = 1.
        activations: alive between forward and backward, on rank 0, which has the largest shards.
        peak: of a step on that rank, all of the above included.
        model_on_disk, checkpoint_on_disk: of the job; the second has the optimizer's states.
    """

    tp: int
    ep: int
    dp: int
    weights: tuple[int, int]
    gradients: tuple[int, int]
    optimizer: tuple[int, int]
    gathered: int
    activations: int
    peak: int
    model_on_disk: int
    checkpoint_on_disk: int


class _Rank:
    """Rank 0 of a mesh that nobody has started: groups have a size, and communicate nothing."""

    def __init__(self, tp: int, ep: int) -> None:
        self.tp_size, self.ep_size = tp, ep
        self.dp_size = self.edp_size = 1  # what ZeRO holds is computed, not run
        self.world_size = max(tp, ep)
        self.rank = self.tp_rank = self.ep_rank = self.dp_rank = self.edp_rank = 0
        self.device = torch.device("meta")
        self.tp, self.ep = _group(tp), _group(ep)
        self.dp = self.edp = ALONE

    def tp_subgroup(self, partition: Sequence[Sequence[int]]) -> Group:
        """Return the group that rank 0 has in a partition of the tp ranks."""
        return _group(len(next(ranks for ranks in partition if 0 in ranks)))


def _group(size: int) -> Group:
    return Group("planned", size, 0) if size > 1 else ALONE


class _Live(TorchDispatchMode):
    """Count the bytes of the tensors that ops have made and that are still alive.

    Attributes:
        now, peak: bytes; ``peak`` since the last :meth:`mark`.
        peaks: those of the parts of a step, by the names of their marks.
    """

    def __init__(self, existing: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.peaks: dict[str, int] = {}
        self._known = weakref.WeakSet(tensor.untyped_storage() for tensor in existing)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self._known:
                self._add(tensor.untyped_storage())
        return output

    def _add(self, storage: torch.UntypedStorage) -> None:
        self._known.add(storage)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, nbytes: int) -> None:
        self.now -= nbytes

    def mark(self, name: str) -> None:
        """End a part of the step."""
        self.peaks[name], self.peak = self.peak, self.now


class _Attention(torch.autograd.Function):
    """The memory of an attention that never holds its scores, as those of CPU and GPU are."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        output = query.new_empty((*query.shape[:-1], value.size(-1)))
        ctx.save_for_backward(
            *(query, key, value, output), query.new_empty(query.shape[:-1], dtype=torch.float32)
        )
        return output

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return tuple(tensor.new_empty(tensor.shape) for tensor in ctx.saved_tensors[:3])


@contextmanager
def _attention_of_cards() -> Iterator[None]:
    """Let attention take the memory of :class:`_Attention`; on meta torch holds the scores."""
    plain = nn.functional.scaled_dot_product_attention
    nn.functional.scaled_dot_product_attention = lambda *args, **_: _Attention.apply(*args[:3])
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = plain


class Planner:
    """Estimates the layouts of one architecture, of which it builds no weights.

    Args:
        config: of a causal language model that :func:`parallelize` serves.

    Raises:
        ValueError: the architecture is not served.
    """

    def __init__(self, config: transformers.PreTrainedConfig) -> None:
        with init_empty_weights():
            self._plain = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
        self._plain.tie_weights()
        self._spec = spec_for(self._plain)
        self._layers = self._plain.get_submodule(self._spec.layers)
        shapes = {tuple(p.shape for p in layer.parameters()) for layer in self._layers}
        self._alike = len(shapes) == 1 and len(self._layers) > _FEW[1]

    @classmethod
    def of(cls, source: str) -> Planner:
        """Read the configuration of a directory, of a file, or of a model on the hub.

        Raises:
            CheckpointError: there is none, or none of an architecture that is served.
        """
        try:
            return cls(transformers.AutoConfig.from_pretrained(source, trust_remote_code=False))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{source}: {error}") from error

    def layouts(self, world: int) -> Iterator[tuple[int, int]]:
        """Yield every (tp, ep) of a number of ranks; without experts those of ep = 1."""
        sides = [side for side in range(1, world + 1) if world % side == 0]
        for tp in sides:
            yield from ((tp, ep) for ep in (sides if self._spec.mixture else [1]))

    def estimate(self, world: int, tp: int, ep: int, step: Step) -> Estimate:
        """Estimate a step on ``world`` ranks, of which ``tp`` and ``ep`` are divisors.

        Raises:
            ValueError: the model cannot be sharded so.
        """
        rank, dp = _Rank(tp, ep), world // tp
        check_servable(self._plain, rank, allow_different_dropout=True)
        check_mixture(self._plain, self._spec, rank, agreement=True)
        held = _Held(self._spec, layout_of(self._plain, self._spec, tp, ep), tp, ep, world)
        size, states = step.dtype.itemsize, STATES[step.optimizer]
        weights = tuple(size * held.numel(rank, sharded=True) for rank in held.extremes())
        forward, backward = self._activations(rank, step, held, dp)
        gathered = _gathered(held, step) if dp > 1 else 0
        whole = size * held.logical_numel
        return Estimate(
            *(tp, ep, dp),
            weights=(max(weights), min(weights)),
            gradients=(max(weights), min(weights)),
            optimizer=(states * max(weights), states * min(weights)),
            gathered=gathered,
            activations=forward,
            peak=(1 + states) * weights[0] + gathered + max(forward, backward),
            model_on_disk=whole,
            checkpoint_on_disk=(1 + states) * whole,
        )

    def _activations(self, rank: _Rank, step: Step, held: _Held, dp: int) -> tuple[int, int]:
        """Return the largest number of bytes alive in forward, and in backward with gradients."""
        total = len(self._layers)
        if not self._alike:
            parts = self._run(rank, step, total)
        else:
            few, more = (self._run(rank, step, number) for number in _FEW)
            steps = (total - _FEW[0]) / (_FEW[1] - _FEW[0])
            del few["middle"]  # no higher than in the last or in the first layer
            parts = {name: few[name] + round(steps * (more[name] - few[name])) for name in few}
        if dp > 1:
            parts.pop("middle", None)
            # A layer's gradients leave once they are complete, in fp32 or wider.
            size, wide = step.dtype.itemsize, max(4, step.dtype.itemsize)
            layers, layer = held.numel(0, root=False), held.largest_layer(0)
            kept = size * held.numel(0, sharded=True)
            parts["last"] += wide * layer
            parts["first"] += wide * layer + kept - size * (layers - layer)
            parts["end"] += wide * held.numel(0, layers=False) + kept - size * layers
        tile = min(step.rows * step.tokens, _TILE) * held.vocab_rows * step.dtype.itemsize
        forward = max(parts.pop("forward"), parts.pop("kept") + tile)
        return forward, max(parts.values())

    def _run(self, rank: _Rank, step: Step, layers: int) -> dict[str, int]:
        """Run a step of some layers on meta; return the peaks of its parts."""
        model = self._short(layers).to(step.dtype)
        layout = layout_of(model, self._spec, rank.tp_size, rank.ep_size)
        carry_out(model, Plan(rank, self._spec, layout, Options(agreement=False)))
        for module in model.modules():
            if isinstance(module, ExpertParallelExperts):
                module._route = partial(_balanced_route, module)
        if step.checkpointing:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of its name
                model.gradient_checkpointing_enable({"use_reentrant": False})
        ids = torch.zeros(step.rows, step.tokens, dtype=torch.int64, device="meta")
        live = _Live((*model.parameters(), *model.buffers(), ids))
        inner = model.get_submodule(self._spec.layers)
        for name, index in (("last", -1), ("middle", 1), ("first", 0)):
            _mark_gradient_of_input(inner[index % layers], live, name)
        with _attention_of_cards(), live:
            # With a cache, which no recomputed layer fills, masks do not depend on values.
            cache = transformers.DynamicCache() if step.checkpointing else None
            known = inspect.signature(model.forward).parameters  # since transformers 5.24: cache
            name = "cache" if "cache" in known else "past_key_values"
            loss = model(input_ids=ids, labels=ids, **{name: cache}).loss
            live.mark("forward")
            kept = live.now
            loss.backward()
            live.mark("end")
        return {**live.peaks, "kept": kept}

    def _short(self, layers: int) -> transformers.PreTrainedModel:
        """Return a copy of the model with its first layers."""
        few = nn.ModuleList(list(self._layers)[:layers])
        self._plain.set_submodule(self._spec.layers, few)
        try:
            return copy.deepcopy(self._plain).train()
        finally:
            self._plain.set_submodule(self._spec.layers, self._layers)


def _mark_gradient_of_input(layer: nn.Module, live: _Live, name: str) -> None:
    """End a part of the step where the gradient of a layer's input is complete."""

    def watch(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if torch._C._current_graph_task_id() == -1:  # not where backward runs the layer again
            args[0].register_hook(lambda _: live.mark(name))

    layer.register_forward_pre_hook(watch)


def _balanced_route(
    experts: ExpertParallelExperts,
    tokens: torch.Tensor,
    choices: torch.Tensor,
    weights: torch.Tensor,
    low_ranks: list[int],
) -> tuple[ops.RoutePlan, ops.ExchangePlan]:
    """Stand for what a step routes: every expert gets as many choices as any other."""
    row_bytes, sides = tokens.size(-1) * tokens.element_size(), experts.experts_per_rank
    in_turn = torch.arange(choices.numel()) % experts.num_experts
    of_ranks = [
        ops.moe_route_plan(in_turn.view(choices.shape), sides, row_bytes, rank)
        for rank in range(len(sides))
    ]
    sent = [torch.cat([plan.counts, plan.rows_per_rank]).tolist() for plan in of_ranks]
    route = ops.moe_route_plan(choices, sides, row_bytes, experts.group.rank)
    return route, ops.ExchangePlan.of(sent, sides, experts.group.rank)


class _Held:
    """How many numbers of a model a rank holds.

    Attributes:
        logical_numel: of the model in one process.
        vocab_rows: of the vocabulary, on rank 0.
    """

    def __init__(self, spec: ModelSpec, layout: ModelLayout, tp: int, ep: int, world: int) -> None:
        self._tp, self._ep, self._world = tp, ep, world
        experts = {
            f"{path}.{block.experts}.{attribute}"
            for path, block in spec.blocks(layout).items()
            if isinstance(block, MixtureNames)
            for attribute in (block.gate_up, block.down)
        }
        # Layers are alike: each kind of tensor is looked at once.
        self._root: Counter[_Kind] = Counter()
        self._of_layer: dict[str, Counter[_Kind]] = {}
        for name, tensor in layout.tensors.items():
            if name in layout.buffers:
                continue
            kind = replace(tensor, name=""), ep if name in experts else tp
            layer = re.match(rf"{re.escape(spec.layers)}\.\d+\.", name)
            counter = self._of_layer.setdefault(layer[0], Counter()) if layer else self._root
            counter[kind] += 1
        self.logical_numel = sum(
            tensor.numel for name, tensor in layout.tensors.items() if name not in layout.buffers
        )
        self.vocab_rows = layout[f"{spec.embedding}.weight"].local_shape(0)[0]

    def extremes(self) -> list[int]:
        """Return the ranks among which those with the most and the fewest numbers are."""
        inner = max(self._tp, self._ep)
        return [*range(inner), *range(self._world - inner, self._world)]

    def numel(
        self, rank: int, *, sharded: bool = False, root: bool = True, layers: bool = True
    ) -> int:
        """Return how many numbers a rank holds.

        Args:
            rank: of the job.
            sharded: with what ZeRO divides over the replicas, where there are any dp ranks.
            root: count what is in no layer.
            layers: count what is in the layers.
        """
        counters = [self._root] * root + [*self._of_layer.values()] * layers
        return sum(
            number * self._numel(kind, rank, sharded)
            for counter in counters
            for kind, number in counter.items()
        )

    def largest_layer(self, rank: int) -> int:
        """Return the numbers of the largest layer of a rank, not divided by ZeRO."""
        return max(
            sum(number * self._numel(kind, rank, False) for kind, number in counter.items())
            for counter in self._of_layer.values()
        )

    def _numel(self, kind: _Kind, rank: int, sharded: bool) -> int:
        tensor, copy_size = kind
        rows, *others = tensor.local_shape(rank)
        if sharded and self._world > self._tp:  # as torch.chunk divides rows
            copies, place = self._world // copy_size, rank // copy_size
            at_once = -(-rows // copies)
            rows = min(at_once, max(0, rows - place * at_once))
        return rows * math.prod(others)


_Kind = tuple[TensorLayout, int]
"""A layout without its name, and how many consecutive ranks hold one copy of the tensor."""


def _gathered(held: _Held, step: Step) -> int:
    """Return the bytes of what ZeRO gathers, on rank 0, beside its own shards.

    Stage 2 keeps all weights gathered from forward to backward, stage 3 those outside of the layers
    and of two layers, of which one is on its way; both receive one layer in a buffer.
    """
    layer = held.largest_layer(0)
    whole = held.numel(0) if step.zero == 2 else held.numel(0, layers=False) + 2 * layer
    return step.dtype.itemsize * (whole + layer)
