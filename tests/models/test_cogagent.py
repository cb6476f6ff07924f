"""Our CogAgent answers as the published code does, and as its decoder taken token by token."""

from __future__ import annotations

import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from reference_cogagent import (
    DATA,
    IMAGE,
    IMAGE_TOKENS,
    TEXT,
    Row,
    batch_of,
    picture,
    positions_and_experts,
    reference_logits,
    reference_loss,
    text,
    tiny_config,
    tiny_model,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from parallel_ext.models.cogagent import (
    CogAgentConfig,
    CogAgentForCausalLM,
    build_position_ids,
    decoder,
    modeling,
    tokens,
)
from parallel_ext.models.cogagent.inputs import CACHE

CASES = ("one_image", "padded_right", "padded_left")
NEVER_RUN = re.compile(r"cross_vision\.vit\.model\.(blocks\.2\.|norm\.|head\.)")

ROWS = {
    "an image next to text": [picture(6), text(9)],
    "text without an image": [text(5), text(9)],
    "text that looks at an image": [text(7, cross=True)],
    "two images in a row": [
        Row([TEXT] + [IMAGE] * IMAGE_TOKENS + [TEXT] * 3 + [IMAGE] * IMAGE_TOKENS, 2, cross=True),
        picture(4),
    ],
    "scattered image tokens": [
        Row([IMAGE] * 2 + [TEXT] * 2 + [IMAGE] * 8 + [TEXT, IMAGE, TEXT, TEXT], 1, cross=True),
        text(3),
    ],
}


def _difference(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.detach(), theirs.detach()
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))


def _gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _case(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs, and what the published code answered."""
    tensors = load_file(DATA / f"case-{name}.safetensors")
    answers = {"loss", "logits", "generated"}
    inputs = {k: v for k, v in tensors.items() if k not in answers and not k.startswith("grad/")}
    return inputs, {k: v for k, v in tensors.items() if k not in inputs}


def _stored(gradient: Tensor, answer: Tensor) -> Tensor:
    """The numbers of a gradient that ``answer`` holds: all of them, or a sample."""
    if gradient.shape == answer.shape:
        return gradient
    return gradient.flatten()[:: gradient.numel() // 128 | 1]


def _published_differences(name: str) -> dict[str, float]:
    model = CogAgentForCausalLM.from_pretrained(DATA)
    inputs, answers = _case(name)
    output = model(**inputs)
    gradients = {f"grad/{n}": g for n, g in _gradients(model, output.loss).items()}
    answers.pop("generated", None)
    assert gradients.keys() | {"loss", "logits"} == answers.keys()
    found = {name: _stored(g, answers[name]) for name, g in gradients.items()}
    # What is said at padding is left open; the published code lets it look at the text behind it.
    real = inputs["attention_mask"].bool()
    found |= {"loss": output.loss[None], "logits": output.logits[real]}
    answers["logits"] = answers["logits"][real]
    return {key: _difference(found[key], answers[key]) for key in answers}


@pytest.mark.parametrize("name", CASES)
def test_loss_logits_and_every_gradient_are_those_of_the_published_code(name: str) -> None:
    assert max(_published_differences(name).values()) < 1e-5


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", ["one_image", "padded_left"])
def test_generated_tokens_are_those_of_the_published_code(name: str, use_cache: bool) -> None:
    model = CogAgentForCausalLM.from_pretrained(DATA)
    inputs, answers = _case(name)
    del inputs["labels"]
    found = model.generate(**inputs, max_new_tokens=8, do_sample=False, use_cache=use_cache)
    assert torch.equal(found, answers["generated"])


def test_without_a_mask_padding_is_found_but_not_in_images() -> None:
    model = CogAgentForCausalLM.from_pretrained(DATA)
    inputs, answers = _case("padded_left")
    del inputs["labels"], inputs["attention_mask"]
    images = inputs["token_type_ids"] == IMAGE
    assert (inputs["input_ids"][images] == model.config.pad_token_id).all()
    found = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert torch.equal(found, answers["generated"])
    inputs["token_type_ids"] = inputs["token_type_ids"][:, 1:]
    with pytest.raises(ValueError, match="token_type_ids have shape \\[2, 21\\], the tokens"):
        model.generate(**inputs, max_new_tokens=8, do_sample=False)


def _no_shared_position(types: Tensor, mask: Tensor | None = None) -> Tensor:
    return torch.arange(types.shape[1])[None].expand_as(types)


def _key_and_value_swapped(self: decoder.CrossAttention, *inputs: Any) -> tuple[Tensor, Tensor]:
    return KEY_VALUE(self, *inputs)[::-1]


def _faster_turns(self: decoder.CogAgentRotaryEmbedding, position_ids: Tensor) -> Any:
    return ROTARY(self, position_ids * 2)


KEY_VALUE = decoder.CrossAttention._key_value
ROTARY = decoder.CogAgentRotaryEmbedding.forward
BROKEN = {
    "positions": (modeling, "build_position_ids", _no_shared_position),
    "routing": (tokens, "vision_expert_mask", lambda types: types == IMAGE),
    "rotary": (decoder.CogAgentRotaryEmbedding, "forward", _faster_turns),
    "cross attention": (decoder.CrossAttention, "_key_value", _key_and_value_swapped),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_part_is_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BROKEN[what])
    assert max(_published_differences("one_image").values()) > 1e-3


def test_the_published_model_has_18_291_033_280_parameters_and_82_buffers() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CogAgentConfig())
    assert sum(parameter.numel() for parameter in model.parameters()) == 18_291_033_280
    buffers = {name: tuple(buffer.shape) for name, buffer in model.named_buffers()}
    rope = "model.cross_vision.vit.model."
    names = ["rope", *(f"blocks.{block}.attn.rope" for block in range(24))]
    assert buffers == {
        **{f"model.layers.{i}.self_attn.rotary_emb.inv_freq": (64,) for i in range(32)},
        **{f"{rope}{n}.freqs_{part}": (6400, 64) for n in names for part in ("cos", "sin")},
    }
    assert buffers.keys() <= model.state_dict().keys()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("rows", ROWS)
def test_logits_of_each_row_are_those_of_the_row_alone(rows: str, side: str) -> None:
    model, inputs = tiny_model(), batch_of(ROWS[rows], side)
    with torch.no_grad():
        logits = model(**inputs).logits
        for index, row in enumerate(ROWS[rows]):
            real = inputs["attention_mask"][index].bool()
            assert _difference(logits[index, real], reference_logits(model, row)) < 1e-10


@pytest.mark.parametrize("rows", ROWS)
def test_gradients_are_those_of_each_row_alone(rows: str) -> None:
    model, inputs = tiny_model(), batch_of(ROWS[rows])
    labels = inputs.pop("labels")
    # transformers takes its loss in fp32.
    logits = model(**inputs).logits[:, :-1]
    found = _gradients(model, F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()))
    expected = _gradients(model, reference_loss(model, ROWS[rows]))
    assert found.keys() >= expected.keys()
    for name, gradient in found.items():
        if name not in expected:
            # An expert without a token has a gradient of zero; the reference never calls it.
            assert "vision_expert" in name or "vision_mlp" in name
            assert not gradient.any(), name
        elif expected[name].any():
            assert _difference(gradient, expected[name]) < 1e-10, name
        else:
            assert not gradient.any(), name


def test_a_row_of_text_does_not_see_the_image_of_another_row() -> None:
    model = tiny_model()
    inputs = batch_of([picture(6), text(9)])
    inputs["cross_images"][0][0].requires_grad_()
    inputs["images"][0][0].requires_grad_()
    model(**inputs).logits[1].square().sum().backward()
    assert not inputs["cross_images"][0][0].grad.any()
    assert not inputs["images"][0][0].grad.any()


def test_parameters_without_a_gradient_are_those_that_are_never_run() -> None:
    model = tiny_model()
    gradients = _gradients(model, model(**batch_of([picture(5)])).loss)
    missing = {name for name, _ in model.named_parameters()} - gradients.keys()
    assert len(missing) == 25
    assert all(NEVER_RUN.search(name) for name in missing)


def test_sizes_of_the_cross_attention_may_differ() -> None:
    model = tiny_model(cross_compute_hidden_size=48)
    row = picture(5)
    with torch.no_grad():
        logits = model(**batch_of([row])).logits[0]
        assert _difference(logits, reference_logits(model, row)) < 1e-10


def test_positions_of_text_count_on_and_an_image_takes_three() -> None:
    for rows in ROWS.values():
        for row in rows:
            expected = positions_and_experts(row.types)[0]
            assert build_position_ids(torch.tensor([row.types]))[0].tolist() == expected
    assert build_position_ids(torch.zeros(1, 5, dtype=torch.long))[0].tolist() == [0, 1, 2, 3, 4]


def test_rotary_frequencies_are_those_of_the_file() -> None:
    model, row = tiny_model(), picture(40)
    inputs = batch_of([row])
    with torch.no_grad():
        exact = model(**inputs).logits[0]
        for layer in model.model.layers:
            frequencies = layer.self_attn.rotary_emb.inv_freq
            assert torch.equal(frequencies.float(), decoder.rotary_frequencies(16))
            frequencies.copy_(frequencies.bfloat16())
        logits = model(**inputs).logits[0]
        assert _difference(logits, reference_logits(model, row)) < 1e-10
        assert _difference(logits, exact) > 1e-6


def test_an_image_beside_padding_has_the_positions_of_its_row_alone() -> None:
    # The published code takes padding for the inside of the image, and moves its begin or end.
    image = torch.full((1, 5), IMAGE)
    for padding in ((2, 0), (0, 2)):
        mask = F.pad(torch.ones_like(image), padding)
        found = build_position_ids(F.pad(image, padding, value=TEXT), mask)
        assert found[mask.bool()].tolist() == [0, 1, 1, 1, 2]


GENERATED = ["an image next to text", "two images in a row"]


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("rows", GENERATED)
def test_each_generated_token_has_the_logits_of_its_row_alone(rows: str, use_cache: bool) -> None:
    model, inputs = tiny_model(), batch_of(ROWS[rows], "left")
    # Without an end, each row goes on to the last step.
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    options |= {"output_logits": True, "return_dict_in_generate": True, "use_cache": use_cache}
    del inputs["labels"]
    found = model.generate(**inputs, **options)
    for index, row in enumerate(ROWS[rows]):
        grown = Row(row.types, row.images, row.cross)
        for step, logits in enumerate(found.logits):
            with torch.no_grad():
                expected = reference_logits(model, grown)[-1]
            # transformers holds them in fp32.
            assert _difference(logits[index], expected) < 1e-6
            token = int(found.sequences[index, inputs["input_ids"].shape[1] + step])
            assert token == int(expected.argmax())
            grown.ids, grown.types = [*grown.ids, token], [*grown.types, TEXT]


@pytest.mark.parametrize("rows", GENERATED)
def test_beams_do_not_depend_on_the_cache(rows: str) -> None:
    model, inputs = tiny_model(), batch_of(ROWS[rows], "left")
    del inputs["labels"]
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": 2}
    cached = model.generate(**inputs, **options, use_cache=True)
    assert torch.equal(cached, model.generate(**inputs, **options, use_cache=False))


def test_generation_goes_on_from_a_cache() -> None:
    model, inputs = tiny_model(), batch_of(ROWS["an image next to text"], "left")
    del inputs["labels"]
    options = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    expected = model.generate(**inputs, **options, max_new_tokens=6).sequences
    first = model.generate(**inputs, **options, max_new_tokens=3)
    grown = {"input_ids": first.sequences, CACHE: first[CACHE]}
    with pytest.raises(ValueError, match="cache of 20 tokens; give .* of the whole sequence"):
        model.generate(**grown, **options, max_new_tokens=3)
    for name, fill in (("token_type_ids", TEXT), ("attention_mask", 1)):
        grown[name] = F.pad(inputs[name], (0, 3), value=fill)
    assert torch.equal(model.generate(**grown, **options, max_new_tokens=3).sequences, expected)


def test_checkpointing_of_activations_keeps_every_gradient() -> None:
    model, inputs = tiny_model().train(), batch_of(ROWS["an image next to text"])
    expected = _gradients(model, model(**inputs).loss)
    model.gradient_checkpointing_enable()
    found = _gradients(model, model(**inputs).loss)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_bfloat16_and_autocast_are_near_to_float32() -> None:
    model, inputs = tiny_model().float(), batch_of(ROWS["an image next to text"])
    with torch.no_grad():
        expected = model(**inputs).loss
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert _difference(model(**inputs).loss, expected) < 2e-2
        assert _difference(model.bfloat16()(**inputs).loss, expected) < 2e-2


def test_files_survive_saving_and_buffers_that_they_lack_are_computed(tmp_path: Path) -> None:
    model = CogAgentForCausalLM.from_pretrained(DATA)
    model.save_pretrained(tmp_path)
    published = load_file(DATA / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == published.keys()
    assert all(torch.equal(saved[name], published[name]) for name in saved)
    kept = {name: t for name, t in saved.items() if "rope" not in name and "inv_freq" not in name}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert all(torch.equal(t, published[name]) for name, t in loaded.state_dict().items())


def test_a_published_config_without_a_model_type_is_read(tmp_path: Path) -> None:
    fields = json.loads((DATA / "config.json").read_text())
    del fields["model_type"]
    fields |= {"auto_map": {"AutoConfig": "configuration_cogagent.CogAgentConfig"}}
    fields |= {
        "torch_dtype": "bfloat16",
        "_name_or_path": "x",
        "transformers_version": "4.36.0.dev0",
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    shutil.copy(DATA / "model.safetensors", tmp_path)
    model = CogAgentForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    inputs, answers = _case("one_image")
    assert _difference(model(**inputs).logits, answers["logits"]) < 1e-5
    assert isinstance(AutoConfig.for_model("cogagent"), CogAgentConfig)


@functools.cache
def _refusing() -> CogAgentForCausalLM:
    """One model for all that it refuses before it computes anything."""
    return tiny_model()


def _wrong(**changes: Any) -> dict[str, Any]:
    return {**batch_of([picture(4), text(6)]), **changes}


LOW, HIGH = torch.zeros(3, 42, 42).double(), torch.zeros(3, 56, 56).double()
MISUSE = {
    "row 0 has 11 image tokens .* but its images \\(0\\) fill 0": {"images": None},
    "row 0 has 11 image tokens .* but its images \\(2\\) fill 22": {"images": [[LOW, LOW], []]},
    "row 1 has 0 image tokens": {"images": [[LOW], [LOW]]},
    "row 0 has images \\(1\\), but none in cross_images": {"cross_images": [[], []]},
    "row 0 has 2 cross_images": {"cross_images": [[HIGH, HIGH], []]},
    "images is for 1 rows, but there are 2": {"images": [[LOW]]},
    "row 0 of images holds \\[3, 56, 56\\]; .* \\[3, 42, 42\\]": {"images": [[HIGH], []]},
    "images\\[0\\] is a Tensor; give the list": {"images": [LOW, LOW]},
    "images has shape \\[3, 42, 42\\]": {"images": LOW},
    "token type 2 at row 1, position 0": {"token_type_ids": torch.tensor([[0], [2]])},
    "token_type_ids have shape \\[2, 1\\]": {"token_type_ids": torch.zeros(2, 1).long()},
    "attention_mask has shape \\[2, 3\\]; it must be \\[2, 16\\]": {
        "attention_mask": torch.ones(2, 3)
    },
    "position_ids have shape \\[16\\], the tokens \\[2, 16\\]": {"position_ids": torch.arange(16)},
    "one of input_ids and inputs_embeds": {"inputs_embeds": torch.zeros(2, 16, 64).double()},
    "output_hidden_states=True is not supported": {"output_hidden_states": True},
}


@pytest.mark.parametrize("message", MISUSE)
def test_inputs_that_do_not_fit_are_refused(message: str) -> None:
    changes = dict(MISUSE[message])
    if "token type 2" in message:
        types = batch_of([picture(4), text(6)])["token_type_ids"]
        changes["token_type_ids"] = types.index_put(
            (torch.tensor(1), torch.tensor(0)), torch.tensor(2)
        )
    with pytest.raises(ValueError, match=message):
        _refusing()(**_wrong(**changes))


def test_a_filled_cache_takes_no_images_and_needs_positions() -> None:
    model, inputs = tiny_model(), batch_of([picture(4)])
    cache = model(**inputs, use_cache=True).past_key_values
    following = {"input_ids": torch.tensor([[5]]), "past_key_values": cache}
    with pytest.raises(ValueError, match="position_ids are needed with a filled cache"):
        model(**following)
    following["position_ids"] = torch.tensor([[8]])
    with pytest.raises(ValueError, match="images came with a cache of 16 tokens"):
        model(**following, images=inputs["images"])
    with pytest.raises(ValueError, match="DynamicCache without the keys of the cross attention"):
        model(**{**following, "past_key_values": cache.self_attention_cache})


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_the_cache_has_both_of_its_names(name: str) -> None:
    model, inputs = tiny_model(), batch_of([picture(4)])
    del inputs["labels"]
    following = {"input_ids": torch.tensor([[5]]), "position_ids": torch.tensor([[8]])}
    caches = [model(**inputs, use_cache=True)[CACHE] for _ in range(2)]
    plain = model(**following, **{CACHE: caches[0]}).logits
    assert torch.equal(model(**following, **{name: caches[1]}).logits, plain)
    assert not torch.equal(model(**following).logits, plain)
    with pytest.raises(ValueError, match="two names for one argument"):
        model(**following, cache=caches[0], past_key_values=caches[1])


def test_checkpointing_does_not_read_a_filled_cache() -> None:
    model, inputs = tiny_model(), batch_of([picture(4)])
    cache = model(**inputs, use_cache=True)[CACHE]
    model.train()
    model.gradient_checkpointing_enable()
    following = {"input_ids": torch.tensor([[5]]), "position_ids": torch.tensor([[8]])}
    with pytest.raises(ValueError, match="cache of 16 tokens cannot be read in training"):
        model(**following, **{CACHE: cache})
    empty = transformers.DynamicCache()
    loss = model(**inputs, **{CACHE: empty}).loss
    loss.backward()
    assert empty.get_seq_length() == 0


WRONG_CONFIGS = {
    "num_attention_heads = 5 must divide hidden_size = 64": {"num_attention_heads": 5},
    "must divide cross_compute_hidden_size = 34": {"cross_compute_hidden_size": 34},
    "cross_hidden_size is 48, but the tower gives .*width = 32": {"cross_hidden_size": 48},
    "cross_image_size is 57 and must be a multiple": {"cross_image_size": 57},
    "unknown fields \\['num_key_value_heads'\\]": {"num_key_value_heads": 2},
    "unknown fields \\['heads'\\] in vision_config": {"vision_config": {"heads": 2}},
    "num_positions is 257, but": {"vision_config": {"image_size": 42}},
    "template_version is 'x'": {"template_version": "x"},
    "tie_word_embeddings is True": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("message", WRONG_CONFIGS)
def test_a_configuration_that_does_not_fit_is_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(**WRONG_CONFIGS[message])


def test_another_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="attn_implementation is 'eager'"):
        CogAgentForCausalLM.from_pretrained(DATA, attn_implementation="eager")


def test_logits_are_those_of_the_tokens_that_are_asked_for() -> None:
    model, inputs = tiny_model(), batch_of([picture(4), text(6)])
    del inputs["labels"]
    with torch.no_grad():
        whole = model(**inputs).logits
        for kept, places in ((3, slice(-3, None)), (torch.tensor([0, 5]), [0, 5])):
            found = model(**inputs, logits_to_keep=kept).logits
            assert found.shape == whole[:, places].shape
            assert _difference(found, whole[:, places]) < 1e-10
