"""peft's functions on models, and its configurations."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import interplay_torch
import peft
import peft.optimizers
import torch
from interplay import TP, Spread, Trial, close, each_refused, exact, expect, refused, step
from peft import get_peft_model_state_dict as imported_by_name
from peft.utils import hotswap
from safetensors.torch import load_file
from torch import nn

import parallel_ext as px
from parallel_ext.sharding.named_shards import named_shards
from parallel_ext.sharding.slices import take

P = "peft"
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OTHERS = sorted(
    name
    for name in peft.__all__
    if isinstance(kind := getattr(peft, name), type)
    and issubclass(kind, peft.PeftConfig)
    and not issubclass(peft.LoraConfig, kind)
)

TUNERS = sorted(
    {kind.__name__ for kind in peft.PEFT_TYPE_TO_TUNER_MAPPING.values()}
    & {name for name in peft.__all__ if name.endswith("Model")} - {"LoraModel"}
)
OPTIONS = ("ArrowConfig", "BdLoraConfig", "EvaConfig", "KasaConfig", "LoftQConfig", "LoraGAConfig")
OPTIONS += ("MontecloraConfig", "VeloraConfig", "LoraRuntimeConfig")


def adapter(trial: Trial, name: str, seed: int, targets: list[str], **options: Any) -> Path:
    """The directory of an adapter that plain PEFT has written."""
    path = trial.folder / name
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **options)
    model = peft.get_peft_model(trial.tiny.model(), config)
    if trial.mesh.rank == 0:
        model.save_pretrained(path)
    trial.mesh.control.barrier(name)
    return path


def adapted(trial: Trial, path: Path, trained: bool = True) -> tuple[Any, Any]:
    """Our model and the plain one with an adapter that was written."""
    load = peft.PeftModel.from_pretrained
    models = [load(m, path, is_trainable=trained) for m in (trial.model, trial.reference)]
    return models[0], models[1]


def equal(ours: nn.Module, theirs: nn.Module, tolerance: float = 1e-6) -> None:
    """Raise unless the factors of both are equal."""
    full = dict(theirs.named_parameters())
    for name, parameter, layout in named_shards(ours):
        if "lora_" in name:
            rank = px.parallel.state.state_of(ours).mesh.rank
            close(parameter.detach(), take(full[name].detach(), layout, rank), tolerance)


@exact(
    f"{P}.get_peft_model",
    f"{P}.LoraConfig",
    f"{P}.PeftModel.from_pretrained",
    f"{P}.PeftModel.save_pretrained",
    f"{P}.PeftModelForCausalLM",
)
def lora(trial: Trial) -> None:
    path = adapter(trial, "one", 5, ALL)
    ours, theirs = adapted(trial, path)
    flops = [interplay_torch.counted(model, trial.whole) for model in (ours, theirs)]
    close(
        sum(trial.mesh.control.all_gather_object(flops[0])) / flops[1], 1.0, 0.1
    )  # both multiply A
    for model in (ours, theirs):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):
            step(model, optimizer, trial.whole)
    equal(ours, theirs)
    ours.save_pretrained(trial.folder / "saved")
    saved = load_file(trial.folder / "saved" / "adapter_model.safetensors")
    expected = peft.get_peft_model_state_dict(theirs)
    for name, value in saved.items():
        close(value, expected[name], 1e-6)
    made = peft.get_peft_model(trial.another(), px.LoraConfig(target_modules=["q_proj"]))
    close(made.peft_type == peft.PeftType.LORA, True)


@refused(*(f"{P}.{name}" for name in OTHERS), instead="only LoRA is supported on a parallel model")
def other_configurations(trial: Trial) -> None:
    for name in OTHERS:
        config = object.__new__(getattr(peft, name))
        config.__dict__.update(base_model_name_or_path=None, task_type=None, revision=None)
        for mixed in (False, True):
            adapt = partial(peft.get_peft_model, trial.model, config, mixed=mixed)
            expect(NotImplementedError, f"not {name}", adapt)
    peft.get_peft_model(trial.model, peft.IA3Config(target_modules=["k_proj"]))


@refused(
    *(f"{P}.{name}" for name in TUNERS),
    instead="only LoRA is supported",
    spreads=(*TP, Spread(1, 1)),
)
def other_tuners(trial: Trial) -> None:
    config = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    each_refused(
        lambda: peft.AdaptionPromptModel(trial.model, {}, "default"),
        lambda: named(lambda: peft.IA3Model(trial.model, config, "default")),
        lambda: peft.LoHaModel(trial.model, config, "default"),
    )


@refused(
    f"{P}.LoraConfig (other options)", *(f"{P}.{n}" for n in OPTIONS), instead="does not support"
)
def other_options(trial: Trial) -> None:
    options = [{"init_lora_weights": "pissa"}, {"layer_replication": [(0, 1)]}]
    options += [{"init_lora_weights": "eva"}]
    for each in options:
        config = peft.LoraConfig(target_modules=["q_proj"], **each)
        adapt = partial(peft.get_peft_model, trial.model, config)
        expect(NotImplementedError, "does not support", adapt)
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights="olora")
    peft.get_peft_model(trial.model, config)


@refused(f"{P}.PeftMixedModel", instead="only LoRA is supported", spreads=(*TP, Spread(1, 1)))
def mixed(trial: Trial) -> None:
    peft.get_peft_model(trial.model, peft.LoraConfig(target_modules=["q_proj"]), mixed=True)


@exact(
    f"{P}.PeftModel.load_adapter",
    f"{P}.PeftModel.set_adapter",
    f"{P}.PeftModel.delete_adapter",
    f"{P}.PeftModel.disable_adapter",
    f"{P}.PeftModel.add_adapter",
    f"{P}.PeftModel.get_base_model",
    f"{P}.PeftModel.generate",
    f"{P}.PeftModel.set_requires_grad",
)
def several_adapters(trial: Trial) -> None:
    first, second = adapter(trial, "one", 5, ALL), adapter(trial, "two", 6, ["q_proj"])
    models = adapted(trial, first, trained=False)
    losses = []
    for model in models:
        model.load_adapter(second, "second")
        own = []
        for name in ("default", "second"):
            model.set_adapter(name)
            own.append(model(**trial.whole).loss.item())
        with model.disable_adapter():
            own.append(model(**trial.whole).loss.item())
        model.set_requires_grad("second")
        model.set_adapter("default")
        model.delete_adapter("second")
        own.append(model(**trial.whole).loss.item())
        ids = trial.whole["input_ids"][1:, :4]
        own += model.generate(input_ids=ids, max_new_tokens=3, do_sample=False)[0].tolist()
        losses.append(own)
    close(losses[0], losses[1], 1e-6)


@exact(
    *(
        f"{P}.LoraModel.{name}"
        for name in ("merge_adapter", "unmerge_adapter", "merge_and_unload", "unload")
    )
)
def merged(trial: Trial) -> None:
    first, second = adapter(trial, "one", 5, ALL), adapter(trial, "two", 6, ["q_proj"])
    ours, theirs = adapted(trial, first, trained=False)
    before = ours(**trial.whole).loss.item()
    for model in (ours, theirs):
        model.merge_adapter()
    close(ours(**trial.whole).loss, theirs(**trial.whole).loss, 1e-6)
    for model in (ours, theirs):
        model.unmerge_adapter()
    close(ours(**trial.whole).loss, before, 1e-6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours.unmerge_adapter()
    close(any("nothing is merged" in str(each.message) for each in caught), True)
    for model in (ours, theirs):
        model.load_adapter(second, "second")
        model.merge_adapter(["second"])
    close(ours(**trial.whole).loss, theirs(**trial.whole).loss, 1e-6)
    losses = []
    for model in (ours, theirs):
        with model.disable_adapter():
            losses.append(model(**trial.whole).loss)
    close(*losses, 1e-6)
    close(
        *(
            model.merge_and_unload(adapter_names=["second"])(**trial.whole).loss
            for model in (ours, theirs)
        ),
        1e-6,
    )


@exact(f"{P}.LoraModel.add_weighted_adapter", how="linear and cat; other ways are refused")
def weighted(trial: Trial) -> None:
    first, second = adapter(trial, "one", 5, ALL), adapter(trial, "two", 6, ALL)
    models, losses = adapted(trial, first, trained=False), []
    for model in models:
        model.load_adapter(second, "second")
        for kind in ("linear", "cat"):
            model.add_weighted_adapter(["default", "second"], [0.5, 2.0], kind, kind)
            model.set_adapter(kind)
            losses.append(model(**trial.whole).loss.item())
    close(losses[:2], losses[2:], 1e-6)


@exact(
    f"{P}.utils.hotswap.hotswap_adapter",
    f"{P}.utils.hotswap.hotswap_adapter_from_state_dict",
    how="adapters of the same ranks",
)
def hotswapped(trial: Trial) -> None:
    first = adapter(trial, "one", 5, ALL)
    second = adapter(trial, "two", 6, ALL, lora_alpha=16)
    models = adapted(trial, first, trained=False)
    for model in models:
        hotswap.hotswap_adapter(model, str(second), "default", torch_device="cpu")
    equal(*models)
    close(models[0](**trial.whole).loss, models[1](**trial.whole).loss, 1e-6)
    models[0].save_pretrained(trial.folder / "saved")
    ours, theirs = (
        load_file(path / "adapter_model.safetensors") for path in (trial.folder / "saved", second)
    )
    close(all(torch.equal(ours[name], theirs[name]) for name in theirs), True)


@refused(
    f"{P}.utils.hotswap.hotswap_adapter (of other ranks)", instead="load it as another adapter"
)
def hotswapped_rank(trial: Trial) -> None:
    ours, _ = adapted(trial, adapter(trial, "one", 5, ["q_proj"]), trained=False)
    torch.manual_seed(3)
    other = peft.get_peft_model(trial.tiny.model(), peft.LoraConfig(r=3, target_modules=["q_proj"]))
    if trial.mesh.rank == 0:
        other.save_pretrained(trial.folder / "other")
    trial.mesh.control.barrier("other")
    try:
        hotswap.hotswap_adapter(ours, str(trial.folder / "other"), "default", torch_device="cpu")
    finally:
        trial.model = ours.unload()


@refused(f"{P}.utils.hotswap.prepare_model_for_compiled_hotswap", instead="needs full tensors")
def prepared_hotswap(trial: Trial) -> None:
    hotswap.prepare_model_for_compiled_hotswap(trial.model, target_rank=8)


@refused(
    f"{P}.get_peft_model_state_dict",
    f"{P}.utils.get_peft_model_state_dict",
    f"{P}.utils.save_and_load.get_peft_model_state_dict",
    instead="save_pretrained gathers them",
)
def peft_state_dict(trial: Trial) -> None:
    model = peft.get_peft_model(trial.model, peft.LoraConfig(target_modules=["q_proj"]))
    try:
        each_refused(
            lambda: named(lambda: peft.utils.get_peft_model_state_dict(model)),
            lambda: named(lambda: peft.utils.save_and_load.get_peft_model_state_dict(model)),
            lambda: imported_by_name(model),
        )
    finally:
        trial.model = model.unload()


def named(call: Any) -> None:
    """Let an error be one that :func:`each_refused` knows."""
    try:
        call()
    except NotImplementedError as error:
        raise NotImplementedError(f"not supported on a parallel model: {error}") from error


@exact(f"{P}.set_peft_model_state_dict", f"{P}.load_peft_weights")
def set_peft_state_dict(trial: Trial) -> None:
    first, second = adapter(trial, "one", 5, ALL), adapter(trial, "two", 6, ALL)
    models = adapted(trial, first, trained=False)
    for model in models:
        peft.set_peft_model_state_dict(model, peft.load_peft_weights(str(second), device="cpu"))
    equal(*models)


@exact(
    f"{P}.get_base_model_state_dict",
    f"{P}.set_base_model_state_dict",
    how="this rank's shards; takes full tensors too",
)
def base_state_dict(trial: Trial) -> None:
    ours, theirs = adapted(trial, adapter(trial, "one", 5, ["q_proj"]), trained=False)
    full = trial.tiny.model(seed=2).state_dict()
    for model in (ours, theirs):
        peft.set_base_model_state_dict(model, full, strict=False)
    close(ours(**trial.whole).loss, theirs(**trial.whole).loss, 1e-6)
    again = peft.get_base_model_state_dict(ours)
    peft.set_base_model_state_dict(ours, again, strict=False)
    close(ours(**trial.whole).loss, theirs(**trial.whole).loss, 1e-6)


@exact(
    f"{P}.inject_adapter_in_model",
    f"{P}.cast_mixed_precision_params",
    f"{P}.helpers.rescale_adapter_scale",
    f"{P}.get_layer_status",
    f"{P}.get_model_status",
)
def low_level(trial: Trial) -> None:
    losses = []
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    for model in (trial.model, trial.reference):
        injected = peft.inject_adapter_in_model(config, model)
        for name, parameter in injected.named_parameters():
            if "lora_" in name:
                nn.init.constant_(parameter, 0.05)
        with peft.helpers.rescale_adapter_scale(injected, 0.5):
            losses.append(injected(**trial.whole).loss.item())
        peft.cast_mixed_precision_params(injected, torch.float64)
        losses.append(injected(**trial.whole).loss.item())
        losses.append(len(peft.get_layer_status(injected)))
        losses.append(peft.get_model_status(injected).total_params)
    close(losses[:4], losses[4:], 1e-5)


@exact(
    f"{P}.PeftModel.get_nb_trainable_parameters",
    f"{P}.PeftModel.print_trainable_parameters",
    how="of the whole model",
)
def counted(trial: Trial) -> None:
    models = adapted(trial, adapter(trial, "one", 5, ALL))
    counts = [model.get_nb_trainable_parameters() for model in models]
    close(counts[0], counts[1])


@exact(
    f"{P}.prepare_model_for_kbit_training",
    f"{P}.PeftModel.prepare_model_for_gradient_checkpointing",
)
def prepared(trial: Trial) -> None:
    for model in (trial.model, trial.reference):
        peft.prepare_model_for_kbit_training(model)
    ours, theirs = adapted(trial, adapter(trial, "one", 5, ALL))
    for model in (ours, theirs):
        step(
            model,
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1),
            trial.whole,
        )
    equal(ours, theirs, 1e-4)


@exact(f"{P}.optimizers.create_loraplus_optimizer")
def loraplus(trial: Trial) -> None:
    models = adapted(trial, adapter(trial, "one", 5, ALL))
    for model in models:
        create = peft.optimizers.create_loraplus_optimizer
        optimizer = create(model, torch.optim.SGD, lr=0.1, loraplus_lr_ratio=4)
        for _ in range(2):
            step(model, optimizer, trial.whole)
    equal(*models)


@exact(
    f"{P}.optimizers.create_lorafa_optimizer",
    how="where no factor A is sharded: q, k, v, gate, up, the head",
)
def lorafa(trial: Trial) -> None:
    models = adapted(trial, adapter(trial, "one", 5, ["q_proj", "up_proj"]))
    for model in models:
        optimizer = peft.optimizers.create_lorafa_optimizer(model, r=4, lora_alpha=8, lr=0.1)
        for _ in range(2):
            step(model, optimizer, trial.whole)
    equal(*models, 1e-4)


@refused(
    f"{P}.optimizers.create_lorafa_optimizer (o_proj, down_proj)",
    instead="use torch's AdamW or SGD",
)
def lorafa_on_shards(trial: Trial) -> None:
    ours, _ = adapted(trial, adapter(trial, "one", 5, ["o_proj"]))
    optimizer = peft.optimizers.create_lorafa_optimizer(ours, r=4, lora_alpha=8, lr=0.3)
    ours(**trial.whole).loss.backward()
    try:
        optimizer.step()
    finally:
        trial.model = ours.unload()


@refused(f"{P}.optimizers.create_riemannian_optimizer", instead="use torch's AdamW or SGD")
def riemannian(trial: Trial) -> None:
    ours, _ = adapted(trial, adapter(trial, "one", 5, ["q_proj"]))
    try:
        peft.optimizers.create_riemannian_optimizer(ours, torch.optim.SGD, lr=0.1)
    finally:
        trial.model = ours.unload()


@refused(
    *(f"{P}.{name}" for name in ("convert_to_lora", "save_as_lora", "create_arrow_model")),
    *(f"{P}.{name}" for name in ("find_kappa_target_modules", "get_eva_state_dict")),
    *(f"{P}.{name}" for name in ("initialize_lora_eva_weights", "preprocess_loraga")),
    f"{P}.replace_lora_weights_loftq",
    instead="needs full tensors",
)
def whole_tensors(trial: Trial) -> None:
    model = trial.model
    each_refused(
        lambda: peft.convert_to_lora(model, 4),
        lambda: peft.save_as_lora(trial.folder, model, 4),
        lambda: peft.create_arrow_model(model, [], None),
        lambda: peft.find_kappa_target_modules(model),
        lambda: peft.get_eva_state_dict(model, []),
        lambda: peft.initialize_lora_eva_weights(model, []),
        lambda: peft.preprocess_loraga(model, None, None),
        lambda: peft.replace_lora_weights_loftq(model),
    )


@refused(f"{P}.PeftModel.push_to_hub", instead="upload it from one")
def push_to_hub(trial: Trial) -> None:
    model = peft.get_peft_model(trial.model, peft.LoraConfig(target_modules=["q_proj"]))
    try:
        model.push_to_hub("nobody/nothing")
    finally:
        trial.model = model.unload()


@refused(
    f"{P}.LoraModel.merge_adapter (safe_merge=True, a factor that is not finite)",
    instead="NaN or infinite values",
)
def safe_merge(trial: Trial) -> None:
    model = peft.get_peft_model(trial.model, peft.LoraConfig(target_modules=["q_proj"]))
    factor = model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"]
    if trial.mesh.rank == 1:
        factor.weight.data[0, 0] = float("nan")
    try:
        model.merge_adapter(safe_merge=True)
    except ValueError:  # the same class on every rank
        raise
    except Exception as error:
        raise AssertionError("another class of error") from error
    finally:
        trial.model = model.unload()
