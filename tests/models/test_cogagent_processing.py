"""Questions and pictures become the tokens, types and pixels that the published code makes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from PIL import Image
from reference_cogagent import IMAGE_TOKENS, tiny_config, tiny_model
from tokenizers import Tokenizer, models, normalizers
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    AutoProcessor,
    BatchFeature,
    LlamaTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from parallel_ext.models.cogagent import (
    CogAgentConfig,
    CogAgentForCausalLM,
    CogAgentProcessor,
    Conversation,
    build_position_ids,
)
from parallel_ext.models.cogagent.processing import pixels_of
from parallel_ext.models.cogagent.templates import prompt_of

SPECIAL = ["<unk>", "<s>", "</s>"]
PIECES = [*SPECIAL, "▁", "▁▁", "▁[", *"abcdefghijklmnopqrstuvwxyzINSTQA[]/<>:?"]
VOCABULARY = {piece: number for number, piece in enumerate(PIECES)}
MERGES = [("▁", "["), ("▁", "▁")]
PAD, BEGIN, END = 0, 1, 2
TEXT, VISION = 0, 1


def _todays() -> PreTrainedTokenizerBase:
    """A text that begins with a space gets none in front of it."""
    return LlamaTokenizer(vocab=VOCABULARY, merges=MERGES)


def _published() -> PreTrainedTokenizerBase:
    """Every text gets a space in front of it, as SentencePiece did when the model was trained."""
    backend = Tokenizer(models.BPE(VOCABULARY, MERGES, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    names = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def _processor(**options: Any) -> CogAgentProcessor:
    return CogAgentProcessor(_todays(), tiny_config(), **options)


def _ids(*pieces: str) -> list[int]:
    return [VOCABULARY[piece] for part in pieces for piece in part.split()]


def _picture(width: int = 60, height: int = 90, seed: int = 5) -> Image.Image:
    """Smooth hills of every colour, and noise."""
    draw = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, 5, 4, generator=draw)
    smooth = F.interpolate(coarse, (height, width), mode="bicubic")[0].clamp(0, 1)
    noisy = 0.8 * smooth + 0.2 * torch.rand(3, height, width, generator=draw)
    return Image.fromarray((noisy * 255).byte().permute(1, 2, 0).contiguous().numpy())


HISTORY = [("a?", "b"), ("c?", "d")]
PROMPTS = {
    "chat": " [INST] a? [/INST] b [INST] c? [/INST] d [INST] e? [/INST] ",
    "chat_old": "<EOI>Question: a? Answer: b\nQuestion: c? Answer: d\nQuestion: e? Answer:",
    "vqa": "<EOI>Question: e? Short answer:",
    "base": "e?",
}


@pytest.mark.parametrize("template", PROMPTS)
def test_a_question_is_written_as_the_published_code_writes_it(template: str) -> None:
    if template in ("vqa", "base"):
        with pytest.raises(ValueError, match=f"'{template}' holds one question.* has 2 rounds"):
            prompt_of("e?", HISTORY, template)
        assert prompt_of("e?", (), template) == PROMPTS[template]
    else:
        assert prompt_of("e?", HISTORY, template) == PROMPTS[template]


@pytest.mark.parametrize("tokenizer", [_todays, _published])
def test_tokens_types_labels_and_positions_of_a_row(
    tokenizer: Callable[[], PreTrainedTokenizerBase],
) -> None:
    processor = CogAgentProcessor(tokenizer(), tiny_config())
    batch = processor(Conversation("hi", _picture(), answer="a b"))
    # The published tokenizer keeps the first space of the template apart from its own.
    prompt = _ids("▁ ▁[ I N S T ] ▁ h i ▁[ / I N S T ] ▁")
    answer = _ids("▁ a ▁ b </s>")
    head = [BEGIN] + [PAD] * IMAGE_TOKENS
    assert batch["input_ids"].tolist() == [[*head, *prompt, *answer]]
    rest = len(prompt) + len(answer)
    types = [TEXT] + [VISION] * IMAGE_TOKENS + [TEXT] * rest
    assert batch["token_type_ids"].tolist() == [types]
    assert batch["labels"].tolist() == [[-100] * (len(head) + len(prompt)) + answer]
    assert batch["attention_mask"].tolist() == [[1] * len(types)]
    # The begin token, begin and end of the image with one position between them, the text.
    positions = [0, 1, *[2] * (IMAGE_TOKENS - 2), *range(3, 4 + rest)]
    assert build_position_ids(batch["token_type_ids"])[0].tolist() == positions


@pytest.mark.parametrize("tokenizer", [_todays, _published])
@pytest.mark.parametrize("text", ["hi", " hi", "  hi", "   "])
def test_every_text_gets_one_space_in_front(
    tokenizer: Callable[[], PreTrainedTokenizerBase], text: str
) -> None:
    processor = CogAgentProcessor(tokenizer(), tiny_config(), template_version="base")
    expected = [BEGIN, *_published().encode(text, add_special_tokens=False)]
    assert processor(Conversation(text))["input_ids"].tolist() == [expected]


def test_the_published_sizes_are_224_and_1120_pixels_and_258_tokens() -> None:
    batch = CogAgentProcessor(_todays(), CogAgentConfig())(Conversation("hi", _picture()))
    assert [list(image.shape) for image in batch["images"][0]] == [[3, 224, 224]]
    assert [list(image.shape) for image in batch["cross_images"][0]] == [[3, 1120, 1120]]
    assert batch["token_type_ids"].sum() == 258
    assert "labels" not in batch


def _flat(mode: str, colour: Any) -> Image.Image:
    return Image.new(mode, (9, 5), colour)


def _palette() -> Image.Image:
    image = _flat("P", 1)
    image.putpalette([0, 0, 0, 10, 20, 250])
    return image


FLAT = {
    "RGB": (_flat("RGB", (10, 20, 250)), (10, 20, 250)),
    "RGBA": (_flat("RGBA", (10, 20, 250, 0)), (10, 20, 250)),
    "P": (_palette(), (10, 20, 250)),
    "L": (_flat("L", 77), (77, 77, 77)),
    "LA": (_flat("LA", (77, 3)), (77, 77, 77)),
    "1": (_flat("1", 1), (255, 255, 255)),
}


@pytest.mark.parametrize("mode", FLAT)
def test_a_flat_picture_becomes_its_colour_normalised_as_clip_was_trained(mode: str) -> None:
    image, colour = FLAT[mode]
    pixels = pixels_of(image, 14)
    assert pixels.dtype == torch.float32
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    for channel in range(3):
        expected = (colour[channel] / 255 - mean[channel]) / std[channel]
        assert pixels[channel].flatten().tolist() == pytest.approx([expected] * 196, abs=1e-6)


def _grey_levels(pixels: Tensor, image: Image.Image, **options: Any) -> float:
    """The mean distance of ``pixels`` to torch's own resizing of the whole image."""
    raw = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    raw = raw.view(1, image.height, image.width, 3).permute(0, 3, 1, 2).double()
    size = pixels.shape[1:]
    expected = F.interpolate(raw, size, align_corners=False, **options)[0].clamp(0, 255)
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]
    return float(((pixels * std + mean) * 255 - expected).abs().mean())


@pytest.mark.parametrize("size", [42, 112])
def test_resizing_is_bicubic_smoothed_and_leaves_nothing_out(size: int) -> None:
    image = _picture()
    pixels = pixels_of(image, size)
    assert _grey_levels(pixels, image, mode="bicubic", antialias=True) < 0.6
    assert _grey_levels(pixels, image, mode="bilinear", antialias=True) > 1
    if size < image.width:
        assert _grey_levels(pixels, image, mode="bicubic", antialias=False) > 1
    cropped = image.crop((0, 15, 60, 75))
    assert _grey_levels(pixels, cropped, mode="bicubic", antialias=True) > 1


ROWS = [
    Conversation("what is open?", _picture(), [("is it on?", "yes")], answer="a browser"),
    Conversation("hi", [_picture(90, 33, seed=8)], answer="no"),
    Conversation("is it text?", answer="it is"),
]
QUESTIONS = [Conversation(row.query, row.images, row.history) for row in ROWS]


@functools.cache
def _model() -> CogAgentForCausalLM:
    return tiny_model()


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_holds_its_rows_and_their_loss(side: str) -> None:
    processor, model = _processor(padding_side=side), _model()
    # As a collator.
    (batch,) = DataLoader(ROWS, batch_size=len(ROWS), collate_fn=processor)
    assert [len(of_row) for of_row in batch["cross_images"]] == [1, 1, 0]
    total = labels = 0.0
    for index, row in enumerate(ROWS):
        alone = processor(row)
        real = batch["attention_mask"][index].bool()
        assert real.sum() == alone["input_ids"].shape[1] < len(real) or index == 0
        assert real[-1 if side == "left" else 0]
        for name in ("input_ids", "token_type_ids", "labels"):
            assert torch.equal(batch[name][index, real], alone[name][0])
        assert (batch["labels"][index, ~real] == -100).all()
        assert not batch["token_type_ids"][index, ~real].any()
        count = len(_todays().encode(row.answer, add_special_tokens=False)) + 1
        with torch.no_grad():
            total += float(model(**alone).loss) * count
        labels += count
    with torch.no_grad():
        assert float(model(**batch).loss) == pytest.approx(total / labels, rel=1e-6)


def test_a_batch_of_unequal_prompts_answers_as_each_of_them_alone() -> None:
    processor, model = _processor(), _model()
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}

    def answers(batch: BatchFeature) -> Tensor:
        return model.generate(**batch, **options)[:, batch["input_ids"].shape[1] :]

    found = answers(processor(QUESTIONS).to("cpu", torch.double))
    for index, row in enumerate(QUESTIONS):
        assert torch.equal(found[index : index + 1], answers(processor(row)))
    swapped = [Conversation(QUESTIONS[0].query, _picture(seed=9), QUESTIONS[0].history)]
    assert not torch.equal(found[:1], answers(processor(swapped)))


def test_a_saved_folder_gives_the_processor_back(tmp_path: Path) -> None:
    processor = _processor(max_length=99)
    processor.save_pretrained(tmp_path)
    tiny_config(template_version="vqa").save_pretrained(tmp_path)
    loaded = AutoProcessor.from_pretrained(tmp_path, padding_side="right")
    assert isinstance(loaded, CogAgentProcessor)
    assert (loaded.template_version, loaded.padding_side) == ("vqa", "right")
    chat = AutoProcessor.from_pretrained(tmp_path, template_version="chat")
    expected, found = processor(QUESTIONS), chat(QUESTIONS)
    assert torch.equal(found["input_ids"], expected["input_ids"])
    assert torch.equal(found["images"][0][0], expected["images"][0][0])


def test_images_without_pillow_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    processor, picture = _processor(), _picture()
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert processor(Conversation("hi"))["images"] == [[]]
    with pytest.raises(
        ImportError, match=r'need Pillow; run: pip install "parallel_ext\[images\]"'
    ):
        processor(Conversation("hi", picture))


MISUSE: dict[str, list[Any]] = {
    "row 0 has 2 images; the cross attention looks at one": [
        Conversation("a", [_flat("L", 1), _flat("L", 2)])
    ],
    "an image of row 1 is 'x.png'; give a PIL.Image.Image": [
        Conversation("a"),
        Conversation("a", "x.png"),
    ],
    "an image of row 0 is tensor": [Conversation("a", torch.zeros(3, 4, 4))],
    "an image has mode 'I;16'": [Conversation("a", _flat("I;16", 4000))],
    "an image has mode 'F'": [Conversation("a", _flat("F", 0.5))],
    "row 1 has no answer, unlike row 0": [Conversation("a", answer="b"), Conversation("a")],
    "row 1 has an answer, unlike row 0": [Conversation("a"), Conversation("a", answer="b")],
    "query of row 0 is None; give a string": [Conversation(None)],
    "answer of row 0 is 3": [Conversation("a", answer=3)],
    "history of row 0 is 'ab'": [Conversation("a", history="ab")],
    "a round of row 0 is 'ab'": [Conversation("a", history=["ab"])],
    r"a round of row 0 is \('a', None\)": [Conversation("a", history=[("a", None)])],
    "row 0 is {'query': 'a'}; give a Conversation": [{"query": "a"}],
    "no conversation; give one or more": [],
    r"row 1 has 34 tokens \(11 of the image, 19 of the prompt, 2 of the answer\), more .* = 30": [
        Conversation("a", answer="b"),
        Conversation("abc", _flat("L", 1), answer="b"),
    ],
}


@pytest.mark.parametrize("message", MISUSE)
def test_rows_that_do_not_fit_are_refused(message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        _processor(max_length=30)(MISUSE[message])


WRONG_OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "template_version is 'x'; known are": ({}, {"template_version": "x"}),
    "padding_side is 'both'": ({}, {"padding_side": "both"}),
    "eos_token_id is 2 in the tokenizer, 5 in the config": ({"eos_token_id": 5}, {}),
    r"bos_token_id is 1 in the tokenizer, None in the config": ({"bos_token_id": None}, {}),
    "config.pad_token_id is None": ({"pad_token_id": None}, {}),
}


@pytest.mark.parametrize("message", WRONG_OPTIONS)
def test_a_processor_that_does_not_fit_its_model_is_refused(message: str) -> None:
    of_config, options = WRONG_OPTIONS[message]
    with pytest.raises(ValueError, match=message):
        CogAgentProcessor(_todays(), tiny_config(**of_config), **options)
    CogAgentProcessor(_todays(), tiny_config(eos_token_id=[7, END]))
