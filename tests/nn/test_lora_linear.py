"""LoraLinear on sharded linears of a plain process group, against the plain layer with factors."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from philox import kept, scale
from ranks import pool
from reference_ops import counted
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from parallel_ext import ops
from parallel_ext.nn import (
    ColumnParallelLinear,
    LoraLinear,
    Recomputable,
    RowParallelLinear,
    lora,
)
from parallel_ext.sharding.layout import TensorLayout
from parallel_ext.sharding.slices import take

IN, INNER, OUT, R = 13, 127, 7, 5
TOKENS = (2, 9)


class Plain(nn.Module):
    """A linear layer with factors, as one process has it."""

    def __init__(self, base: nn.Linear, scaling: float) -> None:
        super().__init__()
        self.base_layer, self.scaling = base.requires_grad_(False), scaling
        self.lora_A = nn.Linear(base.in_features, R, bias=False, dtype=base.weight.dtype)
        self.lora_B = nn.Linear(R, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | float = 1.0) -> torch.Tensor:
        return self.base_layer(x) + self.scaling * self.lora_B(self.lora_A(x * mask))


def _pair(p: float = 0.0, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """Two plain layers, and two sharded ones with the same values."""
    group = dist.group.WORLD
    torch.manual_seed(2)
    scaling = 3 / (math.sqrt(R) if options.get("use_rslora") else R)
    plain = [Plain(nn.Linear(a, b, dtype=dtype), scaling) for a, b in ((IN, INNER), (INNER, OUT))]
    bases = [
        ColumnParallelLinear.from_plain(plain[0].base_layer, group, multiple_of=4),
        RowParallelLinear.from_plain(plain[1].base_layer, group, multiple_of=4),
    ]
    own = [LoraLinear(base, R, lora_alpha=3, lora_dropout=p, **options) for base in bases]
    for one, other in zip(own, plain, strict=True):
        one.load_state_dict(other.state_dict())  # full tensors
    return plain, own


def _shares(plain: nn.Module, own: nn.Module, rank: int) -> list[float]:
    """How far this rank's gradients are from its parts of the plain layer's."""
    found = []
    for attribute in ("lora_A", "lora_B"):
        full, factor = getattr(plain, attribute).weight.grad, getattr(own, attribute)
        difference = factor.weight.grad - take(full, factor.layouts["weight"], rank)
        found.append(difference.abs().max().item() if difference.numel() else 0.0)
    return found


def _step(p: float, checkpointed: bool, options: dict[str, Any], broken: str = "") -> list[float]:
    """Errors of output, gradient of the input and gradients of the factors."""
    plain, own = _pair(p, **options)
    group = ops.Group.of(dist.group.WORLD)
    patch: Any = nullcontext()
    if broken == "sum":
        patch = mock.patch.object(lora, "for_use", lambda parameter, *_: parameter)
    elif broken == "place":  # as if every rank's features were the first ones
        patch = mock.patch.object(
            lora,
            "input_dropout",
            lambda b, x, p, key, forwards: ops.Dropout(p, key, forwards.number("it")),
        )
    x = torch.randn(*TOKENS, IN, dtype=torch.float64)
    weights = torch.randn(*TOKENS, OUT, dtype=torch.float64)
    masks: list[Any] = [1.0, 1.0]
    if p:
        masks = [
            kept(18, layer.base_layer.in_features, p, layer._mask_key, 1).double().view(*TOKENS, -1)
            * scale(p)
            for layer in own
        ]
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    expected = plain[1](plain[0](inputs[0], masks[0]).relu(), masks[1])
    (expected * weights).sum().backward()

    def both(hidden: torch.Tensor) -> torch.Tensor:
        return own[1](own[0](ops.copy_to_region(hidden, group)).relu())

    with patch:
        hidden = inputs[1]
        output = checkpoint(both, hidden, use_reentrant=False) if checkpointed else both(hidden)
        (output * weights).sum().backward()
    assert all(
        parameter.grad is None for layer in own for parameter in layer.base_layer.parameters()
    )
    errors = [(output - expected).abs().max().item()]
    errors.append((inputs[1].grad - inputs[0].grad).abs().max().item())
    for one, other in zip(plain, own, strict=True):
        errors += _shares(one, other, group.rank)
    return errors


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_step_is_that_of_the_plain_layer(ranks: int, p: float, checkpointed: bool) -> None:
    for errors in pool(ranks).run(_step, p, checkpointed, {"use_rslora": checkpointed}):
        assert max(errors) < 1e-10


def test_gradients_that_are_not_summed_are_noticed() -> None:
    for output, x, column_a, column_b, row_a, row_b in pool(2).run(_step, 0.0, False, {}, "sum"):
        assert max(output, x, column_b, row_a) < 1e-10
        assert min(column_a, row_b) > 1e-2


def test_masks_of_other_places_are_noticed() -> None:
    assert max(pool(2).run(_step, 0.3, False, {}, "place")[1]) > 1e-2


def _first_values(dtype: torch.dtype) -> dict[str, Any]:
    """The factors as they begin, gathered, and the keys of the masks."""
    group = ops.Group.of(dist.group.WORLD)
    found: dict[str, Any] = {}
    for kind, sizes in ((ColumnParallelLinear, (IN, INNER)), (RowParallelLinear, (INNER, OUT))):
        torch.manual_seed(6)
        base = kind.from_sizes(*sizes, group, dtype=dtype)
        layer = LoraLinear(base, R, lora_dropout=0.1)
        assert layer.lora_A.weight.dtype == (
            torch.float64 if dtype == torch.float64 else torch.float
        )
        torch.manual_seed(6)
        nn.Linear(*sizes, dtype=dtype)
        wanted = nn.Linear(sizes[0], R, bias=False, dtype=layer.lora_A.weight.dtype).weight
        own = take(wanted.detach(), layer.lora_A.layouts["weight"], group.rank)
        assert torch.equal(layer.lora_A.weight, own)
        assert not layer.lora_B.weight.any()
        found[kind.__name__] = (wanted.tolist(), layer._mask_key)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_factors_and_masks_begin_equal_on_any_number_of_ranks(dtype: torch.dtype) -> None:
    found = [one for ranks in (1, 2, 3) for one in pool(ranks).run(_first_values, dtype)]
    assert all(one == found[0] for one in found)


def _listeners() -> tuple[bool, int]:
    """Whether hooks and ``torch.autograd.grad`` find the sum; the collectives of a backward."""
    (plain, _), (own, _) = _pair()
    group = ops.Group.of(dist.group.WORLD)
    x = torch.randn(*TOKENS, IN, dtype=torch.float64)
    plain(x).square().sum().backward()
    wanted, seen = plain.lora_A.weight.grad, []
    own.lora_A.weight.register_hook(lambda grad: seen.append(grad.clone()))
    own.lora_A.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    loss = own(ops.copy_to_region(x, group)).square().sum()
    seen += torch.autograd.grad(loss, own.lora_A.weight, retain_graph=True)
    _, counts = counted(loss.backward)
    assert len(seen) == 4  # the hook of the tensor runs in both
    return all((one - wanted).abs().max() < 1e-10 for one in seen), counts["all_reduce"]


def test_hooks_find_the_sum_of_one_collective() -> None:
    assert pool(2).run(_listeners) == [(True, 1)] * 2


def _data_parallel(wrap: str) -> list[float]:
    """Errors of gradients that are averaged over two dp ranks of two tp ranks each."""
    rank = dist.get_rank()
    tp, _ = dist.new_subgroups(2)
    pairs = [dist.new_group([place, place + 2]) for place in (0, 1)]
    group = ops.Group.of(tp)
    torch.manual_seed(2)
    plain = Plain(nn.Linear(IN, INNER, dtype=torch.float64), 0.5)
    own = LoraLinear(ColumnParallelLinear.from_plain(plain.base_layer, tp), R, lora_alpha=R / 2)
    own.load_state_dict(plain.state_dict())
    layouts = {name: getattr(own, name).layouts["weight"] for name in ("lora_A", "lora_B")}
    x = torch.randn(2, *TOKENS, IN, dtype=torch.float64)
    for part in x:
        (plain(part).square().sum() / 2).backward()
    if wrap == "ddp":
        model: Any = DistributedDataParallel(own, process_group=pairs[rank % 2])
    else:
        mesh = dist.device_mesh.DeviceMesh.from_group(pairs[rank % 2], "cpu")
        model = fully_shard(own, mesh=mesh)
    model(ops.copy_to_region(x[rank // 2], group)).square().sum().backward()
    errors = []
    for name, layout in layouts.items():
        gradient = getattr(own, name).weight.grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        wanted = take(getattr(plain, name).weight.grad, layout, group.rank)
        errors.append((gradient - wanted).abs().max().item())
    return errors


@pytest.mark.parametrize("wrap", ["ddp", "fully_shard"])
def test_torchs_data_parallelism_averages_the_sums(wrap: str) -> None:
    for errors in pool(4).run(_data_parallel, wrap):
        assert max(errors) < 1e-10


def _merging() -> list[float]:
    _, own = _pair()
    found = []
    for layer in own:
        features = layer.base_layer.weight.shape[1]  # this rank's
        x, weight = torch.randn(4, features, dtype=torch.float64), layer.base_layer.weight.clone()
        before = layer(x)
        layer.merge()
        found.append((layer(x) - before).abs().max().item())
        found.append((layer.base_layer(x) - before).abs().max().item())
        layer.unmerge()
        assert torch.equal(layer.base_layer.weight, weight)
        assert (layer.base_layer(x) - before).abs().max() > 1e-3
    return found


def test_a_merged_layer_computes_the_same() -> None:
    for errors in pool(3).run(_merging):
        assert max(errors) < 1e-10


def _loading() -> None:
    (_, plain), (_, own) = _pair()
    state = own.state_dict()
    assert set(state) == {
        *("base_layer.weight", "base_layer.bias", "lora_A.weight", "lora_B.weight")
    }
    other = copy.deepcopy(own)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(3.0)
    other.load_state_dict(state)  # shards
    for name, parameter in own.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name))
    rows = own.lora_A.weight.shape[0]
    with pytest.raises(RuntimeError, match=rf"lora_A.weight: got shape \({rows}, 3\); expected"):
        own.load_state_dict({**plain.state_dict(), "lora_A.weight": torch.zeros(rows, 3)})


def test_state_dicts_of_full_tensors_and_of_shards_are_loaded() -> None:
    pool(2).run(_loading)


def _alone() -> ColumnParallelLinear:
    return ColumnParallelLinear.from_sizes(3, 7, ops.ALONE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r": 0}, "r must be an integer of at least 1, got 0"),
        ({"r": 2.0}, "r must be an integer of at least 1, got 2.0"),
        ({"r": 2, "lora_alpha": math.inf}, "lora_alpha must be finite, got inf"),
        ({"r": 2, "lora_dropout": 1.5}, r"lora_dropout must be in \[0, 1\], got 1.5"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoraLinear(_alone(), **options)


def test_other_bases_are_refused() -> None:
    with pytest.raises(TypeError, match="must be a ColumnParallelLinear or a RowParallelLinear"):
        LoraLinear(nn.Linear(3, 7), r=2)


def test_a_merge_is_not_undone_twice_and_loses_no_change() -> None:
    layer = LoraLinear(_alone(), r=2)
    with pytest.raises(RuntimeError, match="is not merged"):
        layer.unmerge()
    layer.merge()
    with pytest.raises(RuntimeError, match="the adapter is merged"):
        layer.merge()
    with torch.no_grad():
        layer.base_layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="weight was changed after the merge"):
        layer.unmerge()


def test_the_state_of_a_merged_layer_is_refused() -> None:
    layer = LoraLinear(_alone(), r=2)
    state = layer.state_dict()
    layer.merge()
    with pytest.raises(RuntimeError, match="is merged into its base; unmerge"):
        layer.state_dict()
    with pytest.raises(RuntimeError, match="is merged into its base; unmerge"):
        layer.load_state_dict(state)
    layer.unmerge()
    layer.load_state_dict(state)


@pytest.mark.parametrize("changed", ["nothing", "before the copy", "after the copy"])
def test_a_copy_of_a_merged_layer_is_unmerged_unless_it_was_changed(changed: str) -> None:
    layer = LoraLinear(_alone(), r=2)
    nn.init.ones_(layer.lora_B.weight)
    plain = layer.base_layer.weight.clone()
    layer.merge()
    if changed == "before the copy":
        layer.base_layer.weight.detach().add_(1)
    copied = copy.deepcopy(layer)
    if changed == "after the copy":
        copied.base_layer.weight.detach().add_(1)
    refused = pytest.raises(RuntimeError, match="weight was changed after the merge")
    with nullcontext() if changed == "nothing" else refused:
        copied.unmerge()
        assert torch.equal(copied.base_layer.weight, plain)
    assert layer.merged


def test_evaluation_drops_nothing_and_a_new_draw_has_other_masks() -> None:
    layer = LoraLinear(_alone(), r=2, lora_dropout=0.5)
    nn.init.ones_(layer.lora_B.weight)
    x = torch.ones(4, 3)
    first, second = layer(x), layer(x)
    assert not torch.equal(first, second)
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    key = layer._mask_key
    layer.reset_parameters()
    assert layer._mask_key != key
    assert not layer.lora_B.weight.any()


class _OwnCheckpoint(torch.autograd.Function):
    """Activation checkpointing as somebody else writes it."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.function, ctx.x = function, x.detach()
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            output = ctx.function(x)
        torch.autograd.backward(output, grad)
        return None, x.grad


def _dropping() -> tuple[LoraLinear, torch.Tensor]:
    layer = LoraLinear(_alone(), r=2, lora_dropout=0.5)
    nn.init.ones_(layer.lora_B.weight)
    return layer, torch.ones(4, 3, requires_grad=True)


def _gradient(layer: LoraLinear, function: Any, x: torch.Tensor) -> torch.Tensor:
    layer.lora_A.weight.grad = None
    layer.restore_dropout_masks(key=5, forwards=0)
    outputs = [function(x), function(x)]  # each with masks of its own
    with torch.no_grad():
        function(x)
    (outputs[1] + 3 * outputs[0]).sum().backward()
    assert layer.dropout_masks()["forwards"] == 3
    return layer.lora_A.weight.grad


@pytest.mark.parametrize("inner", [None, False, True], ids=["once", "not reentrant", "reentrant"])
@pytest.mark.parametrize("kind", ["not reentrant", "reentrant", "own"])
def test_a_layer_that_is_recomputed_has_the_masks_of_its_forward(
    kind: str, inner: bool | None
) -> None:
    layer, x = _dropping()

    def twice(x: torch.Tensor) -> torch.Tensor:
        if inner is None:
            return layer(x)
        return checkpoint(layer, x, use_reentrant=inner)

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        if kind == "own":
            return _OwnCheckpoint.apply(Recomputable(twice), x)
        return checkpoint(twice, x, use_reentrant=kind == "reentrant")

    assert torch.equal(_gradient(layer, checkpointed, x), _gradient(layer, layer, x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_in_one_function_find_their_forwards_again(reentrant: bool) -> None:
    """Of two layers one runs twice; a copy, and a forward that fails, do not disturb them."""
    (layer, x), (other, _) = _dropping(), _dropping()

    def function(x: torch.Tensor) -> torch.Tensor:
        return layer(x) + 5 * layer(2 * x) * other(x).sum() + other(x).mean()

    gradients = []
    for checkpointed in (False, True):
        for each in (layer, other):
            each.restore_dropout_masks(key=7, forwards=3)
            each.zero_grad()
        with pytest.raises(ValueError, match="the last dimension must be 3"):
            checkpoint(layer, torch.ones(2, 2), use_reentrant=reentrant)
        output = checkpoint(function, x, use_reentrant=reentrant) if checkpointed else function(x)
        copy.deepcopy(layer)(x)
        layer.restore_dropout_masks(key=7, forwards=0)  # as a checkpoint that is loaded
        layer(x)
        output.sum().backward()
        gradients.append([each.lora_A.weight.grad for each in (layer, other)])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize("early", [False, True])
def test_a_graph_that_is_kept_is_recomputed_with_the_same_masks(early: bool) -> None:
    layer, x = _dropping()
    with set_checkpoint_early_stop(early):
        output = checkpoint(layer, x, use_reentrant=False).sum()
        first = torch.autograd.grad(output, layer.lora_A.weight, retain_graph=True)
        assert torch.equal(*first, *torch.autograd.grad(output, layer.lora_A.weight))


def test_a_recomputation_of_no_known_forward_is_refused() -> None:
    layer, x = _dropping()
    output = _OwnCheckpoint.apply(layer, x)
    with pytest.raises(RuntimeError, match="wrap the function that is recomputed in"):
        output.sum().backward()


def test_a_recomputation_of_more_than_the_forward_is_refused() -> None:
    layer, x = _dropping()
    times = iter((1, 2))
    output = checkpoint(lambda x: sum(layer(x) for _ in range(next(times))), x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="runs 2 times .* but ran 1 times in its forward"):
        output.sum().backward()


def test_a_layer_that_resumes_draws_the_masks_that_would_have_followed() -> None:
    layer = LoraLinear(_alone(), r=2, lora_dropout=0.5)
    nn.init.ones_(layer.lora_B.weight)
    x, resumed = torch.ones(4, 3), copy.deepcopy(layer)
    layer(x)
    masks, following = layer.dropout_masks(), layer(x)
    resumed.reset_parameters()
    resumed.load_state_dict(layer.state_dict())
    assert not torch.equal(resumed(x), following)
    resumed.restore_dropout_masks(**masks)
    assert torch.equal(resumed(x), following)


def test_a_layer_on_the_meta_device_draws_its_values_later() -> None:
    base = ColumnParallelLinear.from_sizes(3, 7, ops.ALONE, device="meta")
    layer = LoraLinear(base, r=2)
    assert layer.lora_A.weight.is_meta
    layer.to_empty(device="cpu")
    torch.manual_seed(8)
    layer.reset_parameters()
    torch.manual_seed(8)
    assert torch.equal(layer.lora_A.weight, nn.Linear(3, 2, bias=False).weight)


def _replicated_rows(adapted: bool, broken: bool) -> float:
    """Gradients of rows that both ranks hold, and use in different ways (as key-value heads)."""
    group = ops.Group.of(dist.group.WORLD)
    torch.manual_seed(2)
    plain: nn.Module = nn.Linear(IN, OUT, dtype=torch.float64)
    shapes = {name: tuple(each.shape) for name, each in plain.named_parameters()}
    own: nn.Module = ColumnParallelLinear(
        *(nn.Parameter(each.detach().clone()) for each in plain.parameters()),
        {name: TensorLayout(name, shape) for name, shape in shapes.items()},
        group,
        replicas=ops.ALONE if broken else group,
    )
    if adapted:
        plain, own = Plain(plain, 1.0), LoraLinear(own, R, lora_alpha=R)
        own.load_state_dict(plain.state_dict())
    x = torch.randn(4, IN, dtype=torch.float64)
    uses = torch.randn(group.size, 4, OUT, dtype=torch.float64)
    (plain(x) * uses.sum(0)).sum().backward()
    (own(ops.copy_to_region(x, group)) * uses[group.rank]).sum().backward()
    return max(
        (parameter.grad - plain.get_parameter(name).grad).abs().max().item()
        for name, parameter in own.named_parameters()
        if parameter.requires_grad
    )


@pytest.mark.parametrize("adapted", [False, True])
def test_gradients_of_rows_on_several_ranks_are_summed(adapted: bool) -> None:
    assert max(pool(2).run(_replicated_rows, adapted, False)) < 1e-10
    assert max(pool(2).run(_replicated_rows, adapted, True)) > 1e-2
