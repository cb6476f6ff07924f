"""LoRA on experts, at any (dp, tp, ep), trains as PEFT does on the single-process model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import pool
from reference import (
    assert_within,
    difference,
    gradient_differences,
    gradients_of,
    shard_differences,
    worst,
)
from reference_lora import BOTH, DOWN, GATE_UP, adapted_experts, config, plain
from reference_mixtral import (
    Layout,
    TinyMixtral,
    accumulated_differences,
    job_loss,
    own_batch,
    training_differences,
)
from reference_ops import counted

import parallel_ext as px
from parallel_ext.lora import experts
from parallel_ext.lora.experts import ParamWrapper
from parallel_ext.parallel.state import state_of

TINY = TinyMixtral(num_experts=5)  # which no number of ranks divides
STEPS = 2
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def _pair(
    directory: Path, tiny: TinyMixtral, layout: Layout, changes: dict[str, Any], zero: int
) -> tuple[Any, Any]:
    """PEFT's model and ours, with the same adapter."""
    model = adapted_experts(tiny, layout, **changes)
    model.save_pretrained(directory)
    return plain(directory, tiny), px.data_parallel(model, layout.mesh(), zero)


def _parity(
    directory: Path,
    tiny: TinyMixtral,
    layout: Layout,
    changes: dict[str, Any],
    zero: int = 2,
    checkpoints: str = "",
) -> dict[str, float]:
    """Of losses, every gradient, norms and weights after AdamW steps."""
    reference, model = _pair(directory, tiny, layout, changes, zero)
    if checkpoints:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": checkpoints == "reentrant"})
    return training_differences(reference, model, layout.mesh(), tiny, STEPS)


def _check(directory: Path, tiny: TinyMixtral, layout: Layout, *args: Any) -> None:
    for differences in pool(layout.world).run(_parity, directory, tiny, layout, *args):
        assert any(".lora_B." in name and ".grad" in name for name in differences)
        error, name = worst(differences)
        assert error <= 1e-9, f"{name} differs by {error:.1e}"


@pytest.mark.parametrize(  # with those of the tests below
    "layout", [Layout(1, 3, 3), Layout(1, 4, 2), Layout(2, 2, 1), Layout(2, 2, 4)], ids=str
)
def test_losses_gradients_norms_and_steps_are_those_of_peft(tmp_path: Path, layout: Layout) -> None:
    _check(tmp_path, TINY, layout, {"target_modules": ATTENTION})


ONE_BATCH, TWO_BATCHES = Layout(1, 2, 2), Layout(2, 1, 2)
CASES: dict[str, tuple[TinyMixtral, Layout, dict[str, Any]]] = {
    "gate and up alone": (TINY, ONE_BATCH, {"target_parameters": [GATE_UP]}),
    "down alone": (TINY, TWO_BATCHES, {"target_parameters": [DOWN]}),
    "rank 1": (TINY, TWO_BATCHES, {"r": 1}),
    "square tensors": (TinyMixtral(num_experts=5, inner=16), ONE_BATCH, {"r": 5}),
    "other ranks and scales": (
        TINY,
        ONE_BATCH,
        {
            "rank_pattern": {r".*\.gate_up_proj": 3},
            "alpha_pattern": {r".*\.down_proj": 2},
            "use_rslora": True,
        },
    ),
    "an idle expert": (TinyMixtral(num_experts=5, skew="an idle expert"), ONE_BATCH, {}),
    "an idle rank": (
        TinyMixtral(num_experts=5, skew="an idle rank", balance=True),
        TWO_BATCHES,
        {},
    ),
    "rows of tokens": (
        TinyMixtral(num_experts=5, tied=True),
        Layout(2, 2, 1),
        {"trainable_token_indices": [30, 0, 13, 6]},
    ),
    "a head trained whole": (TINY, TWO_BATCHES, {"modules_to_save": ["lm_head"]}),
}


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_peft_with(tmp_path: Path, case: str) -> None:
    tiny, layout, changes = CASES[case]
    _check(tmp_path, tiny, layout, changes)


@pytest.mark.parametrize(
    ("layout", "zero", "checkpoints"),
    [
        (Layout(2, 1, 2), 3, ""),
        (Layout(2, 2, 2), 3, "not reentrant"),
        (Layout(2, 1, 1), 2, "not reentrant"),
        (Layout(1, 2, 2), 2, "not reentrant"),
        (Layout(1, 2, 1), 2, "reentrant"),
    ],
    ids=str,
)
def test_stages_and_checkpoints_change_nothing(
    tmp_path: Path, layout: Layout, zero: int, checkpoints: str
) -> None:
    _check(tmp_path, TINY, layout, {}, zero, checkpoints)


def _accumulated(directory: Path, layout: Layout, how: str) -> dict[str, float]:
    """Gradients of two micro-batches, perhaps with some factors frozen."""
    reference, model = _pair(directory, TINY, layout, {}, 2)
    for each in (reference, model):
        for name, parameter in each.named_parameters():
            if how == "frozen factors" and "lora_A" in name:
                parameter.requires_grad_(False)
    return accumulated_differences(reference, model, layout.mesh(), TINY, False)


@pytest.mark.parametrize("how", ["", "frozen factors"])
@pytest.mark.parametrize("layout", [Layout(1, 2, 1), Layout(2, 1, 2)], ids=str)
def test_gradients_accumulate(tmp_path: Path, layout: Layout, how: str) -> None:
    assert_within(pool(layout.world).run(_accumulated, tmp_path, layout, how), 1e-9)


def _two_adapters(directory: Path, layout: Layout) -> dict[str, float]:
    model = adapted_experts(TINY, layout)
    model.add_adapter("second", config(**{**BOTH, "r": 2}))
    model.save_pretrained(directory)
    reference = plain(directory, TINY)
    reference.load_adapter(directory / "second", "second", is_trainable=True)
    differences = {}
    for active in (["default", "second"], ["second"]):
        for each in (reference, model):
            each.zero_grad()
            each.base_model.set_adapter(active)
        whole, own = own_batch(TINY, layout.mesh())
        found = gradient_differences(reference, model, whole, own)
        differences |= {f"{name} with {active}": error for name, error in found.items()}
    for each in (reference, model):
        each.delete_adapter("second")
        each.set_adapter("default")
        each.zero_grad()
        each(**whole).loss.backward()
    return differences | shard_differences(model, gradients_of(reference), True)


def test_two_adapters_train_at_once_and_one_can_go(tmp_path: Path) -> None:
    assert_within(pool(2).run(_two_adapters, tmp_path, Layout(1, 2, 2)), 1e-9)


# What is sent.


def _sums_of_a_backward(layout: Layout) -> list[int]:
    """All-reduces with adapters on the attention, and on the experts as well."""
    counts = []
    for changes in ({"target_parameters": None}, {}):
        model = adapted_experts(TINY, layout, target_modules=ATTENTION, **changes)
        px.data_parallel(model, layout.mesh())
        loss = model(**own_batch(TINY, layout.mesh())[1]).loss
        counts.append(counted(loss.backward)[1].get("all_reduce", 0))
    return counts


@pytest.mark.parametrize(("layout", "more"), [(Layout(1, 2, 1), 0), (Layout(2, 2, 1), 1)], ids=str)
def test_adapters_on_experts_share_a_sum_or_add_one(layout: Layout, more: int) -> None:
    for attention, both in pool(layout.world).run(_sums_of_a_backward, layout):
        assert both == attention + more


# What the comparison notices.


def _columns_swapped(a: torch.Tensor, b: torch.Tensor, number: int) -> Any:
    swapped = b.view(len(b), number, -1).permute(1, 0, 2).contiguous()
    return a.view(number, -1, a.size(1)), swapped


def _broken(directory: Path, layout: Layout, what: str) -> float:
    tiny = TinyMixtral(num_experts=4, inner=16)  # all shapes alike
    reference, model = _pair(directory, tiny, layout, {}, 2)
    state, kept = state_of(model), experts.per_expert
    for module in model.modules():
        if isinstance(module, ParamWrapper) and what == "no sum over replicas":
            module.get_base_layer().replicas = px.ops.ALONE
        elif isinstance(module, ParamWrapper) and what == "no scale of gradients":
            module.get_base_layer().grad_scale = 1.0
    if what == "a mean over other ranks":
        (parameters,) = state.partials._averaged.values()
        state.partials._averaged = {state.mesh.dp: parameters}
    elif what == "swapped columns":
        experts.per_expert = _columns_swapped
    try:
        return worst(gradient_differences(reference, model, *own_batch(tiny, layout.mesh())))[0]
    finally:
        experts.per_expert = kept


@pytest.mark.parametrize(
    ("what", "layout"),
    [
        ("swapped columns", Layout(1, 2, 2)),
        ("no sum over replicas", Layout(1, 2, 1)),
        ("no scale of gradients", Layout(2, 1, 2)),
        ("a mean over other ranks", Layout(2, 1, 2)),
    ],
)
def test_the_comparison_notices(tmp_path: Path, what: str, layout: Layout) -> None:
    assert max(pool(layout.world).run(_broken, tmp_path, layout, what)) > 1e-2


# Lower precision: adapters in fp32 over a bf16 base are PEFT's default.


def _bf16(directory: Path, layout: Layout) -> tuple[set[str], float]:
    """The dtypes of the factors' gradients, and how far the loss is from PEFT's."""
    tiny = TinyMixtral(num_experts=5, dtype=torch.bfloat16)
    reference, model = _pair(directory, tiny, layout, {}, 2)
    whole, own = own_batch(tiny, layout.mesh())
    loss = model(**own).loss
    loss.backward()
    dtypes = {str(p.grad.dtype) for p in model.parameters() if p.requires_grad}
    with torch.no_grad():
        return dtypes, difference(job_loss(loss, layout.mesh()), reference(**whole).loss)


def test_factors_in_fp32_train_over_a_bf16_base(tmp_path: Path) -> None:
    for dtypes, error in pool(2).run(_bf16, tmp_path, Layout(2, 1, 2)):
        assert dtypes == {"torch.float32"}
        assert error <= 2e-2
