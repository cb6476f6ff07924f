"""Who imports whom: ``python tests/test_imports.py`` prints the table."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import parallel_ext as px

PACKAGE = Path(px.__file__).parent
SOURCE = Path(__file__).parents[1]

BELOW = {
    "ops": [],
    "distributed": ["ops"],
    "sharding": ["ops", "distributed"],
    "nn": ["ops", "distributed", "sharding"],
    "models": ["sharding", "nn"],
    "io": ["distributed", "sharding"],
    "parallel": ["ops", "distributed", "sharding", "nn", "models", "io"],
    "checkpoint": ["ops", "distributed", "sharding", "nn", "models", "io", "parallel"],
    "training": ["ops", "distributed", "sharding", "nn", "models", "parallel", "checkpoint"],
    "interplay": ["ops", "distributed", "sharding", "nn", "io", "parallel", "training"],
    "lora": [
        *("ops", "distributed", "sharding", "nn", "models", "io", "parallel", "checkpoint"),
        "interplay",
    ],
    "run": ["parallel", "interplay"],
    "cli": ["distributed", "sharding", "models", "io", "parallel", "checkpoint", "lora"],
    "__main__": ["cli"],
}
"""What a room may import beside ``_C`` and ``version``; the package's ``__init__`` imports all."""

PACKAGES = {
    "transformers": [
        *("models/cogagent", "io/hf_", "parallel", "interplay", "lora", "training/trainer"),
        "cli/plan",
    ],
    "huggingface_hub": ["parallel", "io/hf_"],
    "accelerate": ["parallel", "training/accelerate", "training/trainer", "interplay"],
    "peft": ["lora"],
}
"""Where others than torch may be imported; the rest works with torch alone."""


_MODULE = re.compile(r"parallel_ext(\.\w+)+")


def _imported(path: Path) -> Iterator[str]:
    """Modules that a file imports, inside functions and by a string as well."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "parallel_ext":
            yield from (f"parallel_ext.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Constant) and _MODULE.fullmatch(str(node.value)):
            yield str(node.value)


def _rooms() -> dict[str, list[Path]]:
    rooms: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        rooms.setdefault(path.relative_to(PACKAGE).parts[0].removesuffix(".py"), []).append(path)
    return rooms


def _others(room: str) -> Counter[str]:
    """How many imports of each other room a room has."""
    names = (name for path in _rooms()[room] for name in _imported(path))
    inner = (name.split(".")[1] for name in names if name.startswith("parallel_ext."))
    return Counter(name for name in inner if name != room)


def test_every_room_is_in_the_table() -> None:
    assert set(_rooms()) == {*BELOW, "__init__", "version"}


@pytest.mark.parametrize("room", BELOW)
def test_a_room_imports_only_those_below_it(room: str) -> None:
    assert set(_others(room)) - {"_C", "version"} <= set(BELOW[room])


def test_of_training_only_what_resumes_a_job_imports_checkpoint() -> None:
    found = {
        path.stem
        for path in _rooms()["training"]
        if any(name.startswith("parallel_ext.checkpoint") for name in _imported(path))
    }
    assert found <= {"accelerate", "trainer_files"}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_imported_only_where_it_belongs(package: str) -> None:
    for path in PACKAGE.rglob("*.py"):
        if package in {name.split(".")[0] for name in _imported(path)}:
            inner = path.relative_to(PACKAGE).as_posix()
            assert inner.startswith(tuple(PACKAGES[package])), inner


def test_only_comm_includes_c10d() -> None:
    """Directly, or by the header that includes c10d for the sources of ``comm``."""
    csrc = SOURCE / "csrc"
    for include in ("<torch/csrc/distributed", '"comm/known_groups.h"'):
        found = [path for path in csrc.rglob("*.*") if f"#include {include}" in path.read_text()]
        assert {str(path.relative_to(csrc).parent) for path in found} == {"comm"}


def _beside_torch() -> list[str]:
    """Names that can be imported here of all that neither torch nor the package is or needs."""
    wanted, needed = ["torch"], set()
    while wanted:
        needed.add(name := wanted.pop())
        for requirement in metadata.requires(name) or []:
            other = _normal(re.match(r"[\w.-]+", requirement)[0])
            if "extra ==" not in requirement and other not in needed and _is_installed(other):
                wanted.append(other)
    found = metadata.packages_distributions()
    own = {"parallel_ext", "_distutils_hack"}  # the second comes with Python's environment
    return [n for n in found if n not in own and not needed & {*map(_normal, found[n])}]


def _normal(name: str) -> str:
    """As the packaging specifications compare names of distributions."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _is_installed(name: str) -> bool:
    return any(metadata.Distribution.discover(name=name))


def test_ops_and_nn_work_with_torch_alone() -> None:
    """In a process where nobody can import transformers, nor anything that torch does without."""
    names = _beside_torch()
    assert {"transformers", "xxhash", "numpy"} <= set(names)
    code = f"""
import sys
for name in {names}:
    sys.modules[name] = None
import torch, parallel_ext as px
from parallel_ext import nn, ops
from parallel_ext.nn import grad_sync, linear, loss, moe, sharded_module, vocab
weight = torch.arange(10.0).reshape(5, 2)
print(px.ops.vocab_embedding(torch.tensor([4, 0]), weight, 5, 0).tolist())
nn.VocabParallelEmbedding.from_plain(torch.nn.Embedding(5, 2), ops.ALONE)
hidden = nn.VocabParallelEmbedding.from_sizes(5, 2, ops.ALONE)(torch.tensor([4, 0]))
for kind in (nn.ColumnParallelLinear, nn.RowParallelLinear):
    layer = nn.LoraLinear(kind.from_sizes(2, 2, ops.ALONE), r=3, lora_dropout=0.01)
    hidden = layer(hidden)
experts = nn.ExpertParallelExperts.from_sizes(3, 2, 4, ops.ALONE)
hidden = experts(hidden, torch.tensor([[0], [2]]), torch.ones(2, 1))
head = nn.VocabParallelHead.from_sizes(2, 5, ops.ALONE)
head.loss(hidden, torch.tensor([1, 4])).backward()
print(layer.lora_B.weight.grad.abs().sum().item() > 0)
"""
    command = [sys.executable, "-c", code]  # not beside the sources, which may have no extension
    result = subprocess.run(command, capture_output=True, text=True, cwd=SOURCE / "tests")
    assert result.stdout.splitlines() == ["[[8.0, 9.0], [0.0, 1.0]]", "True"], result.stderr


def test_public_names_are_those_that_type_checkers_see() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(
        node
        for node in tree.body
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    )
    seen = {alias.name: f"{node.module}" for node in block.body for alias in node.names}
    assert seen == {name: f"parallel_ext.{home}" for name, home in px._HOME_OF.items()}
    for name in px.__all__:
        assert getattr(px, name) is not None


if __name__ == "__main__":
    print(f"{'':12}" + "".join(f"{room:>12}" for room in BELOW))
    for room in BELOW:
        others = _others(room)
        print(f"{room:12}" + "".join(f"{others[other] or '':>12}" for other in BELOW))
