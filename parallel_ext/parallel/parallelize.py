"""``parallelize``: walks a model by its spec, replaces modules, attaches the run-time methods."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any, Literal

import transformers
from torch import nn

from parallel_ext.distributed.errors import warn_user
from parallel_ext.distributed.mesh import Mesh, given_or_last
from parallel_ext.models._transformers_private import is_input_hook, let_keys_size_static_caches
from parallel_ext.nn.hook_numbers import numbered_by_module
from parallel_ext.parallel import methods
from parallel_ext.parallel.beside import tell_labels
from parallel_ext.parallel.check_sequence import check_sequence_parallel
from parallel_ext.parallel.entering import enter_and_leave
from parallel_ext.parallel.extending import run_extensions
from parallel_ext.parallel.forward import forward
from parallel_ext.parallel.forward_around import refuse_tied_to_replaced, stand_for_class
from parallel_ext.parallel.head_beside import (
    check_equal_heads,
    mark_around,
    models_around,
    plain_head_of,
    shard_head,
)
from parallel_ext.parallel.holders import heads_tied_to, tie_again
from parallel_ext.parallel.invariant import BlockReplacer, check_invariant
from parallel_ext.parallel.plan import Invariant, Options, Plan, layout_of, with_groups
from parallel_ext.parallel.replace import Replacer
from parallel_ext.parallel.resize import resize_token_embeddings
from parallel_ext.parallel.sequence import keep_own_tokens
from parallel_ext.parallel.state import STATE_NAME, ParallelState, Remembered, check_state_dict
from parallel_ext.parallel.validate import (
    check_dropout,
    check_equal,
    check_mixture,
    check_names,
    check_plain,
    check_servable,
    check_unsharded,
    check_unwrapped,
    decoder_in,
    dropouts_of,
    spec_for,
)
from parallel_ext.parallel.watch_forward import watch_dropout, watch_forward
from parallel_ext.sharding._torch_private import remove_output_hooks

_OF_WHOLE_MODELS = ("save_pretrained", "push_to_hub", "num_parameters", "resize_token_embeddings")


def parallelize(
    model: transformers.PreTrainedModel,
    mesh: Mesh | None = None,
    *,
    vocab_multiple_of: int = 1,
    training_logits: bool = False,
    fused_loss: bool | Literal["auto"] = "auto",
    agreement: bool = True,
    allow_different_dropout: bool = False,
    invariant: Invariant | None = None,
    sequence_parallel: bool = False,
) -> transformers.PreTrainedModel:
    """Shard a HuggingFace model that every rank holds in memory over the ranks, in place.

    Every rank calls it with the same model. Afterwards each rank holds its heads, its part of each
    MLP or its experts, and its rows of the vocabulary; norms and routers are replicated. Names,
    ``config`` and the results of ``forward``, ``generate`` and ``save_pretrained`` stay those of
    the whole model.

    Args:
        model: a model whose ``config.model_type`` has a spec, one of the package's or
            one that :func:`parallel_ext.register` was given, with equal weights on all ranks. Of a
            model of images, as LLaVA, the decoder of text and the output head are sharded; all else
            stays whole on every rank. Modules are replaced, so optimizers are built afterwards; a
            plain model that shares the parameters raises from then on.
        mesh: from :func:`parallel_ext.init_mesh`; the one made last when None.
        vocab_multiple_of: boundaries between the ranks' vocabulary rows are multiples of this.
        training_logits: gather ``logits`` in training with labels as well, where they are None
            otherwise.
        fused_loss: whether training with labels computes output head and loss in one op, which
            never holds the logits: ``"auto"`` where nothing reads or changes them, as a hook on the
            head does; True raises where something does; False computes the loss of sharded logits.
        agreement: compare the inputs over the tp ranks before each forward (32 bytes a rank). On
            GPUs the values are compared one forward later, without a synchronisation.
        allow_different_dropout: accept ``attention_dropout`` under tp > 1, whose masks are drawn
            per rank and differ from those of a single process; not beside other dropout. That, and
            the noise of ``router_jitter_noise``, need tp ranks with equal seeds; each forward
            checks it.
        invariant: train with the same bits on any number of ranks; None for the ordinary sums.
        sequence_parallel: in training let each tp rank keep its own tokens between attentions and
            MLPs or mixtures, so that what a layer saves there is divided by tp
            (``docs/parallelize.md``).

    Returns:
        ``model``.

    Raises:
        ValueError: the model cannot be sharded so; one error, on all ranks, before anything
            changes.
        DisagreementError: the ranks' models or options differ.
        CollectiveTimeout: not all ranks called it.

    Example:
        >>> model = parallelize(model, init_mesh(tp=2))  # doctest: +SKIP
    """
    mesh = given_or_last("parallelize", mesh)
    mesh.control.barrier("parallelize")
    run_extensions()
    given, model = model, decoder_in(model) or model

    options = Options(
        vocab_multiple_of,
        training_logits,
        fused_loss,
        agreement,
        allow_different_dropout,
        invariant,
        sequence_parallel,
    )

    def prepare() -> Plan:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"parallelize takes a model in memory, got {model!r}; px.from_pretrained(path, "
                "mesh) loads one"
            )
        options.check()
        check_unwrapped(model)
        spec = spec_for(model)
        check_names(model, spec)
        check_unsharded(model)
        check_plain(model, spec)
        check_servable(model)
        check_dropout(model, mesh, allow_different_dropout, agreement)
        check_mixture(model, spec, mesh, agreement)
        blocks = 0 if invariant is None else invariant.blocks
        if blocks:
            check_invariant(model, spec, mesh, invariant.leaves)
        if sequence_parallel:
            check_sequence_parallel(model, spec)
        layout = layout_of(model, spec, mesh.tp_size, mesh.ep_size, vocab_multiple_of, blocks)
        return Plan(mesh, spec, layout, options)

    plan = mesh.control.run_on_all("parallelize", prepare)
    check_equal(model, plan)
    plan = with_groups(plan, model)
    tied, around, beside = [], [], None
    if plan.spec.head is None and invariant is None:  # others may hold it, with a head
        tied = heads_tied_to(model, plan.spec.embedding)
        if mesh.tp_size > 1:
            mesh.control.run_on_all("parallelize", lambda: refuse_tied_to_replaced(tied))
        around = models_around(model)
        beside = plain_head_of(around, plan.vocab_ranges[-1][1])
        check_equal_heads(beside, plan)
    # What checkpointing has hung on the embedding; the new one gets it afterwards.
    hooked = [each for each in model.modules() if remove_output_hooks(each, is_input_hook)]
    carry_out(model, plan)
    tie_again(tied, model, plan.spec.embedding)
    if beside is not None:
        shard_head(beside, model, plan)
    for each in around:
        mark_around(each, model, of_head=beside is not None and each is beside.model)
        stand_for_class(each)
    if hooked:
        model.enable_input_require_grads()
    _warn_of_uneven_vocabulary(plan)
    if given is not model:
        tell_labels(given)
        _move(given, mesh)
    return given


def carry_out(model: transformers.PreTrainedModel, plan: Plan) -> None:
    """Replace the modules of a checked model, and bind its methods; no communication."""
    replacer = (Replacer if plan.options.invariant is None else BlockReplacer)(model, plan)
    with numbered_by_module():
        replacer.replace_all()
        _attach(model, plan, ParallelState(plan, replacer.partials, replacer.routings))


def _attach(model: transformers.PreTrainedModel, plan: Plan, state: ParallelState) -> None:
    """Bind the run-time methods to this instance; let hidden states enter the parallel parts."""
    setattr(model, STATE_NAME, state)
    model.parallel_ext_remembered = Remembered(model)
    model.register_load_state_dict_pre_hook(check_state_dict)
    mesh = plan.mesh
    for function in (
        *(forward, methods.generate, methods.save_pretrained, methods.num_parameters),
        *(methods.get_memory_footprint, methods.prepare_inputs_for_generation),
        resize_token_embeddings,
    ):
        name = function.__name__
        if hasattr(model, name):  # published code of before transformers 5 does not generate
            setattr(model, name, methods.bound(function, model))
    if mesh.world_size > 1:
        _refuse_of_parts(model)
    let_keys_size_static_caches(model)
    state.own_forward = model.forward.__func__
    state.drops = bool(dropouts_of(model))
    watch_forward(model)
    if mesh.tp_size > 1 or plan.options.invariant is not None:
        watch_dropout(model, of_heads=not plan.options.allow_different_dropout)
    if plan.options.invariant is None:
        enter_and_leave(model, plan)
    if plan.sequence_parallel:
        keep_own_tokens(model, plan, state.partials)
    _move(model, mesh)


def _move(model: nn.Module, mesh: Mesh) -> None:
    """Move a model to this rank's GPU, if it has one and the model is not on meta."""
    if mesh.device.type == "cuda" and not next(model.parameters()).is_meta:
        model.to(mesh.device)


def _refuse_of_parts(model: transformers.PreTrainedModel) -> None:
    """Let models inside of this one, as its decoder, refuse what takes all of a model."""
    for part in model.modules():
        if part is not model and isinstance(part, transformers.PreTrainedModel):
            for name in _OF_WHOLE_MODELS:
                setattr(part, name, MethodType(_refusing(type(part), name), part))


def _refusing(cls: type, name: str) -> Callable[..., Any]:
    """Return a function in place of a class's method, which would take shards for tensors."""

    @wraps(getattr(cls, name))
    def method(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{cls.__name__}.{name}: this is a part of a parallel model, of which each rank has "
            f"shards; call {name} of the model that px.parallelize or px.from_pretrained returned"
        )

    return method


def _warn_of_uneven_vocabulary(plan: Plan) -> None:
    rows = [stop - start for start, stop in plan.vocab_ranges]
    if plan.mesh.rank == 0 and len(set(rows)) > 1:
        warn_user(
            f"the vocabulary of {sum(rows)} rows is not divisible by tp={plan.mesh.tp_size}: "
            f"the ranks hold {', '.join(map(str, rows))} rows. Results and files are exact"
        )
