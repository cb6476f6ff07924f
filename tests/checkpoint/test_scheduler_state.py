"""Schedulers and options of optimizers come back as they were saved, types included."""

from __future__ import annotations

import copy
import functools
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import quietly
from reference_training import Job, build
from torch.optim import lr_scheduler as schedulers

import parallel_ext as px
from parallel_ext.checkpoint.training_state import decode, encode


class _Warmup:
    """A rule with a state, which LambdaLR keeps."""

    def __init__(self, steps: float) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / self.steps)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, [_Warmup(math.inf), lambda step: 0.9**step]),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, _Warmup(9)),
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 5, 5]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, total_iters=4),
    "LinearLR": lambda o: schedulers.LinearLR(o),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o), schedulers.MultiStepLR(o, [1, 2])], [4]
    ),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 7),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o), SCHEDULERS["LambdaLR"](o)]
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 1e-3, 1e-2, 2, mode="exp_range", gamma=0.9),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, [1e-2, 2e-2], total_steps=9),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 8),
}
METRICS = [2.0, 2.5, 2.4, 2.0, 3.0, 4.0]


def test_every_scheduler_of_torch_is_tried() -> None:
    assert SCHEDULERS.keys() == set(schedulers.__all__) - {"LRScheduler"}


def _assert_same(found: Any, expected: Any) -> None:
    """Equal, and of the same types, all the way down."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            _assert_same(found[key], value)
        _assert_same(sorted(map(repr, found)), sorted(map(repr, expected)))  # 1 is 1.0 as a key
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            _assert_same(one, other)
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    else:
        assert found == expected or found != found and expected != expected


def _optimizer(model: Any, as_tensors: bool) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    rate = torch.tensor(1e-2, dtype=torch.float64) if as_tensors else 1e-2
    groups = [{"params": [first]}, {"params": others, "eps": 1e-6}]
    if as_tensors:
        return torch.optim.AdamW(groups, lr=rate, foreach=False, capturable=True)
    return torch.optim.SGD(groups, lr=rate, momentum=0.8)


def _steps(optimizer: Any, scheduler: Any, steps: range) -> list[list[float]]:
    """The rates of some steps."""
    rates = []
    with quietly():  # of steps of the scheduler before any of the optimizer
        for step in steps:
            scheduler.step(*[METRICS[step]] * isinstance(scheduler, schedulers.ReduceLROnPlateau))
            rates.append([float(group["lr"]) for group in optimizer.param_groups])
    return rates


@pytest.mark.parametrize("as_tensors", [False, True], ids=["", "tensors"])
def test_every_scheduler_goes_on(as_tensors: bool, tmp_path: Path) -> None:
    model, *_ = build(Job())
    for step, (name, make) in enumerate(SCHEDULERS.items()):
        if as_tensors and name == "CyclicLR":
            continue  # cycles a momentum that AdamW does not have
        optimizer = _optimizer(model, as_tensors)
        scheduler = make(optimizer)
        _steps(optimizer, scheduler, range(3))
        px.save_checkpoint(tmp_path, step, model, optimizer, scheduler)
        expected = copy.deepcopy(scheduler.state_dict())
        options = copy.deepcopy([{**g, "params": 0} for g in optimizer.param_groups])
        rates = _steps(optimizer, scheduler, range(3, 6))

        optimizer = _optimizer(model, as_tensors)
        scheduler = make(optimizer)
        px.load_checkpoint(tmp_path, model, optimizer, scheduler)
        _assert_same(scheduler.state_dict(), expected)
        _assert_same([{**g, "params": 0} for g in optimizer.param_groups], options)
        assert _steps(optimizer, scheduler, range(3, 6)) == rates, name


def test_a_scheduler_of_another_class_is_refused(tmp_path: Path) -> None:
    model, optimizer, scheduler, _ = build(Job())
    px.save_checkpoint(tmp_path, 1, model, optimizer, scheduler)
    with pytest.raises(px.CheckpointError, match="of 'CosineAnnealingLR' was saved, but .* StepLR"):
        px.load_checkpoint(tmp_path, model, optimizer, schedulers.StepLR(optimizer, 2))


# The encoding.

_PLAIN = st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.text() | st.floats()
_TENSORS = st.sampled_from(
    [
        torch.tensor(0.1),
        torch.tensor([[1.0, math.inf], [math.nan, -0.0]], dtype=torch.bfloat16),
        torch.empty(0, 3, dtype=torch.int64),
        torch.tensor([True, False]),
        torch.tensor(2**63 - 1),
    ]
)


def _nested(inner: Any) -> Any:
    lists = st.lists(inner, max_size=3)
    keys = st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False) | st.text()
    keys |= st.tuples(st.integers()) | st.just("$type")
    counters = st.dictionaries(st.integers(), st.integers(), max_size=3).map(Counter)
    return lists | lists.map(tuple) | st.dictionaries(keys, inner, max_size=3) | counters


@given(st.recursive(_PLAIN | _TENSORS, _nested, max_leaves=12))
def test_what_is_encoded_comes_back(value: Any) -> None:
    text = json.dumps(encode(value, "it"), allow_nan=False)
    found = decode(json.loads(text), "it")
    torch.testing.assert_close(  # knows that NaN is NaN
        [x for x in [found] if isinstance(x, torch.Tensor)],
        [x for x in [value] if isinstance(x, torch.Tensor)],
        rtol=0,
        atol=0,
        equal_nan=True,
    )
    assert repr(found) == repr(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"f": [1, functools.partial(int)]}, r"it\['f'\]\[1\] is a partial"),
        ({1, 2}, "it is a set"),
        (OrderedDict(), "it is a OrderedDict"),
        (torch.zeros(1001), r"it is a Tensor, \(1001,\), torch.float32"),
        (1j, "it is a complex"),
        (b"x", "it is a bytes"),
    ],
)
def test_what_cannot_be_encoded_is_refused_by_its_place(value: Any, message: str) -> None:
    with pytest.raises(px.CheckpointError, match=message):
        encode(value, "it")


@pytest.mark.parametrize(
    "value",
    [
        {"$type": "set", "items": []},
        {"$type": "builtins.eval", "items": ["1"]},
        {"$type": "tuple", "items": "ab"},
        {"$type": "tuple", "items": [], "more": 1},
        {"$type": ["tuple"], "items": []},
        {"$type": "float", "value": "1e3"},
        {"$type": "float", "value": ["inf"]},
        {"$type": "dict", "items": [[1, 2], [1, 3]]},
        {"$type": "dict", "items": [[[1], 2]]},
        {"$type": "dict", "items": [1]},
        {"$type": "tensor", "dtype": "F32", "shape": [3], "values": [1, 2]},
        {"$type": "tensor", "dtype": "F99", "shape": [1], "values": [1]},
        {"$type": "tensor", "dtype": "U8", "shape": [1], "values": ["x"]},
        functools.reduce(lambda inner, _: [inner], range(990), []),
    ],
)
def test_what_was_not_encoded_is_refused(value: Any) -> None:
    with pytest.raises(px.CheckpointError, match="here: not what a save writes"):
        decode(value, "here")
