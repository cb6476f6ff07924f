"""What a training step holds in memory on one rank, from the configuration alone."""

from __future__ import annotations

import copy
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel_ext import ops
from parallel_ext.distributed.control import ControlPlane
from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.nn.moe import ExpertParallelExperts
from parallel_ext.ops import ALONE, Group
from parallel_ext.parallel.held_bytes import Held
from parallel_ext.parallel.parallelize import carry_out
from parallel_ext.parallel.plan import Options, Plan, layout_of
from parallel_ext.parallel.validate import check_mixture, check_servable, spec_for

STATES = {"adamw": 2, "sgd-momentum": 1, "sgd": 0}
"""Numbers that an optimizer keeps for each parameter, in the parameter's dtype."""

_FEW = (2, 3)  # layers that are run where all are alike; what one adds, each adds
_TILE = 4096  # tokens whose logits the fused loss holds at once on a GPU


@dataclass(frozen=True)
class Step:
    """A training step to estimate.

    Attributes:
        rows: of the batch of one dp rank.
        tokens: of a row.
        dtype: of parameters, gradients, optimizer states and activations; an adapter has its own.
        optimizer: one of :data:`STATES`.
        zero: stage of :func:`data_parallel`, which is used where dp > 1.
        checkpointing: whether layers are recomputed in backward.
        adapt: adds an adapter to a parallel model in place and freezes the rest; None to train all.
    """

    rows: int = 1
    tokens: int = 2048
    dtype: torch.dtype = torch.bfloat16
    optimizer: str = "adamw"
    zero: int = 2
    checkpointing: bool = False
    adapt: Callable[[nn.Module], Any] | None = None


@dataclass(frozen=True)
class Estimate:
    """The bytes of one layout.

    Attributes:
        tp, ep, dp: its sides.
        weights, gradients, optimizer: (largest, smallest) of a rank between two steps, exact. With
            an adapter the latter two are of it alone.
        gathered: what ZeRO holds beside them in a step; 0 at dp = 1.
        activations: the most that is alive in a forward, on rank 0, which has the largest shards.
        peak: of a step on that rank, all of the above included.
        model_on_disk, checkpoint_on_disk: of the job; the second has what is trained, and the
            optimizer's states.
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
        self.control = ControlPlane(timeout=1, op_name="plan")  # of this process alone
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
        held = self._held(rank, world, step)
        states, ranks = STATES[step.optimizer], held.extremes()
        weights = [held.nbytes(rank, sharded=True) for rank in ranks]
        adapter = True if step.adapt else None
        trained = [held.nbytes(rank, sharded=True, adapter=adapter) for rank in ranks]
        forward, backward = self._activations(rank, step, held, dp)
        gathered = _gathered(held, step) if dp > 1 else 0
        return Estimate(
            *(tp, ep, dp),
            weights=(max(weights), min(weights)),
            gradients=(max(trained), min(trained)),
            optimizer=(states * max(trained), states * min(trained)),
            gathered=gathered,
            activations=forward,
            peak=weights[0] + states * trained[0] + gathered + max(forward, backward),
            model_on_disk=held.logical(adapter=False),
            checkpoint_on_disk=(1 + states) * held.logical(adapter=step.adapt is not None),
        )

    def _held(self, rank: _Rank, world: int, step: Step) -> Held:
        """Return what the ranks hold, an adapter included."""
        layout = layout_of(self._plain, self._spec, rank.tp_size, rank.ep_size)
        held = Held(self._spec, layout, rank.tp_size, rank.ep_size, world, step.dtype.itemsize)
        if step.adapt is not None:
            layers = 1 if self._alike else len(self._layers)
            adapted = self._parallel(rank, step, layers)
            held.add_adapter(adapted, len(self._layers) if self._alike else 1)
        return held

    def _activations(self, rank: _Rank, step: Step, held: Held, dp: int) -> tuple[int, int]:
        """Return the largest number of bytes alive in forward, and in backward with gradients."""
        total = len(self._layers)
        if not self._alike:
            parts = self._run(rank, step, total)
        else:
            few, more = (self._run(rank, step, number) for number in _FEW)
            steps = (total - _FEW[0]) / (_FEW[1] - _FEW[0])
            del few["middle"]  # no higher than in the last layer or behind it
            parts = {name: few[name] + round(steps * (more[name] - few[name])) for name in few}
        if dp > 1:
            parts.pop("middle", None)
        if dp > 1 and step.adapt is not None:  # one flat sum of gradients, which stay whole
            parts["end"] += held.nbytes(0, adapter=True)
        elif dp > 1:
            # A layer's gradients leave once they are complete, in fp32 or wider.
            size, wide = step.dtype.itemsize, max(4, step.dtype.itemsize)
            layer, layers = held.largest_layer(0), held.nbytes(0, root=False)
            kept = held.nbytes(0, sharded=True)
            parts["last"] += wide * layer // size
            parts["first"] += wide * layer // size + kept - (layers - layer)
            parts["end"] += wide * held.nbytes(0, layers=False) // size + kept - layers
        tile = min(step.rows * step.tokens, _TILE) * held.vocab_rows * step.dtype.itemsize
        forward = max(parts.pop("forward"), parts.pop("kept") + tile)
        return forward, max(parts.values())

    def _run(self, rank: _Rank, step: Step, layers: int) -> dict[str, int]:
        """Run a step of some layers on meta; return the peaks of its parts."""
        model = self._parallel(rank, step, layers)
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

    def _parallel(self, rank: _Rank, step: Step, layers: int) -> transformers.PreTrainedModel:
        """Return the first layers of the model, parallel and perhaps adapted, on meta."""
        model = self._short(layers).to(step.dtype)
        layout = layout_of(model, self._spec, rank.tp_size, rank.ep_size)
        carry_out(model, Plan(rank, self._spec, layout, Options(agreement=False)))
        if step.adapt is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PEFT's, of a model that nobody trains
                step.adapt(model)
        return model

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
        first_run = torch._C._current_graph_task_id() == -1  # no backward that runs it again
        if first_run and args[0].requires_grad:
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


def _gathered(held: Held, step: Step) -> int:
    """Return the bytes of what ZeRO gathers, on rank 0, beside its own shards.

    Stage 2 keeps all weights gathered from forward to backward, stage 3 those outside of the layers
    and of two layers, of which one is on its way; both receive one layer in a buffer.
    """
    layer = held.largest_layer(0)
    if step.zero == 2:
        return held.nbytes(0, adapter=False) + layer
    return held.nbytes(0, layers=False, adapter=False) + 3 * layer
