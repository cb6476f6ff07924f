"""A save behind training holds the device's values at the call, whatever training makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from on_device import placed
from reference import parallel
from reference_mixtral import TinyMixtral, batches
from reference_training import LLAMA, optimizer_of

import parallel_ext as px


def _trained(tiny: Any, model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    device = next(model.parameters()).device
    for step in steps:
        data = placed(batches(tiny, 1, seed=step)[0], device)
        model(**data).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _tensors(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return copies of all weights and moments."""
    weights = list(model.parameters())
    moments = [optimizer.state[each][name] for each in weights for name in ("exp_avg", "step")]
    return [each.detach().cpu().clone() for each in (*weights, *moments)]


@pytest.mark.parametrize("moved_later", [False, True], ids=["mesh of the device", "mesh of a CPU"])
@pytest.mark.parametrize("tiny", [LLAMA, TinyMixtral(layers=1)], ids=["Llama", "Mixtral"])
def test_a_save_holds_the_weights_at_the_call(
    tiny: Any, moved_later: bool, device: torch.device, tmp_path: Path
) -> None:
    # A mesh made for the CPU does not tell where the tensors are that a save copies.
    mesh = px.init_mesh(device="cpu" if moved_later else device)
    model = parallel(tiny.model().to(device), mesh)
    optimizer = optimizer_of(model, "AdamW")
    _trained(tiny, model, optimizer, range(2))
    expected = _tensors(model, optimizer)
    if device.type == "cuda":
        torch.cuda._sleep(2**28)  # what is copied behind this has not been copied at the return
    px.save_checkpoint(tmp_path, 2, model, optimizer, asynchronous=True)
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    _trained(tiny, model, optimizer, range(2, 4))
    px.wait_for_checkpoint(model)
    assert any(map(torch.ne, map(torch.sum, _tensors(model, optimizer)), map(torch.sum, expected)))
    px.load_checkpoint(tmp_path, model, optimizer)
    assert all(map(torch.equal, _tensors(model, optimizer), expected))
