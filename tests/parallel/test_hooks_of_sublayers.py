"""Hooks of others on attentions and MLPs see hidden states and gradients of one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import pool
from reference import Tiny, assert_within, batch, difference, mesh_of, parallel
from reference_lora import plain, with_adapter
from test_specs import OfSpec, in_fp64
from torch import nn


class _Beside(nn.Module):
    """An adapter beside a sublayer, which reads the same hidden states; a hook runs it."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.low, self.high = (
            nn.Linear(*sides, bias=False, dtype=dtype) for sides in ((width, 3), (3, width))
        )

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        added = self.high(torch.tanh(self.low(hidden))).to(hidden.dtype)
        if isinstance(output, tuple):
            return (output[0] + added, *output[1:])
        return output + added


def _adapt(model: nn.Module, of: str, with_hooks_inside: bool = False) -> _Beside:
    model = getattr(model, "base_model", model)
    layer = next(each for each in model.modules() if hasattr(each, "self_attn"))
    beside = _Beside(model.config.hidden_size, model.dtype)
    module = getattr(layer, of)
    module.register_forward_hook(beside, with_kwargs=True)
    if with_hooks_inside:
        first = module.q_proj if of == "self_attn" else module.gate_proj
        first.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    return beside


def _gradients(
    model: nn.Module, beside: _Beside, data: dict[str, Any], autocast: bool = False
) -> dict[str, torch.Tensor]:
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        loss = model(**data).loss
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    own = {f"adapter {name}": each.grad for name, each in beside.named_parameters()}
    return {"loss": loss.detach(), "norm": norm, **own}


TINY = {
    "llama": Tiny(),
    "llama, one key-value head": Tiny(key_value_heads=1, bias=True),
    "gemma2": OfSpec("gemma2"),
}


@in_fp64()
def _with_adapter(name: str, of: str, how: str, folder: Path | None = None) -> dict[str, float]:
    tiny = TINY[name]
    models = [tiny.model(), parallel(tiny.model(), mesh_of())]
    if folder is not None:
        models[1] = with_adapter(models[1], target_modules=["gate_proj", "q_proj"])
        models[1].save_pretrained(folder)
        models[0] = plain(folder, tiny)
    found = []
    for model in models:
        beside = _adapt(model, of, how == "hooks inside")
        if how == "checkpointing":
            model.gradient_checkpointing_enable()
        found.append(_gradients(model, beside, batch(tiny.vocab_size), how == "autocast"))
    return {key: difference(found[1][key], value) for key, value in found[0].items()}


@pytest.mark.parametrize("how", ["alone", "hooks inside", "autocast", "checkpointing"])
@pytest.mark.parametrize("of", ["self_attn", "mlp"])
def test_an_adapter_beside_a_sublayer_trains_as_in_one_process(of: str, how: str) -> None:
    found = pool(2).run(_with_adapter, "llama", of, how)
    assert_within(found, 2e-2 if how == "autocast" else 1e-10)


@pytest.mark.parametrize("of", ["self_attn", "mlp"])
def test_so_it_does_beside_lora(of: str, tmp_path: Path) -> None:
    assert_within(pool(2).run(_with_adapter, "llama", of, "LoRA", tmp_path), 1e-10)


@pytest.mark.parametrize("name", [*TINY][1:])
@pytest.mark.parametrize("of", ["self_attn", "mlp"])
def test_so_it_does_in_other_models(name: str, of: str) -> None:
    assert_within(pool(3).run(_with_adapter, name, of, "alone"), 1e-10)


def _of_input(change: Callable[[torch.Tensor], Any]) -> dict[str, float]:
    tiny, found = Tiny(), []
    for model in (tiny.model(), parallel(tiny.model(), mesh_of())):
        seen: list[torch.Tensor] = []

        def look(module: nn.Module, of_input: tuple, of_output: tuple, seen: list = seen) -> Any:
            seen.append(of_input[0])
            return change(of_input[0])

        model.model.layers[1].mlp.register_full_backward_hook(look)
        model(**batch(tiny.vocab_size)).loss.backward()
        found.append({"seen": seen[0], "norm": nn.utils.clip_grad_norm_(model.parameters(), 1.0)})
    return {key: difference(found[1][key], value) for key, value in found[0].items()}


def _nothing(grad: torch.Tensor) -> None:
    return None


def _clamped(grad: torch.Tensor) -> tuple[torch.Tensor]:
    return (grad.clamp(-1e-5, 1e-5),)


@pytest.mark.parametrize("change", [_nothing, _clamped])
def test_a_backward_hook_sees_the_gradient_of_the_input(change: Callable) -> None:
    assert_within(pool(2).run(_of_input, change), 1e-10)


def _compiled_layers() -> list[int]:
    """How many graphs there are after each of two steps."""
    model = parallel(Tiny(layers=4).model(), mesh_of()).train()
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    for layer in model.model.layers:
        layer.compile(backend=backend)
    counts = []
    for _ in range(2):
        model(**batch(model.config.vocab_size), use_cache=False).loss.backward()
        counts.append(len(graphs))
    return counts


def test_equal_layers_are_compiled_once() -> None:
    """As those of the plain model."""
    assert pool(2).run(_compiled_layers) == [[1, 1], [1, 1]]
