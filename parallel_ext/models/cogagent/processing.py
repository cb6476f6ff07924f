"""Questions and pictures as inputs of CogAgent, with the published templates and image sizes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoTokenizer, BatchFeature, PreTrainedTokenizerBase

from parallel_ext.models.cogagent.configuration import CogAgentConfig
from parallel_ext.models.cogagent.templates import prompt_of
from parallel_ext.models.cogagent.tokens import LANGUAGE, VISION

if TYPE_CHECKING:
    from PIL.Image import Image

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
"""What CLIP subtracts from red, green and blue, between 0 and 1, and then divides them by."""

IGNORED = -100
"""A label without a loss."""


@dataclass(frozen=True)
class Conversation:
    """One row of a batch; the names are those of the published ``build_conversation_input_ids``.

    Attributes:
        query: the question.
        images: a ``PIL.Image.Image``, or a list of at most one; None for text only.
        history: earlier questions with their answers, oldest first. The image stands before them.
        answer: what the model is to learn; None where it is to answer itself.

    >>> Conversation("And now?", history=[("What is open?", "A browser.")]).query
    'And now?'
    """

    query: str
    images: Image | Sequence[Image] | None = None
    history: Sequence[tuple[str, str]] = ()
    answer: str | None = None


class CogAgentProcessor:
    """The processor, and collator, that makes inputs of :class:`CogAgentForCausalLM`.

    A row is the begin token, the tokens of its image, the prompt and, for training, the answer and
    the end token, at which ``generate()`` stops. Only the answer and the end have labels. Each
    image is squeezed into a square twice, for the two towers. Positions are left to the model.

    Args:
        tokenizer: that of vicuna-7b-v1.5 for the published files, which bring none of their own.
        config: of the model.
        template_version: a key of :data:`~.templates.TEMPLATES`; None for that of ``config``.
        padding_side: "left", or "right" for training only.
        max_length: most tokens of a row; None for no limit.

    Raises:
        ValueError: a tokenizer that does not belong to ``config``, and unknown options.

    >>> from transformers import LlamaTokenizer
    >>> pieces = ["<unk>", "<s>", "</s>", "▁", "y", "n", "?"]
    >>> tokenizer = LlamaTokenizer(vocab={piece: place for place, piece in enumerate(pieces)})
    >>> processor = CogAgentProcessor(tokenizer, CogAgentConfig(), template_version="base")
    >>> batch = processor(Conversation("y?", answer="n"))
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[1, 3, 4, 6, 3, 5, 2]], [[-100, -100, -100, -100, 3, 5, 2]])
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: CogAgentConfig,
        *,
        template_version: str | None = None,
        padding_side: str = "left",
        max_length: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.template_version = template_version or config.template_version
        self.padding_side = padding_side
        self.max_length = max_length
        # Raises for an unknown template before the first batch.
        prompt_of("", (), self.template_version)
        _check(
            padding_side in ("left", "right"),
            f"padding_side is {padding_side!r} and must be 'left' or 'right'",
        )
        for name in ("bos_token_id", "eos_token_id"):
            own, of_model = getattr(tokenizer, name), getattr(config, name)
            _check(
                own is not None and own in (of_model if isinstance(of_model, list) else [of_model]),
                f"{name} is {own} in the tokenizer, {of_model} in the config; take the tokenizer "
                "that the model was trained with",
            )
        # The padding id is that of the configuration: the tokenizer may have none, or one behind V.
        _check(config.pad_token_id is not None, "config.pad_token_id is None; set it, say to 0")
        # SentencePiece, which the model was trained with, puts a space before every text.
        # LlamaTokenizer of transformers 5 does not where the text begins with one, as " [INST] ".
        bare, spaced = (tokenizer.encode(t, add_special_tokens=False) for t in ("a", " a"))
        self._needs_space = bare == spaced

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        template_version: str | None = None,
        padding_side: str = "left",
        max_length: int | None = None,
        **kwargs: Any,
    ) -> CogAgentProcessor:
        """Build the processor of a folder with a model and its tokenizer, as AutoProcessor does.

        Args:
            path: a folder, or a name on the hub.
            template_version, padding_side, max_length: of the constructor.
            kwargs: for AutoConfig and AutoTokenizer.
        """
        return cls(
            AutoTokenizer.from_pretrained(path, **kwargs),
            AutoConfig.from_pretrained(path, **kwargs),
            template_version=template_version,
            padding_side=padding_side,
            max_length=max_length,
        )

    def save_pretrained(self, path: str | os.PathLike[str], **kwargs: Any) -> None:
        """Write the tokenizer; the rest stands in the ``config.json`` that the model writes."""
        self.tokenizer.save_pretrained(path, **kwargs)

    def __call__(self, conversations: Conversation | Sequence[Conversation]) -> BatchFeature:
        """Build the inputs of a batch, for ``model(**batch)`` and ``model.generate(**batch)``.

        Args:
            conversations: one, or a list of B. All of them have an answer, or none has.

        Returns:
            On the CPU; ``.to(device, dtype)`` moves all and casts the images.

            - ``input_ids``, ``token_type_ids``, ``attention_mask``: int64 [B, L].
            - ``images``, ``cross_images``: for each row the list of its images, float32
              [3, 224, 224] and [3, 1120, 1120] for the published sizes; an empty list for text.
            - ``labels``: int64 [B, L], only where there are answers.

        Raises:
            ValueError: what a row cannot hold, and a row longer than ``max_length``; the text names
                the row. Nothing is cut.
            TypeError: a query, answer, history or image of another type.
            ImportError: images without Pillow.
        """
        if isinstance(conversations, Conversation):
            conversations = [conversations]
        conversations = list(conversations)
        _check(len(conversations) > 0, "no conversation; give one or more")
        pictures = [_images_of(row, one) for row, one in enumerate(conversations)]
        answered = conversations[0].answer is not None
        for row, one in enumerate(conversations):
            _check(
                (one.answer is not None) == answered,
                f"row {row} has {'no' if answered else 'an'} answer, unlike row 0; give an answer "
                "for all rows of a batch, or for none",
            )
        rows = [self._row(row, one, len(pictures[row])) for row, one in enumerate(conversations)]
        low, high = self.config.vision_config["image_size"], self.config.cross_image_size
        batch: dict[str, Any] = {
            "input_ids": self._padded([row.ids for row in rows], self.config.pad_token_id),
            "token_type_ids": self._padded([row.types for row in rows], LANGUAGE),
            "attention_mask": self._padded([[1] * len(row.ids) for row in rows], 0),
            "images": [[pixels_of(image, low) for image in of_row] for of_row in pictures],
            "cross_images": [[pixels_of(image, high) for image in of_row] for of_row in pictures],
        }
        if answered:
            batch["labels"] = self._padded([row.labels for row in rows], IGNORED)
        return BatchFeature(batch)

    def _encode(self, text: str) -> list[int]:
        if self._needs_space and text.startswith(" "):
            text = " " + text
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _row(self, row: int, one: Conversation, num_images: int) -> _Row:
        image_tokens = num_images * self.config.image_tokens
        # What stands at the tokens of an image is not read, but must be in the vocabulary.
        image = [self.config.pad_token_id] * image_tokens
        prompt = self._encode(prompt_of(one.query, one.history, self.template_version))
        # Encoded apart from the prompt: a token that spans both would have no label of its own.
        answer = [] if one.answer is None else self._encode(one.answer)
        end = [] if one.answer is None else [self.tokenizer.eos_token_id]
        ids = [self.tokenizer.bos_token_id, *image, *prompt, *answer, *end]
        _check(
            self.max_length is None or len(ids) <= self.max_length,
            f"row {row} has {len(ids)} tokens ({image_tokens} of the image, {len(prompt)} of the "
            f"prompt, {len(answer)} of the answer), more than max_length = {self.max_length}; "
            "shorten it or raise max_length, nothing is cut",
        )
        learned = len(answer) + len(end)
        return _Row(
            ids,
            [LANGUAGE, *[VISION] * image_tokens, *[LANGUAGE] * (len(ids) - 1 - image_tokens)],
            [IGNORED] * (len(ids) - learned) + ids[len(ids) - learned :],
        )

    def _padded(self, rows: list[list[int]], fill: int) -> Tensor:
        return pad_sequence([*map(torch.tensor, rows)], True, fill, self.padding_side)


@dataclass(frozen=True)
class _Row:
    ids: list[int]
    types: list[int]
    labels: list[int]


def pixels_of(image: Image, size: int) -> Tensor:
    """Return an image as a tower reads it: a bicubic square, normalised as CLIP's.

    Nothing is cut off, and nothing added to keep its proportions. An alpha channel is dropped.

    Args:
        image: a ``PIL.Image.Image`` with 8 bits for each channel.
        size: pixels along each side.

    Returns:
        float32 [3, size, size].

    Raises:
        ValueError: more than 8 bits for each channel, whose range is not known.

    >>> from PIL import Image
    >>> pixels_of(Image.new("L", (300, 200)), 28).shape
    torch.Size([3, 28, 28])
    """
    _check(
        image.mode[0] not in "IF",
        f"an image has mode {image.mode!r}, whose range is not known; bring it to 8 bits first, "
        "mode 'L' or 'RGB'",
    )
    square = image.convert("RGB").resize((size, size), _pillow().Resampling.BICUBIC)
    values = torch.from_numpy(np.array(square)).permute(2, 0, 1).contiguous().float() / 255
    return (values - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def _images_of(row: int, one: Conversation) -> list[Image]:
    """Return the images of a conversation, and check its fields."""
    _check_type(f"row {row}", one, Conversation, "a Conversation")
    _check_type(f"query of row {row}", one.query, str, "a string")
    _check_type(f"answer of row {row}", one.answer, (str, type(None)), "a string or None")
    _check_type(f"history of row {row}", one.history, (list, tuple), "a list of rounds")
    for said in one.history:
        _check_type(f"a round of row {row}", said, (list, tuple), "a (question, answer)")
        _check(
            [type(part) for part in said] == [str, str],
            f"a round of row {row} is {said!r:.60}; give a (question, answer), two strings",
        )
    if one.images is None:
        return []
    images = list(one.images) if isinstance(one.images, (list, tuple)) else [one.images]
    _check(
        len(images) <= 1,
        f"row {row} has {len(images)} images; the cross attention looks at one image for each row",
    )
    for image in images:
        kind, wanted = _pillow().Image, "a PIL.Image.Image, as Image.open gives"
        _check_type(f"an image of row {row}", image, kind, wanted)
    return images


def _pillow() -> ModuleType:
    """Import PIL.Image, which is needed only for images, and return it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            'CogAgentProcessor: images need Pillow; run: pip install "parallel_ext[images]"'
        ) from error
    return Image


def _check(holds: bool, text: str) -> None:
    if not holds:
        raise ValueError(f"CogAgentProcessor: {text}")


def _check_type(name: str, value: object, kind: type | tuple[type, ...], wanted: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"CogAgentProcessor: {name} is {value!r:.60}; give {wanted}")
