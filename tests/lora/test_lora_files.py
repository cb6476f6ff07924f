"""Adapter files: those of PEFT, at any tp; merging; and what is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from ranks import pool
from reference import Tiny, batch, difference, exact, mesh_of, parallel, refusal
from reference_lora import (
    ALL,
    FILE,
    TINY,
    adapted,
    check_life,
    config,
    files_of_layouts,
    logits_in_life,
    logits_of,
    plain,
)
from safetensors.torch import load_file, save_file

import parallel_ext as px
from parallel_ext.distributed.errors import CheckpointError

INPUTS = {k: v for k, v in batch(TINY.vocab_size).items() if k != "labels"}
_logits = partial(logits_of, inputs=INPUTS)
EVERYTHING: dict[str, Any] = {
    "target_modules": [*ALL, "lm_head"],
    "lora_bias": True,
    "bias": "all",
    "modules_to_save": ["embed_tokens", "norm"],
}
BIASED = Tiny(bias=True)


def _save(directory: Path, tiny: Tiny, changes: dict[str, Any]) -> None:
    adapted(tiny, **changes).save_pretrained(directory)


def _save_by_position(directory: Path) -> None:
    model = adapted()
    model.add_adapter("second", config(r=2))
    model.save_pretrained(directory, True, ["second"], True)


def test_options_of_a_save_may_be_given_by_position(tmp_path: Path) -> None:
    pool(2).run(_save_by_position, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"second", "README.md"}
    tensors = load_file(tmp_path / "second" / FILE)
    assert tensors["base_model.model.model.embed_tokens.weight"].shape[0] == TINY.vocab_size
    assert {each.shape[0] for name, each in tensors.items() if "lora_A" in name} == {2}


def _two_adapters(timeout: float = 60.0) -> Any:
    mesh = px.init_mesh(tp=2, timeout=timeout)
    model = peft.get_peft_model(parallel(TINY.model(), mesh), config())
    model.add_adapter("second", config(r=2))
    return model


def _save_over(directory: Path, fails_at: str) -> tuple[dict[Path, bytes], dict[Path, bytes]]:
    """What a directory holds before and after a save over it, of which a file fills the disk."""
    model = _two_adapters()
    model.save_pretrained(directory)
    before = _contents(directory)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    for each in model.peft_config.values():
        each.lora_alpha = 9
    save_file = peft.peft_model.safe_save_file

    def full(tensors: dict[str, torch.Tensor], path: str, **options: Any) -> None:
        save_file(tensors, path, **options)
        if ("second" in path) == (fails_at == "second"):
            os.truncate(path, 100)
            raise OSError(errno.ENOSPC, "No space left on device")

    with (
        mock.patch.object(peft.peft_model, "safe_save_file", full),
        pytest.raises(OSError, match="No space"),
    ):
        model.save_pretrained(directory)
    return before, _contents(directory)


def _contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("fails_at", ["default", "second"])
def test_a_save_that_fails_leaves_the_adapters_before_it(tmp_path: Path, fails_at: str) -> None:
    (before, after), _ = pool(2).run(_save_over, tmp_path, fails_at)
    assert before == after
    assert {str(path.relative_to(tmp_path)) for path in before} == {
        *("README.md", FILE, "adapter_config.json"),
        *(f"second/{name}" for name in (FILE, "adapter_config.json")),
    }
    assert {path.name for path in tmp_path.iterdir()} == {
        *("README.md", FILE, "adapter_config.json", "second"),
    }


def _save_on_a_card(directory: Path) -> None:
    model = _two_adapters()
    model.save_pretrained(directory)
    model.save_pretrained(directory)


def test_what_a_model_card_says_stays(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\nTrained with care.\n")
    pool(2).run(_save_on_a_card, tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "license: mit" in card
    assert "library_name: peft" in card
    assert card.count("Trained with care.") == 1


def _save_slowly(directory: Path) -> None:
    model = _two_adapters(timeout=1.0)
    save_file = peft.peft_model.safe_save_file

    def slowly(*args: Any, **options: Any) -> None:
        time.sleep(2.0)
        save_file(*args, **options)

    with mock.patch.object(peft.peft_model, "safe_save_file", slowly):
        model.save_pretrained(directory)


def test_the_ranks_wait_for_a_slow_disk(tmp_path: Path) -> None:
    pool(2).run(_save_slowly, tmp_path)
    assert (tmp_path / "second" / FILE).exists()


def test_a_configuration_of_another_kind_is_refused(tmp_path: Path) -> None:
    peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]).save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="the configuration is a IA3Config, not one of LoRA"):
        px.LoraConfig.from_pretrained(tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter on all linears that 2 ranks saved; what changes it changes a copy."""
    directory = tmp_path_factory.mktemp("saved")
    pool(2).run(_save, directory, TINY, {})
    return directory


# Saving and loading.


@pytest.mark.parametrize(
    ("changes", "tiny"),
    [(EVERYTHING, BIASED), ({"target_modules": ["embed_tokens", "k_proj"]}, TINY)],
    ids=["everything", "embedding"],
)
def test_an_adapter_does_not_depend_on_tp_and_its_files_are_those_of_peft(
    tmp_path: Path, changes: dict[str, Any], tiny: Tiny
) -> None:
    changes = {**changes, "init_lora_weights": True, "base_model_name_or_path": "x"}
    for tp in (1, 2, 3):
        pool(tp).run(_save, tmp_path / str(tp), tiny, changes)
    by_peft = peft.get_peft_model(
        tiny.model(),
        peft.LoraConfig(r=5, lora_alpha=7, **{"target_modules": ALL, **changes}),
    )
    by_peft.save_pretrained(tmp_path / "peft")
    one, expected = files_of_layouts(tmp_path, ["1", "2", "3"])
    for name, value in one.items():
        if "lora_A" in name:
            assert value.abs().max() <= value.shape[1] ** -0.5
            assert value.std() == pytest.approx((value.shape[1] * 3) ** -0.5, rel=0.15)
        elif "lora_embedding_B" in name:
            assert value.std() == pytest.approx(1, rel=0.15)
        elif "lora_" in name:
            assert not value.any()
        else:
            assert torch.equal(value, expected[name]), name


def _save_sharded(directory: Path) -> tuple[str, str]:
    model = parallel(TINY.model(), mesh := mesh_of(tp=1))
    model = peft.get_peft_model(model, config())
    px.data_parallel(model, mesh).save_pretrained(directory)
    px.save_checkpoint(directory / "training", 1, model)
    return repr(model.get_base_model()).partition("(")[0], type(model.get_base_model()).__module__


def test_the_files_of_an_adapter_name_the_class_and_not_that_of_fsdp(tmp_path: Path) -> None:
    """By which PEFT finds the class of the base, where a configuration has no task_type."""
    model_class = type(TINY.model())
    name = {"base_model_class": model_class.__name__, "parent_library": model_class.__module__}
    assert {*pool(2).run(_save_sharded, tmp_path)} == {tuple(name.values())}
    files = list(tmp_path.rglob("adapter_config.json"))
    assert len(files) == 2
    for file in files:
        assert json.loads(file.read_text())["auto_mapping"] == name


def _load(directory: Path, tiny: Tiny) -> dict[str, torch.Tensor]:
    return logits_in_life(parallel(tiny.model(), mesh_of()), directory, INPUTS)[0]


@pytest.mark.parametrize(
    ("changes", "tiny", "tp"),
    [({}, TINY, 2), (EVERYTHING, BIASED, 1), (EVERYTHING, BIASED, 3)],
    ids=["all linears", "everything, one rank", "everything"],
)
def test_an_adapter_loads_at_any_tp_and_merges(
    tmp_path: Path, changes: dict[str, Any], tiny: Tiny, tp: int
) -> None:
    pool(2).run(_save, tmp_path, tiny, {"lora_dropout": 0.1, **changes})
    if "lora_bias" in changes:  # the head has no bias that could take the adapter's
        names = [*ALL, "lm_head"]
        edited = json.loads((tmp_path / "adapter_config.json").read_text())
        edited["target_modules"] = [name for name in names if name != "lm_head"]
        (tmp_path / "adapter_config.json").write_text(json.dumps(edited))
        tensors = load_file(tmp_path / FILE)
        kept = {name: value for name, value in tensors.items() if "lm_head" not in name}
        save_file(kept, tmp_path / FILE)
    expected = _logits(plain(tmp_path, tiny))
    for found in pool(tp).run(_load, tmp_path, tiny):
        check_life(found, expected, biased=bool(changes))


def _merged_files(adapter: Path, merged: Path) -> None:
    model = peft.PeftModel.from_pretrained(parallel(TINY.model(), mesh_of()), adapter)
    model.merge_and_unload().save_pretrained(merged)


def test_a_merged_model_is_saved_as_a_plain_one(saved: Path, tmp_path: Path) -> None:
    pool(3).run(_merged_files, saved, tmp_path)
    found = exact(type(TINY.model()).from_pretrained(tmp_path, dtype=torch.float64))
    expected = _logits(plain(saved))
    assert (_logits(found) - expected).abs().max() < 1e-9 * expected.abs().max()


def _bf16_merge() -> list[str]:
    """Names of what a merge and an unmerge in bf16 did not put back."""
    model = parallel(Tiny(dtype=torch.bfloat16).model(), mesh_of())
    model = peft.get_peft_model(model, config())
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.merge_adapter()
    assert not torch.equal(
        before["base_model.model.model.layers.0.mlp.up_proj.base_layer.weight"],
        model.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight,
    )
    model.unmerge_adapter()
    return [n for n, p in model.named_parameters() if not torch.equal(before[n], p)]


def test_unmerging_restores_every_bit_in_bf16() -> None:
    assert pool(2).run(_bf16_merge) == [[], []]


# What is refused, by one error on all ranks.


def _unequal_factor(factor: str, action: str) -> None:
    model = adapted()
    layer = model.base_model.model.model.layers[1].mlp
    linear = layer.up_proj if factor == "lora_A" else layer.down_proj
    with torch.no_grad():
        getattr(linear, factor)["default"].weight[0, 0] += mesh_of().tp_rank
    getattr(model, action)()


@pytest.mark.parametrize("factor", ["lora_A", "lora_B"])
@pytest.mark.parametrize("action", ["merge_adapter", "merge_and_unload"])
def test_a_merge_refuses_factors_that_differ_between_ranks(factor: str, action: str) -> None:
    linear = "up_proj" if factor == "lora_A" else "down_proj"
    words = f"layers.1.mlp.{linear}.{factor}.default.weight differs between ranks 0 and 1"
    pool(2).assert_raises(_unequal_factor, factor, action, error="DisagreementError", words=words)


def _merge(tied: bool, changes: dict[str, Any]) -> None:
    adapted(Tiny(tied=tied), **changes).merge_adapter()


CANNOT_MERGE: dict[str, tuple[bool, dict[str, Any], str]] = {
    "tied head": (True, {"target_modules": ["lm_head"]}, "embedding and head share this weight"),
    "tied embedding": (
        *(True, {"target_modules": ["embed_tokens"]}),
        "embedding and head share this weight",
    ),
    "bias without a place": (
        *(False, {"lora_bias": True}),
        "lora_bias=True cannot be merged into a base without a bias",
    ),
    "whole head beside a tied embedding": (
        *(True, {"modules_to_save": ["lm_head"]}),
        "was trained whole (modules_to_save)",
    ),
}


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
@pytest.mark.parametrize("case", CANNOT_MERGE)
def test_a_merge_that_would_be_wrong_is_refused(case: str) -> None:
    tied, changes, text = CANNOT_MERGE[case]
    pool(2).assert_raises(_merge, tied, changes, words=text)


def _cut(directory: Path, size: int) -> None:
    content = (directory / FILE).read_bytes()
    (directory / FILE).write_bytes(content[:size] if size > 0 else content[: len(content) + size])


def _edit(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(directory / FILE)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / FILE)


def _configure(directory: Path, **changes: Any) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


PREFIX = "base_model.model.model.layers.0."
UP_A, DOWN_A = f"{PREFIX}mlp.up_proj.lora_A.weight", f"{PREFIX}mlp.down_proj.lora_A.weight"
BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated header": (lambda d: _cut(d, 20), FILE),
    "truncated data": (lambda d: _cut(d, -8), FILE),
    "empty file": (lambda d: (d / FILE).write_bytes(b""), FILE),
    "missing tensor": (lambda d: _edit(d, lambda t: t.pop(UP_A)), f"it lacks {UP_A}"),
    "further tensor": (
        lambda d: _edit(
            d, lambda t: t.update({"base_model.model.other.lora_A.weight": t[UP_A] + 1})
        ),
        "it holds base_model.model.other.lora_A.weight, unknown here",
    ),
    "another rank": (
        lambda d: _configure(d, r=6),
        f"{DOWN_A} has the shape (5, 97), but that of the model, sharded over tp=2, has the full "
        "shape (6, 97)",
    ),
    "A of a shard": (
        lambda d: _edit(d, lambda t: t.update({DOWN_A: t[DOWN_A][:, :49]})),
        f"{DOWN_A} has the shape (5, 49), but that of the model, sharded over tp=2, has the full "
        "shape (5, 97)",
    ),
    "another target": (
        lambda d: _configure(d, target_modules=["wo"]),
        "Target modules {'wo'} not found in the base model",
    ),
    "one target less": (
        lambda d: _configure(d, target_modules=ALL[1:]),
        f"it holds {PREFIX}self_attn.q_proj.lora_A.weight, unknown here",
    ),
    "no configuration": (lambda d: (d / "adapter_config.json").unlink(), "adapter_config.json"),
    "broken configuration": (
        lambda d: (d / "adapter_config.json").write_text("{"),
        "line 1 column 2",
    ),
    "no weights": (lambda d: (d / FILE).unlink(), "adapter_model"),
}


def _load_bad(directory: Path) -> None:
    peft.PeftModel.from_pretrained(parallel(TINY.model(), mesh_of()), directory)


@pytest.mark.parametrize("case", BAD)
def test_a_bad_adapter_is_one_error_on_all_ranks(saved: Path, tmp_path: Path, case: str) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    BAD[case][0](tmp_path)
    pool(2).assert_raises(_load_bad, tmp_path, words=BAD[case][1])


def _load_other_base(directory: Path) -> None:
    model = parallel(Tiny(inner=96).model(), mesh_of())
    peft.PeftModel.from_pretrained(model, directory)


def test_an_adapter_of_another_base_is_refused(saved: Path) -> None:
    words = (f"{DOWN_A} has the shape (5, 97)", "full shape (5, 96)")
    pool(2).assert_raises(_load_other_base, saved, words=words)


def _load_with(directory: Path, options: dict[str, Any]) -> None:
    model = adapted()
    model.load_adapter(directory, "second", **options)


def test_mismatched_sizes_are_never_ignored(saved: Path) -> None:
    words = "would ignore every factor that is sharded"
    pool(2).assert_raises(_load_with, saved, {"ignore_mismatched_sizes": True}, words=words)


def _combine(kind: str) -> torch.Tensor:
    model = adapted()
    model.add_adapter("second", config(r=5))
    model.base_model.add_weighted_adapter(["default", "second"], [0.3, 0.7], "both", kind)
    model.set_adapter("both")
    return _logits(model)


@pytest.mark.parametrize("kind", ["linear", "cat"])
def test_adapters_combine_as_on_one_rank(kind: str) -> None:
    (expected,) = pool(1).run(_combine, kind)
    for found in pool(3).run(_combine, kind):
        assert (found - expected).abs().max() < 1e-9 * expected.abs().max()


def test_a_combination_that_needs_whole_factors_is_refused() -> None:
    words = "combination_type='svd') at tp=2 needs whole factors"
    pool(2).assert_raises(_combine, "svd", words=words)


def _whole_state(modules_to_save: list[str] | None) -> None:
    px.full_state_dict(adapted(modules_to_save=modules_to_save))


@pytest.mark.parametrize("saved", [None, ["embed_tokens"]])
def test_the_whole_state_of_an_adapted_model_is_refused_with_advice(
    saved: list[str] | None,
) -> None:
    words = "the model has adapters; merge_and_unload"
    pool(2).assert_raises(_whole_state, saved, error=CheckpointError.__name__, words=words)


def _other_start(directory: Path, start: str) -> tuple[str, float]:
    """Why an adapter is refused as it is, and its logits by a config with another start."""
    model = parallel(TINY.model(), mesh_of())
    why = refusal(lambda: peft.PeftModel.from_pretrained(model, directory))
    changed = px.LoraConfig.from_pretrained(directory)
    changed.init_lora_weights = True
    model = peft.PeftModel.from_pretrained(model, directory, config=changed)
    expected = peft.PeftModel.from_pretrained(TINY.model(), directory)
    return why, difference(*(each(**INPUTS).logits for each in (model, expected)))


@pytest.mark.parametrize("start", ["eva", "orthogonal"])
def test_an_adapter_whose_factors_began_otherwise_is_loaded_by_a_plain_config(
    start: str, tmp_path: Path
) -> None:
    options = {"eva_config": peft.EvaConfig(rho=1.5)} if start == "eva" else {}
    given = config(r=4, init_lora_weights=start, target_modules=["q_proj", "down_proj"], **options)
    model = peft.get_peft_model(TINY.model(), given)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    for why, of_logits in pool(2).run(_other_start, tmp_path, start):
        assert f"does not support init_lora_weights='{start}'; a saved adapter has no use" in why
        assert of_logits < 1e-10


@pytest.mark.parametrize("start", ["pissa_niter_4", "olora", "corda"])
def test_a_start_that_changes_the_base_is_refused_with_the_way_out(start: str) -> None:
    model = parallel(TINY.model(), px.init_mesh())
    why = refusal(lambda: peft.get_peft_model(model, config(init_lora_weights=start)))
    assert "path_initial_model_for_weight_conversion=FOLDER" in why
