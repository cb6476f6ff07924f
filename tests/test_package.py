"""The package as such: who imports whom, what it says when it does not fit, its examples."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from reference import Tiny, batch, parallel

import parallel_ext as px

PACKAGE = Path(px.__file__).parent
SOURCE = Path(__file__).parents[1]

# What a module of the package may import of it, apart from _C and modules of its own folder.
ALLOWED = {
    "layout": set(),
    "ops": {"layout"},
    "errors": set(),
    "heartbeat": set(),
    "messages": set(),
    "meetings": {"errors"},
    "ranks": {"errors", "heartbeat", "meetings", "messages", "ops"},
    "background": {"ranks"},
    "mesh": {"background", "errors", "meetings", "ops", "ranks"},
    "partial_gradients": {"ops"},
    "extending": set(),
    "digests": set(),
    "shards": {"layout"},
    "sharded": {"layout", "ops", "ranks", "shards"},
    "optimizer_layouts": {"layout", "sharded"},
    "replicas": {"digests", "layout", "mesh", "ranks", "sharded"},
    "agreement": {"digests", "mesh", "ranks", "replicas"},
    "loss": {"layout", "mesh", "ops", "ranks", "replicas"},
    "vocab": {"layout", "ops", "partial_gradients", "sharded"},
    "linear": {"layout", "ops", "partial_gradients", "sharded"},
    "forwards": set(),
    "moe": {"forwards", "layout", "ops", "partial_gradients", "ranks", "sharded"},
    "models": {"checkpoint", "layout"},
    "checkpoint": {
        *("errors", "layout", "mesh", "optimizer_layouts", "ranks", "replicas", "sharded"),
        *("shards", "version"),
    },
    "held_gradients": set(),
    "routing_counter": set(),
    "state": {
        *("agreement", "held_gradients", "layout", "mesh", "models", "moe", "partial_gradients"),
        *("replicas", "routing_counter", "shards"),
    },
    "owners": {"layout", "mesh", "sharded", "state"},
    "adafactor": {"layout", "mesh", "ops", "sharded", "shards", "state"},
    "check": {"checkpoint", "loss", "mesh", "ops", "replicas", "sharded", "state"},
    "grad_scaler": {"mesh", "ops", "ranks", "sharded"},
    "generation": {"ops", "state", "vocab"},
    "forced_routing": {"moe", "state"},
    "preemption": {"state"},
    "resume": {"checkpoint", "lora", "state"},
    "routing_metrics": {"ops", "routing_counter", "state"},
    "gradients": {"layout", "mesh", "ops", "ranks", "sharded", "state"},
    "lora": {
        *("checkpoint", "digests", "extending", "forwards", "interplay", "layout", "linear"),
        *("moe", "ops", "partial_gradients", "ranks", "replicas", "runtime", "sharded"),
        *("state", "vocab"),
    },
    "stale_parameters": set(),
    "interplay": {
        *("checkpoint", "extending", "grad_scaler", "gradients", "layout", "mesh"),
        *("optimizer_layouts", "owners", "ranks", "sharded", "shards", "stale_parameters"),
        "state",
    },
    "data_parallel": {
        *("held_gradients", "interplay", "layout", "linear", "mesh", "moe", "ops", "sharded"),
        *("stale_parameters", "state"),
    },
    "version": set(),
    "workspaces": set(),
    "runtime": {
        *("check", "checkpoint", "loss", "mesh", "ops", "replicas", "sharded", "state"),
        *("version", "vocab"),
    },
}
MAY_IMPORT_TRANSFORMERS = {"patch", "models", "checkpoint", "lora", "interplay"}


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "parallel_ext":
            names |= {f"parallel_ext.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def _modules() -> dict[str, list[Path]]:
    """Name of each module or folder of the package -> its files."""
    found: dict[str, list[Path]] = {}
    for path in PACKAGE.rglob("*.py"):
        found.setdefault(path.relative_to(PACKAGE).parts[0].removesuffix(".py"), []).append(path)
    return found


@pytest.mark.parametrize("module", ALLOWED)
def test_a_module_imports_only_what_lies_below_it(module: str) -> None:
    own = set().union(*(_imports(path) for path in _modules()[module]))
    inner = {name.split(".")[1] for name in own if name.startswith("parallel_ext.")}
    assert inner - {"_C", module} <= ALLOWED[module]


def test_only_what_touches_their_models_imports_transformers_or_peft() -> None:
    for module, paths in _modules().items():
        outer = {name.split(".")[0] for path in paths for name in _imports(path)}
        if outer & {"transformers", "peft", "accelerate"}:
            assert module in MAY_IMPORT_TRANSFORMERS, module


def test_only_comm_includes_c10d() -> None:
    include = "#include <torch/csrc/distributed"
    assert [p.name for p in (SOURCE / "csrc").iterdir() if include in p.read_text()] == ["comm.cpp"]


@pytest.mark.parametrize(
    "name", sorted(m.name for m in pkgutil.walk_packages([str(PACKAGE)], "parallel_ext."))
)
def test_the_examples_in_docstrings_run(name: str) -> None:
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0


def _python(code: str) -> str:
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, cwd=SOURCE / "tests")
    assert result.returncode != 0
    return result.stderr


def test_another_torch_is_answered_with_the_rebuild_command() -> None:
    error = _python("import torch; torch.__version__ = '9.8.7'; import parallel_ext")
    built_for = px._C.build_info()["torch"]
    assert f"compiled for torch {built_for}, but torch 9.8.7 is running" in error
    assert "pip install --no-build-isolation" in error


def test_a_clone_without_the_extension_is_told_so(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("_C*", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "parallel_ext", ignore=ignored)
    code = (
        "import sys; from importlib.machinery import *; "  # without those of editable installs
        "sys.meta_path[:] = [BuiltinImporter, FrozenImporter, PathFinder]; "
        f"sys.path.insert(0, {str(tmp_path)!r}); import parallel_ext"
    )
    error = _python(code)
    assert f"is not built in {tmp_path / 'parallel_ext'}" in error
    assert "another torch" not in error
    (tmp_path / "parallel_ext" / "_C.so").write_bytes(b"of another torch")
    assert "was compiled for another torch" in _python(code)


def test_setup_without_torch_prints_the_command() -> None:
    script = SOURCE / "setup.py"
    code = f"import sys, runpy; sys.modules['torch'] = None; runpy.run_path({str(script)!r})"
    assert "Install torch first, then run: pip install --no-build-isolation ." in _python(code)


def _trainer_losses(model: transformers.PreTrainedModel, folder: Path) -> list[float]:
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=3,
        logging_steps=1,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        seed=3,
    )
    one = batch(101, rows=6)
    rows = [{name: value[i] for name, value in one.items()} for i in range(6)]
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer_on_one_process_sees_the_same_losses(tmp_path: Path) -> None:
    tiny = Tiny(dtype=torch.float32)
    expected = _trainer_losses(tiny.model(), tmp_path)
    got = _trainer_losses(parallel(tiny.model(), px.init_mesh()), tmp_path)
    assert len(got) == 3
    assert got == pytest.approx(expected, rel=1e-5)


def test_importing_the_package_loads_neither_the_compiler_nor_models() -> None:
    """Each would take longer to import than all of this package."""
    code = (
        "import sys, torch, transformers, parallel_ext\n"
        "heavy = {'torch._dynamo', 'transformers.modeling_utils', 'torch.distributed.fsdp'}\n"
        "sys.exit(str(sorted(heavy & set(sys.modules)) or 'none'))"
    )
    assert _python(code).strip() == "none"
