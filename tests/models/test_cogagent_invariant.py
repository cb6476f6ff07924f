"""A CogAgent under ``px.Invariant`` has the bits of one process on any layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from ranks import pool
from reference import (
    FLOOR,
    difference,
    gradients_of,
    mesh_of,
    parallel,
    refusal,
    shard_differences,
    worst,
)
from reference_cogagent import (
    TWO_IMAGES,
    Row,
    batch_of,
    exact,
    frozen,
    picture,
    text,
    tiny_model,
)
from reference_leaves import Bits, Layout, assert_bits, bits_of, sweep

import parallel_ext as px
from parallel_ext import ops
from parallel_ext.models.cogagent import COGAGENT, PUBLISHED_COGAGENT
from parallel_ext.models.invariant import check_can_be_invariant
from parallel_ext.nn.blocks import BlockRowLinear
from parallel_ext.nn.forward_counter import ForwardCounter
from parallel_ext.nn.lora import input_dropout
from parallel_ext.parallel import invariant as replacing

INVARIANT = px.Invariant(8, leaves=4)
STEPS = 2
BATCHES = [
    [picture(6), text(9), Row(TWO_IMAGES, 2, cross=True), text(7, cross=True), text(4)],
    [text(5), text(6), text(4), picture(7), text(11, cross=True)],
]


HEADS_OF_16 = {
    "cross_compute_hidden_size": 64,
    "cross_vision_config": {"layers": 3, "width": 32, "head_width": 16},
}
"""For several threads, which heads of 8 have not on every CPU."""


def _model(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return frozen(tiny_model(**options).to(dtype).train())


def _train(
    tp: int,
    how: str = "",
    zero: int = 0,
    steps: Sequence[int] = range(STEPS),
    root: Path | None = None,
) -> Bits:
    """Train on this pool's ranks; resumed from ``root`` and saved there if not all steps run."""
    mesh = mesh_of(tp=tp)
    if how == "three threads":
        torch.set_num_threads(3)
    sizes = HEADS_OF_16 if "thread" in how else {}
    reference = _model(torch.bfloat16 if "bf16" in how else torch.float32, **sizes)
    model = px.parallelize(reference, mesh, invariant=INVARIANT)
    if "checkpointing" in how:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if "adapter" in how:
        torch.manual_seed(3)
        parts = {"lora_bias": True, "modules_to_save": ["vision_mlp"]} if "bias" in how else {}
        config = px.LoraConfig(r=3, lora_dropout=0.2, target_modules="all-linear", **parts)
        model = peft.get_peft_model(model, config).train()
    if zero:
        px.data_parallel(model, mesh, zero)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    if root is not None and steps[0] > 0:
        px.load_checkpoint(root, model, optimizer)
    log = []
    for step in steps:
        optimizer.zero_grad()
        whole = batch_of(BATCHES[step], "left")
        if "one forward" in how:
            loss = model(**whole).loss
            loss.backward()
        else:
            with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in how):
                loss = px.train_leaves(model, whole)
        log.append((loss.item().hex(), px.clip_grad_norm_(model, 0.5).item().hex()))
        optimizer.step()
    if root is not None and steps[-1] < STEPS - 1:
        px.save_checkpoint(root, steps[-1] + 1, model, optimizer)
    torch.set_num_threads(1)
    return log, px.digest(model), bits_of(model, optimizer, mesh)


@lru_cache
def _of_one_process(how: str = "") -> Bits:
    (whole,) = pool(1).run(_train, 1, how)
    return whole


@pytest.mark.parametrize("how", ["one forward", "one forward in bf16"])
def test_any_tp_has_the_bits_of_one_process(how: str) -> None:
    assert_bits(pool(3).run(_train, 3, how), _of_one_process(how))


def test_threads_have_the_bits_of_one() -> None:
    whole = _of_one_process("one thread")
    assert_bits(pool(4).run(_train, 2, "three threads"), whole)


WAYS = ["bf16", "autocast, checkpointing", "adapter, biases"]


@sweep(WAYS, [(3, 3, 0), (4, 2, 0), (3, 1, 0)], often=[(4, 2, 0)])
def test_leaves_have_the_bits_of_one_process(case: str, layouts: Sequence[Layout]) -> None:
    for ranks, tp, _ in layouts:
        assert_bits(pool(ranks).run(_train, tp, case), _of_one_process(case))


@sweep(
    ["zero"],
    [(ranks, tp, zero) for ranks, tp in ((2, 1), (4, 2)) for zero in (2, 3)],
    often=[(4, 2, 3)],
)
def test_zero_has_the_bits_of_one_process(case: str, layouts: Sequence[Layout]) -> None:
    for ranks, tp, zero in layouts:
        assert_bits(pool(ranks).run(_train, tp, "", zero), _of_one_process())


@pytest.mark.parametrize(
    ("how", "before", "after"), [("", (4, 2), (3, 1)), ("adapter, biases", (3, 3), (2, 2))]
)
def test_a_run_resumes_on_other_layouts_with_the_same_bits(
    how: str, before: tuple[int, int], after: tuple[int, int], tmp_path: Path
) -> None:
    log, digest, held = _of_one_process(how)
    pool(before[0]).run(_train, before[1], how, 0, (0,), tmp_path)
    resumed = pool(after[0]).run(_train, after[1], how, 0, (1,), tmp_path)
    assert_bits(resumed, (log[1:], digest, held))


def _summed(self: Any, input: torch.Tensor) -> torch.Tensor:
    output = ops.reduce_from_region(input @ self.weight.T, self.group)
    return output if self.bias is None else output + self.bias


BROKEN: dict[str, tuple[Any, str, Any, str]] = {
    "one product a rank": (BlockRowLinear, "forward", _summed, "one forward"),
    "torch's activations": (replacing, "_replace_activations", lambda module: None, "one forward"),
    "torch's layers": (replacing, "fix_replicated", lambda model: None, "three threads"),
}


def _train_broken(tp: int, what: str) -> Bits:
    *broken, how = BROKEN[what]
    if tp == 1:
        how = how.replace("three threads", "one thread")
    with mock.patch.object(*broken):
        return _train(tp, how)


@pytest.mark.parametrize("what", BROKEN)
def test_the_tests_above_notice(what: str) -> None:
    (whole,) = pool(1).run(_train_broken, 1, what)
    with pytest.raises(AssertionError):
        assert_bits(pool(3).run(_train_broken, 3, what), whole)


def _differences(leaves: bool) -> dict[str, float]:
    reference = exact(_model(torch.float64))
    model = parallel(reference, mesh_of(tp=2), invariant=INVARIANT)
    whole = batch_of(BATCHES[0], "left")
    loss = px.train_leaves(model, whole) if leaves else model(**whole).loss
    if not leaves:
        loss.backward()
    expected = reference(**whole).loss
    expected.backward()
    found = shard_differences(model, gradients_of(reference), True)
    found["the loss"] = (loss / expected - 1).abs().item()
    inputs = {name: value for name, value in whole.items() if name != "labels"}
    with torch.no_grad():
        logits, of_reference = (each.eval()(**inputs).logits for each in (model, reference))
    found["logits in eval mode"] = difference(logits, of_reference)
    return found


@pytest.mark.parametrize(("ranks", "leaves"), [(2, False), (4, True)])
def test_gradients_are_those_of_the_plain_model(ranks: int, leaves: bool) -> None:
    for found in pool(ranks).run(_differences, leaves):
        assert worst(found) < (FLOOR[torch.float64], "")


def _from_files(folder: Path) -> tuple[str, str, str]:
    mesh, reference = mesh_of(), _model()
    if mesh.rank == 0:
        reference.save_pretrained(folder / "plain")
    mesh.control.barrier("saved")
    model = px.from_pretrained(folder / "plain", mesh, dtype=torch.float32, invariant=INVARIANT)
    px.train_leaves(frozen(model).train(), batch_of(BATCHES[0], "left"))
    found = px.digest(model), str(px.clip_grad_norm_(model, 0.5).item().hex())
    model.save_pretrained(folder / "ours")
    again = px.from_pretrained(folder / "ours", mesh, dtype=torch.float32, invariant=INVARIANT)
    return *found, px.digest(again)


def test_a_model_from_files_has_the_bits_of_one_process(tmp_path: Path) -> None:
    ((digest, norm, again),) = pool(1).run(_from_files, tmp_path / "1")
    assert again == digest
    assert pool(3).run(_from_files, tmp_path / "3") == [(digest, norm, digest)] * 3


def test_each_leaf_has_masks_of_its_own() -> None:
    base = SimpleNamespace(layouts={"weight": SimpleNamespace(dim=0)})
    forwards = ForwardCounter()
    forwards.count, forwards.rows = 1, None
    masks = []
    for first_row, rows in ((0, 9), (2, 4), (4, 0)):
        forwards.first_row = first_row
        dropout = input_dropout(base, torch.ones(rows, 64), 0.5, 2**63 - 1, forwards)
        masks.append(ops.seeded_dropout(torch.ones(rows, 64), dropout))
    first, second, none = masks
    assert none.shape == (0, 64)
    assert not any(torch.equal(a, b) for a in first for b in second)


def _refusals() -> list[str]:
    calls = (
        lambda: px.train_leaves(
            px.parallelize(tiny_model().float().train(), mesh_of(tp=2), invariant=INVARIANT),
            batch_of(BATCHES[0], "left"),
        ),
        lambda: px.parallelize(
            tiny_model(num_attention_heads=32).float(), mesh_of(tp=2), invariant=INVARIANT
        ),
        lambda: px.parallelize(
            tiny_model(hidden_act="relu").float(), mesh_of(tp=2), invariant=INVARIANT
        ),
        lambda: check_can_be_invariant(PUBLISHED_COGAGENT, {}),
        lambda: check_can_be_invariant(replace(COGAGENT, model_type="another"), {}),
    )
    return [refusal(call) for call in calls]


def test_what_is_not_served_is_refused_by_name() -> None:
    words = [
        "model.cross_vision.vit.model.blocks",
        "self_attn have 2",
        "act_fn is a ReLU",
        "'cogagent' models with published code",
        "'another' models with sublayers beside the decoder layers",
    ]
    pool(2).assert_says(_refusals, words=words)
