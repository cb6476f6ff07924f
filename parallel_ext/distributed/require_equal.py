"""Refuse values that are not the same on all ranks of a job, and say which rank has which."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from parallel_ext.distributed.control import ControlPlane
from parallel_ext.distributed.errors import DisagreementError

_LONGEST_SHOWN = 200  # characters of a value in an error


def require_equal(
    control: ControlPlane,
    op_name: str,
    values: Mapping[str, Any],
    *records: type,
    partial: bool = False,
    noun: str = "",
    advice: str = "",
) -> dict[str, Any]:
    """Raise on every rank of the job unless all of them have equal values; every rank calls it.

    While they are equal it costs one short all-gather.

    Args:
        values: this rank's, by the names that errors use; of the types of :func:`messages.encode`,
            and equal where their ``repr`` is, or as numbers (120 and 120.0).
        records: the dataclasses and named tuples that may be in them.
        partial: leave a rank that lacks a name out of the comparison; else it lacks the value.
        noun: what a name names, before it in the error.
        advice: what to do about a difference, for the error.

    Returns:
        The values; where ``partial``, those of all ranks.

    Raises:
        DisagreementError: says which ranks have which value of the first name that differs.
        CollectiveTimeout: a rank did not come.
    """
    digest = _digest(repr(sorted(values.items())), 16)
    if len(set(control.all_gather_object(digest, op_name=op_name))) == 1:
        return dict(values)
    everyone = control.all_gather_object(dict(values), *records, op_name=op_name)
    merged: dict[str, Any] = {}
    for of_rank in everyone:
        merged = {**of_rank, **merged}
    differing = []
    for name in sorted(merged):
        ranks_with: dict[Any, list[int]] = {}  # None: those that lack it
        for rank, of_rank in enumerate(everyone):
            if name in of_rank or not partial:
                key = _compared(of_rank[name]) if name in of_rank else None
                ranks_with.setdefault(key, []).append(rank)
        if len(ranks_with) > 1:
            differing.append((name, ranks_with))
    if not differing:
        return merged
    name, ranks_with = differing[0]
    first_of = [everyone[ranks[0]] for ranks in ranks_with.values()]
    texts = [_shown(of_rank[name]) if name in of_rank else "absent" for of_rank in first_of]
    if len(set(texts)) < len(texts):  # such as of 1 and "1"
        texts = [repr(of_rank[name]) if name in of_rank else "absent" for of_rank in first_of]
    seen = " and ".join(
        f"{text} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        for text, ranks in zip(texts, ranks_with.values(), strict=True)
    )
    more = f" ({len(differing) - 1} more differ)" if len(differing) > 1 else ""
    raise DisagreementError(
        f"{op_name}: {noun}{name} must be equal on all ranks, but is {seen}{more}"
        + (f"; {advice}" if advice else "")
    )


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=size).digest()


def _compared(value: Any) -> Any:
    """Return a key that is equal for equal values: the number itself, else the text."""
    is_number = isinstance(value, (int, float)) and value == value  # NaN equals only its text
    return value if is_number else repr(value)


def _shown(value: Any) -> str:
    """Return the text of a value for an error; of a long one its beginning and a digest."""
    text = value if isinstance(value, str) else repr(value)
    if len(text) <= _LONGEST_SHOWN:
        return text
    digest = _digest(text, 8).hex()
    return f"{text[:_LONGEST_SHOWN]}... ({len(text)} characters of digest {digest})"
