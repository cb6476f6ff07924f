"""Functions that are extended in place, under every name that anybody has imported."""

from __future__ import annotations

import functools
import inspect
import linecache
import pickle
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import peft
import pytest
import torch
from ranks import pool
from reference import Tiny

import parallel_ext as px
from parallel_ext.nn import extended
from parallel_ext.nn.extended import extend, restore


def plain(numerator: float, denominator: float = 1.0) -> float:
    """Divide."""
    return numerator / denominator


def _decorated(function: Callable[..., float]) -> Callable[..., float]:
    args, kwargs = (), {}

    @functools.wraps(function)
    def wrapper(*given: Any, **named: Any) -> float:
        return function(*args, *given, **kwargs, **named)

    return wrapper


@_decorated
def decorated(numerator: float, denominator: float = 1.0) -> float:
    return numerator / denominator


class Base:
    def divide(self, numerator: float, denominator: float = 1.0) -> float:
        return numerator / denominator


class Derived(Base):
    def divide(self, numerator: float, denominator: float = 1.0) -> float:
        return super().divide(numerator, denominator)


def test_extensions_take_what_the_functions_take() -> None:
    """By position and by name; the calls of others need not change."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    peft.get_peft_model(px.parallelize(Tiny(dtype=torch.float32).model(), px.init_mesh()), config)
    assert len(extended._extended) > 20
    for _, _, plain, extension in extended._extended.values():
        parameters = inspect.signature(plain).parameters.values()
        named = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        ours = inspect.signature(extension)
        ours.bind(plain, *named)
        first = [each for each in parameters if each.kind is each.POSITIONAL_ONLY]
        ours.bind(plain, *first, **dict.fromkeys(named))


FUNCTIONS = {
    "a function": (plain, plain),
    "one with variables of a function around it": (decorated, decorated),
    "a method that calls super()": (Derived.divide, Derived().divide),
}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_an_extension_gets_the_function_as_it_was(kind: str) -> None:
    function, call = FUNCTIONS[kind]
    signature = inspect.signature(function)
    extend(function, lambda as_it_was, *args, **kwargs: 100 + as_it_was(*args, **kwargs))
    try:
        assert call(6, denominator=3) == 102
        assert inspect.signature(function) == signature
    finally:
        restore(function)
    assert call(6, denominator=3) == 2
    assert inspect.signature(function) == signature


def test_an_extended_function_is_the_one_that_others_imported() -> None:
    extend(plain, lambda as_it_was, *args: 100.0)
    try:
        assert pickle.loads(pickle.dumps(plain)) is plain
        assert plain(1) == 100.0
    finally:
        restore(plain)


def _frames(traceback: TracebackType | None) -> Iterator[tuple[str, set[str]]]:
    while traceback is not None:
        frame = traceback.tb_frame
        yield frame.f_code.co_name, set(frame.f_locals)
        traceback = traceback.tb_next


def _locals_of_frames(kind: str) -> list[tuple[str, set[str]]]:
    function, call = FUNCTIONS[kind]
    extend(function, lambda as_it_was, *args: as_it_was(*args))
    try:
        call(1, 0)
    except ZeroDivisionError as error:
        return list(_frames(error.__traceback__))
    finally:
        restore(function)
    return []


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_debugger_reads_the_locals_of_its_frames(kind: str) -> None:
    """As pytest, rich and ``pdb`` do when a call raises; the interpreter crashed then."""
    ((_, extended, call, *_),) = pool(1).run(_locals_of_frames, kind)
    assert extended[0] == FUNCTIONS[kind][0].__code__.co_name
    assert extended[1] >= {"args", "kwargs"}
    assert call[0] == "call"


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_its_tracebacks_show_its_first_line(kind: str) -> None:
    """They showed some line of the function that was not run."""
    function, call = FUNCTIONS[kind]
    first = function.__code__.co_firstlineno
    extend(function, lambda as_it_was, *args: as_it_was(*args))
    try:
        with pytest.raises(ZeroDivisionError) as raised:
            call(1, 0)
    finally:
        restore(function)
    frames = traceback.extract_tb(raised.tb)
    assert (frames[1].name, frames[1].lineno) == (function.__code__.co_name, first)
    assert frames[1].line == linecache.getline(__file__, first).strip()


def test_what_is_not_written_in_python_is_refused() -> None:
    with pytest.raises(TypeError, match="no function written in Python"):
        extend(len, lambda as_it_was, *args: 0)
