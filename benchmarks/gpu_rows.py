"""What ``gpu.py`` times on one GPU: ours, the peers, and the bare work that none can undercut."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import peft
import torch
from harness import size
from torch import nn
from torch.nn import functional
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MixtralConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import parallel_ext as px
from parallel_ext import nn as px_nn
from parallel_ext import ops

OURS = "parallel_ext"
BF16, FP32 = torch.bfloat16, torch.float32

TOKENS = size(8192, 32)
HIDDEN = size(4096, 32)
VOCABULARY = size(128256, 509)
LOSS_TOKENS = size(4096, 32)
ROWS, LENGTH, NEW_TOKENS = size((4, 2048, 128), (2, 16, 4))


@dataclass
class Row:
    """One line of the table.

    Attributes:
        name: what is computed.
        runs: competitor -> the work, ours under ``OURS``; each returns what it computed.
        bytes: that must be moved at the least.
        flops: of the products that must be made.
        limits: competitor -> so many times its time may ours take.
        same: the competitors whose results are to be ours, to rounding.
        quick: whether it is repeated as often as asked; else three times.
        after: done behind each run, not timed.
        ahead: whether the host is ahead of the GPU, as it is within a step: what it takes to start
            the work then does not count.
    """

    name: str
    runs: dict[str, Callable[[], Any]]
    bytes: int = 0
    flops: int = 0
    limits: dict[str, float] = field(default_factory=dict)
    same: tuple[str, ...] = ()
    quick: bool = True
    after: Callable[[], None] = lambda: None
    ahead: bool = False


def _random(device: torch.device, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=dtype) * shape[-1] ** -0.5


def _ids(device: torch.device, count: int, below: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(below, (count,), device=device)


def _gradients(
    function: Callable[..., torch.Tensor], inputs: list[torch.Tensor], grad: torch.Tensor | None
) -> Callable[[], list[torch.Tensor]]:
    """Return a forward and backward: output and gradients of ``inputs``."""

    def run() -> list[torch.Tensor]:
        output = function()
        return [output.detach(), *torch.autograd.grad(output, inputs, grad)]

    return run


def ceilings(device: torch.device) -> Iterator[Row]:
    """What the card can do: every other row is measured against the first two."""
    source = torch.zeros(size(1 << 30, 1 << 10), dtype=torch.uint8, device=device)
    target, number = torch.empty_like(source), torch.zeros(1, device=device)
    yield Row("copy", {OURS: lambda: target.copy_(source)}, bytes=2 * source.nbytes)
    side = size(8192, 64)
    a, b = (_random(device, side, side) for _ in range(2))
    yield Row("product", {OURS: lambda: a @ b}, flops=2 * side**3)
    yield Row("empty launch", {OURS: lambda: number.add_(1)})


def cross_entropy(device: torch.device) -> Iterator[Row]:
    """Loss and its gradient, of logits that are there."""
    for vocab_size in (VOCABULARY, VOCABULARY // 8):
        for dtype in (BF16, FP32):
            logits = _random(device, LOSS_TOKENS, vocab_size, dtype=dtype).requires_grad_()
            labels = _ids(device, LOSS_TOKENS, vocab_size)
            arguments = labels, vocab_size, (0, vocab_size)
            forward = partial(ops.vocab_cross_entropy, logits.detach(), *arguments)
            ours = partial(ops.vocab_cross_entropy, logits, *arguments)
            peers = {"torch": functional.cross_entropy}
            if device.type == "cuda":
                peers["torch.compile"] = torch.compile(functional.cross_entropy)
            of_peers = {
                name: _gradients(partial(peer, logits, labels), [logits], None)
                for name, peer in peers.items()
            }
            name = f"cross entropy, V = {vocab_size}, {str(dtype)[6:]}"
            yield Row(f"{name}, forward", {OURS: forward}, bytes=logits.nbytes, ahead=True)
            yield Row(
                *(f"{name}, with gradient", {OURS: _gradients(ours, [logits], None), **of_peers}),
                bytes=3 * logits.nbytes,
                limits=dict.fromkeys(peers, 1.0),
                same=(*peers,),
                ahead=True,
            )


def head(device: torch.device) -> Iterator[Row]:
    """Output head and loss together, beside the bare products and what HuggingFace computes."""
    input, weight = _random(device, TOKENS, HIDDEN), _random(device, VOCABULARY, HIDDEN)
    labels, logits = _ids(device, TOKENS), _random(device, TOKENS, VOCABULARY)
    flops = 2 * TOKENS * HIDDEN * VOCABULARY
    arguments = labels, VOCABULARY, (0, VOCABULARY)

    def plain() -> torch.Tensor:
        return functional.cross_entropy(functional.linear(input, weight).float(), labels)

    for trained in (True, False):
        inputs = [input.requires_grad_(), *([weight] if trained else [])]
        weight.requires_grad_(trained)

        def products(trained: bool = trained) -> None:
            with torch.no_grad():
                torch.mm(input, weight.T, out=logits)
                logits @ weight
                if trained:
                    logits.T @ input

        runs = {
            OURS: _gradients(
                lambda: ops.linear_vocab_cross_entropy(input, weight, *arguments), inputs, None
            ),
            "products": products,
            "HuggingFace": _gradients(plain, inputs, None),
        }
        yield Row(
            *(f"head and loss, {'trained' if trained else 'frozen'}", runs),
            flops=(2 + trained) * flops,
            limits={"products": 1.10, "HuggingFace": 1.0},
            same=("HuggingFace",),
            ahead=True,
        )


def embedding(device: torch.device) -> Iterator[Row]:
    """The embedding and its gradient, also where half of the tokens are one and the same."""
    weight = _random(device, VOCABULARY, HIDDEN).requires_grad_()
    grad = _random(device, TOKENS, HIDDEN)
    for name in ("uniform ids", "half of the ids equal"):
        ids = _ids(device, TOKENS)
        if name != "uniform ids":
            ids[::2] = 5
        yield Row(
            f"embedding, {name}",
            {
                OURS: _gradients(
                    lambda ids=ids: ops.vocab_embedding(ids, weight, VOCABULARY, 0), [weight], grad
                ),
                "torch": _gradients(
                    lambda ids=ids: functional.embedding(ids, weight), [weight], grad
                ),
            },
            bytes=4 * grad.nbytes + weight.nbytes,
            limits={"torch": 1.0},
            same=("torch",),
            ahead=True,
        )


def mixture(device: torch.device) -> Iterator[Row]:
    """A layer of experts, forward and backward, beside transformers' and one dense product."""
    shapes = size(((8, 14336, 4096, 2), (128, 768, 2048, 8)), ((4, 16, 32, 2),))
    for num_experts, inner, hidden, top_k in shapes:
        config = MixtralConfig(
            hidden_size=hidden, intermediate_size=inner, num_local_experts=num_experts
        )
        config._experts_implementation = "grouped_mm"
        with device:
            plain = MixtralExperts(config).to(BF16)
        for parameter in plain.parameters():
            nn.init.normal_(parameter, std=0.02)
        ours = px_nn.ExpertParallelExperts.from_plain(plain, ops.ALONE)
        tokens, grad = (_random(device, TOKENS, hidden).requires_grad_() for _ in range(2))
        ids = torch.rand(TOKENS, num_experts, device=device).topk(top_k).indices
        weights = torch.rand(TOKENS, top_k, device=device).softmax(-1).requires_grad_()
        rows, dense = _random(device, TOKENS * top_k, hidden), _random(device, 3 * inner, hidden)

        def products(rows: torch.Tensor = rows, dense: torch.Tensor = dense) -> None:
            output = rows @ dense.T
            output @ dense
            output.T @ rows

        runs = {
            name: _gradients(
                partial(layer, tokens, ids, weights),
                [tokens, weights, *layer.parameters()],
                grad.detach(),
            )
            for name, layer in ((OURS, ours), ("transformers, grouped_mm", plain))
        }
        yield Row(
            f"{num_experts} experts of {inner} x {hidden}, top {top_k}",
            {**runs, "a dense product": products},
            flops=3 * 2 * TOKENS * top_k * 3 * inner * hidden,
            limits={"transformers, grouped_mm": 1.0, "a dense product": 1 / 0.6},
            same=("transformers, grouped_mm",),
            ahead=True,
        )


def lora(device: torch.device) -> Iterator[Row]:
    """A linear with an adapter of rank 16, forward and backward, and a dropout alone."""
    r = size(16, 4)
    weight, x = _random(device, HIDDEN, HIDDEN), _random(device, TOKENS, HIDDEN).requires_grad_()
    a, b = _random(device, r, HIDDEN, dtype=FP32), _random(device, HIDDEN, r, dtype=FP32)
    grad = _random(device, TOKENS, HIDDEN)
    factors = [a.requires_grad_(), b.requires_grad_()]
    for p in (0.0, 0.05):
        plain = nn.Sequential(nn.Linear(HIDDEN, HIDDEN, bias=False, device="meta"))
        plain[0].weight = nn.Parameter(weight, requires_grad=False)
        config = peft.LoraConfig(r=r, lora_alpha=2 * r, lora_dropout=p, target_modules=["0"])
        adapted = peft.inject_adapter_in_model(config, plain).train()
        trained = [each for each in adapted.parameters() if each.requires_grad]
        for theirs, own in zip(trained, factors, strict=True):
            theirs.data = own.detach().clone()  # in fp32, as PEFT has them
        dropout = ops.Dropout(p=p, key=1, step=1) if p else None

        def ours(dropout: Any = dropout) -> torch.Tensor:
            return ops.lora_linear(x, weight, a, b, scale=2.0, dropout=dropout)

        yield Row(
            f"linear with LoRA, dropout {p}",
            {
                OURS: _gradients(ours, [x, *factors], grad),
                "frozen linear": _gradients(lambda: functional.linear(x, weight), [x], grad),
                "PEFT": _gradients(partial(adapted, x), [x, *trained], grad),
            },
            flops=4 * TOKENS * HIDDEN**2,
            limits={"frozen linear": 1.15, "PEFT": 1.0},
            same=() if p else ("PEFT",),
            ahead=True,
        )
    mask, plain_x = ops.Dropout(p=0.05, key=1, step=1), x.detach()
    yield Row(
        "dropout",
        {
            OURS: partial(ops.seeded_dropout, plain_x, mask),
            "torch": partial(functional.dropout, plain_x, 0.05),
        },
        bytes=2 * x.nbytes,
        limits={"torch": 1.0},
        ahead=True,
    )


def sampling(device: torch.device) -> Iterator[Row]:
    """One token a row from logits, beside transformers' warpers and torch.multinomial."""
    ways: dict[str, tuple[dict[str, Any], list[Any]]] = {
        "temperature": ({"temperature": 0.8}, [TemperatureLogitsWarper(0.8)]),
        "top_k": ({"top_k": 50}, [TopKLogitsWarper(50)]),
        "top_p": ({"top_p": 0.9}, [TopPLogitsWarper(0.9)]),
    }
    for rows in (1, 64):
        logits = _random(device, rows, VOCABULARY, dtype=FP32) * VOCABULARY**0.5
        ids = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        own = logits, VOCABULARY, (0, VOCABULARY)
        yield Row(
            f"argmax, {rows} rows",
            {OURS: lambda own=own: ops.vocab_argmax(*own), "torch": partial(logits.argmax, -1)},
            bytes=logits.nbytes,
            limits={"torch": 1.0},
            same=("torch",),
        )
        for name, (options, warpers) in ways.items():

            def peer(
                logits: torch.Tensor = logits, ids: torch.Tensor = ids, warpers: Any = warpers
            ) -> torch.Tensor:
                warped = LogitsProcessorList(warpers)(ids, logits)
                return torch.multinomial(warped.softmax(-1), 1)

            yield Row(
                f"sample by {name}, {rows} rows",
                {
                    OURS: partial(ops.vocab_sample, *own, **options, seed=1, step=1),
                    "transformers": peer,
                },
                bytes=logits.nbytes,
                limits={"transformers": 0.5},
            )


def _llama(device: torch.device) -> LlamaForCausalLM:
    inner, layers, heads = size((8192, 16, 32), (64, 1, 4))
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size(2048, 32),
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        max_position_embeddings=4096,
    )
    return _built(LlamaForCausalLM, config, device)


def _mixture(device: torch.device) -> Qwen3MoeForCausalLM:
    hidden, layers, num_experts, inner = size((1024, 16, 64, 768), (32, 1, 4, 16))
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=size(16, 4),
        num_key_value_heads=size(4, 2),
        head_dim=size(64, 8),
        num_experts=num_experts,
        num_experts_per_tok=size(8, 2),
        moe_intermediate_size=inner,
        max_position_embeddings=4096,
    )
    config._experts_implementation = "grouped_mm"
    return _built(Qwen3MoeForCausalLM, config, device)


def _built(kind: type[PreTrainedModel], config: Any, device: torch.device) -> Any:
    torch.manual_seed(1)
    with device:
        return kind(config).to(BF16)


def _backward(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss


def _backward_of_leaves(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return px.train_leaves(model, {"input_ids": ids, "labels": ids})


def _step(
    model: nn.Module,
    ids: torch.Tensor,
    clip: Callable[..., Any],
    backward: Callable[..., torch.Tensor] = _backward,
    fused: bool = True,
) -> Callable[[], torch.Tensor]:
    """Return a whole step of training, whose result is its loss."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=fused)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = backward(model, ids)
        clip(1.0)
        optimizer.step()
        return loss.detach()

    return step


def steps(device: torch.device) -> Iterator[Row]:
    """Steps of whole models with AdamW and clipping, and the clipping alone."""
    mesh = px.init_mesh(device=device)
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), device=device)
    options = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
    for name, build in (("Llama", _llama), ("Llama with LoRA", _llama), ("mixture", _mixture)):
        ours, plain = px.parallelize(build(device), mesh), build(device)
        if "LoRA" in name:
            ours = peft.get_peft_model(ours, px.LoraConfig(**options))
            plain = peft.get_peft_model(plain, peft.LoraConfig(**options))
        ours, plain = ours.train(), plain.train()
        clip_ours = partial(px.clip_grad_norm_, ours)
        clip_plain = partial(nn.utils.clip_grad_norm_, list(plain.parameters()))
        numbers = sum(each.numel() for each in plain.parameters())
        yield Row(
            f"step of a {name}, {numbers / 1e9:.1f}B, {ROWS} x {LENGTH}",
            {OURS: _step(ours, ids, clip_ours), "HuggingFace": _step(plain, ids, clip_plain)},
            limits={"HuggingFace": 1.0},
            quick=False,
        )
        yield Row(
            f"clipping of a {name}",
            {OURS: lambda clip=clip_ours: clip(1.0), "torch": lambda clip=clip_plain: clip(1.0)},
            limits={"torch": 1.1},
        )


@contextmanager
def _kernels_of_invariant(device: torch.device) -> Iterator[None]:
    """Inside, torch takes the kernels that px.Invariant wants on a GPU; on a CPU any will do."""
    if device.type != "cuda":
        yield
        return
    cuda, deterministic = torch.backends.cuda, torch.utils.deterministic
    fills = deterministic.fill_uninitialized_memory
    switches = (cuda.enable_flash_sdp, cuda.enable_cudnn_sdp, cuda.enable_math_sdp)
    before = (cuda.flash_sdp_enabled(), cuda.cudnn_sdp_enabled(), cuda.math_sdp_enabled())
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False
    for switch in switches:
        switch(False)
    try:
        yield
    finally:
        for switch, was_on in zip(switches, before, strict=True):
            switch(was_on)
        deterministic.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(False)


def invariant(device: torch.device) -> Iterator[Row]:
    """Steps with the same bits on any layout, beside ordinary ones: in blocks, and of leaves."""
    mesh = px.init_mesh(device=device)
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), device=device)
    plain = px.parallelize(_llama(device), mesh).train()
    step_of = partial(_step, ids=ids, fused=False)  # a fused AdamW is refused
    plain_step = step_of(plain, clip=partial(px.clip_grad_norm_, plain))
    for leaves, backward in ((1, _backward), (ROWS, _backward_of_leaves)):
        with _kernels_of_invariant(device):
            ours = px.parallelize(_llama(device), mesh, invariant=px.Invariant(4, leaves)).train()
        step = step_of(ours, clip=partial(px.clip_grad_norm_, ours), backward=backward)

        def with_its_kernels(step: Callable[[], Any] = step) -> Any:
            with _kernels_of_invariant(device):
                return step()

        kind = f", leaves of {LENGTH} tokens" * (leaves > 1)
        yield Row(
            f"px.Invariant: step of a Llama, {ROWS} x {LENGTH}, 4 blocks{kind}",
            {OURS: with_its_kernels, "ordinary step": plain_step},
            limits={"ordinary step": 1.15},
            quick=False,
        )


def generation(device: torch.device) -> Iterator[Row]:
    """Greedy tokens of a Llama."""
    ours = px.parallelize(_llama(device), px.init_mesh(device=device)).eval()
    plain = _llama(device).eval()
    options = {
        **{"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False},
        **{"eos_token_id": None, "pad_token_id": 0},
    }
    for rows in (1, 32):
        prompts = torch.randint(VOCABULARY, (rows, 16), device=device)
        yield Row(
            f"generate {NEW_TOKENS} tokens, {rows} rows",
            {
                OURS: partial(px.generate, ours, prompts, **options),
                "HuggingFace": partial(plain.generate, prompts, **options),
            },
            limits={"HuggingFace": 1.0},
            quick=False,
        )


def checkpoint(device: torch.device) -> Iterator[Row]:
    """A training checkpoint of a Llama: the call that waits for the disk, and the one behind."""
    model = px.parallelize(_llama(device), px.init_mesh(device=device)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(VOCABULARY, (1, 16), device=device)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    saved = 3 * sum(each.nbytes for each in model.parameters())
    root, number = tempfile.mkdtemp(), iter(range(1, 1000))

    def save(asynchronous: bool) -> None:
        px.save_checkpoint(
            root, next(number), model, optimizer, asynchronous=asynchronous, keep_last=1
        )

    try:
        yield Row("save a checkpoint", {OURS: partial(save, False)}, bytes=saved, quick=False)
        yield Row(
            "the call that saves one behind training",
            {OURS: partial(save, True)},
            bytes=saved,
            quick=False,
            after=partial(px.wait_for_checkpoint, model),
        )
    finally:
        shutil.rmtree(root)


PARTS: dict[str, Callable[[torch.device], Iterator[Row]]] = {
    each.__name__: each
    for each in (
        *(ceilings, cross_entropy, head, embedding, mixture),
        *(lora, sampling, steps, invariant, generation, checkpoint),
    )
}
