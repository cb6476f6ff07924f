"""px.generate: the tokens of HuggingFace's generate, by ranks that never gather the logits."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from ranks import pool
from reference import Tiny, batch, mesh_of, parallel, refusal
from reference_cogagent import batch_of, picture, text, tiny_model
from reference_lora import adapted
from reference_mixtral import Layout, TinyMixtral, TinyQwen3Moe

import parallel_ext as px
from parallel_ext import _C

TINY = Tiny()
MODELS = {
    "Llama": (TINY, Layout(1, 2, 1)),
    "Llama, tied": (Tiny(heads=4, key_value_heads=1, tied=True), Layout(1, 3, 1)),
    "five ids on three ranks": (Tiny(vocab_size=5), Layout(1, 3, 1)),
    "Mixtral": (TinyMixtral(), Layout(1, 2, 2)),
    "Qwen3-MoE": (TinyQwen3Moe(), Layout(1, 2, 1)),
}


def _prompt(vocab_size: int) -> dict[str, Any]:
    prompt = batch(vocab_size)
    del prompt["labels"]
    return prompt


def _greedy(tiny: Any, layout: Layout) -> list[tuple[list, list]]:
    reference = tiny.model().eval()
    model = parallel(reference, layout.mesh())
    prompt = _prompt(tiny.vocab_size)
    free = reference.generate(**prompt, do_sample=False, max_new_tokens=9, eos_token_id=None)
    # Ends that the rows reach at different steps.
    ends = [free[0, 11].item(), free[1, 14].item()]
    results = []
    for options in (
        {"max_new_tokens": 9, "eos_token_id": None},
        {"max_new_tokens": 9, "eos_token_id": ends, "pad_token_id": 3},
        {"max_length": 14, "eos_token_id": ends[0], "use_cache": False},
    ):
        arguments = {**prompt, **options, "do_sample": False}
        ours = px.generate(model, arguments.pop("input_ids"), **arguments)
        expected = reference.generate(**prompt, **options, do_sample=False)
        results.append((expected.tolist(), ours.tolist()))
    return results


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_huggingface(name: str) -> None:
    tiny, layout = MODELS[name]
    for results in pool(layout.world).run(_greedy, tiny, layout):
        for expected, ours in results:
            assert ours == expected


def test_greedy_tokens_of_one_rank_are_those_of_huggingface() -> None:
    for expected, ours in _greedy(TINY, Layout(1, 1, 1)):
        assert ours == expected


@pytest.mark.parametrize("length", [10, 12, 20])
def test_the_shortest_of_several_lengths_ends_all_rows(length: int) -> None:
    reference = TINY.model().eval()
    model = parallel(reference, px.init_mesh())
    prompts = torch.tensor([[5, 6], [7, 8]])
    lengths = [transformers.MaxLengthCriteria(each) for each in (12, length)]
    options = {"stopping_criteria": lengths, "max_length": 15, "eos_token_id": None}
    ours = px.generate(model, prompts, **options)
    assert ours.shape == (2, min(12, length))
    assert ours.equal(reference.generate(prompts, **options))


class _Counted(transformers.StoppingCriteria):
    """Ends nothing, or raises after some steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.steps -= 1
        if self.steps == 0:
            raise TimeoutError
        return ids.new_zeros(len(ids), dtype=torch.bool)


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {
            **{"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 8},
            **{"short_factor": 4 * [1.0], "long_factor": [2.0, 3.0, 4.0, 5.0]},
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_what_modules_keep_of_a_generation_may_be_changed(
    rope: dict[str, Any], raises: bool
) -> None:
    model = parallel(_with_rope(rope), px.init_mesh())
    options = {"max_new_tokens": 12, "eos_token_id": None}
    criterion = transformers.StoppingCriteriaList([_Counted(10 if raises else 99)])
    with pytest.raises(TimeoutError) if raises else nullcontext():
        px.generate(model, torch.tensor([[5, 6]]), stopping_criteria=criterion, **options)
    for module in model.modules():
        for kept in (*module.buffers(recurse=False), *vars(module).values()):
            assert not (isinstance(kept, torch.Tensor) and kept.is_inference())
    for buffer in model.buffers():  # as DistributedDataParallel does at each forward
        buffer.mul_(1)


def _with_rope(rope: dict[str, Any]) -> transformers.PreTrainedModel:
    """A model for 8 tokens, of which a rotary embedding makes more."""
    config = TINY.config()
    config.rope_parameters, config.max_position_embeddings = {**rope, "rope_theta": 1e4}, 8
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(config).eval()


def test_what_outlives_a_generation_may_be_changed_and_trained_on() -> None:
    model = _with_rope({"rope_type": "dynamic", "factor": 2.0})
    copied = parallel(model, mesh := px.init_mesh())
    model = parallel(model, mesh)
    prompts = torch.tensor([[5, 6], [7, 8]])
    options = {"max_new_tokens": 12, "eos_token_id": None}
    ids = px.generate(model, prompts, **options)
    for _ in range(2):
        assert px.generate(model, prompts, cache_implementation="static", **options).equal(ids)
    cache = transformers.DynamicCache(config=model.config)
    assert px.generate(model, prompts, past_key_values=cache, **options).equal(ids)
    assert not any(each.keys.is_inference() for each in cache.layers)
    ids.add_(0)
    losses = [each.train()(input_ids=ids, labels=ids).loss for each in (model, copied)]
    for loss in losses:
        loss.backward()
    assert losses[0].equal(losses[1])
    for ours, theirs in zip(model.parameters(), copied.parameters(), strict=True):
        assert ours.grad.equal(theirs.grad)


SAMPLING = {
    "temperature": {"temperature": 1.5, "top_k": 0},
    "top_k, by default": {},
    "top_p": {"top_p": 0.8, "top_k": 0},
    "all": {"temperature": 3.0, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
    "several of a prompt": {"num_return_sequences": 3},
}


def _sampled(options: dict[str, Any]) -> list[list]:
    """By all ranks together, and by each for itself."""
    reference = TINY.model().eval()
    world = dist.get_world_size()
    arguments = {**_prompt(TINY.vocab_size), "do_sample": True, "max_new_tokens": 7, **options}
    return [
        px.generate(parallel(reference, layout.mesh()), **arguments, seed=5).tolist()
        for layout in (Layout(1, world, 1), Layout(world, 1, 1))
    ]


@pytest.mark.parametrize("options", SAMPLING)
def test_sampled_tokens_are_those_of_one_rank(options: str) -> None:
    results = pool(3).run(_sampled, SAMPLING[options])
    for by_all, alone in results:
        assert by_all == alone == results[0][1]


def _seeded() -> dict[str, list]:
    model = parallel(TINY.model().eval(), mesh_of())
    options = {"do_sample": True, "max_new_tokens": 12, "eos_token_id": None}
    prompt = _prompt(TINY.vocab_size)

    def generated(own: int, seed: int | None) -> list:
        torch.manual_seed(own + dist.get_rank())
        return px.generate(model, **prompt, **options, seed=seed).tolist()

    return {
        "drawn": generated(1, None),
        "drawn again": generated(1, None),
        "drawn from another": generated(2, None),
        "given": generated(1, 8),
        "given again": generated(2, 8),
        "another": generated(1, 9),
    }


def test_a_seed_not_given_is_that_of_rank_0() -> None:
    first, second = pool(2).run(_seeded)
    assert first == second
    assert first["drawn"] == first["drawn again"]
    assert first["given"] == first["given again"]
    others = [first[name] for name in ("drawn", "drawn from another", "given", "another")]
    assert all(a != b for i, a in enumerate(others) for b in others[:i])


def _counted(options: dict[str, Any]) -> dict[str, float]:
    """Collectives and bytes that one more token takes, at 40 and at 4000 ids."""
    result = {}
    for vocab_size in (40, 4000):
        tiny = Tiny(vocab_size=vocab_size, heads=4, key_value_heads=2)
        model = parallel(tiny.model().eval(), mesh_of())
        prompt = _prompt(vocab_size)
        counts = []
        for tokens in (2, 3):
            _C.reset_collective_counts()
            px.generate(model, **prompt, **options, max_new_tokens=tokens, eos_token_id=None)
            counts.append(_C.collective_counts())
        for kind in ("all_reduce", "all_gather", "all_gather_bytes"):
            result[f"{kind} of {vocab_size}"] = counts[1][kind] - counts[0][kind]
    return result


@pytest.mark.parametrize(
    ("options", "exchanges", "size"),
    [
        ({"do_sample": False}, 1, 16),
        ({"do_sample": True, "top_k": 0}, 1, 16),
        ({"do_sample": True, "top_k": 8}, 2, 16 + 4 * 9),
    ],
    ids=str,
)
def test_a_token_takes_messages_that_do_not_grow_with_the_vocabulary(
    options: dict[str, Any], exchanges: int, size: int
) -> None:
    rows, agreement = 2, 32
    for counts in pool(2).run(_counted, options):
        for vocab_size in (40, 4000):
            assert counts[f"all_reduce of {vocab_size}"] == 2 * TINY.layers
            assert counts[f"all_gather of {vocab_size}"] == exchanges + 1
            assert counts[f"all_gather_bytes of {vocab_size}"] == rows * size + agreement


def _of_cogagent(use_cache: bool) -> tuple[list, list]:
    reference = tiny_model()
    model = parallel(reference, Layout(1, 2, 1).mesh())
    inputs = batch_of([picture(4), text(9)], "left")
    del inputs["labels"]
    options = {"max_new_tokens": 5, "do_sample": False, "use_cache": use_cache}
    expected = reference.generate(**inputs, **options)
    return expected.tolist(), px.generate(model, **inputs, **options).tolist()


@pytest.mark.parametrize("use_cache", [True, False])
def test_cogagent_answers_to_images(use_cache: bool) -> None:
    for expected, ours in pool(2).run(_of_cogagent, use_cache):
        assert ours == expected


def _with_adapters() -> tuple[list, list]:
    model = adapted(TINY).eval()
    arguments = {**_prompt(TINY.vocab_size), "max_new_tokens": 6, "do_sample": False}
    return model.generate(**arguments).tolist(), px.generate(model, **arguments).tolist()


def test_adapters_of_peft_take_part() -> None:
    for expected, ours in pool(2).run(_with_adapters):
        assert ours == expected


def _of_other_lengths(options: dict[str, Any]) -> list[list]:
    tiny, mesh = TinyMixtral(), Layout(2, 1, 2).mesh()
    reference = tiny.model().eval()
    model = parallel(reference, mesh)
    arguments = {**_prompt(tiny.vocab_size), "do_sample": False, "eos_token_id": None}
    arguments |= {"max_new_tokens": 7 - 4 * mesh.dp_rank} | options
    runs = reference.generate, model.generate, partial(px.generate, model)
    return [run(**arguments).tolist() for run in runs]


@pytest.mark.parametrize(
    "options",
    [{}, {"use_cache": False}, {"synced_gpus": False}],  # the last one as Seq2SeqTrainer asks for
    ids=str,
)
def test_a_batch_that_ends_early_takes_part_in_the_forwards_of_the_others(options: dict) -> None:
    for expected, huggingface, ours in pool(2).run(_of_other_lengths, options):
        assert huggingface == expected
        assert ours == expected


def _own_or_static_cache(options: dict[str, Any]) -> Any:
    model = parallel(TinyMixtral().model().eval(), Layout(2, 1, 2).mesh())
    return px.generate(model, torch.tensor([[5, 6]]), max_new_tokens=2, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"cache_implementation": "static"},
        {"past_key_values": transformers.DynamicCache()},
        {"cache": transformers.DynamicCache()},
    ],
    ids=["static", "own", "own by its newer name"],
)
def test_a_cache_that_a_finished_dp_rank_would_fill_further_is_refused(options: dict) -> None:
    words = "a rank that has finished fills it further"
    pool(2).assert_raises(_own_or_static_cache, options, error="NotImplementedError", words=words)


class _Kept:
    """What HuggingFace's streamers have."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.ended = False

    def put(self, ids: torch.Tensor) -> None:
        self.got += ids.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def _streamed(by_px: bool) -> tuple[list, _Kept]:
    mesh = mesh_of()
    model = parallel(TINY.model().eval(), mesh)
    streamer = _Kept()
    own = streamer if mesh.rank == 0 else None
    call = partial(px.generate, model) if by_px else model.generate
    ids = call(torch.tensor([[5, 6]]), streamer=own, do_sample=False, max_new_tokens=4)
    return ids[0].tolist(), streamer


@pytest.mark.parametrize("by_px", [True, False], ids=["px.generate", "model.generate"])
def test_a_streamer_of_one_rank_gets_every_token(by_px: bool) -> None:
    (ids, streamer), (others, _) = pool(2).run(_streamed, by_px)
    assert streamer.got == ids == others
    assert streamer.ended


OF_ROWS = {
    "beams": ([[5, 6]], {"num_beams": 2}),
    "samples": ([[5, 6]], {"num_return_sequences": 2, "do_sample": True}),
    "rows": ([[5, 6], [7, 8]], {}),
}


def _streamed_rows(case: str) -> str:
    ids, options = OF_ROWS[case]
    model = parallel(TINY.model().eval(), mesh_of())
    own = transformers.TextStreamer(None) if mesh_of().rank == 0 else None
    return refusal(lambda: model.generate(torch.tensor(ids), streamer=own, **options))


@pytest.mark.parametrize("case", OF_ROWS)
def test_a_streamer_that_would_refuse_several_rows_is_refused_on_all_ranks(case: str) -> None:
    texts = pool(2).run(_streamed_rows, case)
    assert "differ in streamer (tp rank 0: TextStreamer, tp rank 1: None)" in texts[0]
    assert texts[1] == texts[0]


def _refused(case: str) -> Any:
    options, *_ = REFUSALS[case]
    model = parallel(TINY.model().eval(), mesh_of())
    options = options(model) if callable(options) else options
    return px.generate(options.pop("model", model), torch.tensor([[5, 6]]), **options)


def _of_model(**options: Any) -> Any:
    def change(model: Any) -> dict[str, Any]:
        model.generation_config.update(**options)
        return {}

    return change


def _with_a_hook(model: Any) -> dict[str, Any]:
    model.lm_head.register_forward_hook(lambda module, args, logits: logits - logits.mean())
    return {}


def _poisoned(model: Any) -> dict[str, Any]:
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    return {"do_sample": True}


REFUSALS = {
    "beams": ({"num_beams": 2}, "NotImplementedError: ask for beam_search; use model.generate()"),
    "assisted": ({"prompt_lookup_num_tokens": 2}, "NotImplementedError: assisted_generation"),
    "repetition penalty of the model": (
        _of_model(repetition_penalty=1.2),
        "NotImplementedError: what the options ask of RepetitionPenaltyLogitsProcessor",
    ),
    "a filter of another kind": (
        {"do_sample": True, "typical_p": 0.5},
        "NotImplementedError: TypicalLogitsWarper",
    ),
    "scores": ({"output_scores": True}, "NotImplementedError: ask for output_scores"),
    "a processor": (
        {"logits_processor": [print]},
        "NotImplementedError: px.generate does not take logits_processor",
    ),
    "a hook on the head": (
        _with_a_hook,
        "NotImplementedError: px.generate shows no rank all logits, but the output head has a hook",
    ),
    "stop strings": (
        _of_model(stop_strings=["x"]),
        "NotImplementedError: px.generate does not support stop_strings",
    ),
    "paged": (
        {"cache_implementation": "paged"},
        "NotImplementedError: px.generate does not support a paged cache",
    ),
    "training": (lambda model: {"model": model.train()}, "ValueError: call model.eval() first"),
    "training on one rank": (
        lambda model: {"model": model.train(dist.get_rank() == 0)},
        "DisagreementError: mode",
    ),
    "a processor on one rank": (
        lambda model: {"logits_processor": [print]} if dist.get_rank() else {},
        "DisagreementError: arguments",
    ),
    "a plain model": (
        lambda model: {"model": TINY.model()},
        "TypeError: LlamaForCausalLM is not a parallel model; call px.parallelize(model, mesh) "
        "first",
    ),
    "a seed that is none": ({"seed": 0.5}, "TypeError: seed must be an int or None, got 0.5"),
    "a negative seed": ({"seed": -1}, "ValueError: seed must be in [0, 2**63), got -1"),
    "seeds of their own": (lambda model: {"seed": dist.get_rank()}, "DisagreementError: seed"),
    "NaN on one rank": (_poisoned, "ValueError: the logits of rows [0] at step 0 are NaN"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses_on_all_ranks(case: str) -> None:
    error, _, words = REFUSALS[case][1].partition(": ")
    pool(2).assert_raises(_refused, case, error=error, words=words)
