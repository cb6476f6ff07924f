"""``data_parallel``: dp ranks train the single-process model on all their batches together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from ranks import pool
from reference import (
    FLOOR,
    Tiny,
    assert_at_most_twice,
    assert_within,
    batch,
    difference,
    exact,
    gradients_of,
    mesh_of,
    parallel,
    shard_differences,
    worst,
)
from reference_lora import ALL, config
from reference_mixtral import Layout, TinyMixtral, batches, job_loss, training_differences
from torch import nn

import parallel_ext as px
from parallel_ext import ops
from parallel_ext.nn.grad_sync import PartialGradients
from parallel_ext.nn.sharded_module import named_shards
from parallel_ext.sharding.slices import take

STEPS = 3


def _spread(tiny: Tiny, dp: int, tp: int, zero: int) -> tuple[Any, Any, px.Mesh]:
    """The single-process model, the data-parallel one, and its mesh."""
    reference, mesh = tiny.model(), Layout(dp, tp, 1).mesh()
    return reference, px.data_parallel(parallel(reference, mesh), mesh, zero), mesh


def _parity(tiny: Tiny, dp: int, tp: int, zero: int) -> dict[str, float]:
    return training_differences(*_spread(tiny, dp, tp, zero), tiny, STEPS)


CASES = {
    "dp 2": (Tiny(), 2, 1),
    "dp 3, tied": (Tiny(tied=True), 3, 1),
    "dp 4": (Tiny(vocab_size=5), 4, 1),
    "dp 2, tp 2": (Tiny(bias=True), 2, 2),
    "dp 2, tp 2, replicated key-value heads": (Tiny(heads=4, key_value_heads=1, bias=True), 2, 2),
    "dp 2, tp 2, a vocabulary smaller than tp": (Tiny(vocab_size=3, tied=True), 2, 2),
}


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_training_equals_the_single_process(case: str, zero: int) -> None:
    tiny, dp, tp = CASES[case]
    assert_within(pool(dp * tp).run(_parity, tiny, dp, tp, zero), FLOOR[tiny.dtype])


def _an_empty_shard(tp: int) -> dict[str, float]:
    """The second tp rank of each holds no row of the vocabulary."""
    tiny = Tiny(vocab_size=5)
    reference, mesh = tiny.model(), Layout(2, tp, 1).mesh()
    model = parallel(reference, mesh, vocab_multiple_of=64)
    px.data_parallel(model, mesh)
    whole, own = batches(tiny, 2)
    reference(**whole).loss.backward()
    model(**own[mesh.dp_rank]).loss.backward()
    return shard_differences(model, gradients_of(reference), True)


def test_parameters_without_elements_stay_out() -> None:
    assert_within(pool(4).run(_an_empty_shard, 2))


def _uneven(valid: tuple[int, ...]) -> tuple[float, float]:
    """dp ranks with these numbers of valid labels."""
    tiny = Tiny()
    reference, model, mesh = _spread(tiny, len(valid), 1, 2)
    whole = batch(tiny.vocab_size, rows=len(valid), tokens=101, seed=5)
    whole["attention_mask"].fill_(1)
    for row, count in enumerate(valid):
        whole["labels"][row] = whole["input_ids"][row]
        whole["labels"][row, 1 + count :] = -100
    expected = reference(**whole).loss
    expected.backward()
    loss = model(**{name: value[mesh.dp_rank : mesh.dp_rank + 1] for name, value in whole.items()})
    loss.loss.backward()
    errors = shard_differences(model, gradients_of(reference), True)
    return difference(job_loss(loss.loss, mesh), expected), worst(errors)[0]


def test_ranks_with_1_and_100_and_0_labels_train_on_the_loss_of_all() -> None:
    for loss, gradients in pool(3).run(_uneven, (1, 100, 0)):
        assert max(loss, gradients) <= 1e-10


def _low_precision(dtype: torch.dtype) -> tuple[dict[str, float], dict[str, float]]:
    """Errors against fp64 of our gradients and of the single process', both in ``dtype``."""
    tiny = Tiny(dtype=dtype)
    truth, single, mesh = Tiny().model(), tiny.model(), Layout(2, 1, 1).mesh()
    single.load_state_dict(truth.state_dict())
    model = px.data_parallel(parallel(single, mesh), mesh)
    whole, own = batches(tiny, 2)
    truth(**whole).loss.backward()
    single(**whole).loss.backward()
    model(**own[mesh.dp_rank]).loss.backward()
    gradients = gradients_of(truth)
    theirs = {name: difference(g, gradients[name]) for name, g in gradients_of(single).items()}
    return shard_differences(model, gradients, True), theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision_errs_at_most_twice_as_much_as_one_process(dtype: torch.dtype) -> None:
    assert_at_most_twice(pool(2).run(_low_precision, dtype), FLOOR[dtype])


def _accumulated(tiny: Tiny, tp: int, zero: int, checkpointing: bool) -> tuple[float, str]:
    reference, model, mesh = _spread(tiny, 2, tp, zero)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    first, second = batches(tiny, 2, seed=3), batches(tiny, 2, seed=4)
    for whole, _ in (first, second):
        reference(**whole).loss.backward()
    with px.no_sync(model):
        model(**first[1][mesh.dp_rank]).loss.backward()
    model(**second[1][mesh.dp_rank]).loss.backward()
    return worst(shard_differences(model, gradients_of(reference), True))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("zero", [2, 3])
def test_no_sync_accumulates(zero: int, checkpointing: bool) -> None:
    tiny = Tiny(heads=4, key_value_heads=1)
    assert_within(pool(4).run(_accumulated, tiny, 2, zero, checkpointing), FLOOR[tiny.dtype])


def _optimizer_after(what: str, zero: int) -> tuple[bool, dict[str, float]]:
    """Whether all weights change when the optimizer is built late; differences from one process."""
    reference, model, mesh = _spread(Tiny(), 2, 1, zero)
    whole, own = batches(Tiny(), 2)
    if what == "generate":
        model.generate(own[0]["input_ids"], max_new_tokens=2, attention_mask=None)
    elif what == "evaluation":
        with torch.no_grad():
            model(**own[mesh.dp_rank])
    else:
        loss = model(**own[mesh.dp_rank]).loss
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (reference, model)]
    if what != "forward":
        loss = model(**own[mesh.dp_rank]).loss
    loss.backward()
    reference(**whole).loss.backward()
    before = {name: p.detach().clone() for name, p in reference.named_parameters()}
    for optimizer in optimizers:
        optimizer.step()
    after = dict(reference.named_parameters())
    trained = all(not torch.equal(value, after[name]) for name, value in before.items())
    return trained, shard_differences(model, after, False)


def _converted(dtype: torch.dtype) -> tuple[float, float]:
    """Errors of norm and weights after a step of a model that was converted once it was dealt."""
    reference, model, mesh = _spread(Tiny(dtype=torch.float32), 2, 1, 2)
    reference, model = reference.to(dtype), model.to(dtype)
    whole, own = batches(Tiny(), 2)
    norms = []
    for m, data, clip in (
        (reference, whole, nn.utils.clip_grad_norm_),
        (model, own[mesh.dp_rank], lambda _, limit: px.clip_grad_norm_(model, limit)),
    ):
        optimizer = torch.optim.SGD(m.parameters(), lr=1e-2)
        m(**data).loss.backward()
        norms.append(clip(m.parameters(), 1.0))
        optimizer.step()
    after = shard_differences(model, dict(reference.named_parameters()), False)
    return difference(norms[1], norms[0]), worst(after)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_model_may_be_converted_afterwards(dtype: torch.dtype) -> None:
    for errors in pool(2).run(_converted, dtype):
        assert max(errors) <= 1e-6


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("what", ["generate", "evaluation"])
def test_an_optimizer_that_is_built_later_trains_the_model(what: str, zero: int) -> None:
    for trained, differences in pool(2).run(_optimizer_after, what, zero):
        assert trained
        assert worst(differences)[0] <= 1e-10


def test_an_optimizer_that_holds_gathered_parameters_is_refused() -> None:
    words = "AdamW was built between forward and backward"
    pool(2).assert_raises(_optimizer_after, "forward", 2, words=words)


# Adapters.


def _adapter(tp: int, broken: bool, **changes: Any) -> dict[str, float]:
    """Gradients of adapters, over two micro-batches and then one, against PEFT's in one process."""
    tiny = Tiny(heads=4, key_value_heads=1)
    mesh = Layout(2, tp, 1).mesh()
    model = parallel(tiny.model(), mesh)
    torch.manual_seed(11)
    model = peft.get_peft_model(model, config(**changes))
    plain = peft.get_peft_model(
        exact(tiny.model()), peft.LoraConfig(**config(**changes).to_dict())
    ).double()
    trained = {n: (p, x) for n, p, x in named_shards(model) if p.requires_grad}
    values = px.io.state_dict.gather_in_step(trained, mesh, "test", writer_only=False)
    plain.load_state_dict({name: value.double() for name, value in values.items()}, strict=False)
    px.data_parallel(model, mesh, zero=3)
    if broken:
        px.parallel.state.state_of(model).partials._averaged = {}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    differences = {}
    for step, seeds in enumerate([(3, 4), (5,)]):
        for index, seed in enumerate(seeds):
            whole, own = batches(tiny, 2, seed=seed)
            plain(**whole).loss.backward()
            if index + 1 < len(seeds):
                with px.no_sync(model):
                    model(**own[mesh.dp_rank]).loss.backward()
            else:
                model(**own[mesh.dp_rank]).loss.backward()
        truth = {n: p.grad for n, p in plain.named_parameters() if p.requires_grad}
        for name, (parameter, layout) in trained.items():
            error = difference(parameter.grad, take(truth[name], layout, mesh.rank), truth[name])
            differences[f"{name} in step {step}"] = error
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
        differences[f"norm of step {step}"] = difference(px.clip_grad_norm_(model, 1e-3), norm)
        plain.zero_grad()
        optimizer.zero_grad()
    return differences


@pytest.mark.parametrize("tp", [1, 2])
def test_gradients_of_adapters_are_those_of_peft_on_all_batches(tp: int) -> None:
    # the factors are fp32 in PEFT's default as well
    assert_within(pool(2 * tp).run(_adapter, tp, False), 1e-5)


def test_the_test_above_notices_a_missingjob_loss() -> None:
    assert max(worst(d)[0] for d in pool(2).run(_adapter, 1, True)) > 1e-2


# What a user may try.


def _saved(path: Path, tp: int) -> None:
    _, model, mesh = _spread(Tiny(dtype=torch.float32), 2, tp, 3)
    with torch.no_grad():
        model(**batches(Tiny(), 2)[1][mesh.dp_rank])
    model.save_pretrained(path)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_save_is_that_of_the_single_process(tp: int, tmp_path: Path) -> None:
    pool(2 * tp).run(_saved, tmp_path / "ours", tp)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    expected = Tiny(dtype=torch.float32).model().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())


def _saved_with_an_empty_shard(path: Path) -> None:
    mesh = Layout(2, 2, 1).mesh()
    model = parallel(Tiny(vocab_size=5).model(), mesh, vocab_multiple_of=64)
    px.data_parallel(model, mesh).save_pretrained(path)


def test_a_save_is_whole_where_a_tp_rank_holds_no_row(tmp_path: Path) -> None:
    pool(4).run(_saved_with_an_empty_shard, tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    expected = Tiny(vocab_size=5).model().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())


def _generated(zero: int) -> tuple[bool, bool]:
    """Each dp rank continues a prompt of its own, and needs other numbers of steps."""
    reference, mesh = TinyMixtral(dtype=torch.float32).model().eval(), Layout(2, 1, 2).mesh()
    model = px.data_parallel(parallel(reference, mesh), mesh, zero).eval()
    prompt = torch.tensor([[5, 6, 7, 8][: 2 + 2 * mesh.dp_rank]])
    options = {"max_new_tokens": 3 + 4 * mesh.dp_rank, "do_sample": False, "eos_token_id": None}
    mask = torch.ones_like(prompt)
    ours = model.generate(prompt, attention_mask=mask, **options)
    theirs = reference.generate(prompt, attention_mask=mask, **options)
    with torch.no_grad():
        one = model(prompt[:, :1]).logits  # a single token
        close = torch.allclose(one, reference(prompt[:, :1]).logits, atol=1e-5)
    return torch.equal(ours, theirs), close


@pytest.mark.parametrize("zero", [2, 3])
def test_ranks_generate_each_on_its_own(zero: int) -> None:
    assert pool(2).run(_generated, zero, timeout_s=60) == [(True, True)] * 2


def _misused(case: str) -> None:
    tiny, mesh = Tiny(dtype=torch.float32), mesh_of(tp=1)
    model = tiny.model() if case == "before parallelize" else parallel(tiny.model(), mesh)
    if case == "optimizer":
        optimizer = torch.optim.AdamW(model.parameters())
        px.data_parallel(model, mesh)
        model(**batch(tiny.vocab_size)).loss.backward()
        optimizer.step()
    px.data_parallel(model, mesh, **({"zero": 1} if case == "stage" else {}))
    if case == "twice":
        px.data_parallel(model, mesh)
    elif case == "state_dict":
        model.load_state_dict(tiny.model().state_dict())
    elif case == "adapter":
        peft.get_peft_model(model, config())
    elif case == "parallelize again":
        px.parallelize(model, mesh)


MISUSE = {
    "before parallelize": "is not a parallel model; call px.parallelize",
    "stage": "zero must be 2 or 3, got 1",
    "twice": "this model is already, with zero=2",
    "state_dict": "load the state_dict before px.data_parallel",
    "adapter": "add adapters before px.data_parallel",
    "parallelize again": "this model is parallel already",
    "optimizer": "AdamW was built before px.data_parallel",
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_one_clear_error_on_all_ranks(case: str) -> None:
    pool(2).assert_raises(_misused, case, words=MISUSE[case])


def _merged() -> None:
    mesh = mesh_of(tp=1)
    model = peft.get_peft_model(parallel(Tiny().model(), mesh), config(target_modules=ALL))
    px.data_parallel(model, mesh).merge_and_unload()


def test_merging_into_dealt_weights_is_refused() -> None:
    pool(2).assert_raises(_merged, words="merging after px.data_parallel is not supported")


def _check(layout: Layout, broken: bool) -> Any:
    tiny = TinyMixtral(dtype=torch.float32) if layout.ep > 1 else Tiny(dtype=torch.float32)
    mesh = layout.mesh()
    model = px.data_parallel(parallel(tiny.model(), mesh), mesh)
    if broken:
        for module in model.modules():
            if isinstance(module, nn.Module) and hasattr(module, "grad_scale"):
                module.grad_scale *= 2
    return px.check_gradients(model, batches(tiny, 2)[1][mesh.dp_rank])


@pytest.mark.parametrize("layout", [Layout(2, 1, 1), Layout(2, 1, 2), Layout(2, 2, 4)], ids=str)
def test_check_gradients_agrees(layout: Layout) -> None:
    for report in pool(layout.world).run(_check, layout, False):
        assert report.worst[1] < 1e-4, report
        assert abs(report.loss / report.single_process_loss - 1) < 1e-5


def test_check_gradients_finds_a_wrong_scale_of_experts() -> None:
    for report in pool(2).run(_check, Layout(2, 1, 2), True):
        assert "experts" in report.worst[0]
        assert report.worst[1] > 0.1


def test_a_mean_of_gradients_counts_what_was_averaged_before_once() -> None:
    parameter = nn.Parameter(torch.ones(3))
    partials = PartialGradients()
    partials.average([("a", parameter)], ops.ALONE)
    hidden = partials.open_with(torch.ones(1, requires_grad=True))
    (hidden * parameter.sum()).backward()
    assert torch.equal(parameter.grad, torch.ones(3))


def test_one_dp_rank_needs_no_newer_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.distributed.fsdp.FSDPModule.reset_iter_state")
    mesh = px.init_mesh()
    model = parallel(Tiny().model(), mesh)
    assert px.data_parallel(model, mesh) is model
