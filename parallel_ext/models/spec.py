"""The specs of architectures, and the layouts of parameters that follow from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from types import UnionType
from typing import Any, get_origin, get_type_hints

from torch import nn

from parallel_ext.models.mixture_names import MixtureNames
from parallel_ext.models.sublayers import (
    AttentionNames,
    DeltaNetNames,
    Layouts,
    RegionNames,
    Shapes,
)
from parallel_ext.sharding.layout import (
    ModelLayout,
    Part,
    TensorLayout,
    shard_along,
    split,
    split_heads,
)

Sublayer = AttentionNames | DeltaNetNames | RegionNames | MixtureNames
"""A part of a layer that is sharded as one: an attention, an MLP, a mixture of experts."""

_OF_LOGITS = ("logits_factor", "logits_divisor", "logits_softcap")


@dataclass(frozen=True)
class DividedTower:
    """The names of a tower for images of which each rank computes its own positions.

    It holds the weights whole. Only in the attention does a position see others.

    Attributes:
        path: from the model; it returns the hidden states of all positions, [N, positions, width].
        blocks: name in the tower of the list of its layers.
        attention: name in a layer; it reads its attribute ``positions``, an
            :class:`parallel_ext.nn.own_positions.OwnPositions`.
        learned: name in the tower of the parameter [1, positions, width] of learned positions.
        forward: takes the place of the attention's forward; None where that one does.
    """

    path: str
    blocks: str
    attention: str
    learned: str
    forward: Callable[..., Any] | None = None


@dataclass(frozen=True)
class ModelSpec:
    """The module names of one architecture.

    Attributes:
        model_type: ``config.model_type`` of the models that it describes.
        embedding, head: paths from the model; sharded by vocabulary. A model that classifies, or a
            decoder alone, has no such head: :meth:`without_head`, :meth:`of_decoder`.
        layers: path of the list of decoder layers.
        attention: the first sublayer of each decoder layer; None where ``regions`` say it.
        delta_net: what stands in its place in some layers; None where nothing does.
        mlp, mixture: what follows the attention, in each layer one of the two; None where no layer
            has it.
        regions: further sublayers, by their paths from the model. Of several for one module that
            is meant whose linears are all there.
        shared: paths of modules whose output is read by several regions, as the image that all
            layers look at; it is copied to the ranks there.
        towers: paths of further lists of layers, which data parallelism shards one by one.
        divided_tower: one of several tp ranks, each of which computes a part of it; None where
            there is none.
        skips: path of a method of the model that may skip some of its modules: called with whether
            a batch needs each of them, it returns whether they run. Equal on all dp ranks.
        images: name of a method of the model, called with a number of rows and of tokens: it
            returns what a batch with an image in each row has beside ids and labels.
        unadapted: beginning of a path -> why a module there takes no adapter, for errors.
        changes_logits: whether the class changes what the output head returns, as into fp32; the
            loss is then not fused. Not for what the next three say.
        logits_factor, logits_divisor, logits_softcap: attributes of the configuration by which the
            class multiplies or divides the logits, and at which it then caps them; the loss does
            the same where it is fused.
        scaled_embedding: class of an embedding that multiplies the rows that it looks up by its
            buffer ``embed_scale``, whose value is ``scalar_embed_scale`` as well; None where the
            embedding is a plain ``nn.Embedding``.
        layer_embedding: path of an embedding of the same class for what the layers read beside
            hidden states, sharded by its rows. A model may lack it, by its configuration.
        in_image_files: how names begin in files of a model with images, of which transformers'
            causal class loads the text model alone -> how they begin there; empty where it loads
            none.
        beside_text: patterns of the names of what else is in such files, but for those that the
            class ignores itself.
        since: the first release of transformers whose classes are meant, as "5.21"; None where any
            release has them that is served.
    """

    model_type: str
    embedding: str
    head: str | None
    layers: str
    attention: AttentionNames | None = None
    delta_net: DeltaNetNames | None = None
    mlp: RegionNames | None = None
    mixture: MixtureNames | None = None
    regions: tuple[RegionNames, ...] = ()
    shared: tuple[str, ...] = ()
    towers: tuple[str, ...] = ()
    divided_tower: DividedTower | None = None
    skips: str | None = None
    images: str | None = None
    unadapted: Mapping[str, str] = field(default_factory=dict)
    changes_logits: bool = False
    logits_factor: str | None = None
    logits_divisor: str | None = None
    logits_softcap: str | None = None
    scaled_embedding: str | None = None
    layer_embedding: str | None = None
    in_image_files: Mapping[str, str] = field(default_factory=dict)
    beside_text: tuple[str, ...] = ()
    since: str | None = None

    def check(self) -> None:
        """Raise unless the fields have values of their types, and something is sharded.

        Raises:
            TypeError: a field has a value of another type.
            ValueError: a path is empty, or no sublayer says what is sharded.
        """
        # A head is None only in a spec that another one was made into.
        for name, hint in {**get_type_hints(ModelSpec), "head": str}.items():
            value, outer = getattr(self, name), get_origin(hint)  # of ``tuple[str, ...]`` the tuple
            kind = hint if outer in (None, UnionType) else outer
            if not isinstance(value, kind):
                raise TypeError(f"ModelSpec: {name} is {value!r}, a {type(value).__name__}")
            if kind is str and not value:
                raise ValueError(f"ModelSpec: {name} is empty")
        for region in self.regions:
            if not isinstance(region, RegionNames):
                raise TypeError(f"ModelSpec: regions holds {region!r}, which is no RegionNames")
        if not (self.attention or self.mlp or self.mixture or self.regions):
            raise ValueError(
                f"ModelSpec: the spec of {self.model_type!r} has no attention, mlp, mixture or "
                "regions, so nothing would be sharded but the vocabulary"
            )

    @property
    def of_logits(self) -> tuple[str, ...]:
        """Return the attributes of the configuration that say what the class does to the logits."""
        return tuple(filter(None, (getattr(self, name) for name in _OF_LOGITS)))

    @property
    def ends(self) -> tuple[str, ...]:
        """Return the paths of what is sharded by vocabulary: embedding and output head."""
        return (self.embedding,) if self.head is None else (self.embedding, self.head)

    @property
    def decoder(self) -> str:
        """Return the path of the module with the decoder layers; empty for the model itself."""
        return self.layers.rpartition(".")[0]

    @property
    def in_decoder(self) -> str:
        """Return how the paths of what is in the decoder begin."""
        return f"{self.decoder}." if self.decoder else ""

    def from_image_files(self, name: str) -> str:
        """Return the name in the text model of a tensor in files of a model with images."""
        for in_files, here in self.in_image_files.items():
            if name.startswith(in_files):
                return here + name.removeprefix(in_files)
        return name

    @property
    def vocabulary(self) -> list[str]:
        """Return the names of all tensors with a row for each id, that of the embedding first."""
        return [f"{path}.{kind}" for path in self.ends for kind in ("weight", "bias")]

    def without_head(self) -> ModelSpec:
        """Return the spec of the architecture's classes that put classes of their own on it."""
        return replace(self, head=None, **dict.fromkeys(_OF_LOGITS))

    def of_decoder(self) -> ModelSpec:
        """Return the spec of the architecture's decoder alone, which returns hidden states."""

        def inner(path: str) -> str:
            return path.removeprefix(self.in_decoder)

        tower = self.divided_tower
        return replace(
            self.without_head(),
            embedding=inner(self.embedding),
            layer_embedding=self.layer_embedding and inner(self.layer_embedding),
            layers=inner(self.layers),
            regions=tuple(replace(region, name=inner(region.name)) for region in self.regions),
            shared=tuple(map(inner, self.shared)),
            towers=tuple(map(inner, self.towers)),
            divided_tower=tower and replace(tower, path=inner(tower.path)),
            skips=self.skips and inner(self.skips),
            images=None,  # a method of the class with a head
            unadapted={inner(path): why for path, why in self.unadapted.items()},
        )

    def sublayers(self, names: Collection[str]) -> dict[str, Sublayer]:
        """Map the path of every sublayer to the names of its modules, by the parameters' names."""
        found: dict[str, Sublayer] = {}
        for layer in _numbered(f"{self.layers}.*", names):
            delta_net = self.delta_net and f"{layer}.{self.delta_net.name}"
            if delta_net and f"{delta_net}.{self.delta_net.output}.weight" in names:
                found[delta_net] = self.delta_net
            elif self.attention is not None:
                path = f"{layer}.{self.attention.name}"
                found[path] = self.attention.in_model(path, names)
            sublayer = self.mlp
            if self.mixture is not None:
                experts = f"{_in(layer, self.mixture.name)}.{self.mixture.experts}"
                if self.mlp is None or f"{experts}.{self.mixture.down}" in names:
                    sublayer = self.mixture
            if sublayer is not None:
                path = _in(layer, sublayer.name)
                found[path] = sublayer
            if isinstance(sublayer, MixtureNames) and (shared := sublayer.shared) is not None:
                path = f"{path}.{shared.name}"
                if any(name.startswith(f"{path}.") for name in names):
                    found[path] = shared
        for region in self.regions:
            for path in _numbered(region.name, names):
                if path not in found or region.is_at(path, names):
                    found[path] = region
        return found

    def mixtures(self, names: Collection[str]) -> dict[str, MixtureNames]:
        """Map the path of every mixture of experts to the names of its modules."""
        found = self.sublayers(names).items()
        return {path: each for path, each in found if isinstance(each, MixtureNames)}

    def modules(self, names: Collection[str]) -> tuple[str, ...]:
        """Return the paths of all modules that are replaced or given a hook."""
        in_sublayers = (
            path
            for root, sublayer in self.sublayers(names).items()
            for path in (root, *(f"{root}.{name}" for name in sublayer.modules()))
        )
        return (*self.embeddings(names), *self.ends[1:], *self.shared, *in_sublayers)

    def replaced(self, names: Collection[str]) -> dict[str, str | None]:
        """Map the path of each module that is replaced to its class, None for torch's own.

        Of a router the forward is replaced, and of some mixtures. All else of :meth:`modules`
        stays, with a hook.
        """
        ends = dict.fromkeys(self.embeddings(names), self.scaled_embedding)
        return (
            ends
            | dict.fromkeys(self.ends[1:])
            | {
                _in(root, name): cls
                for root, sublayer in self.sublayers(names).items()
                for name, cls in _replaced(sublayer).items()
            }
        )

    def embeddings(self, names: Collection[str]) -> tuple[str, ...]:
        """Return the paths of the embeddings by ids in a model with such parameters."""
        return tuple(filter(None, (self.embedding, self.layer_embedding_in(names))))

    def layer_embedding_in(self, names: Collection[str]) -> str | None:
        """Return the path of the embedding for the layers; None where a model has none."""
        return self.layer_embedding if f"{self.layer_embedding}.weight" in names else None


def _replaced(sublayer: Sublayer) -> dict[str, str | None]:
    """Map the name of each module of a sublayer that is replaced to its class."""
    if isinstance(sublayer, MixtureNames):
        block = {"": sublayer.block_class} if sublayer.block_class else {}
        parts = {sublayer.experts: sublayer.experts_class, sublayer.router: sublayer.router_class}
        return parts | block
    if isinstance(sublayer, AttentionNames):
        norms = dict.fromkeys(sublayer.full_norms, sublayer.norm_class)
        return dict.fromkeys((*sublayer.inputs, sublayer.output)) | norms
    if isinstance(sublayer, DeltaNetNames):
        return dict.fromkeys((*sublayer.linears, sublayer.output))
    return dict.fromkeys((*sublayer.inputs, *sublayer.outputs))


def _in(outer: str, name: str) -> str:
    """Return the path of a module in another one, which it is where it has no name."""
    return f"{outer}.{name}" if name else outer


def _numbered(path: str, names: Collection[str]) -> list[str]:
    """Return the paths for which ``path`` stands in a model with parameters of these ``names``.

    A ``*`` stands for each number that follows what is before it, whether or not there is then what
    is behind it.
    """
    before, star, behind = path.partition("*")
    if not star:
        return [path]
    number = re.compile(re.escape(before) + r"(\d+)\.")
    numbers = {int(match[1]) for name in names if (match := number.match(name))}
    return [f"{before}{each}{behind}" for each in sorted(numbers)]


@dataclass(frozen=True)
class HeadSizes:
    """The heads of one attention.

    Attributes:
        query, key_value: how many there are.
        dim: features of each.
    """

    query: int
    key_value: int
    dim: int

    @classmethod
    def of(cls, attention: nn.Module, num_heads: int) -> HeadSizes:
        """Return the heads of a plain attention, of which ``num_heads`` are query heads."""
        return cls(num_heads, num_heads // attention.num_key_value_groups, attention.head_dim)


@dataclass(frozen=True)
class ModelSizes:
    """The numbers of a model that decide how it is sharded.

    Attributes:
        vocab_size: rows of embedding and head.
        attentions: path of an attention -> its heads.
        heads_of: path of a region that has heads -> their number.
    """

    vocab_size: int
    attentions: Mapping[str, HeadSizes] = field(default_factory=dict)
    heads_of: Mapping[str, int] = field(default_factory=dict)


def plan(
    spec: ModelSpec,
    shapes: Shapes,
    tied: Mapping[str, str],
    sizes: ModelSizes,
    tp_size: int,
    ep_size: int = 1,
    vocab_multiple_of: int = 1,
) -> ModelLayout:
    """Compute the layout of every parameter of a model.

    A pure function of its arguments, so that every rank computes the same.

    Args:
        shapes: full shape of every parameter and persistent buffer by HuggingFace name; tied
            aliases may be left out.
        tied: alias -> the name of the tensor that it shares.
        vocab_multiple_of: boundaries between vocabulary shards are multiples of this.

    Returns:
        Layouts of all names in ``shapes`` but the aliases; what no rule shards is replicated.

    Raises:
        ValueError: ``tp_size`` is larger than the attention heads can serve, or ``ep_size`` than
            the number of experts; or a norm is not one of single heads.
    """
    rows = split(sizes.vocab_size, tp_size, vocab_multiple_of)
    found: Layouts = {}
    parts: dict[str, tuple[Part, ...]] = {}
    for path in spec.ends:
        for name in (f"{path}.weight", f"{path}.bias"):  # a tied head may have a bias of its own
            if name in shapes:
                found[name] = shard_along(name, shapes[name], 0, rows)
    if path := spec.layer_embedding_in(shapes):
        name = f"{path}.weight"
        found[name] = shard_along(name, shapes[name], 0, split(shapes[name][0], tp_size))
    for path, sublayer in spec.sublayers(shapes).items():
        if isinstance(sublayer, AttentionNames):
            of_all = sizes.attentions[path]
            heads = split_heads(of_all.query, of_all.key_value, tp_size)
            found |= sublayer.layouts(path, shapes, heads, of_all.dim)
        elif isinstance(sublayer, RegionNames):
            found |= sublayer.layouts(path, shapes, tp_size, sizes.heads_of.get(path))
        elif isinstance(sublayer, DeltaNetNames):
            found |= sublayer.layouts(path, shapes, tp_size, sizes.heads_of[path])
        else:
            found |= sublayer.layouts(path, shapes, ep_size)
            parts |= sublayer.parts(path, shapes)
    return with_replicated(found, shapes, tied, parts)


def with_replicated(
    found: Layouts, shapes: Shapes, tied: Mapping[str, str], parts: Mapping[str, tuple[Part, ...]]
) -> ModelLayout:
    """Return the layout of a model, in which every tensor is replicated that was not ``found``."""
    tensors = {
        name: found.get(name, TensorLayout(name, shape))
        for name, shape in shapes.items()
        if name not in tied
    }
    return ModelLayout(tensors, tied, parts)
