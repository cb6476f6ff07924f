"""What a function makes in its first run is found by every later run, whatever runs around it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from parallel_ext.nn.recomputation import Recomputable, once


def _numbers() -> Callable[[], int]:
    made = iter(range(100))
    return lambda: next(made)


def test_outside_of_a_function_each_call_makes_a_value() -> None:
    make = _numbers()
    assert [once("layer", make) for _ in range(3)] == [0, 1, 2]


def test_later_runs_find_by_layer_and_order_what_the_first_made() -> None:
    make = _numbers()
    function = Recomputable(lambda order: [once(layer, make) for layer in order])
    assert function("aba") == [0, 1, 2]
    assert function("baa") == [1, 0, 2]
    assert function("a") == [0]  # a recomputation may stop early
    assert Recomputable(lambda: once("a", make))() == 3


def test_a_first_run_inside_of_a_later_run_finds_what_the_outer_made() -> None:
    make, inner = _numbers(), []

    def outer() -> list[int]:
        inner.append(Recomputable(lambda: once("a", make)))
        return [once("a", make), inner[-1](), once("a", make)]

    function = Recomputable(outer)
    assert function() == [0, 1, 2]
    assert function() == [0, 1, 2]
    assert [each() for each in inner] == [1, 1]  # whose runs are not the outer function's


def test_an_attempt_that_fails_is_not_counted() -> None:
    make, fails = _numbers(), [True, False]

    def attempt() -> int:
        if fails.pop(0):
            raise ValueError("no memory")
        return make()

    def function() -> int:
        with pytest.raises(ValueError, match="no memory"):
            once("layer", attempt)
        return once("layer", attempt)

    assert Recomputable(function)() == 0
    assert once("layer", make) == 1  # nothing runs any more
