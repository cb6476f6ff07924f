"""What a model must look like to be spread over ranks, and how its parameters are cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from parallel_ext.layout import (
    AttentionHeads,
    ModelLayout,
    Part,
    Range,
    TensorLayout,
    cut,
    split,
    split_heads,
)


@dataclass(frozen=True)
class MLPNames:
    """The names of a dense MLP in a decoder layer.

    Attributes:
        name: in the layer; its input is copied to the ranks.
        inputs: in the MLP; cut by output features, anywhere.
        output: in the MLP; cut by input features.
    """

    name: str
    inputs: tuple[str, ...]
    output: str

    def modules(self) -> tuple[str, ...]:
        """Paths, in a layer, of all modules that are replaced or given a hook."""
        return (self.name, *(f"{self.name}.{name}" for name in (*self.inputs, self.output)))


@dataclass(frozen=True)
class MixtureNames:
    """The names of a mixture of experts in a decoder layer, in memory and in files.

    Attributes:
        name: of the block in the layer.
        router, router_class: in the block; replicated. Returns logits, weights and expert ids.
        experts, experts_class: in the block; its two parameters are dealt to the ep ranks.
        gate_up, down: parameters of the experts, [E, 2 I, H] and [E, H, I].
        num_experts, jitter: attributes of the configuration.
        in_files: name of the block in files.
        gate_up_in_files, down_in_files: of the tensors of one expert in files, ``experts.3.w1``;
            the first two lie one above the other in ``gate_up``.
    """

    name: str
    router: str
    router_class: str
    experts: str
    experts_class: str
    gate_up: str
    down: str
    num_experts: str
    jitter: str
    in_files: str
    gate_up_in_files: tuple[str, str]
    down_in_files: str

    def modules(self) -> tuple[str, ...]:
        """Paths, in a layer, of all modules that are replaced or given a hook."""
        return (self.name, f"{self.name}.{self.router}", f"{self.name}.{self.experts}")

    def parts(self, layer: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[Part]]:
        """Name of each parameter of the block in ``layer`` -> the tensors of a file in it."""
        block, files = f"{layer}.{self.name}", f"{layer}.{self.in_files}"
        router = f"{block}.{self.router}.weight"
        box = tuple((0, size) for size in shapes[router])
        found = {router: [Part(f"{files}.{self.router}.weight", router, box, index=False)]}
        for attribute, names in (
            (self.gate_up, self.gate_up_in_files),
            (self.down, (self.down_in_files,)),
        ):
            source = f"{block}.{self.experts}.{attribute}"
            num_experts, rows, columns = shapes[source]
            found[source] = [
                Part(
                    f"{files}.experts.{expert}.{name}.weight",
                    source,
                    ((expert, expert + 1), piece, (0, columns)),
                    index=True,
                )
                for expert in range(num_experts)
                for name, piece in zip(names, split(rows, len(names)), strict=True)
            ]
        return found


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
        mlp: the names in a layer's MLP, or in what stands in its place.
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
    mlp: MLPNames | MixtureNames

    @property
    def mixture(self) -> MixtureNames | None:
        """The names of the mixture of experts, if there is one."""
        return self.mlp if isinstance(self.mlp, MixtureNames) else None

    def modules(self, num_layers: int) -> tuple[str, ...]:
        """Paths of all modules that are replaced or given a hook."""
        heads = (self.query, self.key, self.value, self.attention_output)
        attention = (self.attention, *(f"{self.attention}.{name}" for name in heads))
        layers = (f"{self.layers}.{index}" for index in range(num_layers))
        return (
            self.embedding,
            self.head,
            *(f"{layer}.{name}" for layer in layers for name in (*attention, *self.mlp.modules())),
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
    ep_size: int = 1,
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
        ep_size: ranks to deal the experts to.
        vocab_multiple_of: boundaries between vocabulary shards are multiples of this.

    Returns:
        Layouts of all names in ``shapes`` but the aliases; what no rule cuts is replicated.

    Raises:
        ValueError: ``tp_size`` is larger than the attention heads can serve, or ``ep_size`` than
            the number of experts.
    """
    heads = split_heads(sizes.num_heads, sizes.num_key_value_heads, tp_size)
    rows = split(sizes.vocab_size, tp_size, vocab_multiple_of)
    tensors: dict[str, TensorLayout] = {}
    parts: dict[str, tuple[Part, ...]] = {}

    def cut_all(path: str, dim: int, ranges: tuple[Range, ...]) -> None:
        """Cut the weight, and the bias too where it belongs to the cut features."""
        for attribute in ("weight", "bias") if dim == 0 else ("weight",):
            name = f"{path}.{attribute}"
            if name in shapes and name not in tied:
                tensors[name] = cut(name, shapes[name], dim, ranges)

    for path in (table.embedding, table.head):
        cut_all(path, 0, rows)
    for layer in (f"{table.layers}.{index}" for index in range(num_layers)):
        attention, mlp = f"{layer}.{table.attention}", f"{layer}.{table.mlp.name}"
        query, key_value = _features(heads, sizes.head_dim)
        cut_all(f"{attention}.{table.query}", 0, query)
        cut_all(f"{attention}.{table.key}", 0, key_value)
        cut_all(f"{attention}.{table.value}", 0, key_value)
        cut_all(f"{attention}.{table.attention_output}", 1, query)
        if isinstance(table.mlp, MLPNames):
            inner = split(shapes[f"{mlp}.{table.mlp.output}.weight"][1], tp_size)
            for name in table.mlp.inputs:
                cut_all(f"{mlp}.{name}", 0, inner)
            cut_all(f"{mlp}.{table.mlp.output}", 1, inner)
            continue
        for attribute in (table.mlp.gate_up, table.mlp.down):
            name = f"{mlp}.{table.mlp.experts}.{attribute}"
            num_experts = shapes[name][0]
            if ep_size > num_experts:
                raise ValueError(
                    f"ep={ep_size} is more than the {num_experts} experts of {name}: a rank would "
                    "hold none"
                )
            tensors[name] = cut(name, shapes[name], 0, split(num_experts, ep_size))
        parts |= {name: tuple(found) for name, found in table.mlp.parts(layer, shapes).items()}
    for name, shape in shapes.items():
        if name not in tied and name not in tensors:
            tensors[name] = TensorLayout(name, shape)
    untied = {name: tensors[name] for name in shapes if name not in tied}
    return ModelLayout(untied, tied, parts)


def _features(heads: AttentionHeads, head_dim: int) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
    """Ranges of heads -> ranges of features."""

    def scaled(ranges: Iterable[Range]) -> tuple[Range, ...]:
        return tuple((start * head_dim, stop * head_dim) for start, stop in ranges)

    return scaled(heads.query), scaled(heads.key_value)
