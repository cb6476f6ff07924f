"""What steps and clipping leave and take of the GPU's memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from on_device import placed
from reference import Tiny, parallel
from reference_mixtral import TinyMixtral, TinyQwen3Moe, batches

import parallel_ext as px

MODELS = {"Llama": Tiny(), "Mixtral": TinyMixtral(), "Qwen3-MoE": TinyQwen3Moe()}


@pytest.mark.parametrize("tiny", MODELS.values(), ids=MODELS)
def test_steps_leave_no_memory_behind(tiny: Any, cuda: torch.device) -> None:
    model = parallel(tiny.model().to(cuda), px.init_mesh(device=cuda))
    optimizer = torch.optim.AdamW(model.parameters())
    data = placed(batches(tiny, 1)[0], cuda)
    after = []
    for _ in range(30):
        model(**data).loss.backward()
        px.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        after.append(torch.cuda.memory_allocated())
    assert max(after[15:]) <= max(after[:15])  # Python frees what refers to itself now and then


def test_clipping_makes_no_copies_of_gradients(cuda: torch.device) -> None:
    model = parallel(
        Tiny(vocab_size=2**20, dtype=torch.bfloat16).model(), px.init_mesh(device=cuda)
    )
    for each in model.parameters():
        each.grad = torch.randn_like(each)
    gradients = sum(each.grad.nbytes for each in model.parameters())
    px.clip_grad_norm_(model, 1.0)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    px.clip_grad_norm_(model, 1.0)
    assert torch.cuda.max_memory_allocated() - before < gradients / 8
