"""``px.Invariant`` on the device: the bits of one process on two ranks that share it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from on_device import device_path, placed
from ranks import pool
from reference import Tiny, batch
from reference_invariant import BITS, assert_bits, digests
from reference_leaves import KINDS as LEAF_KINDS
from reference_leaves import leaf_batch
from reference_mixtral import TinyMixtral

import parallel_ext as px

# Heads of 8 features in fp32 and bf16, of which each of two ranks holds one or more.
KINDS = {
    "fp32": Tiny(dtype=torch.float32, heads=4, key_value_heads=2, inner=145),
    "bf16, tied": Tiny(dtype=torch.bfloat16, heads=8, key_value_heads=2, inner=96, tied=True),
    "biases": Tiny(dtype=torch.float32, heads=8, key_value_heads=2, bias=True),
    "large": Tiny(
        dtype=torch.bfloat16, heads=16, key_value_heads=4, inner=1000, vocab_size=4099, layers=1
    ),
}


@contextmanager
def _kernels_that_do_not_go_by_the_heads(device: torch.device) -> Iterator[None]:
    """What ``parallelize`` asks for on a GPU."""
    if device.type != "cuda":
        yield
        return
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    cuda = torch.backends.cuda
    torch.use_deterministic_algorithms(True)
    switches = (cuda.enable_flash_sdp, cuda.enable_cudnn_sdp, cuda.enable_math_sdp)
    for switch in switches:
        switch(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        for switch in switches:
            switch(True)


def _train(tiny: Tiny, device: torch.device, invariant: bool = True) -> BITS:
    with device_path(device), _kernels_that_do_not_go_by_the_heads(device):
        mesh = px.init_mesh(tp=torch.distributed.get_world_size(), device=device)
        rules = px.Invariant(8) if invariant else None
        model = px.parallelize(tiny.model().to(device), mesh, invariant=rules)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        log = []
        for step in range(3):
            data = placed(batch(tiny.vocab_size, 2, 16, seed=step), device)
            loss = model(**data).loss
            loss.backward()
            norm = px.clip_grad_norm_(model, 0.5)
            optimizer.step()
            log.append((loss.item().hex(), norm.item().hex()))
            if step < 2:
                optimizer.zero_grad()
        return log, digests(model, optimizer), px.digest(model) if invariant else None


@pytest.mark.parametrize("kind", ["bf16, tied", "biases", "large"])
def test_two_ranks_have_the_bits_of_one_process(kind: str, device: torch.device) -> None:
    (whole,) = pool(1).run(_train, KINDS[kind], device)
    assert_bits(pool(2).run(_train, KINDS[kind], device), whole)


def _train_leaves(kind: str, tp: int, device: torch.device) -> tuple[list[str], str]:
    """Losses of steps, and ``px.digest`` after them."""
    with device_path(device), _kernels_that_do_not_go_by_the_heads(device):
        tiny = LEAF_KINDS[kind]
        ep = tp if isinstance(tiny, TinyMixtral) else 1
        mesh = px.init_mesh(tp=tp, ep=ep, device=device)
        model = px.parallelize(tiny.model().to(device), mesh, invariant=px.Invariant(8, leaves=5))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(3):
            data = placed(leaf_batch(tiny.vocab_size, step), device)
            losses.append(px.train_leaves(model, data).item().hex())
            px.clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return losses, px.digest(model)


@pytest.mark.parametrize(
    ("kind", "tp"), [("odd", 1), ("bf16", 2), ("bf16 mixtral", 1), ("balanced qwen3_moe", 2)]
)
def test_leaves_of_two_ranks_have_the_bits_of_one_process(
    kind: str, tp: int, device: torch.device
) -> None:
    (whole,) = pool(1).run(_train_leaves, kind, 1, device)
    assert pool(2).run(_train_leaves, kind, tp, device) == [whole, whole]


def test_the_comparison_notices_the_ordinary_sums(device: torch.device) -> None:
    (whole,) = pool(1).run(_train, KINDS["fp32"], device, False)
    with pytest.raises(AssertionError):
        assert_bits(pool(2).run(_train, KINDS["fp32"], device, False), whole)
