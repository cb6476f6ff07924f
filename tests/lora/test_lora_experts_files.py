"""Adapters on experts: PEFT's files at any layout, merging, and what is refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from ranks import pool
from reference import Tiny, batch, exact, mesh_of, parallel
from reference_lora import (
    BOTH,
    DOWN,
    FILE,
    GATE_UP,
    adapted_experts,
    check_life,
    config,
    files_of_layouts,
    logits_in_life,
    logits_of,
    plain,
)
from reference_mixtral import Layout, TinyMixtral
from safetensors.torch import load_file, save_file

import parallel_ext as px
from parallel_ext.parallel.state import state_of

TINY = TinyMixtral(num_experts=5)
INPUTS = {k: v for k, v in batch(TINY.vocab_size).items() if k != "labels"}
_logits = partial(logits_of, inputs=INPUTS)
LAYOUTS = [Layout(1, 1, 1), Layout(1, 2, 2), Layout(2, 1, 2), Layout(2, 2, 2), Layout(1, 3, 3)]


def _save(directory: Path, layout: Layout, tiny: TinyMixtral, changes: dict[str, Any]) -> Any:
    """Saves a new adapter; the sizes that PEFT's users see."""
    model = adapted_experts(tiny, layout, **changes)
    px.data_parallel(model, layout.mesh())
    model.save_pretrained(directory)
    return _sizes(model)


def _sizes(model: peft.PeftModel) -> Any:
    """The numbers of trained parameters and of all; inputs and outputs of each adapted tensor."""
    features = [
        (module.parameter_name, module.in_features, module.out_features)
        for module in model.modules()
        if isinstance(module, peft.tuners.lora.ParamWrapper)
    ]
    return model.get_nb_trainable_parameters(), features


@pytest.mark.parametrize("init", [True, False, "gaussian"])
def test_files_do_not_depend_on_the_layout_and_are_those_of_peft(
    tmp_path: Path, init: bool | str
) -> None:
    tiny = TinyMixtral(num_experts=5, dtype=torch.bfloat16)
    changes: dict[str, Any] = {
        **{"r": 16, "init_lora_weights": init, "base_model_name_or_path": "x"},
        "target_modules": ["q_proj"],
    }
    sizes = [
        pool(layout.world).run(_save, tmp_path / str(layout), layout, tiny, changes)
        for layout in LAYOUTS[:3]
    ]
    by_peft = peft.get_peft_model(
        tiny.model(), peft.LoraConfig(lora_alpha=7, **{**BOTH, **changes})
    )
    by_peft.save_pretrained(tmp_path / "peft")
    assert all(found == _sizes(by_peft) for each in sizes for found in each)
    one, expected = files_of_layouts(tmp_path, [str(layout) for layout in LAYOUTS[:3]])
    for name, value in one.items():  # the same distributions
        ours, theirs = (
            (t.float().std().item(), t.abs().max().item()) for t in (value, expected[name])
        )
        assert ours[0] == pytest.approx(theirs[0], rel=0.15), name
        if init != "gaussian":
            assert ours[1] == pytest.approx(theirs[1], rel=0.05), name


def _load(directory: Path, layout: Layout) -> dict[str, torch.Tensor]:
    base = parallel(TINY.model(), layout.mesh())
    found, merged = logits_in_life(base, directory, INPUTS)
    assert [n for n, _ in merged.named_parameters()] == [
        n for n, _ in TINY.model().named_parameters()
    ]
    merged.save_pretrained(directory / "merged")
    return found


def _by_peft(directory: Path, **changes: Any) -> None:
    torch.manual_seed(3)
    options = config(**{**BOTH, **changes}).to_dict()
    peft.get_peft_model(TINY.model(), peft.LoraConfig(**options)).save_pretrained(directory)


def _assert_merged_files(directory: Path, expected: torch.Tensor) -> None:
    """The merged model that lies in a directory answers with these logits."""
    again = transformers.AutoModelForCausalLM.from_pretrained(
        directory / "merged", dtype=torch.float64, experts_implementation="eager"
    )
    assert (_logits(exact(again)) - expected).abs().max() < 1e-9 * expected.abs().max()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_adapter_of_peft_loads_at_any_layout_and_merges(tmp_path: Path, layout: Layout) -> None:
    _by_peft(tmp_path, target_modules=["o_proj"])
    expected = _logits(plain(tmp_path, TINY))
    for found in pool(layout.world).run(_load, tmp_path, layout):
        check_life(found, expected, biased=False)
    _assert_merged_files(tmp_path, expected)


def _merge_after_training(directory: Path, layout: Layout, zero: int) -> torch.Tensor:
    model = peft.PeftModel.from_pretrained(
        parallel(TINY.model(), mesh := layout.mesh()), directory, is_trainable=True
    )
    px.data_parallel(model, mesh, zero)
    model.train()(**INPUTS, labels=INPUTS["input_ids"]).loss.backward()
    merged = model.merge_and_unload()
    merged.save_pretrained(directory / "merged")
    return logits_of(merged, INPUTS)


def _changed(name: str, value: torch.Tensor) -> torch.Tensor:
    return 1.5 * value if any(part in name for part in ("lm_head", "norm", "experts")) else value


@pytest.mark.parametrize(
    ("layout", "zero", "whole"),
    [
        (Layout(2, 1, 1), 2, ["lm_head", "norm"]),
        (Layout(3, 1, 1), 3, []),
        (Layout(2, 1, 2), 2, []),
        (Layout(2, 2, 2), 3, ["lm_head", "norm"]),
        (Layout(2, 1, 1), 2, ["experts"]),
    ],
    ids=str,
)
def test_what_dp_ranks_share_out_is_merged_for_good(
    tmp_path: Path, layout: Layout, zero: int, whole: list[str]
) -> None:
    adapted = ["q_proj", "o_proj", *({"lm_head"} - {*whole})]
    experts = [] if "experts" in whole else [GATE_UP, DOWN]
    _by_peft(tmp_path, target_modules=adapted, target_parameters=experts, modules_to_save=whole)
    tensors = load_file(tmp_path / FILE)
    trained = {name: _changed(name, value) for name, value in tensors.items()}
    save_file(trained, tmp_path / FILE)
    expected = _logits(plain(tmp_path, TINY))
    for found in pool(layout.world).run(_merge_after_training, tmp_path, layout, zero):
        assert (found - expected).abs().max() < 1e-9 * expected.abs().max()
    _assert_merged_files(tmp_path, expected)


def _unload(directory: Path, layout: Layout) -> None:
    base = parallel(TINY.model(), mesh := layout.mesh())
    model = peft.PeftModel.from_pretrained(base, directory, is_trainable=True)
    px.data_parallel(model, mesh, 2).unload().save_pretrained(directory / "merged")


def test_what_was_trained_whole_stays_without_the_adapter(tmp_path: Path) -> None:
    _by_peft(tmp_path, target_modules=["q_proj"], modules_to_save=["lm_head"])
    tensors = load_file(tmp_path / FILE)
    trained = {name: _changed(name, value) for name, value in tensors.items()}
    save_file(trained, tmp_path / FILE)
    expected = _logits(plain(tmp_path, TINY).unload())
    pool(2).run(_unload, tmp_path, Layout(2, 1, 1))
    _assert_merged_files(tmp_path, expected)


def _old(directory: Path) -> None:
    """An adapter as PEFT saved it while transformers 4 had a module for each expert."""
    _by_peft(directory, target_modules=["q_proj"], target_parameters=None)
    tensors = load_file(directory / FILE)
    for layer in range(TINY.layers):
        for expert in range(TINY.num_experts):
            for name, wide, narrow in (("w1", 32, 13), ("w3", 32, 13), ("w2", 13, 32)):
                prefix = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}"
                tensors[f"{prefix}.{name}.lora_A.weight"] = torch.randn(5, wide).double()
                tensors[f"{prefix}.{name}.lora_B.weight"] = torch.randn(narrow, 5).double()
    save_file(tensors, directory / FILE)
    path = directory / "adapter_config.json"
    changed = {"target_modules": ["q_proj", "w1", "w2", "w3"], "target_parameters": None}
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def _load_old(directory: Path) -> torch.Tensor:
    model = parallel(TINY.model(), Layout(1, 2, 2).mesh())
    return _logits(peft.PeftModel.from_pretrained(model, directory))


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
def test_an_adapter_of_transformers_4_loads_as_in_peft(tmp_path: Path) -> None:
    _old(tmp_path)
    expected = _logits(plain(tmp_path, TINY))
    for found in pool(2).run(_load_old, tmp_path):
        assert (found - expected).abs().max() < 1e-9 * expected.abs().max()


def _bf16_merge() -> list[str]:
    """Names of what a merge and an unmerge in bf16 did not put back."""
    tiny = TinyMixtral(num_experts=5, dtype=torch.bfloat16)
    model = adapted_experts(tiny, Layout(1, 2, 2))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.merge_adapter()
    experts = model.base_model.model.model.layers[0].mlp.experts.get_base_layer()
    for name in ("gate_up_proj", "down_proj"):
        path = f"base_model.model.model.layers.0.mlp.experts.base_layer.base_layer.{name}"
        assert not torch.equal(before[path], getattr(experts, name))
    model.unmerge_adapter()
    return [n for n, p in model.named_parameters() if not torch.equal(before[n], p)]


def test_unmerging_restores_every_bit_of_the_experts() -> None:
    assert pool(2).run(_bf16_merge) == [[], []]


# What is refused, by one error on all ranks, before anything changes.


def _adapt(**changes: Any) -> None:
    model = parallel(TINY.model(), Layout(1, 2, 2).mesh())
    before = [name for name, _ in model.named_modules()]
    try:
        peft.get_peft_model(model, config(**{**BOTH, **changes}))
    finally:
        assert [name for name, _ in model.named_modules()] == before


def _load_mismatched(directory: Path) -> None:
    model = parallel(TinyMixtral(num_experts=6).model(), Layout(1, 2, 2).mesh())
    peft.PeftModel.from_pretrained(model, directory)


def _unequal() -> None:
    model = adapted_experts(TINY, Layout(1, 2, 1))
    experts = model.base_model.model.model.layers[1].mlp.experts
    with torch.no_grad():
        experts.lora_B["default"].weight[0, 0] += Layout(1, 2, 1).mesh().edp_rank
    model.merge_and_unload()


def _not_finite() -> None:
    model = adapted_experts(TINY, Layout(1, 2, 2))
    model.base_model.model.model.layers[1].mlp.experts.lora_B["default"].weight.data.fill_(
        torch.nan
    )
    model.merge_adapter(safe_merge=True)


def _merge_shards() -> None:
    model = adapted_experts(TINY, Layout(2, 1, 2))
    px.data_parallel(model, Layout(2, 1, 2).mesh()).merge_adapter()


def _combine() -> None:
    model = adapted_experts(TINY, Layout(1, 2, 2))
    model.add_adapter("second", config(**BOTH))
    model.base_model.add_weighted_adapter(["default", "second"], [0.5, 0.5], "both", "cat")


def _other_targets() -> None:
    model = adapted_experts(TINY, Layout(1, 2, 2))
    model.add_adapter("second", config(**{**BOTH, "target_parameters": [DOWN]}))


def _disabled_on_one_rank() -> None:
    model = adapted_experts(TINY, Layout(2, 1, 2))
    px.data_parallel(model, state_of(model).mesh)
    if dist.get_rank() == 1:
        model.base_model.disable_adapter_layers()
    ids = torch.ones(1, 4, dtype=torch.int64)
    model(input_ids=ids, labels=ids)


def _no_experts() -> None:
    model = parallel(Tiny().model(), mesh_of())
    peft.get_peft_model(model, config(target_parameters=["mlp.down_proj.weight"]))


REFUSED: dict[str, tuple[Any, str]] = {
    "a router": (
        lambda: _adapt(target_parameters=["mlp.gate.weight"]),
        "an adapter on model.layers.0.mlp.gate.weight is not supported; of all parameters only "
        "the tensors of experts take one: "
        "target_parameters=['experts.down_proj', 'experts.gate_up_proj']",
    ),
    "a weight of the attention": (
        lambda: _adapt(target_parameters=[DOWN, "q_proj.weight"]),
        "an adapter on model.layers.0.self_attn.q_proj.weight is not supported",
    ),
    "a parameter that is not there": (
        lambda: _adapt(target_parameters=[GATE_UP, "experts.up_proj"]),
        "the model has no parameter experts.up_proj",
    ),
    "experts as a module": (
        lambda: _adapt(target_modules=["experts"]),
        "an adapter on model.layers.0.mlp.experts is not supported",
    ),
    "half of the old names": (
        lambda: _adapt(target_modules=["w1"]),
        "Cannot convert PEFT target(s) w1 without also targeting w3",
    ),
    "dropout": (
        lambda: _adapt(lora_dropout=0.1),
        "lora_dropout=0.1 does not go with target_parameters=",
    ),
    "a bias": (lambda: _adapt(lora_bias=True), "lora_bias=True does not go with"),
    "DoRA": (lambda: _adapt(use_dora=True), "use_dora=True does not go with target_parameters"),
    "adapters that one rank has switched off": (
        _disabled_on_one_rank,
        "gradients of the experts alone, adapters of rank 0 and 0",
    ),
    "a model without experts": (
        _no_experts,
        "without experts does not support target_parameters=['mlp.down_proj.weight']",
    ),
    "factors that differ between replicas": (
        _unequal,
        "layers.1.mlp.experts.lora_B.default.weight differs between ranks 0 and 1",
    ),
    "factors that are not finite": (_not_finite, "NaN or infinite values in the merged weights"),
    "merging what FSDP holds": (_merge_shards, "merging after px.data_parallel is final"),
    "combined adapters": (_combine, "add_weighted_adapter does not support targeting nn.Param"),
    "other targets for a second adapter": (_other_targets, "must target the same set"),
}


def _refused(case: str) -> None:
    REFUSED[case][0]()


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused(case: str) -> None:
    pool(2).assert_raises(_refused, case, words=REFUSED[case][1])


def test_an_adapter_of_other_experts_is_refused(tmp_path: Path) -> None:
    _by_peft(tmp_path)
    words = ("experts.base_layer.lora_A.weight has the shape (25, 32)", "full shape (30, 32)")
    pool(2).assert_raises(_load_mismatched, tmp_path, words=words)
