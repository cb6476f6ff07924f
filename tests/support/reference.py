"""The plain single-process answers that parallel models are held against, and the comparison."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import transformers
from reference_ops import TOLERANCE
from reference_ops import assert_within as assert_within
from safetensors.torch import load_file
from torch import nn

import parallel_ext as px
from parallel_ext.parallel.state import state_of
from parallel_ext.sharding.named_shards import named_shards, to_shards
from parallel_ext.sharding.slices import local_part, take

FLOOR = TOLERANCE  # of a model in fp64; in the lower ones, see ``assert_at_most_twice``


@dataclass(frozen=True)
class Tiny:
    """A small Llama; the defaults divide nothing."""

    vocab_size: int = 101
    heads: int = 9
    key_value_heads: int = 3
    inner: int = 97
    layers: int = 2
    tied: bool = False
    dtype: torch.dtype = torch.float64
    attention: str = "sdpa"
    bias: bool = False

    def config(self) -> transformers.LlamaConfig:
        return transformers.LlamaConfig(
            **config_sizes(self),
            intermediate_size=self.inner,
            attn_implementation=self.attention,
            attention_bias=self.bias,
            mlp_bias=self.bias,
        )

    def model(self, seed: int = 1) -> transformers.LlamaForCausalLM:
        """The single-process model, the same on every rank."""
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(self.config()).to(self.dtype).train()
        for parameter in model.parameters():  # the initial biases of 0 and norms of 1 hide errors
            if parameter.dim() == 1:
                nn.init.normal_(parameter, mean=1.0, std=0.3)
        return model if self.dtype != torch.float64 else exact(model)


def config_sizes(tiny: Any) -> dict[str, Any]:
    """What the configuration of a small model takes, whatever its architecture."""
    return {
        "vocab_size": tiny.vocab_size,
        "hidden_size": 8 * tiny.heads,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.key_value_heads,
        "tie_word_embeddings": tiny.tied,
        "max_position_embeddings": 128,
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    }


def exact_norms(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Let the norms of a fp64 model compute in fp64; HuggingFace's go by fp32."""

    def norm(self: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(hidden, hidden.shape[-1:], self.weight, self.variance_epsilon)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(norm, module)
    return model


def exact(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Let a plain fp64 model compute in fp64 throughout, its loss included."""

    def loss(self: nn.Module, logits: Any, labels: Any, vocab_size: int, **kwargs: Any) -> Any:
        shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
        return nn.functional.cross_entropy(logits.reshape(-1, vocab_size), shifted.reshape(-1))

    model.loss_function = MethodType(loss, model)
    return exact_norms(model)


@lru_cache
def mesh_of(tp: int | None = None, ep: int = 1) -> px.Mesh:
    """A mesh over the pool's ranks; one tp group of all of them unless said otherwise.

    One for all tests of a process, since groups and their threads stay.
    """
    return px.init_mesh(tp=dist.get_world_size() if tp is None else tp, ep=ep, timeout=60.0)


@contextmanager
def quietly() -> Iterator[None]:
    """Without warnings, which other tests look at."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def refusal(call: Callable[[], object]) -> str:
    """The text of the error that a call raises, or that there was none."""
    try:
        call()
    except Exception as error:
        return str(error)
    return "nothing was raised"


def saved_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a saved model; none is in two files."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        of_file = load_file(path)
        assert not of_file.keys() & tensors.keys()
        tensors |= of_file
    return tensors


def parallel(reference: transformers.PreTrainedModel, mesh: px.Mesh, **options: Any) -> Any:
    """A parallel copy of a single-process model."""
    model = copy.deepcopy(reference)
    model.__dict__.pop("_loss_function", None)  # of ``exact``
    with quietly():  # of rows that do not divide
        return px.parallelize(model, mesh, **options)


def batch(
    vocab_size: int, rows: int = 2, tokens: int = 9, seed: int = 2, left: bool = True
) -> dict[str, Any]:
    """Ids, labels of which some are ignored, and a mask with padding on the left or the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size, (rows, tokens), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, slice(0, 2) if left else slice(-2, None)] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[-1, 3] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def uneven_rows(vocab_size: int, number: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Rows of a data set, with uneven numbers of labels."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for row in range(number):
        ids = torch.randint(0, vocab_size, (7,), generator=generator)
        labels = ids.clone()
        labels[: row % 6] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def difference(
    ours: torch.Tensor, theirs: torch.Tensor, scale: torch.Tensor | None = None
) -> float:
    """max |ours - theirs| / max |scale|; scale is the full tensor that a shard belongs to."""
    if ours.numel() == 0:
        return 0.0
    largest = (theirs if scale is None else scale).abs().max().double()
    return ((ours.double() - theirs.double()).abs().max() / largest.clamp_min(1e-30)).item()


def shard_differences(
    model: nn.Module, full: dict[str, torch.Tensor], gradients: bool
) -> dict[str, float]:
    """The difference of every shard of ``model`` (or of its gradient) from the full tensors."""
    rank = state_of(model).mesh.rank
    differences = {}
    to_shards(model)
    for name, parameter, layout in named_shards(model):
        ours = parameter.grad if gradients else parameter.detach()
        if not parameter.requires_grad and ours is None:
            continue
        if (ours is None) != (full[name] is None):
            raise AssertionError(f"{name} has {'no' if ours is None else 'a'} gradient")
        if ours is None:  # never run, in one process neither
            continue
        theirs = take(full[name], layout, rank)
        differences[name] = difference(local_part(ours), theirs, full[name])
    return differences


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def worst(differences: dict[str, float]) -> tuple[float, str]:
    """The largest difference and its name; NaN counts as the largest."""
    return max((float("inf") if d != d else d, name) for name, d in differences.items())


def assert_at_most_twice(
    ranks: Iterable[tuple[dict[str, float], dict[str, float]]], floor: float
) -> None:
    """Assert that no error of ours is above twice the single process's, or ``floor``."""
    for ours, theirs in ranks:
        for name, error in ours.items():
            assert error <= max(2 * theirs[name], floor), name


def gradient_differences(
    reference: nn.Module,
    model: nn.Module,
    whole: dict[str, Any],
    own: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Run one backward of each, of ours on this rank's ``own`` batch, and compare the gradients."""
    reference(**whole).loss.backward()
    model(**(whole if own is None else own)).loss.backward()
    return shard_differences(model, gradients_of(reference), gradients=True)
