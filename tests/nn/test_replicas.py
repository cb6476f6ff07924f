"""The cycle through what several ranks hold, of which they compare a piece in each forward."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from parallel_ext.nn.replicas import ReplicaCycle


def test_a_pass_holds_no_parameter_that_the_model_has_no_more() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.register_buffer("scale", torch.ones(2))
    cycle = ReplicaCycle((0, 1), world_size=2, buffers=["scale"])
    first = cycle.now(model)
    cycle.done()
    old = weakref.ref(model[1].weight), weakref.ref(model.scale)
    model[1].weight, model.scale = nn.Parameter(torch.zeros(3, 3)), torch.zeros(3)
    gc.collect()
    assert [each() for each in old] == [None, None]
    names = [first.name]
    while (piece := cycle.now(model)).name not in names:
        names.append(piece.name)
        cycle.done()
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias", "scale"]
