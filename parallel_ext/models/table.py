"""What a model must look like to be spread over ranks, and how its parameters are cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from parallel_ext.layout import (
    AttentionHeads,
    ModelLayout,
    Range,
    TensorLayout,
    cut,
    split,
    split_heads,
)


@dataclass(frozen=True)
class ModelTable:
    """The module names of one architecture.

    Attributes:
        model_type: ``config.model_type`` of the models that it describes.
        embedding, head: paths from the model; cut by vocabulary.
        layers: path of the list of decoder layers.
        attention: name in a layer; its inputs are copied to the ranks, its heads are cut.
        query, key, value: names in the attention; cut by output features, whole heads.
        attention_output: name in the attention; cut by input features.
        mlp: name in a layer.
        mlp_inputs: names in the MLP; cut by output features, anywhere.
        mlp_output: name in the MLP; cut by input features.
    """

    model_type: str
    embedding: str
    head: str
    layers: str
    attention: str
    query: str
    key: str
    value: str
    attention_output: str
    mlp: str
    mlp_inputs: tuple[str, ...]
    mlp_output: str

    def modules(self, num_layers: int) -> tuple[str, ...]:
        """Paths of all modules that are replaced or given a hook."""
        inner = self._layer_modules()
        layers = (f"{self.layers}.{index}" for index in range(num_layers))
        return (
            self.embedding,
            self.head,
            *(f"{layer}.{name}" for layer in layers for name in inner),
        )

    def _layer_modules(self) -> tuple[str, ...]:
        attention = (self.query, self.key, self.value, self.attention_output)
        mlp = (*self.mlp_inputs, self.mlp_output)
        return (
            self.attention,
            self.mlp,
            *(f"{self.attention}.{name}" for name in attention),
            *(f"{self.mlp}.{name}" for name in mlp),
        )


@dataclass(frozen=True)
class ModelSizes:
    """The numbers of a model's configuration that decide how it is cut."""

    vocab_size: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int


def plan(
    table: ModelTable,
    shapes: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
    sizes: ModelSizes,
    num_layers: int,
    tp_size: int,
    vocab_multiple_of: int = 1,
) -> ModelLayout:
    """The layout of every parameter of a model.

    A pure function of its arguments, so that every rank computes the same.

    Args:
        table: the architecture.
        shapes: full shape of every parameter by HuggingFace name; tied aliases may be left out.
        tied: alias -> the name of the tensor that it shares.
        sizes: from the configuration.
        num_layers: decoder layers that the model has.
        tp_size: ranks to cut for.
        vocab_multiple_of: boundaries between vocabulary shards are multiples of this.

    Returns:
        Layouts of all names in ``shapes`` but the aliases; what no rule cuts is replicated.

    Raises:
        ValueError: ``tp_size`` is larger than the attention heads can serve.
    """
    heads = split_heads(sizes.num_heads, sizes.num_key_value_heads, tp_size)
    rows = split(sizes.vocab_size, tp_size, vocab_multiple_of)
    tensors: dict[str, TensorLayout] = {}

    def cut_all(path: str, dim: int, ranges: tuple[Range, ...]) -> None:
        """Cut the weight, and the bias too where it belongs to the cut features."""
        for attribute in ("weight", "bias") if dim == 0 else ("weight",):
            name = f"{path}.{attribute}"
            if name in shapes and name not in tied:
                tensors[name] = cut(name, shapes[name], dim, ranges)

    for path in (table.embedding, table.head):
        cut_all(path, 0, rows)
    for layer in (f"{table.layers}.{index}" for index in range(num_layers)):
        attention, mlp = f"{layer}.{table.attention}", f"{layer}.{table.mlp}"
        query, key_value = _features(heads, sizes.head_dim)
        cut_all(f"{attention}.{table.query}", 0, query)
        cut_all(f"{attention}.{table.key}", 0, key_value)
        cut_all(f"{attention}.{table.value}", 0, key_value)
        cut_all(f"{attention}.{table.attention_output}", 1, query)
        inner = split(shapes[f"{mlp}.{table.mlp_output}.weight"][1], tp_size)
        for name in table.mlp_inputs:
            cut_all(f"{mlp}.{name}", 0, inner)
        cut_all(f"{mlp}.{table.mlp_output}", 1, inner)
    for name, shape in shapes.items():
        if name not in tied and name not in tensors:
            tensors[name] = TensorLayout(name, shape)
    return ModelLayout({name: tensors[name] for name in shapes if name not in tied}, tied)


def _features(heads: AttentionHeads, head_dim: int) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
    """Ranges of heads -> ranges of features."""

    def scaled(ranges: Iterable[Range]) -> tuple[Range, ...]:
        return tuple((start * head_dim, stop * head_dim) for start, stop in ranges)

    return scaled(heads.query), scaled(heads.key_value)
