"""Adafactor whose means and norms are those of whole tensors, of which each rank holds shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from parallel_ext.distributed.mesh import Mesh
from parallel_ext.parallel.state import state_of
from parallel_ext.sharding.layout import TensorLayout
from parallel_ext.sharding.named_shards import named_shards, to_shards
from parallel_ext.sharding.optimizer_layouts import COLUMNS, ROWS, is_sharded_along, reduced
from parallel_ext.sharding.slices import from_each_rank, local_part, primary_views, take


class Adafactor(torch.optim.Adafactor):
    """``torch.optim.Adafactor`` for a parallel model: every step is that of one process.

    torch's own takes the means over rows and columns, the norm of a parameter and that of its
    update from what one rank holds. Here they are those of the whole parameter, by two all-gathers
    a step over tp and two over dp: sums along what is sharded, then a number for each parameter.

    Every rank makes it, after ``px.parallelize`` and ``px.data_parallel``, and steps.

    Args:
        model: a parallel model, wrapped or not. With dp > 1 the steps are right after
            ``data_parallel``, or once the gradients were averaged.
        params: parameters of the model, or groups of them; None for all that are trained.
        lr, beta2_decay, eps, d, weight_decay, maximize: as of ``torch.optim.Adafactor``.

    Attributes:
        state: of each parameter as in torch. The factor ``row_var`` is sharded as the rows are and
            ``col_var`` as the columns are; where those are whole, the factor is replicated.

    Raises:
        TypeError: the model was not parallelized.
        ValueError: a parameter is not of the model; what torch refuses.

    Source: ``torch.optim.Adafactor``, whose arithmetic it follows; Adafactor (arXiv 1804.04235).

    Example:
        >>> optimizer = Adafactor(model, lr=1e-2)  # doctest: +SKIP
    """

    of_whole_tensors = True
    """Whether the state is that of whole parameters, so that a training checkpoint can hold it."""

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None = None,
        lr: float | torch.Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if state_of(model).invariant is not None:  # raises where it is not parallel
            raise NotImplementedError(
                "px.Adafactor: its means over rows depend on the layout, which px.Invariant rules "
                "out; use AdamW"
            )
        to_shards(model)
        self._model = model
        if params is None:
            params = [parameter for parameter in model.parameters() if parameter.requires_grad]
        super().__init__(params, lr, beta2_decay, eps, d, weight_decay, maximize=maximize)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_model": self._model}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as in torch; they must be the model's."""
        super().add_param_group(param_group)
        to_shards(self._model)
        known = {id(parameter) for parameter in self._model.parameters()}
        for parameter in self.param_groups[-1]["params"]:
            if id(parameter) not in known:
                self.param_groups.pop()
                raise _foreign(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters by one step; every rank calls it.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What ``closure`` returned, or None.

        Raises:
            RuntimeError: a parameter has a gradient on some ranks only (on all ranks), or a sparse
                or complex one.
            ValueError: a parameter does not belong to the model any more.
            DisagreementError: the ranks' optimizers have different parameters.
            CollectiveTimeout: not all ranks called it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        mesh = state_of(self._model).mesh
        op_name = "Adafactor.step"
        tensors = mesh.control.run_on_all(op_name, lambda: list(self._tensors(mesh.rank)))
        parts = [tensor.parts() for tensor in tensors]
        length = sum(part.numel() for own in parts for part in own)
        mesh.control.barrier(f"{op_name} of {len(tensors)} parameters with {length} sums")
        sums = iter(_over_ranks([part for own in parts for part in own], mesh))
        for tensor, own in zip(tensors, parts, strict=True):
            tensor.take_sums([next(sums) for _ in own])
        trained = [tensor for tensor in tensors if tensor.trained]
        epsilons: dict[int, float] = {}  # of the first in a group, as in torch
        for tensor in trained:
            epsilon = torch.finfo(tensor.parameter.dtype).eps
            tensor.epsilon = epsilons.setdefault(id(tensor.group), epsilon)
            tensor.update_state(self.state[tensor.parameter])
        sizes = _over_ranks([tensor.size_of_update() for tensor in trained], mesh)
        for tensor, size in zip(trained, sizes, strict=True):
            tensor.update_parameter(size)
        return loss

    def _tensors(self, rank: int) -> Iterator[_Tensor]:
        """Yield the parameters that may have to be trained, in the order of the groups."""
        to_shards(self._model)
        known = {id(p): (name, layout) for name, p, layout in named_shards(self._model)}
        for group in self.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in known:  # any more
                    raise _foreign(parameter)
                name, layout = known[id(parameter)]
                gradient = parameter.grad
                if gradient is not None and (gradient.is_sparse or gradient.is_complex()):
                    kind = "sparse" if gradient.is_sparse else "complex"
                    raise RuntimeError(f"Adafactor: the gradient of {name} is {kind}")
                if layout.numel > 0 and (parameter.requires_grad or gradient is not None):
                    row_factor = self.state.get(parameter, {}).get("row_var")
                    yield _Tensor(name, parameter, layout, group, rank, row_factor)


def _foreign(parameter: torch.Tensor) -> ValueError:
    return ValueError(
        f"Adafactor: a parameter of shape {tuple(parameter.shape)} does not belong to the model; "
        "take the parameters after px.parallelize and px.data_parallel"
    )


def _over_ranks(addends: Sequence[torch.Tensor], mesh: Mesh) -> list[torch.Tensor]:
    """Sum addends over all ranks, in one message per group, to the same bits on every rank."""
    if not addends:
        return []
    wide = torch.float64 if any(a.dtype == torch.float64 for a in addends) else torch.float32
    flat = torch.cat([addend.flatten().to(wide) for addend in addends])
    for group in (mesh.tp, mesh.dp):
        flat = from_each_rank(flat, group).sum(0)
    pieces = flat.split([addend.numel() for addend in addends])
    return [piece.view_as(addend) for piece, addend in zip(pieces, addends, strict=True)]


class _Tensor:
    """A parameter during a step of :class:`Adafactor`.

    Attributes:
        trained: whether it has a gradient.
        epsilon: what the first of ``eps`` is where it is None.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        layout: TensorLayout,
        group: dict[str, Any],
        rank: int,
        row_factor: torch.Tensor | None,
    ) -> None:
        self.name, self.parameter, self.group = name, parameter, group
        self.trained, self.epsilon = False, 0.0
        self._layout, self._rank, self._row_factor = layout, rank, row_factor
        self._shard = local_part(parameter)
        self._wide = torch.promote_types(parameter.dtype, torch.float32)
        has_gradient, holds = parameter.grad is not None, self._shard.numel() > 0
        # A rank that holds nothing of the parameter takes part, with a gradient or without.
        self._votes = [float(holds and has_gradient), float(holds and not has_gradient)]
        self._gradient = local_part(parameter.grad) if has_gradient else None
        if self._gradient is None and not holds:
            self._gradient = torch.zeros_like(self._shard)
        self._factored = len(layout.shape) > 1
        self._rows_sharded = self._factored and is_sharded_along(layout, ROWS)
        self._columns_sharded = self._factored and is_sharded_along(layout, COLUMNS)

    def parts(self) -> list[torch.Tensor]:
        """Return this rank's addends of the sums over all ranks; their shapes are equal on all."""
        votes = [*self._votes, 0.0]
        numbers = torch.tensor(votes, dtype=self._wide).to(self._shard.device)
        numbers[2] = self._size(self._shard)
        parts = [numbers]
        if self._rows_sharded:
            parts.append(self._at_places(self._gradient, self._layout, ROWS, self._squares))
            by_rows = reduced(self._layout, COLUMNS)
            parts.append(self._at_places(self._row_factor, by_rows, ROWS, self._plain))
        if self._columns_sharded:
            parts.append(self._at_places(self._gradient, self._layout, COLUMNS, self._squares))
        return parts

    def take_sums(self, sums: Sequence[torch.Tensor]) -> None:
        """Take the sums of all ranks' :meth:`parts`; raise if only some have a gradient."""
        numbers, *self._sums = sums
        have, lack, self._size_of_parameter = numbers.tolist()
        if have and lack:
            raise RuntimeError(
                f"Adafactor: {self.name} has a gradient on {have:g} ranks, but none on {lack:g} "
                "others that hold some of it; all ranks must train the same parameters"
            )
        self.trained = have > 0

    def update_state(self, state: dict[str, Any]) -> None:
        """Update the optimizer's state of the parameter; it is filled first if it is empty."""
        layout = self._layout
        by_rows, by_columns = (
            reduced(layout, d) if self._factored else None for d in (COLUMNS, ROWS)
        )
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            if self._factored:
                state["row_var"] = self._shard.new_zeros(by_rows.local_shape(self._rank))
                state["col_var"] = self._shard.new_zeros(by_columns.local_shape(self._rank))
            else:
                state["variance"] = torch.zeros_like(self.parameter)
        state["step"] += 1
        self._state, self._step = state, state["step"].item()
        weight = self._step ** self.group["beta2_decay"]
        if not self._factored:
            local_part(state["variance"]).lerp_(self._gradient.square(), weight)
            return
        num_rows, num_columns = layout.shape[-2:]
        sums, own = iter(self._sums), {}
        if self._rows_sharded:
            own[ROWS], before = next(sums), next(sums)
            total = own[ROWS].sum(COLUMNS, keepdim=True) / num_columns
            mean = before.lerp(total, weight) / num_rows
            self._row_mean = take(mean, reduced(by_rows, ROWS), self._rank)
        if self._columns_sharded:
            own[COLUMNS] = next(sums)
        for key, at, dim, size in (
            ("row_var", by_rows, COLUMNS, num_columns),
            ("col_var", by_columns, ROWS, num_rows),
        ):
            squares = (
                take(own[dim], at, self._rank) if dim in own else self._squares(self._gradient, dim)
            )
            state[key].lerp_((squares / size).to(state[key].dtype), weight)
        if not self._rows_sharded:
            self._row_mean = state["row_var"].mean(ROWS, keepdim=True)

    def size_of_update(self) -> torch.Tensor:
        """Return this rank's addend of the square of the norm of the update."""
        return self._size(self._update())

    def update_parameter(self, size: torch.Tensor) -> None:
        """Update the parameter by one step, whose update has a norm with the square ``size``."""
        group, numel = self.group, self._layout.numel
        rate = float(group["lr"])
        size_of_parameter = math.sqrt(self._size_of_parameter / numel)
        alpha = max(group["eps"][1], size_of_parameter) * min(rate, self._step**-0.5)
        alpha /= max(1.0, math.sqrt(size.item() / numel) / group["d"])
        if group["weight_decay"] != 0:
            self._shard.mul_(1 - rate * group["weight_decay"])
        self._shard.add_(self._update(), alpha=alpha if group["maximize"] else -alpha)

    def _update(self) -> torch.Tensor:
        """Compute the update without its rate; it is computed again each time, to save memory."""
        epsilon = self.group["eps"][0]
        epsilon = self.epsilon if epsilon is None else epsilon
        if self._factored:
            estimate = self._state["row_var"] @ self._state["col_var"]
            estimate.div_(self._row_mean.clamp(min=epsilon).to(estimate.dtype))
        else:
            estimate = local_part(self._state["variance"]).clone()
        return estimate.clamp_(min=epsilon * epsilon).rsqrt_().mul_(self._gradient)

    def _size(self, shard: torch.Tensor) -> torch.Tensor:
        """Return this rank's addend of the sum of a tensor's squares."""
        total = shard.new_zeros((), dtype=self._wide)
        for _, view in primary_views(shard, self._layout, self._rank):
            total += torch.linalg.vector_norm(view, dtype=self._wide).square_()
        return total

    def _at_places(
        self,
        shard: torch.Tensor | None,
        layout: TensorLayout,
        dim: int,
        along: Callable[[torch.Tensor, int], torch.Tensor],
    ) -> torch.Tensor:
        """Return this rank's addend of sums along ``dim`` of the full tensor; 0 without a shard."""
        at = reduced(layout, dim)
        whole = self._shard.new_zeros(at.shape, dtype=self._wide)
        for box, view in () if shard is None else primary_views(shard, layout, self._rank):
            places = [slice(*piece) for piece in box]
            places[dim] = slice(None)
            whole[tuple(places)] += along(view, dim)
        return whole

    def _squares(self, values: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.linalg.vector_norm(values, dim=dim, keepdim=True, dtype=self._wide).square_()

    def _plain(self, values: torch.Tensor, dim: int) -> torch.Tensor:
        return values.sum(dim, keepdim=True, dtype=self._wide)
