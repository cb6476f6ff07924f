"""Private names of other packages: each stands in docs/internals.md, and is still there."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import accelerate
import peft
import pytest
import torch
import transformers
import trl
from versions import needs_newer

import parallel_ext as px

PACKAGE = Path(px.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "internals.md"
_ROW = re.compile(r"^\| `([\w.()]+)` \|", re.MULTILINE)
PACKAGES = ("torch.", "transformers.", "peft.", "accelerate.", "sys.")
ELSEWHERE = ("accelerate.", "data_loader.", "sys.")
BASES = ("torch.", "transformers.", "peft.", "accelerate.", "trl.")
MADE_BY_PYTHON = ("._abc_impl", "._is_protocol", "._backward_cls")  # in each subclass
FILES = ("sharding/_torch_private.py", "models/_transformers_private.py", "lora/_peft_private.py")


def _trees() -> dict[str, ast.Module]:
    paths = PACKAGE.rglob("*.py")
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in paths}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _made_here(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] * (getattr(node.value, "id", "") == "self")


def _used_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] != "parallel_ext":
            yield from node.module.split(".")
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant):
                yield name.value


def _names_of_others() -> dict[str, set[str]]:
    """Return each private name that nobody here has made -> the files that use it."""
    trees = _trees()
    made = {name for tree in trees.values() for name in _made_here(tree)}
    found: dict[str, set[str]] = {}
    for path, tree in trees.items():
        for name in {name for name in _used_in(tree) if _is_private(name)} - made:
            found.setdefault(name, set()).add(path)
    return found


def _listed() -> list[str]:
    section = PAGE.read_text().split("## Private names of others")[1].split("\n## ")[0]
    return _ROW.findall(section)


def test_each_private_name_of_others_is_listed() -> None:
    listed = [part for name in _listed() for part in name.replace("()", "").split(".")]
    assert set(_names_of_others()) - set(listed) == set()
    used = {name for tree in _trees().values() for name in _used_in(tree)}
    assert [name for name in _listed() if name.rpartition(".")[2] not in used] == []


def test_those_of_a_package_stand_in_one_module() -> None:
    elsewhere = {"_C"}  # torch documents torch._C.DisableTorchFunctionSubclass
    elsewhere |= {name.rpartition(".")[2] for name in _listed() if name.startswith(ELSEWHERE)}
    for name, users in _names_of_others().items():
        assert name in elsewhere or users <= set(FILES), name


def _has(path: str, attribute: str) -> bool:
    """Whether the objects of a class have an attribute."""
    if path == "accelerate.Accelerator":  # making one changes the process
        return f"self.{attribute} = " in inspect.getsource(accelerate.Accelerator)
    ways = {
        "torch.nn.Module": torch.nn.Module,
        "torch.nn.Parameter": lambda: torch.nn.Parameter(torch.zeros(1)),
        "transformers.PreTrainedConfig": transformers.LlamaConfig,
        "peft.LoraConfig": peft.LoraConfig,
    }
    return hasattr(ways[path](), attribute)


def _named(path: str) -> object:
    package, *attributes = path.split(".")
    found, name = importlib.import_module(package), package
    for attribute in attributes:
        name = f"{name}.{attribute}"
        if not hasattr(found, attribute):
            importlib.import_module(name)
        found = getattr(found, attribute)
    return found


@pytest.mark.parametrize("name", [name for name in _listed() if name.startswith(PACKAGES)])
def test_it_is_still_there(name: str) -> None:
    if "()." in name:
        assert _has(*name.split("()."))
    else:
        _named(name)


def _classes() -> Iterator[type]:
    """Yield the package's classes, and its trainer before those of TRL."""
    for module in pkgutil.walk_packages([str(PACKAGE)], "parallel_ext."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and value.__module__.startswith("parallel_ext"):
                yield value
    yield type("Trained", (px.TrainerMixin, trl.DPOTrainer), {})


def _overridden() -> set[str]:
    """Return the private names of others that classes of this package have of their own."""
    found = set()
    for cls in _classes():
        others = [each for each in cls.__mro__ if f"{each.__module__}.".startswith(BASES)]
        own = [each for each in cls.__mro__ if each.__module__.startswith("parallel_ext")]
        for name in {name for each in own for name in vars(each) if _is_private(name)}:
            found |= {f"{each.__name__}.{name}" for each in others if name in vars(each)}
    return {name for name in found if not name.endswith(MADE_BY_PYTHON)}


@needs_newer("the trainer")
def test_each_private_name_of_a_base_class_that_is_overridden_is_listed() -> None:
    section = PAGE.read_text().split("Overridden in subclasses:")[1].split("\n\n")[0]
    assert set(re.findall(r"`([\w.]+)`", section)) == _overridden()
