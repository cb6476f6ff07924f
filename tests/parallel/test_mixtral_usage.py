"""What users of a mixture do beside plain training; what does not fit is one error on all ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
from ranks import pool
from reference import (
    Tiny,
    assert_within,
    gradient_differences,
    gradients_of,
    mesh_of,
    parallel,
    shard_differences,
    worst,
)
from reference_mixtral import (
    Layout,
    TinyMixtral,
    adapted_pair,
    assert_refused,
    batches,
    own_batch,
    spread,
)
from torch import nn
from torch.distributed.fsdp import fully_shard

import parallel_ext as px
from parallel_ext import ops

TINY, LAYOUT = TinyMixtral(num_experts=5), Layout(2, 1, 2)


def _parallel(layout: Layout, tiny: TinyMixtral = TINY, **options: Any) -> tuple[Any, px.Mesh]:
    mesh = layout.mesh()
    return px.data_parallel(parallel(tiny.model(), mesh, **options), mesh), mesh


def _step(model: Any, mesh: px.Mesh) -> None:
    model(**own_batch(TINY, mesh)[1]).loss.backward()


def _more_ranks_than_experts() -> None:
    _parallel(Layout(1, 4, 4), TinyMixtral(num_experts=3))


def _no_experts() -> None:
    parallel(Tiny().model(), mesh_of(tp=2, ep=2))


def _without_data_parallel() -> None:
    mesh = Layout(2, 1, 2).mesh()
    _step(parallel(TINY.model(), mesh), mesh)


def _in_eval_mode() -> None:
    mesh = Layout(2, 1, 2).mesh()
    model = parallel(TINY.model(), mesh).eval()
    _step(model, mesh)


def _other_experts() -> None:
    model = TINY.model()
    model.model.layers[0].mlp.experts.__class__ = type("Fast", (nn.Module,), {})
    px.parallelize(model, Layout(1, 2, 2).mesh())


def _hooked() -> None:
    model = TINY.model()
    model.model.layers[1].mlp.gate.register_forward_hook(lambda *_: None)
    px.parallelize(model, Layout(1, 2, 2).mesh())


def _some_experts() -> None:
    model = TINY.model()
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj[:2].clone())
    model.__dict__.pop("_loss_function", None)
    px.parallelize(model, Layout(1, 2, 2).mesh())


def _sharded_by_transformers() -> None:
    model = TINY.model()
    model._device_mesh = object()
    px.parallelize(model, Layout(1, 2, 2).mesh())


def _sharded_by_fsdp() -> None:
    model = TINY.model()
    model.__dict__.pop("_loss_function", None)
    fully_shard(model.model.layers[0].mlp.experts)
    px.parallelize(model, Layout(1, 2, 2).mesh())


def _ddp() -> None:
    mesh = Layout(2, 1, 2).mesh()
    nn.parallel.DistributedDataParallel(parallel(TINY.model(), mesh))


def _router_adapted() -> None:
    model = parallel(TINY.model(), Layout(1, 2, 2).mesh())
    peft.get_peft_model(model, px.LoraConfig(target_modules=["q_proj", "gate"]))


def _jitter(agreement: bool, seeds_differ: bool) -> None:
    tiny = TinyMixtral(5, options=(("router_jitter_noise", 0.1),))
    model, mesh = _parallel(Layout(1, 2, 2), tiny, agreement=agreement)
    torch.manual_seed(dist.get_rank() if seeds_differ else 3)
    _step(model, mesh)


def _empty_batch() -> None:
    model, _ = _parallel(Layout(1, 2, 2))
    model(input_ids=torch.ones(0, 7, dtype=torch.int64))


def _jitter_and_dropout() -> None:
    options = (("router_jitter_noise", 0.1), ("attention_dropout", 0.1))
    model = TinyMixtral(options=options).model()
    parallel(model, Layout(1, 2, 1).mesh(), allow_different_dropout=True)


REFUSALS = {
    "more ranks than experts": (_more_ranks_than_experts, 4, "ep=4 is more than the 3 experts"),
    "a model without experts": (_no_experts, 2, "no layer of this 'llama' has experts; use ep=1"),
    "training before data_parallel": (_without_data_parallel, 2, "needs px.data_parallel(model"),
    "training in eval mode": (_in_eval_mode, 2, "needs px.data_parallel(model"),
    "experts of another class": (_other_experts, 2, "experts is a Fast, not HuggingFace's"),
    "hooks on a router": (_hooked, 2, "mlp.gate has hooks or a forward of its own"),
    "experts cut before": (_some_experts, 2, "has the shape (2, 32, 13), but config"),
    "a plan of transformers": (_sharded_by_transformers, 2, "sharded by transformers' own plan"),
    "a wrapper of FSDP": (_sharded_by_fsdp, 2, "experts is a FSDPMixtralExperts, not"),
    "DistributedDataParallel": (_ddp, 2, "is sharded over tp=1, ep=2 ranks"),
    "adapters on routers": (_router_adapted, 2, "an adapter on model.layers.0.mlp.gate.weight is"),
    "noise that nobody compares": (
        lambda: _jitter(False, False),
        *(2, "must draw the same noise, which agreement=False does not check"),
    ),
    "other noise": (
        lambda: _jitter(True, True),
        *(2, "must be given the same batch, but they differ in random state"),
    ),
    "noise and other dropout": (
        _jitter_and_dropout,
        *(2, "router_jitter_noise and attention_dropout are both set"),
    ),
    "several reentrant forwards with FSDP": (
        lambda: _seeded_alike(LAYOUT, True),
        *(2, 'gradient_checkpointing_enable({"use_reentrant": False})'),
    ),
    "an empty batch": (_empty_batch, 2, "pass a row of padding whose labels are all -100"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_is_refused(case: str) -> None:
    assert_refused(__name__, case)


# One rank alone goes wrong in the middle of a forward.


def _one_goes_wrong(how: str) -> None:
    model, mesh = _parallel(Layout(2, 1, 2))
    experts = model.model.layers[0].mlp.experts
    tokens = torch.randn(3, 32, dtype=torch.float64)
    ids = torch.tensor([[0, 1]] * 3)
    route_plan = ops.moe_route_plan

    def as_on_a_gpu(ids: torch.Tensor, *others: Any) -> ops.RoutePlan:
        """Count ids out of range nowhere."""
        plan = route_plan(ids.clamp(max=4), *others)
        return plan._replace(counts=torch.bincount(ids.flatten(), minlength=5)[:5])

    if mesh.rank == 1:
        if how.startswith("an id out of range"):
            ids[1, 1] = 5
        elif how == "a dtype":
            tokens = tokens.float()
        elif how == "a hidden size":
            tokens = tokens[:, :16]
        elif how == "gradients":
            tokens.requires_grad_()
        elif how == "top_k":
            ids = ids[:, :1]
    weights = torch.ones(ids.shape, dtype=tokens.dtype)
    if how == "weights" and mesh.rank == 1:
        weights = weights[:, :1]
    with (
        torch.no_grad() if how == "no gradients" and mesh.rank == 1 else nullcontext(),
        mock.patch.object(ops, "moe_route_plan", as_on_a_gpu if "GPU" in how else route_plan),
    ):
        experts(tokens, ids, weights)


NOT_ROUTED = "mlp.experts: ep rank 1 could not route its tokens"


@pytest.mark.parametrize(
    ("how", "messages"),
    [
        ("an id out of range", [NOT_ROUTED, "IndexError: moe_route_plan: "]),
        (
            "an id out of range on a GPU",
            [NOT_ROUTED, "IndexError: choice 1 of token 1 is expert 5, outside of [0, 5)"],
        ),
        ("weights", [NOT_ROUTED, "ValueError: the weights of the"]),
        ("top_k", ["ep rank 1: hidden size 32, top_k 1, torch.float64"] * 2),
        ("a dtype", ["ep rank 1: hidden size 32, top_k 2, torch.float32"] * 2),
        ("a hidden size", ["ep rank 1: hidden size 16, top_k 2, torch.float64"] * 2),
        (
            "gradients",
            ["ep rank 1: hidden size 32, top_k 2, torch.float64, gradients of the tokens"] * 2,
        ),
        ("no gradients", ["ep rank 1: hidden size 32, top_k 2, torch.float64, no gradients"] * 2),
    ],
)
def test_what_one_rank_does_wrong_raises_on_all(how: str, messages: list[str]) -> None:
    raised = pool(2).run_raising(_one_goes_wrong, how, timeout_s=60)
    for error, message in zip(raised, messages, strict=True):
        assert message in repr(error)


def _noise_of_one_process() -> tuple[float, str]:
    tiny = TinyMixtral(5, options=(("router_jitter_noise", 0.1),))
    reference = tiny.model()
    mesh = Layout(1, 2, 2).mesh()
    model = parallel(reference, mesh)
    for each in (reference, model):
        torch.manual_seed(5)
        each(**batches(tiny, 1)[0]).loss.backward()
    return worst(shard_differences(model, gradients_of(reference), True))


def test_ranks_with_equal_seeds_draw_the_noise_of_one_process() -> None:
    assert_within(pool(2).run(_noise_of_one_process))


def test_a_router_whose_forward_was_replaced_is_refused() -> None:
    plain = TINY.model()
    with (
        mock.patch.object(type(plain.model.layers[0].mlp.gate), "forward", _smallest),
        pytest.raises(ValueError, match="forward of MixtralTopKRouter was replaced, by _smallest"),
    ):
        parallel(plain, px.init_mesh())


def _experts_of_others(wrapped: bool) -> None:
    model, mesh = _parallel(Layout(2, 1, 2))
    own = model.model.layers[1].mlp.experts
    forward = own.forward if wrapped else lambda hidden, *_: 2 * hidden
    own.forward = lambda *args: forward(*args)
    _step(model, mesh)


def test_experts_whose_forward_was_replaced_are_refused() -> None:
    words = "px.parallelize has given model.layers.1.mlp.experts did not run"
    pool(2).assert_raises(_experts_of_others, False, error="RuntimeError", words=words)
    pool(2).run(_experts_of_others, True)


def _smallest(self: nn.Module, hidden: torch.Tensor) -> Any:
    return torch.topk(hidden, 2, largest=False)


# Beside plain training: other seeds, other masks, adapters.


def _only_padding() -> tuple[float, str]:
    """The balance loss where one dp rank has no valid token."""
    tiny = TinyMixtral(num_experts=5, balance=True, skew="zipf")
    reference, model, mesh = spread(tiny, LAYOUT)
    whole, own = batches(tiny, 2)
    for name, value in (("attention_mask", 0), ("labels", -100)):
        whole[name][2:] = value  # of which ``own`` has views
    return worst(gradient_differences(reference, model, whole, own[mesh.dp_rank]))


def test_a_rank_without_valid_tokens_adds_nothing_to_the_balance_loss() -> None:
    assert_within(pool(2).run(_only_padding))


def _seeded_alike(layout: Layout, reentrant: bool) -> tuple[float, str]:
    """Two forwards from one seed, as for equal dropout in a pair, before one backward."""
    reference, model, mesh = spread(TINY, layout)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    losses = []
    for seed in (3, 4):
        whole, own = own_batch(TINY, mesh, seed)
        reference(**whole).loss.backward()
        torch.manual_seed(17)
        losses.append(model(**own).loss)
    sum(losses).backward()
    return worst(shard_differences(model, gradients_of(reference), True))


@pytest.mark.parametrize(
    ("layout", "reentrant"), [(LAYOUT, False), (Layout(1, 2, 2), False), (Layout(1, 2, 2), True)]
)
def test_forwards_from_one_seed_keep_their_own_choices(layout: Layout, reentrant: bool) -> None:
    assert_within(pool(2).run(_seeded_alike, layout, reentrant))


def _adapter(layout: Layout, trained: str) -> dict[str, float]:
    """Gradients of an adapter, and of what else is trained, against PEFT's in one process."""
    tiny, mesh = TinyMixtral(num_experts=5, key_value_heads=1), layout.mesh()
    whole = ["lm_head"] if trained == "the head" else None
    targets = ["q_proj", "v_proj", "o_proj", *(["lm_head"] if trained == "the adapter" else [])]
    plain, model = adapted_pair(
        tiny.model, mesh, r=5, lora_alpha=7, target_modules=targets, modules_to_save=whole
    )
    for each in (model, plain):
        for name, parameter in each.named_parameters():
            if trained == "experts" and "experts" in name:
                parameter.requires_grad_()
            elif trained == "an adapter that was frozen" and each is model and "lora_" in name:
                parameter.requires_grad_(False)
    px.data_parallel(model, mesh)
    if trained == "an adapter that was frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
    return gradient_differences(plain, model, *own_batch(tiny, mesh))


@pytest.mark.parametrize(
    ("layout", "trained"),
    [
        *((LAYOUT, "experts"), (LAYOUT, "an adapter that was frozen")),
        *((Layout(2, 2, 4), "the adapter"), (Layout(2, 2, 4), "the head")),
    ],
    ids=str,
)
def test_adapters_on_the_attention(layout: Layout, trained: str) -> None:
    # the factors are fp32, in PEFT's default as well
    assert_within(pool(layout.world).run(_adapter, layout, trained), 1e-5)


def _forward_inside_backward() -> tuple[float, float]:
    """A loss as it is, and as a gradient hook computes it while the model recomputes layers."""
    tiny, inside = TINY, []
    model = parallel(tiny.model(), Layout(1, 2, 2).mesh())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    data = batches(tiny, 1)[0]
    loss = model(**data).loss
    loss.register_hook(lambda _: inside.append(model(**data).loss.item()))
    loss.backward()
    return loss.item(), inside[0]


def test_a_forward_inside_a_backward_chooses_its_own_experts() -> None:
    for outside, inside in pool(2).run(_forward_inside_backward):
        assert inside == outside


def _compiled() -> None:
    """Other tokens choose other experts in each step."""
    model = parallel(TINY.model(), mesh_of())
    compiled = torch.compile(model, backend="eager")
    for step in range(4):
        ids = torch.randint(3, TINY.vocab_size, (2, 9), generator=torch.manual_seed(step))
        with mock.patch.object(torch._dynamo.config, "error_on_recompile", step > 0):
            loss = compiled(input_ids=ids, labels=ids).loss
        assert loss == model(input_ids=ids, labels=ids).loss


def test_a_compiled_mixture_is_compiled_once() -> None:
    pool(2).run(_compiled)
