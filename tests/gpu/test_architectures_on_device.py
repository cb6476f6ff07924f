"""Every architecture on two ranks of the one device: its training, its answers and its tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from on_device import device_path, placed
from ranks import pool
from reference import assert_within, batch, difference, gradients_of, parallel, shard_differences
from reference_images import DECODERS, exact_loss, image_batch, tiny_model
from reference_mixtral import batches, differences_of_steps
from test_specs import KINDS, OfSpec, in_fp64

import parallel_ext as px

ON_CPU = ("gpt_oss", "llava")  # the other tests of ``make test`` train and load all of them


def _skip_most_on_cpu(kind: str, device: torch.device) -> None:
    if device.type == "cpu" and kind not in ON_CPU:
        pytest.skip("tests/models has all architectures on a CPU")


def _mesh(kind: str, device: torch.device) -> px.Mesh:
    torch.backends.cudnn.allow_tf32 = False  # convolutions, too, in fp32
    ep = 2 if OfSpec(kind).has_experts else 1
    return px.init_mesh(tp=2, ep=ep, timeout=60.0, device=device)


@in_fp64()
def _trained(kind: str, device: torch.device) -> dict[str, float]:
    with device_path(device):
        mesh = _mesh(kind, device)
        reference = OfSpec(kind).model().to(device)
        model = parallel(reference, mesh)
        steps = (placed(batches(OfSpec(kind), 1, seed=step), device) for step in range(2))
        differences = differences_of_steps(reference, model, mesh, steps)
        mesh.close()
    return differences


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_as_one_process(kind: str, device: torch.device) -> None:
    _skip_most_on_cpu(kind, device)
    spec = OfSpec(kind).spec
    # Routers and delta rules are computed in fp32, by other products for other shapes.
    limit = 1e-3 if spec.delta_net else 3e-5 if spec.mixture else 1e-8
    if kind.startswith("granitemoe"):  # of small weights AdamW makes more of a gradient's rounding
        limit = 3e-3
    assert_within(pool(2).run(_trained, kind, device), limit)


@torch.no_grad()
def _loaded(kind: str, source: str, device: torch.device) -> dict[str, float]:
    with device_path(device):
        mesh = _mesh(kind, device)
        of = transformers.AutoModelForCausalLM
        plain = of.from_pretrained(source, dtype=torch.float32).eval().to(device)
        model = px.from_pretrained(source, mesh, dtype=torch.float32)
        assert {each.device for each in model.parameters()} == {mesh.device}
        one = placed(batch(101), device)
        evaluated, expected = model(**one), plain(**one)
        prompt = torch.tensor([[5, 6, 7, 8, 9, 10]], device=device)
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
        options["pad_token_id"] = 0
        tokens = plain.generate(prompt, **options)
        ours = (model.generate(prompt, **options), px.generate(model, prompt, **options))
        mesh.close()
    return {
        "logits": difference(evaluated.logits, expected.logits),
        "loss": difference(evaluated.loss, expected.loss),
        "tokens": max(float(not torch.equal(each, tokens)) for each in ours),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_files_evaluate_and_generate_as_in_one_process(
    kind: str, device: torch.device, tmp_path: Path
) -> None:
    _skip_most_on_cpu(kind, device)
    OfSpec(kind, tied=True, dtype=torch.float32).model().save_pretrained(tmp_path)
    assert_within(pool(2).run(_loaded, kind, str(tmp_path), device), 1e-4)


def _with_images(kind: str, device: torch.device) -> dict[str, float]:
    with device_path(device):
        mesh = px.init_mesh(tp=2, timeout=60.0, device=device)
        reference, ours = (tiny_model(kind).to(device) for _ in range(2))
        reference.loss_function = exact_loss
        px.parallelize(ours, mesh)
        one = placed(image_batch(3, kind), device)
        losses = [model(**one).loss for model in (reference, ours)]
        for loss in losses:
            loss.backward()
        differences = shard_differences(ours, gradients_of(reference), True)
        mesh.close()
    return differences | {"loss": difference(losses[1], losses[0])}


@pytest.mark.parametrize("kind", DECODERS)
def test_a_model_of_images_has_the_gradients_of_one_process(
    kind: str, device: torch.device
) -> None:
    _skip_most_on_cpu(kind, device)
    assert_within(pool(2).run(_with_images, kind, device), 1e-5)
