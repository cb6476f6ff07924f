"""Models of images and text, around a decoder that is parallel: LLaVA, Gemma 3, and others."""

from __future__ import annotations

import copy
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from ranks import pool
from reference import Tiny, difference, refusal
from reference_images import (
    DECODERS,
    EAGER,
    MIXTURES,
    decoder_of,
    image_batch,
    losses_of,
    parallel_pair,
    tiny_model,
)
from reference_mixtral import Layout
from safetensors.torch import load_file, save_file
from torch import nn

import parallel_ext as px
from parallel_ext.io.hf_reader import HFDirectory

STEPS = 2
LAYOUTS = [Layout(1, 2, 1), Layout(2, 1, 1), Layout(2, 2, 1)]
ALONE = "gemma4 e2b"  # is served without data parallelism
OF_EXPERTS = [Layout(1, 2, 2), Layout(2, 1, 2), Layout(2, 2, 4)]


def _trained(kind: str, layout: Layout, zero: int) -> tuple[float, float]:
    """The largest differences of the losses, and of the weights after some steps."""
    mesh = layout.mesh()
    models = reference, ours = parallel_pair(kind, mesh, zero=zero)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    before = {name: each.clone() for name, each in reference.state_dict().items()}
    of_losses = 0.0
    for step in range(STEPS):
        losses = losses_of(kind, models, mesh, step)
        mean = losses[1].detach().clone()
        torch.distributed.all_reduce(mean)
        of_losses = max(of_losses, difference(mean / mesh.world_size, losses[0]))
        for loss, model, optimizer in zip(losses, models, optimizers, strict=True):
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    expected = reference.state_dict()
    assert sum(not torch.equal(expected[n], each) for n, each in before.items()) > len(before) / 2
    full = px.full_state_dict(ours, writer_only=False)
    assert full.keys() == expected.keys()
    # Not relative: the biases of keys begin as zeros, and have no gradient but rounding.
    return of_losses, max((full[n] - each).abs().max().item() for n, each in expected.items())


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *((kind, layout) for kind in DECODERS for layout in LAYOUTS if kind != ALONE),
        (ALONE, LAYOUTS[0]),
        *((kind, layout) for kind in MIXTURES for layout in OF_EXPERTS),
    ],
    ids=str,
)
def test_it_trains_as_in_one_process(kind: str, layout: Layout) -> None:
    for of_losses, of_weights in pool(layout.world).run(_trained, kind, layout, 2):
        assert of_losses <= 1e-6  # transformers' losses, and norms of Gemma, go by fp32
        assert of_weights <= 1e-7


def _over_dp(kind: str) -> None:
    parallel_pair(kind, LAYOUTS[1].mesh())


def test_an_embedding_that_a_class_calls_itself_is_refused_over_dp() -> None:
    pool(2).assert_raises(_over_dp, ALONE, words="calls embed_tokens_per_layer of its decoder")


def _with_other_labels(kind: str) -> str:
    mesh = LAYOUTS[0].mesh()
    _, ours = parallel_pair(kind, mesh)
    batch = image_batch(2, kind)
    batch["labels"] = batch["labels"].roll(mesh.rank, 1)
    return refusal(lambda: ours(**batch))


@pytest.mark.parametrize("kind", ["llava", "gemma4", "llama4"])  # some tell the decoder theirs
def test_tp_ranks_with_other_labels_raise(kind: str) -> None:
    for why in pool(2).run(_with_other_labels, kind):
        assert "they differ in labels of the model around it (other values" in why


def _with_text_alone(kind: str, layout: Layout, trained: str, zero: int) -> tuple[float, float]:
    """As ``_trained``, of a step in which the first half of the rows has no image."""
    mesh = layout.mesh()
    reference, ours = parallel_pair(kind, mesh, zero=zero)
    for model in (reference, ours):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name)
    batch = image_batch(4, kind)
    halves = [{n: each[of] for n, each in batch.items()} for of in (slice(2), slice(2, 4))]
    text = halves[0]["labels"].clamp(min=3)
    halves[0] = {**halves[0], "input_ids": text, "labels": text}
    del halves[0]["pixel_values"]
    if kind == "gemma3":
        halves[0]["token_type_ids"] = torch.zeros_like(text)
    expected = sum(reference(**half).loss for half in halves) / 2  # no labels are counted together
    loss = ours(**halves[mesh.dp_rank]).loss
    for each in (expected, loss):
        each.backward()
    mean = loss.detach().clone()
    torch.distributed.all_reduce(mean)
    for model in (reference, ours):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    full, weights = px.full_state_dict(ours, writer_only=False), reference.state_dict()
    of_weights = max((full[n] - each).abs().max().item() for n, each in weights.items())
    return difference(mean / mesh.world_size, expected), of_weights


@pytest.mark.parametrize(
    ("kind", "trained", "zero"),
    [
        *((kind, "", 2) for kind in ("llava", "gemma3", "qwen3_vl", "qwen3_5_moe")),
        *(("llava", "multi_modal_projector", 2), ("qwen3_vl", "visual", 3)),
    ],
)
def test_a_dp_rank_may_have_text_alone(kind: str, trained: str, zero: int) -> None:
    """Also where what is trained is reached by images alone, through a frozen decoder."""
    for differences in pool(2).run(_with_text_alone, kind, LAYOUTS[1], trained, zero):
        assert max(differences) <= 1e-6


@pytest.mark.parametrize("kind", ["llava", "gemma3", "qwen3_vl", "glm4v_moe", "qwen3_vl_moe"])
def test_zero_3(kind: str) -> None:
    for differences in pool(4).run(_trained, kind, Layout(2, 2, 1), 3):
        assert max(differences) <= 1e-6


def _balanced(tp: int, ep: int) -> tuple[float, float] | str:
    """How a step with a load balancing loss differs from plain, or why there is none."""
    models = reference, ours = parallel_pair("qwen3_5_moe", px.init_mesh(tp=tp, ep=ep))
    for model in models:
        model.config.text_config.output_router_logits = True
    losses = [reference(**image_batch(4, "qwen3_5_moe")).loss]
    why = refusal(lambda: losses.append(ours(**image_batch(4, "qwen3_5_moe")).loss))
    if len(losses) == 1:
        return why
    for loss, model in zip(losses, models, strict=True):
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    full, expected = px.full_state_dict(ours, writer_only=False), reference.state_dict()
    return difference(*losses), max((full[n] - e).abs().max().item() for n, e in expected.items())


def test_a_load_balancing_loss_around_a_decoder_is_that_of_one_batch() -> None:
    for differences in pool(2).run(_balanced, 2, 2):
        assert max(differences) <= 1e-6
    assert all("from the tokens of one of dp=2" in why for why in pool(2).run(_balanced, 1, 2))


def _files(folder: str, kind: str) -> float:
    """What transformers reads of what is saved, and a training that goes on at another layout."""
    mesh = Layout(2, 2, 1).mesh()
    models = reference, ours = parallel_pair(kind, mesh)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    for step in (0, 1):
        for loss, optimizer in zip(losses_of(kind, models, mesh, step), optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if step == 0:
            saved = px.save_checkpoint(folder, 1, ours, optimizers[1])
            ours.save_pretrained(f"{folder}/out")
            both = [HFDirectory(Path(each)).shapes for each in (saved, f"{folder}/out")]
            assert both[0] == both[1]
            for directory in (saved, f"{folder}/out"):
                options = {"dtype": torch.float64, **EAGER}
                read = type(reference).from_pretrained(directory, **options).state_dict()
                for name, each in reference.state_dict().items():
                    assert (read[name] - each).abs().max() <= 1e-7, name
            mesh = Layout(1, 4, 1).mesh()
            models = reference, ours = reference, parallel_pair(kind, mesh)[1]
            with torch.no_grad():
                for parameter in ours.parameters():
                    parameter.zero_()
            optimizers[1] = torch.optim.AdamW(ours.parameters(), lr=0.01)
            assert px.load_checkpoint(folder, ours, optimizers[1]).step == 1
    full = px.full_state_dict(ours, writer_only=False)
    expected = reference.state_dict()
    return max((full[n] - each).abs().max().item() for n, each in expected.items())


@pytest.mark.parametrize("kind", ["llava", "gemma3", "qwen3_vl", "glm4v_moe", "qwen3_vl_moe"])
def test_its_files_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    assert max(pool(4).run(_files, str(tmp_path), kind)) <= 1e-6


def _read(folder: str, kind: str) -> tuple[float, ...]:
    """What a rank holds of a model that px reads, and how it and a step of it differ from plain."""
    mesh = Layout(1, 2, 2 if kind in MIXTURES else 1).mesh()
    options = {"dtype": torch.float64, **EAGER}
    plain = transformers.AutoModelForImageTextToText.from_pretrained(folder, **options)
    ours = px.from_pretrained(folder, mesh)
    assert type(ours) is type(plain)
    assert not ours.training
    assert ours.config.to_dict() == plain.config.to_dict()
    held, whole = (sum(p.numel() for p in each.parameters()) for each in (ours, plain))
    px.data_parallel(ours, mesh)
    batch, losses = image_batch(2, kind), []
    for model in (plain, ours):
        loss = model.train()(**batch).loss
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        losses.append(loss.item())
    full, expected = px.full_state_dict(ours, writer_only=False), plain.state_dict()
    assert full.keys() == expected.keys()
    worst = max((full[name] - each).abs().max().item() for name, each in expected.items())
    return held / whole, abs(losses[1] / losses[0] - 1), worst


@pytest.mark.parametrize("kind", DECODERS)
def test_each_rank_reads_its_part_of_the_decoder_and_all_around_it(
    kind: str, tmp_path: Path
) -> None:
    tiny_model(kind).save_pretrained(tmp_path, max_shard_size="50KB")
    for held, of_losses, of_weights in pool(2).run(_read, str(tmp_path), kind):
        assert held < 0.75
        assert of_losses <= 1e-6
        assert of_weights <= 1e-7


def test_experts_may_lie_transposed_in_files(tmp_path: Path) -> None:
    tiny_model("qwen3_vl_moe").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    experts = [name for name in tensors if ".experts." in name]
    assert len(experts) == 4
    published = {name: tensors[name].mT.contiguous() for name in experts}
    assert all(tensors[name].shape != each.shape for name, each in published.items())
    save_file({**tensors, **published}, tmp_path / "model.safetensors", {"format": "pt"})
    for held, of_losses, of_weights in pool(2).run(_read, str(tmp_path), "qwen3_vl_moe"):
        assert held < 0.75
        assert of_losses <= 1e-6
        assert of_weights <= 1e-7


def _not_read(folder: str, other: str) -> list[str]:
    mesh = px.init_mesh(tp=2)
    text = transformers.AutoConfig.from_pretrained(folder).text_config
    few = transformers.AutoConfig.from_pretrained(folder)
    few.text_config.num_hidden_layers = 1
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model = px.from_pretrained(folder, mesh, config=few)
        assert len(model.model.language_model.layers) == 1
    first = "the first 1 of 2 layers" in "".join(str(each.message) for each in found)
    assert first == (mesh.rank == 0)
    return [
        refusal(lambda: px.from_pretrained(folder, mesh, vocab_size=90)),
        refusal(lambda: px.from_pretrained(folder, mesh, config=text)),
        refusal(lambda: px.from_pretrained(folder, mesh, invariant=px.Invariant())),
        refusal(lambda: px.from_pretrained(other, mesh)),
        refusal(lambda: px.from_pretrained(f"{other}/mixture", mesh)),
        refusal(lambda: px.from_pretrained(f"{other}/unknown", mesh)),
    ]


def test_files_that_do_not_fit_a_model_of_images_are_refused_by_name(tmp_path: Path) -> None:
    folder, other = tmp_path / "whole", tmp_path / "other"
    tiny_model("llava").save_pretrained(folder)
    shutil.copytree(folder, other)
    tensors = load_file(other / "model.safetensors")
    for lost in ("vision_tower.pre_layrnorm.weight", "language_model.model.norm.weight"):
        del tensors[lost]
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    tiny_model("glm4v_moe").save_pretrained(other / "mixture")
    tensors = load_file(other / "mixture" / "model.safetensors")
    del tensors["model.language_model.layers.1.mlp.gate.e_score_correction_bias"]
    save_file(tensors, other / "mixture" / "model.safetensors", {"format": "pt"})
    unknown = transformers.CONFIG_MAPPING["aya_vision"](
        architectures=["AyaVisionForConditionalGeneration"],
        text_config={"model_type": "opt", "num_hidden_layers": 1},
        vision_config={"model_type": "siglip_vision_model", "num_hidden_layers": 1},
    )
    unknown.save_pretrained(other / "unknown")
    save_file({"lm_head.weight": torch.ones(2, 2)}, other / "unknown" / "model.safetensors")
    words = [
        "vocab_size= is served for models of text alone",
        "config must be a LlavaConfig",
        "no output head",
        "model.language_model.norm.weight of shape (64,) is missing",
        "layers.1.mlp.gate.e_score_correction_bias of shape (6,) is missing",
        "text_config is of 'opt', but served are",
    ]
    pool(2).assert_says(_not_read, str(folder), str(other), words=words)


def _text_alone(folder: str) -> tuple[str, float, float, bool]:
    """Class, logits and files of the text model in files with images, and what a rank holds."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    text = transformers.AutoConfig.from_pretrained(folder).text_config
    ours = px.from_pretrained(folder, px.init_mesh(tp=2), config=text)
    batch = {"input_ids": torch.arange(3, 21).view(2, 9)}
    worst = (ours(**batch).logits - plain(**batch).logits).abs().max().item()
    ours.save_pretrained(f"{folder}/text")
    read = type(plain).from_pretrained(f"{folder}/text", dtype=torch.float64).state_dict()
    of_files = max(
        (read[name] - each).abs().max().item() for name, each in plain.state_dict().items()
    )
    held, whole = (sum(p.numel() for p in each.parameters()) for each in (ours, plain))
    return type(ours).__name__, worst, of_files, held < 0.6 * whole


@pytest.mark.parametrize(
    ("kind", "name"), [("qwen3_5", "Qwen3_5ForCausalLM"), ("llama4", "Llama4ForCausalLM")]
)
def test_the_text_model_alone_is_read_out_of_files_with_images(
    kind: str, name: str, tmp_path: Path
) -> None:
    tiny_model(kind).save_pretrained(tmp_path)
    for found, worst, of_files, is_part in pool(2).run(_text_alone, str(tmp_path)):
        assert found == name
        assert worst <= 1e-6  # delta rules and norms are computed in fp32
        assert of_files == 0.0
        assert is_part


def _generated(kind: str, layout: Layout) -> bool:
    reference, ours = parallel_pair(kind, layout.mesh())
    batch = image_batch(2, kind)
    del batch["labels"]
    calls = [batch]
    if kind == "llava":  # whose class takes rows of the embedding too
        calls.append({"inputs_embeds": reference.get_input_embeddings()(batch["input_ids"])})
    reference.eval()
    ours.eval()
    for inputs in calls:
        options = {**inputs, "max_new_tokens": 6, "do_sample": False}
        if not torch.equal(*(model.generate(**options) for model in (reference, ours))):
            return False
    return True


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
@pytest.mark.parametrize("kind", ["llava", "gemma3", "qwen3_vl", "qwen3_5_moe"])
def test_it_generates_the_tokens_of_one_process(kind: str, layout: Layout) -> None:
    assert all(pool(2).run(_generated, kind, layout))


def _generated_apart(kind: str, layout: Layout, options: dict[str, Any]) -> bool:
    """Whether dp ranks that end at other lengths, and draw by one seed on rank 0, agree."""
    mesh = layout.mesh()
    reference, ours = parallel_pair(kind, mesh, zero=3)
    batch = image_batch(2, kind, seed=mesh.dp_rank)
    del batch["labels"]
    tokens = []
    for model, seed in ((reference, 0), (ours, mesh.rank % mesh.tp_size)):
        torch.manual_seed(seed)
        length = 2 + 4 * mesh.dp_rank
        tokens.append(model.eval().generate(**batch, max_new_tokens=length, **options))
    return torch.equal(*tokens)


@pytest.mark.parametrize(
    ("kind", "layout", "options"),
    [
        ("llava", LAYOUTS[0], {"do_sample": True}),
        ("qwen3_vl", LAYOUTS[1], {"use_cache": False, "num_beams": 2}),
        ("gemma3", LAYOUTS[1], {"eos_token_id": None}),
    ],
    ids=str,
)
def test_ranks_draw_the_same_tokens_and_end_at_their_own_lengths(
    kind: str, layout: Layout, options: dict[str, Any]
) -> None:
    assert all(pool(2).run(_generated_apart, kind, layout, options))


def _generated_by_px() -> list[str]:
    _, ours = parallel_pair("llava", Layout(1, 2, 1).mesh())
    ids = image_batch(2)["input_ids"]
    return [refusal(lambda m=m: px.generate(m.eval(), ids)) for m in (ours, decoder_of(ours))]


def test_px_generate_is_refused_by_name() -> None:
    for texts in pool(2).run(_generated_by_px):
        assert all("draws from the output head of a parallel causal model" in t for t in texts)


def _checked() -> list[str]:
    _, ours = parallel_pair("llava", Layout(1, 2, 1).mesh())
    return [refusal(lambda m=m: px.check_gradients(m, image_batch(2))) for m in (ours, ours.model)]


def test_check_gradients_of_what_has_no_loss_is_refused_by_name() -> None:
    for texts in pool(2).run(_checked):
        assert all("LlamaModel is a decoder without a loss of its own" in text for text in texts)


def _misused() -> tuple[list[str], list[str]]:
    """Texts of refusals and warnings, and the modules that the advice of one reaches."""
    reference, ours = parallel_pair("llava", Layout(1, 2, 1).mesh())
    of_towers_too = px.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1)
    texts = [refusal(lambda: peft.get_peft_model(ours, of_towers_too))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        everywhere = px.LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1)
        peft.get_peft_model(ours, everywhere)
    texts += [str(each.message) for each in caught if each.filename == __file__]
    advice = texts[0].split('target_modules=r"')[1].split('"')[0]
    return texts, [path for path, _ in reference.named_modules() if re.fullmatch(advice, path)]


def test_what_reaches_beyond_the_decoder_with_dropout_is_named() -> None:
    attentions = [f"model.language_model.layers.{n}.self_attn.q_proj" for n in (0, 1)]
    warned = []
    for (adapted, *warned_here), reached in pool(2).run(_misused):
        assert "every rank holds it whole, and would draw masks of its own" in adapted
        assert reached == attentions
        warned += warned_here
    assert len(warned) == 1  # by rank 0
    assert "PEFT adapts these too: model.vision_tower" in warned[0]


def _published(folder: str) -> tuple[float, list[str]]:
    """How far answers with a published adapter are off, and what is refused of it in training."""
    mesh = Layout(1, 2, 1).mesh()
    reference, ours = parallel_pair("llava", mesh)
    names = ["q_proj", "down_proj", "fc1", "linear_2"]
    config = peft.LoraConfig(r=2, target_modules=names, lora_dropout=0.3, init_lora_weights=False)
    reference = peft.get_peft_model(reference, config).eval()
    if mesh.rank == 0:
        reference.save_pretrained(folder)
    mesh.control.barrier("saved")
    refused = refusal(lambda: peft.PeftModel.from_pretrained(ours, folder, is_trainable=True))
    _, ours = parallel_pair("llava", mesh)
    ours = peft.PeftModel.from_pretrained(ours, folder)
    rows = image_batch(2)
    with torch.no_grad():
        logits = [model(**rows).logits for model in (reference, ours)]
    if mesh.rank != 0:  # whose adapter is that of the file
        logits[0] = logits[1]
    return difference(*logits), [refused, refusal(lambda: ours.train()(**rows))]


def test_an_adapter_of_towers_with_dropout_is_for_inference(tmp_path: Path) -> None:
    words = ["would draw masks of its own", "would have masks of its own on each tp rank"]
    for error, texts in pool(2).run(_published, str(tmp_path)):
        assert error <= 1e-6
        assert all(each in text for each, text in zip(words, texts, strict=True)), texts


def _head_kept() -> list[str]:
    tied, untied = (
        parallel_pair(kind, Layout(1, 2, 1).mesh())[1] for kind in ("tied llava", "llava")
    )
    of_text = r".*language_model.*\.q_proj"
    config = px.LoraConfig(r=2, target_modules=of_text, modules_to_save=["lm_head"])
    trained = peft.get_peft_model(untied, config).get_parameter(
        "base_model.model.lm_head.modules_to_save.default.weight"
    )
    assert trained.requires_grad
    on_head = px.LoraConfig(r=2, target_modules=["lm_head"])
    copies = px.LoraConfig(
        r=2, target_modules=of_text, modules_to_save=["embed_tokens"], ensure_weight_tying=True
    )
    return [refusal(lambda c=c: peft.get_peft_model(tied, c)) for c in (config, on_head, copies)]


def test_an_adapter_cannot_train_a_head_whose_weight_is_in_the_decoder() -> None:
    words = [
        "modules_to_save names lm_head, whose weight is that of the embedding",
        "target_modules names lm_head, whose weight is that of the embedding",
        "ensure_weight_tying names lm_head, whose weight is that of the embedding",
    ]
    pool(2).assert_says(_head_kept, words=words)


def _merged_embedding(folder: str) -> list[str]:
    _, ours = parallel_pair("tied llava", Layout(1, 2, 1).mesh())
    config = px.LoraConfig(
        r=2, target_modules=r".*language_model.*\.q_proj", modules_to_save=["embed_tokens"]
    )
    merged = peft.get_peft_model(ours, config).merge_and_unload()
    return [
        refusal(lambda: merged.save_pretrained(folder)),
        refusal(lambda: px.save_checkpoint(folder, 1, merged)),
    ]


def test_files_do_not_lose_a_head_whose_embedding_an_adapter_has_replaced(tmp_path: Path) -> None:
    words = ["lm_head has the weight of an embedding that is in the model no more"] * 2
    pool(2).assert_says(_merged_embedding, str(tmp_path / "merged"), words=words)


def _replaced_over_dp(ends: str) -> list[str]:
    """What is said where the trained embedding would be written into the one that a head has."""
    mesh, found = Layout(2, 1, 1).mesh(), []
    for action in ("unload", "merge_and_unload"):
        plain = tiny_model("tied llava") if ends == "around" else Tiny(tied=True).model()
        vars(plain).pop("_loss_function", None)
        ours = px.parallelize(plain, mesh)
        targets = {"target_modules": r".*layers\.\d+\.self_attn\.o_proj"}
        config = px.LoraConfig(r=2, **targets, modules_to_save=["embed_tokens"])
        adapted = px.data_parallel(peft.get_peft_model(ours, config), mesh)
        found.append(refusal(getattr(adapted, action)))
    return found


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
@pytest.mark.parametrize("ends", ["around", "inside"])
def test_a_tied_head_is_not_trained_with_an_embedding_that_replaces_its_own(ends: str) -> None:
    words = [f"{name}: .* was trained whole" for name in ("unload", "merging adapters")]
    for texts in pool(2).run(_replaced_over_dp, ends):
        assert all(re.search(each, text) for each, text in zip(words, texts, strict=True)), texts


def _loaded_plain() -> tuple[float, str]:
    reference, ours = parallel_pair("tied llava", Layout(1, 2, 1).mesh())
    twice = {name: 2 * each for name, each in reference.state_dict().items()}
    ours.load_state_dict(twice)
    full = px.full_state_dict(ours, writer_only=False)
    assert full.keys() == twice.keys()
    worst = max((full[name] - each).abs().max().item() for name, each in twice.items())
    other = {**twice, "lm_head.weight": twice["lm_head.weight"] + 1}
    return worst, refusal(lambda: ours.load_state_dict(other))


def test_a_plain_state_dict_with_a_tied_head_is_loaded() -> None:
    for worst, other in pool(2).run(_loaded_plain):
        assert worst == 0.0
        assert "lm_head.weight is not that of the embedding" in other


class Tied(nn.Module):
    """A decoder with a head of the user's own that is tied to its embedding, and has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = decoder_of(tiny_model("llava"))
        self.head = nn.Linear(64, 101).double()
        self.head.weight = self.decoder.get_input_embeddings().weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.decoder(ids).last_hidden_state)


def _own_head(layout: Layout) -> tuple[float, str]:
    mesh = layout.mesh()
    models = reference, ours = Tied(), Tied()
    px.parallelize(ours.decoder, mesh)
    px.data_parallel(ours, mesh)
    ids = torch.arange(12).view(2, 6)
    for model in models:
        model(ids).logsumexp(-1).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    full, expected = px.full_state_dict(ours, writer_only=False), reference.state_dict()
    assert full.keys() == expected.keys()
    worst = max((full[n] - each).abs().max().item() for n, each in expected.items())
    again = nn.Parameter(torch.zeros(101, 64).double())
    return worst, refusal(lambda: setattr(ours.head, "weight", again))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_head_of_ones_own_stays_tied(layout: Layout) -> None:
    for error, replaced in pool(layout.world).run(_own_head, layout):
        assert error <= 1e-7
        assert "weight" in replaced


class Projected(nn.Module):
    """A frozen decoder behind a trained projector, which rows without an image pass by."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = decoder_of(tiny_model("llava")).requires_grad_(False)
        self.projector = nn.Linear(6, 64).double()

    def forward(
        self, ids: torch.Tensor, images: torch.Tensor | None = None, takes_rows: bool = False
    ) -> torch.Tensor:
        if images is None and not takes_rows:
            return self.decoder(ids).last_hidden_state.square().mean()
        rows = self.decoder.get_input_embeddings()(ids)
        if images is not None:
            rows = rows + self.projector(images)
        return self.decoder(None, None, None, None, rows).last_hidden_state.square().mean()


def _passed_by(layout: Layout, takes_rows: bool) -> float:
    mesh = layout.mesh()
    torch.manual_seed(3)
    reference = Projected()
    ours = copy.deepcopy(reference)
    px.parallelize(ours.decoder, mesh)
    px.data_parallel(ours, mesh, zero=3)
    ids = torch.arange(12).view(2, 6)
    images = torch.randn(2, 6, 6).double()
    (reference(ids, images) / 2).backward()
    if mesh.dp_rank == 0:
        ours(ids, images).backward()
    elif takes_rows:
        ours(ids, takes_rows=True).backward()
    else:
        ours.decoder.get_input_embeddings()(ids)  # which gathers it with the other rank
        ours(ids).backward()
    return difference(ours.projector.weight.grad, reference.projector.weight.grad)


@pytest.mark.parametrize("takes_rows", [False, True])
def test_a_dp_rank_without_an_image_runs_the_backward_of_a_frozen_decoder(takes_rows: bool) -> None:
    for error in pool(2).run(_passed_by, LAYOUTS[1], takes_rows):
        assert error <= 1e-6
