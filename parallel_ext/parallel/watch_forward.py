"""Refuse forwards that bypass what px.parallelize has put into a model, or train ranks apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from parallel_ext.io.safe_open import shown
from parallel_ext.nn.sharded_module import Mark, ShardedModule
from parallel_ext.nn.vocab import VocabParallelEmbedding, VocabParallelHead
from parallel_ext.parallel.joining import arrive, may_meet
from parallel_ext.parallel.state import STATE_NAME, ParallelState, model_of, state_of
from parallel_ext.sharding._torch_private import tree_leaves


class WantSharded:
    """Hooks of a module: refuse it where another layer, or forward, stands for one of its layers.

    Of a plain layer every rank computes all, and what is summed over the ranks is a multiple. Where
    the own forward of one that communicates did not run, ranks keep their parts of a sum.

    Args:
        layers: names in the module of those that ``px.parallelize`` has replaced.
        marks: by names of those of them that communicate.
    """

    def __init__(self, path: str, layers: Sequence[str], marks: Mapping[str, Mark]) -> None:
        self.path, self.layers, self.marks = path, layers, marks

    def attach(self, module: nn.Module) -> None:
        """Let every forward of ``module`` be watched."""
        module.register_forward_pre_hook(self.before)
        module.register_forward_hook(self.after)

    def before(self, module: nn.Module, args: tuple) -> None:
        """With gradients, raise if a layer was replaced; forget which have run."""
        for mark in self.marks.values():
            mark.is_set = False
        for name in self.layers if torch.is_grad_enabled() else ():
            # In a quarter of the time; torch.compile refuses getattr with a path.
            if "." not in name and isinstance(getattr(module, name, None), ShardedModule):
                continue
            try:
                layer = module.get_submodule(name)
            except AttributeError:  # a forward of the user's own does without it
                continue
            if not any(isinstance(each, ShardedModule) for each in layer.modules()):
                raise RuntimeError(
                    f"{self.path}.{name} was replaced by a {type(layer).__name__}, but must be, or "
                    "hold, what px.parallelize has put there; model.load_state_dict changes its "
                    "values"
                )

    def after(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Raise unless the layers that communicate have run."""
        for name, mark in self.marks.items():
            if not mark.is_set:
                self._refuse(module, name)

    def _refuse(self, module: nn.Module, name: str) -> None:
        try:
            module.get_submodule(name)
        except AttributeError:  # a forward of the user's own does without it
            return
        raise RuntimeError(
            f"the forward that px.parallelize has given {self.path}.{name} did not run, without "
            "which each rank keeps its part of a sum; what stands in its place, or uses the "
            "weight, must call it; forward hooks change what a layer is given and returns"
        )


def refuse_unsummed(path: str, names: str, module: nn.Module, args: tuple) -> None:
    """A forward pre-hook: with gradients, raise where a part of them would not be summed.

    As of a module that came into a tower, whose ranks compute their own positions, once these sums
    were made. Ranks use what has the name ``names`` in the module for parts of the input.
    """
    if not torch.is_grad_enabled():
        return
    for name, each in module.get_submodule(names).named_modules(prefix=f"{path}.{names}"):
        own = () if "used_in_parts" in vars(each) else each.named_parameters(recurse=False)
        if trained := [attribute for attribute, parameter in own if parameter.requires_grad]:
            raise RuntimeError(
                f"{name}.{trained[0]} came into {path} after px.parallelize, so each rank would "
                "train it on its own positions of an image; put it there before px.parallelize"
            )


class _RefuseBypass:
    """A forward pre-hook of a part of a model: raises inside a forward that has bypassed ours."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __deepcopy__(self, memo: dict[int, Any]) -> _RefuseBypass:
        """Watch the copy of the model; of the same model where a part alone is copied."""
        return type(self)(memo.get(id(self.model), self.model))

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not getattr(self.model, STATE_NAME).forward_ran:
            raise _bypass(self.model)


class _RefuseApart(_RefuseBypass):
    """A forward pre-hook of the decoder, which may be trained alone: as in the model's forward."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        if module.training and torch.is_grad_enabled() and is_trained_apart(self.model):
            refuse_training_apart(getattr(self.model, STATE_NAME))


class _RefuseDropout:
    """A forward pre-hook: in training, raises where an attribute for dropout is no longer 0."""

    def __init__(self, path: str, attribute: str) -> None:
        self.path, self.attribute = path, attribute

    def __call__(self, module: nn.Module, args: Any) -> None:
        if module.training and (value := getattr(module, self.attribute)):
            raise ValueError(
                f"the dropout of {self.path} was 0 when px.parallelize checked it, and is {value} "
                "now; set it before px.parallelize, which says where masks depend on the layout"
            )


class _MeetAtEmbedding:
    """Lets ranks join the saves of others before a call of the embedding outside of the model.

    As by a model of images, whose own forward looks up the rows of the text before the decoder's
    begins, which would meet. All ranks of the model run its forwards together.
    """

    def __init__(self, model: nn.Module) -> None:
        self._in_model = False
        model.register_forward_pre_hook(self._enter)
        model.register_forward_hook(self._leave, always_call=True)
        embedding = model.get_submodule(getattr(model, STATE_NAME).spec.embedding)
        embedding.register_forward_pre_hook(self._meet)

    def _enter(self, *_: Any) -> None:
        self._in_model = True

    def _leave(self, *_: Any) -> None:
        self._in_model = False

    def _meet(self, *_: Any) -> None:
        if not self._in_model:
            arrive("a call of the embedding")


def is_trained_apart(model: nn.Module) -> bool:
    """Return whether nobody sums the gradients of the dp ranks of a model that is trained."""
    state: ParallelState = getattr(model, STATE_NAME)
    return state.trains_apart and any(each.requires_grad for each in model.parameters())


def watch_forward(model: nn.Module) -> None:
    """Let calls of a model, or of its wrapper, raise for a forward that bypasses ours.

    Before anything of them is computed, the first decoder layer and the head raise unless ours has
    begun. The embedding may be asked, as by a wrapper that adds noise: what it returns is
    replicated. What begins behind the first layer raises at the end: hooks on all layers would take
    time of the host in decoding.
    """
    model.register_forward_pre_hook(_before_forward)
    model.register_forward_hook(_after_forward)
    model.register_forward_hook(_at_the_end, always_call=True)
    if (own := model_of(model)) is model:
        state: ParallelState = getattr(own, STATE_NAME)
        spec, refuse = state.spec, _RefuseBypass(own)
        heads = [] if spec.head is None else [own.get_submodule(spec.head)]
        for module in (own.get_submodule(spec.layers)[0], *heads):
            module.register_forward_pre_hook(refuse)
        if state.mesh.dp_size > 1:
            own.get_submodule(spec.decoder).register_forward_pre_hook(_RefuseApart(own))
        elif may_meet():
            _MeetAtEmbedding(own)


def watch_dropout(model: nn.Module, of_heads: bool) -> None:
    """Let a forward in training raise for dropout that was 0 and is switched on.

    ``px.parallelize`` has not checked it: its masks could be those of no single process, or differ
    between ranks that need the same. ``of_heads`` adds that of attention, whose masks belong to
    heads.
    """
    for path, module in model.named_modules():
        attribute = "p" if type(module) is nn.Dropout else "attention_dropout"
        if getattr(module, attribute, None) == 0 and (of_heads or attribute == "p"):
            module.register_forward_pre_hook(_RefuseDropout(path, attribute), prepend=True)


def _before_forward(module: nn.Module, args: Any) -> None:
    model = model_of(module)
    state: ParallelState = getattr(model, STATE_NAME)
    if getattr(model.forward, "__func__", None) is not state.own_forward:  # another was put there
        state.forward_ran = False


def _after_forward(module: nn.Module, args: Any, output: Any) -> None:
    model = model_of(module)
    if not getattr(model, STATE_NAME).forward_ran:
        raise _bypass(model)


def _at_the_end(module: nn.Module, *_: Any) -> None:
    state_of(module).forward_ran = True  # also after an error


def _bypass(model: nn.Module) -> RuntimeError:
    return RuntimeError(
        f"forward of this {type(model).__name__} was replaced by {shown(model.forward)}, which "
        "does not call the one that px.parallelize has put there, but takes shards for full "
        "tensors, as TRL's and Liger's fused losses do; undo that"
    )


def refuse_other_ends(model: nn.Module) -> None:
    """Raise unless embedding and output head are those that know their rows of the vocabulary."""
    state: ParallelState = getattr(model, STATE_NAME)
    if state.mesh.tp_size == 1:
        return
    kinds = (VocabParallelEmbedding, VocabParallelHead)  # a model that classifies has no head
    for path, kind in zip(state.spec.ends, kinds, strict=False):
        module = model.get_submodule(path)
        if isinstance(module, kind) or any(isinstance(each, kind) for each in module.modules()):
            continue  # perhaps inside a wrapper
        raise RuntimeError(
            f"{path} was replaced by a {type(module).__name__}, but must be what px.parallelize "
            "has put there; model.resize_token_embeddings changes the size of embedding and head, "
            "model.load_state_dict their values"
        )


def refuse_other_ties(model: nn.Module) -> None:
    """Raise where a model that is trained ties its weights otherwise than when it became parallel.

    Its files and its optimizer's states would be those of another model.
    """
    spec = getattr(model, STATE_NAME).spec
    if spec.head is None or not model.training or not torch.is_grad_enabled():
        return
    embedding, head = (model.get_submodule(path) for path in (spec.embedding, spec.head))
    if not isinstance(embedding, VocabParallelEmbedding) or not isinstance(head, VocabParallelHead):
        return  # an adapter stands there, of which the weight below is frozen
    head.check_ties(embedding, "forward")


def refuse_backward_apart(state: ParallelState, output: Any) -> None:
    """Let a backward from what a forward returns be refused."""
    for tensor in tree_leaves(output):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda grad: refuse_training_apart(state))


def refuse_training_apart(state: ParallelState) -> NoReturn:
    """Raise since nobody sums the gradients of the dp ranks, and say what does."""
    if state.invariant is not None:
        raise RuntimeError(
            f"training at dp={state.mesh.dp_size} under px.Invariant needs px.train_leaves(model, "
            "batch), or px.leaves for a loop of your own: it runs leaves of one batch; or "
            "accelerate's Accelerator.prepare(model)"
        )
    raise RuntimeError(
        f"training at dp={state.mesh.dp_size} needs px.data_parallel(model, mesh): nobody sums the "
        "gradients of the dp ranks, so each would train a model of its own; "
        "px.no_data_parallel(model) says that you do"
    )
