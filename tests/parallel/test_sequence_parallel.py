"""Sequence parallelism: ranks that keep their own tokens train as the single process does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
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
    exact_norms,
    gradient_differences,
    gradients_of,
    mesh_of,
    parallel,
    shard_differences,
    worst,
)
from reference_lora import config, gradient_errors, plain, share_masks
from reference_mixtral import (
    Layout,
    TinyMixtral,
    accumulated_differences,
    differences_of_steps,
    errors_in,
    parity,
)
from reference_ops import counted_both_ways
from test_specs import with_dropout
from transformers.modeling_layers import GradientCheckpointingLayer

import parallel_ext as px
from parallel_ext import ops
from parallel_ext.models import SPECS
from parallel_ext.parallel.check_sequence import check_sequence_parallel

STEPS, ROWS = 2, 2


def _of_steps(tiny: Tiny, tokens: int) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """A batch with padding for each step, of as many tokens."""
    for seed in range(STEPS):
        one = batch(tiny.vocab_size, tokens=max(tokens, 4), seed=seed)
        one = {name: value[:, :tokens] for name, value in one.items()}
        yield one, [one] * 4


def _parity(tiny: Tiny, tokens: int, options: dict[str, Any]) -> dict[str, float]:
    reference = tiny.model()
    model = parallel(reference, mesh_of(), sequence_parallel=True, **options)
    return differences_of_steps(reference, model, mesh_of(), _of_steps(tiny, tokens))


CASES: dict[str, tuple[int, Tiny, int, dict[str, Any]]] = {
    "one rank": (1, Tiny(), 9, {}),
    "3 ranks, tied": (3, Tiny(tied=True), 10, {}),
    "ranks without tokens": (4, Tiny(), 3, {}),
    "biases, key-value heads replicated": (3, Tiny(bias=True, heads=8, key_value_heads=2), 7, {}),
    "a rank without vocabulary": (3, Tiny(), 9, {"vocab_multiple_of": 64}),
    "logits in training": (2, Tiny(), 9, {"training_logits": True}),
    "loss of logits": (2, Tiny(), 9, {"fused_loss": False}),
    "no agreement": (2, Tiny(), 9, {"agreement": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_training_equals_the_single_process(case: str) -> None:
    tp, tiny, tokens, options = CASES[case]
    assert_within(pool(tp).run(_parity, tiny, tokens, options))


class _Again(torch.autograd.Function):
    """Another checkpointing than torch's."""

    @staticmethod
    def forward(ctx: Any, block: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.block, ctx.x = block, x.detach()
        return block(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            output = ctx.block(x)
        output.backward(grad)
        return None, x.grad


def _recompute_an_mlp(model: torch.nn.Module, how: Any) -> None:
    """Let that of the first layer be recomputed alone."""
    block, whole = model.model.layers[0].mlp, torch.nn.Module()
    whole.inner, whole.forward = block, lambda x: how(block, x)
    model.model.layers[0].mlp = whole


def _checkpointed(tiny: Tiny, reentrant: bool, how: str) -> tuple[float, str]:
    """Two forwards of other lengths before one backward, in which layers are recomputed."""
    reference = tiny.model()
    model = parallel(reference, mesh_of(), sequence_parallel=True)
    if how == "an MLP alone":
        checkpoint = partial(torch.utils.checkpoint.checkpoint, use_reentrant=reentrant)
        _recompute_an_mlp(model, checkpoint)
    else:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if how == "deepcopied":
        model = copy.deepcopy(model)
    for each in (reference, model):
        first, second = (each(**batch(tiny.vocab_size, tokens=n)).loss for n in (9, 14))
        (first + second).backward()
    if how == "an MLP alone":
        model.model.layers[0].mlp = model.model.layers[0].mlp.inner
    return worst(shard_differences(model, gradients_of(reference), gradients=True))


def _called_alone(reentrant: bool | None) -> float:
    """How far what is called beside a training forward is from that of one process."""
    reference = Tiny().model()
    model = parallel(reference, mesh_of(), sequence_parallel=True)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    hidden = torch.randn(2, 9, 72, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def far() -> float:
        ours, theirs = model.model, reference.model
        of_norm = difference(ours.norm(hidden), theirs.norm(hidden))
        return max(of_norm, difference(ours.layers[0].mlp(hidden), theirs.layers[0].mlp(hidden)))

    loss = model(**batch(101)).loss
    after_forward = far()
    loss.backward()
    return max(after_forward, far())


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_what_is_called_alone_after_a_forward_has_all_tokens(reentrant: bool | None) -> None:
    assert max(pool(2).run(_called_alone, reentrant)) < 1e-12


@pytest.mark.parametrize(
    ("reentrant", "how"),
    [(False, "deepcopied"), (True, ""), (False, "an MLP alone"), (True, "an MLP alone")],
)
def test_gradient_checkpointing_keeps_the_gradients(reentrant: bool, how: str) -> None:
    assert_within(pool(3).run(_checkpointed, Tiny(heads=4, key_value_heads=1), reentrant, how))


def _counts(tiny: Tiny, sequence_parallel: bool, checkpointing: bool | None) -> list[Any]:
    model = parallel(tiny.model(), mesh_of(), sequence_parallel=sequence_parallel)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    inputs: list[torch.Size] = []
    for layer in model.model.layers[1:]:
        layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0].shape))
    norm = model.model.norm
    forward = norm.forward

    def seen(hidden: torch.Tensor) -> torch.Tensor:  # a hook would see all tokens
        inputs.append(hidden.shape)
        return forward(hidden)

    norm.forward = seen
    counts = counted_both_ways(lambda: model(**batch(tiny.vocab_size)).loss)
    return [*counts, set(inputs)]


def _left_by_forward(tiny: Tiny, tokens: int, sequence_parallel: bool) -> int:
    model = parallel(tiny.model(), mesh_of(), sequence_parallel=sequence_parallel)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    data = batch(tiny.vocab_size, rows=ROWS, tokens=tokens)
    found = px.profile_step(model, data, warmup=1, show=False)
    return found.ranks[mesh_of().rank].memory.activations


def test_a_checkpointed_forward_leaves_own_tokens_only() -> None:
    tiny, tokens = Tiny(dtype=torch.float32, heads=8, key_value_heads=4, layers=3), 33
    all_tokens, own_tokens = (
        pool(2).run(_left_by_forward, tiny, tokens, flag) for flag in (False, True)
    )
    # Before transformers 5.23 a layer's pre-hooks run in its checkpoint, and so does that of the
    # first one, which takes own tokens: its checkpoint saves all.
    inputs = tiny.layers - ("__call__" in vars(GradientCheckpointingLayer))
    for rank in range(2):
        less = (all_tokens[rank] - own_tokens[rank]) / (ROWS * 8 * tiny.heads * 4)
        others = 16 + rank
        # Inputs of the layers; of final norm and head their input, and the gradient of the latter.
        assert (inputs + 3.5) * others <= less <= (inputs + 4.5) * others


def test_a_gather_and_a_reduce_scatter_take_the_place_of_each_all_reduce() -> None:
    layers, rows, tokens = 3, 2, 9
    tiny = Tiny(layers=layers)
    hidden = 8 * tiny.heads
    ordinary = pool(2).run(_counts, tiny, False, None)
    for rank, (forward, backward, inputs) in enumerate(pool(2).run(_counts, tiny, True, None)):
        own = tokens - tokens // 2 if rank == 0 else tokens // 2
        assert inputs == {(rows, own, hidden)}
        assert forward["swap"] == 1 + 4 * layers + 2  # embedding, layers, tokens of the head
        assert "all_reduce" not in forward
        assert forward["all_gather"] == 2  # agreement, records of the loss
        assert backward["swap"] == 4 * layers + 1  # and gradients of the embedding
        assert backward["all_reduce"] == 1  # all norms at once
        others = tokens - own
        of_blocks = forward["swap_bytes"] - forward["vocab_embedding/bytes"]
        assert of_blocks == (2 * layers + 1) * rows * tokens * hidden * 8
        assert backward["vocab_embedding/bytes"] <= rows * own * hidden * 8
        of_layers = backward["swap_bytes"] - backward["vocab_embedding/bytes"]
        assert of_layers == 2 * layers * rows * (own + others) * hidden * 8
        # Both ranks together send in a layer what their all-reduces would.
        before = ordinary[rank][0]
        assert before["all_reduce_bytes"] == 2 * layers * rows * tokens * hidden * 8


def test_rows_of_the_embedding_go_only_where_they_are_looked_up() -> None:
    """Of 18 tokens, most of whose ids differ; without the option a row goes to every rank."""
    tp = 4
    (before, after), row = (pool(tp).run(_counts, Tiny(), own, None) for own in (False, True)), 576
    sent, forward, backward = (
        sum(counts[step]["vocab_embedding/bytes"] for counts in ranks) // row
        for ranks, step in ((before, 0), (after, 0), (after, 1))
    )
    distinct = batch(101)["input_ids"].unique().numel()
    assert sent == distinct * (tp - 1)
    assert forward <= backward <= 18 < sent + 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_backward_sums_the_norms_once(reentrant: bool) -> None:
    for _, backward, _ in pool(2).run(_counts, Tiny(layers=3), True, reentrant):
        assert backward["all_reduce"] == 1


def _without(broken: str, tiny: Tiny) -> float:
    reference = tiny.model()
    model = parallel(reference, mesh_of(), sequence_parallel=True)
    layer = model.model.layers[0]
    if broken == "sum of the norms":
        for module in model.modules():
            if hasattr(module, "used_in_parts"):
                module.used_in_parts.group = ops.ALONE
    elif broken == "sum of the input's gradient":
        hooks = layer.mlp._forward_pre_hooks.values()
        own = next(h.__self__ for h in hooks if getattr(h, "__name__", "") == "enter_sublayer")
        own.enter = lambda hidden: ops.gather_tokens(hidden, own.now(), own.group, False)
    elif broken == "gradient of the last norm":
        norm = model.model.norm
        hooks = norm._forward_hooks
        key = next(k for k, h in hooks.items() if getattr(h, "__name__", "") == "gather_all")
        own = hooks[key].__self__
        hooks[key] = lambda *given: ops.gather_tokens(
            given[2], own.now(), own.group, partial_gradient=True
        )
    elif broken == "bias of one rank":
        layer.mlp.down_proj.summed_over = layer.mlp.down_proj.group
        layer.mlp.down_proj.forward = lambda x: torch.nn.functional.linear(
            x, layer.mlp.down_proj.for_use()[0], layer.mlp.down_proj.bias
        )
    return worst(gradient_differences(reference, model, batch(tiny.vocab_size)))[0]


@pytest.mark.parametrize(
    "broken",
    [
        "sum of the norms",
        "sum of the input's gradient",
        "gradient of the last norm",
        "bias of one rank",
    ],
)
def test_parity_notices_a_broken(broken: str) -> None:
    assert max(pool(2).run(_without, broken, Tiny(bias=True))) > 1e-3


def _evaluated(tiny: Tiny) -> dict[str, float]:
    reference = tiny.model()
    model = parallel(reference, mesh_of(), sequence_parallel=True)
    one, prompt = batch(tiny.vocab_size), torch.tensor([[5, 6, 7, 8, 9]])
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = {}
    for mode in (True, False):
        for each in (reference, model):
            each.train(mode)
        with torch.no_grad():
            ours, theirs = model(one["input_ids"]).logits, reference(one["input_ids"]).logits
            found[f"logits, {mode}"] = difference(ours, theirs)
            first = model(prompt[:, :1]).logits, reference(prompt[:, :1]).logits
            found[f"one token, {mode}"] = difference(*first)
            tokens = reference.generate(prompt, **options)
            again = [model.generate(prompt, **options)]
            if not mode:
                again.append(px.generate(model, prompt, **options))
            found[f"tokens, {mode}"] = float(not all(torch.equal(x, tokens) for x in again))
    px._C.reset_collective_counts()
    with torch.no_grad():
        model(one["input_ids"])
    found["takes tokens apart"] = px._C.collective_counts()["swap"] - 1.0  # that of the embedding
    return found


def test_evaluation_and_generation_are_those_of_one_process_and_take_no_tokens_apart() -> None:
    assert_within(pool(3).run(_evaluated, Tiny()))


@pytest.mark.parametrize(
    ("dtype", "attention"), [(torch.float32, "eager"), (torch.bfloat16, "sdpa")], ids=str
)
def test_low_precision_errs_at_most_twice_as_much_as_one_process(
    dtype: torch.dtype, attention: str
) -> None:
    tiny = Tiny(heads=8, key_value_heads=2, attention=attention)
    errors = partial(errors_in, sequence_parallel=True)
    assert_at_most_twice(pool(2).run(errors, tiny, Layout(1, 2, 1), dtype), FLOOR[dtype])


def test_data_parallel_training_equals_the_single_process() -> None:
    options = {"sequence_parallel": True}
    assert_within(pool(4).run(parity, Tiny(), Layout(2, 2, 1), 3, options))


def _adapted(
    directory: Path, tiny: Tiny, reentrant: bool | None, changes: dict[str, Any]
) -> dict[str, float]:
    """The gradients of an adapter, from PEFT's on the single-process model."""
    model = parallel(tiny.model(), mesh_of(), sequence_parallel=True)
    model = peft.get_peft_model(model, config(**changes))
    model.save_pretrained(directory)
    reference = plain(directory, tiny)
    if reentrant is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    step = share_masks(reference, model)
    step[0] = 1
    for each in (model, reference):
        each.train()
        each(**batch(tiny.vocab_size)).loss.backward()
    return gradient_errors(
        model, {n: p.grad for n, p in reference.named_parameters() if p.requires_grad}
    )


BIASES = {"bias": "all", "lora_bias": True}


@pytest.mark.parametrize(
    ("changes", "reentrant"),
    [
        ({"lora_dropout": 0.3}, False),
        ({"lora_dropout": 0.3}, True),
        (BIASES, None),
        ({"modules_to_save": ["input_layernorm", "norm"]}, True),
    ],
    ids=["dropout", "dropout, reentrant", "biases", "norms beside"],
)
def test_adapters_train_as_in_peft(
    tmp_path: Path, changes: dict[str, Any], reentrant: bool | None
) -> None:
    found = pool(2).run(_adapted, tmp_path, Tiny(bias=True), reentrant, changes)
    assert_within(found, 1e-9)


def _accumulated(tiny: Tiny) -> dict[str, float]:
    reference = tiny.model()
    model = parallel(reference, mesh_of(), sequence_parallel=True)
    return accumulated_differences(reference, model, mesh_of(), tiny, False)


def test_micro_batches_add_up() -> None:
    assert_within(pool(2).run(_accumulated, Tiny()))


def _classified() -> dict[str, float]:
    settings = Tiny().config()
    settings.num_labels = 3
    torch.manual_seed(1)
    reference = transformers.LlamaForSequenceClassification(settings).double().train()
    model = parallel(exact_norms(reference), mesh_of(), sequence_parallel=True)
    one = {"input_ids": batch(101)["input_ids"], "labels": torch.tensor([0, 2])}
    expected, got = reference(**one).loss, model(**one).loss
    expected.backward()
    got.backward()
    errors = shard_differences(model, gradients_of(reference), gradients=True)
    return errors | {"loss": difference(got, expected)}


def test_a_classifier_trains_as_in_one_process() -> None:
    assert_within(pool(2).run(_classified))


def _mixed(module: torch.nn.Module, args: Any, output: Any = None) -> Any:
    """Another part of each token: the mean of its sequence."""
    hidden = args[0] if output is None else output
    mixed = hidden + 0.3 * hidden.mean(1, keepdim=True)
    return (mixed, *args[1:]) if output is None else mixed


def _seen_by_others(where: str) -> dict[str, float]:
    """Gradients where hooks of a user mix the tokens, or add a loss of what they see."""
    reference, one = Tiny().model(), batch(101)
    model = parallel(reference, mesh_of(), sequence_parallel=True)
    for each in (reference, model):
        seen: list[torch.Tensor] = []
        if where == "embedding":
            each.get_input_embeddings().register_forward_hook(_mixed)
        elif where == "norm":
            each.model.norm.register_forward_hook(_mixed)
        elif where == "before the norm":
            norm = each.model.norm
            norm.register_forward_pre_hook(lambda _, args, to=seen: to.append(args[0]))
            norm.register_forward_pre_hook(_mixed)
        elif where == "head":
            each.lm_head.register_forward_pre_hook(_mixed)
        elif where == "decoder":
            each.model.register_forward_hook(lambda *given, to=seen: to.append(given[2][0]))
        elif where == "embeddings given":
            embeddings = each.get_input_embeddings()(one["input_ids"])
            seen.append(embeddings.mean(1))
            one = {**one, "inputs_embeds": embeddings, "input_ids": None}
        elif where == "frozen layer":
            each.model.layers[0].eval()
        loss = each(**one).loss
        (loss + sum(hidden.mean(1).pow(2).sum() for hidden in seen)).backward()
        one["input_ids"] = batch(101)["input_ids"]
        one.pop("inputs_embeds", None)
    return shard_differences(model, gradients_of(reference), gradients=True)


@pytest.mark.parametrize(
    "where",
    [
        *("embedding", "before the norm", "norm", "head", "decoder", "embeddings given"),
        "frozen layer",
    ],
)
def test_others_see_all_tokens_and_have_their_gradients(where: str) -> None:
    assert_within(pool(2).run(_seen_by_others, where))


def _prepended() -> None:
    model = parallel(Tiny().model(), mesh_of(), sequence_parallel=True)
    model.model.norm.register_forward_pre_hook(_mixed, prepend=True)
    with pytest.raises(NotImplementedError, match="prepend=True on the final norm"):
        model(**batch(101))


def test_a_hook_that_would_see_own_tokens_is_refused() -> None:
    pool(2).run(_prepended)


def _after_an_error() -> float:
    reference, one = Tiny().model(), batch(101)
    model = parallel(reference, mesh_of(), sequence_parallel=True)
    hook = model.model.embed_tokens.register_forward_pre_hook(_raise)
    with pytest.raises(RuntimeError, match="of the user"):
        model(**one)
    hook.remove()
    ids = one["input_ids"]
    return difference(model.model.embed_tokens(ids), reference.model.embed_tokens(ids))


def _raise(*_: Any) -> None:
    raise RuntimeError("of the user")


def test_the_embedding_returns_all_rows_to_others_also_after_an_error() -> None:
    assert pool(2).run(_after_an_error) == [0.0, 0.0]


def _loaded(source: str) -> float:
    exact = px.from_pretrained(source, mesh_of(), dtype="float64", sequence_parallel=True).train()
    return px.check_gradients(exact, batch(101)).worst[1]


def test_a_model_from_files_trains_so_too(tmp_path: Path) -> None:
    replace(Tiny(), dtype=torch.float32).model().save_pretrained(tmp_path)
    assert max(pool(2).run(_loaded, str(tmp_path))) <= 1e-6


def _unequal(how: str) -> None:
    """Give the second tp rank another batch than the first."""
    mesh = mesh_of()
    model = parallel(Tiny().model(), mesh, sequence_parallel=True)
    one = batch(101, tokens=9 - mesh.rank * (how == "tokens"))
    if how == "ids":
        one["input_ids"][0, 0] += mesh.rank
    if how == "mode" and mesh.rank == 1:
        model.eval()
    model(**one)


@pytest.mark.parametrize("how", ["ids", "tokens", "mode"])
def test_unequal_batches_of_tp_ranks_raise_on_all_of_them(how: str) -> None:
    here, there = pool(2).run_raising(_unequal, how)
    assert here.text == there.text
    assert "the tp ranks must be given the same batch, but they differ in" in here.text


def _refused(case: str) -> None:
    options = {"sequence_parallel": True}
    model: Any = Tiny().model()
    if case == "another mixture":
        model = TinyMixtral().model()
        model.model.layers[1].mlp.norm = torch.nn.LayerNorm(3)
    elif case == "unnamed noise":
        model, known = (
            TinyMixtral(options=(("router_jitter_noise", 0.1),)).model(),
            SPECS["mixtral"],
        )
        px.register(replace(known, mixture=replace(known.mixture, block_jitter=None)), replace=True)
        try:
            parallel(model, mesh_of(), **options)
        finally:
            px.register(known, replace=True)
    elif case == "dropout":
        sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
        model = transformers.Phi3ForCausalLM(
            transformers.Phi3Config(
                **{"vocab_size": 101, "intermediate_size": 48, "num_hidden_layers": 1, **sizes},
                **{"resid_pdrop": 0.1, "pad_token_id": 0, "max_position_embeddings": 64},
            )
        )
    elif case == "dropout by a function":
        model = with_dropout()
    elif case == "embedding elsewhere":
        check_sequence_parallel(model, replace(SPECS["llama"], embedding="embed_tokens"))
    elif case == "an entry":
        mlp = replace(SPECS["llama"].mlp, entry="act_fn")
        check_sequence_parallel(model, replace(SPECS["llama"], mlp=mlp))
    elif case == "layers without positions":
        model.model.layers[0] = torch.nn.Identity()
        check_sequence_parallel(model, replace(SPECS["llama"], attention=None))
    elif case == "two norms":
        model.model.another = torch.nn.LayerNorm(3)
    elif case == "another part":
        model.model.layers[1].scale = torch.nn.Linear(3, 3)
    model = parallel(model, mesh_of(), **options)
    if case == "hidden states":
        model(**batch(101), output_hidden_states=True)
    elif case == "another checkpointing":
        _recompute_an_mlp(model, _Again.apply)
        model(**batch(101)).loss.backward()


REFUSALS = {
    "another mixture": "only linears are right; model.layers.1.mlp.norm is a LayerNorm",
    "unnamed noise": "name it by block_jitter in the spec",
    "dropout": "does not serve dropout between the sublayers",
    "dropout by a function": "set that of config.residual_dropout, 0.1, to 0",
    "two norms": "needs one norm with weights behind the decoder layers, but there are",
    "embedding elsewhere": "beside the decoder layers in 'model', but it is embed_tokens",
    "an entry": "does not serve the entry of model.layers.0.mlp",
    "layers without positions": "which tell the number of tokens; model.layers.0 is a Identity",
    "another part": "must be norms; model.layers.1.scale is a Linear",
    "another checkpointing": "wrap what it recomputes in parallel_ext.nn.Recomputable",
    "hidden states": "output_hidden_states in training with sequence_parallel",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_not_served_is_refused_on_every_rank(case: str) -> None:
    pool(2).assert_raises(_refused, case, words=REFUSALS[case])
