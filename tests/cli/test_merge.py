"""``parallel-ext merge`` writes what PEFT's merge_and_unload would."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from disk_faults import change_last_byte
from ranks import pool
from reference import Tiny, saved_tensors
from reference_images import tiny_model
from reference_mixtral import TinyMixtral, TinyQwen3Moe
from safetensors.torch import load_file, save_file
from test_specs import KINDS, OfSpec

import parallel_ext as px
from parallel_ext.cli.main import main
from parallel_ext.lora import merged_files
from parallel_ext.sharding import reshard

TINY = Tiny(dtype=torch.float32, bias=True)
LINEARS = ["q_proj", "v_proj", "o_proj", "down_proj"]


def _trained(model: Any, folder: Path, **changes: Any) -> Any:
    """Save an adapter whose factors are all drawn; the model with it."""
    options = {"r": 3, "lora_alpha": 7, "target_modules": LINEARS, "init_lora_weights": False}
    with_adapter = peft.get_peft_model(model, peft.LoraConfig(**{**options, **changes}))
    torch.manual_seed(5)
    for parameter in with_adapter.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    with_adapter.save_pretrained(folder)
    return with_adapter


ON_EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
MIXTRAL = TinyMixtral(dtype=torch.float32)
CASES: dict[str, tuple[Tiny | TinyMixtral | OfSpec, dict[str, Any]]] = {
    "linears": (TINY, {}),
    "bf16": (Tiny(dtype=torch.bfloat16), {}),
    "patterns, rslora": (
        TINY,
        {"use_rslora": True, "rank_pattern": {"q_proj": 5}, "alpha_pattern": {"mlp.down_proj": 3}},
    ),
    "biases": (TINY, {"lora_bias": True, "target_modules": ["q_proj", "k_proj"]}),
    "embedding": (TINY, {"target_modules": ["embed_tokens", "o_proj"]}),
    "experts": (MIXTRAL, {"alpha_pattern": {"experts.down_proj": 3}, **ON_EXPERTS}),
    "experts of Qwen3": (TinyQwen3Moe(dtype=torch.float32), ON_EXPERTS),
    "experts as they are": (
        OfSpec("gemma4_text with experts", dtype=torch.float32),
        {"alpha_pattern": {"experts.down_proj": 3}, **ON_EXPERTS},
    ),
    "one tensor of experts": (MIXTRAL, {"target_parameters": ["experts.down_proj"]}),
    "experts in bf16": (TinyMixtral(dtype=torch.bfloat16), {"use_rslora": True, **ON_EXPERTS}),
    "another name in files": (
        OfSpec("hy_v3", dtype=torch.float32),
        {
            "target_modules": ["shared_experts.down_proj", "o_proj"],
            "alpha_pattern": {"shared_experts.down_proj": 3},
        },
    ),
    "experts of another name in files": (OfSpec("granitemoe", dtype=torch.float32), ON_EXPERTS),
    "an embedding beside tied ends": (
        OfSpec("gemma4_text that shares keys", dtype=torch.float32, tied=True),
        {"target_modules": ["embed_tokens_per_layer", "q_proj"]},
    ),
    "DoRA": (TINY, {"use_dora": True, "use_rslora": True}),
    "DoRA in bf16": (Tiny(dtype=torch.bfloat16), {"use_dora": True}),
    "rows of tokens": (TINY, {"trainable_token_indices": {"embed_tokens": [9, 0], "lm_head": [4]}}),
    "rows of tokens of tied ends": (
        Tiny(dtype=torch.bfloat16, tied=True),
        {"trainable_token_indices": [90, 0, 41]},
    ),
    "whole head and norm": (TINY, {"modules_to_save": ["lm_head", "norm"]}),
}
if "granitemoe" not in KINDS:  # as transformers 5.15 has it
    del CASES["experts of another name in files"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", ["1GB", "20KB"])
def test_the_merged_model_is_that_of_peft(
    case: str, size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny, changes = CASES[case]
    base, adapter, out = (tmp_path / each for each in ("base", "adapter", "out"))
    tiny.model().save_pretrained(base, max_shard_size=size)
    (base / "tokenizer.json").write_text("{}")
    (base / "pytorch_model.bin").write_bytes(b"old")
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates/tool.jinja").write_text("{{ tool }}")
    by_peft = _trained(tiny.model(), adapter, **changes).merge_and_unload()
    by_peft.save_pretrained(tmp_path / "expected")
    expected = saved_tensors(tmp_path / "expected")
    assert main(["merge", str(adapter), str(base), str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = saved_tensors(out)
    assert {path.name for path in base.iterdir()} - {path.name for path in out.iterdir()} == {
        "pytorch_model.bin"
    }
    assert (out / "additional_chat_templates/tool.jinja").read_text() == "{{ tool }}"
    plain = saved_tensors(base)
    assert found.keys() == plain.keys()
    changed = [name for name in plain if not torch.equal(found[name], plain[name])]
    assert len(changed) == report["merged"] + report["replaced"] > 0
    assert report["tensors"] == len(plain)
    for name, value in found.items():
        assert value.dtype == plain[name].dtype
        tolerance = {"rtol": 2e-2, "atol": 2e-3} if tiny.dtype == torch.bfloat16 else {}
        torch.testing.assert_close(value, expected[name], **tolerance)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == tiny.dtype


OF_TEXT: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "target_modules": [*LINEARS, "in_proj_z"],
        "alpha_pattern": {"^model.layers.0.mlp.down_proj": 3},  # the text model's own path
        "modules_to_save": ["norm", "lm_head"],
    },
    "qwen3_5_moe": {"target_modules": ["in_proj_z"], **ON_EXPERTS},
    "llama4": {"target_modules": [*LINEARS, "lm_head"]},
}


OF_IMAGES = {
    "llava": {"target_modules": "all-linear", "use_dora": True},
    "tied llava": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 1]},
    "qwen2_5_vl": {"target_modules": "all-linear", "modules_to_save": ["lm_head"]},
    "paligemma": {"target_modules": ["down_proj", "fc1", "linear"]},
}


@pytest.mark.parametrize("kind", OF_IMAGES)
def test_an_adapter_of_a_model_of_images_is_merged(kind: str, tmp_path: Path) -> None:
    base, adapter, out = (tmp_path / each for each in ("base", "adapter", "out"))
    tiny_model(kind).float().save_pretrained(base)
    model = transformers.AutoModelForImageTextToText.from_pretrained(base)
    merged = _trained(model, adapter, **OF_IMAGES[kind]).merge_and_unload()
    merged.save_pretrained(tmp_path / "expected")
    merged_files.merge_files(adapter, base, out)
    found, expected = saved_tensors(out), saved_tensors(tmp_path / "expected")
    plain = saved_tensors(base)
    assert found.keys() == expected.keys()
    assert any(not torch.equal(found[name], plain[name]) for name in found)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name])


@pytest.mark.parametrize("kind", ["paligemma", "tied llava"])
@pytest.mark.parametrize("option", ["modules_to_save", "target_modules"])
def test_tied_ends_of_a_model_of_images_are_not_merged_apart(
    kind: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model = tiny_model(kind).float()
    if kind == "tied llava":
        model.resize_token_embeddings(transformers.Qwen2Config().vocab_size)
    model.save_pretrained(base)
    config = json.loads((base / "config.json").read_text())
    if kind == "tied llava":  # files may leave out what is the default
        del config["text_config"]["vocab_size"]
        (base / "config.json").write_text(json.dumps(config))
    else:  # has one beside that of its text
        assert config["vocab_size"] != config["text_config"]["vocab_size"]
    _trained(model, adapter, **{"target_modules": ["q_proj"], option: ["embed_tokens"]})
    assert "untie them first" in _refused(capsys, adapter, base, tmp_path / "out")


@pytest.mark.parametrize("kind", OF_TEXT)
def test_an_adapter_of_the_text_model_is_merged_into_files_with_images(
    kind: str, tmp_path: Path
) -> None:
    base, adapter, out = (tmp_path / each for each in ("base", "adapter", "out"))
    tiny_model(kind).float().save_pretrained(base)
    text, changes = transformers.AutoModelForCausalLM.from_pretrained(base), OF_TEXT[kind]
    expected = _trained(text, adapter, **changes).merge_and_unload().state_dict()
    merged_files.merge_files(adapter, base, out)
    found, plain = saved_tensors(out), saved_tensors(base)
    assert found.keys() == plain.keys()
    for name, value in found.items():
        in_text = name.replace("model.language_model.", "model.").removeprefix("language_model.")
        if ".experts." in name:  # which are joined in the model
            continue
        torch.testing.assert_close(value, expected.get(in_text, plain[name]))
    assert sum(not torch.equal(found[n], plain[n]) for n in plain) > 8
    read = transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.allclose(read[name], each) for name, each in expected.items())


def test_the_text_configuration_alone_may_tie_the_ends(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    tiny_model("qwen3_5").save_pretrained(base)
    content = json.loads((base / "config.json").read_text())
    content.pop("tie_word_embeddings", None)
    content["text_config"]["tie_word_embeddings"] = True
    (base / "config.json").write_text(json.dumps(content))
    text = transformers.AutoModelForCausalLM.from_pretrained(base)
    _trained(text, adapter, modules_to_save=["embed_tokens"])
    with pytest.raises(px.CheckpointError, match="untie them first"):
        merged_files.merge_files(adapter, base, tmp_path / "out")


def test_an_adapter_in_a_pickle_is_refused_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    TINY.model().save_pretrained(tmp_path / "base")
    adapter = tmp_path / "adapter"
    _trained(TINY.model(), adapter).save_pretrained(adapter, safe_serialization=False)
    (adapter / "adapter_model.safetensors").unlink()
    text = _refused(capsys, adapter, tmp_path / "base", tmp_path / "out")
    assert f"{adapter / 'adapter_model.bin'} is a pickle" in text
    assert "load the adapter with PEFT and save it again" in text


def test_stripes_of_rows_are_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    TINY.model().save_pretrained(base)
    _trained(TINY.model(), adapter, target_modules=[*LINEARS, "embed_tokens"])
    pieces: list[int] = []
    whole = merged_files.merge_files(adapter, base, tmp_path / "whole", pieces.append)
    assert len(pieces) == whole.tensors
    assert sum(pieces) == whole.num_bytes
    monkeypatch.setattr(reshard, "STRIPE_BYTES", 1000)
    merged_files.merge_files(adapter, base, tmp_path / "striped", pieces.append)
    assert len(pieces) > 3 * whole.tensors
    one, other = saved_tensors(tmp_path / "whole"), saved_tensors(tmp_path / "striped")
    for name in one:
        torch.testing.assert_close(one[name], other[name])


def _steps(root: Path) -> None:
    """Save the model itself, and then a step of the adapter of ``_trained``, as checkpoints."""
    mesh = px.init_mesh()
    px.save_checkpoint(root / "base", 3, px.parallelize(TINY.model(), mesh))
    options = {"r": 3, "lora_alpha": 7, "target_modules": LINEARS, "init_lora_weights": False}
    adapted = peft.get_peft_model(px.parallelize(TINY.model(), mesh), peft.LoraConfig(**options))
    px.save_checkpoint(root / "adapter", 5, adapted)
    adapted.save_pretrained(root / "plain adapter")


def test_training_checkpoints_merge_as_what_they_hold(tmp_path: Path) -> None:
    pool(1).run(_steps, tmp_path)
    TINY.model().save_pretrained(tmp_path / "plain base")
    places = [tmp_path / name for name in ("adapter", "base", "out")]
    assert main(["merge", *map(str, places)]) == 0
    plain = [tmp_path / name for name in ("plain adapter", "plain base", "plain out")]
    assert main(["merge", *map(str, plain)]) == 0
    merged, expected = saved_tensors(places[-1]), saved_tensors(plain[-1])
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], expected[name]) for name in merged)
    assert not (places[-1] / "COMMIT").exists()


def test_a_step_of_checkpoints_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool(1).run(_steps, tmp_path)
    step = px.latest_checkpoint(tmp_path / "base")
    TINY.model().save_pretrained(tmp_path / "model")
    text = _refused(capsys, tmp_path / "adapter", tmp_path / "model", step)
    assert f"{step} is there already; choose a new folder" in text
    assert px.verify_checkpoint(step) == 3
    (step / "COMMIT").unlink()
    for adapter, base in ((tmp_path / "adapter", step), (step, tmp_path / "model")):
        assert "not a complete one" in _refused(capsys, adapter, base, tmp_path / "out")


@pytest.mark.parametrize("damaged", ["step of the base", "base", "step of the adapter"])
def test_damaged_bytes_are_not_merged(
    damaged: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool(1).run(_steps, tmp_path)
    base, adapter, out = tmp_path / "base", tmp_path / "adapter", tmp_path / "out"
    if damaged == "base":
        assert main(["convert", str(base), str(tmp_path / "plain")]) == 0
        base = tmp_path / "plain"
    folder = adapter if damaged == "step of the adapter" else base
    file = next(folder.rglob("*model*.safetensors"))
    change_last_byte(file)
    assert "damaged" in _refused(capsys, adapter, base, out)
    assert not out.exists()


def _refused(capsys: pytest.CaptureFixture[str], *paths: Path) -> str:
    assert main(["merge", *map(str, paths)]) == 2
    return capsys.readouterr().err


def test_what_cannot_be_merged_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    TINY.model().save_pretrained(base)
    assert "has no adapter_config.json, so it is no adapter" in _refused(capsys, base, base, out)
    good = tmp_path / "good"
    _trained(TINY.model(), good)
    assert "itself, or in it; choose another" in _refused(capsys, good, base, base)
    other = tmp_path / "other"
    Tiny(dtype=torch.float32, inner=50).model().save_pretrained(other)
    assert "is for a tensor of" in _refused(capsys, good, other, out)
    half = tmp_path / "half"
    shutil.copytree(good, half)
    tensors = load_file(half / "adapter_model.safetensors")
    save_file(
        {name: value for name, value in tensors.items() if "q_proj.lora_B" not in name},
        half / "adapter_model.safetensors",
    )
    assert "self_attn.q_proj has a alone" in _refused(capsys, half, base, out)
    ranks = tmp_path / "ranks"
    shutil.copytree(good, ranks)
    config = json.loads((good / "adapter_config.json").read_text())
    (ranks / "adapter_config.json").write_text(json.dumps(config | {"layer_replication": [[0, 1]]}))
    assert "does not support layer_replication" in _refused(capsys, ranks, base, out)
    (ranks / "adapter_config.json").write_text(json.dumps(config | {"r": 5}))
    assert "is of rank 3, but by adapter_config.json of 5" in _refused(capsys, ranks, base, out)
    mixtral = tmp_path / "mixtral"
    TinyMixtral(dtype=torch.float32).model().save_pretrained(mixtral)
    fewer = TinyMixtral(dtype=torch.float32, inner=5).model()
    _trained(fewer, tmp_path / "experts", **ON_EXPERTS)
    assert "has no model.layers" in _refused(capsys, tmp_path / "experts", mixtral, out)
    resized = Tiny(dtype=torch.float32, vocab_size=120).model()
    tokens = _trained(resized, tmp_path / "tokens", trainable_token_indices=[119, 3])
    assert "vocabulary was resized" in _refused(capsys, tmp_path / "tokens", base, out)
    tokens.save_pretrained(tmp_path / "beside", save_embedding_layers=True)
    assert "the vocabulary was resized" in _refused(capsys, tmp_path / "beside", base, out)
    tied = tmp_path / "tied"
    Tiny(dtype=torch.float32, tied=True).model().save_pretrained(tied)
    _trained(TINY.model(), tmp_path / "head", target_modules=["lm_head"])
    assert "on tied weights" in _refused(capsys, tmp_path / "head", tied, out)
    twice = tmp_path / "twice"
    TINY.model().save_pretrained(twice)
    config = json.loads((twice / "config.json").read_text())
    (twice / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert "would change both" in _refused(capsys, tmp_path / "head", twice, out)
    _trained(TINY.model(), tmp_path / "embedding", target_modules=["embed_tokens"])
    assert "would change both" in _refused(capsys, tmp_path / "embedding", tied, out)
    whole = tmp_path / "whole"
    _trained(Tiny(dtype=torch.float32, tied=True).model(), whole, modules_to_save=["embed_tokens"])
    assert "was trained whole" in _refused(capsys, whole, tied, out)
    assert "good is there already" in _refused(capsys, good, base, good)
    biases = tmp_path / "biases"
    _trained(TINY.model(), biases, lora_bias=True, target_modules=["q_proj"])
    tensors = load_file(biases / "adapter_model.safetensors")
    save_file(
        {name: value for name, value in tensors.items() if name.endswith("lora_B.bias")},
        biases / "adapter_model.safetensors",
    )
    assert "self_attn.q_proj has bias alone" in _refused(capsys, biases, base, out)
    assert "itself, or in it" in _refused(capsys, good, base, base / "config.json" / "out")
    assert "Not a directory" in _refused(capsys, good, base, other / "config.json" / "out")
    config = json.loads((base / "config.json").read_text())
    quantized = tmp_path / "quantized"
    shutil.copytree(base, quantized)
    (quantized / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "awq"}})
    )
    assert "is quantized" in _refused(capsys, good, quantized, out)
    assert not out.exists()
    assert not list(tmp_path.glob(".out*"))
