"""What a training step holds in memory on a rank, and sends, from the configuration alone."""

from __future__ import annotations

import copy
import math
import operator
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
import transformers
from torch import nn

from parallel_ext import ops
from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.io.stream import share_out
from parallel_ext.models import own_model_type
from parallel_ext.nn import grad_sync
from parallel_ext.nn.temporarily import first_layers
from parallel_ext.parallel.check_sequence import check_sequence_parallel
from parallel_ext.parallel.configuration import other_class, parameters_on_meta, type_of_text
from parallel_ext.parallel.held_bytes import Held
from parallel_ext.parallel.meta_step import KnownOps, Recorded, Summed, run_step
from parallel_ext.parallel.parallelize import carry_out
from parallel_ext.parallel.plan import Options, Plan, layout_of, with_groups
from parallel_ext.parallel.planned_mesh import PlannedMesh
from parallel_ext.parallel.repeated import Repeated
from parallel_ext.parallel.replace import names_of_parts
from parallel_ext.parallel.state import state_of
from parallel_ext.parallel.traffic import Traffic
from parallel_ext.parallel.validate import check_mixture, check_servable, spec_for
from parallel_ext.sharding.layout import ModelLayout, split

STATES = {"adamw": 2, "sgd-momentum": 1, "sgd": 0}
"""Numbers that an optimizer keeps for each parameter, in the parameter's dtype."""

_TILE, _TILE_OF_FROZEN = 8192, 4096  # tokens whose logits the fused loss holds at once on a GPU
_AGREEMENT = 32  # bytes by which tp ranks compare the inputs of a forward

_Sent = dict[str, dict[str, dict[str, int]]]


@dataclass(frozen=True)
class Step:
    """A training step to estimate."""

    rows: int = 1  # of the batch of one dp rank
    tokens: int = 2048  # of a row
    dtype: torch.dtype = torch.bfloat16  # of all numbers but those of an adapter, which has its own
    optimizer: str = "adamw"  # one of STATES
    zero: int = 2  # stage of data_parallel, which is used where dp > 1
    checkpointing: bool = False  # whether layers are recomputed in backward
    autocast: torch.dtype | None = None  # of torch.autocast around the forward
    # Adds an adapter to a parallel model in place and freezes the rest; None to train all.
    adapt: Callable[[nn.Module], Any] | None = None
    sequence_parallel: bool = False  # option of parallelize


@dataclass(frozen=True)
class Estimate:
    """The bytes of one layout, held and sent.

    Attributes:
        tp, ep, dp: its sides.
        weights, gradients, optimizer: (largest, smallest) of a rank between two steps, exact. With
            an adapter the latter two are of it alone.
        gathered: what ZeRO holds beside them in a step; 0 at dp = 1. This and what follows, but for
            the files: (largest, smallest) of a rank.
        activations: the most that is alive in a forward.
        logits: the largest tile of logits that the loss holds at once; in ``activations`` where it
            comes on top of them.
        adapter: in ``weights``; 0 without one.
        peak: of a step, all of the above included.
        model_on_disk, checkpoint_on_disk: of the job; the second has what is trained, and the
            optimizer's states.
        written: (largest, smallest) of what a rank writes of the checkpoint: whole tensors.
        sent: what rank 0 and the last rank send in a step, by group (``tp``, ``ep``, ``dp``, and
            ``edp``, the ranks with the same experts), kind of collective, and ``"collectives"`` or
            ``"bytes"``: the numbers of ``_C.collective_counts`` on a GPU, and those of ZeRO.
    """

    tp: int
    ep: int
    dp: int
    weights: tuple[int, int]
    gradients: tuple[int, int]
    optimizer: tuple[int, int]
    gathered: tuple[int, int]
    activations: tuple[int, int]
    logits: tuple[int, int]
    adapter: tuple[int, int]
    peak: tuple[int, int]
    model_on_disk: int
    checkpoint_on_disk: int
    written: tuple[int, int]
    sent: tuple[_Sent, _Sent]


@dataclass(frozen=True)
class _OfRank:
    """What a step on a rank adds to an :class:`Estimate`."""

    gathered: int
    activations: int
    logits: int
    beside: int  # the most bytes that there are beside weights and optimizer
    sent: _Sent


class Planner:
    """Estimates the layouts of one architecture, of which it builds no weights.

    Args:
        config: of a causal language model that :func:`parallelize` serves; others raise.
    """

    def __init__(self, config: transformers.PreTrainedConfig) -> None:
        kind, half = transformers.AutoModelForCausalLM, torch.bfloat16
        with parameters_on_meta():
            self._plain = kind.from_config(copy.deepcopy(config), dtype=half)
        self._in_fp32 = {n for n, p in self._plain.named_parameters() if p.dtype == torch.float32}
        self._plain.tie_weights()
        self._spec = spec_for(self._plain)
        self._layers = self._plain.get_submodule(self._spec.layers)
        if len(self._layers) == 0:
            raise ValueError("a model without layers cannot be planned")
        shapes = [tuple(p.shape for p in layer.parameters()) for layer in self._layers]
        self._has_experts = bool(self._spec.mixtures(dict(self._plain.named_parameters())))
        self._repeated = Repeated.of(shapes)
        self._known: KnownOps = {}

    @classmethod
    def of(cls, source: str) -> Planner:
        """Read the configuration of a directory, of a file, or of a model on the hub.

        Raises:
            CheckpointError: there is none, or none of an architecture that is served.
        """
        try:
            content, _ = transformers.PreTrainedConfig.get_config_dict(source)
            if (own := own_model_type(content)) is not None:
                return cls(transformers.CONFIG_MAPPING[own].from_dict(content))
            config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
            if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
                text = type_of_text(config)
                raise ValueError(
                    f"a {config.model_type!r} is no causal language model, which alone is planned"
                    + (f"; it holds a decoder of text, {text!r}" if text else "")
                )
            if head := other_class(config):
                raise ValueError(f"it is of a {head}; planned are causal language models alone")
            return cls(config)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{source}: {error}") from error
        except Exception as error:  # transformers' own, for values that it has not checked
            why = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{source}: no model can be built from it: {why}") from error

    def layouts(self, world: int) -> Iterator[tuple[int, int]]:
        """Yield every (tp, ep) of a number of ranks; without experts those of ep = 1."""
        sides = [side for side in range(1, world + 1) if world % side == 0]
        for tp in sides:
            yield from ((tp, ep) for ep in (sides if self._has_experts else [1]))

    def estimate(self, world: int, tp: int, ep: int, step: Step) -> Estimate:
        """Estimate a step on ``world`` ranks; raise a ValueError where they cannot share it."""
        repeated = self._repeated
        # What is decided below for the first layers is so for all, which repeat them.
        with first_layers(self._plain, self._spec.layers, repeated.run):
            mesh = PlannedMesh(world, tp, ep)
            check_servable(self._plain)
            check_mixture(self._plain, self._spec, mesh, agreement=True)
            if step.sequence_parallel:
                check_sequence_parallel(self._plain, self._spec)
            layout = layout_of(self._plain, self._spec, tp, ep)
            meshes = [PlannedMesh(world, tp, ep, rank) for rank in _unlike(layout, mesh, step)]
            models = [self._parallel(each, layout, step) for each in meshes]
        of_step = step.rows, step.tokens, step.checkpointing, step.autocast, self._known
        middle = repeated.middle
        runs = [run_step(model, self._spec.layers, middle, *of_step) for model in models]
        idle, skipped = runs[0].idle, runs[0].skipped
        sizes = tp, ep, world, step.dtype.itemsize, repeated
        held = Held(self._spec, layout, *sizes, idle, skipped, self._kept_in_fp32(step))
        if step.adapt is not None:
            held.add_adapter(models[0])
        states, ranks = STATES[step.optimizer], mesh.extremes()
        of_model = tuple(held.in_files(adapter=False))
        saved = of_model if step.adapt is None else tuple(held.in_files(adapter=True))
        adapter = True if step.adapt else None
        weights = {r: held.nbytes(r, sharded=True) for r in ranks}
        trained = {r: held.nbytes(r, sharded=True, adapter=adapter, trained=True) for r in ranks}
        of_runs = [self._of_rank(*each, held, step) for each in zip(runs, meshes, strict=True)]
        peaks = [
            weights[rank] + states * trained[rank] + one.beside
            for each, one in zip(meshes, of_runs, strict=True)
            for rank in each.first_and_last()  # with the largest and the smallest parts of ZeRO
        ]
        return Estimate(
            tp,
            ep,
            mesh.dp_size,
            weights=_range(weights.values()),
            gradients=_range(trained.values()),
            optimizer=_range(states * each for each in trained.values()),
            gathered=_range(one.gathered for one in of_runs),
            activations=_range(one.activations for one in of_runs),
            logits=_range(one.logits for one in of_runs),
            adapter=_range(held.nbytes(r, sharded=True, adapter=True) for r in ranks),
            peak=_range(peaks),
            model_on_disk=sum(of_model),
            checkpoint_on_disk=(1 + states) * sum(saved),
            written=_written(saved, states, world, alone=step.adapt is not None),
            sent=(of_runs[0].sent, of_runs[-1].sent),
        )

    def _of_rank(self, recorded: Recorded, mesh: PlannedMesh, held: Held, step: Step) -> _OfRank:
        """Add to a run what further layers, ZeRO, an adapter and the loss take and send."""
        rank, adapted = mesh.rank, step.adapt is not None
        parts, sent = self._with_layers(recorded, step)
        if mesh.tp_size > 1:
            sent.send("tp", "all_gather", _AGREEMENT)
        # Adapters leave the head frozen.
        tile = min(step.rows * step.tokens, _TILE_OF_FROZEN if adapted else _TILE)
        logits = tile * held.vocab_rows(rank) * (step.autocast or step.dtype).itemsize
        gathered = received = 0
        if mesh.dp_size > 1:
            layer = held.largest_layer(rank)
            if adapted:  # one flat sum of gradients, which stay whole
                sent = sent.plus(held.sent_by_adapter(rank), 1)
                parts["end"] += held.nbytes(rank, adapter=True)
            # Stage 2 keeps all weights gathered from forward to backward, stage 3 those outside of
            # the layers and of one layer; both receive one layer in a buffer.
            if step.zero == 2:
                received = layer  # not in backward
                gathered = held.nbytes(rank, adapter=False) - held.skipped(rank) + layer
            else:
                gathered = held.nbytes(rank, layers=False, adapter=False) + 2 * layer
        forward = max(parts.pop(name, 0) for name in ("start", "early", "forward"))
        forward = max(forward, parts.pop("kept") + logits)
        beside = gathered + max(forward, max(parts.values()) - received)
        return _OfRank(gathered, forward, logits, beside, sent.by_group())

    def _with_layers(self, recorded: Recorded, step: Step) -> tuple[dict[str, int], Traffic]:
        """Return the peaks of a run's parts, and what it sends, with further layers."""
        parts, sent, further = recorded.peaks, recorded.sent["end"], self._repeated.further
        if further:
            of_layers, kept, left = _of_the_middle(recorded)
            sent = sent.plus(of_layers, further)
            slopes = dict.fromkeys(("start", "early"), 0)
            slopes |= dict.fromkeys(("last", "middle"), kept - recorded.left_early)
            slopes |= dict.fromkeys(("forward", "kept"), kept)
            slopes |= dict.fromkeys(("summing", "backward", "end"), left)
            for name in parts:
                parts[name] += further * slopes[name]
            wide, beside = max(4, step.dtype.itemsize), 0
            for group, run in recorded.summed.items():
                every = self._with_further(run)
                beside = max(beside, _beside_partials(every, wide))
                more = sum(one.numel for one in every) - sum(one.numel for one in run)
                sent[group, "all_reduce", "bytes"] += wide * more
                sent[group, "all_reduce", "collectives"] += _sums(every) - _sums(run)
            if recorded.summed:
                parts["backward"] = recorded.now["summing"] + further * left + beside
        return parts, sent

    def _parallel(
        self, mesh: PlannedMesh, layout: ModelLayout, step: Step
    ) -> transformers.PreTrainedModel:
        """Return a copy of the model, parallel and perhaps adapted, on meta."""
        # No step changes the configurations, whose copies would take longer than the modules'.
        same = (self._plain.config, self._plain.generation_config)
        model = copy.deepcopy(self._plain, {id(each): each for each in same})
        model = model.train().to("meta", step.dtype)  # buffers too
        for name in self._kept_in_fp32(step) & dict(model.named_parameters()).keys():
            parameter = model.get_parameter(name)
            parameter.data = parameter.data.float()
        options = Options(agreement=False, sequence_parallel=step.sequence_parallel)
        carry_out(model, with_groups(Plan(mesh, self._spec, layout, options), model))
        if step.adapt is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PEFT's, of a model that nobody trains
                step.adapt(model)
        if mesh.dp_size > 1:  # as data_parallel does
            state = state_of(model)
            state.zero = step.zero
            state.partials.sum_at_once(names_of_parts(model))
            if self._spec.skips is not None:
                owner, _, method = self._spec.skips.rpartition(".")
                setattr(model.get_submodule(owner), method, partial(_runs_on_any, mesh))
        return model

    def _with_further(self, summed: list[Summed]) -> list[Summed]:
        """Return the parameters that all layers have, from those of the ones that are run."""
        layer = re.compile(rf"({re.escape(self._spec.layers)}\.)(\d+)(\..*)")
        every = []
        for one in summed:
            if (found := layer.fullmatch(one.name)) is None:
                every.append(one)
                continue
            for number in self._repeated.numbers(int(found[2])):
                every.append(replace(one, name=f"{found[1]}{number}{found[3]}"))
        return sorted(every, key=operator.attrgetter("name"))

    def _kept_in_fp32(self, step: Step) -> set[str]:
        """Return the names of parameters that stay fp32 in half precision, as some routers."""
        return self._in_fp32 if step.dtype.itemsize < 4 else set()


def _range(of_ranks: Iterable[int]) -> tuple[int, int]:
    """Return the largest and the smallest number."""
    numbers = list(of_ranks)
    return max(numbers), min(numbers)


def _unlike(layout: ModelLayout, mesh: PlannedMesh, step: Step) -> list[int]:
    """Return ranks of which one holds the most, and one the least: rank 0, others, the last one.

    Others are those that no rank outdoes in all that it holds, or that outdo none. If all ranks
    hold as much, rank 0 stands for them.
    """
    tensors = {replace(tensor, name="") for tensor in layout.tensors.values()}
    tokens = [stop - start for start, stop in split(step.tokens, mesh.tp_size)]

    def sizes(rank: int) -> tuple[int, ...]:
        return (
            *(math.prod(each.local_shape(rank)) for each in tensors),
            tokens[rank % mesh.tp_size],
        )

    last = mesh.world_size - 1
    ranks = {sizes(rank): rank for rank in range(mesh.period)} | {sizes(last): last, sizes(0): 0}
    if len(ranks) == 1:
        return [0]

    def stands_out(held: tuple[int, ...]) -> bool:
        above = [each for each in ranks if _covers(each, held)]
        below = [each for each in ranks if _covers(held, each)]
        return above == [held] or below == [held]

    others = [rank for held, rank in ranks.items() if stands_out(held)]
    return sorted({0, *others, last})


def _covers(a: Sequence[int], b: Sequence[int]) -> bool:
    """Tell whether no number of ``a`` is below that of ``b``."""
    return all(map(operator.ge, a, b))


@lru_cache(maxsize=1)  # for all layouts of a plan
def _written(saved: tuple[int, ...], states: int, world: int, *, alone: bool) -> tuple[int, int]:
    """Return the most and the fewest bytes of a checkpoint that a rank writes.

    Args:
        saved: bytes of each tensor of the model, or of the adapter.
        states: that the optimizer keeps for each of them, as large.
        world: ranks, which write; of these as many as there are tensors write any.
        alone: whether rank 0 writes all of ``saved``, but for the states.
    """
    writers = min(world, max(1, states) * len(saved))
    written = [0] * writers
    for sizes, ranks in ((saved, 1 if alone else writers), (saved * states, writers)):
        for nbytes, rank in zip(sizes, share_out(sizes, ranks), strict=True):
            written[rank] += nbytes
    return max(written), 0 if world > writers else min(written)


def _runs_on_any(mesh: PlannedMesh, *needed: bool) -> tuple[bool, ...]:
    """Stand for what the dp ranks agree on before they skip modules."""
    own = torch.empty(len(needed), device="meta")
    ops.gather_from_region(own, [len(needed)] * mesh.dp_size, mesh.dp)
    return needed


def _of_the_middle(recorded: Recorded) -> tuple[Traffic, int, int]:
    """Return what the middle layers send, keep to the end of the forward, and backward leaves.

    All others that repeat them add as much to a step.
    """
    sent, now = recorded.sent, recorded.now
    forward = sent["late"].plus(sent["early"], -1)
    backward = sent["middle"].plus(sent["last"], -1)
    kept = now["late"] - now["early"]
    left = now["middle"] - now["last"] + kept - recorded.left_early
    return forward.plus(backward, 1), kept, left


def _sums(summed: list[Summed]) -> int:
    """Return how many collectives sum the gradients of parameters."""
    return -(-sum(one.numel for one in summed) // grad_sync.BUCKET)


def _beside_partials(summed: list[Summed], wide: int) -> int:
    """Return the most bytes that there are beside partial gradients while they are summed.

    A bucket and its sum, of ``wide`` bytes an element, and the gradient that is not yet complete.
    """
    most = begun = 0
    for bucket in grad_sync.buckets([one.numel for one in summed]):
        flat = wide * sum(stop - start for _, start, stop in bucket)
        most = max(most, begun + 2 * flat)
        for which, start, stop in bucket:
            begun = summed[which].itemsize * summed[which].numel
            if start == 0:
                most = max(most, begun + flat)
            if stop == summed[which].numel:  # in the place of the partial gradient
                begun = 0
    return most
