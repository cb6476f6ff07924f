"""Resize the vocabulary of a parallel model: rows keep their ids, and travel to their ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from parallel_ext.distributed.control import require_equal
from parallel_ext.distributed.errors import check_positive
from parallel_ext.distributed.mesh import Mesh
from parallel_ext.io.state_dict import gather_in_step
from parallel_ext.models._transformers_private import resized_embedding, resized_head
from parallel_ext.nn.stale_parameters import mark_replaced
from parallel_ext.nn.vocab import VocabParallelEmbedding, VocabParallelHead
from parallel_ext.ops.group import Range
from parallel_ext.parallel.state import ParallelState, state_of
from parallel_ext.sharding.layout import TensorLayout, box_shape, shard_along, split
from parallel_ext.sharding.reshard import STRIPE_BYTES, RowStripe, Swap

_OP_NAME = "resize_token_embeddings"

_Rows = VocabParallelEmbedding | VocabParallelHead


@torch.no_grad()
def resize_token_embeddings(
    model: nn.Module,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
    optimizer: torch.optim.Optimizer | None = None,
    allow_fewer_rows: bool = False,
) -> VocabParallelEmbedding:
    """Resize the vocabulary of a parallel model, as HuggingFace does for a full model.

    Every rank calls it, before ``px.data_parallel``. Rows keep their global id and travel to the
    ranks that hold them in the plan for the new size. New rows are HuggingFace's own: rank 0 draws
    them on the CPU, from its random state, so that every layout gets the same bits; ranks that were
    in the same random state have rank 0's afterwards as well.

    Embedding and head get new parameters. An ``optimizer`` that is passed holds these then, and its
    states travel with their rows. Any other that holds the old ones raises when it steps. (Behind
    HuggingFace's method it would train a head that is in no model.)

    Args:
        model: a parallel model.
        new_num_tokens: rows of embedding and head afterwards; as many as before when None.
        pad_to_multiple_of: round that up to a multiple of this. As in HuggingFace the rows added so
            are rows like any other, which ``config.vocab_size`` counts and files hold. Ranks need
            none: every vocabulary fits every tp.
        mean_resizing: draw new rows around the mean of the old ones, which rank 0 gathers for it,
            one table at a time, in its CPU memory; else as the class initialises its weights.
        optimizer: continues with the new parameters: states that have an element for each of a
            parameter's, as momentum, keep their rows by id and are 0 for new ones; ``step`` and the
            like stay as they are.
        allow_fewer_rows: accept fewer rows than before, but more than this rank holds: scripts ask
            for them by mistake, since they take ``embedding.weight.shape[0]`` for all rows.

    Returns:
        The embedding, with this rank's rows.

    Raises:
        ValueError: a number is not a positive integer, or drops rows by mistake; on all ranks.
        RuntimeError: the model is data parallel already, embedding or head has an adapter or is
            tied otherwise than before, a gradient would be lost, or the optimizer holds states that
            have no rows; on all ranks.
        DisagreementError: the ranks ask for different sizes, or their optimizers differ.
        CollectiveTimeout: not all ranks called it.

    Example:
        >>> model.resize_token_embeddings(len(tokenizer))  # doctest: +SKIP
    """
    state = state_of(model)
    mesh = state.mesh
    mesh.control.barrier(_OP_NAME)
    asked = {
        "new_num_tokens": new_num_tokens,
        "pad_to_multiple_of": pad_to_multiple_of,
        "mean_resizing": mean_resizing,
        "allow_fewer_rows": allow_fewer_rows,
        "the class of optimizer": None if optimizer is None else type(optimizer).__name__,
    }
    require_equal(mesh.control, _OP_NAME, {name: repr(value) for name, value in asked.items()})
    if state.invariant is not None or state.spec.head is None:
        what = "px.Invariant" if state.spec.head else f"a parallel {type(model).__name__}"
        raise NotImplementedError(
            f"{_OP_NAME}: {what} does not serve it; resize before px.parallelize"
        )
    embedding = model.get_submodule(state.spec.embedding)
    head = model.get_submodule(state.spec.head)
    numbers = new_num_tokens, pad_to_multiple_of
    rows = mesh.control.run_on_all(
        _OP_NAME, lambda: _check(state, embedding, head, *numbers, allow_fewer_rows)
    )
    if rows == embedding.num_embeddings:
        return embedding
    ranges = split(rows, mesh.tp_size, state.vocab_multiple_of)
    if optimizer is not None:
        carried = _CarriedOptimizer(optimizer, _parameters(embedding, head), mesh)
        for name, layout in _layouts(embedding, head).items():
            carried.reshard(
                name, lambda old, layout=layout: _resharded(old, layout, None, ranges, mesh)
            )
    with _in_step(mesh):  # in HuggingFace's order
        of_embedding = _resized(model, embedding, ranges, mean_resizing)
        of_head = _resized(model, head, ranges, mean_resizing)
    _put(embedding, of_embedding, ranges)
    _put(head, {"weight": embedding.weight, **of_head} if head.tied else of_head, ranges)
    if embedding.padding_idx is not None and embedding.padding_idx >= rows:
        embedding.padding_idx = None
    if optimizer is not None:
        carried.give(_parameters(embedding, head))
    tensors = {**state.layout.tensors, **_layouts(embedding, head)}
    state.set_vocabulary(replace(state.layout, tensors=tensors), ranges)
    model.config.get_text_config().vocab_size = rows
    model.vocab_size = rows
    if hasattr(model.base_model, "vocab_size"):
        model.base_model.vocab_size = rows
    return embedding


def _layouts(*modules: _Rows) -> dict[str, TensorLayout]:
    """Return the layouts of modules' parameters by logical name, a tied one once."""
    return {layout.name: layout for module in modules for layout in module.layouts.values()}


def _parameters(*modules: _Rows) -> dict[str, nn.Parameter]:
    """Return the parameters of modules by logical name, a tied one once."""
    return {
        layout.name: getattr(module, attribute)
        for module in modules
        for attribute, layout in module.layouts.items()
    }


def _check(
    state: ParallelState,
    embedding: _Rows,
    head: _Rows,
    new_num_tokens: int | None,
    pad_to_multiple_of: int | None,
    allow_fewer_rows: bool,
) -> int:
    """Return the number of rows that is asked for, or raise if the model cannot have it."""
    numbers = {"new_num_tokens": new_num_tokens, "pad_to_multiple_of": pad_to_multiple_of}
    for name, number in numbers.items():
        if number is not None:
            check_positive(f"{_OP_NAME}: {name}", number)
    if state.zero is not None and state.mesh.dp_size > 1:
        raise RuntimeError(
            f"{_OP_NAME}: px.data_parallel has sharded the rows over the dp ranks; resize before it"
        )
    kinds = {state.spec.embedding: VocabParallelEmbedding, state.spec.head: VocabParallelHead}
    for (path, kind), module in zip(kinds.items(), (embedding, head), strict=True):
        if type(module) is not kind:
            raise RuntimeError(
                f"{_OP_NAME}: {path} is a {type(module).__name__}; resize before an adapter is "
                "added to it, or after it was merged"
            )
        for attribute, parameter in module.named_parameters():
            if parameter.grad is not None and parameter.grad.any():
                raise RuntimeError(
                    f"{_OP_NAME}: {path}.{attribute} has a gradient, which would be lost; call "
                    "optimizer.step() and optimizer.zero_grad() before"
                )
    head.check_ties(embedding, _OP_NAME)
    old = embedding.num_embeddings
    rows = old if new_num_tokens is None else new_num_tokens
    multiple = pad_to_multiple_of or 1
    rows = -(-rows // multiple) * multiple
    if len(embedding.weight) <= rows < old and not allow_fewer_rows:
        raise ValueError(
            f"{_OP_NAME}: {rows} tokens would drop {old - rows} of {old} rows; embedding.weight "
            f"has the {len(embedding.weight)} of this rank, so compare with embedding."
            "num_embeddings or config.vocab_size; to drop rows pass allow_fewer_rows=True"
        )
    return rows


@contextmanager
def _in_step(mesh: Mesh) -> Iterator[None]:
    """Run the block, in which only rank 0 draws random numbers.

    A rank that was in rank 0's random state before is in it afterwards.
    """
    own = torch.get_rng_state()
    before = _from_first_rank(own, mesh)
    try:
        yield
    except BaseException:
        torch.set_rng_state(own)
        raise
    after = _from_first_rank(torch.get_rng_state(), mesh)
    if torch.equal(own, before):
        torch.set_rng_state(after)


def _from_first_rank(tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    received = tensor.clone()
    mesh.broadcast(received, mesh.control.group)
    return received


def _resized(
    model: nn.Module, module: _Rows, ranges: Sequence[Range], mean_resizing: bool
) -> dict[str, torch.Tensor]:
    """Return this rank's resized shards of a module, without the tied weight of a head."""
    mesh = state_of(model).mesh
    rows, shards = ranges[-1][1], dict(module.named_parameters())
    if isinstance(module, VocabParallelHead) and module.tied:
        del shards["weight"]
    layouts = {name: module.layouts[name] for name in shards}
    old = {}
    if mean_resizing and rows > module.layouts["weight"].shape[0]:
        old = gather_in_step(
            {name: (shards[name], layouts[name]) for name in shards}, mesh, _OP_NAME
        )

    def draw() -> dict[str, torch.Tensor]:
        if mesh.rank == 0:
            return _added(model, module, shards, old, rows, mean_resizing)
        return {
            name: shard.new_empty((0, *shard.shape[1:]), device="cpu")
            for name, shard in shards.items()
        }

    added = mesh.control.run_on_all(_OP_NAME, draw, patient=True)
    return {
        name: _resharded(shard, layouts[name], added.pop(name), ranges, mesh)
        for name, shard in shards.items()
    }


def _added(
    model: nn.Module,
    module: _Rows,
    shards: Mapping[str, nn.Parameter],
    old: Mapping[str, torch.Tensor],
    rows: int,
    mean_resizing: bool,
) -> dict[str, torch.Tensor]:
    """Return the rows that HuggingFace adds to a full module; none where it shrinks.

    Values of ``shards`` are not read; new rows may depend on the whole values, ``old``.
    """
    old_rows, hidden = module.layouts["weight"].shape
    if "weight" not in shards:  # HuggingFace fills up the bias as it ties
        return {name: shard.new_zeros(max(0, rows - old_rows)) for name, shard in shards.items()}
    whole = {
        name: old.get(name, shard.new_zeros(1, device="cpu").expand(module.layouts[name].shape))
        for name, shard in shards.items()
    }
    if isinstance(module, VocabParallelEmbedding):
        plain = nn.Embedding.from_pretrained(whole["weight"])
        plain = resized_embedding(model, plain, rows, mean_resizing)
    else:
        plain = nn.Linear(hidden, old_rows, bias="bias" in shards, device="meta")
        for name, tensor in whole.items():
            setattr(plain, name, nn.Parameter(tensor))
        plain = resized_head(model, plain, rows, mean_resizing)
    return {name: parameter.data[old_rows:] for name, parameter in plain.named_parameters()}


def _resharded(
    shard: torch.Tensor,
    layout: TensorLayout,
    added: torch.Tensor | None,
    ranges: Sequence[Range],
    mesh: Mesh,
) -> torch.Tensor:
    """Return this rank's shard of a resized tensor.

    Args:
        shard, layout: of the tensor before.
        added: on rank 0 the rows behind it, on the others any tensor; zeros when None.
        ranges: the rows that each tp rank holds of the resized tensor.
    """
    rows, old_rows = ranges[-1][1], layout.shape[0]
    kept = min(rows, old_rows)
    of_ranks = [ranges[rank % len(ranges)] for rank in range(mesh.world_size)]
    kept_of = [(min(start, kept), min(stop, kept)) for start, stop in of_ranks]
    added_of = [(max(start, kept) - kept, max(stop, kept) - kept) for start, stop in of_ranks]
    start, stop = of_ranks[mesh.rank]
    room = partial(torch.zeros, (stop - start, *shard.shape[1:]), dtype=shard.dtype)
    out = mesh.control.run_on_all(_OP_NAME, room)  # where a table may not fit
    own = kept_of[mesh.rank][1] - kept_of[mesh.rank][0]

    def fill() -> None:
        _fetch(shard, layout, kept_of, out[:own], mesh)
        if added is not None:
            whole = tuple((0, size) for size in (rows - kept, *layout.shape[1:]))
            held = ((whole,), *[()] * (mesh.world_size - 1))
            of_first_rank = TensorLayout(layout.name, box_shape(whole), 0, held)
            _fetch(added, of_first_rank, added_of, out[own:], mesh)

    mesh.control.run_on_all(_OP_NAME, fill)
    return out.to(shard.device)


def _fetch(
    shard: torch.Tensor,
    layout: TensorLayout,
    wanted: Sequence[Range],
    out: torch.Tensor,
    mesh: Mesh,
) -> None:
    """Fill ``out`` with this rank's ``wanted`` rows of a sharded tensor; all ranks call it."""
    row_bytes = math.prod(layout.shape[1:]) * shard.element_size()
    at_once = max(1, STRIPE_BYTES // row_bytes)
    for first in range(0, max(stop - start for start, stop in wanted), at_once):
        stripes = [
            RowStripe(layout, min(start + first, stop), min(start + first + at_once, stop))
            for start, stop in wanted
        ]
        piece = out[first : first + at_once]
        Swap({layout.name: shard}, [[stripe] for stripe in stripes], [piece], mesh.control).run()


def _put(module: _Rows, shards: Mapping[str, torch.Tensor], ranges: Sequence[Range]) -> None:
    """Put resized shards into a module, and mark the parameters that it held as stale."""
    layouts = dict(module.layouts)
    for name, shard in shards.items():
        old, layout = getattr(module, name), layouts[name]
        layouts[name] = shard_along(
            layout.name, (ranges[-1][1], *layout.shape[1:]), 0, tuple(ranges)
        )
        if not isinstance(shard, nn.Parameter):
            shard = nn.Parameter(shard, requires_grad=old.requires_grad)
        setattr(module, name, shard)
        mark_replaced(old, shard, layout.name, _OP_NAME)
    module.set_layouts(layouts)


class _StateValue(NamedTuple):
    """A value in an optimizer's state of a parameter, as it is on all ranks.

    Attributes:
        dtype: of a tensor; None for anything else.
        value: None where it has an element for each of the parameter's; else what it is.
    """

    dtype: torch.dtype | None
    value: Any


class _CarriedOptimizer:
    """An optimizer's states of some parameters, on their way to those that replace them.

    Every rank makes it and calls its methods, in one order.

    Args:
        optimizer: of these parameters, of some of them, or of none.
        parameters: those to be replaced, by logical name; this rank's shards.
        mesh: the ranks.

    Raises:
        RuntimeError: a state has neither an element for each of its parameter's nor one for all, as
            Adafactor's means over rows and columns; on all ranks.
        DisagreementError: the ranks' optimizers differ.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        mesh: Mesh,
    ) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        self._shards: dict[str, dict[str, torch.Tensor]] = {}
        held, own = mesh.control.run_on_all(_OP_NAME, self._look)
        require_equal(mesh.control, _OP_NAME, dict.fromkeys(held, "in the optimizer"))
        noun = "the optimizer's state of "
        self._entries: dict[str, dict[str, _StateValue]] = require_equal(
            mesh.control, _OP_NAME, own, _StateValue, partial=True, noun=noun
        )

    def _look(self) -> tuple[list[str], dict[str, dict[str, _StateValue]]]:
        """Return the names that the optimizer holds, and the states of those with elements here.

        Of the others torch's optimizers need none.
        """
        ids = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        held = [name for name, parameter in self._parameters.items() if id(parameter) in ids]
        found: dict[str, dict[str, _StateValue]] = {}
        for name in held:
            if (parameter := self._parameters[name]).numel() == 0:
                continue
            found[name] = {}
            for key, state in sorted(self._optimizer.state.get(parameter, {}).items()):
                if not isinstance(state, torch.Tensor):
                    found[name][key] = _StateValue(None, state)
                elif state.dim() == 0:
                    found[name][key] = _StateValue(state.dtype, state.item())
                elif state.shape == parameter.shape:
                    found[name][key] = _StateValue(state.dtype, None)
                else:
                    raise RuntimeError(
                        f"{_OP_NAME}: {type(self._optimizer).__name__} holds {key} of {name} in "
                        f"the shape {tuple(state.shape)}, of which no row belongs to a token; "
                        "build another optimizer afterwards"
                    )
        return held, found

    def reshard(self, name: str, resharded: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Move the states of a parameter to the ranks that will have its rows.

        Args:
            name: of the parameter.
            resharded: makes the new shard of the old one; called on all ranks.
        """
        parameter = self._parameters[name]
        states = self._optimizer.state.get(parameter, {})
        for key, entry in self._entries.get(name, {}).items():
            if entry.dtype is not None and entry.value is None:
                old = states.get(key)
                if old is None:
                    old = torch.empty_like(parameter, dtype=entry.dtype)
                self._shards.setdefault(name, {})[key] = resharded(old)

    def give(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Let the optimizer hold other parameters by the same names, with the moved states."""
        for name, new in parameters.items():
            old = self._parameters[name]
            for group in self._optimizer.param_groups:
                group["params"] = [new if each is old else each for each in group["params"]]
            states = self._optimizer.state.pop(old, {})
            for key, entry in self._entries.get(name, {}).items():
                if key in self._shards.get(name, {}):
                    states[key] = self._shards[name][key]
                elif key not in states:  # on a rank that had no rows
                    dtype, value = entry
                    states[key] = value if dtype is None else torch.tensor(value, dtype=dtype)
            if states:
                self._optimizer.state[new] = states
