"""The class that CogAgent's authors publish is cut over ranks by the same table."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from published_cogagent import published_model
from ranks import pool
from reference import (
    assert_within,
    difference,
    gradients_of,
    parallel,
    saved_tensors,
    shard_differences,
)
from reference_cogagent import batch_of, batches_of, exact, picture, tiny_model
from reference_mixtral import Layout, assert_refused, differences_of_adapter

import parallel_ext as px
from parallel_ext.models.cogagent import build_position_ids

ROWS = [picture(6), picture(3)]


def test_the_stand_in_answers_as_our_class_does() -> None:
    ours, published = exact(tiny_model().train()), published_model().train()
    whole = batch_of(ROWS)
    found, expected = published(**whole), ours(**whole)
    assert difference(found.logits, expected.logits) < 1e-6  # ours turns by fp32 angles
    found.loss.backward()
    expected.loss.backward()
    theirs = gradients_of(published)
    for name, gradient in gradients_of(ours).items():
        assert (gradient is None) == (theirs[name] is None), name
        if gradient is not None and gradient.any():
            assert difference(theirs[name], gradient) < 1e-6, name


def _parity(tp: int, side: str, zero: int | None) -> dict[str, float]:
    reference, mesh = published_model().train(), Layout(2 if zero else 1, tp, 1).mesh()
    model = parallel(reference, mesh)
    if zero is not None:
        px.data_parallel(model, mesh, zero)
    whole = batch_of(ROWS, side)
    own = {n: v[mesh.dp_rank : mesh.dp_rank + 1] if zero else v for n, v in whole.items()}
    expected, found = reference(**whole), model(**own)
    assert "logits" not in found
    expected.loss.backward()
    found.loss.backward()
    return shard_differences(model, gradients_of(reference), True)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("tp", "zero"), [(1, None), (2, None), (4, None), (2, 3)])
def test_gradients_are_those_of_the_single_process(tp: int, zero: int | None, side: str) -> None:
    assert_within(pool(tp * (2 if zero else 1)).run(_parity, tp, side, zero))


def _answers() -> tuple[list[list[int]], list[list[int]]]:
    """Greedy tokens, with keys and values in tuples."""
    reference = published_model()
    model = parallel(reference, Layout(1, 2, 1).mesh())
    answers = []
    for each in (reference, model):
        inputs = batch_of(ROWS, "left")
        del inputs["labels"]
        output, tokens, mask = each(**inputs, use_cache=True), [], inputs["attention_mask"]
        positions = build_position_ids(inputs["token_type_ids"], inputs["attention_mask"])[:, -1:]
        for _ in range(5):
            tokens.append(output.logits[:, -1].argmax(-1))
            positions = positions + 1
            mask = F.pad(mask, (0, 1), value=1)
            output = each(
                tokens[-1][:, None],
                token_type_ids=torch.zeros(2, 1, dtype=torch.long),
                attention_mask=mask,
                position_ids=positions,
                past_key_values=output.past_key_values,
                use_cache=True,
            )
        answers.append(torch.stack(tokens).tolist())
    return answers[0], answers[1]


def test_cached_tokens_are_those_of_the_single_process() -> None:
    for expected, found in pool(2).run(_answers):
        assert found == expected


def _losses() -> list[float]:
    model = parallel(published_model().train(), Layout(1, 2, 1).mesh())
    with_labels = batch_of(ROWS)
    answers = model(**with_labels), model(**with_labels, return_dict=True)
    return [answer.loss.item() for answer in answers] + [
        model(**with_labels, return_dict=False)[0].item()
    ]


def test_its_loss_comes_with_names_or_without() -> None:
    for losses in pool(2).run(_losses):
        assert len(set(losses)) == 1


def _adapter() -> dict[str, float]:
    data = batches_of([ROWS])
    targets = ["language_expert_query_key_value", "vision_expert_dense", "key_value", "fc2"]
    return differences_of_adapter(
        lambda: published_model().train(), Layout(1, 2, 1), data, r=3, target_modules=targets
    )


def test_gradients_of_adapters_are_those_of_peft() -> None:
    assert_within(pool(2).run(_adapter), 1e-5)  # the factors are fp32


def _save(directory: Path) -> None:
    parallel(published_model().float(), Layout(1, 2, 1).mesh()).save_pretrained(directory)


def test_files_hold_every_name_of_the_shared_rotary_buffers(tmp_path: Path) -> None:
    pool(2).run(_save, tmp_path / "saved")
    expected = published_model().float().state_dict()
    saved = saved_tensors(tmp_path / "saved")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)


def _dead() -> None:
    model = parallel(published_model(), Layout(1, 2, 1).mesh())
    peft.get_peft_model(model, px.LoraConfig(target_modules=["q_proj", "key_value"]))


def _without_width() -> None:
    model = published_model()
    del model.model.layers[0].cross_attn.cross_hidden_size
    parallel(model, Layout(1, 2, 1).mesh())


REFUSALS = {
    "a dead adapter": (_dead, 2, "reads the weights of its q, k and v past these modules"),
    "a width that is missing": (_without_width, 2, "layers.0.cross_attn.cross_hidden_size"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_is_refused(case: str) -> None:
    assert_refused(__name__, case)
