"""Sequence parallelism: between the blocks each tp rank keeps its own tokens only.

What hooks make of the hidden states of a decoder layer in training::

    [B, S, H], replicated ── the first layer's pre-hook: take_tokens ──> [B, S_own, H]
      norm of own tokens ── attention's pre-hook: gather_tokens ──> [B, S, H] ── attention
      its partial output ── attention's hook: sum_tokens ──> [B, S_own, H] + residual
      norm of own tokens ── the same around the MLP
    the final norm of own tokens ── its hook: gather_tokens ──> [B, S, H], replicated ── head

Positions and masks are those that the model makes of all tokens. Whether hidden states are of own
tokens an attention sees by their number, so that a layer which is recomputed needs no memory.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from parallel_ext import ops
from parallel_ext.models.blocks import AttentionNames, RegionNames
from parallel_ext.models.spec import ModelSpec
from parallel_ext.nn.grad_sync import PartialGradients, UsedInParts
from parallel_ext.ops import Group
from parallel_ext.parallel.plan import Plan
from parallel_ext.sharding.layout import split

_POSITIONS = "position_embeddings"


class OwnTokens:
    """How many tokens of each sequence the ranks hold between the blocks of the layer that runs.

    One object serves one model. An attention says it, the blocks behind it ask.

    Args:
        group: the tensor-parallel group.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._sizes: list[int] | None = None
        self._backward = -1

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnTokens:
        return self  # PEFT copies single modules, which are to hear of the same layer

    def sizes(self, tokens: int) -> list[int]:
        """Return the tokens of each rank, of as many in all."""
        return [stop - start for start, stop in split(tokens, self.group.size)]

    def begin(self, hidden: torch.Tensor, tokens: int) -> None:
        """Say how many tokens there are in all, of which ``hidden`` has all or this rank's own."""
        # A sequence of one token is never taken apart, so that these two differ on every rank.
        self._sizes = None if hidden.size(-2) == tokens else self.sizes(tokens)
        self._backward = torch._C._current_graph_task_id()

    def now(self) -> list[int] | None:
        """Return the tokens of each rank; None where every rank has all.

        Raises:
            RuntimeError: a block is recomputed without the attention in front of it.
        """
        if self._backward != torch._C._current_graph_task_id():
            raise RuntimeError(
                "sequence_parallel: a part of a decoder layer is recomputed without its attention; "
                "checkpoint whole layers, as model.gradient_checkpointing_enable() does"
            )
        return self._sizes

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Let hidden states enter a region, of which every rank computes a part."""
        sizes = self.now()
        if sizes is None:
            return ops.copy_to_region(hidden, self.group)
        return ops.gather_tokens(hidden, sizes, self.group)


class TakeOwn:
    """A forward pre-hook of the first decoder layer: takes this rank's tokens in training."""

    def __init__(self, own: OwnTokens) -> None:
        self.own = own

    def __call__(self, module: nn.Module, args: tuple) -> tuple | None:
        hidden = args[0]
        if not module.training or hidden.size(-2) == 1:
            return None
        sizes = self.own.sizes(hidden.size(-2))
        return (ops.take_tokens(hidden, sizes, self.own.group), *args[1:])


class EnterBlock:
    """A forward pre-hook of an attention or MLP: gathers the tokens that its ranks hold."""

    def __init__(self, own: OwnTokens) -> None:
        self.own = own

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        hidden = args[0] if args else kwargs["hidden_states"]
        if _POSITIONS in kwargs:  # an attention; the cosines are [..., S, head_dim]
            self.own.begin(hidden, kwargs[_POSITIONS][0].size(-2))
        hidden = self.own.enter(hidden)
        if args:
            return (hidden, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden}


class LeaveBlock:
    """A forward hook of an attention or MLP: sums its output, where tokens are own for these."""

    def __init__(self, own: OwnTokens) -> None:
        self.own = own

    def __call__(
        self, module: nn.Module, args: tuple, output: torch.Tensor | tuple
    ) -> torch.Tensor | tuple:
        if isinstance(output, tuple):
            return (self._sum(output[0]), *output[1:])
        return self._sum(output)

    def _sum(self, partial: torch.Tensor) -> torch.Tensor:
        sizes = self.own.now()
        if sizes is None:
            return ops.reduce_from_region(partial, self.own.group)
        return ops.sum_tokens(partial, sizes, self.own.group)


class GatherAll:
    """A forward hook of the final norm: every rank gets the hidden states of all tokens."""

    def __init__(self, own: OwnTokens) -> None:
        self.own = own

    def __call__(self, module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        sizes = self.own.now()
        if sizes is None:
            return output
        return ops.gather_tokens(output, sizes, self.own.group, partial_gradient=False)


def check_sequence_parallel(model: nn.Module, spec: ModelSpec) -> None:
    """Raise unless the tokens between the blocks of a model can be divided over the ranks.

    Raises:
        ValueError: names what cannot.
    """
    refused = "parallelize: sequence_parallel=True "
    blocks = spec.blocks({name for name, _ in model.named_parameters()})
    if spec.attention is None or spec.regions or spec.shared:
        raise ValueError(
            f"{refused}serves models of decoder layers with an attention and an MLP; "
            f"{spec.model_type!r} has other parts, so leave it out"
        )
    for path, block in blocks.items():
        module = model.get_submodule(path)
        if not isinstance(block, (AttentionNames, RegionNames)):
            raise ValueError(
                f"{refused}does not serve mixtures of experts yet, as {path}; leave it out"
            )
        if isinstance(block, RegionNames) and (block.merges or block.entry is not None):
            raise ValueError(
                f"{refused}does not serve the entry or the sum of {path}; leave it out"
            )
        if isinstance(block, AttentionNames) and (
            _POSITIONS not in inspect.signature(type(module).forward).parameters
        ):
            raise ValueError(
                f"{refused}needs an attention that is given {_POSITIONS}, which tell the number of "
                f"tokens; {path} is a {type(module).__name__}"
            )
    norms = _norms(model, spec)
    for path in norms:
        if "Norm" not in type(module := model.get_submodule(path)).__name__:
            raise ValueError(
                f"{refused}divides the tokens of what stands between the blocks, which must be "
                f"norms; {path} is a {type(module).__name__}"
            )
    behind = [path for path in norms if not path.startswith(f"{spec.layers}.")]
    if len(behind) != 1:
        raise ValueError(
            f"{refused}needs one norm behind the decoder layers, but there are "
            f"{', '.join(behind) or 'none'}"
        )
    for path, module in model.get_submodule(spec.layers).named_modules():
        if type(module) is nn.Dropout and module.p > 0:
            raise ValueError(
                f"{refused}does not serve dropout between the blocks, whose masks would depend on "
                f"the layout; set that of {spec.layers}.{path}, {module.p}, to 0"
            )


def _norms(model: nn.Module, spec: ModelSpec) -> list[str]:
    """Return the paths of the modules with parameters between the blocks, and last behind them."""
    blocks = tuple(f"{path}." for path in spec.blocks({n for n, _ in model.named_parameters()}))
    decoder = spec.layers.rpartition(".")[0]
    found = [
        path
        for path, module in model.named_modules()
        if path.startswith(f"{decoder}.")
        and next(module.parameters(recurse=False), None) is not None
        and not f"{path}.".startswith((*blocks, f"{spec.embedding}."))
    ]
    return sorted(found, key=lambda path: not path.startswith(f"{spec.layers}."))


def keep_own_tokens(model: nn.Module, plan: Plan, partials: PartialGradients) -> None:
    """Let each rank keep its own tokens between the blocks of a model that was checked.

    Args:
        model: its row-parallel layers leave the sum to the hooks of their blocks.
        plan: of several tp ranks.
        partials: sums the gradients of the norms, of which each rank computes those of its tokens.
    """
    spec, own = plan.spec, OwnTokens(plan.mesh.tp)
    model.get_submodule(spec.layers)[0].register_forward_pre_hook(TakeOwn(own))
    for path in spec.blocks(plan.layout):
        module = model.get_submodule(path)
        module.register_forward_pre_hook(EnterBlock(own), with_kwargs=True)
        module.register_forward_hook(LeaveBlock(own))
    norms = _norms(model, spec)
    for path in norms:
        UsedInParts(path, plan.mesh.tp).attach(model.get_submodule(path), partials)
    model.get_submodule(norms[-1]).register_forward_hook(GatherAll(own))
