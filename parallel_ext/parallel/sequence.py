"""Sequence parallelism: between the sublayers each tp rank keeps its own tokens only.

What hooks make of the hidden states of a decoder layer in training::

    ids ── embedding: the rows of own tokens ── the first layer's pre-hook ──> [B, S_own, H]
      or inputs_embeds [B, S, H], replicated ── the same pre-hook: take_tokens
      norm of own tokens ── attention's pre-hook: gather_tokens ──> [B, S, H] ── attention
      its partial output ── attention's hook: sum_tokens ──> [B, S_own, H] + residual
      norm of own tokens ── the same around the MLP
      or a mixture, whose router and experts are given own tokens: no hook brings it others
      but to an expert that all tokens share: the same around it as around an MLP
    the final norm of own tokens ── head and loss in one op, which takes these
      or its hook: gather_tokens ──> [B, S, H], replicated ── what else there is

Positions and masks are those that the model makes of all tokens: what the embedding returns has the
place of each, and NaN in that of others' tokens, so that a class that mixes tokens before its first
layer trains on NaN and not on nonsense. Whether hidden states are of own tokens a layer sees by
their number; what is recomputed finds what its forward saw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from parallel_ext import ops
from parallel_ext.models.mixture_names import MixtureNames
from parallel_ext.nn.fused_loss import are_listened_to, current_loss_call, is_of_others
from parallel_ext.nn.grad_sync import PartialGradients
from parallel_ext.nn.recomputation import once, watch_checkpoints
from parallel_ext.nn.region import ChangeOutput, entered
from parallel_ext.nn.used_in_parts import UsedInParts
from parallel_ext.ops import Group
from parallel_ext.parallel.arguments import wants_router_logits
from parallel_ext.parallel.check_sequence import (
    POSITIONS,
    beside_experts,
    beside_layers,
    norms_of,
    sublayers_of_layers,
)
from parallel_ext.parallel.plan import Plan
from parallel_ext.sharding._torch_private import input_hooks, running_backward
from parallel_ext.sharding.layout import split


class _Tokens(NamedTuple):
    """How the tokens of a batch are divided over ranks."""

    rows: int  # sequences in the batch
    sizes: list[int]  # tokens of each sequence that each rank has


class OwnTokens:
    """How many tokens of each sequence the ranks hold between the sublayers of a running layer.

    One object serves one model. A layer says it, what is in it and the last norm ask.

    Args:
        group: the tensor-parallel group.

    Attributes:
        wants_logits: whether the forward that runs returns the routers' logits.
        embeds: whether the embedding is to return the rows of own tokens in what runs now.
        embedded: whether it has returned such to the forward that runs.
        is_heard: whether others listen to what the final norm or the decoder returns.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.wants_logits = self.embeds = self.embedded = self.is_heard = False
        self._tokens: _Tokens | None = None
        self._backward = -1
        watch_checkpoints()

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnTokens:
        return self  # PEFT copies single modules, which are to hear of the same layer

    def sizes(self, tokens: int) -> list[int]:
        """Return the tokens of each rank, of as many in all."""
        return [stop - start for start, stop in split(tokens, self.group.size)]

    def of_embedding(self, ids: torch.Tensor) -> list[int] | None:
        """Return of how many of the tokens ``ids`` each rank gets the rows; None for all."""
        if not self.embeds or ids.size(-1) == 1:
            return None
        self.embedded = True
        return self.sizes(ids.size(-1))

    def has_embedded(self) -> bool:
        """Return, once for each forward, whether the embedding has returned rows of own tokens."""
        embedded, self.embeds, self.embedded = self.embedded, False, False
        return embedded

    def begin(self, hidden: torch.Tensor, tokens: int) -> None:
        """Say how many tokens there are in all, of which ``hidden`` has all or this rank's own."""
        # A sequence of one token is never divided, so all and own tokens differ on every rank.
        if hidden.size(-2) == tokens:
            self._tokens = None
        else:
            self._tokens = _Tokens(hidden.size(0), self.sizes(tokens))
        self._backward = running_backward()

    def end(self) -> None:
        """Say that what runs next is in no layer."""
        self._tokens, self._backward = None, running_backward()

    def _current(self) -> _Tokens | None:
        backward = running_backward()
        if backward == -1 != self._backward:
            self.end()  # of what a backward has recomputed
        if self._backward != backward:
            raise RuntimeError(
                "sequence_parallel: a part of a decoder layer is recomputed by other means than "
                "torch.utils.checkpoint; wrap what it recomputes in parallel_ext.nn.Recomputable"
            )
        return self._tokens

    def now(self) -> list[int] | None:
        """Return the tokens of each rank; None where every rank has all."""
        tokens = once(self, self._current)
        return None if tokens is None else tokens.sizes

    def divided(self) -> bool:
        """Return whether hidden states are of own tokens now."""
        return self.now() is not None

    def shape_of_all(self) -> tuple[int, int]:
        """Return the number of sequences, and of tokens in each, of all ranks together."""
        rows, sizes = once(self, self._current)
        return rows, sum(sizes)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens of [B, S, ...], which has no gradient."""
        sizes = self.now()
        return whole.narrow(1, sum(sizes[: self.group.rank]), sizes[self.group.rank])

    def each_row(
        self, op: Callable[..., torch.Tensor], tokens: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """Apply an op to the tokens of each sequence, [B, S, H], or in a mixture [B * S, H]."""
        sizes = self.now()
        if tokens.dim() > 2:
            return op(tokens, sizes, self.group, **options)
        rows, _ = self.shape_of_all()
        by_row = tokens.unflatten(0, (rows, len(tokens) // rows))
        return op(by_row, sizes, self.group, **options).flatten(0, 1)

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Let hidden states enter a region, of which every rank computes a part."""
        if self.divided():
            return self.each_row(ops.gather_tokens, hidden)
        return entered(hidden, self.group)

    def leave(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum what the ranks have computed in a region, where tokens are own for these."""
        if self.divided():
            return self.each_row(ops.sum_tokens, partial)
        return ops.reduce_from_region(partial, self.group)

    # --- Hooks of modules ---

    def take_own(self, layer: nn.Module, args: tuple) -> tuple | None:
        """Before the first decoder layer: take this rank's tokens in training."""
        hidden = args[0]
        embedded = once(self, self.has_embedded)
        if not layer.training or hidden.size(-2) == 1:
            return None
        sizes = self.sizes(hidden.size(-2))
        if embedded:  # other ranks compute the gradients of the other tokens
            start = sum(sizes[: self.group.rank])
            return (hidden.narrow(-2, start, sizes[self.group.rank]).clone(), *args[1:])
        return (ops.take_tokens(hidden, sizes, self.group), *args[1:])

    def begin_layer(self, layer: nn.Module, args: tuple, kwargs: dict) -> None:
        """Before a decoder layer: say whether its hidden states are of own tokens."""
        self.begin(args[0], kwargs[POSITIONS][0].size(-2))  # the cosines [..., S, head_dim]

    def enter_sublayer(self, sublayer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Before an attention or MLP: gather the tokens that its ranks hold."""
        if args:
            return (self.enter(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self.enter(kwargs["hidden_states"])}

    def want_logits(self, decoder: nn.Module, args: tuple, kwargs: dict) -> None:
        """Before the decoder: say whether it is to return the routers' logits."""
        self.wants_logits = wants_router_logits(decoder, kwargs)

    def gather_logits(self, router: nn.Module, args: tuple, output: tuple) -> tuple | None:
        """After a router: gather its logits where the model returns those of all tokens.

        From these every rank computes the whole load balancing loss.
        """
        if not self.wants_logits or running_backward() != -1 or not self.divided():
            return None
        logits = self.each_row(ops.gather_tokens, output[0], partial_gradient=False)
        return (logits, *output[1:])

    def gather_for_hooks(self, norm: nn.Module, args: tuple) -> tuple | None:
        """Before the final norm: give every rank all tokens, where hooks of others see them there.

        The norm is then of all tokens too.
        """
        hooks = input_hooks(norm)
        if not any(map(is_of_others, hooks)) or not self.divided():
            return None
        if is_of_others(hooks[0]):
            raise NotImplementedError(
                "sequence_parallel: a pre-hook with prepend=True on the final norm is not "
                "supported: it sees this rank's own tokens; leave prepend out"
            )
        whole = ops.gather_tokens(args[0], self.now(), self.group, partial_gradient=False)
        self.begin(whole, whole.size(-2))
        return (whole, *args[1:])

    def gather_all(self, norm: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        """After the final norm: give every rank the hidden states of all tokens.

        Not where the output head takes those of own tokens.
        """
        sizes, call = self.now(), current_loss_call()
        if sizes is None:
            return output
        if call is not None and call.takes_own_tokens and not self.is_heard:
            call.tokens = sizes
            return output
        return ops.gather_tokens(output, sizes, self.group, partial_gradient=False)


class WatchEnds:
    """Hooks of the decoder: in training its embedding returns the rows of own tokens.

    Unless others listen to the embedding, who are to see all rows.

    Args:
        embedding, first, norm: paths in the decoder of the embedding, the first layer and the
            final norm.
    """

    def __init__(self, own: OwnTokens, embedding: str, first: str, norm: str) -> None:
        self.own, self.embedding, self.first, self.norm = own, embedding, first, norm

    def before(self, module: nn.Module, args: tuple) -> None:
        """Ask the embedding for own tokens, where the first layer will take them."""
        own, inner = self.own, module.get_submodule
        own.is_heard = are_listened_to((module, inner(self.norm)))
        own.embedded = False
        own.embeds = inner(self.first).training and not are_listened_to(
            inner(self.embedding).modules()
        )

    def after(self, module: nn.Module, *_: Any) -> None:
        """Ask for all, also after an error."""
        self.own.embeds = False
        self.own.end()


class JitterOwn:
    """Hooks of a mixture whose router gets noise: each rank draws that of all tokens in training.

    So the noise of a token is that of a single process, and the random state of all ranks the same.

    Args:
        attribute: of the mixture, the noise, which is 0 while its own forward runs.
    """

    def __init__(self, own: OwnTokens, attribute: str) -> None:
        self.own, self.attribute = own, attribute
        self._noise: float | None = None  # of the forward that runs

    def before(self, module: nn.Module, args: tuple) -> tuple | None:
        """Multiply the hidden states, and keep the mixture from doing it."""
        noise = getattr(module, self.attribute)
        if not module.training or noise <= 0 or not self.own.divided():
            return None
        hidden = args[0]
        of_all = hidden.new_empty(*self.own.shape_of_all(), hidden.size(-1))
        of_all.uniform_(1.0 - noise, 1.0 + noise)
        setattr(module, self.attribute, 0.0)
        self._noise = noise
        return (hidden * self.own.part(of_all), *args[1:])

    def after(self, module: nn.Module, *_: Any) -> None:
        """Give the mixture its noise back, also after an error."""
        if self._noise is not None:
            setattr(module, self.attribute, self._noise)
            self._noise = None


def keep_own_tokens(model: nn.Module, plan: Plan, partials: PartialGradients) -> None:
    """Let each rank keep its own tokens between the sublayers of a model that was checked.

    Args:
        model: its row-parallel layers leave the sum to the hooks of their sublayers.
        plan: of several tp ranks.
        partials: sums the gradients of the norms, of which each rank computes those of its tokens.
    """
    spec, own = plan.spec, OwnTokens(plan.mesh.tp)
    layers = model.get_submodule(spec.layers)
    layers[0].register_forward_pre_hook(own.take_own)
    for layer in layers:
        layer.register_forward_pre_hook(own.begin_layer, with_kwargs=True)
    norms = norms_of(model, spec)
    final_norm = model.get_submodule(norms[-1])
    final_norm.register_forward_pre_hook(own.gather_for_hooks)
    in_parts, mixtures = dict.fromkeys(norms), []
    for path, sublayer in sublayers_of_layers(model, spec).items():
        module = model.get_submodule(path)
        if isinstance(sublayer, MixtureNames):
            mixtures.append(path)
            for name in beside_experts(module, sublayer):
                of_router = name.startswith(f"{sublayer.router}.")  # which reads it itself
                user = module.get_submodule(sublayer.router) if of_router else None
                in_parts[f"{path}.{name}".rstrip(".")] = user
            _give_own_tokens(module, sublayer, own)
        else:
            module.register_forward_pre_hook(own.enter_sublayer, with_kwargs=True)
            module.register_forward_hook(ChangeOutput(own.leave))
    for path, user in in_parts.items():
        used = UsedInParts(path, plan.mesh.tp, own.divided)
        used.attach(model.get_submodule(path), partials, user)
    decoder = model.get_submodule(spec.decoder)
    if mixtures and spec.mixture.balances:
        decoder.register_forward_pre_hook(own.want_logits, with_kwargs=True)
    ends = (spec.embedding, f"{spec.layers}.0", norms[-1])
    watch = WatchEnds(own, *(path.removeprefix(spec.in_decoder) for path in ends))
    decoder.register_forward_pre_hook(watch.before)
    decoder.register_forward_hook(watch.after, always_call=True)
    if not beside_layers(model, spec):  # else images take the place of some rows
        model.get_submodule(spec.embedding).keeps = own.of_embedding
    final_norm.register_forward_hook(own.gather_all)


def _give_own_tokens(mixture: nn.Module, names: MixtureNames, own: OwnTokens) -> None:
    """Let a mixture route this rank's tokens where it is given these alone."""
    experts = mixture.get_submodule(names.experts)
    experts.divided, experts.routing.own = own.divided, own
    mixture.get_submodule(names.router).register_forward_hook(own.gather_logits)
    if names.block_jitter is not None:
        jitter = JitterOwn(own, names.block_jitter)
        mixture.register_forward_pre_hook(jitter.before)
        mixture.register_forward_hook(jitter.after, always_call=True)
