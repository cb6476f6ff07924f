"""Linear modules whose weight is sharded over the ranks, by rows or by columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from parallel_ext import ops
from parallel_ext.nn.grad_sync import PartialGradients, for_use
from parallel_ext.nn.initial_values import drawn_linear
from parallel_ext.nn.sharded_module import (
    ShardedLinear,
    does_more,
    group_of_shards,
    require_plain,
    row_layouts,
    shard_of,
)
from parallel_ext.ops import Group
from parallel_ext.sharding._torch_private import version_of
from parallel_ext.sharding.layout import TensorLayout, shard_along, split


class ComputedAhead:
    """A layer whose next output an op of several layers may have computed already.

    A wrapper around the layer hands the call on.
    """

    computed: tuple[torch.Tensor, tuple[int, bool], Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "computed": None}  # a result is part of a graph, which is not copied

    def computed_as(self, input: torch.Tensor, result: Any) -> None:
        """Let the next forward, if it is of ``input`` itself, unchanged, find this result."""
        self.computed = input, _state_of(input), result

    def take_computed(self, input: torch.Tensor) -> Any:
        """Return what was computed ahead for ``input``, and forget it; None if there is nothing."""
        if self.computed is None:
            return None
        (of_input, state, result), self.computed = self.computed, None
        return result if of_input is input and state == _state_of(input) else None


def _state_of(input: torch.Tensor) -> tuple[int, bool]:
    """Return how often ``input`` was changed in place, and whether there is a graph of its use.

    The former is 0 where nobody counts: while ``torch.compile`` traces, and in inference mode.
    """
    counted = not (torch.compiler.is_compiling() or input.is_inference())
    writes = version_of(input) if counted else 0
    return writes, torch.is_grad_enabled()


class ComputingHook:
    """The base of forward pre-hooks that compute results of layers in a module ahead.

    Args:
        layers: names in the module of those that read its input, in the order of their calls.
    """

    def __init__(self, layers: Sequence[str]) -> None:
        self.layers = tuple(layers)
        self._served: Sequence[nn.Module] = ()

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def attach(self, module: nn.Module) -> None:
        """Let every forward of ``module`` begin with this hook, behind all that others add."""
        self._handle = module.register_forward_pre_hook(self, with_kwargs=True)
        module.register_forward_hook(self._drop, always_call=True)
        vars(module)["register_forward_pre_hook"] = partial(self._register, module)

    def _register(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Register a hook of others, and this one behind it."""
        register = type(module).register_forward_pre_hook
        handle = register(module, *args, **kwargs)
        self._handle.remove()
        self._handle = register(module, self, with_kwargs=True)
        return handle

    def serve(self, layers: Sequence[nn.Module], input: torch.Tensor, results: Iterable) -> None:
        """Let the calls of ``layers`` on ``input``, in this forward, find their results."""
        self._served = layers
        for layer, result in zip(layers, results, strict=True):
            layer.computed_as(input, result)

    def _drop(self, *_: Any) -> None:
        """Free results that were not taken, as after an exception, and the graph behind them."""
        for layer in self._served:
            layer.computed = None
        self._served = ()


class _FromSizes(ShardedLinear):
    """The base of layers that are built from the sizes of ``nn.Linear``."""

    @classmethod
    def from_sizes(
        cls,
        in_features: int,
        out_features: int,
        group: Group | dist.ProcessGroup,
        bias: bool = True,
        multiple_of: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> ColumnParallelLinear | RowParallelLinear:
        """Build this rank's shard with the initial values of ``nn.Linear(...)`` in one process.

        Every rank of the group draws the values of the whole layer, with one state of torch's
        generator, and keeps its own; on the CPU in blocks of 4 MiB, so that no rank holds the
        whole weight. On a GPU one copy of it is made for the time of the call.

        Args:
            in_features: of the whole layer.
            out_features: of the whole layer.
            group: of consecutive ranks.
            bias: whether there is one.
            multiple_of: boundaries between the ranks' features are multiples of this.
            device: of the parameters, with whose generator they are drawn; on ``"meta"`` none is.
            dtype: of the parameters.

        Example:
            >>> ColumnParallelLinear.from_sizes(3, 7, ops.ALONE).weight.shape
            torch.Size([7, 3])
        """
        plain = nn.Linear(in_features, out_features, bias, device="meta", dtype=dtype)
        return drawn_linear(cls.from_plain(plain, group, multiple_of), device)


class ColumnParallelLinear(ComputedAhead, _FromSizes):
    """``nn.Linear`` of which each rank holds some output features (rows of the weight).

    Args:
        weight: [F, K], the rows of this rank.
        bias: [F] or None.
        layouts: of ``weight`` and, if there is one, ``bias``.
        group: the tensor-parallel group.
        replicas: the ranks that hold the same rows, when several do; their gradients are summed.
        partials: does that sum, and those of adapters, at the end of a backward; without it each
            is taken where the gradient arises.

    ``in_features`` and ``out_features`` are those of the whole layer. Called with a replicated
    [..., K] it returns this rank's [..., F]. The gradient of the input is partial: the input must
    have come through :func:`parallel_ext.ops.copy_to_region`, once for all layers that read it;
    :func:`parallel_ext.ops.column_linears` is several such layers in one op.
    """

    summed_over = ops.ALONE  # each rank has features of its own

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        layouts: dict[str, TensorLayout],
        group: Group,
        replicas: Group = ops.ALONE,
        partials: PartialGradients | None = None,
    ) -> None:
        super().__init__(weight, bias, layouts, group)
        self.replicas, self.partials = replicas, partials

    @property
    def communicates(self) -> bool:
        held = self.layouts["weight"].held  # of all ranks, of which only some may have replicas
        return len(set(held)) < len(held)

    @classmethod
    def from_plain(
        cls, plain: nn.Linear, group: Group | dist.ProcessGroup, multiple_of: int = 1
    ) -> ColumnParallelLinear:
        """Shard a plain layer, which every rank of a group holds, by its output features.

        Args:
            plain: the same on all ranks; it is left as it is.
            group: of consecutive ranks.
            multiple_of: boundaries between the ranks' features are multiples of this, for example
                of the head size.
        """
        require_plain(plain, nn.Linear, f"{cls.__name__}.from_plain")
        group = group_of_shards(group)
        layouts = row_layouts(plain, group, multiple_of)
        bias = shard_of(plain.bias, layouts["bias"], group) if "bias" in layouts else None
        return cls(shard_of(plain.weight, layouts["weight"], group), bias, layouts, group)

    def _for_use(self, attribute: str) -> torch.Tensor | None:
        parameter = self.shard(attribute)
        if parameter is None:
            return None
        return for_use(parameter, self.layouts[attribute].name, self.replicas, self.partials)

    def for_use(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight and bias for a forward; gradients of replicated rows are summed."""
        self.mark.is_set = True
        return self._for_use("weight"), self._for_use("bias")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.replicas.size == 1 and not torch.is_grad_enabled():
            # It has less to do: decoding.
            self.mark.is_set = True
            return functional.linear(input, self.shard("weight"), self.shard("bias"))
        computed = self.take_computed(input)
        if computed is not None:
            return computed
        return ops.column_linear(input, *self.for_use())


def can_be_computed_together(layers: Sequence[nn.Module], input: torch.Tensor) -> bool:
    """Return whether one op can stand for calls of all ``layers``, and saves time.

    It does where ``input`` needs a gradient. It cannot with a wrapper, an adapter, a hook or
    another forward around one of them, nor with a weight of another class; nor under autocast,
    where the gradient of ``input`` is summed in its own dtype.
    """
    if not (1 <= len(layers) <= 3 and input.requires_grad and torch.is_grad_enabled()):
        return False
    device = input.device.type
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        return False
    return all(
        type(layer) is ColumnParallelLinear  # FSDP and parametrizations change the class
        and type(layer.weight) in (torch.Tensor, nn.Parameter)
        and not does_more(layer)
        for layer in layers
    )


def added_once(bias: torch.Tensor | None, layer: RowParallelLinear) -> torch.Tensor | None:
    """Return a bias of which only the first rank adds its values, where another sums the output.

    Every rank computes its gradient.
    """
    if bias is None or layer.summed_over.size == layer.group.size or layer.group.rank == 0:
        return bias
    return bias - bias.detach()


class RowParallelLinear(_FromSizes):
    """``nn.Linear`` of which each rank holds some input features (columns of the weight).

    Args:
        weight: [F, K], the columns of this rank.
        bias: [F], replicated, or None.
        layouts: of ``weight``.
        group: the tensor-parallel group.
        partials: sums the partial gradients of adapters at the end of a backward.
        sums: whether it sums its output over the ranks. False where a module around it does; the
            first rank then adds the bias, whose gradient every rank computes.

    ``in_features`` and ``out_features`` are those of the whole layer. Called with this rank's
    features [..., K] it returns the replicated [..., F], or with ``sums=False`` its addend.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        layouts: dict[str, TensorLayout],
        group: Group,
        partials: PartialGradients | None = None,
        sums: bool = True,
    ) -> None:
        super().__init__(weight, bias, layouts, group)
        self.partials = partials
        self.summed_over = group if sums else ops.ALONE

    @classmethod
    def from_plain(
        cls, plain: nn.Linear, group: Group | dist.ProcessGroup, multiple_of: int = 1
    ) -> RowParallelLinear:
        """Shard a plain layer, which every rank of a group holds, by its input features.

        Args:
            plain: the same on all ranks; it is left as it is, but that its bias is shared.
            group: of consecutive ranks.
            multiple_of: as for the :class:`ColumnParallelLinear` in front.
        """
        require_plain(plain, nn.Linear, f"{cls.__name__}.from_plain")
        group = group_of_shards(group)
        ranges = split(plain.in_features, group.size, multiple_of)
        layout = shard_along("weight", tuple(plain.weight.shape), 1, ranges)
        return cls(shard_of(plain.weight, layout, group), plain.bias, {"weight": layout}, group)

    def for_use(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight and bias for a forward."""
        self.mark.is_set = True
        return self.shard("weight"), added_once(self.bias, self)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.for_use()
        if bias is None and self.summed_over.size == 1 and not torch.is_grad_enabled():
            return functional.linear(input, weight)
        return ops.row_linear(input, weight, bias, group=self.summed_over)
