"""The names of a mixture of experts, and how it is sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallel_ext.models.sublayers import Layouts, RegionNames, Shapes
from parallel_ext.nn.routing import Route
from parallel_ext.sharding.layout import Part, shard_along, split


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
