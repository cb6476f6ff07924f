"""A forward that takes the place of a parallel model's own is refused before it computes."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import pytest
import torch
from ranks import pool
from reference import Tiny, batch, mesh_of, parallel
from torch import nn

import parallel_ext as px


def _forward_of_others(
    self: nn.Module, input_ids: torch.Tensor, labels: Any = None, **_: Any
) -> Any:
    """As a fused loss does it: the trunk, then the head's weight."""
    hidden = self.model(input_ids=input_ids).last_hidden_state
    return nn.functional.linear(hidden, self.lm_head.weight)


def _calling_ours(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return px.parallel.forward.forward(self, *args, **kwargs)


def _bypass(copied: bool) -> list[int]:
    tiny = Tiny(dtype=torch.float32)
    model = parallel(tiny.model(), mesh_of())
    if copied:
        model = copy.deepcopy(model)
    ran: list[int] = []
    model.model.layers[0].mlp.register_forward_hook(lambda *_: ran.append(1))
    of_batch, ids = batch(tiny.vocab_size), batch(tiny.vocab_size)["input_ids"]
    own = model.forward
    model.forward = MethodType(_forward_of_others, model)
    for inputs in ({"input_ids": ids}, of_batch):
        with pytest.raises(RuntimeError, match="was replaced by"):
            model(**inputs)
    embedded = model.model.embed_tokens.weight.new_ones(1, 3, 72)
    model.forward = MethodType(lambda self, **_: self.model(inputs_embeds=embedded), model)
    with pytest.raises(RuntimeError, match="was replaced by"):
        model()
    assert not ran  # not even one MLP
    model.model(input_ids=ids)  # which is not the model's forward
    model.forward = MethodType(_calling_ours, model)
    loss = model(**of_batch).loss
    model.forward = own
    assert torch.equal(loss, model(**of_batch).loss)
    return ran


@pytest.mark.parametrize("copied", [False, True])
def test_a_bypass_is_refused_before_it_computes(copied: bool) -> None:
    for ran in pool(2).run(_bypass, copied):
        assert len(ran) == 3
