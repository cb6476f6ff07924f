"""SwissArmyTransformer's LoRA on CogAgent, imported, computes what its factors say."""

from __future__ import annotations

import errno
import os
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from reference_cogagent import batch_of, picture, text, tiny_config, tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor

import parallel_ext as px
from parallel_ext.lora.swiss_army import import_swiss_army_lora

RANK = 3
Factors = dict[str, Tensor]

# Of the tiny model, each adapted layer: its name there, ours, and [out, in] of its fused blocks.
DECODER = {
    "attention.query_key_value": ("self_attn.language_expert_query_key_value", [(64, 64)] * 3),
    "attention.dense": ("self_attn.language_expert_dense", [(64, 64)]),
    "cross_attention.query": ("cross_attn.query", [(32, 64)]),
    "cross_attention.key_value": ("cross_attn.key_value", [(32, 32)] * 2),
    "cross_attention.dense": ("cross_attn.dense", [(64, 32)]),
}
TOWER = {
    "attention.query_key_value": ("attention.query_key_value", [(48, 48)] * 3),
    "attention.dense": ("attention.dense", [(48, 48)]),
}
LAYERS = {
    f"{theirs}.{layer}.{path}": (f"{ours}.{layer}.{own}", blocks)
    for theirs, ours, table in (
        ("transformer.layers", "model.layers", DECODER),
        ("mixins.eva.vit_model.transformer.layers", "model.vision.transformer.layers", TOWER),
    )
    for layer in range(2)
    for path, (own, blocks) in table.items()
}
LAYER = "transformer.layers.1.attention.query_key_value"
FROZEN = (
    *("transformer.word_embeddings.weight", "transformer.layers.0.input_layernorm.weight"),
    *(f"{LAYER}.original.weight", "transformer.layers.1.mlp.dense_4h_to_h.weight"),
    *("mixins.mlp.gate_proj.0.weight", "mixins.lm.lm_head.weight", "mixins.eva.pos_embed"),
    *("transformer.final_layernorm.weight", "mixins.rotary.rotary_emb.inv_freq"),
)
TRAINED = {  # and how a message counts it
    "mixins.encoder.pos_embed": "mixins.encoder",
    "mixins.encoder.vit.model.blocks.0.attn.q_proj.weight": "mixins.encoder",
    "mixins.eva.boi": "mixins.eva.boi",
    "mixins.eva.eoi": "mixins.eva.eoi",
    "mixins.eva.linear_proj.norm1.bias": "mixins.eva.linear_proj",
    "mixins.eva.vit_model.transformer.layers.0.mlp.dense_4h_to_h.bias": "mixins.eva.vit_model",
    "mixins.mlp.vision_dense_h_to_4h_list.0.weight": "mixins.mlp.vision_dense_h_to_4h_list",
    "mixins.mlp.vision_gate_proj.1.weight": "mixins.mlp.vision_gate_proj",
    "mixins.rotary.vision_dense_list.1.weight": "mixins.rotary.vision_dense_list",
    "transformer.layers.0.cross_attention.query.original.weight": (
        "transformer.layers.N.cross_attention"
    ),
    "transformer.layers.0.post_cross_attention_layernorm.weight": (
        "transformer.layers.N.post_cross_attention_layernorm"
    ),
}


def _factors(layers: tuple[str, ...] = tuple(LAYERS)) -> Factors:
    draw = torch.Generator().manual_seed(5)
    drawn = {}
    for path in layers:
        for j, (rows, columns) in enumerate(LAYERS[path][1]):
            for side, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
                factor = torch.randn(shape, generator=draw, dtype=torch.double)
                drawn[f"{path}.matrix_{side}.{j}"] = factor
    return drawn


def _of_rank(factors: Factors, rank: int, size: int) -> Factors:
    """What one of ``size`` ranks holds of layers whose rows are cut."""
    return {
        name: factor.chunk(size)[rank].clone() if "matrix_B" in name else factor
        for name, factor in factors.items()
    }


COLUMN_LAYERS = tuple(path for path in LAYERS if not path.endswith("dense"))


def _saved(folder: Path, ranks: list[Factors], beside: tuple[str, ...] = FROZEN) -> Path:
    """A checkpoint as the published trainer and DeepSpeed leave it."""
    (folder / "400").mkdir(parents=True)
    (folder / "latest").write_text("400")
    for rank, factors in enumerate(ranks):
        content = {
            "module": {**{name: torch.zeros(2) for name in beside}, **factors},
            "iteration": 400,
            "client_lr_scheduler": {"start_lr": 1e-5, "num_iters": 400},
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "param_shapes": [{"mixins.eva.boi": torch.Size([1, 1, 64])}],
            "sparse_tensor_module_names": set(),
            "ds_config": {"bf16": {"enabled": True}},
        }
        torch.save(content, folder / "400" / f"mp_rank_{rank:02d}_model_states.pt")
    return folder


def _imported(source: Any, out: Path, **options: Any) -> Path:
    import_swiss_army_lora(source, out, config=tiny_config(), **options)
    return out


def _expected(factors: Factors, scale: float) -> dict[str, Tensor]:
    """The weights of the tiny model with the factors in them."""
    weights = dict(tiny_model().state_dict())
    for path in {name.rpartition(".matrix_")[0] for name in factors}:
        name, blocks = LAYERS[path]
        product = [
            factors[f"{path}.matrix_B.{j}"] @ factors[f"{path}.matrix_A.{j}"]
            for j in range(len(blocks))
        ]
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + scale * torch.cat(product)
    return weights


def _errors(adapter: Path, expected: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference of each merged weight, and of the logits before merging."""
    plain = tiny_model()
    plain.load_state_dict(expected)
    inputs = batch_of([picture(4), text(6)])
    model = peft.PeftModel.from_pretrained(tiny_model(), adapter)
    with torch.no_grad():
        errors = {"logits": model(**inputs).logits - plain(**inputs).logits}
    merged = model.merge_and_unload().state_dict()
    assert merged.keys() == expected.keys()
    errors |= {name: merged[name] - expected[name] for name in expected}
    return {name: float(error.abs().max()) for name, error in errors.items()}


def _source(kind: str, folder: Path) -> Any:
    factors = _factors()
    if kind == "state dict":
        return factors
    if kind == "safetensors":
        save_file(factors, folder / "factors.safetensors")
        return folder / "factors.safetensors"
    saved = _saved(folder, [factors])
    return saved if kind == "folder" else saved / "400" / "mp_rank_00_model_states.pt"


@pytest.mark.parametrize("kind", ["folder", "file", "safetensors", "state dict"])
def test_the_model_with_the_adapter_is_the_one_that_was_trained(kind: str, tmp_path: Path) -> None:
    source = _source(kind, tmp_path)
    alpha = 1 if kind == "folder" else 5
    options = {} if kind == "folder" else {"lora_alpha": alpha}
    errors = _errors(
        _imported(source, tmp_path / "out", **options), _expected(_factors(), alpha / RANK)
    )
    assert max(errors.values()) < 1e-10, errors


def test_layers_whose_rows_were_cut_over_ranks_are_put_together(tmp_path: Path) -> None:
    factors = _factors(COLUMN_LAYERS)
    ranks = [_of_rank(factors, rank, 2) for rank in range(2)]
    adapter = _imported(_saved(tmp_path, ranks), tmp_path / "out")
    errors = _errors(adapter, _expected(factors, 1 / RANK))
    assert max(errors.values()) < 1e-10, errors
    whole, listed = _imported(factors, tmp_path / "whole"), _imported(ranks, tmp_path / "listed")
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (whole / file).read_bytes() == (adapter / file).read_bytes()
        assert (listed / file).read_bytes() == (adapter / file).read_bytes()


def test_the_comparison_sees_blocks_ranks_and_scales_that_are_swapped(tmp_path: Path) -> None:
    factors = _factors(COLUMN_LAYERS)
    ranks = [_of_rank(factors, rank, 2) for rank in range(2)]
    swapped = dict(factors)
    for side in "AB":
        one, other = f"{LAYER}.matrix_{side}.0", f"{LAYER}.matrix_{side}.1"
        swapped[one], swapped[other] = factors[other], factors[one]
    expected = _expected(factors, 1 / RANK)
    wrong = [
        _imported(swapped, tmp_path / "blocks"),
        _imported(ranks[::-1], tmp_path / "ranks"),
        _imported(factors, tmp_path / "scale", lora_alpha=3),
    ]
    for adapter in wrong:
        errors = _errors(adapter, expected)
        assert errors[f"{LAYERS[LAYER][0]}.weight"] > 0.1
        assert errors["logits"] > 1e-3


def test_the_adapter_keeps_the_dtype_and_says_its_ranks(tmp_path: Path) -> None:
    half = {name: factor.bfloat16() for name, factor in _factors().items()}
    adapter = _imported(half, tmp_path / "out", lora_alpha=2)
    tensors = load_file(adapter / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1.self_attn.language_expert_query_key_value"
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert tensors[f"{prefix}.lora_A.weight"].shape == (3 * RANK, 64)
    assert tensors[f"{prefix}.lora_B.weight"].shape == (192, 3 * RANK)
    config = peft.LoraConfig.from_pretrained(adapter)
    assert (config.r, config.lora_alpha) == (RANK, 2)
    assert config.rank_pattern == {
        **{"language_expert_query_key_value": 9, "query_key_value": 9, "key_value": 6}
    }
    assert config.target_modules == {name for name, _ in LAYERS.values()}


class _Marker:
    """Unpickling it makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_no_code_of_a_pickle_runs_without_the_switch(zipped: bool, tmp_path: Path) -> None:
    file, marker = tmp_path / "evil.pt", tmp_path / "marker"
    content = {"module": _factors(), "extra": _Marker(marker)}
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(px.CheckpointError, match=r"mkdir, which is no tensor.*allow_pickle=True"):
        _imported(file, tmp_path / "out")
    assert not marker.exists()
    assert not (tmp_path / "out").exists()
    _imported(file, tmp_path / "out", allow_pickle=True)
    assert marker.exists()


def _change(**changed: Any) -> Factors:
    factors = _factors()
    for name, value in changed.items():
        if value is None:
            del factors[name]
        else:
            factors[name] = value
    return factors


REFUSED = {
    "missing": (
        {f"{LAYER}.matrix_A.2": None},
        rf"{re.escape(LAYER)}\.matrix_A\.2 is missing in the state dict",
    ),
    "one block more": ({f"{LAYER}.matrix_A.3": torch.ones(3, 64)}, "A.3 is one more than"),
    "wrong input": (
        {f"{LAYER}.matrix_A.0": torch.ones(3, 63)},
        r"A\.0 has the shape \(3, 63\) in the state dict, expected \(3, 64\) at LoRA rank 3",
    ),
    "wrong rank": (
        {f"{LAYER}.matrix_B.1": torch.ones(64, 4)},
        r"B\.1 has the shape \(64, 4\) in the state dict, expected \(64, 3\)",
    ),
    "not finite": (
        {f"{LAYER}.matrix_B.0": torch.full((64, 3), float("nan"))},
        "B.0 in the state dict is not of finite floating-point numbers",
    ),
    "quantized": (
        {f"{LAYER}.matrix_B.0": torch.ones(64, 3, dtype=torch.uint8)},
        "B.0 in the state dict is not of finite floating-point numbers",
    ),
    "a layer more": (
        {"transformer.layers.2.attention.dense.matrix_A.0": torch.ones(3, 64)},
        "transformer.layers.2.attention.dense has adapters, but is none of the layers",
    ),
    "another method": (
        {"mixins.ptuning.prefix": torch.ones(2)},
        "mixins.ptuning.prefix is neither an adapter nor a weight of CogAgent",
    ),
    "no tensor": ({f"{LAYER}.matrix_A.0": "text"}, "A.0 is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_factors_that_do_not_fit_are_refused_by_name(case: str, tmp_path: Path) -> None:
    changed, message = REFUSED[case]
    with pytest.raises(px.CheckpointError, match=message):
        _imported(_change(**changed), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_dense_layers_of_several_ranks_are_refused_with_the_reason(tmp_path: Path) -> None:
    dense = tuple(path for path in LAYERS if path.endswith("dense"))
    saved = _saved(tmp_path, [_factors(dense), _factors(dense)])
    with pytest.raises(
        px.CheckpointError, match="6 dense layers.*size 2.*the ranks computed different models"
    ):
        _imported(saved, tmp_path / "out")


def test_replicas_that_differ_and_ranks_that_are_absent_are_refused(tmp_path: Path) -> None:
    ranks = [_of_rank(_factors(COLUMN_LAYERS), rank, 2) for rank in range(2)]
    name = f"{LAYER}.matrix_A.1"
    for other in (ranks[1][name] + 1e-12, ranks[1][name].float()):
        ranks[1][name] = other
        with pytest.raises(px.CheckpointError, match=rf"{re.escape(name)} differs between rank 0"):
            _imported(ranks, tmp_path / "out")
    with pytest.raises(px.CheckpointError, match=r"shape \(32, 3\).*expected \(64, 3\).*size 1"):
        _imported(ranks[0], tmp_path / "out")
    with pytest.raises(px.CheckpointError, match="3 model-parallel ranks do not divide"):
        _imported([*ranks, ranks[0]], tmp_path / "out")
    saved = _saved(tmp_path / "saved", ranks)
    (saved / "400" / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(px.CheckpointError, match=r"found \['mp_rank_01_model_states.pt'\]"):
        _imported(saved, tmp_path / "out")
    (saved / "400" / "mp_rank_01_model_states.pt").rename(saved / "400" / "z3_rank_00_x.pt")
    with pytest.raises(px.CheckpointError, match="ZeRO-3"):
        _imported(saved, tmp_path / "out")


@pytest.mark.parametrize("name", TRAINED)
def test_what_was_trained_in_full_is_not_lost_silently(name: str, tmp_path: Path) -> None:
    group = re.escape(TRAINED[name])
    with pytest.raises(px.CheckpointError, match=rf"in full: 1 of {group}\. .*adapters_only=True"):
        _imported({name: torch.ones(2)}, tmp_path / "out")


def test_adapters_only_leaves_the_rest_out(tmp_path: Path) -> None:
    saved = _saved(tmp_path, [_factors()], beside=(*FROZEN, *TRAINED))
    alone = _imported(saved, tmp_path / "alone", adapters_only=True)
    expected = _imported(_factors(), tmp_path / "expected")
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (alone / file).read_bytes() == (expected / file).read_bytes()
    with pytest.raises(FileExistsError, match="is there already"):
        _imported(saved, alone, adapters_only=True)


def test_an_import_that_fails_leaves_no_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors").write_text("of others")
    with monkeypatch.context() as patches:
        patches.setattr(peft.LoraConfig, "save_pretrained", full)
        with pytest.raises(OSError, match="No space"):
            _imported(_factors(), out)
    assert os.listdir(out) == ["model.safetensors"]
    _imported(_factors(), out)
    names = {"model.safetensors", "adapter_model.safetensors", "adapter_config.json"}
    assert set(os.listdir(out)) == names


def test_files_without_adapters_or_damaged_are_refused(tmp_path: Path) -> None:
    with pytest.raises(px.CheckpointError, match="no adapters in it.*merged into the weights"):
        _imported(_saved(tmp_path / "merged", [{}]), tmp_path / "out")
    file = tmp_path / "damaged.pt"
    torch.save({"module": _factors()}, file)
    whole = file.read_bytes()
    for content in (b"", b"not a pickle", whole[: len(whole) // 2]):
        file.write_bytes(content)
        with pytest.raises(px.CheckpointError, match="damaged"):
            _imported(file, tmp_path / "out")
    with pytest.raises(ValueError, match="lora_alpha must be a finite number, got nan"):
        _imported(_factors(), tmp_path / "out", lora_alpha=float("nan"))


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([], r"a list must hold one file or state dict for each rank, got \[\]"),
        ([[{}, {}]], "a list must hold one file or state dict for each rank, got"),
        ([[]], "a list must hold one file or state dict for each rank, got"),
        ({"module": [1]}, "the state dict: expected a dict of tensors by name"),
        ([{1: torch.ones(2)}], "rank 0: the state dict: expected a dict of tensors by name"),
    ],
)
def test_what_is_no_rank_of_a_checkpoint_is_refused(
    ranks: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(px.CheckpointError, match=message):
        _imported(ranks, tmp_path / "out")
