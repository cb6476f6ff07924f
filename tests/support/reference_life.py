"""A model from its first save to its last, held against one process all the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from reference import (
    batch,
    difference,
    gradients_of,
    parallel,
    saved_tensors,
    shard_differences,
    worst,
)
from reference_mixtral import Layout
from torch import nn

import parallel_ext as px
from parallel_ext.parallel.state import is_parallel

STEPS = 2


def with_head_bias(model: Any) -> Any:
    """The model with a bias in its head, as HuggingFace's classes have none."""
    bias = torch.linspace(-1, 1, model.config.vocab_size).to(model.lm_head.weight.dtype)
    model.lm_head.bias = nn.Parameter(bias)
    return model


def optimizer_of(model: Any, name: str = "AdamW") -> torch.optim.Optimizer:
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # A smaller eps makes as much of the rounding of gradients near zero as of gradients.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-5)


def _carried_by_hand(
    optimizer: torch.optim.Optimizer, before: dict[str, Any], after: dict[str, Any]
) -> None:
    """Let an optimizer of a whole model go on, with zeros for the new rows."""
    for name, old in before.items():
        states = optimizer.state.pop(old)
        for key, state in states.items():
            if state.dim():
                states[key] = torch.zeros_like(after[name])
                states[key][: len(state)] = state[: len(states[key])]
        optimizer.state[after[name]] = states
        for group in optimizer.param_groups:
            group["params"] = [after[name] if p is old else p for p in group["params"]]


def resized(model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Resize with the same random numbers every time; returns the random state afterwards."""
    torch.manual_seed(5)
    if is_parallel(model):
        kwargs["allow_fewer_rows"] = True
    embedding = model.resize_token_embeddings(*args, **kwargs)
    assert embedding is model.get_input_embeddings()
    return torch.get_rng_state()


def _train(
    model: Any, optimizer: torch.optim.Optimizer, clip: Callable[[Any], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Losses and norms of some steps; the gradients of another backward stay."""
    numbers = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch(model.config.vocab_size, seed=step)).loss
        loss.backward()
        numbers[f"loss {step}"], numbers[f"norm {step}"] = loss.detach(), clip(model)
        optimizer.step()
    optimizer.zero_grad()
    model(**batch(model.config.vocab_size)).loss.backward()
    return numbers


def _saved(model: Any, reference: Any, folder: Path, mesh: px.Mesh) -> dict[str, float]:
    """The differences of the files from those that HuggingFace writes."""
    model.save_pretrained(folder / "ours")
    if mesh.rank == 0:
        reference.save_pretrained(folder / "theirs")
    mesh.control.barrier("reading what was saved")
    ours, theirs = saved_tensors(folder / "ours"), saved_tensors(folder / "theirs")
    found = {name: difference(ours[name], theirs[name]) for name in ours.keys() & theirs.keys()}
    found["names"] = float(ours.keys() != theirs.keys())
    config = transformers.AutoConfig.from_pretrained(folder / "ours")
    found["rows"] = float(config.vocab_size != len(reference.lm_head.weight))
    return found


def differences_in_life(
    tiny: Any,
    layout: Layout,
    folder: str,
    bias: bool = False,
    sizes: Sequence[int] = (),
    carried: str = "",
) -> dict[str, float]:
    """Save, train, resize, train on, save, load, evaluate; the differences from one process.

    Args:
        tiny: describes the model.
        layout: of the mesh.
        folder: to save in.
        bias: whether the head has one, without which HuggingFace's class would load it again.
        sizes: of the vocabulary, one after the other.
        carried: the optimizer that goes on from size to size; a new AdamW for each when empty.
    """
    mesh = layout.mesh() if dist.is_initialized() else px.init_mesh()
    reference = with_head_bias(tiny.model()) if bias else tiny.model()
    model = parallel(reference, mesh)
    found: dict[str, float] = {}

    def add(where: str, differences: dict[str, float]) -> None:
        found.update({f"{where}: {name}": value for name, value in differences.items()})

    def parameters() -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in reference.named_parameters()}

    first = _saved(model, reference, Path(folder) / "first", mesh)
    add("saved at first", {name: float(value != 0) for name, value in first.items()})
    kind = carried or "AdamW"
    optimizer, plain_optimizer = optimizer_of(model, kind), optimizer_of(reference, kind)
    for size in (tiny.vocab_size, *sizes):
        if size != model.config.vocab_size:
            model.zero_grad()
            reference.zero_grad()
            before = dict(reference.named_parameters())
            resized(reference, size)
            resized(model, size, **({"optimizer": optimizer} if carried else {}))
            if carried:
                _carried_by_hand(plain_optimizer, before, dict(reference.named_parameters()))
            else:
                optimizer, plain_optimizer = optimizer_of(model), optimizer_of(reference)
        ours = _train(model, optimizer, lambda each: px.clip_grad_norm_(each, 1.0))
        theirs = _train(
            reference,
            plain_optimizer,
            lambda each: nn.utils.clip_grad_norm_(each.parameters(), 1.0),
        )
        add(f"V={size}", {name: difference(ours[name], theirs[name]) for name in ours})
        add(f"V={size}, gradients", shard_differences(model, gradients_of(reference), True))
        add(f"V={size}, after {STEPS} steps", shard_differences(model, parameters(), False))
    last = Path(folder) / "last"
    add("saved at last", _saved(model, reference, last, mesh))
    ids = batch(model.config.vocab_size)["input_ids"]
    with torch.no_grad():
        logits = [each.eval()(ids).logits for each in (model, reference)]
    found["shape of the logits"] = float(logits[0].shape != logits[1].shape)
    found["logits"] = difference(*logits)
    if not bias:
        again = px.from_pretrained(last / "ours", mesh, dtype=torch.float64)
        found["loaded again"] = worst(shard_differences(again, parameters(), False))[0]
    return found
