"""Checks before a model is changed: of its names, its state, and that the ranks agree."""

from __future__ import annotations

import re

import transformers
from torch import nn
from transformers import modeling_layers

from parallel_ext.distributed.mesh import Mesh
from parallel_ext.distributed.require_equal import require_equal
from parallel_ext.models import OWN, PUBLISHED, SPECS, own_model_type, why_unserved
from parallel_ext.models._transformers_private import is_input_hook, is_sharded_by_transformers
from parallel_ext.models.spec import ModelSpec
from parallel_ext.nn.sharded_module import does_more
from parallel_ext.nn.stale_parameters import refuse_gradient_hooks
from parallel_ext.nn.vocab import refuse_options
from parallel_ext.parallel.configuration import served, type_of_text
from parallel_ext.parallel.derived_class import has_other_loss
from parallel_ext.parallel.plan import Plan
from parallel_ext.parallel.state import is_parallel
from parallel_ext.sharding._torch_private import is_compiled
from parallel_ext.sharding.digests import content_digest
from parallel_ext.sharding.named_shards import persistent_buffers

_MODEL_ATTRIBUTES = (
    "save_pretrained",
    "resize_token_embeddings",
    "_get_resized_embeddings",
    "_get_resized_lm_head",
    "tie_weights",
)
CLASSIFIERS = (
    modeling_layers.GenericForSequenceClassification,
    modeling_layers.GenericForTokenClassification,
)
_CONFIG_ATTRIBUTES = ("vocab_size", "return_dict")
_BALANCE_MODEL_ATTRIBUTES = ("router_aux_loss_coef", "num_experts", "num_experts_per_tok")


def spec_for(model: nn.Module) -> ModelSpec:
    """Return the spec of a model's class: ours, HuggingFace's, or one that others publish.

    Raises:
        ValueError: there is no spec for it, or transformers is too old for it.
    """
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    classes = {cls.__name__: cls for cls in reversed(type(model).__mro__)}
    own = own_model_type({"model_type": model_type, "architectures": [*classes]})
    cls = None if own is None else classes.get(OWN[own][0])
    if cls is not None and not cls.__module__.startswith("parallel_ext."):
        return PUBLISHED[own]
    if model_type not in SPECS:
        why = why_unserved(model_type, type_of_text(config))
        raise ValueError(
            f"parallelize: no spec for model_type {model_type!r} ({type(model).__name__}); "
            f"supported are {', '.join(served())}{why}"
        )
    spec = SPECS[model_type]
    if is_too_old_for(spec):
        raise ValueError(
            f"parallelize: {model_type!r} needs transformers {spec.since} or newer; this is "
            f"{transformers.__version__}"
        )
    if is_decoder(model):
        return spec.of_decoder()
    classifies = isinstance(model, CLASSIFIERS) and spec.mixture is None
    return spec.without_head() if classifies else spec


def transformers_version() -> tuple[int, ...]:
    """Return the first two numbers of the release of transformers that is installed."""
    return tuple(int(part) for part in transformers.__version__.split(".")[:2])


def is_too_old_for(spec: ModelSpec) -> bool:
    """Return whether the transformers that is installed has other classes than ``spec`` means."""
    return spec.since is not None and transformers_version() < tuple(
        int(part) for part in spec.since.split(".")
    )


def is_decoder(model: nn.Module) -> bool:
    """Return whether a model is the decoder of a served architecture alone, without a head.

    Such as a ``LlamaModel``, which ``AutoModel`` makes.
    """
    spec = SPECS.get(getattr(getattr(model, "config", None), "model_type", None))
    cls = transformers.MODEL_MAPPING.get(type(model.config), ()) if spec else ()
    return isinstance(model, cls)


def decoder_in(model: nn.Module) -> transformers.PreTrainedModel | None:
    """Return the decoder of text in a model of images or the like; None of one without, or others.

    It is what becomes parallel of such a model.
    """
    kind = transformers.PreTrainedModel
    if not isinstance(model, kind) or model.config.get_text_config() is model.config:
        return None
    models = (each for each in model.modules() if isinstance(each, kind))
    return next((each for each in models if is_decoder(each)), None)


def check_plain(model: nn.Module, spec: ModelSpec) -> None:
    """Raise unless the modules to replace are plain, with nothing that would be lost."""
    names = dict(model.named_parameters())
    replaced = spec.replaced(names)
    for path in spec.modules(names):
        module = model.get_submodule(path)
        if path not in replaced and not isinstance(module, (nn.Linear, nn.Embedding)):
            continue  # an attention, its norms, an MLP, which stay
        expected = replaced.get(path)
        if expected is not None and type(module).__name__ != expected:
            raise ValueError(
                f"parallelize: {path} is a {type(module).__name__}, not HuggingFace's "
                f"{expected}, whose forward is known"
            )
        if expected is not None and type(module).forward.__module__ != type(module).__module__:
            raise ValueError(
                f"parallelize: the forward of {expected} was replaced, by "
                f"{type(module).forward.__qualname__}, which {path} would no longer run"
            )
        if expected is None and type(module) not in (nn.Linear, nn.Embedding):
            raise ValueError(
                f"parallelize: {path} is a {type(module).__name__}; only plain torch.nn modules "
                "can be sharded, whose forward is known"
            )
        _check_bare(path, module)
        if isinstance(module, nn.Embedding):
            refuse_options(module, f"parallelize: {path}")


def _check_bare(path: str, module: nn.Module) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        refuse_gradient_hooks("parallelize", f"{path}.{name}", parameter)
    if does_more(module, is_input_hook):  # that of checkpointing, which the embedding gets back
        raise ValueError(
            f"parallelize: {path} has hooks or a forward of its own, which its replacement "
            "would lose; add them after parallelize"
        )


def check_names(model: nn.Module, spec: ModelSpec) -> None:
    """Raise one error that lists every name that the spec needs and the model lacks."""
    cls = type(model).__name__
    if spec.head and not hasattr(model, spec.head) and not cls.endswith("ForCausalLM"):
        inner = next((path for path, each in model.named_modules() if is_decoder(each)), None)
        raise ValueError(
            f"parallelize: {cls} is not served: of {spec.model_type!r} the class with an output "
            "head is, ...ForCausalLM, and the decoder alone, ...Model, and of dense models those "
            "that classify sequences or tokens"
            + (f"; px.parallelize(model.{inner}, mesh) takes the decoder in it" if inner else "")
        )
    of_model, of_config = _MODEL_ATTRIBUTES, _CONFIG_ATTRIBUTES
    if spec.attention:
        of_config += ("num_attention_heads",)
    if spec.mixture:
        balances = spec.mixture.balances and spec.head is not None
        of_model += _BALANCE_MODEL_ATTRIBUTES if balances else ()
        of_config += ("output_router_logits",) if balances else ()
        of_config += (spec.mixture.num_experts,)
        of_config += (spec.mixture.jitter,) if spec.mixture.jitter else ()
    of_config += spec.of_logits
    missing = [f"{cls}.{n}" for n in of_model if not hasattr(model, n)]
    missing += [f"config.{n}" for n in of_config if not hasattr(model.config, n)]

    # Wrappers may answer for what they wrap, whose parameters have other names.
    modules = dict(model.named_modules(remove_duplicate=False))

    def find(path: str) -> nn.Module | None:
        if path not in modules:
            missing.append(path)
        return modules.get(path)

    names = dict(model.named_parameters())
    if spec.scaled_embedding is not None and (embedding := find(spec.embedding)) is not None:
        of_embedding = ("embed_scale", "scalar_embed_scale")
        missing += [f"{spec.embedding}.{n}" for n in of_embedding if not hasattr(embedding, n)]
    for path in (spec.layers, *spec.towers, *spec.modules(names)):
        find(path)
    if (divided := spec.divided_tower) is not None and (tower := find(divided.path)) is not None:
        if not hasattr(tower, divided.learned):
            missing.append(f"{divided.path}.{divided.learned}")
        for name, _ in getattr(tower, divided.blocks, nn.Module()).named_children():
            find(f"{divided.path}.{divided.blocks}.{name}.{divided.attention}")
    if spec.skips is not None and find(spec.skips.rpartition(".")[0]) is not None:
        owner, _, method = spec.skips.rpartition(".")
        if not hasattr(model.get_submodule(owner), method):
            missing.append(spec.skips)
    for path, sublayer in spec.sublayers(names).items():
        if path not in missing:
            owner = model.get_submodule(path)
            missing += [f"{path}.{n}" for n in sublayer.attributes() if not hasattr(owner, n)]
    if missing:
        raise ValueError(
            f"parallelize: {cls} of transformers {transformers.__version__} "
            f"lacks what the spec for {spec.model_type!r} names: {', '.join(missing)}"
        )


def check_unwrapped(model: nn.Module) -> None:
    """Raise if modules of the model are wrapped, which has renamed their parameters."""
    for path, module in model.named_modules():
        if is_compiled(module):
            what, instead = "was compiled by torch.compile", "compile the parallel model"
        elif hasattr(module, "base_layer"):
            what, instead = "has an adapter", "add adapters by peft.get_peft_model afterwards"
        else:
            continue
        raise ValueError(f"parallelize: {path or 'the model'} {what} before; {instead}")


def check_unsharded(model: nn.Module) -> None:
    """Raise if this package or transformers' own plan has sharded the model already."""
    if is_parallel(model):
        raise ValueError("parallelize: this model is parallel already")
    if is_sharded_by_transformers(model):
        raise ValueError(
            "parallelize: this model was already sharded by transformers' own plan (tp_plan or "
            "distributed_config); load it without one, or by px.from_pretrained"
        )


def check_servable(model: nn.Module) -> None:
    """Raise if the model carries something that the parallel one would override or change."""
    foreign = [n for n, p in model.named_parameters() if type(p) is not nn.Parameter]
    if foreign:
        raise ValueError(
            f"parallelize: {foreign[0]} is a {type(model.get_parameter(foreign[0])).__name__}, so "
            "the model is already sharded or quantized by something else; pass a plain one"
        )
    for path, module in model.named_modules():
        if "Rotary" in type(module).__name__ and next(module.parameters(), None) is not None:
            raise ValueError(
                f"parallelize: {path} has parameters, whose gradient a tp rank would have of "
                "its own heads alone; make them buffers"
            )
    causal = not is_decoder(model) and not isinstance(model, CLASSIFIERS)
    replaced = "loss_function" in vars(model) or "_loss_function" in vars(model)
    if replaced or (causal and has_other_loss(model)):
        where = "on this instance" if replaced else f"by {type(model).__name__} or its loss_type"
        raise ValueError(
            f"parallelize: loss_function was replaced {where}, which the parallel loss would "
            "override; remove it, or compute your own loss from the logits"
        )
    if "forward" in model.__dict__:
        raise ValueError(
            "parallelize: forward was replaced on this instance, as torch.compile, accelerate's "
            "prepare and Liger's fused loss do; do that to the parallel model (under px.patch once "
            "it has an optimizer), and pass Liger fused_linear_cross_entropy=False"
        )


def check_dropout(model: nn.Module, mesh: Mesh, allow_different: bool, agreement: bool) -> None:
    """Raise if tp ranks would drop other numbers of what all of them have, or may do so unseen."""
    if mesh.tp_size == 1:
        return
    dropout, others = getattr(model.config, "attention_dropout", 0.0), dropouts_of(model)
    if dropout and others:
        raise ValueError(
            f"parallelize: config.attention_dropout is {dropout}, and the dropout of "
            f"{next(iter(others))} is set as well; under tp={mesh.tp_size} the masks of a rank's "
            "own heads would advance its random state, from which all tp ranks must draw the same "
            "masks elsewhere; set one of the two to 0"
        )
    if dropout and not allow_different:
        raise ValueError(
            f"parallelize: config.attention_dropout is {dropout}; under tp={mesh.tp_size} its "
            "masks would differ from those of a single process; set it to 0, or pass "
            "allow_different_dropout=True"
        )
    for place, probability in others.items() if not agreement else ():
        raise ValueError(
            f"parallelize: the dropout of {place} is {probability}; the tp ranks must draw the "
            "same masks, which agreement=False does not check"
        )


def dropouts_of(model: nn.Module) -> dict[str, float]:
    """Map what drops numbers of a plain model in training to its probability.

    Modules by their paths, wherever they are, then attributes of the configuration, which functions
    drop by: without that of attention, whose masks belong to heads, and that of classifiers, who
    make a module of it.
    """
    modules = {
        path: module.p
        for path, module in model.named_modules()
        if type(module) is nn.Dropout and module.p > 0
    }
    others = ("attention_dropout", "classifier_dropout")
    attributes = {
        f"config.{name}": value
        for name, value in model.config.to_dict().items()
        if name.endswith(("dropout", "pdrop")) and name not in others
        if isinstance(value, float) and value > 0
    }
    return modules | attributes


def check_mixture(model: nn.Module, spec: ModelSpec, mesh: Mesh, agreement: bool) -> None:
    """Raise unless mesh and options fit the model's mixture of experts, or its lack of one."""
    mixture, paths = spec.mixture, spec.mixtures(dict(model.named_parameters()))
    if not paths:
        if mesh.ep_size > 1:
            raise ValueError(
                f"parallelize: the mesh has ep={mesh.ep_size}, but no layer of this "
                f"{spec.model_type!r} has experts; use ep=1"
            )
        return
    num_experts = getattr(model.config, mixture.num_experts)
    for path in (f"{path}.{mixture.experts}" for path in paths):
        for attribute in (mixture.gate_up, mixture.down):
            shape = tuple(getattr(model.get_submodule(path), attribute).shape)
            if len(shape) != 3 or shape[0] != num_experts:
                raise ValueError(
                    f"parallelize: {path}.{attribute} has the shape {shape}, but "
                    f"config.{mixture.num_experts} is {num_experts}; is it sharded already?"
                )
    noise = mixture.jitter_of(model.config)
    jitters = noise > 0 and mesh.tp_size > 1
    if jitters and getattr(model.config, "attention_dropout", 0.0):
        raise ValueError(
            f"parallelize: config.{mixture.jitter} and attention_dropout are both set; under "
            f"tp={mesh.tp_size} the dropout of a rank's own heads would advance its random state, "
            "from which all tp ranks must draw the same noise"
        )
    if jitters and not agreement:
        raise ValueError(
            f"parallelize: config.{mixture.jitter} is {noise}; the tp ranks must draw the same "
            "noise, which agreement=False does not check"
        )


def check_equal(model: nn.Module, plan: Plan) -> None:
    """Raise unless all ranks are to shard the same model: equal options, spec and weights."""
    mesh, layout = plan.mesh, plan.layout
    own = {
        "options": repr(plan.options),
        "spec": re.sub(r" at 0x\w+", "", repr(plan.spec)),  # of a function, its address
        "tied": repr(sorted(layout.tied.items())),
    }
    for name, parameter in model.named_parameters():
        digest = "meta" if parameter.is_meta else content_digest(parameter)
        own[name] = (
            f"of shape {layout[name].shape}, {parameter.dtype}, "
            f"requires_grad={parameter.requires_grad}, digest {digest}"
        )
    for name, buffer in persistent_buffers(model):
        digest = "meta" if buffer.is_meta else content_digest(buffer)
        own[name] = f"of shape {tuple(buffer.shape)}, {buffer.dtype}, digest {digest}"
    advice = "load the same weights, or seed equally, on every rank"
    require_equal(mesh.control, "parallelize", own, advice=advice)
