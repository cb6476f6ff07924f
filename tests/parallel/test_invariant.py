"""The same bits on any number of tp ranks: losses, norms, and digests of weights and gradients."""

from __future__ import annotations

import copy
import hashlib
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
    batch,
    gradients_of,
    mesh_of,
    parallel,
    shard_differences,
    worst,
)
from test_specs import OfSpec
from torch import nn

import parallel_ext as px
from parallel_ext.nn.sharded_module import named_shards
from parallel_ext.parallel.state import state_of
from parallel_ext.sharding.blocks import counted_blocks

KINDS = {
    "odd": Tiny(dtype=torch.float32, inner=145),
    "tied": Tiny(dtype=torch.float32, inner=145, tied=True),
    "bf16": Tiny(dtype=torch.bfloat16, inner=145),
    "shared heads": Tiny(dtype=torch.float32, heads=8, key_value_heads=2, inner=33),
    "eager": Tiny(dtype=torch.float32, attention="eager"),
    "wide": Tiny(dtype=torch.float32, heads=8, key_value_heads=4, inner=512, vocab_size=257),
    "biases": Tiny(dtype=torch.float32, heads=8, key_value_heads=2, bias=True),
    "bf16 biases": Tiny(dtype=torch.bfloat16, heads=8, key_value_heads=1, bias=True),
    "qwen2": OfSpec("qwen2", dtype=torch.float32),
    "qwen3": OfSpec("qwen3", dtype=torch.float32, heads=8, key_value_heads=2),
    "bf16 qwen3": OfSpec("qwen3", dtype=torch.bfloat16),
}
BITS = tuple[list[tuple[str, str]], dict[str, str], str | None]


def _digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Of every block of the weights, gradients and second moments that this rank counts."""
    rank, found = state_of(model).mesh.rank, {}
    for name, parameter, layout in named_shards(model):
        first = layout.ranges(rank)[0][0] if layout.dim is not None else 0
        for start, stop in counted_blocks(layout, rank):
            for kind, tensor in (
                ("weight", parameter),
                ("gradient", parameter.grad),
                ("moment", optimizer.state[parameter]["exp_avg_sq"]),
            ):
                block = tensor.detach().narrow(layout.dim or 0, start, stop - start).contiguous()
                data = block.flatten().view(torch.uint8).numpy()
                found[f"{kind} of {name} at {first + start}"] = hashlib.sha256(data).hexdigest()
    return found


def _train(tiny: Tiny | OfSpec, how: str = "", tokens: int = 19) -> BITS:
    """Losses, norms and digests after steps on this pool's ranks."""
    if how == "two threads":
        torch.set_num_threads(2)
    model = tiny.model()
    invariant = None if how == "ordinary" else px.Invariant(8)
    model = px.parallelize(model, mesh_of(), invariant=invariant)
    if "checkpointing" in how:
        model.gradient_checkpointing_enable({"use_reentrant": how.startswith("reentrant")})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    log = []
    for step in range(4):
        loss = model(**batch(tiny.vocab_size, 2, tokens, seed=step)).loss
        loss.backward()
        if how == "accumulation" and step % 2 == 0:
            continue
        clip = nn.utils.clip_grad_norm_ if how == "torch's clip" else None
        norm = clip(model.parameters(), 0.5) if clip else px.clip_grad_norm_(model, 0.5)
        optimizer.step()
        log.append((loss.item().hex(), norm.item().hex()))
        if step < 3:
            optimizer.zero_grad()
    torch.set_num_threads(1)
    return log, _digests(model, optimizer), px.digest(model) if invariant else None


def _assert_bits(results: list[BITS], whole: BITS) -> None:
    log, blocks, digest = whole
    found: dict[str, str] = {}
    for own_log, own_blocks, own_digest in results:
        assert own_log == log
        assert own_digest == digest
        assert not found.keys() & own_blocks.keys()
        found |= own_blocks
    assert {name for name in blocks if found.get(name) != blocks[name]} == set()
    assert found.keys() == blocks.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_any_tp_has_the_bits_of_one_process(kind: str) -> None:
    tiny = KINDS[kind]
    (whole,) = pool(1).run(_train, tiny)
    for tp in (2, 3) if tiny.key_value_heads == 3 else (2, 3, 4):
        _assert_bits(pool(tp).run(_train, tiny), whole)


@pytest.mark.parametrize("how", ["two threads", "checkpointing", "reentrant checkpointing"])
def test_ways_to_train_have_the_same_bits(how: str) -> None:
    # Of fewer than 64 tokens, torch's attention has other bits with other numbers of threads.
    (whole,) = pool(1).run(_train, KINDS["odd"], "", 66)
    _assert_bits(pool(2).run(_train, KINDS["odd"], how, 66), whole)


@pytest.mark.parametrize("how", ["accumulation", "torch's clip"])
def test_any_tp_has_the_bits_of_one_process_so(how: str) -> None:
    (whole,) = pool(1).run(_train, KINDS["odd"], how)
    _assert_bits(pool(3).run(_train, KINDS["odd"], how), whole)


def test_the_tests_above_notice_the_ordinary_sums() -> None:
    (whole,) = pool(1).run(_train, KINDS["odd"], "ordinary")
    with pytest.raises(AssertionError):
        _assert_bits(pool(3).run(_train, KINDS["odd"], "ordinary"), whole)


@pytest.mark.parametrize("tokens", [4, 140])
def test_any_number_of_tokens(tokens: int) -> None:
    (whole,) = pool(1).run(_train, KINDS["wide"], "", tokens)
    _assert_bits(pool(2).run(_train, KINDS["wide"], "", tokens), whole)


def _differences(tiny: Tiny | OfSpec) -> tuple[float, dict[str, float]]:
    reference = tiny.model()
    model = parallel(reference, mesh_of(), invariant=px.Invariant(4))
    of_batch = batch(tiny.vocab_size)
    theirs, ours = (each(**of_batch).loss for each in (reference, model))
    theirs.backward()
    ours.backward()
    return (ours / theirs - 1).abs().item(), shard_differences(model, gradients_of(reference), True)


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize(
    "tiny", [Tiny(), Tiny(bias=True), OfSpec("qwen2"), OfSpec("qwen3", heads=8, key_value_heads=2)]
)
def test_gradients_are_those_of_the_plain_model(tiny: Tiny | OfSpec, tp: int) -> None:
    for loss, gradients in pool(tp).run(_differences, tiny):
        assert loss < FLOOR[torch.float64]
        assert worst(gradients) < (FLOOR[torch.float64], "")


def _resume(tiny: Tiny, root: Path, saves: bool) -> BITS | None:
    """Two steps and a checkpoint; or that loaded, and two more."""
    model = px.parallelize(tiny.model(), mesh_of(), invariant=px.Invariant(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if not saves:
        px.load_checkpoint(root, model, optimizer)
    log = []
    for step in (0, 1) if saves else (2, 3):
        optimizer.zero_grad()
        loss = model(**batch(tiny.vocab_size, 2, 19, seed=step)).loss
        loss.backward()
        log.append((loss.item().hex(), px.clip_grad_norm_(model, 0.5).item().hex()))
        optimizer.step()
    if saves:
        px.save_checkpoint(root, 2, model, optimizer)
        return None
    return log, _digests(model, optimizer), px.digest(model)


def test_a_run_resumes_on_another_layout_with_the_same_bits(tmp_path: Path) -> None:
    tiny = KINDS["odd"]
    ((log, blocks, digest),) = pool(1).run(_train, tiny)
    for saving, loading in ((2, 3), (3, 1)):
        root = tmp_path / f"{saving} to {loading}"
        pool(saving).run(_resume, tiny, root, True)
        _assert_bits(pool(loading).run(_resume, tiny, root, False), (log[2:], blocks, digest))


def _own_files(tiny: Tiny, folder: Path) -> str:
    reference = tiny.model()
    if mesh_of().rank == 0:
        reference.save_pretrained(folder / "plain")
    mesh_of().control.barrier("saved")
    model = px.from_pretrained(folder / "plain", mesh_of(), invariant=px.Invariant(8))
    model.save_pretrained(folder / "ours")
    of_batch = batch(tiny.vocab_size)
    with torch.no_grad():
        loss, expected = model(**of_batch).loss, reference.eval()(**of_batch).loss
    torch.testing.assert_close(loss, expected)
    ids = of_batch["input_ids"][1:]
    found = px.generate(model, ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(found, reference.generate(ids, max_new_tokens=4, do_sample=False))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        next(twin.parameters()).mul_(2.0)
    assert px.digest(twin) != px.digest(model)
    parts = px.digest(model, per_parameter=True)
    assert parts.keys() == {name for name, _ in reference.named_parameters()}
    return px.digest(model)


def test_files_are_huggingfaces(tmp_path: Path) -> None:
    digests = []
    for tp in (1, 3):
        folder = tmp_path / str(tp)
        digests += pool(tp).run(_own_files, KINDS["tied"], folder)
        plain, ours = (
            transformers.LlamaForCausalLM.from_pretrained(folder / name).state_dict()
            for name in ("plain", "ours")
        )
        assert all(torch.equal(ours[name], plain[name]) for name in plain)
    assert len(set(digests)) == 1


def _spoiled(name: str) -> str:
    """What px.digest says where one rank has changed what all ranks hold."""
    model = px.parallelize(KINDS["odd"].model(), mesh_of(), invariant=px.Invariant(8))
    if mesh_of().rank == 1:
        with torch.no_grad():
            model.get_parameter(name)[0].mul_(1.0000002)
    try:
        px.digest(model)
    except px.DisagreementError as error:
        return str(error)
    return "nothing was raised"


def test_a_digest_finds_a_rank_with_other_bits() -> None:
    for text in pool(3).run(_spoiled, "model.norm.weight"):
        assert "ranks 0 and 1 hold different bits of model.norm.weight" in text


def _refusals() -> list[Any]:
    mesh = mesh_of()

    def refused(function: Any) -> str:
        try:
            function()
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
            return str(error)
        return "nothing was raised"

    def model_of(**changes: Any) -> Any:
        config = Tiny(dtype=torch.float32).config()
        for name, value in changes.items():
            setattr(config, name, value)
        return transformers.AutoModelForCausalLM.from_config(config)

    def made(model: Any, invariant: Any = None, **options: Any) -> Any:
        return px.parallelize(model, mesh, invariant=invariant or px.Invariant(8), **options)

    model, lora = made(model_of()), peft.LoraConfig(r=2, target_modules=["lm_head"])

    return [
        refused(lambda: made(OfSpec("gemma3_text", dtype=torch.float32).model())),
        refused(lambda: made(model_of(attention_dropout=0.1))),
        refused(lambda: made(model_of(hidden_act="gelu"))),
        refused(lambda: made(model_of(head_dim=10))),
        refused(lambda: made(OfSpec("olmo2", dtype=torch.float32).model())),
        refused(lambda: made(model_of(), px.Invariant(1))),
        refused(lambda: made(model_of(), 8)),
        refused(lambda: made(model_of(), fused_loss=False)),
        refused(lambda: px.Invariant(0)),
        refused(lambda: peft.get_peft_model(model, lora)),
        refused(lambda: model.resize_token_embeddings(200)),
        refused(lambda: px.Adafactor(model)),
        refused(lambda: model.model.layers[0].mlp.gate_proj(torch.ones(1, 72))),
        refused(lambda: px.digest(px.parallelize(model_of(), mesh))),
    ]


def test_what_is_not_served_is_refused_by_name() -> None:
    words = [
        "is a Gemma3RMSNorm",
        "attention_dropout",
        "mlp.act_fn is a GELUActivation",
        "self_attn have 10",
        "norms over all heads",
        "more than the 1 blocks of",
        "must be a px.Invariant",
        "leave out training_logits and fused_loss",
        "at least 1, not 0",
        "does not serve an adapter on lm_head",
        "px.Invariant",
        "px.Invariant",
        "computed together",
        "invariant=",
    ]
    for texts in pool(2).run(_refusals):
        for text, word in zip(texts, words, strict=True):
            assert word in text, text
