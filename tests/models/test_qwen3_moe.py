"""A Qwen3-MoE spread over any (dp, tp, ep) trains, saves and generates as the single process."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from ranks import pool
from reference import (
    FLOOR,
    assert_at_most_twice,
    assert_within,
    batch,
    exact,
    gradients_of,
    parallel,
    saved_tensors,
    shard_differences,
    worst,
)
from reference_mixtral import (
    Layout,
    TinyQwen3Moe,
    accumulated_differences,
    adapter_differences,
    assert_refused,
    batches,
    errors_in,
    load_and_save,
    own_batch,
    parity,
    spread,
)
from reference_ops import counted
from torch import nn

import parallel_ext as px
from parallel_ext import ops
from parallel_ext.nn.grad_sync import PartialGradients
from parallel_ext.nn.used_in_parts import UsedInParts

TINY = TinyQwen3Moe()
SHARED = TinyQwen3Moe(key_value_heads=1)  # under tp, ranks hold the same key-value head


def _options(**options: Any) -> TinyQwen3Moe:
    layers = options.pop("layers", 2)
    return TinyQwen3Moe(layers=layers, options=tuple(options.items()))


CASES = {
    "one rank": (TINY, Layout(1, 1, 1), 2),
    "cut heads": (TINY, Layout(1, 2, 1), 2),
    "cut heads and experts": (TINY, Layout(1, 2, 2), 2),
    "three ranks for five experts": (TINY, Layout(1, 3, 3), 2),
    "experts dealt to batches": (TINY, Layout(2, 1, 2), 3),
    "two batches, four ranks of experts": (TINY, Layout(2, 2, 4), 2),
    "ZeRO 3": (TINY, Layout(2, 2, 2), 3),
    "four batches": (TINY, Layout(4, 1, 2), 2),
    "shared key-value heads, one batch": (SHARED, Layout(1, 4, 2), 2),
    "shared key-value heads": (SHARED, Layout(2, 2, 1), 2),
    "biases": (_options(attention_bias=True), Layout(1, 2, 2), 2),
    "a sliding window": (_options(use_sliding_window=True, sliding_window=3), Layout(1, 2, 2), 2),
    "weights as drawn": (_options(norm_topk_prob=False), Layout(2, 1, 2), 2),
    "tied weights": (TinyQwen3Moe(tied=True), Layout(1, 2, 2), 2),
    "every third layer sparse": (
        _options(mlp_only_layers=[], decoder_sparse_step=3, layers=3),
        Layout(1, 2, 2),
        2,
    ),
    "all layers sparse": (_options(mlp_only_layers=[]), Layout(2, 1, 1), 2),
    "no layer sparse": (_options(num_experts=0), Layout(2, 2, 1), 3),
    "an expert without tokens": (TinyQwen3Moe(skew="an idle expert"), Layout(1, 2, 2), 2),
    "balance loss": (TinyQwen3Moe(balance=True, skew="zipf"), Layout(1, 2, 2), 2),
    "balance loss of two batches": (TinyQwen3Moe(balance=True, skew="zipf"), Layout(2, 2, 4), 2),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES)
def test_training_equals_the_single_process(case: str) -> None:
    tiny, layout, zero = CASES[case]
    assert_within(pool(layout.world).run(parity, tiny, layout, zero))


def test_fp32_errs_at_most_twice_as_much_as_one_process() -> None:
    assert_at_most_twice(
        pool(2).run(errors_in, TINY, Layout(1, 2, 2), torch.float32), FLOOR[torch.float32]
    )


def _backwards(layout: Layout, zero: int, how: str) -> dict[str, float]:
    """Gradients of two batches that come one after the other."""
    reference, model, mesh = spread(SHARED, layout, zero)
    if "reentrant" in how:
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
    return accumulated_differences(reference, model, mesh, SHARED, how != "no_sync")


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant", "no_sync"])
@pytest.mark.parametrize(("layout", "zero"), [(Layout(1, 2, 2), 2), (Layout(2, 2, 4), 3)], ids=str)
def test_gradients_are_kept_by_checkpointing_and_accumulation(
    layout: Layout, zero: int, how: str
) -> None:
    assert_within(pool(layout.world).run(_backwards, layout, zero, how))


# The norms of heads: each rank normalises its own.


def _norms(layout: Layout, how: str) -> tuple[dict[str, float], dict[str, int]]:
    """Differences of the gradients of norms of heads, and the collectives of the backward."""
    reference, mesh = TINY.model(), layout.mesh()
    model = parallel(reference, mesh)
    if how == "copied":
        model = copy.deepcopy(model)
    for layer in model.model.layers:
        if how == "not summed":
            layer.self_attn.q_norm.used_in_parts.group = ops.ALONE
        elif how == "frozen":
            for one in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                one.requires_grad_(False)
    px.data_parallel(model, mesh)
    whole, own = own_batch(TINY, mesh)
    reference(**whole).loss.backward()
    loss = model(**own).loss
    _, counts = counted(loss.backward)
    differences = {}
    if how != "frozen":
        differences = shard_differences(model, gradients_of(reference), True)
    return {name: error for name, error in differences.items() if "_norm." in name}, counts


@pytest.mark.parametrize("layout", [Layout(1, 2, 2), Layout(2, 2, 1)], ids=str)
def test_parity_notices_a_missing_sum_of_a_norms_gradient(layout: Layout) -> None:
    for differences, _ in pool(layout.world).run(_norms, layout, "not summed"):
        assert differences["model.layers.0.self_attn.q_norm.weight"] > 1e-3
        assert differences["model.layers.0.self_attn.k_norm.weight"] < 1e-10


def test_a_copy_of_the_model_sums_its_own_gradients() -> None:
    for differences, _ in pool(2).run(_norms, Layout(1, 2, 2), "copied"):
        assert worst(differences)[0] <= 1e-10


def test_all_norms_together_take_one_collective_and_none_when_frozen() -> None:
    counts = {}
    for how in ("trained", "frozen"):
        _, counts[how] = pool(2).run(_norms, Layout(1, 2, 2), how)[0]
    assert counts["trained"]["all_reduce"] == counts["frozen"]["all_reduce"] + 1


def test_a_module_keeps_its_own_parameters_also_after_a_forward_that_raises() -> None:
    norm = nn.LayerNorm(3)
    UsedInParts("norm", ops.ALONE).attach(norm, PartialGradients())
    norm(torch.ones(2, 3))
    assert "weight" not in vars(norm)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        norm(torch.ones(2, 4))
    assert "weight" not in vars(norm)


# Files.


def _of_hub(directory: Path) -> None:
    """Let the configuration name the number of experts as the files of the hub do."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["num_experts"] = config.pop("num_local_experts")
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("first", "second"),
    [(Layout(1, 2, 2), Layout(2, 1, 2)), (Layout(2, 2, 4), Layout(1, 3, 3))],
    ids=str,
)
def test_files_are_those_of_the_hub_at_every_layout(
    first: Layout, second: Layout, tmp_path: Path
) -> None:
    tiny = TinyQwen3Moe(dtype=torch.float32)
    whole, ours, again = (tmp_path / name for name in ("whole", "ours", "again"))
    tiny.model().save_pretrained(whole)
    _of_hub(whole)
    expected = saved_tensors(whole)
    assert "model.layers.1.mlp.experts.4.gate_proj.weight" in expected
    assert "model.layers.0.mlp.gate_proj.weight" in expected
    for layout, source, target in ((first, whole, ours), (second, ours, again)):
        for error, name in pool(layout.world).run(load_and_save, layout, source, target, tiny):
            assert error == 0, name
        found = saved_tensors(target)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
    plain = transformers.AutoModelForCausalLM.from_pretrained(again, experts_implementation="eager")
    one = batch(tiny.vocab_size)
    assert torch.equal(plain.train()(**one).logits, tiny.model()(**one).logits)


def _generated(layout: Layout) -> tuple[list[int], list[int]]:
    options = (("use_sliding_window", True), ("sliding_window", 4))
    tiny = TinyQwen3Moe(dtype=torch.float32, skew="zipf", options=options)
    reference, model, mesh = spread(tiny, layout)
    prompt = torch.tensor([[5, 6, 7, 8, 9, 10 + mesh.dp_rank]])
    wanted = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    wanted["attention_mask"] = torch.ones_like(prompt)
    one, other = (m.eval().generate(prompt, **wanted)[0].tolist() for m in (reference, model))
    return one, other


@pytest.mark.parametrize("layout", [Layout(1, 2, 2), Layout(2, 1, 2)], ids=str)
def test_greedy_generation_equals_the_single_process(layout: Layout) -> None:
    for expected, found in pool(2).run(_generated, layout):
        assert found == expected
        assert len(set(found)) > 3


# Adapters.


def _adapter(layout: Layout, whole: list[str]) -> dict[str, float]:
    targets = ["q_proj", "v_proj", "o_proj"]
    return adapter_differences(SHARED, layout, r=3, target_modules=targets, modules_to_save=whole)


@pytest.mark.parametrize("layout", [Layout(1, 2, 2), Layout(2, 2, 4)], ids=str)
def test_adapters_train_as_in_peft_and_so_do_norms_and_keys_beside_them(layout: Layout) -> None:
    whole = ["q_norm", "k_norm", "k_proj"]
    for differences in pool(layout.world).run(_adapter, layout, whole):
        error, name = worst(differences)
        assert error <= 1e-5, name  # the factors are fp32
        assert {name.split(".")[-4] for name in differences if "to_save" in name} == set(whole)


def _adapter_in_files(path: Path) -> tuple[float, float]:
    """The loss with an adapter that was trained, and with the same read back."""
    mesh, (one, _) = Layout(1, 2, 2).mesh(), batches(TINY, 1)
    torch.manual_seed(11)
    config = px.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], modules_to_save=["q_norm"])
    model = peft.get_peft_model(parallel(TINY.model(), mesh), config)
    model(**one).loss.backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0).step()
    model.save_pretrained(path)
    again = peft.PeftModel.from_pretrained(parallel(TINY.model(), mesh), path)
    return model(**one).loss.item(), again.train()(**one).loss.item()


def test_an_adapter_and_norms_beside_it_are_read_back_and_by_peft(tmp_path: Path) -> None:
    plain = exact(TINY.model())
    before = plain(**batches(TINY, 1)[0]).loss.item()
    for trained, loaded in pool(2).run(_adapter_in_files, tmp_path):
        assert loaded == pytest.approx(trained, rel=1e-6)  # the factors are fp32
    plain = peft.PeftModel.from_pretrained(plain, tmp_path).double()
    assert plain(**batches(TINY, 1)[0]).loss.item() == pytest.approx(trained, rel=1e-6)
    assert abs(trained - before) > 1e-2


# check_gradients, and what does not fit.


def _checked(layout: Layout, broken: bool, layers: int | None) -> px.GradientReport:
    _, model, mesh = spread(TinyQwen3Moe(dtype=torch.float32), layout)
    if broken:
        model.model.layers[0].self_attn.k_norm.used_in_parts.group = ops.ALONE
    return px.check_gradients(model, own_batch(TINY, mesh)[1], layers)


def test_check_gradients_agrees_and_finds_a_missing_sum() -> None:
    for layers in (None, 1):  # the first one is dense
        for report in pool(4).run(_checked, Layout(2, 2, 4), False, layers):
            assert report.worst[1] < 1e-4, report
            assert any("q_norm" in name for name in report.differences)
    for report in pool(4).run(_checked, Layout(2, 2, 4), True, None):
        assert "layers.0.self_attn.k_norm" in report.worst[0]
        assert report.worst[1] > 0.1


def _only_dense() -> None:
    parallel(_options(mlp_only_layers=[0, 1]).model(), Layout(1, 2, 2).mesh())


def _norm_over_all_heads() -> None:
    model = TINY.model()
    attention = model.model.layers[1].self_attn
    attention.q_norm = type(attention.q_norm)(24)
    parallel(model, Layout(1, 2, 2).mesh())


def _without_norm() -> None:
    model = TINY.model()
    del model.model.layers[1].self_attn.k_norm
    parallel(model, Layout(1, 2, 2).mesh())


def _other_experts() -> None:
    model = TINY.model()
    model.model.layers[1].mlp.experts.__class__ = type("Fast", (nn.Module,), {})
    parallel(model, Layout(1, 2, 2).mesh())


def _router_adapted() -> None:
    model = parallel(TINY.model(), Layout(1, 2, 2).mesh())
    peft.get_peft_model(model, px.LoraConfig(target_modules=r".*\.mlp\.gate"))


REFUSALS = {
    "only dense layers": (_only_dense, 2, "ep=2, but no layer of this 'qwen3_moe' has experts"),
    "a norm over all heads": (
        _norm_over_all_heads,
        2,
        "layers.1.self_attn.q_norm.weight has the shape (24,), but a norm of single heads has (6,)",
    ),
    "a norm that is not there": (_without_norm, 2, "names: model.layers.1.self_attn.k_norm"),
    "other experts": (_other_experts, 2, "experts is a Fast, not HuggingFace's Qwen3MoeExperts"),
    "adapters on routers": (
        _router_adapted,
        2,
        "an adapter on model.layers.1.mlp.gate.weight is not",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_is_refused(case: str) -> None:
    assert_refused(__name__, case)
