"""Single adapted layers: fused bases, and sizes of the whole layer at any tp."""

from __future__ import annotations

from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
from peft.tuners.lora.layer import Linear as PeftLinear
from ranks import pool
from reference import Tiny, difference, parallel
from reference_lora import config
from reference_ops import counted
from torch import nn

import parallel_ext as px
from parallel_ext.lora.layers import AdaptedLinear
from parallel_ext.nn.grad_sync import PartialGradients
from parallel_ext.nn.linear import ColumnParallelLinear, RowParallelLinear
from parallel_ext.ops import Group, copy_to_region
from parallel_ext.parallel import owners
from parallel_ext.sharding.layout import (
    TensorLayout,
    shard_along,
    shard_joined,
    shard_ranges,
    split,
)
from parallel_ext.sharding.slices import take

JOINED = {
    "one": (31,),
    "fused query, key, value": (12, 12, 12),
    "fewer key-value heads": (40, 8, 8),
    "gate and up": (13, 13),
    "more ranks than features": (2, 1, 2),
}
IN, R = 11, 3


def _column(joined: tuple[int, ...], group: Group, reverse: bool) -> tuple[Any, Any]:
    """An adapted fused base, and PEFT's around the whole one, with the same factors."""
    torch.manual_seed(5)
    whole = nn.Linear(IN, sum(joined), dtype=torch.float64)
    layouts = {
        "weight": shard_joined("fused.weight", (sum(joined), IN), 0, joined, group.size),
        "bias": shard_joined("fused.bias", (sum(joined),), 0, joined, group.size),
    }
    weight, bias = (
        nn.Parameter(take(getattr(whole, name).data, layout, group.rank), requires_grad=False)
        for name, layout in layouts.items()
    )
    partials = PartialGradients() if group.size > 1 else None
    base = ColumnParallelLinear(weight, bias, layouts, group, partials=partials)
    options = config(r=R, lora_bias=True)
    ours = AdaptedLinear(base, "default", options, R, 4, target_name="fused")
    theirs = PeftLinear(whole, "default", options, R, 4).double()
    held = layouts["weight"].ranges(group.rank)
    factor = ours.lora_B["default"]
    with torch.no_grad():
        # PEFT's B is drawn elsewhere; give it ours, piece by piece at the global places.
        full_b = torch.zeros(sum(joined), R, dtype=torch.float64)
        full_bias = torch.zeros(sum(joined), dtype=torch.float64)
        row = 0
        for start, stop in reversed(held) if reverse else held:
            full_b[start:stop] = factor.weight[row : row + stop - start]
            full_bias[start:stop] = factor.bias[row : row + stop - start]
            row += stop - start
        if group.size > 1:
            for tensor in (full_b, full_bias):
                dist.all_reduce(tensor)
        theirs.lora_A["default"].weight.copy_(ours.lora_A["default"].weight)
        theirs.lora_B["default"].weight.copy_(full_b)
        theirs.lora_B["default"].bias.copy_(full_bias)
    return ours, theirs


def _fused(joined: tuple[int, ...], reverse: bool = False) -> float:
    """The largest difference of outputs and gradients."""
    group = Group.of(dist.group.WORLD)
    ours, theirs = _column(joined, group, reverse)
    layout = ours.get_base_layer().layouts["weight"]
    x = torch.randn(2, 4, IN, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(2, 4, sum(joined), dtype=torch.float64)
    columns = shard_ranges(
        "output", (2, 4, sum(joined)), 2, map(layout.ranges, range(layout.copy_size))
    )
    output = ours(copy_to_region(x, group))
    output.backward(take(grad, columns, group.rank))
    own = [output, x.grad, ours.lora_A["default"].weight.grad, ours.lora_B["default"].weight.grad]
    own.append(ours.lora_B["default"].bias.grad)
    x.grad = None
    expected = theirs(x)
    expected.backward(grad)
    b, a = theirs.lora_B["default"], theirs.lora_A["default"]
    wanted = [take(expected.detach(), columns, group.rank), x.grad, a.weight.grad]
    wanted += [
        take(tensor, ours.lora_B["default"].layouts[name], group.rank)
        for name, tensor in (("weight", b.weight.grad), ("bias", b.bias.grad))
    ]
    return max(difference(p.detach(), q) for p, q in zip(own, wanted, strict=True))


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("joined", JOINED)
def test_an_adapter_on_a_fused_base_is_that_of_peft(joined: str, tp: int) -> None:
    assert max(pool(tp).run(_fused, JOINED[joined])) < 1e-10


def test_the_comparison_notices_swapped_blocks() -> None:
    assert max(pool(2).run(_fused, JOINED["fewer key-value heads"], True)) > 1e-2


def test_sizes_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match=r"qkv: sizes \(8, 2\) add up to 10, but dimension 0"):
        shard_joined("qkv", (12, 5), 0, (8, 2), 2)


# CogVLM #268: adapters of CogAgent's cross attention were sized 16 by 128 under model parallelism.

CROSS_HIDDEN, HIDDEN = 1024, 4096


def _cross_attention(tp: int, rank: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the factors of this rank's cross attention, as CogAgent has it."""
    group = Group("", tp, rank)

    def built(kind: type, cls: type, layout: TensorLayout) -> Any:
        weight = nn.Parameter(torch.empty(layout.local_shape(rank), device="meta"))
        base = kind(weight, None, {"weight": layout}, group)
        layer = cls(base, "default", peft.LoraConfig(r=16), 16, 16, target_name=layout.name)
        return layer.lora_A["default"].weight.shape, layer.lora_B["default"].weight.shape

    query = shard_along("query.weight", (CROSS_HIDDEN, HIDDEN), 0, split(CROSS_HIDDEN, tp, 32))
    fused = (2 * CROSS_HIDDEN, CROSS_HIDDEN)
    key_value = shard_joined("key_value.weight", fused, 0, (CROSS_HIDDEN,) * 2, tp, 32)
    dense = shard_along("dense.weight", (HIDDEN, CROSS_HIDDEN), 1, split(CROSS_HIDDEN, tp, 32))
    return {
        "query": built(ColumnParallelLinear, AdaptedLinear, query),
        "key_value": built(ColumnParallelLinear, AdaptedLinear, key_value),
        "dense": built(RowParallelLinear, AdaptedLinear, dense),
    }


@pytest.mark.parametrize(("tp", "columns"), [(2, 512), (4, 256), (8, 128)])
def test_factors_have_the_sizes_of_the_whole_layer_cut_as_its_base(tp: int, columns: int) -> None:
    for rank in range(tp):
        assert _cross_attention(tp, rank) == {
            "query": ((16, HIDDEN), (columns, 16)),
            "key_value": ((16, CROSS_HIDDEN), (2 * columns, 16)),
            "dense": ((16, columns), (HIDDEN, 16)),
        }


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_factor_of_a_shard_is_refused_with_module_sizes_and_tp(tp: int) -> None:
    layout = shard_along("cross.dense.weight", (64, 32), 1, split(32, tp))
    weight = nn.Parameter(torch.zeros(layout.local_shape(1)))
    base = RowParallelLinear(weight, None, {"weight": layout}, Group("", tp, 1))
    layer = AdaptedLinear(base, "default", peft.LoraConfig(r=4), 4, 4, target_name="cross.dense")
    state = {
        "lora_A.default.weight": torch.zeros(4, 3),
        "lora_B.default.weight": torch.zeros(64, 4),
    }
    with pytest.raises(RuntimeError) as raised:
        layer.load_state_dict(state, strict=False)
    start = 32 // tp
    assert (
        "lora_A.default.weight: got shape (4, 3); expected the full (4, 32) or this rank's shard "
        f"(4, {start}), dimension 1 [{start}, {2 * start}) of (4, 32) at tp={tp}"
    ) in str(raised.value)


def _sums(tp_blocks: tuple[int, ...]) -> dict[str, int]:
    """The collectives of a fused layer's backward."""
    group = Group.of(dist.group.WORLD)
    ours, _ = _column(tp_blocks, group, False)
    output = ours(torch.randn(3, IN, dtype=torch.float64))
    return counted(output.sum().backward)[1]


def test_a_backward_sums_the_replicated_factor_once_in_fp64() -> None:
    for counts in pool(2).run(_sums, (4, 4)):
        assert counts["all_reduce"] == 1
        assert counts["all_reduce_bytes"] == R * IN * 8


def test_factors_are_drawn_without_a_search_through_the_model() -> None:
    """One search a factor took 6 s of a Llama of 80 layers."""
    model = parallel(Tiny().model(), px.init_mesh())
    with mock.patch.object(owners, "holds_any", side_effect=AssertionError("searched")):
        for init in (True, "gaussian", False):
            config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=init)
            model = peft.get_peft_model(model, config).unload()
        with pytest.raises(AssertionError, match="searched"):
            nn.Linear(2, 2)
