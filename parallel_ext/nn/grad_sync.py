"""Gradients of which each rank computes a part: summed before ``backward()`` returns."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from parallel_ext import ops
from parallel_ext.nn.temporarily import temporarily
from parallel_ext.ops import Group
from parallel_ext.sharding._torch_private import (
    at_end_of_backward,
    disable_compiler,
    gradient_hooks,
    running_backward,
    version_of,
)

BUCKET = 2**24
"""Elements of partial gradients that are summed at once."""


class _Entry:
    """The partial gradient that one backward, or several under ``no_sync``, has collected."""

    def __init__(self, parameter: nn.Parameter, group: Group, partial: torch.Tensor) -> None:
        self.parameter, self.group, self.partial = parameter, group, partial
        self._grad: torch.Tensor | None = None
        self._version = 0

    def anchor(self) -> None:
        """Tie the partial gradient to the parameter's ``.grad``, which is made if there is none."""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        self._grad, self._version = self.parameter.grad, version_of(self.parameter.grad)

    def dropped(self) -> bool:
        """Return whether ``zero_grad`` has dropped the gradient since it was anchored."""
        if self._grad is None:
            return False
        if self.parameter.grad is not self._grad:
            return True
        return version_of(self._grad) != self._version and not self._grad.any()


class _Session:
    """The partial gradients that one backward collects.

    Only the engine's callback holds it, so that it dies with a backward that raises and can never
    be mistaken for a later one.
    """

    def __init__(self, graph_task: int) -> None:
        self.graph_task = graph_task
        self.entries: dict[str, _Entry] = {}


# Stands for a caught parameter in the graph, whose own hooks would run without a gradient there.
_anchor = torch.empty(0, requires_grad=True)


class _Catch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        values: torch.Tensor,
        caught: tuple[nn.Parameter, PartialGradients, str, Group],
    ) -> torch.Tensor:
        ctx.caught = caught
        ctx.set_materialize_grads(False)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[None, None, None]:
        weight, partials, name, group = ctx.caught
        if grad is not None:  # it is None on all ranks, whose graphs are the same, or on none
            partials._add(name, weight, group, grad)
        return None, None, None


class _OpenSession(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, partials: PartialGradients) -> torch.Tensor:
        ctx.partials = partials
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.partials._open(running_backward())
        return grad, None


class PartialGradients:
    """The sums of gradients of replicated parameters, of which each rank computes only a part.

    The part is caught before it is accumulated, kept apart from ``.grad``, and added to it after
    one flat fp32 all-reduce of each :data:`BUCKET` of a group, in a callback at the end of the
    outermost backward. The parameter's gradient hooks run there, with the sum;
    ``torch.autograd.grad`` does not see it.

    One object serves one model. It refers to no module, so that a module can be copied alone.

    Attributes:
        late: names of the parameters whose gradients only the end of a backward has.
    """

    def __init__(self) -> None:
        self._session: weakref.ref[_Session] | None = None
        self._pending: dict[str, _Entry] = {}
        self._synchronize = True
        self._unaveraged = self._beside_came = False
        self.late: set[str] = set()
        self._at_once: frozenset[str] = frozenset()
        self._averaged: dict[Group, dict[str, nn.Parameter]] = {}
        self._beside: list[nn.Parameter] = []
        self._beside_group: Group | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PartialGradients:
        return PartialGradients()

    @disable_compiler  # which would compile it once for each name, and break the graph in it
    def catch(self, weight: nn.Parameter, name: str, group: Group) -> torch.Tensor:
        """Return ``weight`` for a forward in which its gradient is partial over ``group``.

        Args:
            weight: a parameter that every rank of ``group`` holds with equal values.
            name: its logical name, the same on those ranks.
            group: the ranks whose parts add up to the gradient.
        """
        if name in self._at_once or not weight.is_leaf:  # as torch.func.functional_call gives it
            return ops.copy_to_region(weight, group)
        self.late.add(name)
        return _Catch.apply(_anchor, weight.detach(), (weight, self, name, group))

    def sum_at_once(self, names: Iterable[str]) -> None:
        """Sum the gradients of the named parameters where they arise, from now on."""
        self._at_once |= frozenset(names)
        self.late -= self._at_once

    def average(self, parameters: Iterable[tuple[str, nn.Parameter]], group: Group) -> None:
        """Let each backward end with the mean of parameters' gradients over ``group``, from now on.

        Args:
            parameters: with their names, by which all ranks order them.
            group: the ranks that hold them replicated, each with tokens of its own; a further
                call is for another group.
        """
        self._averaged[group] = dict(sorted(parameters, key=lambda item: item[0]))
        self.late.update(self._averaged[group])

    def average_beside(self, parameters: Iterable[nn.Parameter], group: Group) -> None:
        """Let each backward end with the mean of gradients of parameters outside of the model.

        A backward may reach none of the model, so that a gradient of theirs opens it, too.

        Args:
            parameters: in one order on all ranks; what was given before counts once.
            group: as of :meth:`average`; the same in each call.
        """
        known = {id(parameter) for parameter in self._beside}
        new = [parameter for parameter in parameters if id(parameter) not in known]
        for parameter in new:
            trained = parameter.requires_grad
            parameter.requires_grad_(True).register_post_accumulate_grad_hook(self._open_beside)
            parameter.requires_grad_(trained)  # one that is frozen may be trained later
        self._beside += new
        self._beside_group = group

    def train_beside(self) -> bool:
        """Return whether a parameter outside of the model is trained, the same on all ranks."""
        return any(parameter.requires_grad for parameter in self._beside)

    def _open_beside(self, parameter: nn.Parameter) -> None:
        before, after = gradient_hooks(parameter)
        if before or after != [self._open_beside]:
            raise has_hooks(f"a parameter beside the model, of shape {tuple(parameter.shape)},")
        # Last, and once, as where the model opens it: other ranks may use the model alone.
        task, self._beside_came = running_backward(), True
        at_end_of_backward(lambda: self._beside_came and (self._current() or self._open(task)))

    def open_with(self, hidden: torch.Tensor) -> torch.Tensor:
        """Mark a tensor whose backward comes before that of every caught parameter.

        Without it the sums would still be right, but under reentrant checkpointing each layer's
        inner backward would end with a collective of its own. It does nothing while nothing was
        caught, as in a model without replicated parameters.
        """
        return _OpenSession.apply(hidden, self) if self.late else hidden

    def open(self) -> None:
        """Average the gradients of :meth:`average` when the running backward ends.

        It is called in the backward, before any gradient.

        Raises:
            RuntimeError: a parameter has hooks, which would see its gradient before the mean.
        """
        for name, parameter in (each for of in self._averaged.values() for each in of.items()):
            if any(gradient_hooks(parameter)):
                raise has_hooks(name)
        if self._averaged or self._beside:
            self._open(running_backward())

    def _current(self) -> _Session | None:
        return self._session() if self._session is not None else None

    def _open(self, graph_task: int) -> _Session:
        session = self._current()
        if session is None or session.graph_task != graph_task:
            session = _Session(graph_task)
            self._session = weakref.ref(session)
            at_end_of_backward(lambda: self._close(session))
        return session

    def _add(self, name: str, weight: nn.Parameter, group: Group, grad: torch.Tensor) -> None:
        # Inside a checkpoint's inner backward the session of the outer one is the live one.
        session = self._current() or self._open(running_backward())
        self._merge(session.entries, name, _Entry(weight, group, grad))

    @staticmethod
    def _merge(entries: dict[str, _Entry], name: str, entry: _Entry) -> None:
        if name in entries:
            entries[name].partial = entries[name].partial + entry.partial
        else:
            entries[name] = entry

    @torch.no_grad()
    def _close(self, session: _Session) -> None:
        self._session, self._beside_came = None, False
        self._pending = {n: entry for n, entry in self._pending.items() if not entry.dropped()}
        for name, entry in session.entries.items():
            self._merge(self._pending, name, entry)
        self._unaveraged = not self._synchronize
        if not self._synchronize:
            for entry in self._pending.values():
                entry.anchor()
            return
        groups: dict[Group, list[_Entry]] = {}
        for _, entry in sorted(self._pending.items()):  # in one order on all ranks
            groups.setdefault(entry.group, []).append(entry)
        self._pending = {}
        for group, entries in sorted(groups.items()):
            _sum_and_add(entries, group)
        for group, parameters in sorted(self._averaged.items()):
            _average([p.grad for p in parameters.values() if p.grad is not None], group)
        if trained := [parameter for parameter in self._beside if parameter.requires_grad]:
            _average_used(trained, self._beside_group)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep partial gradients unsummed inside the context; the next backward after it sums all.

        ``zero_grad`` and an exception drop them.
        """
        try:
            with temporarily(self, _synchronize=False):
                yield
        except BaseException:
            self._pending = {}
            raise

    def is_waiting(self) -> bool:
        """Return whether gradients of a backward under ``no_sync`` still wait for their sum."""
        if any(not entry.dropped() for entry in self._pending.values()):
            return True
        averaged = chain(*(of.values() for of in self._averaged.values()), self._beside)
        return self._unaveraged and any(p.grad is not None and p.grad.any() for p in averaged)

    def aside(self) -> AbstractContextManager[None]:
        """Let backwards inside the context sum at once, and leave kept partial gradients aside."""
        return temporarily(self, _pending={}, _synchronize=True)


def has_hooks(name: str) -> RuntimeError:
    """Return the refusal of a parameter whose gradient is averaged after its hooks would run."""
    return RuntimeError(
        f"{name} has gradient hooks, which would run before its gradient is averaged over the dp "
        "ranks; remove them, and use what backward leaves"
    )


def for_use(
    parameter: nn.Parameter, name: str, group: Group, partials: PartialGradients | None
) -> torch.Tensor:
    """Return a parameter for a forward; its gradient, if any, is partial over ``group``.

    Without ``partials`` the gradient is summed where it arises, so that everything which listens to
    gradients finds the sum: hooks, DDP and FSDP of a training loop that is not ours.
    """
    if group.size == 1 or not parameter.requires_grad:
        return parameter
    if partials is None:
        return ops.copy_to_region(parameter, group)
    return partials.catch(parameter, name, group)


def _average(gradients: list[torch.Tensor], group: Group) -> None:
    """Average gradients over ``group``, in place; gradients that are equal on all ranks stay."""
    if not gradients:
        return
    gradients = [torch.view_as_real(g) if g.is_complex() else g for g in gradients]
    flat = ops.reduce_from_region(_flat(gradients), group) / group.size
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, mean in zip(gradients, flat.split(sizes), strict=True):
        gradient.copy_(mean.view_as(gradient))


def _average_used(parameters: list[nn.Parameter], group: Group) -> None:
    """Average the gradients of parameters, of which each rank may have used other ones.

    Of a parameter that no rank has used there is none afterwards either.
    """
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    if any(gradient.is_sparse for gradient in gradients):
        raise NotImplementedError(
            "sparse gradients beside a parallel model are not averaged over the dp ranks; make the "
            "embedding with sparse=False"
        )
    anywhere = torch.ones(len(parameters), device=gradients[0].device)
    here = [parameter.grad is not None for parameter in parameters]
    if not all(here):
        anywhere = anywhere.new_tensor(here)
    _average([*gradients, anywhere], group)
    used = here if all(here) else (anywhere > 0).tolist()  # which waits for a GPU
    for parameter, gradient, is_used in zip(parameters, gradients, used, strict=True):
        if is_used:
            parameter.grad = gradient


def _flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return tensors as one flat tensor, in fp64 if one of them is, else in fp32."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    dtype = torch.float64 if wide else torch.float32
    return torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors])


def buckets(sizes: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield what is summed at once of tensors of so many elements: (which tensor, start, stop).

    All buckets but the last one have :data:`BUCKET` elements.
    """
    bucket, room = [], BUCKET
    for which, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + room)
            bucket.append((which, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield bucket
                bucket, room = [], BUCKET
    if bucket:
        yield bucket


def _sum_and_add(entries: list[_Entry], group: Group) -> None:
    """Sum partial gradients over ``group`` and add them to ``.grad``.

    Beside the partial gradients, each of which is freed once it is summed, it holds a bucket, the
    sum of one, and the gradient of the parameter that a bucket ends in.
    """
    totals: dict[int, torch.Tensor] = {}
    for entry in entries:
        if entry.partial.numel() == 0:  # in no bucket
            _add_sum(entry.parameter, torch.zeros_like(entry.parameter))
    for bucket in buckets([entry.partial.numel() for entry in entries]):
        _sum_bucket(entries, bucket, group, totals)


def _sum_bucket(
    entries: list[_Entry],
    bucket: list[tuple[int, int, int]],
    group: Group,
    totals: dict[int, torch.Tensor],
) -> None:
    """Sum one of :func:`buckets`; ``totals`` has the sums of parameters that are not complete."""
    pieces = [entries[which].partial.reshape(-1)[start:stop] for which, start, stop in bucket]
    flat = ops.reduce_from_region(_flat(pieces), group).split([piece.numel() for piece in pieces])
    del pieces  # which would keep what is freed below
    for (which, start, stop), piece in zip(bucket, flat, strict=True):
        parameter = entries[which].parameter
        if start == 0:
            contiguous = torch.contiguous_format
            totals[which] = torch.empty_like(parameter, memory_format=contiguous)
        totals[which].view(-1)[start:stop] = piece
        if stop == parameter.numel():
            del entries[which].partial
            _add_sum(parameter, totals.pop(which))


def _add_sum(parameter: nn.Parameter, total: torch.Tensor) -> None:
    """Let hooks see a gradient, and add it to ``.grad``."""
    before, after = gradient_hooks(parameter)
    for hook in before:
        total = total if (replaced := hook(total)) is None else replaced
    if before:
        total = total.clone()  # a hook may have kept it
    if parameter.grad is None:
        parameter.grad = total
    else:
        parameter.grad += total
    for hook in after:
        hook(parameter)
