"""The layers that read the hidden states of an attention or MLP are computed in one op."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import MethodType
from typing import Any

import peft
import pytest
import torch
from ranks import pool
from reference import (
    Tiny,
    assert_within,
    batch,
    difference,
    gradient_differences,
    mesh_of,
    parallel,
)
from reference_mixtral import TinyMixtral
from test_specs import OfSpec, in_fp64
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaMLP

import parallel_ext as px
from parallel_ext.nn.linear import ColumnParallelLinear
from parallel_ext.parallel.entering import CopyInput

TOGETHER, BACKWARD, ALONE = "column_linears", "column_linears_backward", "column_linear"
COPY = "copy_to_region"


def _calls(function: Callable[[], object]) -> Counter[str]:
    """How often ops of this package run."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        function()
    names = (event.name.partition("parallel_ext::")[2] for event in profiler.events())
    return Counter(name for name in names if name and " " not in name)


def _of_step(model: nn.Module, data: dict[str, Any]) -> Counter[str]:
    model.zero_grad()
    return _calls(lambda: model(**data).loss.backward())


def _as_before(model: nn.Module) -> None:
    """Let each layer be computed by itself."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, CopyInput):
                hook.layers = ()


def _local(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _has_bits_of_before(model: nn.Module, data: dict[str, Any]) -> bool:
    """Whether loss and gradients are, bit for bit, those of layers that are computed one by one."""
    results = []
    for prepare in (lambda _: None, _as_before):
        prepare(model)
        model.zero_grad()
        loss = model(**data).loss
        loss.backward()
        results.append({"loss": loss.detach(), **_local(model)})
    ours, before = results
    return ours.keys() == before.keys() and all(torch.equal(ours[n], before[n]) for n in ours)


# A small model, and how many ops there are in a step; no layer is computed by itself.
MODELS: dict[str, tuple[Any, int]] = {
    "llama with biases": (Tiny(bias=True), 4),
    "llama, one key-value head": (Tiny(key_value_heads=1), 4),
    "mixtral": (TinyMixtral(), 2),
    "qwen3": (OfSpec("qwen3", key_value_heads=1), 4),
    "qwen2 mixture": (OfSpec("qwen2_moe"), 4),
    "olmo2": (OfSpec("olmo2"), 4),
    "joined": (OfSpec("phi3"), 4),
    "gemma3": (OfSpec("gemma3_text"), 4),
}


@in_fp64()
def _model(name: str) -> tuple[dict[str, float], dict[str, int], bool]:
    tiny = MODELS[name][0]
    reference = tiny.model()
    model = parallel(reference, mesh_of())
    data = batch(tiny.vocab_size)
    differences = gradient_differences(reference, model, data)
    return differences, _of_step(model, data), _has_bits_of_before(model, data)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_one_process_and_have_the_bits_of_before(name: str) -> None:
    _, together = MODELS[name]
    for differences, calls, same in pool(2).run(_model, name):
        assert_within([differences])
        assert (calls[TOGETHER], calls[BACKWARD]) == (together, together)
        assert (calls[ALONE], calls[COPY]) == (0, 0)
        assert same


def test_so_they_are_on_three_ranks() -> None:
    name = "qwen2 mixture"
    for differences, calls, same in pool(3).run(_model, name):
        assert_within([differences])
        assert calls[TOGETHER] == MODELS[name][1]
        assert same


def _in_dtype(dtype: torch.dtype) -> dict[str, bool]:
    """Whether the bits are those of before, by what is frozen."""
    tiny, same = Tiny(dtype=dtype, bias=True), {}
    model, data = parallel(tiny.model(), mesh_of()), batch(tiny.vocab_size)
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    layers = {hook: hook.layers for hook in hooks if isinstance(hook, CopyInput)}
    for frozen in ("nothing", "q_proj", "mlp", "embed", "_proj"):
        for path, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in path)
        same[frozen] = _has_bits_of_before(model, data)
        for hook, of_hook in layers.items():
            hook.layers = of_hook
    return same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bits_are_those_of_before_in_any_dtype(dtype: torch.dtype) -> None:
    for same in pool(2).run(_in_dtype, dtype):
        assert all(same.values()), same


def _checkpointed(reentrant: bool) -> tuple[dict[str, float], Counter[str]]:
    reference = Tiny().model()
    model, data = parallel(reference, mesh_of()), batch(101)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return gradient_differences(reference, model, data), _of_step(model, data)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_computes_them_together_where_there_is_a_graph(reentrant: bool) -> None:
    """The first forward of a reentrant one has none, and takes torch's linear."""
    for differences, calls in pool(2).run(_checkpointed, reentrant):
        assert_within([differences])
        assert (calls[BACKWARD], calls[ALONE], calls[COPY]) == (4, 0, 0)


# What keeps layers as they were: changes of the first MLP, of which each is computed by itself.


class _Weight(torch.Tensor):
    """As of a quantised weight."""


def _weight_of_another_class(mlp: nn.Module) -> None:
    layer = mlp.gate_proj
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(_Weight))
    assert type(layer.weight) is not nn.Parameter


def _other_forward(mlp: nn.Module) -> None:
    mlp.gate_proj.forward = MethodType(ColumnParallelLinear.forward, mlp.gate_proj)


CHANGES: dict[str, Callable[[Any], object]] = {
    "hook": lambda mlp: mlp.gate_proj.register_forward_hook(lambda layer, args, output: output),
    "pre-hook": lambda mlp: mlp.up_proj.register_forward_pre_hook(lambda layer, args: args),
    "backward hook": lambda mlp: mlp.up_proj.register_full_backward_hook(
        lambda layer, grads, _: grads
    ),
    "another forward": _other_forward,
    "weight of another class": _weight_of_another_class,
}


def _changed(name: str) -> tuple[Counter[str], bool]:
    model, data = parallel(Tiny(dtype=torch.float32).model(), mesh_of()), batch(101)
    CHANGES[name](model.model.layers[0].mlp)
    return _of_step(model, data), _has_bits_of_before(model, data)


@pytest.mark.parametrize("name", CHANGES)
def test_layers_that_something_stands_around_are_computed_by_themselves(name: str) -> None:
    for calls, same in pool(2).run(_changed, name):
        assert (calls[TOGETHER], calls[ALONE]) == (3, 2)
        assert same


def _under_autocast() -> tuple[Counter[str], bool]:
    model, data = parallel(Tiny(dtype=torch.float32).model(), mesh_of()), batch(101)
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    return _of_step(model, data), _has_bits_of_before(model, data)


def test_under_autocast_layers_are_computed_by_themselves() -> None:
    for calls, same in pool(2).run(_under_autocast):
        assert (calls[TOGETHER], calls[COPY]) == (0, 0)
        assert same


def _adapted(targets: list[str]) -> tuple[Counter[str], bool]:
    model, data = parallel(Tiny().model(), mesh_of()), batch(101)
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    return _of_step(model, data), _has_bits_of_before(model, data)


@pytest.mark.parametrize(
    ("targets", "together"), [(["q_proj", "v_proj"], 2), (["down_proj"], 2), (["up_proj"], 1)]
)
def test_layers_beside_an_adapted_one_are_computed_by_themselves(
    targets: list[str], together: int
) -> None:
    """The first layer's input needs no gradient: all below its adapters is frozen."""
    for calls, same in pool(2).run(_adapted, targets):
        assert (calls[TOGETHER], calls[COPY]) == (together, 0)
        assert same


# What reads other hidden states, or changes them, is as in one process.


def _changes_in_place(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, args: (args[0].mul_(2),))


def _changes_in_place_later(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.mlp.gate_proj.register_forward_pre_hook(lambda module, args: (args[0].mul_(2),))


def _changes_data(model: nn.Module) -> None:
    """Autograd does not count this change."""

    def double(module: nn.Module, args: tuple[torch.Tensor]) -> None:
        args[0].data.mul_(2)

    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(double)


def _recomputed_by_class(model: nn.Module) -> None:
    """In another class, since those of transformers are those of other tests too."""

    class Recomputed(LlamaMLP):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, hidden, use_reentrant=False)

    for layer in model.model.layers:
        layer.mlp.__class__ = Recomputed


def _joined(module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    gate, up = nn.functional.linear(hidden, module.joined).chunk(2, -1)
    return module.down_proj(module.act_fn(gate) * up)


def _joins(model: nn.Module) -> None:
    """Layers that are no longer there, nor trained."""
    for layer in model.model.layers:
        mlp = layer.mlp
        mlp.joined = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach()
        mlp.forward = MethodType(_joined, mlp)
        del mlp.gate_proj, mlp.up_proj


READERS = {
    "in place": _changes_in_place,
    "in place, by a layer": _changes_in_place_later,
    "data": _changes_data,
    "recomputed by its class": _recomputed_by_class,
    "joined": _joins,
}


def _with_reader(name: str) -> tuple[dict[str, float], float]:
    reference, data = Tiny().model(), batch(101)
    model = parallel(reference, mesh_of())
    for each in (reference, model):
        READERS[name](each)
    differences = gradient_differences(reference, model, data)
    with torch.inference_mode():
        ours, theirs = (each.eval()(data["input_ids"]).logits for each in (model, reference))
    return differences, difference(ours, theirs)


@pytest.mark.parametrize("name", READERS)
def test_a_layer_that_reads_something_else_computes_that(name: str) -> None:
    for differences, of_logits in pool(2).run(_with_reader, name):
        assert_within([{**differences, "logits": of_logits}])


def _compiled() -> tuple[dict[str, float], Counter[str]]:
    reference = Tiny(layers=1).model()
    model, data = parallel(reference, mesh_of()), batch(101)
    for each in (reference, model):
        _changes_in_place(each)
    model.model.layers[0].compile(fullgraph=True, backend="aot_eager")
    found = gradient_differences(reference, model, data), _of_step(model, data)
    torch._dynamo.reset()
    return found


def test_compiled_layers_compute_them_together_without_a_graph_break() -> None:
    """Also behind a hook: the compiler does not say how often it changed a tensor in place."""
    for differences, calls in pool(2).run(_compiled):
        assert_within([differences])
        assert (calls[TOGETHER], calls[BACKWARD], calls[ALONE], calls[COPY]) == (2, 2, 0, 0)


# What a forward that raises leaves behind.


class _Saved:
    """A tensor that a graph keeps for backward."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # a graph that holds itself would stay


def _interrupted(error: type[BaseException], invariant: bool) -> tuple[int, int, dict[str, float]]:
    """How much a forward that raises between the layers of an MLP has saved, and what is left."""
    reference = Tiny(inner=145, dtype=torch.float32).model()
    options = {"invariant": px.Invariant(8)} if invariant else {}
    model, data = parallel(reference, mesh_of(), **options), batch(101)
    saved: list[weakref.ref[_Saved]] = []

    def save(tensor: torch.Tensor) -> _Saved:
        packed = _Saved(tensor)
        saved.append(weakref.ref(packed))
        return packed

    def interrupt(module: nn.Module, args: tuple[torch.Tensor]) -> None:
        raise error

    hook = model.model.layers[1].mlp.act_fn.register_forward_pre_hook(interrupt)
    with saved_tensors_hooks(save, lambda packed: packed.tensor), suppress(error):
        model(**data)
    hook.remove()
    gc.collect()
    left = sum(each() is not None for each in saved)
    return len(saved), left, gradient_differences(reference, copy.deepcopy(model), data)


@pytest.mark.parametrize("invariant", [False, True])
def test_a_forward_that_raises_keeps_no_graph(invariant: bool) -> None:
    """As one that runs out of memory, so that a smaller batch has all of it."""
    for saved, left, differences in pool(2).run(_interrupted, RuntimeError, invariant):
        assert saved > 0
        assert left == 0
        assert_within([differences], 1e-4)


@pytest.mark.parametrize("invariant", [False, True])
def test_a_model_that_was_interrupted_can_be_copied(invariant: bool) -> None:
    for _, _, differences in pool(2).run(_interrupted, KeyboardInterrupt, invariant):
        assert_within([differences], 1e-4)


def _evaluated(mode: str) -> tuple[float, Counter[str]]:
    reference, ids = Tiny().model().eval(), batch(101)["input_ids"]
    model = parallel(reference, mesh_of()).eval()
    context = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": nullcontext}
    found: list[torch.Tensor] = []
    with context[mode]():
        calls = _calls(lambda: found.append(model(ids).logits))
        expected = reference(ids).logits
    return difference(found[0], expected), calls


@pytest.mark.parametrize(("mode", "together"), [("no_grad", 0), ("inference", 0), ("grad", 4)])
def test_only_what_may_have_a_backward_is_computed_together(mode: str, together: int) -> None:
    for of_logits, calls in pool(2).run(_evaluated, mode):
        assert of_logits <= 1e-10
        assert (calls[TOGETHER], calls[COPY]) == (together, 0)


def _alone(sequence_parallel: bool) -> Counter[str]:
    model = parallel(Tiny().model(), mesh_of(), sequence_parallel=sequence_parallel)
    return _of_step(model, batch(101))


def test_one_rank_and_sequence_parallelism_compute_layers_by_themselves() -> None:
    for calls in (*pool(1).run(_alone, False), *pool(2).run(_alone, True)):
        assert (calls[TOGETHER], calls[ALONE]) == (0, 10)
