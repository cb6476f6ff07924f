"""Run a training step on torch's meta device: what it would hold, and what it would send."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function

from parallel_ext import ops
from parallel_ext.nn.moe import ExpertParallelExperts
from parallel_ext.nn.temporarily import temporarily
from parallel_ext.parallel.entering import CopyInput
from parallel_ext.parallel.meta_autocast import MetaAutocast
from parallel_ext.parallel.meta_zero import MetaZero, watch_start
from parallel_ext.parallel.state import state_of
from parallel_ext.parallel.traffic import Traffic
from parallel_ext.sharding._torch_private import (
    TorchDispatchMode,
    input_hooks,
    running_backward,
    schema_of,
)
from parallel_ext.sharding.layout import split
from parallel_ext.sharding.named_shards import named_shards


class KnownOp:
    """An op, and what it has made of what it was given: shapes, strides and dtypes."""

    def __init__(self, op: Any) -> None:
        schema = schema_of(op)
        self.is_own = op.namespace == "parallel_ext"
        # Whether all that it returns is new, and it changes nothing.
        self.makes_new = not any(e.alias_info for e in (*schema.returns, *schema.arguments))
        # By what it was given: whether it returns a sequence, and each tensor of it.
        self.outputs: dict[Any, tuple[bool, list[tuple[Any, ...] | None]]] = {}


_ONE_DEVICE = (torch.ops.aten.index_add.default, torch.ops.aten.masked_fill.Scalar)
"""Ops of backwards that take no index on the CPU for what is on meta; those of forwards do."""

KnownOps = dict[Any, KnownOp]
"""Ops of steps so far, kept between steps."""


@dataclass(frozen=True)
class Summed:
    """A parameter whose gradient is summed in the end: how many elements of which bytes it has."""

    name: str  # logical
    numel: int
    itemsize: int


@dataclass
class Recorded:
    """What happened up to some points of a step, by the names of its marks."""

    # The most bytes alive in the part that ends with a mark, those alive at it, and what was sent.
    peaks: dict[str, int] = field(default_factory=dict)
    now: dict[str, int] = field(default_factory=dict)
    sent: dict[str, Traffic] = field(default_factory=dict)
    left_early: int = 0  # bytes of the middle layers that only the forward keeps to its end
    # By group, the parameters whose gradients are summed in the end, in that order.
    summed: dict[str, list[Summed]] = field(default_factory=dict)
    # Names of what is trained and gets no gradient, as a layer of an image tower that is not run.
    idle: frozenset[str] = frozenset()
    skipped: tuple[str, ...] = ()  # with ZeRO, of MetaZero


class _Live(TorchDispatchMode):
    """Count the bytes of the tensors that ops have made and that are still alive.

    Attributes:
        now, peak: bytes; ``peak`` since the last :meth:`mark`.
        traffic: what the ops have sent.
        recorded: of the marks.
    """

    def __init__(self, existing: Iterable[torch.Tensor], known: KnownOps) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.traffic, self.recorded = Traffic(), Recorded()
        self._ops = known
        self._alive: dict[weakref.ref[torch.UntypedStorage], int] = {}
        for tensor in existing:
            self._alive[weakref.ref(tensor.untyped_storage(), self._free)] = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ONE_DEVICE:
            args = tuple(
                arg.to(args[0].device) if isinstance(arg, torch.Tensor) else arg for arg in args
            )
        elif func is torch.ops.aten.masked_scatter_backward.default:  # meta knows no number of rows
            func, args = torch.ops.aten.new_empty.default, (args[0], args[2])
        if (op := self._ops.get(func)) is None:
            op = self._ops[func] = KnownOp(func)
        output = _made(op, func, args, kwargs)
        if op.is_own:
            self.traffic.add_op(func, args, kwargs, output)
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return output

    def _add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, unless it is counted."""
        one = weakref.ref(storage, self._free)
        if one not in self._alive:
            self._alive[one] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)

    def _free(self, one: weakref.ref[torch.UntypedStorage]) -> None:
        self.now -= self._alive.pop(one)

    def give_back(self, nbytes: int) -> None:
        """Count bytes as free that were there before the step."""
        self.now -= nbytes

    def mark(self, name: str) -> None:
        """End a part of the step."""
        self.recorded.peaks[name], self.peak = self.peak, self.now
        self.note(name)

    def note(self, name: str) -> None:
        """Record what is alive, and what was sent, without the end of a part."""
        self.recorded.now[name], self.recorded.sent[name] = self.now, self.traffic.copy()


def _made(op: KnownOp, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the output of an op on the meta device, from a cache if it had such inputs before."""
    if not op.makes_new:
        return func(*args, **kwargs)
    key = (_key(args), _key(tuple(kwargs.items()))) if kwargs else _key(args)
    try:
        found = op.outputs.get(key)
    except TypeError:  # something in it has no hash
        return func(*args, **kwargs)
    if found is None:
        output = func(*args, **kwargs)
        several = isinstance(output, (tuple, list))
        each = list(output) if several else [output]
        if all(t is None or (type(t) is torch.Tensor and t.is_meta) for t in each):
            op.outputs[key] = (
                several,
                [t if t is None else (t.shape, t.stride(), t.dtype) for t in each],
            )
        return output
    several, described = found
    made = [
        None if one is None else torch.empty_strided(one[0], one[1], dtype=one[2], device="meta")
        for one in described
    ]
    return tuple(made) if several else made[0]


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype, value.device.type)
    if isinstance(value, (tuple, list)):
        return tuple(map(_key, value))
    return value


class _Attention(torch.autograd.Function):
    """The memory of an attention that never holds its scores, as those of CPU and GPU are."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        rows, heads, tokens, _ = query.shape  # the heads of a token lie side by side
        output = query.new_empty((rows, tokens, heads, value.size(-1))).transpose(1, 2)
        ctx.save_for_backward(
            query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32)
        )
        return output

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


def scaled_dot_product_attention(*args: Any, **_: Any) -> torch.Tensor:
    """Stand for torch's function of this name, which holds the scores on meta."""
    if has_torch_function(args[:3]):
        return handle_torch_function(scaled_dot_product_attention, args[:3], *args[:3])
    return _Attention.apply(*args[:3])


class _Unfilled(transformers.DynamicCache):
    """Keeps no keys and values, as where ``config.use_cache`` is False."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> Any:
        return keys, values


def run_step(
    model: transformers.PreTrainedModel,
    layers: str,
    middle: range,
    rows: int,
    tokens: int,
    checkpointing: bool,
    autocast: torch.dtype | None,
    known: KnownOps,
) -> Recorded:
    """Run forward and backward of a parallel model on meta, as the rank of its mesh.

    Args:
        model: with every parameter on meta.
        layers: the path to its layers.
        middle: numbers of consecutive layers that are looked at apart from the others; perhaps
            none.
        checkpointing: whether layers are recomputed in backward.
        autocast: the dtype in which the forward computes under ``torch.autocast``; None without.
        known: of other steps; added to.

    Returns:
        The marks, in their order: ``start`` in front of the first layer, behind an image tower,
        ``early`` in front of the middle ones, ``late`` behind them, ``forward`` at its end, in
        backward ``last`` and ``middle`` where the gradients are complete of what the middle ones
        return, and of their input, ``summing`` before the sums of replicated parameters' gradients,
        ``backward`` behind it, and ``end`` behind ZeRO's. Four are absent without middle layers,
        and ``summing`` where there is nothing to sum. ``kept`` is what the forward has left for
        backward, in front of it autocast's copies too.
    """
    for module in model.modules():
        if isinstance(getattr(module, "rope_type", None), str) and "dynamic" in module.rope_type:
            module.rope_type = "default"  # it would look at positions; frequencies are as many
        if isinstance(module, ExpertParallelExperts):
            first = state_of(model).mesh.rank - module.group.rank
            module._route = partial(_balanced_route, module, first, rows, tokens)
        for hook in input_hooks(module) if autocast is not None else ():
            if isinstance(hook, CopyInput):  # which cannot see that there is autocast on meta
                hook.together = False
    if checkpointing:
        _checkpoint_layers(model, autocast)
    ids = torch.zeros(rows, tokens, dtype=torch.int64, device="meta")
    images = state_of(model).spec.images
    further = getattr(model, images)(rows, tokens) if images else {}
    live = _Live((*model.parameters(), *model.buffers(), ids, *further.values()), known)
    inner = model.get_submodule(layers)
    _watch_sums(model, live)
    zero = None if state_of(model).zero is None else MetaZero(model, live.give_back, live.traffic)
    region = None if autocast is None else MetaAutocast(autocast)
    copies = {} if region is None else region.copies
    numbers = _watch_layers(inner, middle, live, copies)
    attention = {"scaled_dot_product_attention": scaled_dot_product_attention}
    with temporarily(nn.functional, **attention), live:
        # With a cache, even one that nothing fills, masks do not depend on values.
        filled = getattr(model.config, "use_cache", True) and not checkpointing
        cache = None if filled else _Unfilled()
        parameters = inspect.signature(model.forward).parameters  # since transformers 5.24: cache
        name = "cache" if "cache" in parameters else "past_key_values"
        with region or nullcontext():
            output = model(input_ids=ids, labels=ids, **{name: cache}, **further)
            live.mark("forward")
            loss = output.loss
            del output, cache  # under autocast keys in fp32, which no backward needs
            of_layers = live.recorded.now["forward"] - live.now
            for one in list(copies)[slice(*numbers)] if len(numbers) == 2 else ():
                del copies[one]
            of_copies = live.recorded.now["forward"] - live.now - of_layers
            live.recorded.left_early = of_layers * len(middle) // len(inner) + of_copies
        live.mark("kept")
        loss.backward()
        live.mark("backward")
        if zero is not None:
            zero.finish()
            live.recorded.skipped = zero.skipped
        live.mark("end")
    live.recorded.idle = frozenset(
        name
        for name, parameter, _ in named_shards(model)
        if parameter.requires_grad and parameter.grad is None
        if zero is None or id(parameter) not in zero.scattered
    )
    return live.recorded


def _checkpoint_layers(model: transformers.PreTrainedModel, autocast: torch.dtype | None) -> None:
    """Let the layers be recomputed in backward, each under its own autocast if there is one."""
    options: dict[str, Any] = {"use_reentrant": False}
    if autocast is not None:
        options["context_fn"] = lambda: (nullcontext(), MetaAutocast(autocast))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of its name
        model.gradient_checkpointing_enable(options)


def _watch_layers(layers: nn.ModuleList, middle: range, live: _Live, copies: Sized) -> list[int]:
    """Mark where some layers begin in the forward, and where they end in backward.

    Returns how many copies there are before the middle layers and behind them, once the forward has
    run.
    """
    numbers: list[int] = []

    def watch(number: int, begin: Callable[[str], None], begins: str, ends: str) -> None:
        def before(hidden: torch.Tensor) -> None:
            begin(begins)
            numbers.append(len(copies))
            hidden.register_hook(lambda _: live.mark(ends))

        watch_start(layers[number], before)

    watch_start(layers[0], lambda _: live.mark("start"))
    if middle:
        watch(middle.start, live.mark, "early", "middle")
        watch(middle.stop, live.note, "late", "last")
    return numbers


def _watch_sums(model: nn.Module, live: _Live) -> None:
    """Add the mark ``summing`` where gradients of replicated parameters are summed in backward."""
    partials = state_of(model).partials
    if partials is None:
        return
    close = partials._close

    def closed(session: Any) -> None:
        live.mark("summing")
        for name, entry in sorted(session.entries.items()):
            parameter = Summed(name, entry.parameter.numel(), entry.parameter.itemsize)
            live.recorded.summed.setdefault(entry.group.name, []).append(parameter)
        close(session)

    partials._close = closed


def _balanced_route(
    experts: ExpertParallelExperts,
    first_rank: int,
    num_rows: int,
    num_tokens: int,
    tokens: torch.Tensor,
    choices: torch.Tensor,
    weights: torch.Tensor,
    low_ranks: list[int],
) -> tuple[ops.RoutePlan, ops.ExchangePlan]:
    """Stand for what a step routes: every expert gets as many choices as any other."""
    row_bytes = tokens.size(-1) * tokens.element_size() if experts.joins_choices else 0
    sides, rank = tuple(experts.experts_per_rank), experts.group.rank
    if running_backward() == -1:  # what is recomputed has its plan
        width = 6 + len(low_ranks) + experts.num_experts + len(sides)
        header = choices.new_empty(1, width)
        ops.gather_from_region(header, [width] * len(sides), experts.group)
    route = ops.moe_route_plan(choices, list(sides), row_bytes, rank)
    batch = (num_rows, num_tokens)
    if experts.divided is None:  # else each tp rank has a part of each row
        batch = (1, num_rows * num_tokens)
    counts = _balanced_counts(batch, choices.size(1), experts.tp.size, first_rank, sides, row_bytes)
    return route, ops.ExchangePlan.of([list(one) for one in counts], list(sides), rank)


@lru_cache(maxsize=64)
def _balanced_counts(
    batch: tuple[int, int],
    top_k: int,
    tp: int,
    first_rank: int,
    sides: Sequence[int],
    row_bytes: int,
) -> list[list[int]]:
    """Return what each ep rank sends where, if a job's choices go to the experts in turn.

    Args:
        batch: rows, and tokens of each, of which every tp rank has a range.
        top_k, tp: choices of a token, and tp ranks.
        first_rank: of the ranks that exchange tokens.
        sides, row_bytes: experts of each of these ranks, and the bytes of a token.
    """
    sent, (rows, tokens) = [], batch
    for rank in range(len(sides)):
        dp_rank, tp_rank = divmod(first_rank + rank, tp)
        every = torch.arange(dp_rank * rows * tokens, (dp_rank + 1) * rows * tokens)
        own = every.view(batch)[:, slice(*split(tokens, tp)[tp_rank])].reshape(-1, 1)
        in_turn = (own * top_k + torch.arange(top_k)) % sum(sides)
        plan = ops.moe_route_plan(in_turn, list(sides), row_bytes, rank)
        sent.append(torch.cat([plan.counts, plan.rows_per_rank]).tolist())
    return sent
