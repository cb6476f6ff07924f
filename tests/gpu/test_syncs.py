"""How much an op asks of a GPU: calls of ATen, each a launch or more, and waits of the host.

``budget.json`` holds what was measured. It may only fall: a change that asks for more fails, and
one that asks for less lowers the numbers. ``python tests/gpu/test_syncs.py`` writes them, and how
many tests this folder has.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

if __name__ == "__main__":
    sys.path[:0] = [str(each) for each in Path(__file__).parents[1].iterdir() if each.is_dir()]

from on_device import CPU, device_path, placed
from op_samples import REGISTERED, samples_of
from reference import Tiny, parallel
from reference_mixtral import TinyMixtral, batches
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

import parallel_ext as px
from parallel_ext import ops

BUDGET = Path(__file__).with_name("budget.json")
MODELS = {"a step of Llama": Tiny(), "a step of Mixtral": TinyMixtral()}
# Calls that start nothing on a GPU.
FREE = (
    "as_strided view _unsafe_view reshape flatten expand select slice narrow t transpose permute "
    "unsqueeze squeeze detach alias empty empty_strided empty_like resize_ to resolve_conj "
    "resolve_neg result_type lift_fresh set_ unbind split"
)
FREE_CALLS = {f"aten::{name}" for name in FREE.split()}
WAITS = {"aten::_local_scalar_dense", "aten::nonzero"}


def _versions() -> str:
    """Name what else decides how many calls there are."""
    return f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}"


def _is_call(event: FunctionEvent) -> bool:
    """Whether it is a call of ATen that no call within it makes for it."""

    def does_something(each: FunctionEvent) -> bool:
        return each.name.startswith("aten::") and each.name not in FREE_CALLS

    return does_something(event) and not any(map(does_something, event.cpu_children))


def _measured(function: Callable[[], Any]) -> dict[str, int]:
    """Count calls, and waits of the host: values that C++ or Python reads."""
    reads = 0

    def counted(read: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            nonlocal reads
            reads += 1
            return read(*args, **kwargs)

        return counting

    with (
        mock.patch.object(torch.Tensor, "tolist", counted(torch.Tensor.tolist)),
        mock.patch.object(torch.Tensor, "cpu", counted(torch.Tensor.cpu)),
        profile(activities=[ProfilerActivity.CPU]) as profiler,
    ):
        function()
    events = profiler.events()
    waits = sum(event.name in WAITS for event in events)
    return {"calls": sum(map(_is_call, events)), "waits": waits + reads}


def _op(name: str, device: torch.device) -> Callable[[], Any]:
    """The op's usual call, without its backward."""
    torch.manual_seed(0)
    sample = placed(samples_of(name, ops.ALONE)[0], device)
    return lambda: getattr(torch.ops.parallel_ext, name)(*sample)


def _step(name: str, device: torch.device) -> Callable[[], Any]:
    """Forward, backward and clipping, after a first step."""
    tiny = MODELS[name]
    model = parallel(tiny.model().to(device), px.init_mesh(device=device))
    data = placed(batches(tiny, 1)[0], device)

    def step() -> None:
        model(**data).loss.backward()
        px.clip_grad_norm_(model, 1.0)

    step()
    return step


def _work(name: str, device: torch.device) -> Callable[[], Any]:
    return _step(name, device) if name in MODELS else _op(name, device)


def _verdict(measured: dict[str, int], budget: dict[str, int]) -> str:
    """What is wrong, or nothing."""
    more = [f"{measured[kind]} {kind}, {most} allowed" for kind, most in budget.items()]
    if any(measured[kind] > most for kind, most in budget.items()):
        return f"asks for more: {', '.join(more)}"
    if measured != budget:
        return f"asks for less: {', '.join(more)}; run `python tests/gpu/test_syncs.py` to lower it"
    return ""


@pytest.fixture(scope="module")
def budget() -> dict[str, Any]:
    return json.loads(BUDGET.read_text())


def test_every_op_has_a_budget(budget: dict[str, Any]) -> None:
    assert sorted(budget["cpu"]) == sorted([*REGISTERED, *MODELS])
    assert set(budget["cuda waits"]) <= set(budget["cpu"])


@pytest.mark.parametrize("name", [*REGISTERED, *MODELS])
def test_an_op_asks_for_what_its_budget_allows(
    name: str, budget: dict[str, Any], device: torch.device
) -> None:
    if device.type != "cpu":
        pytest.skip("the budget counts calls of ATen on the CPU; a GPU has kernels instead of some")
    if _versions() != budget["versions"]:
        pytest.skip(f"the budget was measured with {budget['versions']}")
    verdict = _verdict(_measured(_work(name, device)), budget["cpu"][name])
    assert not verdict, f"{name} {verdict}"


def test_more_and_less_than_the_budget_are_noticed() -> None:
    table = torch.arange(3)
    measured = _measured(lambda: (table + 1).sum().item() + len(table.tolist()))
    assert measured == {"calls": 3, "waits": 2}
    assert "more" in _verdict(measured, {"calls": 2, "waits": 2})
    assert "more" in _verdict(measured, {"calls": 4, "waits": 1})
    assert "less" in _verdict(measured, {"calls": 4, "waits": 2})
    assert _verdict(measured, measured) == ""


@contextmanager
def _waits_told() -> Iterator[list[warnings.WarningMessage]]:
    """Collect torch's warnings of waits for a GPU."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield told
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", REGISTERED)
def test_an_op_waits_for_a_gpu_no_more_than_it_may(
    name: str, budget: dict[str, Any], cuda: torch.device
) -> None:
    work = _work(name, cuda)
    work()
    with _waits_told() as told:
        work()
    found = [str(each.message) for each in told if "called a synchronizing" in str(each.message)]
    assert len(found) <= budget["cuda waits"].get(name, 0), found


if __name__ == "__main__":
    torch.set_num_threads(1)  # as in tests: ops by blocks ask for more or less by it
    with device_path(CPU):
        numbers = {name: _measured(_work(name, CPU)) for name in [*REGISTERED, *MODELS]}
    known = json.loads(BUDGET.read_text()) if BUDGET.exists() else {"cuda waits": {}}
    collect = [sys.executable, "-m", "pytest", "-q", "--collect-only", str(BUDGET.parent)]
    listed = subprocess.run(collect, capture_output=True, text=True, check=True).stdout
    tests = sum("::" in line for line in listed.splitlines())
    known |= {"versions": _versions(), "cpu": numbers, "tests": tests}
    rows = [f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in numbers.items()]
    rest = [
        f"  {json.dumps(key)}: {json.dumps(known[key])}"
        for key in ("tests", "versions", "cuda waits")
    ]
    table = '  "cpu": {\n' + ",\n".join(rows) + "\n  }"
    BUDGET.write_text("{\n" + ",\n".join([*rest, table]) + "\n}\n")
