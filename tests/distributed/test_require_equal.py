"""``require_equal``: all ranks raise one error, which says which ranks have which value."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from ranks import Raised, pool

import parallel_ext as px
from parallel_ext.distributed.require_equal import require_equal

VALUES = {
    "one rank differs": [{"rate": 1.5, "mode": "a"}, {"rate": 1.5, "mode": "b"}, {"rate": 1.5}],
    "all differ": [{"rate": rank} for rank in range(3)],
    "order does not count": [{"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1, "b": 2}],
    "NaN equals itself": [{"rate": float("nan")}] * 3,
    "known to some": [{"a": 1}, {"b": (2,)}, {}],
    "known to some, otherwise": [{"a": 1}, {"a": 2}, {}],
    "equal numbers": [{"timeout": 120}, {"timeout": 120.0}, {"timeout": 120}],
    "a number and its text": [{"rate": 1}, {"rate": "1"}, {"rate": 1}],
    "absent and its text": [{"rate": "absent"}, {}, {}],
    "long": [{"text": "x" * 300 + str(rank // 2)} for rank in range(3)],
}


def _ask(case: str, partial: bool) -> dict[str, Any]:
    mesh = px.init_mesh(timeout=60)
    try:
        own = VALUES[case][dist.get_rank()]
        return require_equal(mesh.control, "f", own, partial=partial, noun="its ", advice="do x")
    finally:
        mesh.close()


REFUSED = {
    ("one rank differs", False): (
        "f: its mode must be equal on all ranks, but is a on rank 0 and b on rank 1 and absent on "
        "rank 2; do x"
    ),
    ("one rank differs", True): "its mode must be equal on all ranks, but is a on rank 0 and b on",
    ("all differ", False): "its rate must be equal on all ranks, but is 0 on rank 0 and 1 on rank",
    ("known to some", False): "its a must be equal on all ranks, but is 1 on rank 0 and absent on "
    "ranks 1, 2 (1 more differ); do x",
    ("known to some, otherwise", True): "but is 1 on rank 0 and 2 on rank 1; do x",
    ("a number and its text", False): "is 1 on ranks 0, 2 and '1' on rank 1; do x",
    ("absent and its text", False): "is 'absent' on rank 0 and absent on ranks 1, 2; do x",
    ("long", False): "x... (301 characters of digest ",
}


@pytest.mark.parametrize(("case", "partial"), REFUSED)
def test_all_ranks_raise_one_error_that_says_who_has_which_value(case: str, partial: bool) -> None:
    found = pool(3).run_raising(_ask, case, partial)
    assert all(isinstance(raised, Raised) for raised in found), found
    assert {raised.type for raised in found} == {"DisagreementError"}
    assert len({raised.text for raised in found}) == 1
    assert REFUSED[case, partial] in found[0].text


@pytest.mark.parametrize("case", ["order does not count", "NaN equals itself", "equal numbers"])
def test_equal_values_pass(case: str) -> None:
    for rank, got in enumerate(pool(3).run(_ask, case, False)):
        asked = VALUES[case][rank]
        assert got == asked or repr(got) == repr(asked)


def test_partial_values_are_merged() -> None:
    assert pool(3).run(_ask, "known to some", True) == [{"a": 1, "b": (2,)}] * 3
