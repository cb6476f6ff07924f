"""Several backwards of adapters on a parallel model, and one that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import pool
from reference import assert_within, batch, worst
from reference_lora import ALL, TINY, adapted, gradient_errors, plain

import parallel_ext as px
from parallel_ext.parallel.state import state_of


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("in backward")


def _several_backwards(directory: Path, how: str, drop_pending: bool) -> dict[str, float]:
    """Gradients that two batches leave behind, against PEFT's of both."""
    model = adapted(target_modules=[*ALL, "lm_head", "embed_tokens"])
    model.save_pretrained(directory)
    reference = plain(directory).train()
    ones = [batch(TINY.vocab_size, seed=seed) for seed in (3, 4)]
    model.train()
    if how == "no_sync":
        with px.no_sync(model):
            model(**ones[0]).loss.backward()
        if drop_pending:
            state_of(model).partials._pending = {}
        model(**ones[1]).loss.backward()
    elif how == "one after the other":
        for one in ones:
            model(**one).loss.backward()
    else:  # a backward that raises leaves nothing behind
        hook = model.base_model.model.model.layers[0].register_forward_hook(
            lambda module, args, output: _Fails.apply(output)
        )
        with pytest.raises(ArithmeticError):
            model(**ones[0]).loss.backward()
        hook.remove()
        model.zero_grad()
        for one in ones:
            model(**one).loss.backward()
    for one in ones:
        reference(**one).loss.backward()
    return gradient_errors(
        model, {n: p.grad for n, p in reference.named_parameters() if p.requires_grad}
    )


@pytest.mark.parametrize("how", ["no_sync", "one after the other", "after one that raised"])
def test_several_backwards_add_up_as_in_peft(tmp_path: Path, how: str) -> None:
    assert_within(pool(2).run(_several_backwards, tmp_path, how, False), 1e-9)


def test_the_sum_of_backwards_notices_a_lost_part(tmp_path: Path) -> None:
    found = pool(2).run(_several_backwards, tmp_path, "no_sync", True)
    assert max(worst(errors)[0] for errors in found) > 1e-2
