"""What ``vocab.py`` is compared with: losses and embeddings of others on the same shards.

A *loss* is called with this rank's logits [T, R] and the labels [T], R being the rows of the
largest shard: at a V that the ranks do not divide, the columns beyond V are -inf, which no loss
feels. It returns the mean over the tokens.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional

MEGATRON = "megatron-core, logits kept"
MEGATRON_IN_PLACE = "megatron-core, in place"
LOSS_PARALLEL = "torch loss_parallel"
LOSS_PARALLEL_FLOAT = "torch loss_parallel, float()"
GATHERED = "gathered logits"
MEGATRON_EMBEDDING = "megatron-core"
DTENSOR = "torch RowwiseParallel"

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Embedding = tuple[Callable[[torch.Tensor], torch.Tensor], nn.Parameter]


def has_megatron() -> bool:
    """Whether megatron-core can be imported; then it learns who the ranks are."""
    if importlib.util.find_spec("megatron") is None:
        return False
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    return True


class SumGradient(torch.autograd.Function):
    """Hidden states on their way into a sharded head: what comes back is summed."""

    @staticmethod
    def forward(ctx, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class _Gather(torch.autograd.Function):
    """The columns of all ranks; each takes back its own."""

    @staticmethod
    def forward(ctx, local: torch.Tensor) -> torch.Tensor:
        everyone = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, local)
        return torch.cat(everyone, 1)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return grad.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


def losses(vocab_size: int, dtype: torch.dtype) -> dict[str, Loss]:
    """Those that run here: name -> loss over the ranks."""
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))

    def parallel(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        first = dist.get_rank() * logits.size(1)
        own = logits[:, : vocab_size - first]
        size = torch.Size((len(logits), vocab_size))
        whole = DTensor.from_local(
            own, mesh, [Shard(1)], run_check=False, shape=size, stride=(vocab_size, 1)
        )
        with loss_parallel():
            return functional.cross_entropy(whole, labels)

    def gathered(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(_Gather.apply(logits)[:, :vocab_size].float(), labels)

    found: dict[str, Loss] = {LOSS_PARALLEL: parallel, GATHERED: gathered}
    if dtype != torch.float32:
        found[LOSS_PARALLEL_FLOAT] = lambda logits, labels: parallel(logits.float(), labels)
    if has_megatron():
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        def in_place(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            by_sequence = vocab_parallel_cross_entropy(logits.unsqueeze(1), labels.unsqueeze(1))
            return by_sequence.mean()

        if dtype == torch.float32:  # which it writes to; others it copies to fp32 first
            found[MEGATRON_IN_PLACE] = in_place
            found[MEGATRON] = lambda logits, labels: in_place(logits.clone(), labels)
        else:
            found[MEGATRON] = in_place
    return found


def backward(loss: torch.Tensor) -> None:
    """Of any loss; torch wants that of a DTensor within the context that its forward was in."""
    with loss_parallel():
        loss.backward()


def embeddings(table: torch.Tensor, own: slice) -> dict[str, Embedding]:
    """Name -> embedding and its parameter, which holds the rows ``own`` of ``table`` [V, H]."""
    whole = nn.Embedding(*table.shape, _weight=table.clone())
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    sharded = parallelize_module(whole, mesh, RowwiseParallel(input_layouts=Replicate()))

    def rowwise(ids: torch.Tensor) -> torch.Tensor:
        rows = sharded(ids)
        if isinstance(rows, AsyncCollectiveTensor):
            rows.trigger_wait()  # as a model would at its next operator
        return rows

    found: dict[str, Embedding] = {DTENSOR: (rowwise, sharded.weight)}
    if has_megatron():
        from megatron.core import ModelParallelConfig
        from megatron.core.tensor_parallel import VocabParallelEmbedding

        config = ModelParallelConfig(
            tensor_model_parallel_size=dist.get_world_size(),
            use_cpu_initialization=True,
            perform_initialization=False,
            params_dtype=table.dtype,
        )
        theirs = VocabParallelEmbedding(*table.shape, init_method=nn.init.zeros_, config=config)
        theirs.weight.data.copy_(table[own])
        found[MEGATRON_EMBEDDING] = (theirs, theirs.weight)
    return found


def local(grad: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a gradient, which may be a DTensor."""
    if isinstance(grad, DTensor):
        return grad.redistribute(placements=[Shard(0)]).to_local()
    return grad
