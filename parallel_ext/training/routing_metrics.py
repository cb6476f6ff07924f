"""``RoutingMetrics``: how evenly a mixture's router spreads the tokens, step by step."""

from __future__ import annotations

import json
import os
from typing import TextIO

import torch
from torch import nn

from parallel_ext.nn.routing_counter import RoutingCounter
from parallel_ext.parallel.joining import arrive
from parallel_ext.parallel.state import model_of, state_of
from parallel_ext.sharding.slices import from_each_rank


class RoutingMetrics:
    """A counter of what the experts of a model get, with a report after each training step.

    Every rank makes one and calls :meth:`step`. Without one nothing is counted; with it a forward
    adds up integers that the host has anyway, and communicates no more than before. What counts are
    the choices of all forwards in training mode with gradients since the last step, padding
    included: those that are accumulated add up, those that are recomputed under activation
    checkpointing count once. Evaluation, ``generate`` and ``check_gradients`` do not count;
    calls of an inner module (``model.model``) do, and so do the layers that a forward had finished
    before it raised.

    Args:
        model: a parallel model with experts, wrapped or not.
        path: file to which rank 0 appends one JSON object a step: ``step``, what :meth:`step`
            returns, and ``choices`` [layers][E]; None for no file.

    Attributes:
        choices: [layers][E], of the last step; how many choices of all ranks' tokens fell on each
            expert. The same on every rank.

    Raises:
        TypeError: the model was not parallelized, or ``path`` is no path.
        ValueError: it has no experts.
        RuntimeError: another ``RoutingMetrics`` of this model was not closed.
        OSError: rank 0 cannot write the file; on every rank.
        CollectiveTimeout: not all ranks made one.

    Example:
        >>> import transformers
        >>> from parallel_ext import init_mesh, parallelize
        >>> config = transformers.MixtralConfig(
        ...     vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=1, num_local_experts=4)
        >>> model = parallelize(transformers.MixtralForCausalLM(config).train(), init_mesh())
        >>> with RoutingMetrics(model) as metrics:
        ...     ids = torch.tensor([[1, 2, 3]])
        ...     model(input_ids=ids, labels=ids).loss.backward()
        ...     log = metrics.step(0)
        >>> sum(metrics.choices[0]), log["moe/rank_overload_max"]  # 3 tokens with 2 choices
        (6, 1.0)
    """

    def __init__(self, model: nn.Module, path: str | os.PathLike[str] | None = None) -> None:
        self._state = state_of(model)
        mesh = self._state.mesh
        arrive("RoutingMetrics")
        mesh.control.barrier("RoutingMetrics")

        def prepare() -> TextIO | None:
            if not self._state.routings:
                raise ValueError(f"RoutingMetrics: {type(model).__name__} has no experts to watch")
            if self._state.routing_counter is not None:
                raise RuntimeError(
                    "RoutingMetrics: the model has one already; call its close() first"
                )
            if path is not None and not isinstance(path, (str, os.PathLike)):
                raise TypeError(f"RoutingMetrics: path must be that of a file, got {path!r}")
            if path is None or mesh.rank != 0:
                return None
            return open(path, "a", encoding="utf-8")  # noqa: SIM115 (until close)

        self._file = mesh.control.run_on_all("RoutingMetrics", prepare)
        num_layers = len(self._state.routings)
        num_experts = getattr(model_of(model).config, self._state.spec.mixture.num_experts)
        self._counter = RoutingCounter(num_layers, num_experts)
        self._state.routing_counter = self._counter
        for layer, routing in enumerate(self._state.routings):
            routing.observer = self._counter.observer(layer)
        self._closed = False
        self._rank_overload_peak = 0.0
        self._ever_chosen = torch.zeros(num_layers, num_experts, dtype=torch.bool)
        self.choices: list[list[int]] = []

    def step(self, step: int) -> dict[str, float]:
        """Gather the counts since the last call from all ranks, and reset them.

        Every rank calls it, after the backwards of a training step: one small gather.

        Args:
            step: its number, for the file.

        Returns:
            Numbers for a log, the same on every rank. With c[l, e] the choices that fell on expert
            e in layer l, and r[l, i] the rows that the experts on rank i computed there, both in
            this step and over the whole job:

            - ``moe/expert_overload_avg``, ``_max``: over the layers of max_e c[l, e] / mean_e
              c[l, e], the fullest expert;
            - ``moe/rank_overload_avg``, ``_max``: over the layers of max_i r[l, i] / mean_i
              r[l, i], the fullest rank, for which the others wait; not 1 where the ranks hold
              unequally many experts and these are used equally;
            - ``moe/rank_overload_peak``: the largest ``_max`` of all steps so far;
            - ``moe/rows_peak``: the most rows that the experts on one rank computed in one layer of
              one forward so far; what a layer keeps for its backward grows with it;
            - ``moe/idle_experts``: pairs of layer and expert without a choice in this step;
            - ``moe/dead_experts``: those without one in any step so far;
            - ``moe/bytes_sent``: by all ranks together to other ranks in exchanges of rows, in
              forward, backward and recomputation, those of any other mixture in these processes
              included;
            - ``moe/exchange_s_min``, ``_max``: over the ranks of the seconds that one spent in
              these exchanges. The wait for other ranks is in it, so the rank that comes last has
              the least. On CUDA it is only the time of the host, which hardly waits.

        Raises:
            RuntimeError: a layer has routed nothing since the last call, or this was closed.
            OSError: rank 0 cannot write the line; on every rank.
            CollectiveTimeout, DisagreementError: not all ranks called it with this number.
        """
        arrive("RoutingMetrics.step")
        op_name, mesh = f"RoutingMetrics.step({step})", self._state.mesh
        mesh.control.barrier(op_name)
        return mesh.control.run_on_all(op_name, lambda: self._report(step, op_name))

    def _report(self, step: int, op_name: str) -> dict[str, float]:
        mesh, num_layers = self._state.mesh, len(self._ever_chosen)
        record = torch.tensor([int(self._closed), *self._counter.take()])
        records = from_each_rank(record, mesh.control.group)
        closed, most_rows, sent, microseconds = records[:, :4].unbind(1)
        rows, choices = records[:, 4:].split([num_layers, self._ever_chosen.numel()], dim=1)
        choices = choices.sum(0).view_as(self._ever_chosen)
        if closed.any():
            ranks = ", ".join(map(str, closed.nonzero().flatten().tolist()))
            raise RuntimeError(f"{op_name}: closed on rank {ranks}; make a new RoutingMetrics")
        if not choices.any(1).all():
            raise RuntimeError(
                f"{op_name}: layer {choices.any(1).int().argmin()} has routed nothing since the "
                "last step; call it after a forward of the model in training mode with gradients"
            )
        of_expert, of_rank = _overload(choices), _overload(rows.T)
        self._ever_chosen |= choices > 0
        self._rank_overload_peak = max(self._rank_overload_peak, of_rank.max().item())
        log = {
            "moe/expert_overload_avg": of_expert.mean().item(),
            "moe/expert_overload_max": of_expert.max().item(),
            "moe/rank_overload_avg": of_rank.mean().item(),
            "moe/rank_overload_max": of_rank.max().item(),
            "moe/rank_overload_peak": self._rank_overload_peak,
            "moe/rows_peak": most_rows.max().item(),
            "moe/idle_experts": (choices == 0).sum().item(),
            "moe/dead_experts": (~self._ever_chosen).sum().item(),
            "moe/bytes_sent": sent.sum().item(),
            "moe/exchange_s_min": microseconds.min().item() / 1e6,
            "moe/exchange_s_max": microseconds.max().item() / 1e6,
        }
        self.choices = choices.tolist()
        if self._file is not None:
            print(json.dumps({"step": step, **log, "choices": self.choices}), file=self._file)
            self._file.flush()
        return log

    def close(self) -> None:
        """Stop counting and close the file; every rank calls it, and waits for no other."""
        if self._closed:
            return
        self._closed = True
        self._state.routing_counter = None
        for routing in self._state.routings:
            routing.observer = None
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> RoutingMetrics:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _overload(loads: torch.Tensor) -> torch.Tensor:
    """Return the largest part over the mean for each layer: [layers, parts] to [layers]."""
    return loads.amax(1) / loads.double().mean(1)
