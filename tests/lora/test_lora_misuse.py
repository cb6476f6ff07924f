"""What a user may do to adapters on a parallel model: right, or one error on all ranks."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import peft
import pytest
import torch
from ranks import pool
from reference import assert_within, batch, mesh_of, parallel
from reference_lora import ALL, FILE, TINY, adapted, config, gradient_errors, plain, share_masks
from torch.utils.checkpoint import checkpoint

import parallel_ext as px

ONE = batch(TINY.vocab_size)


def _rank() -> int:
    return mesh_of().tp_rank


# Checkpoints of other things than a decoder layer: the mask must be that of the forward.


def _whole_model(model: Any, reentrant: bool) -> None:
    def loss(ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, labels=labels, attention_mask=mask).loss

    inputs = (ONE["input_ids"], ONE["labels"], ONE["attention_mask"])
    checkpoint(loss, *inputs, use_reentrant=False).backward()


def _mlps(model: Any, reentrant: bool) -> None:
    for layer in model.base_model.model.model.layers:
        forward = layer.mlp.forward

        def mlp(self: Any, x: torch.Tensor, forward: Any = forward) -> torch.Tensor:
            return checkpoint(forward, x, use_reentrant=reentrant)

        layer.mlp.forward = MethodType(mlp, layer.mlp)
    loss = model(**ONE).loss
    model(**ONE)  # a forward between, whose masks are others
    loss.backward()


def _inner_model(model: Any, reentrant: bool) -> None:
    inner = model.get_base_model()
    hidden = inner.model(input_ids=ONE["input_ids"], attention_mask=ONE["attention_mask"])
    logits = inner.lm_head(hidden.last_hidden_state)
    shifted = torch.nn.functional.pad(ONE["labels"], (0, 1), value=-100)[:, 1:]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten()).backward()


def _nested(model: Any, reentrant: bool) -> None:
    """Checkpoints of MLPs inside of those of their layers."""
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    _mlps(model, not reentrant)


def _any_random_state(model: Any, reentrant: bool) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant, "preserve_rng_state": False})
    loss = model(**ONE).loss
    torch.rand(3)
    loss.backward()


WAYS = {"whole model": _whole_model, "MLPs": _mlps, "inner model": _inner_model}
WAYS |= {"nested": _nested, "any random state": _any_random_state}


def _recomputed(directory: Path, way: str, reentrant: bool) -> dict[str, float]:
    model = adapted(lora_dropout=0.4)
    model.save_pretrained(directory)
    reference = plain(directory).train()
    share_masks(reference, model)[0] = 1
    model.enable_input_require_grads()
    WAYS[way](model.train(), reentrant)
    reference(**ONE).loss.backward()
    return gradient_errors(
        model, {n: p.grad for n, p in reference.named_parameters() if p.requires_grad}
    )


@pytest.mark.parametrize(
    ("way", "reentrant"),
    [
        *[("whole model", False), ("MLPs", False), ("MLPs", True), ("inner model", False)],
        *[("nested", False), ("nested", True)],
        *[("any random state", False), ("any random state", True)],
    ],
)
def test_masks_are_those_of_the_forward(tmp_path: Path, way: str, reentrant: bool) -> None:
    assert_within(pool(2).run(_recomputed, tmp_path, way, reentrant), 1e-9)


def _steps_of_the_inner_model() -> list[float]:
    inner = adapted(lora_dropout=0.4).train().get_base_model()
    with torch.no_grad():
        return [inner.model(ONE["input_ids"]).last_hidden_state.sum().item() for _ in range(3)]


def test_every_call_of_the_inner_model_has_its_own_masks() -> None:
    for sums in pool(2).run(_steps_of_the_inner_model):
        assert len(set(sums)) == 3


def _random_numbers_of_a_step(how: str) -> bool:
    """Return whether a step with dropout leaves torch's generator as it found it."""
    model = adapted(lora_dropout=0.4).train()
    model.enable_input_require_grads()
    if how:
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
    before = torch.get_rng_state()
    model(**ONE).loss.backward()
    return torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("how", ["", "not reentrant", "reentrant"])
def test_a_step_with_dropout_draws_nothing_from_the_users_generator(how: str) -> None:
    assert pool(2).run(_random_numbers_of_a_step, how) == [True, True]


# Ranks that differ.

DIFFERENT: dict[str, list[Any]] = {
    "lora_alpha": [7, 9],
    "r": [5, 6],
    "lora_dropout": [0.1, 0.3],
    "use_rslora": [False, True],
    "init_lora_weights": [True, False],
    "target_modules": [["q_proj"], ["q_proj", "o_proj"]],
}


def _different_configs(name: str) -> None:
    adapted(**{name: DIFFERENT[name][_rank()]})


@pytest.mark.parametrize("name", DIFFERENT)
def test_configurations_that_differ_are_refused(name: str) -> None:
    text = f"adding adapter 'default': {name} must be equal on all ranks, but is "
    pool(2).assert_raises(_different_configs, name, error="DisagreementError", words=text)


def _scale(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer) and _rank():
            module.set_scale("default", 3.0)


def _activate(model: Any) -> None:
    model.add_adapter("second", config(r=2))
    model.set_adapter(["default", "second"][_rank()], inference_mode=True)


def _disable(model: Any) -> None:
    if _rank():
        model.base_model.disable_adapter_layers()


def _merge(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer) and _rank():
            module.merge()


def _dropouts(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) and _rank():
            module.p = 0.5


STATES = {f.__name__.lstrip("_"): f for f in (_scale, _activate, _disable, _merge, _dropouts)}


def _different_states(name: str, train: bool) -> None:
    model = adapted(lora_dropout=0.1).train(train)
    STATES[name](model)
    model(**ONE)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", STATES)
def test_adapters_in_different_states_are_refused(name: str, train: bool) -> None:
    pool(2).assert_raises(_different_states, name, train, error="DisagreementError")


def _different_files(directory: Path) -> None:
    os.chdir(directory / str(_rank()))
    try:
        peft.PeftModel.from_pretrained(parallel(TINY.model(), mesh_of()), "x")
    finally:
        os.chdir("/")


def _two_seeds(directory: Path) -> None:
    for seed in range(2):
        model = parallel(TINY.model(), mesh_of())
        torch.manual_seed(seed)
        peft.get_peft_model(model, config()).save_pretrained(directory / str(seed) / "x")


def test_files_that_differ_are_refused(tmp_path: Path) -> None:
    pool(2).run(_two_seeds, tmp_path)
    text = "; give all ranks the same files"
    pool(2).assert_raises(_different_files, tmp_path, error="DisagreementError", words=text)


def _selected() -> None:
    model = adapted()
    model.add_adapter("second", config(r=2))
    names = ["default"] if _rank() else ["default", "second"]
    model.save_pretrained("/nowhere", selected_adapters=names)


def test_a_save_of_different_adapters_is_refused() -> None:
    text = "must be equal on all ranks, but is to be saved on rank 0 and absent on rank 1"
    pool(2).assert_raises(_selected, error="DisagreementError", words=text)


def _one_nan() -> None:
    model = adapted()
    if _rank():
        up = model.base_model.model.model.layers[0].mlp.up_proj
        up.lora_B["default"].weight.data[0, 0] = float("nan")
    before = [p.detach().clone() for p in model.parameters()]
    try:
        model.merge_adapter(safe_merge=True)
    finally:
        for old, new in zip(before, model.parameters(), strict=True):
            assert torch.equal(old.nan_to_num(), new.nan_to_num()), "something was merged"


def test_a_safe_merge_fails_on_all_ranks_and_changes_nothing() -> None:
    pool(2).assert_raises(_one_nan, words="NaN or infinite values in the merged weights: default")


def _different_norms() -> None:
    model = adapted(modules_to_save=["norm"])
    model.base_model.model.model.norm.modules_to_save["default"].weight.data.add_(_rank())
    model.merge_and_unload()


def test_a_merge_compares_whole_modules_too() -> None:
    text = "norm.modules_to_save.default.weight differs between ranks 0 and 1"
    pool(2).assert_raises(_different_norms, error="DisagreementError", words=text)


# What is not served.


def _save_with(**options: Any) -> Callable[[Any], None]:
    return lambda model: model.save_pretrained("/nowhere", **options)


def _prompt_tuning(model: Any) -> None:
    peft.get_peft_model(
        parallel(TINY.model(), mesh_of()),
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    )


def _changed_base(model: Any) -> None:
    model.merge_adapter()
    weight = model.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight
    with torch.no_grad():
        weight.add_(1)
    model.unmerge_adapter()


MISUSES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "gradients checked": (
        lambda model: px.check_gradients(model, ONE),
        "NotImplementedError: check_gradients of a model with adapters is not supported",
    ),
    "own state dict": (
        _save_with(state_dict={"a": torch.ones(1)}),
        "NotImplementedError: state_dict is not supported here",
    ),
    "weight conversion": (
        _save_with(path_initial_model_for_weight_conversion="x"),
        "NotImplementedError: path_initial_model_for_weight_conversion is not supported here",
    ),
    "unknown adapter": (
        _save_with(selected_adapters=["nope"]),
        "ValueError: there is no adapter nope",
    ),
    "shards as a state dict": (
        lambda model: peft.get_peft_model_state_dict(model),
        "NotImplementedError: would hold this rank's shards only",
    ),
    "a part of the tensors": (
        lambda model: peft.set_peft_model_state_dict(model, {"x": torch.ones(1)}),
        "ValueError: it lacks base_model.model.model.layers.0.mlp.down_proj.lora_A.weight",
    ),
    "prompt tuning": (_prompt_tuning, "NotImplementedError: only LoRA is supported"),
    "a base changed while merged": (
        _changed_base,
        "RuntimeError: model.layers.0.mlp.up_proj.weight was changed after the merge",
    ),
    "rank that is no number": (
        lambda model: model.add_adapter("b", config(r=2.5)),
        "ValueError: the rank must be an integer of at least 1, got r=2.5",
    ),
    "rank of a pattern": (
        lambda model: model.add_adapter("b", config(rank_pattern={"q_proj": -1})),
        "ValueError: the rank must be an integer of at least 1, got q_proj=-1",
    ),
    "alpha that is no number": (
        lambda model: model.add_adapter("b", config(lora_alpha=float("inf"))),
        "ValueError: lora_alpha must be a finite number, got lora_alpha=inf",
    ),
    "negative dropout": (
        lambda model: model.add_adapter("b", config(lora_dropout=-0.5)),
        "ValueError: lora_dropout must be in [0, 1], got -0.5",
    ),
}


def _misuse(case: str) -> None:
    MISUSES[case][0](adapted())


@pytest.mark.parametrize("case", MISUSES)
def test_misuse_is_refused_on_all_ranks(case: str) -> None:
    error, _, text = MISUSES[case][1].partition(": ")
    pool(2).assert_raises(_misuse, case, error=error, words=text)


# What must work.


def _embedding_adapters() -> torch.Tensor:
    model = adapted(target_modules=["embed_tokens", "q_proj"])
    model.add_adapter("second", config(r=2, target_modules=["embed_tokens", "q_proj"]))
    model.delete_adapter("second")
    model.merge_adapter()
    model.unmerge_adapter()
    return model.eval()(input_ids=ONE["input_ids"]).logits.detach()


def test_an_adapter_of_the_embedding_can_be_deleted() -> None:
    expected, _ = pool(2).run(_embedding_adapters)
    assert expected.isfinite().all()


def _training_without_an_adapter() -> float:
    model = adapted().train()
    model.add_adapter("second", config(r=2))
    model.base_model.set_adapter(["default", "second"])
    model(**ONE)  # begins to compare parameters, one in each forward
    several = len(list(model.parameters()))
    model.delete_adapter("second")
    return [model(**ONE).loss.item() for _ in range(several)][-1]


def test_training_goes_on_when_an_adapter_was_deleted() -> None:
    first, second = pool(2).run(_training_without_an_adapter)
    assert first == second


def _other_end() -> list[bool]:
    tiny = type(TINY)(tied=True)
    model = adapted(tiny, target_modules=["lm_head"])
    model.add_adapter("second", config(target_modules=["q_proj"]))
    model.delete_adapter("default")
    model.add_adapter("third", config(target_modules=["embed_tokens"]))
    return ["third" in model.peft_config]


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
def test_the_other_end_can_be_adapted_once_the_first_is_free() -> None:
    assert pool(2).run(_other_end) == [[True]] * 2


def _copies() -> list[float]:
    """Losses of a model with dropout, of its copy, and of a pickled layer."""
    model = adapted(lora_dropout=0.4).train()
    model(**ONE)
    other = copy.deepcopy(model)
    losses = [each(**ONE).loss.item() for each in (model, other)]
    layer = model.base_model.model.model.layers[0].mlp.down_proj.base_layer
    stream = io.BytesIO()
    torch.save(layer, stream)
    stream.seek(0)
    assert torch.equal(torch.load(stream, weights_only=False).weight, layer.weight)
    return losses


def test_a_copy_draws_what_the_original_draws_and_layers_pickle() -> None:
    for first, second in pool(2).run(_copies):
        assert first == second


def _by_transformers(directory: Path) -> list[str]:
    model = adapted(r=2)
    model.save_pretrained(directory)
    return sorted(p.name for p in directory.iterdir())


def test_the_directory_holds_what_pefts_holds(tmp_path: Path) -> None:
    names, _ = pool(2).run(_by_transformers, tmp_path / "ours")
    by_peft = peft.get_peft_model(TINY.model(), peft.LoraConfig(r=2, target_modules=ALL))
    by_peft.save_pretrained(tmp_path / "theirs")
    assert names == sorted(p.name for p in (tmp_path / "theirs").iterdir())
    assert FILE in names


def _of_own_seeds() -> dict[str, torch.Tensor]:
    """What every rank has whole of new adapters, and the keys of their masks."""
    model = parallel(TINY.model(), mesh_of())
    torch.manual_seed(5 + _rank())
    model = peft.get_peft_model(model, config(lora_dropout=0.4))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    key = layer.dropout_masks("default")["key"]
    return {"A": layer.lora_A["default"].weight.detach(), "key": torch.tensor(key)}


def test_adapters_begin_equal_on_ranks_of_different_seeds() -> None:
    first, second = pool(2).run(_of_own_seeds)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_a_batch_of_several_adapters_is_refused() -> None:
    model = peft.get_peft_model(parallel(TINY.model(), px.init_mesh()), config()).eval()
    with pytest.raises(NotImplementedError, match="batches of several adapters"):
        model(ONE["input_ids"], adapter_names=["default", "__base__"])
