"""What a model must look like to be spread over ranks, and how its parameters are cut."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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
        num_experts: attribute of the configuration.
        in_files: name of the block in files.
        gate_up_in_files, down_in_files: of the tensors of one expert in files, ``experts.3.w1``;
            the first two lie one above the other in ``gate_up``.
        jitter: attribute of the configuration, the noise of the router; None where it has none.
    """

    name: str
    router: str
    router_class: str
    experts: str
    experts_class: str
    gate_up: str
    down: str
    num_experts: str
    in_files: str
    gate_up_in_files: tuple[str, str]
    down_in_files: str
    jitter: str | None = None

    def jitter_of(self, config: Any) -> float:
        """The noise that ``config`` asks of the router in training."""
        return 0.0 if self.jitter is None else getattr(config, self.jitter)

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
        head_norms: names in the attention of the norms of single heads. All heads share the weights
            of one, which are replicated; each rank normalises its own heads.
        mlp, mixture: what follows the attention, in each layer one of the two; None where no layer
            has it.
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
    head_norms: tuple[str, ...] = ()
    mlp: MLPNames | None = None
    mixture: MixtureNames | None = None

    def layer_paths(self, num_layers: int) -> tuple[str, ...]:
        """Paths of the decoder layers."""
        return tuple(f"{self.layers}.{index}" for index in range(num_layers))

    def block(self, layer: str, names: Container[str]) -> MLPNames | MixtureNames:
        """What follows the attention in one layer.

        Args:
            layer: its path.
            names: of the model's parameters.
        """
        if self.mlp is None or self.mixture is None:
            return self.mlp or self.mixture
        experts = f"{layer}.{self.mixture.name}.{self.mixture.experts}.{self.mixture.down}"
        return self.mixture if experts in names else self.mlp

    def mixtures(self, num_layers: int, names: Container[str]) -> tuple[str, ...]:
        """Paths of the layers that have a mixture of experts; the arguments are as above."""
        layers = self.layer_paths(num_layers)
        return tuple(path for path in layers if self.block(path, names) is self.mixture)

    def modules(self, num_layers: int, names: Container[str]) -> tuple[str, ...]:
        """Paths of all modules that are replaced or given a hook; the arguments are as above."""
        heads = (self.query, self.key, self.value, self.attention_output, *self.head_norms)
        attention = (self.attention, *(f"{self.attention}.{name}" for name in heads))
        return (
            self.embedding,
            self.head,
            *(
                f"{layer}.{name}"
                for layer in self.layer_paths(num_layers)
                for name in (*attention, *self.block(layer, names).modules())
            ),
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
            the number of experts; or a norm is not one of single heads.
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
    for layer in table.layer_paths(num_layers):
        block = table.block(layer, shapes)
        attention, mlp = f"{layer}.{table.attention}", f"{layer}.{block.name}"
        query, key_value = _features(heads, sizes.head_dim)
        cut_all(f"{attention}.{table.query}", 0, query)
        cut_all(f"{attention}.{table.key}", 0, key_value)
        cut_all(f"{attention}.{table.value}", 0, key_value)
        cut_all(f"{attention}.{table.attention_output}", 1, query)
        for name in (f"{attention}.{norm}.weight" for norm in table.head_norms):
            if shapes.get(name) != (sizes.head_dim,):
                raise ValueError(
                    f"{name} has the shape {shapes.get(name)}, but a norm of single heads has "
                    f"({sizes.head_dim},); a norm over all heads cannot be cut with them"
                )
        if isinstance(block, MLPNames):
            inner = split(shapes[f"{mlp}.{block.output}.weight"][1], tp_size)
            for name in block.inputs:
                cut_all(f"{mlp}.{name}", 0, inner)
            cut_all(f"{mlp}.{block.output}", 1, inner)
            continue
        for attribute in (block.gate_up, block.down):
            name = f"{mlp}.{block.experts}.{attribute}"
            num_experts = shapes[name][0]
            if ep_size > num_experts:
                raise ValueError(
                    f"ep={ep_size} is more than the {num_experts} experts of {name}: a rank would "
                    "hold none"
                )
            tensors[name] = cut(name, shapes[name], 0, split(num_experts, ep_size))
        parts |= {name: tuple(found) for name, found in block.parts(layer, shapes).items()}
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
