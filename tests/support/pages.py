"""Pages of README and docs as Python to run, and the directory in which it runs.

The ```python blocks of a page run in order, in one namespace, on 2 gloo ranks. Two comments in a
page's source steer them: ``<!-- setup`` ... ``-->`` holds Python that runs at its place (data, an
optimizer), and ``<!-- one process -->`` lets rank 0 alone run the block that follows.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import peft
import torch
import torch.distributed as dist
import transformers
from reference import Tiny
from reference_cogagent import DATA as COGAGENT
from reference_mixtral import TinyMixtral
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

# Names of models on the hub, and the directories that stand for them.
PLACES = {"zai-org/cogagent-chat-hf": "path/to/cogagent", "lmsys/vicuna-7b-v1.5": "path/to/vicuna"}
EXAMPLE = Path(__file__).parents[2] / "examples" / "minimal.py"
_STEP = re.compile(
    r"^<!-- setup\n(?P<setup>.*?)\n-->$|"
    r"^(?P<alone><!-- one process -->\n)?```python\n(?P<block>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


class Step(NamedTuple):
    """Some Python of a page.

    Attributes:
        place: page and kind, as tracebacks show them.
        code: with so many empty lines in front that its lines have the numbers of the page's.
        alone: only rank 0 runs it.
    """

    place: str
    code: str
    alone: bool


def steps_of(page: Path) -> list[Step]:
    """Return the Python of a page in its order, hidden setups included.

    What stands in ``examples/minimal.py`` is left out: it is a script, which a test runs.
    """
    text, example = page.read_text(), EXAMPLE.read_text()
    steps = []
    for match in _STEP.finditer(text):
        if match["block"] and match["block"] in example:
            continue
        kind = "setup" if match["setup"] else "block"
        code = "\n" * text.count("\n", 0, match.start(kind)) + match[kind]
        for public, local in PLACES.items():
            code = code.replace(public, local)
        steps.append(Step(f"{page.name}, {kind}", code, match["alone"] is not None))
    return steps


def run_steps(steps: list[Step], directory: str) -> None:
    """Run the steps of a page in ``directory``; every rank calls it."""
    home = os.getcwd()
    os.chdir(directory)
    namespace: dict[str, Any] = {"__name__": "page"}
    try:
        for step in steps:
            if not step.alone or dist.get_rank() == 0:
                exec(compile(step.code, step.place, "exec"), namespace)
            dist.barrier()
    finally:
        os.chdir(home)


def _byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes: 259 tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "padding_side": "left"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def _letter_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer of the 97 tokens of the tiny CogAgent, its spaces as SentencePiece's."""
    pieces = ["<unk>", "<s>", "</s>", "▁", *map(chr, range(33, 126))]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def prepare_models(directory: Path) -> None:
    """Put tiny models where the pages expect theirs: ``path/to/llama`` and the like."""
    places = directory / "path" / "to"
    llama, mixtral = places / "llama", places / "mixtral"
    plain = Tiny(vocab_size=259, dtype=torch.float32).model()
    plain.save_pretrained(llama)
    TinyMixtral(num_experts=5, vocab_size=259, dtype=torch.float32).model().save_pretrained(mixtral)
    for each in (llama, mixtral):
        _byte_tokenizer().save_pretrained(each)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(plain, config).save_pretrained(places / "adapter")
    (places / "cogagent").symlink_to(COGAGENT)
    _letter_tokenizer().save_pretrained(places / "vicuna")
