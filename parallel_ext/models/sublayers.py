"""The sublayers of models: the names of their modules, and how they are sharded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from parallel_ext.nn.routing import Route
from parallel_ext.sharding.layout import (
    AttentionHeads,
    Part,
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


@dataclass(frozen=True)
class MixtureNames:
    """The names of a mixture of experts in a decoder layer, in memory and in files.

    Attributes:
        name: of the sublayer in the layer; empty where its modules are the layer's own.
        router, router_class: in the sublayer; replicated.
        route: what the class computes: logits, weights and expert ids.
        block_class, forward: of the sublayer, and what takes the place of its forward; None where
            that one stays.
        experts, experts_class: in the sublayer; its two parameters are sharded over the ep ranks.
        gate_up, down: parameters of the experts, [E, 2 I, H] and [E, H, I].
        biases: parameters of the experts, [E, 2 I] and [E, H], the biases of these two, which then
            lie transposed, as GPT-OSS' do. Empty where there are none.
        weighs_inputs: whether experts are given a token times its weight, and their two parameters
            lie transposed, as Llama 4's.
        num_experts: attribute of the configuration.
        in_files: ``name`` in files.
        gate_up_in_files, down_in_files: of the tensors of one expert in files, ``experts.3.w1``;
            the first two lie one above the other in ``gate_up``. None where files have the
            parameters as they are.
        transposed_in_files: whether ``gate_up`` and ``down`` may lie transposed in files, as in
            those that Qwen3-VL was published in; transformers writes them as they are.
        others_in_files: further tensors of the sublayer that have another name in files.
        jitter: attribute of the configuration, the noise of the router; None where it has none.
        block_jitter: attribute of the module, the same.
        balances: whether the class adds a load balancing loss where ``output_router_logits`` asks
            for it.
        fixed_bits: whether ``route`` computes with ops that have the same bits on any layout, and
            those that ``choose`` brings; px.Invariant serves no other.
        shared: in the sublayer, an expert of all tokens, sharded over the tp ranks as an MLP. None
            where there is none. A model may lack it, by its configuration.
        shared_gate: in the sublayer, the linear whose output it is multiplied by; replicated.
    """

    name: str
    router: str
    router_class: str
    route: Route
    experts: str
    experts_class: str
    gate_up: str
    down: str
    num_experts: str
    in_files: str
    gate_up_in_files: tuple[str, str] | None
    down_in_files: str | None
    biases: tuple[str, ...] = ()
    weighs_inputs: bool = False
    block_class: str | None = None
    forward: Callable[..., Any] | None = None
    jitter: str | None = None
    block_jitter: str | None = None
    balances: bool = True
    fixed_bits: bool = True
    transposed_in_files: bool = False
    others_in_files: Mapping[str, str] = field(default_factory=dict)
    shared: RegionNames | None = None
    shared_gate: str | None = None

    def jitter_of(self, config: Any) -> float:
        """Return the noise that ``config`` asks of the router in training, 0 if there is none."""
        return 0.0 if self.jitter is None else getattr(config, self.jitter)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the names of the parameters of the experts."""
        return (self.gate_up, self.down, *self.biases)

    def modules(self) -> tuple[str, ...]:
        """Return the names, in the sublayer, of all modules that are replaced or given a hook."""
        return (self.router, self.experts)

    def attributes(self) -> tuple[str, ...]:
        """Return the names of the sublayer's attributes that are read or changed."""
        return () if self.block_jitter is None else (self.block_jitter,)

    def layouts(self, path: str, shapes: Shapes, ep_size: int) -> Layouts:
        """Return the layouts of the experts of the sublayer at ``path``.

        Raises:
            ValueError: a rank would hold no expert.
        """
        found: Layouts = {}
        for attribute in self.parameters:
            name = f"{path}.{self.experts}.{attribute}"
            num_experts = shapes[name][0]
            if ep_size > num_experts:
                raise ValueError(
                    f"ep={ep_size} is more than the {num_experts} experts of {name}: a rank would "
                    "hold none"
                )
            found[name] = shard_along(name, shapes[name], 0, split(num_experts, ep_size))
        return found

    def parts(self, path: str, shapes: Shapes) -> dict[str, tuple[Part, ...]]:
        """Map each parameter of the sublayer at ``path`` to the tensors of files that it joins."""
        files = f"{path.removesuffix(self.name)}{self.in_files}"
        weight = f"{self.router}.weight"  # which a router may have in a module of its own
        router = {weight: weight} if f"{path}.{weight}" in shapes else {}
        found = {}
        for name, in_files in {**router, **self.others_in_files}.items():
            source = f"{path}.{name}"
            box = tuple((0, size) for size in shapes[source])
            found[source] = (Part(f"{files}.{in_files}", source, box, index=False),)
        if self.gate_up_in_files is None:
            return found
        for attribute, names in (
            (self.gate_up, self.gate_up_in_files),
            (self.down, (self.down_in_files,)),
        ):
            source = f"{path}.{self.experts}.{attribute}"
            num_experts, rows, columns = shapes[source]
            found[source] = tuple(
                Part(
                    f"{files}.experts.{expert}.{name}.weight",
                    source,
                    ((expert, expert + 1), piece, (0, columns)),
                    index=True,
                )
                for expert in range(num_experts)
                for name, piece in zip(names, split(rows, len(names)), strict=True)
            )
        return found


Sublayer = AttentionNames | DeltaNetNames | RegionNames | MixtureNames
"""A part of a layer that is sharded as one: an attention, an MLP, a mixture of experts."""


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
