"""What users get wrong: one clear error on all ranks, nothing changed, nothing hung."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from ranks import pool
from reference import Tiny, batch, mesh_of, parallel
from test_specs import OfSpec
from torch.nn.attention.flex_attention import create_block_mask

import parallel_ext as px
from parallel_ext.parallel.masks_of_heads import refuse_masks_of_heads

TINY = Tiny()


# Inputs that differ, or are out of range, on one rank.


def test_ranks_in_other_modes_raise_for_nothing_else() -> None:
    for raised in pool(2).run_raising(_forward_with, "eval"):
        assert "output head" not in raised.text


def _forward_with(change: str) -> None:
    model = parallel(TINY.model(), mesh_of())
    one = batch(101)
    if change == "mask of layers":
        mask = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
        one["attention_mask"] = {"full_attention": mask}
    if dist.get_rank() == 1:
        if change == "ids":
            one["input_ids"][0, 4] += 1 if one["input_ids"][0, 4] < 50 else -1
        elif change == "labels":
            one["labels"][0, 4] = 7 if one["labels"][0, 4] != 7 else 8
        elif change == "mask":
            one["attention_mask"][1, 0] = 0
        elif change == "shape":
            one = {name: value[:, :-1] for name, value in one.items()}
        elif change == "dtype":
            one["attention_mask"] = one["attention_mask"].bool()
        elif change == "mask of layers":
            one["attention_mask"]["full_attention"][0, 0, 3, 1] = False
        elif change == "eval":
            model.eval()
        elif change == "no labels":
            del one["labels"]
        elif change == "requires_grad":
            model.lm_head.requires_grad_(False)
        elif change == "id":
            one["input_ids"][1, 2] = TINY.vocab_size
        elif change == "negative id":
            one["input_ids"][1, 2] = -1
        elif change == "label":
            one["labels"][1, 2] = TINY.vocab_size
    before = model.model.embed_tokens.weight.clone()
    try:
        if change == "grad mode" and dist.get_rank() == 1:
            with torch.no_grad():
                model(**one)
        else:
            model(**one)
    finally:
        model.train().requires_grad_(True)
        model(**batch(101))
        if not torch.equal(before, model.model.embed_tokens.weight):
            raise AssertionError("the model changed")


@pytest.mark.parametrize(
    ("change", "words"),
    {
        "ids": ["input_ids (other values, int64 (2, 9))"],
        "labels": ["labels (other values"],
        "mask": ["attention_mask (other values"],
        "mask of layers": ["attention_mask[full_attention] (other values"],
        "shape": ["input_ids (tp rank 0: int64 (2, 9), tp rank 1: int64 (2, 8))"],
        "dtype": ["attention_mask (tp rank 0: int64 (2, 9), tp rank 1: bool (2, 9))"],
        "eval": ["mode (tp rank 0: train, grad, tp rank 1: eval, grad)"],
        "grad mode": ["mode (tp rank 0: train, grad, tp rank 1: train, no grad)"],
        "no labels": ["labels (tp rank 0: int64 (2, 9), tp rank 1: absent)"],
        "requires_grad": ["requires_grad (tp rank 0: list of"],
    }.items(),
)
def test_tp_peers_must_be_given_the_same(change: str, words: list[str]) -> None:
    pool(2).assert_raises(_forward_with, change, error="DisagreementError", words=words)


@pytest.mark.parametrize(
    ("change", "words"),
    {
        "id": ["input_ids: id 101 at position 11 is outside the vocabulary [0, 101)"],
        "negative id": ["input_ids: id -1 at position 11 is outside the vocabulary [0, 101)"],
        "label": ["labels: id 101 at position 11 is outside the vocabulary [0, 101)"],
    }.items(),
)
def test_an_id_outside_the_vocabulary_is_named_on_all_ranks(change: str, words: list[str]) -> None:
    pool(2).assert_raises(_forward_with, change, error="IndexError", words=("tp rank 1", *words))


def _forward_with_dropout(where: str, attribute: str) -> None:
    model = parallel(OfSpec("phi3").model(), mesh_of())
    ids = torch.arange(4).view(1, 4)
    setattr(model.model.layers[1].get_submodule(where), attribute, 0.25)
    model.eval()(ids)  # drops nothing
    model.train()(ids)


@pytest.mark.parametrize(
    ("where", "attribute"), [("self_attn", "attention_dropout"), ("resid_mlp_dropout", "p")]
)
def test_dropout_that_is_switched_on_later_is_refused(where: str, attribute: str) -> None:
    words = [
        f"the dropout of model.layers.1.{where} was 0 when px.parallelize checked it",
        "is 0.25",
    ]
    pool(2).assert_raises(_forward_with_dropout, where, attribute, error="ValueError", words=words)


def _path_on_rank_1() -> None:
    plain = Tiny(layers=1, dtype=torch.float32).model()
    px.parallelize("path/to/llama" if dist.get_rank() else plain, mesh_of())


def test_a_path_in_place_of_a_model_is_refused_on_all_ranks() -> None:
    words = "takes a model in memory, got 'path/to/llama'; px.from_pretrained"
    pool(2).assert_raises(_path_on_rank_1, words=words)


def _forward_of_ids_as(dtype: torch.dtype, labels: bool = False) -> torch.Tensor:
    model = parallel(TINY.model().eval(), mesh_of())
    ids = batch(101)["input_ids"].to(dtype)
    if labels:
        return model.train()(ids, labels=ids).loss.detach()
    return model(ids).logits.detach()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool])
def test_ids_of_a_dtype_that_an_embedding_does_not_take_are_refused(dtype: torch.dtype) -> None:
    words = "vocab_embedding: ids must be int64"
    pool(2).assert_raises(_forward_of_ids_as, dtype, error="TypeError", words=words)


def test_ids_may_be_int32() -> None:
    for labels in (False, True):
        wide, narrow = (
            pool(2).run(_forward_of_ids_as, dtype, labels) for dtype in (torch.int64, torch.int32)
        )
        assert torch.equal(wide[0], narrow[0])


def _deferred(name: str) -> None:
    """The comparison that accelerators use, one call late."""
    model, one = parallel(TINY.model(), mesh_of()), batch(101)
    model.parallel_ext_local_shards.agreement.deferred = True
    model(**one)
    if dist.get_rank() == 1:
        one[name][1] = one[name][1].flip(0)  # the same sum
    model(**one)
    model(**batch(101))


def test_deferred_agreement_reports_the_call_before() -> None:
    for name in ("input_ids", "labels"):
        words = f"{name} of the call before"
        pool(2).assert_raises(_deferred, name, error="DisagreementError", words=words)


class _Event:
    """As torch.cuda.Event, which can be neither copied nor pickled."""

    def synchronize(self) -> None:
        pass

    def __reduce_ex__(self, protocol: int) -> Any:
        raise TypeError("cannot pickle an event")


def _copied_while_deferred() -> float:
    model, one = parallel(TINY.model(), mesh_of()), batch(101)
    agreement = model.parallel_ext_local_shards.agreement
    agreement.deferred = True
    loss = model(**one).loss
    agreement._previous.arrived = _Event()
    copied = copy.deepcopy(model)
    model(**one)
    return abs((copied(**one).loss - loss).item())


def test_a_model_is_copied_while_numbers_of_a_call_come_from_its_device() -> None:
    assert pool(2).run(_copied_while_deferred) == [0.0, 0.0]


def _generate_with_other_lengths() -> None:
    model = parallel(TINY.model().eval(), mesh_of())
    model.generate(batch(101)["input_ids"], max_new_tokens=2 + dist.get_rank())


def test_generate_must_be_asked_for_the_same() -> None:
    words = "max_new_tokens (tp rank 0: 2, tp rank 1: 3)"
    pool(2).assert_raises(_generate_with_other_lengths, error="DisagreementError", words=words)


# Functions that only some ranks call.


def _called_by_rank_0_only(function: str, raised: Path) -> float | None:
    mesh = px.init_mesh(tp=2, timeout=2.0)
    model = parallel(TINY.model(), mesh)
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: model(**batch(101)),
        "save_pretrained": lambda: model.save_pretrained("/nowhere"),
        "parallelize": lambda: px.parallelize(TINY.model(), mesh),
    }
    start = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(px.CollectiveTimeout, match=r"rank 1 did not within 2 s"):
            calls[function]()
        waited = time.monotonic() - start
        raised.touch()
        return waited
    while not raised.exists() and time.monotonic() < start + 5:
        time.sleep(0.05)
    return None


@pytest.mark.parametrize("function", ["forward", "save_pretrained", "parallelize"])
def test_a_call_that_only_one_rank_makes_names_the_absent(function: str, tmp_path: Path) -> None:
    waited, _ = pool(2).run(_called_by_rank_0_only, function, tmp_path / "raised")
    assert waited < 2 + 2 + 1


def _forward_in_a_thread() -> float:
    model = parallel(Tiny().model(), mesh_of())
    data = batch(101)
    for _ in range(2):
        model(**data)
    with ThreadPoolExecutor(1) as executor, pytest.raises(NotImplementedError) as caught:
        executor.submit(lambda: model(**data)).result()
    assert "is used by another thread; ops of one group belong to one thread" in str(caught.value)
    return model(**data).loss.item()


def test_a_forward_on_another_thread_is_refused_at_once() -> None:
    start = time.monotonic()
    first, second = pool(2).run(_forward_in_a_thread)
    assert first == second
    assert time.monotonic() - start < 30  # it waits for no rank


def _different_calls() -> None:
    model = parallel(TINY.model(), mesh_of())
    if dist.get_rank() == 0:
        px.clip_grad_norm_(model, 1.0)
    else:
        px.full_state_dict(model)


def test_ranks_that_call_different_functions_raise() -> None:
    words = ("rank 0: clip_grad_norm_", "rank 1: full_state_dict")
    pool(2).assert_raises(_different_calls, error="DisagreementError", words=words)


# Meshes and models that do not fit.


def _mesh_with(sizes: dict[str, Any]) -> None:
    px.init_mesh(**sizes)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tp": 3}, "tp=3 does not fit a world of 2 ranks"),
        ({"tp": 2, "dp": 2}, "dp=2 * tp=2 = 4 does not fit a world of 2 ranks"),
        ({"ep": 3}, "ep=3 does not divide the world of 2 ranks"),
        ({"tp": "2"}, "tp must be an integer of at least 1, got '2'"),
    ],
)
def test_mesh_errors_name_the_world_and_what_was_asked_for(
    sizes: dict[str, Any], words: str
) -> None:
    pool(2).assert_raises(_mesh_with, sizes, error="ValueError", words=words)


class _Answering(torch.nn.Module):
    """A wrapper that hands on the attributes of what it wraps."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        inner = super().__getattr__("inner")
        return inner if name == "inner" else getattr(inner, name)


class _WithLoss(transformers.LlamaForCausalLM):
    loss_function = staticmethod(lambda *_, **__: None)


class _ScaledLinear(torch.nn.Module):
    """A layer of another package, whose forward no weight tells."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(rows, columns, dtype=dtype))
        self.scale = torch.nn.Parameter(torch.ones(rows, dtype=dtype))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input @ self.weight.T * self.scale


GROUPS = {"groups of other heads": 1, "groups that divide nothing": 2}
EMBEDDING_OPTIONS = {"max_norm": 1.0, "scale_grad_by_freq": True, "sparse": True}


def _parallelize(case: str) -> None:
    mesh, model, options = mesh_of(), TINY.model(), {}
    if case == "too many ranks":
        model = Tiny(heads=2, key_value_heads=2).model()
    elif case == "attention dropout":
        model.config.attention_dropout = 0.1
    elif case == "two kinds of dropout":
        model.config.attention_dropout = model.config.residual_dropout = 0.1
        options = {"allow_different_dropout": True}
    elif case == "dropout that nobody compares":
        model.model.layers[0].mlp.dropout = torch.nn.Dropout(0.3)
        options = {"agreement": False}
    elif case == "spec":
        model.model.layers[1].self_attn.query = model.model.layers[1].self_attn.q_proj
        del model.model.layers[1].self_attn.q_proj
        del model.model.layers[0].mlp.down_proj
    elif case in GROUPS:
        model.model.layers[1].self_attn.num_key_value_groups = GROUPS[case]
    elif case == "twice":
        model = parallel(model, mesh)
    elif case == "hook":
        model.lm_head.register_forward_hook(lambda *_: None)
    elif case == "subclass":
        up = model.model.layers[0].mlp.up_proj
        up.__class__ = type("MyLinear", (torch.nn.Linear,), {})
    elif case == "layer of others":
        model.model.layers[0].self_attn.q_proj = _ScaledLinear(72, 31, dtype=torch.float64)
    elif case == "wrapped head":
        model.lm_head = torch.nn.Sequential(model.lm_head)
    elif case == "wrapped layer":
        model.model.layers[1] = _Answering(model.model.layers[1])
    elif case == "embedding of others":
        model.model.embed_tokens = _ScaledLinear(101, 31, dtype=torch.float64)
    elif case in EMBEDDING_OPTIONS:
        setattr(model.model.embed_tokens, case, EMBEDDING_OPTIONS[case])
    elif case == "shared norm":
        first, second = model.model.layers
        second.input_layernorm.weight = first.input_layernorm.weight
    elif case == "shared layer":
        model.model.layers[1] = model.model.layers[0]
    elif case == "own loss":
        model.loss_function = lambda *_, **__: None
    elif case == "own loss of the class":
        model.__class__ = _WithLoss
    elif case == "gradient hook":
        model.lm_head.weight.register_post_accumulate_grad_hook(print)
    elif case == "wrong rows":
        model.config.vocab_size = 99
    elif case == "other weights":
        model = TINY.model(seed=dist.get_rank())
    elif case == "frozen on one rank":
        model.lm_head.weight.requires_grad_(dist.get_rank() == 0)
    elif case == "other options":
        options = {"training_logits": dist.get_rank() == 0}
    elif case == "misfit on one rank" and dist.get_rank() == 1:
        del model.model.layers[0].mlp.down_proj
    if case != "own loss":
        model.__dict__.pop("_loss_function", None)  # of the tests' fp64 model
    names = [name for name, _ in model.named_modules()]
    try:
        px.parallelize(model, mesh, **options)
    finally:
        if names != [name for name, _ in model.named_modules()]:
            raise AssertionError("the model changed")


@pytest.mark.parametrize(
    ("case", "words"),
    {
        "too many ranks": ["tp=3 is more than 2 query heads on 2 key-value heads can serve"],
        "attention dropout": ["attention_dropout is 0.1", "allow_different_dropout=True"],
        "two kinds of dropout": [
            "config.attention_dropout is 0.1, and the dropout of config.residual_dropout is set as",
            "set one of the two to 0",
        ],
        "dropout that nobody compares": [
            "the dropout of model.layers.0.mlp.dropout is 0.3; the tp ranks must draw the same",
            "masks, which agreement=False does not check",
        ],
        "spec": [
            "model.layers.0.mlp.down_proj, model.layers.1.self_attn.q_proj",
            f"transformers {transformers.__version__}",
        ],
        "groups of other heads": [
            "model.layers.1.self_attn.k_proj has 24 output features",
            "num_key_value_groups, 1, and head_dim, 8, of its attention it has 72",
        ],
        "groups that divide nothing": [
            "model.layers.1.self_attn.num_key_value_groups is 2, which does not divide the 9 query"
        ],
        "twice": ["parallel already"],
        "hook": ["lm_head has hooks"],
        "gradient hook": ["parallelize: lm_head.weight has gradient hooks, which would be lost"],
        "subclass": ["model.layers.0.mlp.up_proj is a MyLinear"],
        "layer of others": ["model.layers.0.self_attn.q_proj is a _ScaledLinear; only plain torch"],
        "wrapped layer": ["lacks what the spec for 'llama' names: model.layers.1.self_attn"],
        "wrapped head": ["lm_head is a Sequential; only plain torch.nn modules can be sharded"],
        "embedding of others": ["model.embed_tokens is a _ScaledLinear; only plain torch.nn"],
        **{
            option: [f"model.embed_tokens has {option}={value}, which the parallel embedding"]
            for option, value in EMBEDDING_OPTIONS.items()
        },
        "shared norm": [
            "model.layers.1.input_layernorm.weight is the same parameter as model.layers.0.",
            "only embedding and head may share theirs",
        ],
        "shared layer": ["model.layers.1.self_attn.q_proj.weight is the same parameter as"],
        "own loss": ["loss_function was replaced on this instance"],
        "own loss of the class": ["loss_function was replaced by _WithLoss or its loss_type"],
        "wrong rows": ["(101, 72)", "config.vocab_size is 99", "expected (99, 72)"],
        "other weights": ["must be equal on all ranks, but is of shape", "load the same weights"],
        "frozen on one rank": ["lm_head.weight", "True", "False"],
        "other options": ["options"],
        "misfit on one rank": ["model.layers.0.mlp.down_proj"],
    }.items(),
)
def test_parallelize_refuses(case: str, words: list[str]) -> None:
    pool(3).assert_raises(_parallelize, case, words=words)


def _with_full_tensors(how: str) -> None:
    """Put those of a layer into its modules, with which every rank would compute all of it."""
    model, layer = parallel(TINY.model(), mesh_of()), "model.layers.0."
    full = {n: p.detach() for n, p in TINY.model().named_parameters() if n.startswith(layer)}
    for name, tensor in full.items():
        if how == "data":
            model.get_parameter(name).data = tensor
    given = {} if how == "data" else full
    with torch.set_grad_enabled(how != "no grad"):
        torch.func.functional_call(model, given, (), batch(101))


@pytest.mark.parametrize("how", ["data", "functional_call", "no grad"])
def test_full_tensors_in_the_place_of_shards_are_refused(how: str) -> None:
    words = ("q_proj.weight must have the shape", "got (72, 72)", "load_state_dict")
    pool(2).assert_raises(_with_full_tensors, how, error="ValueError", words=words)


def _saved_with_fewer_layers(directory: str) -> None:
    model = parallel(TINY.model(), mesh_of())
    model.model.layers = model.model.layers[:1]
    model.save_pretrained(directory)


def test_a_save_names_layers_that_were_cut_and_says_when_to_cut_them(tmp_path: Path) -> None:
    words = ("the model lacks model.layers.1.", "out of a plain model, before px.parallelize")
    pool(2).assert_raises(_saved_with_fewer_layers, str(tmp_path), words=words)


def _with_plain_layers(sequence_parallel: bool) -> None:
    model = parallel(TINY.model(), mesh_of(), sequence_parallel=sequence_parallel)
    for name in ("gate_proj", "up_proj", "down_proj"):
        plain = TINY.model().model.layers[1].mlp.get_submodule(name)
        setattr(model.model.layers[1].mlp, name, plain)
    model(**batch(101)).loss.backward()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_plain_layers_in_the_place_of_sharded_ones_are_refused(sequence_parallel: bool) -> None:
    words = "model.layers.1.mlp.gate_proj was replaced by a Linear"
    pool(2).assert_raises(_with_plain_layers, sequence_parallel, error="RuntimeError", words=words)


class _OfShard(torch.nn.Module):
    """A layer made from the shard of another, as quantizers make them."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(input, self.weight)


def _without_own_forward(how: str, options: dict[str, Any]) -> None:
    """Let a layer that sums over ranks, or shares its heads with others, compute otherwise."""
    model, one = parallel(TINY.model(), mesh_of(), **options).eval(), batch(101)
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
    linear = torch.nn.functional.linear
    layer = attention.k_proj if how == "replicas" else attention.o_proj
    if how == "module":
        attention.o_proj = _OfShard(attention.o_proj)
    elif how == "weight":
        mlp.forward = lambda x: linear(mlp.gate_proj(x) * mlp.up_proj(x), mlp.down_proj.weight)
    else:
        layer.forward = lambda x: linear(x, layer.weight)
    if how == "training":
        model.train()(**one).loss.backward()
    with torch.no_grad():
        model(**one)


@pytest.mark.parametrize(
    ("how", "name", "options"),
    [
        ("forward", "self_attn.o_proj", {}),
        ("training", "self_attn.o_proj", {"sequence_parallel": True}),
        ("module", "self_attn.o_proj", {}),
        ("weight", "mlp.down_proj", {}),
        ("replicas", "self_attn.k_proj", {}),
        ("forward", "self_attn.o_proj", {"invariant": px.Invariant()}),
    ],
)
def test_a_layer_whose_own_forward_does_not_run_is_refused(
    how: str, name: str, options: dict[str, Any]
) -> None:
    words = f"px.parallelize has given model.layers.1.{name} did not run"
    ranks = pool(4 if how == "replicas" else 2)
    ranks.assert_raises(_without_own_forward, how, options, error="RuntimeError", words=words)


def _with_wrappers() -> None:
    """Wrap forwards and modules, and leave out a layer: what these return is as it was."""
    model, one = parallel(TINY.model(), mesh_of()), batch(101)
    model.gradient_checkpointing_enable()
    model.model.layers[0].mlp.forward = lambda x: 0 * x
    del model.model.layers[0].mlp.down_proj
    losses = []
    for wrapped in (False, True):
        for layer in model.model.layers if wrapped else ():
            own = layer.self_attn.o_proj
            own.forward = partial(lambda forward, x: forward(x), own.forward)
            layer.mlp.up_proj = torch.nn.Sequential(layer.mlp.up_proj)
        losses.append(model(**one).loss)
        losses[-1].backward()
    assert torch.equal(*losses)
    model.gradient_checkpointing_disable()
    model.model.layers[1].compile(fullgraph=True, backend="aot_eager")
    with mock.patch.object(torch._dynamo.config, "error_on_recompile", True):
        for _ in range(3):
            losses.append(model(**one).loss)
            losses[-1].backward()
    assert max(abs(each - losses[0]) for each in losses) < 1e-12 * losses[0]


def test_wrappers_that_call_the_forward_of_a_layer_are_served() -> None:
    pool(2).run(_with_wrappers)


def _attentions() -> None:
    parallel(TINY.model(), mesh_of())(**batch(101), output_attentions=True)


def _masked_by_head(kind: str) -> None:
    one = batch(101)
    one["attention_mask"] = torch.ones(2, 9, 9, 9, dtype=torch.bool).tril()
    if kind.startswith("flex"):
        heads = {"flex": None, "flex of heads": 9}[kind]
        rows = lambda b, h, q, k: (q >= k) & (q - k < h + 2)  # noqa: E731
        one["attention_mask"] = create_block_mask(rows, 2, heads, 9, 9, device="cpu")
    elif kind == "of layers":
        one["attention_mask"] = {"full_attention": one["attention_mask"]}
    parallel(TINY.model(), mesh_of())(**one)


def test_attention_masks_of_single_heads_are_refused() -> None:
    for kind, words in {
        "4d": "of shape (2, 9, 9, 9) has a part for each of 9 heads",
        "of layers": "has a part for each of 9 heads",
        "flex of heads": "has a part for each of 9 heads",
        "flex": "mask_mod that looks at the number of the head",
    }.items():
        pool(2).assert_raises(_masked_by_head, kind, error="NotImplementedError", words=words)
    documents = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2])
    rows = lambda b, h, q, k: (q >= k) & (documents[q] == documents[k])  # noqa: E731
    refuse_masks_of_heads(create_block_mask(rows, 2, None, 9, 9, device="cpu"))
    refuse_masks_of_heads({"full_attention": torch.ones(2, 1, 9, 9), "sliding_attention": None})


def _generated_in_time(seconds: float | None) -> int:
    ids = batch(101)["input_ids"]
    answer = parallel(TINY.model(), mesh_of()).generate(ids, max_time=seconds, max_new_tokens=1)
    return answer.shape[1] - ids.shape[1]


def test_what_tp_cannot_do_is_refused_by_name() -> None:
    error = "NotImplementedError"
    pool(2).assert_raises(_attentions, error=error, words="output_attentions")
    pool(2).assert_raises(_generated_in_time, 0.1, error=error, words="max_time")
    assert pool(2).run(_generated_in_time, None) == [1, 1]


def _other_meshes() -> None:
    px.init_mesh(tp=1 + dist.get_rank())


def test_ranks_that_ask_for_different_meshes_raise() -> None:
    words = ("must be equal on all ranks, but is", "on rank 0 and", "more differ")
    pool(2).assert_raises(_other_meshes, error="DisagreementError", words=words)


def _stale_optimizer() -> None:
    reference = TINY.model()
    reference.__dict__.pop("_loss_function", None)
    optimizer = torch.optim.AdamW(reference.parameters())
    model = px.parallelize(reference, mesh_of())
    model(**batch(101)).loss.backward()
    optimizer.step()


def test_an_optimizer_from_before_parallelize_is_found_when_it_steps() -> None:
    words = ("AdamW was built before px.parallelize", "model.embed_tokens.weight", "more")
    pool(2).assert_raises(_stale_optimizer, words=words)


def _without_connections() -> tuple[str, str]:
    """What parallelize raises where ranks cannot connect, and the embedding afterwards."""
    mesh, model = mesh_of(), Tiny(heads=6, key_value_heads=2).model()
    model.__dict__.pop("_loss_function", None)
    lost = px.CollectiveTimeout("rank 1 is not there")
    with (
        mock.patch.object(type(mesh.control), "new_group", side_effect=lost),
        pytest.raises(px.CollectiveTimeout) as caught,
    ):
        px.parallelize(model, mesh)
    return str(caught.value), type(model.model.embed_tokens).__name__


def test_ranks_that_share_key_value_heads_connect_before_anything_changes() -> None:
    assert {*pool(3).run(_without_connections)} == {("rank 1 is not there", "Embedding")}


def _warnings(vocab_size: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        px.parallelize(Tiny(vocab_size=vocab_size, dtype=torch.float32).model(), mesh_of())
    return [str(one.message) for one in caught if "divisible" in str(one.message)]


def test_an_uneven_vocabulary_is_said_once_on_rank_0() -> None:
    first, second = pool(2).run(_warnings, 101)
    assert len(first) == 1
    assert "101 rows is not divisible by tp=2: the ranks hold 51, 50 rows" in first[0]
    assert second == []
    assert pool(2).run(_warnings, 100) == [[], []]


def test_attention_dropout_is_accepted_on_demand() -> None:
    model = Tiny(dtype=torch.float32).model()
    model.config.attention_dropout = 0.1
    assert px.parallelize(model, px.init_mesh(), allow_different_dropout=True) is model


# What is no parallel model, or none that can be.


def test_what_is_no_parallel_model_is_named() -> None:
    for call in (lambda: px.no_sync(3).__enter__(), lambda: px.Adafactor(3)):
        with pytest.raises(TypeError, match="int is not a parallel model; call px.parallelize"):
            call()
    with pytest.raises(TypeError, match="is not a parallel model; call px.parallelize"):
        px.clip_grad_norm_(TINY.model(), 1.0)
    with pytest.raises(TypeError, match="takes the model, got a generator; torch.nn.utils"):
        px.clip_grad_norm_(TINY.model().parameters(), 1.0)
    with pytest.raises(TypeError, match="int is not a parallel model"):
        px.RoutingMetrics(3)
    with pytest.raises(TypeError, match="data_parallel needs the mesh .* given a float"):
        px.data_parallel(TINY.model(), 0.0)
    with pytest.raises(TypeError, match="data_parallel needs the mesh .* was given none"):
        px.data_parallel(TINY.model(), None)


def test_a_class_with_another_head_is_told_of_its_decoder() -> None:
    model = transformers.LlamaForQuestionAnswering(TINY.model().config)
    words = "LlamaForQuestionAnswering is not served: .* px.parallelize.model.transformer, mesh"
    with pytest.raises(ValueError, match=words):
        px.parallelize(model, px.init_mesh())
    assert px.parallelize(model.transformer, px.init_mesh()) is model.transformer


def test_an_option_of_save_pretrained_is_refused_without_its_tensors(tmp_path: Path) -> None:
    model = px.parallelize(Tiny(dtype=torch.float32).model(), px.init_mesh())
    with pytest.raises(TypeError, match="does not take tensors=; leave it out: it gathers"):
        model.save_pretrained(tmp_path, tensors=model.state_dict())


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_an_option_of_the_embedding_that_is_set_later_is_refused(option: dict[str, Any]) -> None:
    model = px.parallelize(Tiny(dtype=torch.float32).model(), px.init_mesh())
    ((name, value),) = option.items()
    setattr(model.model.embed_tokens, name, value)
    with pytest.raises(ValueError, match=f"has {name}={value}, which the parallel embedding"):
        model(**batch(TINY.vocab_size))


def test_a_learned_rotary_embedding_is_refused() -> None:
    model = Tiny(dtype=torch.float32).model()
    rotary = model.model.rotary_emb
    rotary.inv_freq = torch.nn.Parameter(rotary._buffers.pop("inv_freq"))
    with pytest.raises(ValueError, match="model.rotary_emb has parameters, whose"):
        px.parallelize(model, px.init_mesh())


def _call_of_decoder(name: str) -> None:
    getattr(parallel(TINY.model(), mesh_of()).model, name)("x")


@pytest.mark.parametrize(
    "name", ["save_pretrained", "push_to_hub", "num_parameters", "resize_token_embeddings"]
)
def test_a_method_that_would_take_the_decoders_shards_for_all_is_refused(name: str) -> None:
    words = f"LlamaModel.{name}: this is a part of a parallel model, of which each rank has shards"
    pool(2).assert_raises(_call_of_decoder, name, words=words, error="RuntimeError")


def test_a_refusal_leaves_the_hook_of_checkpointing_to_who_has_made_it() -> None:
    model = TINY.model()
    model.enable_input_require_grads()
    wrapper = torch.nn.Sequential(model)
    with pytest.raises(ValueError, match="no spec for model_type None"):
        px.parallelize(wrapper, px.init_mesh())
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="q_proj has hooks"):
        px.parallelize(model.model, px.init_mesh())
    ids = batch(101)["input_ids"]
    assert model.requires_grad_(False)(ids).logits.requires_grad
    model.disable_input_require_grads()
    assert not model(ids).logits.requires_grad


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_are_tied_otherwise_later_are_refused_in_training(tied: bool) -> None:
    model = px.parallelize(Tiny(tied=tied, dtype=torch.float32).model(), px.init_mesh()).train()
    one, weight = batch(TINY.vocab_size), model.lm_head.weight
    model(**one)
    other = torch.nn.Parameter(weight.detach().clone()) if tied else model.model.embed_tokens.weight
    model.lm_head.weight = other
    words = "were tied .* but now not; call" if tied else "were not tied .* but now they are"
    with pytest.raises(RuntimeError, match=f"forward: embedding and head {words}"):
        model(**one)
    model.eval()(**one)
    model.lm_head.weight = weight
    model.train()(**one)
