"""What is particular to some architectures: routers in fp32, corrections, sinks, delta rules."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from ranks import pool
from reference import (
    assert_within,
    batch,
    difference,
    gradients_of,
    mesh_of,
    parallel,
    shard_differences,
)
from reference_mixtral import Layout, TinyMixtral, batches, differences_of_steps, parity
from safetensors.torch import load_file, save_file
from test_specs import OfSpec
from torch import nn
from versions import needs_newer

import parallel_ext as px


@dataclass(frozen=True)
class WithoutShared(OfSpec):
    """A mixture none of whose experts sees all tokens; that of a GLM-4.5 is there, and empty."""

    def config(self) -> transformers.PreTrainedConfig:
        config = super().config()
        config.moe_num_shared_experts = config.n_shared_experts = 0
        return config


CASES = {
    "dp 2, ep 2": ("glm4_moe", Layout(2, 1, 2), 3),
    "dp 2, tp 2, ep 2": ("deepseek_v3", Layout(2, 2, 2), 2),
    "dp 2, tp 2, ep 4": ("deepseek_v2", Layout(2, 2, 4), 2),
    "dp 2, tp 2, ep 4, sinks": ("gpt_oss", Layout(2, 2, 4), 3),
    "dp 2, tp 2, ep 2, a gate of heads": ("afmoe", Layout(2, 2, 2), 3),
    "dp 2, tp 2, ep 4, weighed tokens": ("llama4_text", Layout(2, 2, 4), 2),
    "dp 2, tp 2, delta rules": ("qwen3_5_text", Layout(2, 2, 1), 3),
}


@pytest.mark.parametrize("case", CASES)
def test_training_equals_the_single_process(case: str) -> None:
    kind, layout, zero = CASES[case]
    found = pool(layout.world).run(parity, OfSpec(kind), layout, zero)
    assert_within(found, 3e-5)  # some classes compute their router in fp32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "autocast"])
def test_experts_of_weighed_tokens_are_those_of_the_class(dtype: torch.dtype | str) -> None:
    kind = torch.float32 if dtype == "autocast" else dtype
    block = OfSpec("llama4_text", dtype=kind).model().model.layers[1].feed_forward
    ours = parallel(OfSpec("llama4_text", dtype=kind).model(), px.init_mesh())
    hidden, found = torch.randn(2, 7, 72, dtype=kind), []
    for each in (block, ours.model.layers[1].feed_forward):
        given = hidden.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
            output, logits = each(given)
        (output.float().pow(3).sum() + logits.float().square().sum()).backward()
        found.append([output, logits, given.grad, each.router.weight.grad])
    of_bf16 = {} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.02}
    for theirs, own in zip(*found, strict=True):
        assert own.dtype == theirs.dtype
        torch.testing.assert_close(own, theirs, **of_bf16)


def test_a_block_whose_forward_is_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = OfSpec("llama4_text").model()
    block = type(model.model.layers[1].feed_forward)
    monkeypatch.setattr(block, "forward", lambda self, hidden: (hidden, None))
    with pytest.raises(ValueError, match="the forward of Llama4TextMoe was replaced"):
        px.parallelize(model, px.init_mesh())


@pytest.mark.parametrize("kind", ["ernie4_5_moe", "glm4_moe"])
def test_a_model_without_a_shared_expert_is_trained_as_one_with_it(kind: str) -> None:
    layout = Layout(1, 2, 2)
    assert_within(pool(layout.world).run(parity, WithoutShared(kind), layout, None), 1e-5)


class _Scaled(nn.Module):
    """A module of a user around one of the model's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.full((), 0.7, dtype=torch.float64))

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.inner(*args) * self.scale


def _wrapped(kind: str, *paths: str) -> dict[str, float]:
    reference = OfSpec(kind).model()
    for path in paths:
        reference.set_submodule(path, _Scaled(reference.get_submodule(path)))
    model = parallel(reference, mesh_of())
    one = batches(OfSpec(kind), 1)
    return differences_of_steps(reference, model, mesh_of(), [one])


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("deepseek_v3", ("self_attn.kv_a_proj_with_mqa", "self_attn.q_a_layernorm")),
        ("qwen3_5_text", ("linear_attn.norm",)),
    ],
)
def test_parameters_around_and_inside_a_wrapped_module_are_trained(
    kind: str, names: tuple[str, ...]
) -> None:
    """Each rank uses these modules for its own heads, or for a part of what follows."""
    paths = [f"model.layers.0.{name}" for name in names]
    assert_within(pool(2).run(_wrapped, kind, *paths))


def _dtypes(model: Any) -> dict[str, torch.dtype]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.dtype for name, tensor in tensors}


def _as_loaded(source: str, frozen: str = "") -> tuple[dict[str, float], int]:
    """A bf16 model from files, trained at dp 2, beside that of transformers.

    What is ``frozen`` while the model is sharded is trained afterwards.
    """
    mesh = mesh_of(1)
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.bfloat16, experts_implementation="eager"
    ).train()
    model = px.from_pretrained(source, mesh, dtype=torch.bfloat16).train()
    assert _dtypes(model) == _dtypes(plain)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    model = px.data_parallel(model, mesh, zero=3).requires_grad_(True)
    whole, own = batches(OfSpec("glm4_moe"), mesh.dp_size)
    model(**own[mesh.dp_rank]).loss.backward()
    plain(**whole).loss.backward()
    kinds = {parameter.dtype for parameter in plain.parameters()}
    return shard_differences(model, gradients_of(plain), True), len(kinds)


@needs_newer("a router in fp32")
@pytest.mark.parametrize("kind", ["glm4_moe", "hunyuan_v1_moe", "afmoe"])
def test_what_of_a_router_stays_fp32_in_a_bf16_model_is_trained_so(
    kind: str, tmp_path: Path
) -> None:
    OfSpec(kind, dtype=torch.float32).model().save_pretrained(tmp_path)
    for differences, kinds in pool(2).run(_as_loaded, str(tmp_path)):
        assert kinds == 2
        assert max(differences.values()) < 0.1  # of bf16


@needs_newer("a router in fp32")
@pytest.mark.parametrize("frozen", ["gate.weight", "self_attn"])
def test_what_was_frozen_may_be_trained_later(frozen: str, tmp_path: Path) -> None:
    OfSpec("glm4_moe", dtype=torch.float32).model().save_pretrained(tmp_path)
    for differences, _ in pool(2).run(_as_loaded, str(tmp_path), frozen):
        assert max(differences.values()) < 0.1  # of bf16


def _corrections(source: str, dtype: torch.dtype) -> dict[str, bool]:
    ours = px.from_pretrained(source, mesh_of(), dtype=dtype)
    theirs = dict(
        transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype).named_buffers()
    )
    return {
        name: each.dtype == theirs[name].dtype and torch.equal(each, theirs[name])
        for name, each in ours.named_buffers()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_config", [torch.float32, torch.bfloat16])
def test_corrections_have_the_dtype_of_transformers(
    in_config: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Those of MiniMax-M2 are of the dtype that is asked for, whatever the configuration says."""
    OfSpec("minimax_m2", dtype=torch.float32).model().save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.dtype = in_config
    config.save_pretrained(tmp_path)
    for found in pool(2).run(_corrections, str(tmp_path), dtype):
        assert all(found.values()), found


def _checked() -> dict[str, float]:
    model = parallel(OfSpec("glm4_moe", dtype=torch.float32).model(), mesh_of())
    return dict(px.check_gradients(model, batch(101)).differences)


def test_check_gradients_gives_the_single_process_the_corrections() -> None:
    assert_within(pool(2).run(_checked), 1e-4)


def _checkpointed(folder: str, kind: str) -> dict[str, float]:
    """A checkpoint of one layout, loaded into a model without corrections on another."""
    saved = parallel(OfSpec(kind).model(), mesh_of(1, 2))
    px.save_checkpoint(folder, 1, saved)
    empty = OfSpec(kind).model(seed=2)
    for name, buffer in empty.named_buffers():
        if name.endswith("correction_bias"):
            buffer.zero_()
    model = parallel(empty, mesh_of(2, 2))
    px.load_checkpoint(folder, model)
    whole = saved.state_dict()
    names = [name for name in whole if name.endswith("correction_bias")]
    assert names
    found = model.state_dict()
    return {name: float(not torch.equal(found[name], whole[name])) for name in names}


@pytest.mark.parametrize("kind", ["minimax_m2", "deepseek_v3", "ernie4_5_moe"])
def test_a_checkpoint_holds_the_corrections(kind: str, tmp_path: Path) -> None:
    assert_within(pool(2).run(_checkpointed, str(tmp_path), kind))


def _with_one_more_layer(folder: Path) -> None:
    """Add what published files have: a layer that predicts one token more."""
    OfSpec("deepseek_v3", dtype=torch.float32).model().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    further = {
        name.replace("layers.1.", "layers.61."): tensor.clone()
        for name, tensor in tensors.items()
        if "layers.1." in name
    }
    save_file(tensors | further, folder / "model.safetensors", {"format": "pt"})


def _loaded(source: str) -> tuple[dict[str, float], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = px.from_pretrained(source, mesh_of(), dtype=torch.float32)
    plain = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    weights = dict(plain.named_parameters())
    told = [str(each.message) for each in caught if "are left out" in str(each.message)]
    return shard_differences(model, weights, False), told


def test_a_layer_that_transformers_ignores_in_files_is_left_out(tmp_path: Path) -> None:
    _with_one_more_layer(tmp_path)
    found = pool(2).run(_loaded, str(tmp_path))
    assert_within([differences for differences, _ in found], 0.0)
    assert [len(told) for _, told in found] == [1, 0]
    assert "model.layers.61." in found[0][1][0]


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "ernie4_5_moe", "minimax_m2"])
def test_files_may_have_the_names_of_the_model_in_memory(kind: str, tmp_path: Path) -> None:
    """Experts that are joined, and other names of routers and corrections."""
    tiny = TinyMixtral() if kind == "mixtral" else OfSpec(kind)
    tiny = replace(tiny, dtype=torch.float32)
    tiny.model().save_pretrained(tmp_path, save_original_format=False)
    assert_within([differences for differences, _ in pool(2).run(_loaded, str(tmp_path))], 0.0)


@pytest.mark.parametrize("kind", ["glm4_moe", "minimax_m2"])
def test_files_without_the_corrections_are_refused(kind: str, tmp_path: Path) -> None:
    OfSpec(kind, dtype=torch.float32).model().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if "correction" not in name}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    words = f"e_score_correction_bias of shape ({6 if kind == 'glm4_moe' else 5},) is missing"
    pool(2).assert_raises(_loaded, str(tmp_path), error="CheckpointError", words=words)


def _other_corrections(after: bool) -> None:
    """Rank 1 has others, before ``px.parallelize`` or after it."""
    mesh, model = mesh_of(1), OfSpec("glm4_moe", dtype=torch.float32).model()
    if after:
        px.parallelize(model, mesh)
    router = model.model.layers[1].mlp.gate
    router.e_score_correction_bias += mesh.rank
    if after:
        px.check_replicas(model)
    else:
        px.parallelize(model, mesh)


@pytest.mark.parametrize(
    ("after", "words"), [(False, "must be equal on all ranks"), (True, "differs between ranks")]
)
def test_corrections_that_differ_between_ranks_are_refused(after: bool, words: str) -> None:
    words = f"model.layers.1.mlp.gate.e_score_correction_bias {words}"
    pool(2).assert_raises(_other_corrections, after, error="DisagreementError", words=words)


def _corrected_by_own_counts(tp: int) -> None:
    """Each rank moves its corrections by what it counts itself, as a plain loop does."""
    mesh, tiny = mesh_of(tp), OfSpec("glm4_moe", dtype=torch.float32)
    model = px.data_parallel(parallel(tiny.model(), mesh), mesh)
    model.model.layers[1].mlp.gate.e_score_correction_bias += 1e-3 * mesh.rank
    for _ in range(40):
        model(**batch(101)).loss.backward()


@pytest.mark.parametrize("tp", [1, 2])
def test_training_notices_corrections_that_differ_between_ranks(tp: int) -> None:
    words = "e_score_correction_bias differs between ranks 0 and 1"
    pool(2).assert_raises(_corrected_by_own_counts, tp, error="DisagreementError", words=words)


def _masks_in_other_orders() -> dict[str, float]:
    """The ranks have a mask for each kind of layers, which rank 1 lists the other way round."""
    reference, mesh, ids = OfSpec("gpt_oss").model().eval(), mesh_of(), batch(101)["input_ids"]
    causal = torch.full((1, 1, 9, 9), float("-inf"), dtype=torch.float64).triu(1)
    kinds = ["full_attention", "sliding_attention"][:: 1 - 2 * mesh.tp_rank]
    masks = {kind: causal for kind in kinds}
    with torch.no_grad():
        expected = reference(ids, attention_mask=masks).logits
        ours = parallel(reference, mesh)(ids, attention_mask=masks).logits
    return {"logits": difference(ours, expected)}


def test_masks_of_kinds_of_layers_may_be_in_another_order_on_each_rank() -> None:
    """As with a static cache: transformers takes the kinds from a set, whose order is random."""
    assert_within(pool(2).run(_masks_in_other_orders))


def _refused(what: str) -> None:
    mesh = mesh_of()
    if what == "Invariant":
        parallel(OfSpec("gpt_oss", dtype=torch.float32).model(), mesh, invariant=px.Invariant())
    elif what == "delta rules":
        parallel(
            OfSpec("qwen3_5_text", dtype=torch.float32).model(), mesh, invariant=px.Invariant()
        )
    elif what == "key heads":
        parallel(OfSpec("qwen3_5_text").model(), mesh_of(4))
    elif what == "heads":
        parallel(OfSpec("deepseek_v3").model(), mesh_of(4))
    elif what == "adapters":
        model = parallel(OfSpec("deepseek_v3").model(), mesh)
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["kv_a_proj_with_mqa"]))
    else:
        kind = "llama4_text" if what == "adapters of weighed tokens' experts" else "gpt_oss"
        model = parallel(OfSpec(kind).model(), mesh)
        options = {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}
        if what == "adapters by the name of the experts":
            options = {"target_modules": ["q_proj", "experts"]}
        peft.get_peft_model(model, peft.LoraConfig(**options))


@pytest.mark.parametrize(
    ("what", "ranks", "words"),
    [
        ("Invariant", 2, "experts chosen by a softmax of the chosen alone"),
        ("heads", 4, "has 6 heads, which tp=4 does not divide"),
        ("delta rules", 2, "a gated delta rule"),
        ("key heads", 4, "has 3 key heads, fewer than tp=4"),
        ("adapters", 2, "kv_a_proj_with_mqa is not supported: every rank holds it whole"),
        ("adapters of experts", 2, "with the experts of GPT-OSS or Llama 4 does not support"),
        ("adapters of weighed tokens' experts", 2, "GPT-OSS or Llama 4 does not support target_p"),
        ("adapters by the name of the experts", 2, "and head; these experts take no adapter"),
    ],
)
def test_what_is_not_served_is_refused_by_name(what: str, ranks: int, words: str) -> None:
    error = "NotImplementedError" if what.startswith("adapters") else "ValueError"
    pool(ranks).assert_raises(_refused, what, error=error, words=words)
