"""What the planner says of a CogAgent is what its ranks hold and send."""

from __future__ import annotations

import pytest
import torch
from planned_steps import (
    adapter,
    as_planned,
    assert_few_layers_tell_of_many,
    bytes_held,
    counted,
    planned,
)
from ranks import pool
from reference_cogagent import tiny_config

import parallel_ext as px
from parallel_ext.models.cogagent import CogAgentForCausalLM
from parallel_ext.parallel.estimate import Planner, Step

ROWS, TOKENS = 3, 71
SIZES = {"hidden_size": 128, "intermediate_size": 211, "vocab_size": 509, "num_hidden_layers": 4}


def _measured(tp: int, step: Step) -> tuple[int, int, dict[str, int], list[int]]:
    """Bytes of weights and optimizer here, what a step counts, and the peaks of all ranks."""
    torch.manual_seed(0)
    model = as_planned(CogAgentForCausalLM(tiny_config(**SIZES)), px.init_mesh(tp=tp), step)
    ids = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS)
    batch = {"input_ids": ids, "labels": ids, **model.with_an_image_each(ROWS, TOKENS)}
    sent = counted(model, batch)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    optimizer.step()
    held = bytes_held(model, optimizer)
    model.zero_grad()
    profile = px.profile_step(model, batch, warmup=1, show=False)
    return *held, sent, [rank.memory.peak for rank in profile.ranks]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("tp", "dp", "zero", "r", "checkpointing", "dtype", "own"),
    [
        (1, 1, 2, None, False, torch.float32, False),
        (2, 1, 2, None, False, torch.float32, False),
        (2, 1, 2, None, True, torch.bfloat16, False),
        (1, 1, 2, 3, True, torch.float32, False),
        (2, 1, 2, 3, False, torch.float32, False),
        (1, 3, 3, None, True, torch.float32, False),
        (1, 2, 2, 3, False, torch.float32, False),
        (2, 2, 3, 3, True, torch.float32, False),
        (2, 1, 2, None, False, torch.float32, True),
        (4, 1, 2, None, True, torch.float32, True),
        (2, 1, 2, 3, True, torch.float32, True),
        (2, 2, 2, None, False, torch.float32, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (4, 1, 2, None, True, torch.float32, False),
                (1, 2, 2, None, False, torch.float32, False),
                (2, 2, 2, None, True, torch.float32, False),
                (2, 2, 3, None, False, torch.bfloat16, False),
            ]
        ),
    ],
)
def test_a_step_holds_and_sends_what_was_planned(
    tp: int, dp: int, zero: int, r: int | None, checkpointing: bool, dtype: torch.dtype, own: bool
) -> None:
    step = Step(
        **{"rows": ROWS, "tokens": TOKENS, "dtype": dtype, "zero": zero},
        **{"checkpointing": checkpointing, "adapt": adapter(r), "sequence_parallel": own},
    )
    found = pool(tp * dp).run(_measured, tp, step)
    config = tiny_config(**SIZES)
    planner = Planner(config)
    estimate = planner.estimate(tp * dp, tp, 1, step)
    weights, states, sent, (peaks, *_) = zip(*found, strict=True)
    assert estimate.weights == (max(weights), min(weights))
    assert estimate.optimizer == (max(states), min(states))
    assert [sent[0], sent[-1]] == planned(config, tp * dp, tp, 1, step)
    without = Step(**{**vars(step), "optimizer": "sgd"})
    peak = planner.estimate(tp * dp, tp, 1, without).peak
    tolerance = 0.05 if dtype == torch.float32 else 0.1  # the CPU's products in bf16 take room
    if zero == 3:  # gloo frees what was gathered at any time, so that peaks differ by 20 %
        tolerance = 0.25
    print(f"{peak} bytes planned, {peaks} measured")
    assert peak == pytest.approx((max(peaks), min(peaks)), rel=tolerance)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("r", [None, 4])
def test_few_layers_tell_of_many(checkpointing: bool, r: int | None) -> None:
    step = Step(rows=2, tokens=20, checkpointing=checkpointing, adapt=adapter(r))
    config = tiny_config(num_hidden_layers=5)
    assert_few_layers_tell_of_many(config, step)


def test_what_is_not_planned_is_refused() -> None:
    planner = Planner(tiny_config())
    with pytest.raises(ValueError, match="12 tokens has no room for an image .* give at least 13"):
        planner.estimate(1, 1, 1, Step(tokens=12))
