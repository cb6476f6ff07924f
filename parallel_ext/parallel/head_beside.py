"""The output head of a model around a parallel decoder, as of one of images: sharded with it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import transformers
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from parallel_ext.distributed.require_equal import require_equal
from parallel_ext.nn.sharded_module import does_more, row_layouts
from parallel_ext.nn.stale_parameters import watch_replaced
from parallel_ext.nn.vocab import VocabParallelHead
from parallel_ext.parallel.beside import Beside, parameters_beside, whole_and_shards
from parallel_ext.parallel.holders import Holders
from parallel_ext.parallel.plan import Plan
from parallel_ext.parallel.replace import shard_of
from parallel_ext.parallel.state import own_state
from parallel_ext.sharding._torch_private import gradient_hooks
from parallel_ext.sharding.digests import content_digest

_NAME = "parallel_ext_head_beside"
_around: WeakKeyDictionary[nn.Module, list[ReferenceType[nn.Module]]] = WeakKeyDictionary()


class PlainHead(NamedTuple):
    """A plain output head beside a decoder: the model that holds both, and its path there."""

    model: transformers.PreTrainedModel
    path: str


class _Mark:
    """What a model holds around a parallel decoder, which knows it by that; so do copies."""

    def __init__(self, model: nn.Module, decoder: nn.Module, of_head: bool) -> None:
        self._model, self._decoder = model, decoder
        self.of_head = of_head  # whether the head of the model is sharded with the decoder
        _around.setdefault(decoder, []).append(ref(model))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Mark:
        model, decoder = (copy.deepcopy(each, memo) for each in (self._model, self._decoder))
        return _Mark(model, decoder, self.of_head)


def models_around(decoder: nn.Module) -> list[transformers.PreTrainedModel]:
    """Return the models with a head that hold a decoder, if their forward is transformers' own."""
    return [
        each
        for each in Holders().around(decoder)
        if isinstance(each, transformers.PreTrainedModel)
        and type(each).__module__.startswith("transformers.")
        and type(each).forward.__module__.startswith("transformers.")
        and "forward" not in vars(each)
        and each.get_output_embeddings() is not None
    ]


def plain_head_of(models: list[transformers.PreTrainedModel], vocab_size: int) -> PlainHead | None:
    """Return the head that is sharded when the decoder in some models becomes parallel, or None.

    One with hooks, without a row for each id, or whose weight is used elsewhere too, as that of an
    embedding, stays whole on every rank.
    """
    found: dict[nn.Module, PlainHead] = {}
    for model in models:
        head = model.get_output_embeddings()
        if type(head) is not nn.Linear or len(head.weight) != vocab_size or not _is_bare(head):
            continue
        names = dict(model.named_parameters(remove_duplicate=False))
        if sum(each is head.weight for each in names.values()) > 1:
            continue
        path = next(path for path, each in model.named_modules() if each is head)
        if head not in found or len(path) < len(found[head].path):  # of the inner one of two models
            found[head] = PlainHead(model, path)
    return next(iter(found.values())) if len(found) == 1 else None


def _is_bare(head: nn.Linear) -> bool:
    """Return whether a layer has nothing that its shards would lack."""
    hooked = any(any(gradient_hooks(each)) for each in head.parameters())
    return not (hooked or does_more(head) or is_parametrized(head))


def check_equal_heads(head: PlainHead | None, plan: Plan) -> None:
    """Raise unless all ranks are to shard the same head, or none; every rank calls it."""
    own = {} if head is None else dict(head.model.get_submodule(head.path).named_parameters())
    values = {
        f"{head.path}.{name}": "meta" if each.is_meta else content_digest(each)
        for name, each in own.items()
    }
    advice = "load the same weights, or seed equally, on every rank"
    require_equal(plan.mesh.control, "parallelize", values, advice=advice)


def mark_around(model: nn.Module, decoder: nn.Module, of_head: bool) -> None:
    """Let a parallel decoder know a model that holds it, and whether it shards that one's head."""
    setattr(model, _NAME, _Mark(model, decoder, of_head))


def known_around(decoder: nn.Module) -> list[nn.Module]:
    """Return the models around a parallel decoder that :func:`mark_around` was given."""
    models = (reference() for reference in _around.get(decoder, ()))
    return [each for each in models if each is not None]


def shard_head(head: PlainHead, decoder: nn.Module, plan: Plan) -> None:
    """Let each rank hold its rows of a head, as those of the embedding of its decoder."""
    (model, path), partials = head, own_state(decoder).partials
    plain, mesh = model.get_submodule(path), plan.mesh
    layouts = {
        name: replace(layout, name=f"{path}.{name}")
        for name, layout in row_layouts(plain, mesh.tp, plan.options.vocab_multiple_of).items()
    }
    own = {name: shard_of(getattr(plain, name), each, mesh.rank) for name, each in layouts.items()}
    parallel = VocabParallelHead(own["weight"], own.get("bias"), layouts, mesh.tp, partials)
    model.set_submodule(path, parallel.train(plain.training))
    watch_replaced(plain)


def with_head(model: nn.Module) -> nn.Module:
    """Return the model around a parallel one that holds the head sharded with it, or itself."""
    models = known_around(model)
    return next((each for each in models if getattr(each, _NAME).of_head), model)


def shards_beside(model: nn.Module) -> Beside:
    """Return this rank's shards of the head beside a parallel model, by name in what holds it.

    Those of an adapter on that head are among them, and of a copy of it that an adapter trains.
    """
    around = with_head(model)
    return {} if around is model else whole_and_shards(parameters_beside(around))[1]
