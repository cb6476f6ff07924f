"""Generation on shards: every rank chooses among its own columns of the logits.

HuggingFace's ``generate`` prepares everything as always (prompts, masks, cache, stopping) and hands
over to the loop here, which has the head leave its logits where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import MaxLengthCriteria

from parallel_ext import ops
from parallel_ext.models._transformers_private import (
    has_unfinished,
    next_model_kwargs,
    padding_of,
    prefill,
)
from parallel_ext.nn.fused_loss import LossCall, running
from parallel_ext.parallel.beside import is_around
from parallel_ext.parallel.loss_call import who_sees
from parallel_ext.parallel.state import ParallelState, model_of, state_of

_INSTEAD = "; use model.generate(), which gathers the logits"
_OUTGROWN = (
    " where dp ranks take part in each other's forwards: a rank that has finished fills it further"
)
# Arguments of HuggingFace's generate that would act on gathered logits or on another loop.
_REFUSED_ARGUMENTS = (
    *("logits_processor", "prefix_allowed_tokens_fn", "assistant_model", "custom_generate"),
    *("negative_prompt_ids", "negative_prompt_attention_mask"),
)
_REFUSED_OUTPUTS = (
    *("return_dict_in_generate", "output_scores", "output_logits"),
    *("output_attentions", "output_hidden_states"),
)
# HuggingFace's processors of logits -> what of them vocab_sample does.
_FILTERS = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
}


def generate(
    model: nn.Module,
    inputs: torch.Tensor | None = None,
    *,
    seed: int | None = None,
    streamer: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Generate as ``model.generate`` does, without ever gathering the logits.

    Greedy search gives the tokens of HuggingFace's. Sampling draws from the same distribution, but
    with random numbers that depend only on seed, step, row and token, so that any ``tp`` gives the
    same tokens. Each token takes one small exchange (greedy: 16 bytes a row and rank), and those of
    :func:`parallel_ext.ops.vocab_sample` for the filters.

    Args:
        model: a parallel model in eval mode, also inside PEFT's wrapper; every rank calls it.
        inputs: [B, S], int64, replicated: prompts, padded on the left.
        seed: of the random numbers, the same on the tp ranks; when None, drawn from torch's
            generator of tp rank 0. Give dp ranks seeds of their own for draws of their own.
        streamer: HuggingFace's, for one row; on any of the ranks.
        **kwargs: those of HuggingFace's ``generate``: ``attention_mask``, ``generation_config`` or
            its options, ``stopping_criteria``, inputs of the model such as images. Of the options
            that act on logits there are ``do_sample``, ``temperature``, ``top_k``, ``top_p`` and
            ``min_p``.

    Returns:
        [B, S + new tokens], int64, replicated over tp: prompts and what follows them, with the
        padding token behind the end of a row.

    Raises:
        NotImplementedError: an option that is not served, in the arguments or in the model's
            ``generation_config``; nothing is ignored.
        ValueError: the model is in training mode, or the logits of a row that is drawn from are NaN
            or infinite.
        TypeError: the model is no parallel causal model, but perhaps a module around one.
        DisagreementError: the tp ranks' arguments differ.

    Example:
        >>> generate(model, prompts, max_new_tokens=20, do_sample=True, seed=1)  # doctest: +SKIP
    """
    parallel, state = model_of(model), state_of(model)
    if state.agreement is not None:  # what one rank refuses, all must
        given = sorted(name for name, value in kwargs.items() if value is not None)
        mode = "train" if parallel.training else "eval"
        state.agreement.check("px.generate", {"seed": seed, "arguments": given}, mode)
    if state.spec.head is None or is_around(model):
        raise TypeError(
            f"px.generate draws from the output head of a parallel causal model, and a "
            f"{type(model).__name__} is none; call its own generate(), or give the causal model in "
            "it to px.generate"
        )
    why = who_sees(parallel)
    if why is not None and state.mesh.tp_size > 1:
        raise NotImplementedError(f"px.generate shows no rank all logits, but {why}{_INSTEAD}")
    if parallel.training:
        raise ValueError("px.generate: the model is in training mode; call model.eval() first")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"px.generate: seed must be an int or None, got {seed!r}")
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"px.generate: seed must be in [0, 2**63), got {seed}")
    for name in _REFUSED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"px.generate does not take {name}{_INSTEAD}")
    names = ("past_key_values", "cache")  # before transformers 5.24, and since
    caches = [name for name in names if kwargs.get(name) is not None]
    if state.forwards_together and caches:
        raise NotImplementedError(f"px.generate does not take {caches[0]}{_OUTGROWN}")
    if kwargs.get("cache_implementation") == "paged":  # of which HuggingFace makes another loop
        raise NotImplementedError(f"px.generate does not support a paged cache{_INSTEAD}")
    configs = (kwargs.get("generation_config"), getattr(parallel, "generation_config", None))
    if kwargs.get("stop_strings") or any(getattr(c, "stop_strings", None) for c in configs):
        raise NotImplementedError(f"px.generate does not support stop_strings{_INSTEAD}")
    decode = partial(_decode, seed=seed, streamer=streamer, cache_stays=bool(caches))
    return model.generate(inputs=inputs, custom_generate=decode, **kwargs)


def _decode(
    model: nn.Module,
    input_ids: torch.Tensor,
    *,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    seed: int | None,
    streamer: Any,
    cache_stays: bool,
    **model_kwargs: Any,
) -> torch.Tensor:
    """Generate as the options ask for, which HuggingFace's ``generate`` calls after preparation."""
    _refuse_options(generation_config)
    filters = _filters(logits_processor)
    state: ParallelState = state_of(model)
    cache = generation_config.cache_implementation
    if state.forwards_together and cache is not None and not cache.startswith("dynamic"):
        raise NotImplementedError(f"px.generate does not support a {cache} cache{_OUTGROWN}")
    if generation_config.do_sample and seed is None:
        seed = int(torch.randint(2**63 - 1, ()))  # here every tp rank has rank 0's generator
    choose = partial(_largest, state=state)
    if generation_config.do_sample:
        choose = partial(_draw, state=state, filters=filters, seed=seed)
    # In inference mode torch keeps no books for autograd, which takes time of the host.
    # Tensors that outlive the call must not be made in it: those of the caller's cache, and those
    # that FSDP gathers.
    outlives = cache_stays or state.zero is not None
    options = (choose, stopping_criteria, generation_config, streamer, model_kwargs)
    try:
        with nullcontext() if outlives else torch.inference_mode():
            generated = _loop(model, input_ids, *options)
    finally:
        _copy_what_modules_keep(model)
    return generated.clone()


def _copy_what_modules_keep(model: nn.Module) -> None:
    """Let the tensors that modules have made in the loop be changed and trained on behind it.

    As the frequencies of a rotary embedding, which longer sequences change.
    """
    for module in model.modules():
        for name, kept in (*module.named_buffers(recurse=False), *vars(module).items()):
            if isinstance(kept, torch.Tensor) and kept.is_inference():
                setattr(module, name, kept.clone())


def _loop(
    model: nn.Module,
    input_ids: torch.Tensor,
    choose: Callable[..., torch.Tensor],
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any,
    model_kwargs: dict[str, Any],
) -> torch.Tensor:
    """Run the loop over the tokens, of which ``choose(logits, step=)`` returns the next ones."""
    ends = any(hasattr(each, "eos_token_id") for each in stopping_criteria)
    lengths = [each.max_length for each in stopping_criteria if type(each) is MaxLengthCriteria]
    by_length = 0 < len(lengths) == len(stopping_criteria)
    unfinished = input_ids.new_ones(len(input_ids), dtype=torch.bool)
    finished, step = False, 0
    together = state_of(model).forwards_together
    if streamer is not None:
        streamer.put(input_ids.cpu())
    with running(LossCall(fused=False, shared=True)):  # the logits stay sharded
        outputs = prefill(model, input_ids, generation_config, model_kwargs)
    while True:
        model_kwargs = next_model_kwargs(model, outputs, model_kwargs)
        if not finished:  # else only other dp ranks need this one's forwards
            logits = outputs.logits[:, -1].float()  # also of fp64, as in HuggingFace
            chosen = choose(logits, step=step).to(input_ids.device)
            if ends:
                padding = padding_of(generation_config).to(chosen.device)
                chosen = torch.where(unfinished, chosen, padding)
            input_ids = torch.cat([input_ids, chosen[:, None]], dim=1)
            if streamer is not None:
                streamer.put(chosen.cpu())
            unfinished = unfinished & ~stopping_criteria(input_ids, None)
            # What a length alone ends, the host knows without waiting for the device.
            finished = input_ids.size(1) >= min(lengths) if by_length else not unfinished.any()
            step += 1
        del outputs  # the first of them hold the hidden states of whole prompts
        if not has_unfinished(model, finished, together, input_ids.device):
            break
        inputs = model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=1 if model_kwargs["use_cache"] else None, **model_kwargs
        )
        with running(LossCall(fused=False, shared=True)):  # the logits stay sharded
            outputs = model(**inputs, return_dict=True)
    if streamer is not None:
        streamer.end()
    return input_ids


def _largest(logits: torch.Tensor, state: ParallelState, step: int) -> torch.Tensor:
    vocab_size = sum(state.vocab_sizes)
    return ops.vocab_argmax(logits, vocab_size, state.vocab_range, group=state.mesh.tp)


def _draw(
    logits: torch.Tensor, state: ParallelState, filters: dict[str, Any], seed: int, step: int
) -> torch.Tensor:
    vocab_size = sum(state.vocab_sizes)
    chosen = ops.vocab_sample(
        logits, vocab_size, state.vocab_range, **filters, seed=seed, step=step, group=state.mesh.tp
    )
    if (chosen < 0).any():
        rows = (chosen < 0).nonzero().flatten().tolist()
        raise ValueError(
            f"px.generate: the logits of rows {rows} at step {step} are NaN or infinite, so there "
            "is nothing to draw from; check the weights and the dtype"
        )
    return chosen


def _refuse_options(config: Any) -> None:
    mode = getattr(config.get_generation_mode(), "value", None)
    if mode not in ("greedy_search", "sample"):
        raise NotImplementedError(
            f"px.generate searches greedily or samples, but the options ask for {mode}{_INSTEAD}"
        )
    for name in _REFUSED_OUTPUTS:
        if getattr(config, name):
            raise NotImplementedError(
                f"px.generate returns the token ids alone, but the options ask for {name}{_INSTEAD}"
            )


def _filters(processors: Any) -> dict[str, Any]:
    """Return HuggingFace's logits processors as arguments of ``vocab_sample``, or raise."""
    filters = {}
    for processor in processors:
        name = type(processor).__name__
        if name not in _FILTERS:
            raise NotImplementedError(
                f"px.generate does not support what the options ask of {name}: of those that act "
                f"on logits it has {', '.join(_FILTERS.values())}{_INSTEAD}"
            )
        filters[_FILTERS[name]] = getattr(processor, _FILTERS[name])
    return filters
