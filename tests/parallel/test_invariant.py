"""The same bits on any number of tp ranks: losses, norms, and digests of weights and gradients."""

from __future__ import annotations

import copy
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

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
    refusal,
    shard_differences,
    worst,
)
from reference_invariant import BITS, assert_bits, digests
from reference_ops import aten_path, threads
from test_specs import KINDS as SPEC_KINDS
from test_specs import OfSpec, in_fp64, with_dropout
from torch import nn

import parallel_ext as px
from parallel_ext import _C, ops
from parallel_ext.models import SPECS
from parallel_ext.nn import blocks
from parallel_ext.nn.blocks import BlockRowLinear, FixedSilu
from parallel_ext.parallel.invariant import check_invariant

STEPS = 2


class ByErf(Tiny):
    """With GELU as it is defined."""

    def config(self) -> transformers.LlamaConfig:
        config = super().config()
        config.hidden_act = "gelu"
        return config


class Unbiased(OfSpec):
    """Without the biases that tests of the architecture have, as it was published."""

    def config(self) -> transformers.PreTrainedConfig:
        config = super().config()
        config.use_bias = False
        return config


KINDS = {
    "gelu by erf": ByErf(dtype=torch.float32, inner=145),
    "odd": Tiny(dtype=torch.float32, inner=145),
    "tied": Tiny(dtype=torch.float32, inner=145, tied=True),
    "bf16": Tiny(dtype=torch.bfloat16, inner=145),
    "shared heads": Tiny(dtype=torch.float32, heads=8, key_value_heads=2, inner=33),
    "eager": Tiny(dtype=torch.float32, attention="eager"),
    "wide": Tiny(dtype=torch.float32, heads=8, key_value_heads=4, inner=512, vocab_size=257),
    "large vocabulary": Tiny(dtype=torch.float32, vocab_size=4099, layers=1),
    "biases": Tiny(dtype=torch.float32, heads=8, key_value_heads=2, bias=True),
    "bf16 biases": Tiny(dtype=torch.bfloat16, heads=8, key_value_heads=1, bias=True),
    "qwen3": OfSpec("qwen3", dtype=torch.float32, heads=8, key_value_heads=2),
    "bf16 gemma": OfSpec("gemma", dtype=torch.bfloat16, tied=True, heads=8, key_value_heads=1),
    "bf16 gemma3": OfSpec("gemma3_text", dtype=torch.bfloat16, heads=8, key_value_heads=2),
    "gemma4 unified": OfSpec(
        "gemma4_unified_text", dtype=torch.float32, heads=8, key_value_heads=4
    ),
    "bf16 gemma4": OfSpec("gemma4_text", dtype=torch.bfloat16, heads=8, key_value_heads=2),
    "bf16 vaultgemma": OfSpec("vaultgemma", dtype=torch.bfloat16, heads=8, key_value_heads=2),
    "granitemoeshared": OfSpec("granitemoeshared", dtype=torch.float32),
    "llama4": OfSpec("llama4_text", dtype=torch.float32, heads=8, key_value_heads=2),
    "bf16 llama4": OfSpec("llama4_text", dtype=torch.bfloat16, heads=8, key_value_heads=4),
    "bf16 olmo3": OfSpec("olmo3", dtype=torch.bfloat16, heads=9, key_value_heads=9),
    "bf16 gemma2": OfSpec("gemma2", dtype=torch.bfloat16, heads=8, key_value_heads=2),
    "phi3": OfSpec("phi3", dtype=torch.float32),
    "starcoder2": OfSpec("starcoder2", dtype=torch.float32, heads=8, key_value_heads=2),
    "bf16 cohere2": OfSpec("cohere2", dtype=torch.bfloat16, heads=8, key_value_heads=2),
    "bf16 exaone4": OfSpec("exaone4", dtype=torch.bfloat16, heads=8, key_value_heads=2),
    "hunyuan": OfSpec("hunyuan_v1_dense", dtype=torch.float32, heads=8, key_value_heads=2),
    "bf16 arcee": OfSpec("arcee", dtype=torch.bfloat16, heads=8, key_value_heads=2),
    "glm4_moe": OfSpec("glm4_moe", dtype=torch.float32),
    "deepseek_v3": OfSpec("deepseek_v3", dtype=torch.float32),
    "bf16 glm4_moe_lite": OfSpec("glm4_moe_lite", dtype=torch.bfloat16),
    "deepseek_v2": OfSpec("deepseek_v2", dtype=torch.float32),
    "ernie4_5_moe": Unbiased("ernie4_5_moe", dtype=torch.float32),
    "hy_v3": OfSpec("hy_v3", dtype=torch.float32, heads=8, key_value_heads=2),
    "bf16 nanochat": OfSpec("nanochat", dtype=torch.bfloat16, heads=8, key_value_heads=2),
    "bf16 minicpm3": OfSpec("minicpm3", dtype=torch.bfloat16),
    "bf16 olmoe": OfSpec("olmoe", dtype=torch.bfloat16, heads=9, key_value_heads=9),
}


def _is_there(tiny: Tiny | OfSpec) -> bool:
    """Whether this release of transformers has the classes."""
    return isinstance(tiny, Tiny) or tiny.kind in SPEC_KINDS


KINDS = {name: tiny for name, tiny in KINDS.items() if _is_there(tiny)}


def _train(tiny: Tiny | OfSpec, how: str = "", tokens: int = 19) -> BITS:
    """Losses, norms and digests after steps on this pool's ranks."""
    if how == "the path of a GPU":
        with aten_path(True):
            return _train(tiny, "", tokens)
    model = tiny.model()
    invariant = None if how == "ordinary" else px.Invariant(8)
    model = px.parallelize(model, mesh_of(), invariant=invariant)
    if "checkpointing" in how:
        model.gradient_checkpointing_enable({"use_reentrant": how.startswith("reentrant")})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    log = []
    for step in range(STEPS):
        loss = model(**batch(tiny.vocab_size, 2, tokens, seed=step)).loss
        loss.backward()
        if how == "accumulation" and step % 2 == 0:
            continue
        clip = nn.utils.clip_grad_norm_ if how == "torch's clip" else None
        norm = clip(model.parameters(), 0.5) if clip else px.clip_grad_norm_(model, 0.5)
        optimizer.step()
        log.append((loss.item().hex(), norm.item().hex()))
        if step < STEPS - 1:
            optimizer.zero_grad()
    return log, digests(model, optimizer), px.digest(model) if invariant else None


@pytest.mark.parametrize("kind", KINDS)
def test_any_tp_has_the_bits_of_one_process(kind: str) -> None:
    """On 3 and 4 ranks; those below are on 2."""
    tiny = KINDS[kind]
    (whole,) = pool(1).run(_train, tiny)
    for tp in (3,) if tiny.key_value_heads == 3 else (3, 4):
        assert_bits(pool(tp).run(_train, tiny), whole)


@pytest.mark.parametrize(
    ("how", "of_one", "tp"),
    [
        *(("checkpointing", "", 2), ("reentrant checkpointing", "", 2)),
        *(("accumulation", "accumulation", 3), ("torch's clip", "torch's clip", 3)),
    ],
)
def test_ways_to_train_have_the_same_bits(how: str, of_one: str, tp: int) -> None:
    (whole,) = pool(1).run(_train, KINDS["odd"], of_one)
    assert_bits(pool(tp).run(_train, KINDS["odd"], how), whole)


@pytest.mark.parametrize("kind", ["bf16", "tied", "biases", "bf16 gemma"])
def test_the_path_of_a_gpu_has_the_same_bits_on_any_tp(kind: str) -> None:
    """Of 32 tokens: torch's activations on a CPU have other bits at the end of other sizes."""
    (whole,) = pool(1).run(_train, KINDS[kind], "the path of a GPU", 16)
    assert_bits(pool(3).run(_train, KINDS[kind], "the path of a GPU", 16), whole)


def test_the_tests_above_notice_the_ordinary_sums() -> None:
    (whole,) = pool(1).run(_train, KINDS["odd"], "ordinary")
    with pytest.raises(AssertionError):
        assert_bits(pool(3).run(_train, KINDS["odd"], "ordinary"), whole)


def _merged(input: torch.Tensor, weights: Any, *others: Any) -> list[torch.Tensor]:
    """One product for all of a rank's columns, however few these are."""
    outputs = ops.block_linears(input, weights, *others)
    for output, weight in zip(outputs, weights, strict=True):
        output.data.copy_(input.detach() @ weight.detach().T)
    return outputs


def _summed(self: Any, input: torch.Tensor) -> torch.Tensor:
    return ops.reduce_from_region(input @ self.weight.T, self.group)


class Large(Tiny):
    """With an MLP whose last bits are not lost in what they are added to."""

    def model(self, seed: int = 1) -> nn.Module:
        model = super().model(seed)
        with torch.no_grad():
            for layer in model.model.layers:
                for parameter in layer.mlp.parameters():
                    parameter.mul_(10)
        return model


BROKEN: dict[str, tuple[Tiny, Any, str, Any]] = {
    "torch's silu": (
        *(Large(dtype=torch.float32, inner=13), FixedSilu),  # the last token has no label
        *("forward", nn.SiLU().forward),
    ),
    "a merge under 16 columns": (
        *(Large(dtype=torch.float32, inner=3), blocks),
        *("ops", SimpleNamespace(**{**vars(ops), "block_linears": _merged})),
    ),
    "one product a rank": (KINDS["odd"], BlockRowLinear, "forward", _summed),
}


def _train_broken(how: str) -> BITS:
    tiny, *broken = BROKEN[how]
    with mock.patch.object(*broken):
        return _train(tiny)


@pytest.mark.parametrize("how", BROKEN)
def test_the_tests_above_notice(how: str) -> None:
    (whole,) = pool(1).run(_train, BROKEN[how][0])
    assert_bits(pool(3).run(_train, BROKEN[how][0]), whole)
    (whole,) = pool(1).run(_train_broken, how)
    with pytest.raises(AssertionError):
        assert_bits(pool(3).run(_train_broken, how), whole)


def _bytes_of_a_step(blocks: int) -> tuple[int, int]:
    """What a rank brings to the all-gathers of a step, and the bytes of [T, H] in fp32."""
    tiny, tokens = Tiny(heads=24, key_value_heads=24, dtype=torch.float32), 2 * 19
    model = px.parallelize(tiny.model(), mesh_of(), invariant=px.Invariant(blocks), agreement=False)
    of_batch = batch(tiny.vocab_size, 2, 19)
    _C.reset_collective_counts()
    model(**of_batch).loss.backward()
    counts = _C.collective_counts()
    assert counts.get("all_reduce", 0) == 0
    return counts["all_gather_bytes"], tokens * 8 * tiny.heads * 4


@pytest.mark.parametrize(("tp", "blocks", "nodes"), [(3, 8, 2), (4, 8, 1), (4, 12, 2)])
def test_a_step_exchanges_so_many_nodes(tp: int, blocks: int, nodes: int) -> None:
    """Of each sum the complete nodes that one rank has, all ranks as many as the one with most.

    Sums are those of two row linears and two inputs in each of two layers, and the one before the
    head. A token has 12 bytes of statistics in each block of the vocabulary.
    """
    for found, of_sum in pool(tp).run(_bytes_of_a_step, blocks):
        assert found == (4 * 2 + 1) * nodes * of_sum + -(-blocks // tp) * 12 * 2 * 19


@pytest.mark.parametrize("tokens", [4, 140])
def test_any_number_of_tokens(tokens: int) -> None:
    (whole,) = pool(1).run(_train, KINDS["wide"], "", tokens)
    assert_bits(pool(2).run(_train, KINDS["wide"], "", tokens), whole)


@in_fp64()
def _differences(tiny: Tiny | OfSpec) -> tuple[float, dict[str, float]]:
    reference = tiny.model()
    model = parallel(reference, mesh_of(), invariant=px.Invariant(4))
    of_batch = batch(tiny.vocab_size)
    theirs, ours = (each(**of_batch).loss for each in (reference, model))
    theirs.backward()
    ours.backward()
    return (ours / theirs - 1).abs().item(), shard_differences(model, gradients_of(reference), True)


LIKE_PLAIN = (
    *(Tiny(), Tiny(bias=True), OfSpec("qwen2"), OfSpec("qwen3", heads=8, key_value_heads=2)),
    *(OfSpec("gemma"), OfSpec("gemma2", tied=True), OfSpec("gemma3_text")),
    *(OfSpec("gemma4_text", heads=8, key_value_heads=2), OfSpec("vaultgemma")),
    OfSpec("gemma4_unified_text", heads=8, key_value_heads=4),
    *(OfSpec("olmo2", heads=5, key_value_heads=5), OfSpec("phi3"), ByErf()),
    *(OfSpec("exaone4"), OfSpec("hunyuan_v1_dense"), OfSpec("arcee"), OfSpec("glm4_moe")),
    *(OfSpec("deepseek_v2"), OfSpec("deepseek_v3"), OfSpec("glm4_moe_lite")),
    *(Unbiased("ernie4_5_moe"), OfSpec("hy_v3"), OfSpec("solar_open"), OfSpec("exaone_moe")),
    *(OfSpec("hyperclovax"), OfSpec("nanochat"), OfSpec("minicpm3"), OfSpec("youtu")),
    *(OfSpec("mellum"), OfSpec("flex_olmo", heads=5, key_value_heads=5), OfSpec("jais2")),
    *map(OfSpec, ("llama4_text", "granitemoe", "granitemoeshared", "hunyuan_v1_moe")),
)


@pytest.mark.parametrize("tiny", [each for each in LIKE_PLAIN if _is_there(each)])
def test_gradients_are_those_of_the_plain_model(tiny: Tiny | OfSpec) -> None:
    in_fp32 = isinstance(tiny, OfSpec) and SPECS[tiny.kind].mixture  # of which this is the router
    floor = FLOOR[torch.float32 if in_fp32 else torch.float64]
    for loss, gradients in pool(3).run(_differences, tiny):
        assert loss < floor
        assert worst(gradients) < (floor, "")


def _of_kind(kind: str) -> None:
    px.parallelize(OfSpec(kind, dtype=torch.float32).model(), mesh_of(), invariant=px.Invariant(4))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("afmoe", "q_norm is a AfmoeRMSNorm"),
        ("gemma4_text that shares keys", "models with a further embedding yet"),
        ("gemma4_text with experts", "does not serve 'gemma4_text' models with experts"),
    ],
)
def test_what_is_not_computed_in_blocks_is_named(kind: str, words: str) -> None:
    pool(2).assert_raises(_of_kind, kind, error="ValueError", words=words)


def _in_inference_mode(tiny: Tiny) -> bool:
    model = parallel(tiny.model(), mesh_of(), invariant=px.Invariant(4)).eval()
    ids = batch(tiny.vocab_size)["input_ids"]
    with torch.inference_mode():
        logits = model(ids).logits
    with torch.no_grad():
        return torch.equal(model(ids).logits, logits)


def test_inference_mode_computes_what_no_grad_does() -> None:
    assert pool(2).run(_in_inference_mode, Tiny(dtype=torch.float32)) == [True, True]


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
    return refusal(lambda: px.digest(model))


def test_a_digest_finds_a_rank_with_other_bits() -> None:
    for text in pool(3).run(_spoiled, "model.norm.weight"):
        assert "ranks 0 and 1 hold different bits of model.norm.weight" in text


def _with_another_norm() -> nn.Module:
    model = OfSpec("qwen3", dtype=torch.float32).model()
    model.model.layers[1].self_attn.k_norm = nn.LayerNorm(8, bias=False)
    return model


def _without_bias() -> nn.Module:
    model = OfSpec("starcoder2", dtype=torch.float32).model()
    model.model.norm = nn.LayerNorm(72, bias=False)
    return model


def _refusals() -> list[Any]:
    mesh = mesh_of()

    def model_of(**changes: Any) -> Any:
        config = Tiny(dtype=torch.float32).config()
        for name, value in changes.items():
            setattr(config, name, value)
        return transformers.AutoModelForCausalLM.from_config(config)

    def made(model: Any, invariant: Any = None, **options: Any) -> Any:
        return px.parallelize(model, mesh, invariant=invariant or px.Invariant(8), **options)

    def of_eager_attention(model: Any) -> Any:
        model.set_attn_implementation("eager")
        return model

    def dropping(model: Any, module: str, attribute: str) -> None:
        setattr(made(model).train().get_submodule(f"model.layers.1.{module}"), attribute, 0.1)
        model(torch.zeros(1, 4, dtype=torch.long))

    phi3, deepseek = (OfSpec(kind, dtype=torch.float32) for kind in ("phi3", "deepseek_v3"))
    model, changed = made(model_of()), of_eager_attention(made(model_of()))
    with threads(2):
        eager = [
            refusal(lambda: made(of_eager_attention(model_of()))),
            refusal(lambda: changed(torch.zeros(1, 4, dtype=torch.long))),
        ]
    return [
        *eager,
        refusal(lambda: made(_with_another_norm())),
        refusal(lambda: made(model_of(attention_dropout=0.1))),
        refusal(lambda: dropping(model_of(), "self_attn", "attention_dropout")),
        refusal(lambda: dropping(phi3.model(), "resid_mlp_dropout", "p")),
        refusal(lambda: dropping(deepseek.model(), "self_attn", "attention_dropout")),
        refusal(lambda: made(with_dropout())),
        refusal(lambda: made(_without_bias())),
        refusal(lambda: made(model_of(hidden_act="relu"))),
        refusal(lambda: made(model_of(head_dim=10))),
        refusal(lambda: made(OfSpec("olmo2", dtype=torch.float32).model())),
        refusal(lambda: made(OfSpec("gpt_oss", dtype=torch.float32).model())),
        refusal(lambda: made(OfSpec("qwen3_5_text", dtype=torch.float32).model())),
        refusal(lambda: made(of_eager_attention(deepseek.model()))),
        refusal(lambda: made(model_of(), px.Invariant(1))),
        refusal(lambda: made(model_of(), 8)),
        refusal(lambda: made(model_of(), fused_loss=False)),
        refusal(lambda: px.Invariant(0)),
        refusal(lambda: model.resize_token_embeddings(200)),
        refusal(lambda: px.Adafactor(model)),
        refusal(lambda: model.model.layers[0].mlp.gate_proj(torch.ones(1, 72))),
        refusal(lambda: px.digest(px.parallelize(model_of(), mesh))),
    ]


def _heads_of_eight_by_threads() -> list[str]:
    """On a CPU without and with AVX-512, by two threads; without, by one."""
    mesh, found = SimpleNamespace(dp_size=1, device=torch.device("cpu")), []
    for found_in_cpu, count in (("AVX2", 2), ("AVX512", 2), ("AVX2", 1)):
        capability = mock.patch.object(
            torch.backends.cpu, "get_cpu_capability", return_value=found_in_cpu
        )
        with capability, threads(count):
            check = partial(check_invariant, KINDS["odd"].model(), SPECS["llama"], mesh, leaves=1)
            found.append(refusal(check))
    return found


def test_heads_of_eight_have_one_thread_on_a_cpu_without_avx512() -> None:
    words = ["with one thread a rank", "nothing", "nothing"]
    pool(1).assert_says(_heads_of_eight_by_threads, words=words)


def test_what_is_not_served_is_refused_by_name() -> None:
    words = [
        "has 'eager'",
        "has 'eager'",
        "is a LayerNorm",
        "attention_dropout",
        "self_attn was 0 when px.parallelize checked it, and is 0.1 now",
        "resid_mlp_dropout was 0 when px.parallelize checked it, and is 0.1 now",
        "self_attn was 0 when px.parallelize checked it, and is 0.1 now",
        "set that of config.residual_dropout, 0.1, to 0",
        "nn.LayerNorm with weight and bias, but model.norm",
        "mlp.act_fn is a ReLU",
        "self_attn have 10",
        "with as many key-value heads",
        "sinks or gates of heads",
        "a gated delta rule",
        "attention 'sdpa' through low ranks, as model.layers.0.self_attn, which has 'eager'",
        "more than the 1 blocks of",
        "must be a px.Invariant",
        "leave out training_logits and fused_loss",
        "at least 1, not 0",
        "px.Invariant",
        "px.Invariant",
        "computed together",
        "invariant=",
    ]
    pool(2).assert_says(_refusals, words=words)


def _settings_for_a_gpu() -> list[str]:
    """What is refused on a GPU, before and after the lines that the error says are run."""
    tiny, mesh = KINDS["odd"], SimpleNamespace(dp_size=1, device=torch.device("cuda"))
    found = []
    for _ in range(2):
        try:
            check_invariant(tiny.model(), SPECS["llama"], mesh, leaves=1)
        except ValueError as error:
            found.append(str(error))
            lines = [line.strip() for line in str(error).splitlines()[1:]]
            exec("\n".join(lines), {"os": os, "torch": torch})
    return found


def test_a_gpu_needs_the_settings_that_the_error_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    cuda = torch.backends.cuda
    switches = (
        (torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled()),
        (cuda.enable_flash_sdp, cuda.flash_sdp_enabled()),
        (cuda.enable_cudnn_sdp, cuda.cudnn_sdp_enabled()),
        (cuda.enable_math_sdp, cuda.math_sdp_enabled()),
    )
    try:
        (text,) = _settings_for_a_gpu()
    finally:
        for switch, before in switches:
            switch(before)
    assert len(text.splitlines()) == 6
