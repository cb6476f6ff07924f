"""The loss of a model: its options, several tiles of tokens, and the forms that keep the logits."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import transformers
from ranks import pool
from reference import (
    Tiny,
    assert_within,
    batch,
    difference,
    gradients_of,
    mesh_of,
    parallel,
    shard_differences,
)
from reference_loss import dense_statistics
from reference_training import difference_trained

import parallel_ext as px
from parallel_ext import ops
from parallel_ext.nn.fused_loss import is_of_others
from parallel_ext.parallel.plan import Options
from parallel_ext.parallel.state import parallel_models

OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0, "logit_scale": 0.7}


def _expected_loss(model: Any, data: dict[str, Any], options: dict[str, Any]) -> torch.Tensor:
    logits = model(data["input_ids"], attention_mask=data["attention_mask"]).logits
    targets = torch.nn.functional.pad(data["labels"], (0, 1), value=-100)[..., 1:]
    return dense_statistics(logits.flatten(0, -2), targets.flatten(), **options).loss


def _parity(
    data: dict[str, Any], options: dict[str, Any], how: dict[str, Any], train: bool
) -> dict[str, float]:
    reference = Tiny().model()
    model = parallel(reference, mesh_of(), **how)
    expected = _expected_loss(reference, data, options)
    got = model.train(train)(**data, **options)
    assert ("logits" in got) != (train and not how.get("training_logits"))
    expected.backward()
    got.loss.backward()
    return {
        "loss": difference(got.loss, expected),
        **shard_differences(model, gradients_of(reference), gradients=True),
    }


PARITY: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any], bool]] = {
    **{name: (3, batch(101), {name: value}, {}, True) for name, value in OPTIONS.items()},
    "all, on one rank": (1, batch(101), OPTIONS, {}, True),
    "all": (3, batch(101), OPTIONS, {}, True),
    "all, with logits": (2, batch(101), OPTIONS, {"training_logits": True}, True),
    "all, no agreement": (2, batch(101), OPTIONS, {"agreement": False}, True),
    "all, in an evaluation": (2, batch(101), OPTIONS, {}, False),
    # Of 128 tokens each in fp64, and each with an exchange of its own.
    "several tiles of tokens": (2, batch(101, rows=7, tokens=90), {}, {}, True),
}


@pytest.mark.parametrize("case", PARITY)
def test_options_of_a_call_equal_those_on_whole_logits(case: str) -> None:
    tp, *given = PARITY[case]
    assert_within(pool(tp).run(_parity, *given))


def _different_options() -> None:
    model, rank = parallel(Tiny().model(), mesh_of()), mesh_of().tp_rank
    model(**batch(101), label_smoothing=0.1 * rank)


def test_ranks_with_different_options_all_raise() -> None:
    pool(2).assert_raises(_different_options, error="DisagreementError", words="label_smoothing")


def _without_labels(how: dict[str, Any], trained: bool) -> float:
    """The largest gradient of a batch in which no label counts."""
    model = parallel(Tiny().model(), mesh_of(), **how)
    model.lm_head.weight.requires_grad_(trained)
    data = batch(101)
    model(**data | {"labels": torch.full_like(data["labels"], -100)}).loss.backward()
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    assert len(grads) > 10
    return max(each.abs().max().item() for each in grads if each.numel())


@pytest.mark.parametrize("how", [{}, {"training_logits": True}], ids=["fused", "with logits"])
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_a_batch_without_valid_labels_has_gradients_of_zero(how: dict, trained: bool) -> None:
    assert pool(2).run(_without_labels, how, trained) == [0.0, 0.0]


class _Capped(torch.nn.Module):
    def __init__(self, head: torch.nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _changed(self.head(hidden))


def _changed(logits: torch.Tensor) -> torch.Tensor:
    """A function of all logits of a token."""
    return (logits - logits.mean(-1, keepdim=True)).clamp(-0.1, 0.1)


def _clamp(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return _changed(output)


def _scale(weight: torch.Tensor, factor: float) -> None:
    weight.data.mul_(factor)


def _change(model: Any, how: str) -> None:
    """Let something stand between the head and the loss."""
    head = model.lm_head
    if how == "a hook":
        head.register_forward_hook(_clamp)
    elif how == "hooks that change the weight":
        head.register_forward_pre_hook(lambda module, args: _scale(module.weight, 3.0))
        head.register_forward_hook(lambda module, *args: _scale(module.weight, 1 / 3))
    elif how == "a wrapper":
        model.lm_head = _Capped(head)
    else:
        forward = head.forward
        head.forward = lambda hidden: _changed(forward(hidden))


def _of_changed_heads(how: str, training: bool) -> list[list[float]]:
    """Loss, norm of the gradients and a logit, if there are any, of one process and of ours."""
    reference = Tiny().model().train(training)
    model = parallel(reference, mesh_of())
    with torch.no_grad():
        plain = model(**batch(101)).loss.item()
    found = []
    for each in (reference, model):
        _change(each, how)
        output = each(**batch(101))
        output.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0).item()
        logits = [] if training else output.logits[0, 0].tolist()
        found.append([output.loss.item(), norm, *logits])
    assert abs(found[1][0] - plain) > 1e-3
    return found


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    "how", ["a hook", "hooks that change the weight", "a wrapper", "another forward"]
)
def test_who_changes_the_head_sees_all_logits(how: str, training: bool) -> None:
    for expected, ours in pool(2).run(_of_changed_heads, how, training):
        assert ours == pytest.approx(expected, rel=1e-9)


def _watched_on_one_rank(training: bool) -> None:
    model = parallel(Tiny().model().train(training), mesh_of())
    if mesh_of().tp_rank == 0:
        model.lm_head.register_forward_hook(_clamp)
    model(**batch(101))


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_head_that_is_watched_on_one_rank_only_raises_on_all(training: bool) -> None:
    words = "loss of logits, since (tp rank 0: 'the output head has a hook on a VocabPara"
    pool(2).assert_raises(_watched_on_one_rank, training, error="DisagreementError", words=words)


def _fuses(how: str, fused_loss: object = "auto") -> bool:
    """Return whether a step of a changed model, or a plain one, has fused head and loss."""
    model = parallel(Tiny().model(), mesh_of(), fused_loss=fused_loss)
    if how == "compiled":
        model.lm_head = torch.compile(model.lm_head, backend="aot_eager")
    elif how == "trained whole":
        config = px.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
        model = peft.get_peft_model(model, config)
    elif how.startswith("adapted"):
        model = peft.get_peft_model(model, px.LoraConfig(target_modules=["lm_head"]))
    elif how != "plain":
        _change(model, how)
    disabled = model.disable_adapter() if how == "adapted, disabled" else nullcontext()
    fused = mock.Mock(wraps=ops.linear_vocab_cross_entropy)
    with disabled, mock.patch.object(ops, "linear_vocab_cross_entropy", fused):
        model(**batch(101))
    return fused.call_count == 1


@pytest.mark.parametrize(
    ("how", "fused_loss", "expected"),
    [
        *((how, "auto", True) for how in ("plain", "trained whole", "adapted, disabled")),
        *(("compiled", "auto", True), ("a hook", "auto", False)),
        *(("plain", True, True), ("plain", False, False)),
    ],
)
def test_head_and_loss_are_fused_where_they_can_and_may_be(
    how: str, fused_loss: object, expected: bool
) -> None:
    assert pool(2).run(_fuses, how, fused_loss) == [expected, expected]


def test_builtins_are_hooks_of_others() -> None:
    assert "".format.__module__ is None
    assert is_of_others("".format)


def _widths_seen_by_a_global_hook() -> set[int]:
    model, widths = parallel(Tiny().model(), mesh_of()), set[int]()

    def look(module: Any, args: Any, output: Any) -> None:
        if module is model.lm_head:
            widths.add(output.size(-1))

    with torch.nn.modules.module.register_module_forward_hook(look):
        model(**batch(101))
    return widths


def test_a_hook_on_all_modules_sees_logits() -> None:
    assert pool(2).run(_widths_seen_by_a_global_hook) == [{51}, {50}]


class _Tempered(transformers.LlamaForCausalLM):
    """A class of a user, whose forward goes on with the logits."""

    def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> Any:
        logits, loss = self.lm_head(self.model(input_ids).last_hidden_state) / 2, None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def _loss_of_a_class_that_changes_logits(how: dict[str, Any]) -> tuple[float, float]:
    reference = Tiny().model()
    reference.__class__ = _Tempered
    model = parallel(reference, mesh_of(), **how)
    data = batch(101)
    del data["attention_mask"]
    return model(**data).loss.item(), reference(**data).loss.item()


class _Added(transformers.LlamaForCausalLM):
    """A class of a user, which chooses labels, adds to its base's loss, and names no ids."""

    def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        if labels is not None:
            labels = labels.masked_fill(labels % 3 == 0, -100)
        output = super().forward(*args, labels=labels, **kwargs)
        if output.loss is not None:
            output.loss = output.loss + output.logits.pow(2).mean()
        return output


class _Smoothed(transformers.LlamaForCausalLM):
    """A class of a user with a loss and options of its own, named as those of the model's loss."""

    def forward(self, input_ids: Any, labels: Any, label_smoothing: float, weight: float) -> Any:
        logits = super().forward(input_ids).logits[:, :-1].flatten(0, 1)
        smoothed = {"label_smoothing": label_smoothing}
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), **smoothed)
        return (loss * weight,)


SMOOTHED = {"label_smoothing": 0.3, "weight": 0.7}


def _trained_by_a_derived_class(cls: type, tp: int, options: dict[str, float]) -> float:
    mesh, reference = mesh_of(tp), Tiny().model()
    reference.__class__ = cls
    model = px.data_parallel(parallel(reference, mesh), mesh)
    ids = torch.arange(3, 35).view(2, 16)
    own = ids.chunk(mesh.dp_size)[mesh.dp_rank]
    if tp > 1:
        with pytest.raises(NotImplementedError, match="but the forward of _.* is its own"):
            px.generate(model.eval(), own, max_new_tokens=1)
    model.train()
    return difference_trained(
        reference,
        model,
        lambda step: tuple(
            m(each + step, labels=each + step, **options)[0]
            for m, each in ((reference, ids), (model, own))
        ),
    )


@pytest.mark.parametrize(
    ("cls", "tp", "options"), [(_Added, 2, {}), (_Added, 1, {}), (_Smoothed, 2, SMOOTHED)]
)
def test_the_loss_of_a_derived_class_is_that_of_one_process(
    cls: type, tp: int, options: dict[str, float]
) -> None:
    for worst in pool(2).run(_trained_by_a_derived_class, cls, tp, options):
        assert worst <= 1e-10


def test_a_class_with_another_loss_is_refused_over_dp() -> None:
    words = "_Smoothed.forward computes a loss of its own, of which dp=2 ranks would not have"
    pool(2).assert_raises(_trained_by_a_derived_class, _Smoothed, 1, SMOOTHED, words=words)


def test_a_class_that_changes_logits_needs_them() -> None:
    pool(2).assert_raises(
        _loss_of_a_class_that_changes_logits,
        {"fused_loss": True},
        error="ValueError",
        words="fused_loss=True, but the forward of _Tempered is its own, which sees logits",
    )
    for how in ({}, {"training_logits": True}, {"fused_loss": False}):
        for ours, expected in pool(2).run(_loss_of_a_class_that_changes_logits, how):
            assert ours == pytest.approx(expected, rel=1e-9)


def _misused(case: str) -> None:
    model, data = parallel(Tiny().model(), mesh_of()), batch(101)
    options: dict[str, Any] = {}
    if case == "replaced":
        model.loss_function = lambda logits, *args, **kwargs: logits.sum()
    elif case == "unused":
        del data["labels"]
        options["z_loss"] = 0.1
    else:
        options["weight"] = torch.ones(101)
    model(**data, **options)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("replaced", "loss_function was replaced"),
        ("unused", "z_loss: options of the loss, but the"),
        ("class weights", "weight: not an option of a model's loss; compute your own"),
    ],
)
def test_what_would_be_ignored_is_refused_on_all_ranks(case: str, words: str) -> None:
    pool(2).assert_raises(_misused, case, error="ValueError", words=words)


@pytest.mark.parametrize(
    ("how", "fused_loss", "words"),
    [
        ("a hook", True, "fused_loss=True, but the output head has a hook on a VocabParallelHead"),
        ("a wrapper", True, "fused_loss=True, but the output head is in a _Capped"),
        ("adapted", True, "fused_loss=True, but an adapter on the output head makes logits"),
        ("plain", "yes", "fused_loss must be 'auto', True or False, got 'yes'"),
    ],
)
def test_a_fused_loss_that_cannot_be_is_refused(how: str, fused_loss: object, words: str) -> None:
    pool(2).assert_raises(_fuses, how, fused_loss, error="ValueError", words=words)


def _invariant_with_a_hook() -> None:
    model = parallel(Tiny().model(), mesh_of(), invariant=px.Invariant(2))
    _change(model, "a hook")
    model(**batch(101))


def test_a_head_that_px_invariant_cannot_fuse_is_refused() -> None:
    words = "px.Invariant computes head and loss in one op, but the output head has a hook"
    pool(2).assert_raises(_invariant_with_a_hook, error="ValueError", words=words)


def test_parallel_models_are_listed_as_they_were_made() -> None:
    """So that ranks which communicate for each of them do it in one order."""
    mesh, tiny = px.init_mesh(), Tiny(layers=1)
    made = [parallel(tiny.model(), mesh) for _ in range(12)]
    copied = copy.deepcopy(made[3])
    del made[5]
    assert [each for each in parallel_models() if each in {*made, copied}] == [*made, copied]


def _called_inside_another(train: bool) -> tuple[float, torch.Size]:
    """How far a model's logits are off when a hook of another, with labels, calls it."""
    inner, outer = (parallel(Tiny().model(), mesh_of()) for _ in range(2))
    inner.eval()
    ids, inside = batch(101)["input_ids"], []
    expected = inner(ids).logits
    layer = outer.train(train).model.layers[0]
    layer.register_forward_hook(lambda *_: inside.append(inner(ids).logits))
    outer(**batch(101))
    same = inside[0].shape == expected.shape
    return difference(inside[0], expected) if same else float("inf"), inside[0].shape


@pytest.mark.parametrize("train", [True, False])
def test_a_model_that_a_hook_of_another_calls_returns_its_full_logits(train: bool) -> None:
    for error, shape in pool(2).run(_called_inside_another, train):
        assert error == 0, shape


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fused_loss": True, "training_logits": True}, "fused_loss=True makes no logits"),
        ({"sequence_parallel": "yes"}, "sequence_parallel must be True or False, got 'yes'"),
        ({"sequence_parallel": True, "invariant": px.Invariant(2)}, "leave out sequence_parallel"),
        ({"training_logits": True, "invariant": px.Invariant(2)}, "leave out training_logits"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Options(**options).check()
