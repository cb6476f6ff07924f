"""Methods of a parallel model at run time, bound to instances in place of its class's own.

Everything here is attached to one model as bound methods, so that ``deepcopy`` rebinds it to the
copy and no HuggingFace class changes.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from parallel_ext import ops
from parallel_ext.distributed.mesh import Mesh
from parallel_ext.io.hf_writer import write_directory
from parallel_ext.io.safe_open import shown
from parallel_ext.nn.loss import LOSS_OPTIONS, OPTIONS_OF_THE_OP, balance_loss, causal_lm_loss
from parallel_ext.nn.replicas import Piece
from parallel_ext.nn.sharded_module import named_shards, to_shards
from parallel_ext.nn.vocab import (
    LossCall,
    VocabParallelEmbedding,
    VocabParallelHead,
    current_loss_call,
    loss_call,
    sharded_logits,
)
from parallel_ext.parallel.drift import check_replicas
from parallel_ext.parallel.state import STATE_NAME, ParallelState, model_of
from parallel_ext.version import VERSION


@lru_cache
def _signature(cls: type, method: str) -> inspect.Signature:
    return inspect.signature(getattr(cls, method))


def _arguments(model: nn.Module, method: str, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, those of ``**kwargs`` beside the declared ones."""
    signature = _signature(type(model), method)
    arguments = dict(signature.bind(model, *args, **kwargs).arguments)
    del arguments[next(iter(arguments))]  # self
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(parameter.name, {}))
    return arguments


def forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the class's own forward after the inputs were compared; the loss knows the shards.

    With labels the loss is computed from hidden states and head, and ``logits`` is None in
    training. In evaluation, or where ``training_logits`` was asked for, it is computed from sharded
    logits, and these are gathered, replicated, over the true V.
    With labels, loss and load balancing loss are this dp rank's shares of those of all batches;
    without, the latter is that of the rank's own tokens, as in HuggingFace.
    """
    state: ParallelState = getattr(model, STATE_NAME)
    # Not for the class, whose attention may know an option by the same name.
    loss_options = {name: kwargs.pop(name) for name in LOSS_OPTIONS if name in kwargs}
    arguments = _arguments(model, "forward", args, kwargs) | loss_options
    labels = arguments.get("labels")
    with_labels = labels is not None
    own_loss = with_labels and state.table.own_loss
    wants_logits = state.training_logits or not model.training
    state.forward_ran = True
    _check_ends(model, state)
    fused = with_labels and not own_loss and not wants_logits and _bare_head(model, state)
    if state.agreement is not None:
        makes_logits = with_labels and not own_loss and not wants_logits and not fused
        _compare_inputs(model, state, arguments, makes_logits)
    apart = torch.is_grad_enabled() and _would_train_apart(state)
    _refuse_what_fails(model, state, arguments, trains_apart=apart and model.training)
    want_dict = kwargs.pop("return_dict", None)
    if want_dict is None:
        want_dict = model.config.return_dict
    if own_loss:
        taken = ("labels", "return_dict", *LOSS_OPTIONS)
        args, kwargs = (), {name: each for name, each in arguments.items() if name not in taken}
    _keep_routing(model, state)
    balanced = with_labels and state.mesh.dp_size > 1 and _wants_balance(model, state, arguments)
    balance = _balance_aside(model) if balanced else nullcontext()
    call = LossCall(fused, loss_options)
    with (
        sharded_logits(with_labels),
        loss_call(call),
        balance,
        _counted_if_trained(model, state),
    ):
        output = type(model).forward(model, *args, return_dict=True, **kwargs)
    if with_labels and not own_loss and not call.computed:
        raise RuntimeError(
            f"the forward of {type(model).__name__} has computed a loss without "
            "model.loss_function, which knows the shards of the output head, as Liger's fused loss "
            "does; undo that patch, or compute a loss from the logits of a call without labels"
        )
    if apart:  # an evaluation, unless somebody goes backward from it
        for tensor in output.values():
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: _refuse_training_apart(state))
    if with_labels:
        fields = dict(output.items())
        if own_loss:
            vocab_size = model.config.vocab_size
            with loss_call(call):
                fields["loss"] = loss_function(model, output.logits, labels, vocab_size)
        if balanced:
            mask = arguments.get("attention_mask")
            share = balance_loss(output.router_logits, model.num_experts_per_tok, mask, state.mesh)
            fields["aux_loss"] = share
            fields["loss"] = fields["loss"] + model.router_aux_loss_coef * share
        logits = fields.pop("logits")
        if wants_logits:
            fields["logits"] = ops.gather_from_region(logits, state.vocab_sizes, state.mesh.tp)
        output = type(output)(**fields)
    return output if want_dict else output.to_tuple()


def _compare_inputs(
    model: nn.Module, state: ParallelState, arguments: dict[str, Any], makes_logits: bool
) -> None:
    """Raise on all tp ranks unless they are about to run the same forward."""
    compared, grad = dict(arguments), torch.is_grad_enabled()
    if makes_logits:
        compared["hooks or changes of the output head"] = True
    mode = f"{'train' if model.training else 'eval'}, {'grad' if grad else 'no grad'}"
    if grad:  # it decides which sums a backward has
        compared["requires_grad"] = [p.requires_grad for p in model.parameters()]
    if state.adapted:
        compared["adapters"] = [
            module.for_agreement() for module in model.modules() if hasattr(module, "for_agreement")
        ]
    if _draws_jitter(model, state):  # the tp ranks must draw the same noise
        compared["random state"] = _random_state(state.mesh)
    trained = model if model.training and grad else None
    state.agreement.check(f"{type(model).__name__}.forward", compared, mode, trained)


def _refuse_what_fails(
    model: nn.Module, state: ParallelState, arguments: dict[str, Any], trains_apart: bool
) -> None:
    ids = arguments.get("input_ids")
    if ids is not None and ids.numel() == 0:
        raise ValueError(
            f"input_ids of shape {tuple(ids.shape)} hold no token, which transformers' attention "
            "cannot take; pass a row of padding whose labels are all -100 instead"
        )
    options = [name for name in LOSS_OPTIONS if name in arguments]
    if arguments.get("labels") is None and options:
        raise ValueError(f"{', '.join(options)}: options of the loss, but there are no labels")
    if options := [name for name in OPTIONS_OF_THE_OP if name in arguments]:
        raise ValueError(
            f"{', '.join(options)}: not an option of a model's loss; compute your own from the "
            "logits of a call without labels"
        )
    if getattr(model.loss_function, "__func__", None) is not loss_function:
        raise ValueError(
            "loss_function was replaced on this parallel model, whose head hands hidden states or "
            "sharded logits to it; compute your own loss from the logits of a call without labels"
        )
    if trains_apart:
        _refuse_training_apart(state)
    if state.mesh.tp_size > 1 and (
        arguments.get("output_attentions") or model.config.output_attentions
    ):
        raise NotImplementedError(
            "output_attentions under tp is not supported: a rank computes only its own heads"
        )


def _bare_head(model: nn.Module, state: ParallelState) -> bool:
    """Return whether no hook or wrapper reads or changes the head's logits or weight.

    The wrappers of torch.compile and PEFT hand on the attributes of what they wrap. Those of others
    would take hidden states for logits.
    """
    head = model.get_submodule(state.table.head)
    if not getattr(head, "makes_logits", False) or _has_any_global_hook():
        return False
    return not any(
        module._forward_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or ("forward" in vars(module) and not hasattr(module, "_orig_mod"))  # unless compiled
        for module in head.modules()
    )


def _check_ends(model: nn.Module, state: ParallelState) -> None:
    """Raise unless embedding and output head are those that know their rows of the vocabulary."""
    if state.mesh.tp_size == 1:
        return
    ends = {state.table.embedding: VocabParallelEmbedding, state.table.head: VocabParallelHead}
    for path, kind in ends.items():
        module = model.get_submodule(path)
        if isinstance(module, kind) or any(isinstance(each, kind) for each in module.modules()):
            continue  # perhaps inside a wrapper
        raise RuntimeError(
            f"{path} was replaced by a {type(module).__name__}, but must be what px.parallelize "
            "has put there; model.resize_token_embeddings changes the size of embedding and head, "
            "model.load_state_dict their values"
        )


def watch_forward(model: nn.Module) -> None:
    """Let calls of a model, or of its wrapper, raise for a forward that bypasses ours."""
    model.register_forward_pre_hook(_before_forward)
    model.register_forward_hook(_after_forward)


def _replaced(model: nn.Module) -> bool:
    """Return whether another forward than ours was put into the instance."""
    return getattr(model.forward, "__func__", None) is not getattr(model, STATE_NAME).own_forward


def _before_forward(module: nn.Module, args: Any) -> None:
    model = model_of(module)
    if _replaced(model):
        getattr(model, STATE_NAME).forward_ran = False


def _after_forward(module: nn.Module, args: Any, output: Any) -> None:
    model = model_of(module)
    if _replaced(model) and not getattr(model, STATE_NAME).forward_ran:
        raise RuntimeError(
            f"forward of this {type(model).__name__} was replaced by {shown(model.forward)}, which "
            "does not call the one that px.parallelize has put there, but takes shards for full "
            "tensors, as TRL's and Liger's fused losses do; undo that"
        )


def _keep_routing(model: nn.Module, state: ParallelState) -> None:
    """Let the layers keep their choices of experts if a backward is going to recompute them."""
    if not state.routings:
        return
    layers = model.get_submodule(state.table.layers)
    saves = model.training and any(layer.gradient_checkpointing for layer in layers)
    for routing in state.routings:
        routing.saves = saves


def _counted_if_trained(model: nn.Module, state: ParallelState) -> AbstractContextManager[None]:
    """Let routing inside the context count in the metrics only if it is for training."""
    counter, trains = state.routing_counter, model.training and torch.is_grad_enabled()
    return nullcontext() if counter is None or trains else counter.aside()


def _would_train_apart(state: ParallelState) -> bool:
    """Return whether nothing sums the gradients of the dp ranks, so that each trains alone."""
    return state.mesh.dp_size > 1 and state.zero is None and not state.reduced_by_caller


def _refuse_training_apart(state: ParallelState) -> NoReturn:
    raise RuntimeError(
        f"training at dp={state.mesh.dp_size} needs px.data_parallel(model, mesh): nobody sums the "
        "gradients of the dp ranks, so each would train a model of its own; "
        "px.no_data_parallel(model) says that you do"
    )


def _draws_jitter(model: nn.Module, state: ParallelState) -> bool:
    noise = state.table.mixture.jitter_of(model.config) if state.routings else 0.0
    return model.training and noise > 0


def _random_state(mesh: Mesh) -> torch.Tensor:
    """Return the state of the generator that noise is drawn from, without waiting for a GPU."""
    return torch.cuda.get_rng_state() if mesh.device.type == "cuda" else torch.get_rng_state()


def _wants_balance(model: nn.Module, state: ParallelState, arguments: dict[str, Any]) -> bool:
    """Return whether the class's forward adds a load balancing loss."""
    if not state.routings:
        return False
    asked = arguments.get("output_router_logits")
    return bool(model.config.output_router_logits if asked is None else asked)


class _Nothing:
    """A factor that makes 0 of anything: of NaN as well, which a rank without tokens has."""

    def __mul__(self, other: object) -> float:
        return 0.0

    __rmul__ = __mul__


@contextmanager
def _balance_aside(model: nn.Module) -> Iterator[None]:
    """Let forwards inside the context leave out HuggingFace's own load balancing loss.

    It knows only this rank's tokens.
    """
    coefficient = model.router_aux_loss_coef
    model.router_aux_loss_coef = _Nothing()
    try:
        yield
    finally:
        model.router_aux_loss_coef = coefficient


def loss_function(
    model: nn.Module, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **kwargs: Any
) -> torch.Tensor:
    """Compute the loss for HuggingFace's forward by ``causal_lm_loss``, from the head's output."""
    state: ParallelState = getattr(model, STATE_NAME)
    known = ("num_items_in_batch", "ignore_index", "shift_labels")
    options = {name: kwargs[name] for name in known if name in kwargs}
    call = current_loss_call()
    head = None
    if call is not None:
        call.computed = True
        options |= call.options
        if call.head is not None:
            head = call.head.weight, call.head.bias
            if logits is not call.hidden:
                raise RuntimeError(
                    f"{type(model).__name__} changes what its output head returns, which in "
                    "training are hidden states; parallelize(..., training_logits=True) gives it "
                    "logits"
                )
    compared = _compared_over_dp(model, state)
    loss = causal_lm_loss(
        *(logits, labels, vocab_size, state.vocab_range, state.mesh),
        head=head,
        compared=compared,
        **options,
    )
    if compared is not None:
        state.turn_over_dp.done()
    return loss


@torch._disable_dynamo
def _compared_over_dp(model: nn.Module, state: ParallelState) -> Piece | None:
    """Return the piece of a parameter to compare over dp with the loss, None if there is none."""
    trains = model.training and torch.is_grad_enabled()
    # On a GPU the comparison would wait for the device.
    if not trains or state.mesh.dp_size == 1 or state.mesh.device.type != "cpu":
        return None
    return state.turn_over_dp.now(model)


def generate(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the class's own ``generate`` with rank 0's random numbers on every tp rank.

    Rank 0's generator advances as it would in a single process, and so does that of every rank
    that was in the same state; the others stay as they were. Where dp ranks take part in each
    other's forwards, all of them generate at the same time, each on its own prompts.
    """
    state: ParallelState = getattr(model, STATE_NAME)
    if state.forwards_together:
        kwargs.setdefault("synced_gpus", True)
    state.generates = True
    try:
        return _generate(model, state, *args, **kwargs)
    finally:
        state.generates = False
        to_shards(model)


def _generate(model: nn.Module, state: ParallelState, *args: Any, **kwargs: Any) -> Any:
    mesh = state.mesh
    if mesh.tp_size == 1:
        return type(model).generate(model, *args, **kwargs)
    arguments = _arguments(model, "generate", args, kwargs)
    arguments["model.generation_config"] = model.generation_config
    if state.agreement is not None:
        state.agreement.check(f"{type(model).__name__}.generate", arguments, "")
    configs = (arguments.get("generation_config"), model.generation_config)
    if "max_time" in kwargs or any(getattr(config, "max_time", None) for config in configs):
        raise NotImplementedError(
            "max_time under tp is not supported: the ranks' clocks would stop them at different "
            "lengths; use max_new_tokens"
        )
    with ExitStack() as stack:
        stack.enter_context(_random_numbers_of_first_rank(mesh, torch))
        if mesh.device.type == "cuda":
            stack.enter_context(_random_numbers_of_first_rank(mesh, torch.cuda))
        return type(model).generate(model, *args, **kwargs)


@contextmanager
def _random_numbers_of_first_rank(mesh: Mesh, generator: Any) -> Iterator[None]:
    """Run the block with the first tp rank's random state on every tp rank.

    ``generator`` is ``torch`` or ``torch.cuda``. A rank in another state gets its own back.
    """
    own = generator.get_rng_state()
    shared = own.clone()
    group = mesh.process_group(mesh.tp_control)
    dist.broadcast(shared, src=mesh.dp_rank * mesh.tp_size, group=group)
    generator.set_rng_state(shared)
    try:
        yield
    finally:
        if not torch.equal(own, shared):
            generator.set_rng_state(own)


# Options of HuggingFace's method: those without a meaning here, and those with one by default.
_UNUSED = ("is_main_process", "save_function", "token", "save_peft_format")
_DEFAULTS = {
    "state_dict": (None,),
    "push_to_hub": (False, None),
    "safe_serialization": (True, None),
    "variant": (None,),
    "save_original_format": (True,),
    "distributed_checkpoint": (False, None),
}


def save_pretrained(
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    **kwargs: Any,
) -> None:
    """Write the whole model as a plain HuggingFace directory; every rank calls it.

    Each tensor is written once, by one rank. Options of HuggingFace's method that change nothing
    here, such as ``is_main_process`` and ``safe_serialization=True``, are accepted.

    Raises:
        TypeError: another option of HuggingFace's method.
        DisagreementError: ranks that must hold the same hold different values.
        CheckpointError, OSError: the directory cannot be written; the previous one is then whole.
    """
    refused = [
        f"{name}={shown(value)}"
        for name, value in sorted(kwargs.items())
        if name not in _UNUSED and (name not in _DEFAULTS or value not in _DEFAULTS[name])
    ]
    if refused:
        raise TypeError(
            f"save_pretrained of a parallel model does not take {', '.join(refused)}; it gathers "
            "the tensors itself and writes safetensors files"
        )
    state: ParallelState = getattr(model, STATE_NAME)
    check_replicas(model)
    write_directory(
        model,
        save_directory,
        state.mesh,
        state.layout,
        config=model.config,
        generation_config=model.generation_config if model.can_generate() else None,
        max_shard_size=max_shard_size,
        note={
            "version": VERSION,
            "vocab_size": model.config.vocab_size,
            "tp": state.mesh.tp_size,
            "ep": state.mesh.ep_size,
            "dp": state.mesh.dp_size,
        },
    )


def num_parameters(
    model: nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False
) -> int:
    """Count the parameters of the full model, as HuggingFace does on one process.

    Args:
        only_trainable: leave out frozen ones.
        exclude_embeddings: leave out the embedding.
    """
    state: ParallelState = getattr(model, STATE_NAME)
    left_out = f"{state.table.embedding}.weight" if exclude_embeddings else None
    return sum(
        layout.numel
        for name, parameter, layout in named_shards(model)
        if name != left_out and (parameter.requires_grad or not only_trainable)
    )


class AskedByDDP:
    """The list in which DistributedDataParallel looks for parameters to leave alone.

    It averages the gradients of what every rank holds whole, as they must be. Shards it would
    overwrite by rank 0's.
    """

    def __init__(self, state: ParallelState) -> None:
        self._state = state

    def __iter__(self) -> Iterator[str]:
        mesh = self._state.mesh
        if mesh.tp_size > 1 or mesh.ep_size > 1:
            raise RuntimeError(
                "DistributedDataParallel is not supported on a model that is sharded over "
                f"tp={mesh.tp_size}, ep={mesh.ep_size} ranks: it would overwrite every rank's "
                "shard by rank 0's; use px.data_parallel(model, mesh)"
            )
        self._state.reduced_by_caller = True
        return iter(())
