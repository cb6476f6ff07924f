"""``DistributedDataParallel`` around parallel models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NoReturn

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from parallel_ext.interplay.trained_together import prepare_to_train
from parallel_ext.parallel.adopting import patches
from parallel_ext.parallel.beside import parallel_parts
from parallel_ext.parallel.state import state_of
from parallel_ext.training.gradients import no_sync


def start_ddp(
    plain: Callable[..., None],
    self: DistributedDataParallel,
    module: nn.Module,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Extend ``DistributedDataParallel``: it averages the gradients of what every rank holds whole.

    Under ``px.patch`` it only passes on what it is given: ``px.data_parallel`` sums the gradients.

    Raises:
        RuntimeError: ``module`` is, or holds, a parallel model whose shards it would overwrite by
            rank 0's.
    """
    prepare_to_train(module, "DistributedDataParallel")
    states = [state_of(each) for each in parallel_parts(module).values()]
    if states and patches:
        nn.Module.__init__(self)
        self.__class__, self.module = _passed_on(type(self)), module
        return
    for state in states:
        mesh = state.mesh
        if mesh.tp_size > 1 or mesh.ep_size > 1:
            raise RuntimeError(
                "DistributedDataParallel is not supported on a model that is sharded over "
                f"tp={mesh.tp_size}, ep={mesh.ep_size} ranks: it would overwrite every rank's "
                "shard by rank 0's; use px.data_parallel(model, mesh)"
            )
        if state.zero is not None and mesh.dp_size > 1:
            raise RuntimeError(
                "DistributedDataParallel is not supported after px.data_parallel, which shards "
                "the model over the dp ranks and sums its gradients; leave it out"
            )
    plain(self, module, *args, **kwargs)
    for state in states:
        state.reduced_by_caller = True


class _PassedOn(DistributedDataParallel):
    """What ``DistributedDataParallel(module)`` is under ``px.patch``.

    Attributes:
        module: that was given.

    Others are torch's, which packages ask for.
    """

    device_ids = output_device = None
    find_unused_parameters = gradient_as_bucket_view = False
    broadcast_buffers = require_backward_grad_sync = True
    static_graph = True  # of another, packages read statistics of DDP's own

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def train(self, mode: bool = True) -> _PassedOn:
        return nn.Module.train(self, mode)

    def no_sync(self) -> AbstractContextManager[None]:
        """Leave out the sums over the dp ranks, as ``px.no_sync`` does."""
        return no_sync(self.module)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            "px.patch: px.data_parallel sums the gradients of the model in this "
            "DistributedDataParallel, and knows neither join() nor hooks for the sums"
        )

    join = register_comm_hook = _refuse

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    __setstate__ = nn.Module.__setstate__


@cache
def _passed_on(cls: type[DistributedDataParallel]) -> type[_PassedOn]:
    """Return a class of that name which passes on, with the methods of a user's own class."""
    own = () if cls is DistributedDataParallel else (cls,)
    return type(cls.__name__, (*own, _PassedOn), {"__module__": cls.__module__})
