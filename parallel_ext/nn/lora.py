"""Low-rank adapters on sharded linear layers: their factors, dropout masks and merging."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallel_ext import ops
from parallel_ext.distributed.errors import check_positive
from parallel_ext.nn.forward_counter import ForwardCounter
from parallel_ext.nn.grad_sync import for_use
from parallel_ext.nn.initial_values import draw, linear_weight
from parallel_ext.nn.linear import ColumnParallelLinear, RowParallelLinear, added_once
from parallel_ext.nn.sharded_module import ShardedLinear, ShardedModule
from parallel_ext.ops import Group
from parallel_ext.sharding._torch_private import version_of
from parallel_ext.sharding.layout import TensorLayout, shard_like
from parallel_ext.sharding.slices import local_part


class Factor(ShardedLinear):
    """One factor of a linear adapter: a weight [out, in], and perhaps a bias [out]; zeros at first.

    Args:
        weight: layout of the weight.
        bias: layout of the bias, or None.
        group: the ranks that the base is sharded over.
        options: device and dtype.
    """

    def __init__(
        self, weight: TensorLayout, bias: TensorLayout | None, group: Group, **options: Any
    ) -> None:
        parameters = (
            nn.Parameter(torch.zeros(layout.local_shape(group.rank), **options)) if layout else None
            for layout in (weight, bias)
        )
        layouts = {"weight": weight} | ({"bias": bias} if bias else {})
        super().__init__(*parameters, layouts, group)


def factor_layouts(
    base: ShardedModule, name_a: str, name_b: str, r: int
) -> tuple[TensorLayout, TensorLayout]:
    """Return the layouts of the factors A [r, in] and B [out, r] of an adapter on ``base``.

    The one that shares the sharded dimension of the base is sharded at the same places, the other
    one is replicated.
    """
    weight = base.layouts["weight"]
    out_features, in_features = weight.shape
    if weight.dim == 1:
        return shard_like(weight, name_a, (r, in_features)), TensorLayout(name_b, (out_features, r))
    return TensorLayout(name_a, (r, in_features)), shard_like(weight, name_b, (out_features, r))


def factors_for_use(
    base: Any, factor_a: Factor, factor_b: Factor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return A, B and the bias of B for a forward; gradients that are partial there are summed."""
    by_columns = base.layouts["weight"].dim == 1
    group_a, group_b = (ops.ALONE, base.group) if by_columns else (base.group, base.replicas)

    def caught(factor: Factor, attribute: str, group: Group) -> torch.Tensor:
        name = factor.layouts[attribute].name
        return for_use(getattr(factor, attribute), name, group, base.partials)

    if by_columns:
        bias = added_once(factor_b.bias, base)
    else:
        bias = None if factor_b.bias is None else caught(factor_b, "bias", group_b)
    return caught(factor_a, "weight", group_a), caught(factor_b, "weight", group_b), bias


_ODD = 0x9E3779B97F4A7C15  # keys of leaves are far apart


def input_dropout(
    base: ShardedModule, input: torch.Tensor, p: float, key: int, forwards: ForwardCounter
) -> ops.Dropout:
    """Return the dropout of an adapter's input, whose mask is the same however ``base`` is sharded.

    Over dp ranks it is that of the whole batch where each has equally many tokens. Where they have
    not, as with batches padded to their own lengths, some tokens of two ranks have one mask.

    Args:
        base: the layer with the adapter.
        input: [..., K], what it is called with on this rank.
        p: probability of a zero.
        key: of the masks of this adapter, equal on all ranks.
        forwards: of the layer; in a leaf of ``px.train_leaves`` the mask is that of the leaf's rows
            in the whole batch, which are the first dimension of ``input`` unless it is [tokens, K].
            Where layers read other rows, as images, it is one of the leaf.
    """
    step = forwards.number("lora_dropout")
    tokens = math.prod(input.shape[:-1])
    if forwards.first_row is not None and forwards.rows is None:
        key, token = (key + forwards.first_row * _ODD) % 2**63, 0  # masks of the leaf alone
    elif forwards.first_row is not None:
        token = forwards.first_row * (
            tokens // (input.size(0) if input.dim() > 2 else forwards.rows)
        )
    else:  # the tokens of a dp rank come after those of the lower ones
        token = tokens * (dist.get_rank() // base.group.size if dist.is_initialized() else 0)
    layout, feature = base.layouts["weight"], 0
    if layout.dim == 1:
        ((feature, _),) = layout.ranges(base.group.rank)
    return ops.Dropout(p, key, step, token, feature)


def low_rank_product(factor_a: torch.Tensor, factor_b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return ``scale * B A``, what an adapter adds to the weight, in fp32 or wider."""
    wide = torch.promote_types(factor_a.dtype, torch.float32)
    return factor_b.detach().to(wide) @ factor_a.detach().to(wide) * scale


class KeptParameters:
    """The parameters of a module as they were before adapters were merged into them.

    A change of them through ``.data`` is not noticed: torch does not count it.
    """

    def __init__(self) -> None:
        self._values: dict[str, torch.Tensor] = {}
        self._merged: dict[str, tuple[nn.Parameter, int]] = {}  # and its version after the merge

    def __getstate__(self) -> dict[str, Any]:
        merged = self._merged.items()
        changed = {name for name, (own, version) in merged if version_of(own) != version}
        parameters = {name: own for name, (own, _) in merged}
        return {"values": self._values, "parameters": parameters, "changed": changed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._values, changed = state["values"], state["changed"]
        self._merged = {  # a copy of a parameter counts its versions from 0
            name: (own, -1 if name in changed else version_of(own))
            for name, own in state["parameters"].items()
        }

    def replace(
        self, module: nn.Module, values: Mapping[str, torch.Tensor], keep: bool = True
    ) -> None:
        """Write merged values into parameters, of which copies are kept if ``keep``."""
        for name, value in values.items():
            parameter = getattr(module, name)
            if keep and name not in self._values:
                self._values[name] = parameter.detach().clone()
            local_part(parameter.data).copy_(value)
            self._merged[name] = parameter, version_of(parameter)

    def put_back(self, module: ShardedModule) -> None:
        """Give the parameters their former values, bit for bit.

        Raises:
            RuntimeError: one was changed since :meth:`replace`, which would be lost.
        """
        for name in self._values:
            if version_of(getattr(module, name)) != self._merged[name][1]:
                raise RuntimeError(
                    f"unmerge: {module.layouts[name].name} was changed after the merge, and "
                    "putting it back would lose that; change the base before merging"
                )
        for name, value in self._values.items():
            getattr(module, name).data.copy_(value)
        self._values, self._merged = {}, {}


class LoraLinear(nn.Module):
    """A sharded linear layer, frozen, with a trained low-rank adapter.

    It computes ``base(x) + lora_alpha / r * (dropout(x) A^T) B^T`` in one op. On a
    :class:`ColumnParallelLinear` every rank of the group holds all of A [r, in] (``lora_A.weight``)
    and the rows of B [out, r] (``lora_B.weight``) that belong to its output features. On a
    :class:`RowParallelLinear` it holds the columns of A that belong to its input features, and all
    of B. Called as the base is, it returns what the base returns. When ``backward()`` returns, the
    gradients of all factors are final: the sum for the replicated one is taken inside backward,
    where hooks, DDP, FSDP and ``torch.autograd.grad`` find it.

    A starts with the values of ``nn.Linear(in, r, bias=False)`` in one process, drawn by every rank
    with torch's CPU generator, whose state must be the same on all ranks of the group; B starts
    with zeros. The masks of dropout depend on the same generator's state here, on the number of the
    forward, and on the places of elements in the full input, not on the number of ranks.

    Args:
        base: its parameters will no longer require gradients.
        r: rank of the adapter.
        lora_alpha: the adapter is multiplied by ``lora_alpha / r``.
        lora_dropout: probability with which an element of the adapter's input is zero in training.
        use_rslora: multiply by ``lora_alpha / sqrt(r)`` instead.

    The factors are in fp32 on a 16-bit base, as PEFT's, else in the base's dtype. The state dict
    has ``base_layer.weight``, ``lora_A.weight`` and ``lora_B.weight``; it is loaded from full
    tensors or from this rank's shards, while the adapter is not merged. It does not have the state
    of the dropout masks: see :meth:`dropout_masks`.

    Attributes:
        merged: whether the base contains the adapter, after :meth:`merge`.

    Raises:
        TypeError: the base is another module.
        ValueError: a number is out of range.

    Source: LoRA (arXiv 2106.09685), section 4.1; rsLoRA (arXiv 2312.03732).

    Example:
        >>> base = ColumnParallelLinear.from_sizes(3, 7, ops.ALONE)
        >>> layer = LoraLinear(base, r=2, lora_alpha=4)
        >>> layer(torch.ones(5, 3)).shape
        torch.Size([5, 7])
        >>> [name for name, parameter in layer.named_parameters() if parameter.requires_grad]
        ['lora_A.weight', 'lora_B.weight']
    """

    def __init__(
        self,
        base: ColumnParallelLinear | RowParallelLinear,
        r: int,
        lora_alpha: float = 1.0,
        lora_dropout: float = 0.0,
        use_rslora: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(base, (ColumnParallelLinear, RowParallelLinear)):
            raise TypeError(
                "LoraLinear: the base must be a ColumnParallelLinear or a RowParallelLinear, got "
                f"{type(base).__name__}; build one by from_plain or from_sizes"
            )
        check_positive("LoraLinear: r", r)
        if not math.isfinite(lora_alpha):
            raise ValueError(f"LoraLinear: lora_alpha must be finite, got {lora_alpha!r}")
        if not 0 <= lora_dropout <= 1:
            raise ValueError(f"LoraLinear: lora_dropout must be in [0, 1], got {lora_dropout!r}")
        self.base_layer = base.requires_grad_(False)
        self.r, self.lora_alpha, self.lora_dropout = r, lora_alpha, lora_dropout
        self.scaling = lora_alpha / (math.sqrt(r) if use_rslora else r)
        weight, path = base.weight, base.layouts["weight"].name.removesuffix("weight")
        dtype = torch.float32 if weight.element_size() == 2 else weight.dtype
        layouts = factor_layouts(base, f"{path}lora_A.weight", f"{path}lora_B.weight", r)
        self.lora_A, self.lora_B = (
            Factor(layout, None, base.group, device=weight.device, dtype=dtype)
            for layout in layouts
        )
        self.merged = False
        self._kept = KeptParameters()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw A, set B to zero, and begin with other dropout masks."""
        factor = self.lora_A
        if not factor.weight.is_meta:
            values = torch.empty(factor.weight.shape, dtype=factor.weight.dtype, device="cpu")
            draw(values, factor.layouts["weight"], factor.group.rank, linear_weight)
            factor.weight.data.copy_(values)
        nn.init.zeros_(self.lora_B.weight)
        self._mask_key = int(torch.randint(2**63 - 1, (), device="cpu")) if self.lora_dropout else 0
        self._forwards = ForwardCounter()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        base, dropout = self.base_layer, None
        if self.merged:
            return base(input)
        if self.training and self.lora_dropout:
            masks = self.lora_dropout, self._mask_key, self._forwards
            dropout = input_dropout(base, input, *masks)
        weight, bias = base.for_use()
        factor_a, factor_b, _ = factors_for_use(base, self.lora_A, self.lora_B)
        return ops.lora_linear(
            input,
            weight,
            factor_a,
            factor_b,
            bias,
            scale=self.scaling,
            dropout=dropout,
            group=base.summed_over,
        )

    def dropout_masks(self) -> dict[str, int]:
        """Return what the next forward's masks depend on, to be saved for a job that resumes."""
        return {"key": self._mask_key, "forwards": self._forwards.count}

    def restore_dropout_masks(self, key: int, forwards: int) -> None:
        """Let the next forward draw the masks that follow a saved :meth:`dropout_masks`."""
        self._mask_key = key
        self._forwards.count = forwards

    def merge(self) -> None:
        """Add the adapter to this rank's part of the base, of which a copy is kept.

        Raises:
            NotImplementedError: FSDP has sharded the base.
            RuntimeError: it is merged.
        """
        base, factors = self.base_layer, (self.lora_A.weight, self.lora_B.weight)
        if self.merged:
            raise RuntimeError("LoraLinear.merge: the adapter is merged; unmerge() it first")
        if any(hasattr(parameter, "to_local") for parameter in (base.weight, *factors)):
            raise NotImplementedError(
                "LoraLinear.merge: FSDP has sharded the layer; merge before fully_shard"
            )
        added = low_rank_product(*factors, self.scaling)
        self._kept.replace(base, {"weight": (base.weight.detach() + added).to(base.weight.dtype)})
        self.merged = True

    def unmerge(self) -> None:
        """Put the base back, bit for bit.

        Raises:
            RuntimeError: it is not merged; or the base was changed since, which would be lost.
        """
        if not self.merged:
            raise RuntimeError("LoraLinear.unmerge: the adapter is not merged")
        self._kept.put_back(self.base_layer)
        self.merged = False

    def _save_to_state_dict(self, *args: Any) -> None:
        self._refuse_merged("base_layer.state_dict() has the merged weight alone")
        super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:
        self._refuse_merged("what is loaded would be added to the merged weight, or be lost")
        super()._load_from_state_dict(*args)

    def _refuse_merged(self, why: str) -> None:
        if self.merged:
            raise RuntimeError(
                f"LoraLinear: the adapter is merged into its base; unmerge() it first, as {why}"
            )

    def extra_repr(self) -> str:
        return f"r={self.r}, scaling={self.scaling:g}, lora_dropout={self.lora_dropout:g}"
