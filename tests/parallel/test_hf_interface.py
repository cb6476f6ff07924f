"""A parallel model behaves as its HuggingFace class does: outputs, state dicts, generation."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from ranks import pool
from reference import (
    FLOOR,
    Tiny,
    assert_within,
    batch,
    difference,
    gradients_of,
    mesh_of,
    parallel,
    refusal,
    shard_differences,
    worst,
)

import parallel_ext as px
from parallel_ext.sharding.named_shards import named_shards
from parallel_ext.sharding.slices import take

TINY = Tiny()


def _outputs(training: bool, training_logits: bool, labels: bool) -> dict[str, Any]:
    reference = TINY.model().train(training)
    model = parallel(reference, mesh_of(), training_logits=training_logits)
    one = batch(TINY.vocab_size)
    if not labels:
        del one["labels"]
    expected, got = reference(**one), model(**one)
    as_tuple = model(**one, return_dict=False)
    return {
        "logits": None if "logits" not in got else difference(got.logits, expected.logits),
        "shape": None if "logits" not in got else tuple(got.logits.shape),
        "loss": None if not labels else difference(got.loss, expected.loss),
        "length": len(as_tuple) - len(expected.to_tuple()),
        "second": repr(as_tuple[1]),
        "first of tuple": difference(as_tuple[0], expected[0]),
    }


@pytest.mark.parametrize(
    ("training", "training_logits", "labels"),
    [
        *((False, False, True), (True, True, True), (True, False, True)),
        *((False, False, False), (True, False, False)),
    ],
)
def test_logits_are_those_of_one_process_but_none_when_training_with_labels(
    training: bool, training_logits: bool, labels: bool
) -> None:
    for result in pool(2).run(_outputs, training, training_logits, labels):
        assert not labels or result["loss"] <= 1e-10
        assert result["first of tuple"] <= 1e-10
        if training and labels and not training_logits:
            assert result["logits"] is None
            assert result["second"].startswith("None (training with labels makes no logits")
        else:
            assert result["logits"] <= 1e-10
            assert result["shape"] == (2, 9, TINY.vocab_size)


def _touched() -> list[str]:
    output = parallel(TINY.model(), mesh_of())(**batch(TINY.vocab_size))
    again = pickle.loads(pickle.dumps(output.logits))
    said = [repr(again)]
    assert not output.logits
    assert output.logits == again
    for touch in (
        lambda: output.logits.argmax(-1),
        lambda: output.logits[:, -1],
        lambda: torch.argmax(output.logits, -1),
        lambda: output.logits * 2,
        lambda: numpy.asarray(output.logits),
        lambda: list(output.logits),
    ):
        with pytest.raises((AttributeError, TypeError)) as raised:
            touch()
        said.append(str(raised.value))
    return said


def test_logits_that_training_does_not_make_say_so_when_touched() -> None:
    for said in pool(2).run(_touched):
        for text in said:
            assert "pass training_logits=True to px.parallelize" in text


def _own_loss_on_logits() -> tuple[float, str]:
    reference = TINY.model()
    model = parallel(reference, mesh_of())
    one = batch(TINY.vocab_size)
    labels = one.pop("labels")
    for each in (reference, model):
        logits = each(**one).logits[:, :-1]
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1
        ).backward()
    return worst(shard_differences(model, gradients_of(reference), gradients=True))


def test_a_loss_of_ones_own_on_the_logits_has_the_right_gradients() -> None:
    assert_within(pool(3).run(_own_loss_on_logits), FLOOR[TINY.dtype])


def _loss_options() -> dict[str, float]:
    reference = TINY.model()
    del reference.__dict__["_loss_function"]  # HuggingFace's own knows these options
    model = parallel(reference, mesh_of())
    one = batch(TINY.vocab_size)
    shifted = torch.nn.functional.pad(one["labels"], (0, 1), value=-100)[..., 1:]
    differences = {}
    for name, options in {
        "num_items_in_batch as int": {"num_items_in_batch": 37},
        "num_items_in_batch as tensor": {"num_items_in_batch": torch.tensor(37)},
        "shift_labels": {"shift_labels": shifted.contiguous()},
        "ignore_index": {"ignore_index": 3},
    }.items():
        labels = one["labels"]
        if "ignore_index" in options:
            labels = labels.masked_fill(labels == -100, 3)
        arguments = {**one, "labels": labels, **options}
        expected, got = reference(**arguments).loss, model(**arguments).loss
        differences[name] = difference(got, expected)
    return differences


def test_loss_options_mean_what_they_mean_in_huggingface() -> None:
    assert_within(pool(2).run(_loss_options), 1e-6)  # HuggingFace's loss computes in fp32


def _adding_to_the_loss_in_place() -> tuple[float, str]:
    reference = TINY.model()
    model = parallel(reference, mesh_of())
    one = batch(TINY.vocab_size)
    for each in (reference, model):
        loss = each(**one).loss
        loss += 1.0
        loss *= 2.0
        loss.backward()
    return worst(shard_differences(model, gradients_of(reference), gradients=True))


def test_the_loss_may_be_changed_in_place() -> None:
    assert_within(pool(2).run(_adding_to_the_loss_in_place), FLOOR[TINY.dtype])


def _sizes(tied: bool) -> dict[str, Any]:
    model = parallel(Tiny(tied=tied).model(), mesh_of())
    model.tie_weights()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return {
        "config": model.config.vocab_size,
        "model": model.vocab_size,
        "inner model": model.model.vocab_size,
        "embedding": embedding.num_embeddings,
        "head": head.out_features,
        "tied": embedding.weight is head.weight,
        "local rows": embedding.weight.shape[0],
    }


@pytest.mark.parametrize("tied", [False, True])
def test_every_public_size_is_the_true_vocabulary(tied: bool) -> None:
    ranks = pool(2).run(_sizes, tied)
    assert [sizes.pop("local rows") for sizes in ranks] == [51, 50]
    for sizes in ranks:
        assert sizes.pop("tied") is tied
        assert set(sizes.values()) == {TINY.vocab_size}


def _state_dicts() -> list[str]:
    """What is refused by a model that has loaded full tensors, and its own shards."""
    model, full = parallel(TINY.model(), mesh_of()), TINY.model(seed=7).state_dict()
    model.load_state_dict(full)
    shards = copy.deepcopy(model.state_dict())
    assert sorted(full) == sorted(name for name in shards if "_extra_state" not in name)
    for name, shard in shards.items():  # arguments may be given by name
        assert torch.equal(torch.add(input=shard, other=shard), shard + shard), name
        assert torch.equal(torch.clone(input=shard), shard), name
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(shards)
    assert worst(shard_differences(model, full, gradients=False))[0] == 0
    wrong = {**full, "lm_head.weight": full["lm_head.weight"][:-3]}
    missing = {name: value for name, value in full.items() if name != "lm_head.weight"}
    return [refusal(lambda given=given: model.load_state_dict(given)) for given in (wrong, missing)]


def test_load_state_dict_takes_full_tensors_or_own_shards_and_refuses_the_rest() -> None:
    for rank, (mismatch, missing) in enumerate(pool(2).run(_state_dicts)):
        assert "lm_head.weight: got shape (98, 72); expected the full (101, 72)" in mismatch
        assert ("(51, 72)", "(50, 72)")[rank] in mismatch
        assert 'Missing key(s) in state_dict: "lm_head.weight"' in missing


REPLICATED = Tiny(heads=4, key_value_heads=1, tied=True)
GENERATION = {
    "greedy": ({"do_sample": False}, TINY),
    "greedy, static cache": ({"do_sample": False, "cache_implementation": "static"}, REPLICATED),
    "greedy, static cache, prompt in parts": (
        {"do_sample": False, "cache_implementation": "static", "prefill_chunk_size": 3},
        TINY,
    ),
    "greedy without a cache": ({"do_sample": False, "use_cache": False}, TINY),
    "beams": ({"do_sample": False, "num_beams": 3}, REPLICATED),
    "sampling": ({"do_sample": True, "top_k": 20, "temperature": 1.3}, TINY),
}


def _generated(options: dict[str, Any], tiny: Tiny) -> tuple[list, list, float]:
    reference = tiny.model().eval()
    model = parallel(reference, mesh_of())
    prompt = batch(tiny.vocab_size)
    del prompt["labels"]
    arguments = {**prompt, **options, "max_new_tokens": 8, "eos_token_id": None}
    # Each rank has its own random state; that of tp rank 0 must count on all of them.
    torch.manual_seed(11)
    expected = reference.generate(**arguments)
    after_one_process = torch.rand(1).item()
    torch.manual_seed(11 + dist.get_rank())
    got = model.generate(**arguments)
    return expected.tolist(), got.tolist(), torch.rand(1).item() - after_one_process


@pytest.mark.parametrize("how", GENERATION)
def test_generates_what_one_process_generates_by(how: str) -> None:
    for rank, (expected, got, drift) in enumerate(pool(3).run(_generated, *GENERATION[how])):
        assert got == expected
        if rank == 0:
            assert drift == 0  # rank 0's generator has advanced as one process' would


def _copied_with_parts(sequence_parallel: bool) -> dict[str, tuple[int, int]]:
    """How many modules a copy of a part copies, where they are not its own; PEFT makes such."""
    model = parallel(TINY.model(), mesh_of(), sequence_parallel=sequence_parallel)
    found = {}
    for name, part in model.named_modules():
        copied: dict[int, Any] = {}
        copy.deepcopy(part, copied)
        own, all_of_it = len([*part.modules()]), [*copied.values()]
        modules = sum(isinstance(each, torch.nn.Module) for each in all_of_it)
        if modules != own:
            found[name] = modules, own
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_copy_of_a_part_is_not_one_of_the_model(sequence_parallel: bool) -> None:
    assert pool(2).run(_copied_with_parts, sequence_parallel) == [{}, {}]


def _asked_for_gradients() -> list[bool]:
    """Whether what the embedding returns requires a gradient: as asked before, and no more."""
    plain = Tiny(dtype=torch.float32).model().requires_grad_(False)
    for _ in range(2):  # of which transformers forgets the first
        plain.enable_input_require_grads()
    model, found = px.parallelize(plain, mesh_of()), []
    ids = batch(TINY.vocab_size)["input_ids"]
    found.append(model.get_input_embeddings()(ids).requires_grad)
    model.disable_input_require_grads()
    found.append(model.get_input_embeddings()(ids).requires_grad)
    return found


def test_an_embedding_is_asked_for_gradients_as_before() -> None:
    assert pool(2).run(_asked_for_gradients) == [[True, False]] * 2


def _full_state(writer_only: bool) -> tuple[int, float]:
    reference = Tiny(tied=True).model()
    model = parallel(reference, mesh_of())
    full = px.full_state_dict(model, writer_only=writer_only)
    expected = reference.state_dict()
    errors = [difference(full[n], expected[n]) for n in full]
    if full and sorted(full) != sorted(expected):
        raise AssertionError(f"{sorted(full)} != {sorted(expected)}")
    return len(full), max(errors, default=0.0)


def test_full_state_dict_is_that_of_one_process() -> None:
    everywhere = pool(3).run(_full_state, False)
    assert all(count > 0 and error == 0 for count, error in everywhere)
    writer, *others = pool(3).run(_full_state, True)
    assert writer[0] > 0
    assert writer[1] == 0
    assert others == [(0, 0.0), (0, 0.0)]


def _shards_of(multiple_of: int) -> list[int]:
    model = parallel(Tiny(vocab_size=100).model(), mesh_of(), vocab_multiple_of=multiple_of)
    return [p.shape[0] for n, p, _ in named_shards(model) if n == "model.embed_tokens.weight"]


def test_vocab_multiple_of_aligns_the_shards() -> None:
    assert pool(3).run(_shards_of, 32) == [[64], [32], [4]]


def test_slicing_a_tensor_of_another_shape_is_refused() -> None:
    model = parallel(TINY.model(), px.init_mesh())
    layout = next(layout for _, _, layout in named_shards(model))
    with pytest.raises(ValueError, match=r"expected the full shape \(101, 72\), got \(3, 72\)"):
        take(torch.zeros(3, 72), layout, 0)
