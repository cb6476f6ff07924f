"""The sublayers of models: the names of their modules, and how they are sharded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from parallel_ext.sharding.layout import (
    AttentionHeads,
    Range,
    TensorLayout,
    scaled,
    shard_along,
    shard_joined,
    shard_like,
    shard_parts,
    split,
)

Shapes = Mapping[str, tuple[int, ...]]
"""Full shape of every parameter of a model by HuggingFace name."""

Layouts = dict[str, TensorLayout]


@dataclass(frozen=True)
class AttentionNames:
    """The names of an attention: its projections, each a module of its own or all three joined.

    Attributes:
        name: in the layer; its input is copied to the ranks, its heads are sharded.
        query, key, value: names in the attention; sharded by output features, whole heads. Three
            times one name where one linear joins them, in this order. In a model, ``value`` is
            ``key`` in an attention whose keys are its values, and both are None in one that reads
            those of a layer before it.
        output: name in the attention; sharded by input features.
        head_norms: names in the attention of the norms of single heads, that of queries first. All
            heads share the weights of one, or each has a row of them; they are replicated, and each
            rank normalises its own heads. A model may lack all of them, by its configuration.
        query_norm, key_norm: names in the attention of the norms over all heads of the queries and
            of the keys; their weights are sharded as these. None where there is none.
        gated: whether ``query`` has a gate of ``head_dim`` features behind each head.
        gate: name in the attention of a projection of its own for that; None where there is none.
        of_heads: parameters of the attention itself with a value for each query head. All ranks
            hold them whole, and use those of their own heads.
        norm_class: of these two: RMSNorm in fp32 or wider, times the weight, then rounded.
        norm_rounds_first: whether it rounds before it multiplies by the weight, as Llama's does.
    """

    name: str
    query: str
    key: str | None
    value: str | None
    output: str
    head_norms: tuple[str, ...] = ()
    query_norm: str | None = None
    key_norm: str | None = None
    norm_class: str | None = None
    norm_rounds_first: bool = False
    gated: bool = False
    gate: str | None = None
    of_heads: tuple[str, ...] = ()

    @property
    def rows_per_head(self) -> int:
        """Return how often ``query`` has the features of a head."""
        return 2 if self.gated else 1

    def in_model(self, path: str, names: Collection[str]) -> AttentionNames:
        """Return the names of the attention at ``path`` in a model with such parameters."""

        def has(name: str | None) -> bool:
            return f"{path}.{name}.weight" in names

        key = self.key if has(self.key) else None
        value = self.value if has(self.value) else key
        norms = tuple(filter(has, self.head_norms))
        # Of all norms, or of none, but where there are no keys to normalise.
        return replace(
            self, key=key, value=value, head_norms=self.head_norms if norms and key else norms
        )

    def modules(self) -> tuple[str, ...]:
        """Return the names, in the sublayer, of all modules that are replaced or given a hook."""
        return (*self.inputs, self.output, *self.head_norms, *self.full_norms)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of the projections that read the input of the attention."""
        gate = () if self.gate is None else (self.gate,)
        return tuple(dict.fromkeys((self.query, *self.keys_and_values, *gate)))

    @property
    def keys_and_values(self) -> tuple[str, ...]:
        """Return the names of the projections that make keys and values."""
        return tuple(dict.fromkeys(filter(None, (self.key, self.value))))

    @property
    def full_norms(self) -> tuple[str, ...]:
        """Return the names of the norms over all heads."""
        return tuple(filter(None, (self.query_norm, self.key_norm)))

    @property
    def is_joined(self) -> bool:
        """Return whether one linear joins query, key and value."""
        return self.query == self.key == self.value

    def attributes(self) -> tuple[str, ...]:
        """Return the names of the sublayer's attributes that are read or changed."""
        of_joined = ("config", "num_key_value_heads") if self.is_joined else ()
        return ("head_dim", "num_key_value_groups", *of_joined, *self.of_heads)

    def layouts(self, path: str, shapes: Shapes, heads: AttentionHeads, head_dim: int) -> Layouts:
        """Return the layouts of the sharded parameters of the attention at ``path``.

        Raises:
            ValueError: it has a norm that it cannot have.
        """
        query, key_value = scaled(heads.query, head_dim), scaled(heads.key_value, head_dim)
        for name in (f"{path}.{each}" for each in self.of_heads):
            if shapes.get(name) != (heads.query[-1][1],):
                raise ValueError(
                    f"{name} has the shape {shapes.get(name)}, but a value for each query head has "
                    f"({heads.query[-1][1]},)"
                )
        for number, norm in enumerate(self.head_norms):
            ranges = heads.key_value if number else heads.query
            shape = shapes.get(name := f"{path}.{norm}.weight")
            of_each = () if self.is_joined else ((ranges[-1][1], head_dim),)
            if shape not in ((head_dim,), *of_each):
                raise ValueError(
                    f"{name} has the shape {shape}, but a norm of single heads has ({head_dim},); "
                    "norms over all heads are query_norm and key_norm"
                )
        norms: Layouts = {}
        for norm, ranges in ((self.query_norm, query), (self.key_norm, key_value)):
            if norm is not None:
                norms |= shard_rows(f"{path}.{norm}", shapes, ranges)
        if self.is_joined:
            if norms or self.of_heads or self.gated or self.gate:
                raise ValueError(
                    f"{', '.join(norms) or path}: norms over all heads, gates and parameters of "
                    "heads are not served where one linear joins query, key and value"
                )
            if len(set(key_value)) < len(key_value):
                raise ValueError(
                    f"{path}.{self.query} joins query, key and value, of which tp={len(query)} "
                    "would replicate key-value heads; choose a tp of at most their number"
                )
            name = f"{path}.{self.query}.weight"
            joined = shard_parts(name, shapes[name], 0, (query, key_value, key_value))
            return {
                name: joined,
                **_bias_beside(joined, shapes),
                **_shard_columns(f"{path}.{self.output}", shapes, query),
            }
        others: Layouts = {}
        for name in self.keys_and_values:
            others |= shard_rows(f"{path}.{name}", shapes, key_value)
        if self.gate is not None:
            others |= shard_rows(f"{path}.{self.gate}", shapes, query)
        return {
            **norms,
            **shard_rows(f"{path}.{self.query}", shapes, scaled(query, self.rows_per_head)),
            **others,
            **_shard_columns(f"{path}.{self.output}", shapes, query),
        }


@dataclass(frozen=True)
class DeltaNetNames:
    """The names of a gated delta rule, which stands in place of an attention in some layers.

    Value heads are shared out with the key head that they belong to.

    Attributes:
        name: in the layer; its input is copied to the ranks, its heads are sharded.
        joined: linear of the queries, keys and values of all heads, in this order; None where
            ``inputs`` have them too.
        inputs: further linears, whose output features belong to heads in turn.
        output: sharded by input features.
        convolution: of each feature of queries, keys and values over the tokens. All ranks hold it
            whole, and use its weights for their own heads, as they do with the next two.
        norm: of single heads.
        of_heads: parameters of the module itself with a value for each value head.
        heads: attribute of the module, the number of its key heads.
        widths: further attributes of the module that are those of the rank after sharding.
    """

    name: str
    joined: str | None
    inputs: tuple[str, ...]
    output: str
    convolution: str
    norm: str
    of_heads: tuple[str, ...]
    heads: str
    widths: tuple[str, ...]

    def modules(self) -> tuple[str, ...]:
        """Return the names, in the sublayer, of all modules that are replaced or given a hook."""
        return (*self.linears, self.output, self.convolution, self.norm)

    @property
    def linears(self) -> tuple[str, ...]:
        """Return the names of the linears that read the input."""
        return self.inputs if self.joined is None else (self.joined, *self.inputs)

    def attributes(self) -> tuple[str, ...]:
        """Return the names of the sublayer's attributes that are read or changed."""
        return (self.heads, *self.widths, *self.of_heads)

    def layouts(self, path: str, shapes: Shapes, tp_size: int, num_heads: int) -> Layouts:
        """Return the layouts of the sharded parameters of the module at ``path``.

        Raises:
            ValueError: a rank would hold no key head.
        """
        if tp_size > num_heads:
            raise ValueError(
                f"{path} has {num_heads} key heads, fewer than tp={tp_size}; choose a smaller tp"
            )
        heads, output = split(num_heads, tp_size), f"{path}.{self.output}"
        values = shapes[f"{output}.weight"][1]
        found = _shard_columns(output, shapes, scaled(heads, values // num_heads))
        for name in (f"{path}.{name}" for name in self.inputs):
            rows = shapes[f"{name}.weight"][0]
            found |= shard_rows(name, shapes, scaled(heads, rows // num_heads))
        if self.joined is not None:
            joined = f"{path}.{self.joined}.weight"
            keys = (shapes[joined][0] - values) // 2
            parts = tuple(scaled(heads, each // num_heads) for each in (keys, keys, values))
            found[joined] = shard_parts(joined, shapes[joined], 0, parts)
        return found


@dataclass(frozen=True)
class RegionNames:
    """The names of a module whose first linears are sharded by output and last by input features.

    Attributes:
        name: of the module in the layer; or in the model, ``*`` standing for any number.
        inputs: name in the module -> how many equal tensors its weight joins: 3 for a fused query,
            key and value. Each of them is sharded.
        outputs: names in the module.
        heads: attribute of the module, the number of its heads, which are sharded whole; after
            sharding it is that of the rank. None where features may be split anywhere.
        widths: further attributes of the module that are those of the rank after sharding.
        forward: takes the place of the module's forward; None where that one does.
        entry: a module in this one whose output is what ``inputs`` read and is copied to the ranks;
            None where that is the input of the module itself.
        merges: whether the module returns something linear in ``outputs``, which have no bias: its
            output is then summed over the ranks once, in place of theirs.
        in_parts: names in the module of layers in front of ``inputs``, as linears to a low rank and
            norms. All ranks hold them whole, and use what they return for their own heads.
    """

    name: str
    inputs: Mapping[str, int]
    outputs: tuple[str, ...]
    heads: str | None = None
    widths: tuple[str, ...] = ()
    forward: Callable[..., Any] | None = None
    entry: str | None = None
    merges: bool = False
    in_parts: tuple[str, ...] = ()

    def is_at(self, path: str, names: Collection[str]) -> bool:
        """Return whether the module at ``path`` has all linears, by the parameters' names."""
        return all(f"{path}.{name}.weight" in names for name in (*self.inputs, *self.outputs))

    def modules(self) -> tuple[str, ...]:
        """Return the names, in the sublayer, of all modules that are replaced or given a hook."""
        entry = [self.entry] if self.entry else []
        return (*self.inputs, *self.outputs, *self.in_parts, *entry)

    def attributes(self) -> tuple[str, ...]:
        """Return the names of the sublayer's attributes that are read or changed."""
        return self.widths if self.heads is None else (self.heads, *self.widths)

    def layouts(self, path: str, shapes: Shapes, tp_size: int, num_heads: int | None) -> Layouts:
        """Return the layouts of the sharded parameters of the module at ``path``.

        Raises:
            ValueError: a rank would hold a part of a head, or a bias would be summed.
        """
        if num_heads is not None and num_heads % tp_size:
            raise ValueError(
                f"{path} has {num_heads} heads, which tp={tp_size} does not divide; choose a tp "
                "that does"
            )
        found: Layouts = {}
        for name, joined in self.inputs.items():
            weight = f"{path}.{name}.weight"
            rows = shapes[weight][0] // joined
            unit = rows // (num_heads or rows or 1) or 1  # rows may be none
            found[weight] = shard_joined(weight, shapes[weight], 0, [rows] * joined, tp_size, unit)
            found |= _bias_beside(found[weight], shapes)
        for name in self.outputs:
            if self.merges and f"{path}.{name}.bias" in shapes:
                raise ValueError(f"{path}.{name} has a bias, which each of the ranks would add")
            columns = shapes[f"{path}.{name}.weight"][1]
            unit = columns // (num_heads or columns or 1) or 1
            ranges = split(columns, tp_size, unit)
            found |= _shard_columns(f"{path}.{name}", shapes, ranges)
        return found


def shard_rows(path: str, shapes: Shapes, ranges: tuple[Range, ...]) -> Layouts:
    """Return layouts of a linear or table whose rows are sharded by ranges, bias included."""
    weight = shard_along(f"{path}.weight", shapes[f"{path}.weight"], 0, ranges)
    return {weight.name: weight, **_bias_beside(weight, shapes)}


def _shard_columns(path: str, shapes: Shapes, ranges: tuple[Range, ...]) -> Layouts:
    """Return layouts of a linear whose columns are sharded by ranges; its bias is replicated."""
    weight = shard_along(f"{path}.weight", shapes[f"{path}.weight"], 1, ranges)
    return {weight.name: weight}


def _bias_beside(weight: TensorLayout, shapes: Shapes) -> Layouts:
    """Return the layout of the bias beside a sharded weight, or nothing without a bias."""
    name = weight.name.removesuffix("weight") + "bias"
    return {name: shard_like(weight, name, shapes[name])} if name in shapes else {}
