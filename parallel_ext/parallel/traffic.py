"""What an op sends to other ranks, from its arguments alone, as it does on a GPU.

On the CPU the same ops communicate through shared memory, and the embedding sends only the rows
that are asked for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from parallel_ext.sharding._torch_private import schema_of

Sent = tuple[str, int] | None
"""The kind of a collective, and this rank's payload in bytes, as ``_C.collective_counts`` has it;
None where the op communicates nothing."""


class Traffic(Counter[tuple[str, str, str]]):
    """Collectives and bytes of a rank, by (group, kind, ``"collectives"`` or ``"bytes"``)."""

    def send(self, group: str, kind: str, nbytes: int, times: int = 1) -> None:
        """Count collectives of equal size."""
        self[group, kind, "collectives"] += times
        self[group, kind, "bytes"] += times * nbytes

    def add_op(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Count what a call of an op of this package sends."""
        schema = schema_of(op)
        rule = _RULES.get(schema.name.partition("::")[2])
        if rule is None:
            return
        given = {each.name: value for each, value in zip(schema.arguments, args, strict=False)}
        given |= kwargs
        if given["group_size"] > 1 and (sent := rule(given, out)) is not None:
            self.send(given["group_name"], *sent)

    def plus(self, other: Traffic, times: int) -> Traffic:
        """Return the sum with another one, taken several times."""
        keys = self.keys() | other.keys()
        return Traffic({key: self[key] + times * other[key] for key in sorted(keys)})

    def by_group(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return the counts as nested dictionaries: group, kind, what is counted."""
        nested: dict[str, dict[str, dict[str, int]]] = {}
        for (group, kind, what), number in sorted(self.items()):
            nested.setdefault(group, {}).setdefault(kind, {})[what] = number
        return nested


def _row_bytes(rows: torch.Tensor) -> int:
    return rows.size(-1) * rows.element_size()


def _sum_of_output(args: dict[str, Any], out: Any) -> Sent:
    return "all_reduce", (out if isinstance(out, torch.Tensor) else out[0]).nbytes


def _column_linear_backward(args: dict[str, Any], out: Any) -> Sent:
    return _sum_of_output(args, out) if args["needed"][0] else None


def _gather_from_region(args: dict[str, Any], out: Any) -> Sent:
    shard = args["shard"]
    rows = math.prod(shard.shape[:-1])
    return "all_gather", rows * max(args["sizes"]) * shard.element_size()


def _gather_tokens(args: dict[str, Any], out: Any) -> Sent:
    return "all_gather", out.nbytes // sum(args["sizes"]) * max(args["sizes"]) if out.numel() else 0


def _sum_tokens(args: dict[str, Any], out: Any) -> Sent:
    return "all_to_all", args["partial"].nbytes - out.nbytes


def _embedding_of_tokens(args: dict[str, Any], out: Any) -> Sent:
    return "all_to_all", args["ids"].numel() * _row_bytes(out) - out.nbytes


def _embedding_of_tokens_backward(args: dict[str, Any], out: Any) -> Sent:
    sequences = math.prod(args["ids"].shape[:-1])
    return "all_gather", sequences * max(args["tokens"]) * _row_bytes(args["grad_output"])


def _statistics(args: dict[str, Any], out: Any) -> Sent:
    """Return what ranks gather of each token: maximum, sum, label's value, what is asked for."""
    values = args.get("input", args.get("logits"))
    rows = 3 + 2 * (args["label_smoothing"] > 0) + args["wanted"][1] + args["wanted"][2]
    wide = 8 if values.dtype == torch.float64 else 4
    return "all_gather", rows * wide * args["labels"].numel()


def _take_tokens_backward(args: dict[str, Any], out: Any) -> Sent:
    gradients = zip((args["grad_input"], args["grad_weights"]), args["needed"], strict=True)
    nbytes = sum(_row_bytes(gradient) for gradient, needed in gradients if needed)
    return ("all_gather", max(args["sizes"]) * nbytes) if any(args["needed"]) else None


class _Exchange:
    """How many rows and choices go to the other ranks and come from them, by the plan of an op."""

    def __init__(self, args: dict[str, Any]) -> None:
        sides, rank = args["experts_per_rank"], args["rank"]
        peers = [peer for peer in range(len(sides)) if peer != rank]
        send, receive = list(args["send"]), list(args["receive"])
        starts = [sum(sides[:peer]) for peer in range(len(sides) + 1)]
        rows = send[starts[-1] :]
        slots = [sum(send[starts[peer] : starts[peer + 1]]) for peer in range(len(sides))]
        width = sides[rank] + 1
        of_peer = [receive[peer * width : (peer + 1) * width] for peer in range(len(sides))]
        self.rows, self.slots = sum(rows[p] for p in peers), sum(slots[p] for p in peers)
        # A row that serves several choices is followed by the number of the row of each.
        self.numbers = sum(slots[peer] for peer in peers if rows[peer] < slots[peer])
        self.rows_back = sum(of_peer[peer][-1] for peer in peers)
        self.places_back = sum(sum(of_peer[peer][:-1]) for peer in peers)


def _moe_dispatch(args: dict[str, Any], out: Any) -> Sent:
    plan, weights = _Exchange(args), out[1]
    of_choices = plan.slots * weights.element_size() + 4 * plan.numbers
    return "all_to_all", plan.rows * _row_bytes(args["input"]) + of_choices


def _moe_dispatch_backward(args: dict[str, Any], out: Any) -> Sent:
    plan, weights = _Exchange(args), args["grad_weights"]
    of_choices = plan.places_back * weights.element_size() if args["needed"][1] else 0
    return "all_to_all", plan.rows_back * _row_bytes(args["grad_rows"]) + of_choices


def _moe_combine(args: dict[str, Any], out: Any) -> Sent:
    return "all_to_all", _Exchange(args).rows_back * _row_bytes(args["rows"])


def _moe_combine_backward(args: dict[str, Any], out: Any) -> Sent:
    return "all_to_all", _Exchange(args).rows * _row_bytes(args["grad_output"])


_RULES: dict[str, Callable[[dict[str, Any], Any], Sent]] = {
    "reduce_from_region": _sum_of_output,
    "row_linear": _sum_of_output,
    "lora_linear_forward": _sum_of_output,
    "vocab_embedding": _sum_of_output,
    "vocab_embedding_of_tokens": _embedding_of_tokens,
    "vocab_embedding_of_tokens_backward": _embedding_of_tokens_backward,
    "column_linear_backward": _column_linear_backward,
    "column_linears_backward": _column_linear_backward,
    "gather_from_region": _gather_from_region,
    "gather_tokens": _gather_tokens,
    "sum_tokens": _sum_tokens,
    "vocab_cross_entropy_forward": _statistics,
    "linear_vocab_cross_entropy_forward": _statistics,
    "moe_take_tokens_backward": _take_tokens_backward,
    "moe_dispatch": _moe_dispatch,
    "moe_dispatch_backward": _moe_dispatch_backward,
    "moe_combine": _moe_combine,
    "moe_combine_backward": _moe_combine_backward,
}
