"""Resize the vocabulary of a parallel model: rows keep their ids, and travel to their ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from parallel_ext.distributed.errors import check_positive
from parallel_ext.distributed.mesh import Mesh
from parallel_ext.distributed.require_equal import require_equal
from parallel_ext.io.state_dict import gather_in_step
from parallel_ext.models._transformers_private import resized_embedding, resized_head
from parallel_ext.nn.stale_parameters import mark_replaced
from parallel_ext.nn.vocab import TiedHead, VocabParallelEmbedding, VocabParallelHead
from parallel_ext.ops.group import Range
from parallel_ext.parallel.carried_optimizer import CarriedOptimizer
from parallel_ext.parallel.joining import arrive
from parallel_ext.parallel.state import ParallelState, model_of, state_of
from parallel_ext.sharding.layout import TensorLayout, box_shape, shard_along, split
from parallel_ext.sharding.reshard import STRIPE_BYTES, RowStripe, Swap

_OP_NAME = "resize_token_embeddings"

_Rows = VocabParallelEmbedding | VocabParallelHead
_Beside = TiedHead | VocabParallelHead | nn.Linear | None  # the head of a model around a decoder


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
        model: a parallel model, or one of images around a parallel decoder.
        new_num_tokens: rows of embedding and head afterwards; as many as before when None.
        pad_to_multiple_of: round that up to a multiple of this. As in HuggingFace the rows added so
            are rows like any other, which ``config.vocab_size`` counts and files hold. Ranks need
            none: every vocabulary fits every tp.
        mean_resizing: draw new rows around the mean of the old ones, which rank 0 gathers for it,
            one table at a time, in its CPU memory; else as the class initialises its weights.
        optimizer: continues with the new parameters: states that have an element for each of a
            parameter's, as momentum, keep their rows by id and are 0 for new ones; ``step`` and the
            like stay as they are. Not of a model of images.
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
    arrive(_OP_NAME)
    mesh.control.barrier(_OP_NAME)
    asked = {
        "new_num_tokens": new_num_tokens,
        "pad_to_multiple_of": pad_to_multiple_of,
        "mean_resizing": mean_resizing,
        "allow_fewer_rows": allow_fewer_rows,
        "the class of optimizer": None if optimizer is None else type(optimizer).__name__,
    }
    require_equal(mesh.control, _OP_NAME, {name: repr(value) for name, value in asked.items()})
    inner = model_of(model)
    if optimizer is not None and model is not inner:
        raise NotImplementedError(
            f"{_OP_NAME}: optimizer= is served for models of text; build the optimizer afterwards"
        )
    if state.invariant is not None or (state.spec.head is None and model is inner):
        what = "px.Invariant" if state.spec.head else f"a parallel {type(model).__name__}"
        raise NotImplementedError(
            f"{_OP_NAME}: {what} does not serve it; resize before px.parallelize"
        )
    if path := state.spec.layer_embedding_in(state.layout):
        raise NotImplementedError(
            f"{_OP_NAME}: {path} has a row for each id, too; resize before px.parallelize"
        )
    embedding = inner.get_submodule(state.spec.embedding)
    head = model.get_output_embeddings() if state.spec.head is None else None
    sharded: list[_Rows] = [embedding]
    if state.spec.head is not None:
        sharded.append(inner.get_submodule(state.spec.head))
    numbers = new_num_tokens, pad_to_multiple_of
    rows = mesh.control.run_on_all(
        _OP_NAME, lambda: _check(state, sharded, head, *numbers, allow_fewer_rows)
    )
    if rows == embedding.num_embeddings:
        return embedding
    ranges = split(rows, mesh.tp_size, state.vocab_multiple_of)
    if optimizer is not None:
        carried = CarriedOptimizer(optimizer, _parameters(*sharded), mesh, _OP_NAME)
        for name, layout in _layouts(*sharded).items():
            carried.reshard(
                name, lambda old, layout=layout: _resharded(old, layout, None, ranges, mesh)
            )
    places: list[tuple[_Rows | nn.Linear, Sequence[Range]]] = [(each, ranges) for each in sharded]
    if isinstance(head, VocabParallelHead):
        places.append((head, ranges))
    elif isinstance(head, nn.Linear):
        places.append((head, [(0, rows)]))
    with _in_step(mesh):  # in HuggingFace's order
        resized = [_resized(model, *place, mean_resizing) for place in places]
    for (each, of_ranks), shards in zip(places, resized, strict=True):
        tied = isinstance(each, VocabParallelHead) and each.tied
        _put(each, ({"weight": embedding.weight} if tied else {}) | shards, of_ranks)
    if embedding.padding_idx is not None and embedding.padding_idx >= rows:
        embedding.padding_idx = None
    if optimizer is not None:
        carried.give(_parameters(*sharded))
    tensors = {**state.layout.tensors, **_layouts(*sharded)}
    state.set_vocabulary(replace(state.layout, tensors=tensors), ranges)
    for config in (model.config, inner.config):
        config.get_text_config().vocab_size = rows
    model.vocab_size = rows
    for each in (model.base_model, inner.base_model):
        if hasattr(each, "vocab_size"):
            each.vocab_size = rows
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
    sharded: Sequence[_Rows],
    head: _Beside,
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
    embedding, *of_model = sharded
    expected = [(state.spec.embedding, embedding, {VocabParallelEmbedding})]
    expected += [(state.spec.head, each, {VocabParallelHead}) for each in of_model]
    if head is not None:
        expected.append(("the output head", head, {TiedHead, VocabParallelHead, nn.Linear}))
    for path, module, kinds in expected:
        if type(module) not in kinds:
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
    for each in of_model:
        each.check_ties(embedding, _OP_NAME)
    if isinstance(head, TiedHead) and (head.tied_to is not embedding or head.bias is not None):
        raise RuntimeError(
            f"{_OP_NAME}: the output head has a bias, or is tied to another embedding; resize "
            "before px.parallelize"
        )
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
    model: nn.Module, module: _Rows | nn.Linear, ranges: Sequence[Range], mean_resizing: bool
) -> dict[str, torch.Tensor]:
    """Return this rank's resized shards of a module, without the tied weight of a head."""
    mesh = state_of(model).mesh
    rows, shards = ranges[-1][1], dict(module.named_parameters())
    if isinstance(module, VocabParallelHead) and module.tied:
        del shards["weight"]
    layouts = _layouts_in(module)
    old = {}
    if mean_resizing and rows > layouts["weight"].shape[0]:
        old = gather_in_step(
            {name: (shard, layouts[name]) for name, shard in shards.items()}, mesh, _OP_NAME
        )

    def draw() -> dict[str, torch.Tensor]:
        if mesh.rank == 0:
            kind = nn.Embedding if isinstance(module, VocabParallelEmbedding) else nn.Linear
            return _added(model, kind, shards, layouts, old, rows, mean_resizing)
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
    kind: type[nn.Module],
    shards: Mapping[str, nn.Parameter],
    layouts: Mapping[str, TensorLayout],
    old: Mapping[str, torch.Tensor],
    rows: int,
    mean_resizing: bool,
) -> dict[str, torch.Tensor]:
    """Return the rows that HuggingFace adds to a full module of a kind; none where it shrinks.

    Values of ``shards`` are not read; new rows may depend on the whole values, ``old``.
    """
    old_rows, hidden = layouts["weight"].shape
    if "weight" not in shards:  # HuggingFace fills up the bias as it ties
        return {name: shard.new_zeros(max(0, rows - old_rows)) for name, shard in shards.items()}
    whole = {
        name: old.get(name, shard.new_zeros(1, device="cpu").expand(layouts[name].shape))
        for name, shard in shards.items()
    }
    if kind is nn.Embedding:
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
        if layout.is_replicated:
            out[:own].copy_(shard[start : start + own])
        else:
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


def _layouts_in(module: _Rows | nn.Linear) -> Mapping[str, TensorLayout]:
    """Return the layouts of a module's parameters by attribute; each rank has a plain one whole."""
    if isinstance(module, nn.Linear):
        return {
            n: TensorLayout(f"lm_head.{n}", tuple(p.shape)) for n, p in module.named_parameters()
        }
    return module.layouts


def _put(
    module: _Rows | nn.Linear, shards: Mapping[str, torch.Tensor], ranges: Sequence[Range]
) -> None:
    """Put resized shards into a module, and mark the parameters that it held as stale."""
    layouts = dict(_layouts_in(module))
    for name, new in shards.items():
        old, layout = getattr(module, name), layouts[name]
        if not isinstance(new, nn.Parameter):  # as the weight of a tied head is
            new = nn.Parameter(new, requires_grad=old.requires_grad)
        setattr(module, name, new)
        mark_replaced(old, new, layout.name, _OP_NAME)
        shape = (ranges[-1][1], *layout.shape[1:])
        layouts[name] = shard_along(layout.name, shape, 0, tuple(ranges))
    if isinstance(module, nn.Linear):
        module.out_features = len(module.weight)
    else:
        module.set_layouts(layouts)
