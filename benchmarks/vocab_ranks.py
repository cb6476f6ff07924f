"""What the processes of ``vocab.py`` run: losses and embeddings of a sharded vocabulary."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import harness
import torch
import torch.distributed as dist
import vocab_peers
from torch.nn import functional
from vocab_peers import Loss, SumGradient

import parallel_ext as px
from parallel_ext import ops
from parallel_ext.ops import Group
from parallel_ext.sharding.layout import split

OURS = "parallel_ext"
OURS_IN_PLACE = "parallel_ext, in place"
OURS_TWO_OPS = "parallel_ext, linear then loss"
FROZEN = ", frozen head"
PASSES = "two passes"
PRODUCTS = "three products"  # two where the head is frozen
ALL_REDUCE = "bare all-reduce"

# One process with the whole vocabulary.
ONE = "one process"
ONE_FLOAT = "one process, float()"
ONE_FUSED = "one process, linear_cross_entropy"
ONE_CHUNKED = "one process, chunked"

RANKS = 2  # what one process holds is the shards of so many
TOKENS, HIDDEN = harness.size((1024, 1024), (32, 32))
EMBEDDED = harness.size(8192, 64)

Step = Callable[[], list[torch.Tensor]]


@dataclass
class Part:
    """What is measured at one size and dtype.

    Attributes:
        steps: competitor -> forward and backward; returns loss or output, then gradients.
        expected: what these must be, in fp64; a frozen head leaves the last one out.
        floors: name -> what computes no result.
        restore: brings the inputs back to what they were; never timed.
    """

    steps: dict[str, Step]
    expected: list[torch.Tensor]
    floors: dict[str, Callable[[], None]] = field(default_factory=dict)
    restore: Callable[[], None] = lambda: None

    def turn(self, name: str) -> Callable[[], list[float]]:
        step = self.steps.get(name) or self.floors[name]

        def run() -> list[float]:
            self.restore()
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            result = step()  # lives until the clock was read
            stop = time.perf_counter()
            del result
            return [stop - start]

        return run

    def error(self, name: str) -> float:
        """The worst relative difference from what is expected, on any rank."""
        self.restore()
        pairs = zip(self.steps[name](), self.expected, strict=False)
        worst = max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs)
        (error,) = harness.slowest([worst])
        return error

    def measure(self, request: dict[str, Any]) -> dict[str, Any]:
        """Errors of all; rounds and growth of memory of those that are right."""
        if only := request.get("only"):
            self.steps = {name: self.steps[name] for name in only}
        errors = {name: self.error(name) for name in self.steps}
        names = [name for name, error in errors.items() if error <= request["tolerance"]]
        self.expected = []
        turns = {name: self.turn(name) for name in [*names, *self.floors]}
        rounds = harness.interleaved(turns, request["repetitions"], warm_up=2)
        growth = {}
        for name in names:
            px.release_workspaces()  # what ours keeps counts as if it were allocated again
            self.restore()
            (growth[name],) = harness.slowest([harness.peak_growth(self.steps[name])])
        return {"rounds": [asdict(each) for each in rounds], "growth_mib": growth, "errors": errors}


# Who holds what.


def _group() -> Group:
    return Group.of(dist.group.WORLD) if dist.is_initialized() else ops.ALONE


def _columns(vocab_size: int) -> tuple[int, int]:
    """The ids of this process."""
    group = _group()
    return split(vocab_size, group.size)[group.rank]


def _drawn(vocab_size: int, width: int, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """[V, width], of which all processes draw the same."""
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(vocab_size, width, generator=generator) * scale).to(dtype)


def _labels(vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, vocab_size, (TOKENS,), generator=generator)


def _summed(tensor: torch.Tensor) -> torch.Tensor:
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def _expected_loss(logits: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean loss of this rank's logits in fp64, and their gradient, by plain formulas."""
    start, stop = _columns(vocab_size)
    labels, rows = _labels(vocab_size), torch.arange(TOKENS)
    mine = (labels >= start) & (labels < stop)
    target = logits.new_zeros(TOKENS)
    target[mine] = logits[rows[mine], labels[mine] - start]
    grad = logits.exp()  # of numbers that are small enough for it
    normalizer = _summed(grad.sum(1))
    grad /= normalizer[:, None]
    grad[rows[mine], labels[mine] - start] -= 1
    return (normalizer.log() - _summed(target)).mean(), grad.div_(TOKENS)


def _our_loss(vocab_size: int, consume_logits: bool = False) -> Loss:
    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        columns, how = _columns(vocab_size), {"consume_logits": consume_logits, "group": _group()}
        return ops.vocab_cross_entropy(logits, labels, vocab_size, columns, **how)

    return loss


def _losses(vocab_size: int, dtype: torch.dtype) -> dict[str, Loss]:
    """All that run in this process; ours in place is not among them."""
    if dist.is_initialized():
        return {OURS: _our_loss(vocab_size)} | vocab_peers.losses(vocab_size, dtype)
    found: dict[str, Loss] = {ONE: functional.cross_entropy}
    if dtype != torch.float32:
        found[ONE_FLOAT] = lambda logits, labels: functional.cross_entropy(logits.float(), labels)
    return found


# Cross entropy.


class _Head(torch.autograd.Function):
    """Logits as a model's head hands them over: no leaf, in memory that is theirs."""

    @staticmethod
    def forward(ctx, trigger: torch.Tensor, logits: torch.Tensor, into: list[torch.Tensor]):
        ctx.into = into
        return logits.data

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        ctx.into[:] = [grad]
        return None, None, None


def cross_entropy(vocab_size: int, dtype: torch.dtype) -> Part:
    """Logits [T, V] sharded over the ranks, rows as long as those of the largest shard."""
    start, stop = _columns(vocab_size)
    longest = split(vocab_size, _group().size)[0][1]
    kept = torch.full((TOKENS, longest), float("-inf"), dtype=dtype)
    kept[:, : stop - start] = _drawn(vocab_size, TOKENS, 2.0, dtype)[start:stop].T
    logits, trigger, labels = kept.clone(), torch.zeros((), requires_grad=True), _labels(vocab_size)

    def step(name: str, loss: Loss) -> Step:
        # Equal shards for who needs them; sharded here, where autograd does not see it.
        own = logits[:, : stop - start] if name in (OURS, OURS_IN_PLACE) else logits

        def run() -> list[torch.Tensor]:
            grad: list[torch.Tensor] = []
            value = loss(_Head.apply(trigger, own, grad), labels)
            vocab_peers.backward(value)
            return [value.detach(), grad[0][:, : stop - start]]

        return run

    def passes() -> None:
        logits.sum()
        logits.mul_(1.0)

    competitors = _losses(vocab_size, dtype)
    if dist.is_initialized():
        competitors[OURS_IN_PLACE] = _our_loss(vocab_size, consume_logits=True)
    expected = list(_expected_loss(kept[:, : stop - start].double(), vocab_size))
    steps = {name: step(name, loss) for name, loss in competitors.items()}
    floors = {PASSES: passes} if dist.is_initialized() else {}
    return Part(steps, expected, floors, restore=lambda: logits.copy_(kept))


# Head and cross entropy.


def linear(vocab_size: int, dtype: torch.dtype) -> Part:
    """Hidden states [T, H] and a head [V, H], trained or frozen; the ranks must divide V."""
    start, stop = _columns(vocab_size)
    head = _drawn(vocab_size, HIDDEN, HIDDEN**-0.5, dtype)[start:stop].clone()
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    labels = _labels(vocab_size)
    heads = {"": head.requires_grad_(), FROZEN: head.detach()}

    def forget() -> None:
        hidden.grad = heads[""].grad = None

    def step(loss: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor) -> Step:
        def run() -> list[torch.Tensor]:
            value = loss(weight)
            vocab_peers.backward(value)
            trained = (hidden, weight) if weight.requires_grad else (hidden,)
            return [value.detach(), *(tensor.grad for tensor in trained)]

        return run

    def two_ops(loss: Loss) -> Callable[[torch.Tensor], torch.Tensor]:
        enter = SumGradient.apply if dist.is_initialized() else (lambda x: x)
        return lambda weight: loss(functional.linear(enter(hidden), weight), labels)

    competitors = {
        name: two_ops(loss)
        for name, loss in _losses(vocab_size, dtype).items()
        if name not in (OURS, vocab_peers.MEGATRON if dtype == torch.float32 else "")
    }
    if dist.is_initialized():
        competitors |= _our_heads(hidden, labels, vocab_size)
    else:
        fused, options = functional.linear_cross_entropy, torch.nn.LinearCrossEntropyOptions()
        competitors[ONE_FUSED] = lambda w: fused(hidden, w, labels)
        competitors[ONE_CHUNKED] = lambda w: fused(hidden, w, labels, options=options)
    steps = {
        name + kind: step(loss, weight)
        for name, loss in competitors.items()
        for kind, weight in heads.items()
    }
    floors = _products(hidden.detach(), head.detach()) if dist.is_initialized() else {}

    wide_hidden, wide_head = hidden.detach().double(), head.detach().double()
    loss, grad = _expected_loss(wide_hidden @ wide_head.T, vocab_size)
    expected = [loss, _summed(grad @ wide_head), grad.T @ wide_hidden]
    return Part(steps, expected, floors, forget)


def _our_heads(
    hidden: torch.Tensor, labels: torch.Tensor, vocab_size: int
) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    columns, group = _columns(vocab_size), _group()

    def two_ops(weight: torch.Tensor) -> torch.Tensor:
        logits = ops.column_linear(hidden, weight, group=group)
        return ops.vocab_cross_entropy(logits, labels, vocab_size, columns, group=group)

    def fused(weight: torch.Tensor) -> torch.Tensor:
        return ops.linear_vocab_cross_entropy(
            hidden, weight, labels, vocab_size, columns, group=group
        )

    return {OURS: fused, OURS_TWO_OPS: two_ops}


def _products(hidden: torch.Tensor, head: torch.Tensor) -> dict[str, Callable[[], None]]:
    """The matrix products that no head can do without, into memory that stays."""
    logits = torch.empty(len(hidden), len(head), dtype=hidden.dtype)
    hidden_grad, head_grad = torch.empty_like(hidden), torch.empty_like(head)

    def two() -> None:
        torch.mm(hidden, head.T, out=logits)
        torch.mm(logits, head, out=hidden_grad)

    def three() -> None:
        two()
        torch.mm(logits.T, hidden, out=head_grad)

    return {PRODUCTS: three, PRODUCTS + FROZEN: two}


# Embedding.


def embedding(vocab_size: int, dtype: torch.dtype) -> Part:
    """A table [V, H] sharded over the ranks."""
    start, stop = _columns(vocab_size)
    table, group = _drawn(vocab_size, HIDDEN, 1.0, dtype), _group()
    weight = table[start:stop].clone().requires_grad_()
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, vocab_size, (EMBEDDED,), generator=generator)
    grad = torch.randn(EMBEDDED, HIDDEN, generator=generator).to(dtype)
    competitors: dict[str, vocab_peers.Embedding] = {
        OURS: (lambda ids: ops.vocab_embedding(ids, weight, vocab_size, start, group=group), weight)
    } | vocab_peers.embeddings(table, slice(start, stop))

    def step(look_up: Callable[[torch.Tensor], torch.Tensor], parameter: torch.Tensor) -> Step:
        def run() -> list[torch.Tensor]:
            output = look_up(ids)
            output.backward(grad)
            return [output.detach(), vocab_peers.local(parameter.grad)]

        return run

    def forget() -> None:
        for _, parameter in competitors.values():
            parameter.grad = None

    rows = torch.zeros(table.shape, dtype=torch.float64).index_add_(0, ids, grad.double())
    message = grad.clone()
    return Part(
        steps={name: step(*each) for name, each in competitors.items()},
        expected=[table[ids].double(), rows[start:stop].clone()],
        floors={ALL_REDUCE: lambda: dist.all_reduce(message)},
        restore=lambda: (forget(), message.zero_()),
    )


def main() -> None:
    warnings.filterwarnings("ignore")
    request = harness.arguments()
    if request["ranks"] > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    parts = {"cross_entropy": cross_entropy, "linear": linear, "embedding": embedding}
    part = parts[request["part"]](request["vocab_size"], getattr(torch, request["dtype"]))
    harness.finish(part.measure(request))


if __name__ == "__main__":
    main()
