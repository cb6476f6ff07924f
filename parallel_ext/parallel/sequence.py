"""Sequence parallelism: between the blocks each tp rank keeps its own tokens only.

What hooks make of the hidden states of a decoder layer in training::

    [B, S, H], replicated ── the first layer's pre-hook: take_tokens ──> [B, S_own, H]
      norm of own tokens ── attention's pre-hook: gather_tokens ──> [B, S, H] ── attention
      its partial output ── attention's hook: sum_tokens ──> [B, S_own, H] + residual
      norm of own tokens ── the same around the MLP
      or a mixture, whose router and experts are given own tokens: no hook brings it others
    the final norm of own tokens ── its hook: gather_tokens ──> [B, S, H], replicated ── head

Positions and masks are those that the model makes of all tokens. Whether hidden states are of own
tokens a layer sees by their number; what is recomputed finds what its forward saw.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import nn

from parallel_ext import ops
from parallel_ext.models.blocks import AttentionNames, MixtureNames, RegionNames
from parallel_ext.models.spec import ModelSpec
from parallel_ext.nn.grad_sync import PartialGradients, UsedInParts
from parallel_ext.nn.recomputation import once, watch_checkpoints
from parallel_ext.ops import Group
from parallel_ext.parallel.plan import Plan
from parallel_ext.sharding.layout import split

_POSITIONS = "position_embeddings"


class _Tokens(NamedTuple):
    """How the tokens of a batch are divided over ranks.

    Attributes:
        rows: sequences in the batch.
        sizes: tokens of each sequence that each rank has.
    """

    rows: int
    sizes: list[int]


class OwnTokens:
    """How many tokens of each sequence the ranks hold between the blocks of the layer that runs.

    One object serves one model. A layer says it, what is in it and the last norm ask.

    Args:
        group: the tensor-parallel group.

    Attributes:
        wants_logits: whether the forward that runs returns the routers' logits.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.wants_logits = False
        self._tokens: _Tokens | None = None
        self._backward = -1
        watch_checkpoints()

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnTokens:
        return self  # PEFT copies single modules, which are to hear of the same layer

    def sizes(self, tokens: int) -> list[int]:
        """Return the tokens of each rank, of as many in all."""
        return [stop - start for start, stop in split(tokens, self.group.size)]

    def begin(self, hidden: torch.Tensor, tokens: int) -> None:
        """Say how many tokens there are in all, of which ``hidden`` has all or this rank's own."""
        # A sequence of one token is never taken apart, so that these two differ on every rank.
        if hidden.size(-2) == tokens:
            self._tokens = None
        else:
            self._tokens = _Tokens(hidden.size(0), self.sizes(tokens))
        self._backward = torch._C._current_graph_task_id()

    def _current(self) -> _Tokens | None:
        if self._backward != torch._C._current_graph_task_id():
            raise RuntimeError(
                "sequence_parallel: a part of a decoder layer is recomputed by other means than "
                "torch.utils.checkpoint; wrap what it recomputes in parallel_ext.nn.Recomputable"
            )
        return self._tokens

    def now(self) -> list[int] | None:
        """Return the tokens of each rank; None where every rank has all.

        Raises:
            RuntimeError: something is recomputed that does not say what its forward was given.
        """
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


class BeginLayer:
    """A forward pre-hook of a decoder layer: says whether its hidden states are of own tokens."""

    def __init__(self, own: OwnTokens) -> None:
        self.own = own

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.own.begin(args[0], kwargs[_POSITIONS][0].size(-2))  # the cosines [..., S, head_dim]


class EnterBlock:
    """A forward pre-hook of an attention or MLP: gathers the tokens that its ranks hold."""

    def __init__(self, own: OwnTokens) -> None:
        self.own = own

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (self.own.enter(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self.own.enter(kwargs["hidden_states"])}


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


class JitterOwn:
    """Hooks of a mixture whose router gets noise: each rank draws that of all tokens in training.

    So the noise of a token is that of a single process, and the random state of all ranks the same.

    Args:
        own: the tokens.
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


class GatherLogits:
    """A forward hook of a router: gathers its logits where the model returns those of all tokens.

    From these every rank computes the whole load balancing loss.
    """

    def __init__(self, own: OwnTokens) -> None:
        self.own = own

    def __call__(self, module: nn.Module, args: tuple, output: tuple) -> tuple | None:
        own, recomputed = self.own, torch._C._current_graph_task_id() != -1
        if not own.wants_logits or recomputed or not own.divided():
            return None
        sizes, (rows, _) = own.now(), own.shape_of_all()
        logits = output[0].view(rows, sizes[own.group.rank], -1)
        logits = ops.gather_tokens(logits, sizes, own.group, partial_gradient=False)
        return (logits.flatten(0, 1), *output[1:])


class WantLogits:
    """A forward pre-hook of the decoder: says whether it is to return the routers' logits."""

    def __init__(self, own: OwnTokens) -> None:
        self.own = own

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        asked = kwargs.get("output_router_logits")
        self.own.wants_logits = module.config.output_router_logits if asked is None else bool(asked)


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
        for name in _beside_experts(module, block) if isinstance(block, MixtureNames) else []:
            if name != block.router and type(each := module.get_submodule(name)) is not nn.Linear:
                raise ValueError(
                    f"{refused}gives a mixture this rank's tokens, of which beside router and "
                    f"experts only linears are right; {path}.{name} is a {type(each).__name__}"
                )
        if (
            isinstance(block, MixtureNames)
            and block.jitter_of(model.config) > 0
            and block.block_jitter is None
        ):
            raise ValueError(
                f"{refused}needs the attribute of {path} with the noise of {block.jitter}; name it "
                "by block_jitter in the spec"
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


def _beside_experts(mixture: nn.Module, names: MixtureNames) -> list[str]:
    """Return the names of the modules of a mixture whose parameters every rank holds."""
    return [
        name
        for name, module in mixture.named_modules()
        if next(module.parameters(recurse=False), None) is not None
        and not f"{name}.".startswith(f"{names.experts}.")
    ]


def keep_own_tokens(model: nn.Module, plan: Plan, partials: PartialGradients) -> None:
    """Let each rank keep its own tokens between the blocks of a model that was checked.

    Args:
        model: its row-parallel layers leave the sum to the hooks of their blocks.
        plan: of several tp ranks.
        partials: sums the gradients of the norms, of which each rank computes those of its tokens.
    """
    spec, own = plan.spec, OwnTokens(plan.mesh.tp)
    layers = model.get_submodule(spec.layers)
    layers[0].register_forward_pre_hook(TakeOwn(own))
    for layer in layers:
        layer.register_forward_pre_hook(BeginLayer(own), with_kwargs=True)
    norms = _norms(model, spec)
    in_parts, mixtures = [*norms], []
    for path, block in spec.blocks(plan.layout).items():
        module = model.get_submodule(path)
        if isinstance(block, MixtureNames):
            mixtures.append(path)
            in_parts += [f"{path}.{name}" for name in _beside_experts(module, block)]
            _give_own_tokens(module, block, own)
        else:
            module.register_forward_pre_hook(EnterBlock(own), with_kwargs=True)
            module.register_forward_hook(LeaveBlock(own))
    for path in in_parts:
        module = model.get_submodule(path)
        UsedInParts(path, plan.mesh.tp, own.divided).attach(module, partials)
    if mixtures:
        decoder = model.get_submodule(spec.layers.rpartition(".")[0])
        decoder.register_forward_pre_hook(WantLogits(own), with_kwargs=True)
    model.get_submodule(norms[-1]).register_forward_hook(GatherAll(own))


def _give_own_tokens(mixture: nn.Module, names: MixtureNames, own: OwnTokens) -> None:
    """Let a mixture route this rank's tokens where it is given these alone."""
    experts = mixture.get_submodule(names.experts)
    experts.divided, experts.routing.own = own.divided, own
    mixture.get_submodule(names.router).register_forward_hook(GatherLogits(own))
    if names.block_jitter is not None:
        jitter = JitterOwn(own, names.block_jitter)
        mixture.register_forward_pre_hook(jitter.before)
        mixture.register_forward_hook(jitter.after, always_call=True)
