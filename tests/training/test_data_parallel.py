"""``data_parallel``: dp ranks train the single-process model on all their batches together."""

from __future__ import annotations

from contextlib import nullcontext
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
    gradient_differences,
    gradients_of,
    mesh_of,
    parallel,
    shard_differences,
    worst,
)
from reference_lora import ALL, config
from reference_mixtral import (
    Layout,
    TinyMixtral,
    accumulated_differences,
    adapted_pair,
    errors_in,
    job_loss,
    own_batch,
    parity,
    spread,
)
from torch import nn

import parallel_ext as px
from parallel_ext import ops
from parallel_ext.nn import grad_sync
from parallel_ext.nn.grad_sync import PartialGradients
from parallel_ext.parallel.owners import owners_of

CASES = {
    "dp 2": (Tiny(), Layout(2, 1, 1)),
    "dp 3, tied": (Tiny(tied=True), Layout(3, 1, 1)),
    "dp 4": (Tiny(vocab_size=5), Layout(4, 1, 1)),
    "dp 2, tp 2": (Tiny(bias=True), Layout(2, 2, 1)),
    "dp 2, tp 2, replicated key-value heads": (
        Tiny(heads=4, key_value_heads=1, bias=True),
        Layout(2, 2, 1),
    ),
    "dp 2, tp 2, a vocabulary smaller than tp": (Tiny(vocab_size=3, tied=True), Layout(2, 2, 1)),
}


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_training_equals_the_single_process(case: str, zero: int) -> None:
    tiny, layout = CASES[case]
    assert_within(pool(layout.world).run(parity, tiny, layout, zero))


def _an_empty_shard() -> dict[str, float]:
    """The second tp rank of each holds no row of the vocabulary."""
    tiny = Tiny(vocab_size=5)
    reference, model, mesh = spread(tiny, Layout(2, 2, 1), vocab_multiple_of=64)
    return gradient_differences(reference, model, *own_batch(tiny, mesh))


def test_parameters_without_elements_stay_out() -> None:
    assert_within(pool(4).run(_an_empty_shard))


def _uneven(valid: tuple[int, ...], how: str) -> tuple[float, float]:
    """dp ranks with these numbers of valid labels, whose gradients something averages."""
    tiny, mesh = Tiny(), Layout(len(valid), 1, 1).mesh()
    whole = batch(tiny.vocab_size, rows=len(valid), tokens=101, seed=5)
    whole["attention_mask"].fill_(1)
    for row, count in enumerate(valid):
        whole["labels"][row] = whole["input_ids"][row]
        whole["labels"][row, 1 + count :] = -100
    reference = tiny.model()
    expected = reference(**whole).loss
    expected.backward()
    model = parallel(reference, mesh)
    if how == "FSDP":
        wrapped = px.data_parallel(model, mesh)
    elif how == "DDP":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        wrapped = px.no_data_parallel(model)
    own = {name: value[mesh.dp_rank : mesh.dp_rank + 1] for name, value in whole.items()}
    loss = wrapped(**own).loss
    loss.backward()
    if how == "by hand":
        for parameter in model.parameters():
            parameter.grad = job_loss(parameter.grad, mesh)
    errors = shard_differences(model, gradients_of(reference), True)
    return difference(job_loss(loss, mesh), expected), worst(errors)[0]


def _under_both() -> None:
    model = px.data_parallel(parallel(Tiny().model(), mesh := Layout(2, 1, 1).mesh()), mesh)
    nn.parallel.DistributedDataParallel(nn.ModuleList([model]))


def test_ddp_around_what_data_parallel_has_sharded_is_refused() -> None:
    pool(2).assert_raises(_under_both, words=("after px.data_parallel", "leave it out"))


@pytest.mark.parametrize("how", ["FSDP", "DDP", "by hand"])
def test_ranks_with_1_and_100_and_0_labels_train_on_the_loss_of_all(how: str) -> None:
    for loss, gradients in pool(3).run(_uneven, (1, 100, 0), how):
        assert max(loss, gradients) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision_errs_at_most_twice_as_much_as_one_process(dtype: torch.dtype) -> None:
    found = pool(2).run(errors_in, Tiny(), Layout(2, 1, 1), dtype)
    assert_at_most_twice(found, FLOOR[dtype])


def _accumulated(tiny: Tiny, zero: int, checkpointing: bool) -> dict[str, float]:
    reference, model, mesh = spread(tiny, Layout(2, 2, 1), zero)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return accumulated_differences(reference, model, mesh, tiny, False)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("zero", [2, 3])
def test_no_sync_accumulates(zero: int, checkpointing: bool) -> None:
    tiny = Tiny(heads=4, key_value_heads=1)
    assert_within(pool(4).run(_accumulated, tiny, zero, checkpointing))


def _backward_under_autocast(how: str) -> bool:
    """Whether gradients are bitwise those of backwards outside of autocast."""
    tiny = TinyMixtral(dtype=torch.float32)
    _, model, mesh = spread(tiny, Layout(2, 1, 1), 2)
    if how == "recomputed":
        model.gradient_checkpointing_enable({"use_reentrant": True})
    _, own = own_batch(tiny, mesh)
    found = []
    for around_all in (torch.autocast("cpu", torch.bfloat16), nullcontext()):
        model.zero_grad()
        with around_all:
            for _ in range(2 if how == "accumulated" else 1):
                if how == "evaluated before":
                    with torch.no_grad():
                        model(**own)
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(**own).loss
                loss.backward()
        found.append([parameter.grad.full_tensor() for parameter in model.parameters()])
    return all(map(torch.equal, *found))


@pytest.mark.parametrize("how", ["accumulated", "evaluated before", "recomputed"])
def test_a_backward_under_autocast_has_the_gradients_of_one_outside(how: str) -> None:
    assert pool(2).run(_backward_under_autocast, how) == [True, True]


def _compiled() -> tuple[dict[str, float], list[int]]:
    """Differences from one process after some steps, and frames compiled after each."""
    reference, model, mesh = spread(Tiny(), Layout(2, 1, 1), 2)
    whole, own = own_batch(Tiny(), mesh)
    runs = (reference, whole), (torch.compile(model, backend="eager"), own)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model)]
    frames = []
    for _ in range(4):
        for (run, tokens), optimizer in zip(runs, optimizers, strict=True):
            optimizer.zero_grad()
            run(**tokens).loss.backward()
            optimizer.step()
        frames.append(torch._dynamo.utils.counters["frames"]["total"])
    full = {name: p.detach() for name, p in reference.named_parameters()}
    return shard_differences(model, full, gradients=False), frames


def test_a_compiled_model_is_compiled_once() -> None:
    for differences, (_, second, *later) in pool(2).run(_compiled):
        assert max(differences.values()) < 1e-5
        assert later == [second, second]


def _optimizer_after(what: str, zero: int) -> tuple[bool, dict[str, float]]:
    """Whether all weights change when the optimizer is built late; differences from one process."""
    reference, model, mesh = spread(Tiny(), Layout(2, 1, 1), zero)
    whole, own = own_batch(Tiny(), mesh)
    if what == "generate":
        model.generate(own["input_ids"], max_new_tokens=2, attention_mask=None)
    elif what == "evaluation":
        with torch.no_grad():
            model(**own)
    else:
        loss = model(**own).loss
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (reference, model)]
    if what != "forward":
        loss = model(**own).loss
    loss.backward()
    reference(**whole).loss.backward()
    before = {name: p.detach().clone() for name, p in reference.named_parameters()}
    for optimizer in optimizers:
        optimizer.step()
    after = dict(reference.named_parameters())
    trained = all(not torch.equal(value, after[name]) for name, value in before.items())
    return trained, shard_differences(model, after, False)


def _converted(dtype: torch.dtype, before: str, zero: int) -> tuple[float, float]:
    """Errors of norm and weights after a step of a model that was converted once it was dealt."""
    reference, model, mesh = spread(Tiny(dtype=torch.float32), Layout(2, 1, 1), zero)
    whole, own = own_batch(Tiny(), mesh)
    if before == "a step":
        model(**own).loss.backward()
        model.zero_grad()
    elif before == "inference":
        with torch.inference_mode():
            model(**own)
    reference, model = reference.to(dtype), model.to(dtype)
    norms = []
    for m, data, clip in (
        (reference, whole, nn.utils.clip_grad_norm_),
        (model, own, lambda _, limit: px.clip_grad_norm_(model, limit)),
    ):
        optimizer = torch.optim.SGD(m.parameters(), lr=1e-2)
        m(**data).loss.backward()
        norms.append(clip(m.parameters(), 1.0))
        optimizer.step()
    after = shard_differences(model, dict(reference.named_parameters()), False)
    return difference(norms[1], norms[0]), worst(after)[0]


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("before", ["nothing", "a step", "inference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_model_may_be_converted_afterwards(dtype: torch.dtype, before: str, zero: int) -> None:
    for errors in pool(2).run(_converted, dtype, before, zero):
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


def _loaded_after_a_forward(zero: int) -> dict[str, float]:
    """Differences from what was loaded where FSDP may have left gathered weights."""
    reference, model, mesh = spread(Tiny(), Layout(2, 1, 1), zero)
    state = model.state_dict()
    state |= {name: state[name] * 2 for name, _ in model.named_parameters()}
    model(**own_batch(Tiny(), mesh)[1])
    model.load_state_dict(state)
    doubled = {name: p.detach() * 2 for name, p in reference.named_parameters()}
    return shard_differences(model, doubled, False)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_state_dict_is_loaded_into_shards_after_a_forward(zero: int) -> None:
    assert_within(pool(2).run(_loaded_after_a_forward, zero))


def _owned_while_gathered() -> tuple[int, int, int]:
    """How many parameters a model with FSDP has, are not in it after a forward, and are owned."""
    tiny, mesh = Tiny(), Layout(2, 1, 1).mesh()
    model = px.data_parallel(parallel(tiny.model(), mesh), mesh, zero=2)
    shards = [*model.parameters()]
    model(**own_batch(tiny, mesh)[1])
    gathered = {id(parameter) for parameter in model.parameters()}
    away = sum(id(shard) not in gathered for shard in shards)
    return len(shards), away, len(owners_of(shards))


def test_shards_that_fsdp_has_put_aside_are_known() -> None:
    for number, away, owned in pool(2).run(_owned_while_gathered):
        assert away > 0
        assert owned == number


# Adapters.


def _adapter(tp: int, broken: bool) -> dict[str, float]:
    """Gradients of adapters, over two micro-batches and then one, against PEFT's in one process."""
    tiny, mesh = Tiny(heads=4, key_value_heads=1), Layout(2, tp, 1).mesh()
    options = {"r": 5, "lora_alpha": 7, "target_modules": ALL}
    plain, model = adapted_pair(tiny.model, mesh, **options)
    px.data_parallel(model, mesh, zero=3)
    if broken:
        px.parallel.state.state_of(model).partials._averaged = {}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    differences = {}
    for step in range(2):
        if step == 0:
            found = accumulated_differences(plain, model, mesh, tiny, False)
        else:
            found = gradient_differences(plain, model, *own_batch(tiny, mesh, 5))
        differences |= {f"{name} in step {step}": error for name, error in found.items()}
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
        differences[f"norm of step {step}"] = difference(px.clip_grad_norm_(model, 1e-3), norm)
        plain.zero_grad()
        optimizer.zero_grad()
    return differences


@pytest.mark.parametrize("tp", [1, 2])
def test_gradients_of_adapters_are_those_of_peft_on_all_batches(tp: int) -> None:
    # the factors are fp32 in PEFT's default as well
    assert_within(pool(2 * tp).run(_adapter, tp, False), 1e-5)


def test_the_test_above_notices_a_missing_mean() -> None:
    assert max(worst(d)[0] for d in pool(2).run(_adapter, 1, True)) > 1e-2


# What a user may try.


def _saved(path: Path, tiny: Tiny, layout: Layout, zero: int, multiple_of: int) -> None:
    _, model, mesh = spread(tiny, layout, zero, vocab_multiple_of=multiple_of)
    with torch.no_grad():
        model(**own_batch(tiny, mesh)[1])
    model.save_pretrained(path)


@pytest.mark.parametrize(
    ("tiny", "layout", "zero", "multiple_of"),
    [
        (Tiny(dtype=torch.float32), Layout(2, 1, 1), 3, 1),
        (Tiny(dtype=torch.float32), Layout(2, 2, 1), 3, 1),
        (Tiny(vocab_size=5), Layout(2, 2, 1), 2, 64),  # a tp rank holds no row
    ],
    ids=str,
)
def test_a_save_is_that_of_the_single_process(
    tiny: Tiny, layout: Layout, zero: int, multiple_of: int, tmp_path: Path
) -> None:
    pool(layout.world).run(_saved, tmp_path / "ours", tiny, layout, zero, multiple_of)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    expected = tiny.model().state_dict()
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
    if case == "another mesh":
        mesh = px.init_mesh(tp=2)
    if case == "reduced by the caller":
        px.no_data_parallel(model)
    if case == "experts on several dp ranks":
        px.no_data_parallel(parallel(TinyMixtral().model(), mesh_of(tp=1, ep=2)))
    if case == "optimizer":
        optimizer = torch.optim.AdamW(model.parameters())
        px.data_parallel(model, mesh)
        model(**batch(tiny.vocab_size)).loss.backward()
        optimizer.step()
    if case == "hooks before":
        model.lm_head.weight.register_hook(torch.zeros_like)
    px.data_parallel(model, mesh, **({"zero": 1} if case == "stage" else {}))
    if case == "twice":
        px.data_parallel(model, mesh)
    elif case == "state_dict":
        model.load_state_dict(tiny.model().state_dict())
    elif case == "adapter":
        peft.get_peft_model(model, config())
    elif case == "parallelize again":
        px.parallelize(model, mesh)
    elif case == "reduced by FSDP":
        px.no_data_parallel(model)
    elif case == "hooks":
        model.lm_head.weight.register_hook(torch.zeros_like)
        model(**batch(tiny.vocab_size))
    elif case == "changed while gathered":
        model(**batch(tiny.vocab_size))
        with torch.no_grad():
            model.model.norm.weight.mul_(2)
        px.check_replicas(model)
    elif case == "replaced":
        model.model.norm.weight = nn.Parameter(torch.ones(model.model.norm.weight.shape))
        model(**batch(tiny.vocab_size))
    elif case == "other data":
        model.model.norm.weight.data = torch.ones(model.model.norm.weight.shape)
        model(**batch(tiny.vocab_size))
    elif case == "closure in no_sync":
        optimizer = torch.optim.AdamW(model.parameters())
        with px.no_sync(model):
            optimizer.step(closure=model(**batch(tiny.vocab_size)).loss.backward)
    elif case in ("step after no_sync", "step in no_sync"):
        optimizer = torch.optim.AdamW(model.parameters())
        with px.no_sync(model):
            model(**batch(tiny.vocab_size)).loss.backward()
            if case == "step in no_sync":
                optimizer.step()
        optimizer.zero_grad()
        optimizer.step()  # of nothing
        with px.no_sync(model):
            model(**batch(tiny.vocab_size)).loss.backward()
        optimizer.step()
    elif case == "a part of the model":
        model.model(batch(tiny.vocab_size)["input_ids"])
    elif case == "forward itself":
        model.forward(**batch(tiny.vocab_size))
    elif case == "gradients held back by FSDP":
        model.set_requires_gradient_sync(False)


MISUSE = {
    "before parallelize": "is not a parallel model; call px.parallelize",
    "stage": "zero must be 2 or 3, got 1",
    "twice": "this model is already, with zero=2",
    "state_dict": "load the state_dict before px.data_parallel",
    "adapter": "add adapters before px.data_parallel",
    "parallelize again": "this model is parallel already",
    "optimizer": "AdamW was built before px.data_parallel",
    "hooks before": "data_parallel: lm_head.weight has gradient hooks, which would be lost",
    "hooks": "lm_head.weight has a hook of register_hook, which FSDP never calls",
    "changed while gathered": "model.norm.weight was changed between a forward and its backward",
    "replaced": "model.norm.weight was replaced after px.data_parallel",
    "other data": "model.norm.weight was replaced after px.data_parallel",
    "step after no_sync": "AdamW.step after a backward under px.no_sync",
    "closure in no_sync": "AdamW.step after a backward under px.no_sync",
    "step in no_sync": "AdamW.step after a backward under px.no_sync",
    "another mesh": "data_parallel: this model was parallelized with Mesh(",
    "reduced by the caller": "data_parallel: px.no_data_parallel was called on this model",
    "reduced by FSDP": "no_data_parallel: px.data_parallel was called on this model",
    "a part of the model": "after px.data_parallel call the model itself",
    "forward itself": "after px.data_parallel call the model itself",
    "gradients held back by FSDP": "use with px.no_sync(model)",
    "experts on several dp ranks": "at dp=2, tp=1, ep=2 gradients of experts have parts on several",
}


def _without_a_backward(zero: int) -> dict[str, float]:
    """Steps between which a forward has no backward, and a parameter is frozen while gathered."""
    tiny, mesh = Tiny(), Layout(2, 1, 1).mesh()
    reference = tiny.model()
    model = px.data_parallel(parallel(reference, mesh), mesh, zero)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, reference)]
    for seed in (3, 4, 5):
        whole, own = own_batch(tiny, mesh, seed)
        for each, data, optimizer in zip((model, reference), (own, whole), optimizers, strict=True):
            each(**data).loss.backward()
            each(**data)
            each.model.norm.weight.requires_grad_(False)
            optimizer.step()
            optimizer.zero_grad()
    return shard_differences(model, dict(reference.named_parameters()), False)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_forward_without_a_backward_leaves_the_weights_of_the_next(zero: int) -> None:
    for found in pool(2).run(_without_a_backward, zero):
        assert worst(found)[0] <= 1e-10


def _two_forwards(zero: int) -> dict[str, float]:
    """Gradients of two losses, of which the second is gathered for while the first waits."""
    tiny, mesh = Tiny(), Layout(2, 1, 1).mesh()
    reference = tiny.model()
    model = px.data_parallel(parallel(reference, mesh), mesh, zero)
    batches = [own_batch(tiny, mesh, seed) for seed in (3, 4)]
    for each, own in ((reference, False), (model, True)):
        first, second = (each(**batch[own]).loss for batch in batches)
        (first + 2 * second).backward()
    return shard_differences(model, gradients_of(reference), True)


@pytest.mark.parametrize("zero", [2, 3])
def test_two_forwards_may_have_one_backward(zero: int) -> None:
    for found in pool(2).run(_two_forwards, zero):
        assert worst(found)[0] <= 1e-10


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_one_clear_error_on_all_ranks(case: str) -> None:
    pool(2).assert_raises(_misused, case, words=MISUSE[case])


def _other_parts(how: str, zero: int, count: int | None) -> None:
    """Every dp rank trains, skips or lacks a layer of its own, and goes on for two steps."""
    tiny, mesh = Tiny(), mesh_of(tp=1)
    model = px.data_parallel(parallel(tiny.model(), mesh), mesh, zero)
    layers = model.model.layers
    if how == "frozen":
        layers[mesh.dp_rank].requires_grad_(False)
    elif how == "skipped":
        layers[mesh.dp_rank].forward = lambda hidden, **options: hidden
    elif how == "left out":
        del layers[mesh.dp_rank]
    for _ in range(2):
        one = batch(tiny.vocab_size)
        model(**one, use_cache=False, num_items_in_batch=count).loss.backward()
        if how != "skipped":
            raise AssertionError("a backward has run")


@pytest.mark.parametrize("count", [None, 20])
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize(
    ("how", "words"),
    {
        "frozen": (
            "requires_grad of model.layers.0.self_attn.q_proj.weight (dp rank 0: False,",
            "would be averaged with each other",
        ),
        "skipped": (
            "sums of the gradients of model.layers.0 (dp rank 0: 0, dp rank 1: 1), and 1",
            "were averaged with each other: load the last checkpoint",
        ),
        "left out": (
            "gathers of the weights of model.layers.0 (dp rank 0: 0, dp rank 1: 1), and 1",
            "would be averaged with each other",
        ),
    }.items(),
)
def test_dp_ranks_that_train_other_parts_are_told(
    how: str, words: tuple[str, str], zero: int, count: int | None
) -> None:
    pool(2).assert_raises(_other_parts, how, zero, count, error="DisagreementError", words=words)


def _check(layout: Layout, broken: bool) -> Any:
    tiny = TinyMixtral(dtype=torch.float32) if layout.ep > 1 else Tiny(dtype=torch.float32)
    _, model, mesh = spread(tiny, layout)
    if broken:
        for module in model.modules():
            if isinstance(module, nn.Module) and hasattr(module, "grad_scale"):
                module.grad_scale *= 2
    return px.check_gradients(model, own_batch(tiny, mesh)[1])


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


def test_a_gradient_that_a_hook_has_kept_does_not_change_with_the_next() -> None:
    parameter, kept = nn.Parameter(torch.ones(3)), []
    handle = parameter.register_hook(kept.append)
    grad_sync._add_sum(parameter, torch.full((3,), 2.0))
    handle.remove()
    grad_sync._add_sum(parameter, torch.full((3,), 5.0))
    assert torch.equal(kept[0], torch.full((3,), 2.0))
    assert torch.equal(parameter.grad, torch.full((3,), 7.0))


def _trained_whole_in_bf16() -> tuple[dict[str, float], int]:
    """Adapters, which PEFT makes in fp32, and norms of each layer, which stay bf16."""
    mesh, tiny = mesh_of(1), Tiny(dtype=torch.bfloat16)
    options = {"r": 3, "target_modules": ["o_proj"], "modules_to_save": ["input_layernorm"]}
    plain, model = adapted_pair(tiny.model, mesh, **options)
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    px.data_parallel(model, mesh)
    return gradient_differences(plain, model, *own_batch(tiny, mesh)), len(kinds)


def test_what_an_adapter_trains_whole_may_have_another_dtype() -> None:
    for differences, kinds in pool(2).run(_trained_whole_in_bf16):
        assert kinds == 2
        assert max(differences.values()) < 0.1  # of bf16
