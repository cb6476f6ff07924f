"""The package as such: what it says when it does not fit, its examples, what an import loads."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
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


def test_torch_and_the_extension_share_their_threads() -> None:
    """By one OpenMP library: with two, torch.set_num_threads would not reach the extension."""
    code = "import torch, parallel_ext.ops; raise SystemExit(open('/proc/self/maps').read())"
    mapped = {line.split()[-1] for line in _python(code).splitlines() if "r-xp" in line}
    openmp = [name for name in mapped if re.search(r"/lib(g|i)?omp[\w-]*\.so", name)]
    assert len(openmp) == 1, openmp


def test_another_torch_is_answered_with_the_rebuild_command() -> None:
    error = _python("import torch; torch.__version__ = '9.8.7'; import parallel_ext")
    built_for = px._C.build_info()["torch"]
    assert f"compiled for torch {built_for}, but torch 9.8.7 is running" in error
    assert "pip install --no-build-isolation" in error


def test_sources_without_the_extension_say_so(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("_C*", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "parallel_ext", ignore=ignored)
    code = (
        "import sys; from importlib.machinery import *; "  # without those of editable installs
        "sys.meta_path[:] = [BuiltinImporter, FrozenImporter, PathFinder]; "
        f"sys.path.insert(0, {str(tmp_path)!r}); import parallel_ext"
    )
    error = _python(code)
    assert f"from {tmp_path / 'parallel_ext'}, where its extension is not built" in error
    assert "pip install --no-build-isolation -e ." in error
    assert "another torch" not in error
    (tmp_path / "parallel_ext" / "_C.so").write_bytes(b"of another torch")
    assert "was compiled for another torch" in _python(code)


def test_setup_without_torch_prints_the_command() -> None:
    script = SOURCE / "setup.py"
    code = f"import sys, runpy; sys.modules['torch'] = None; runpy.run_path({str(script)!r})"
    assert "Install torch first, then run: pip install --no-build-isolation ." in _python(code)


def test_setup_with_an_old_setuptools_prints_the_command() -> None:
    script = SOURCE / "setup.py"
    code = (
        "import setuptools, runpy; setuptools.__version__ = '65.5.0'; "
        f"runpy.run_path({str(script)!r})"
    )
    error = _python(code)
    assert "setuptools 77 or later, and 65.5.0 is installed" in error
    assert "pip install 'setuptools>=77'" in error


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
        "import sys, torch, parallel_ext\n"
        "heavy = {'torch._dynamo', 'transformers', 'accelerate', 'torch.distributed.fsdp'}\n"
        "sys.exit(str(sorted(heavy & set(sys.modules)) or 'none'))"
    )
    assert _python(code).strip() == "none"


def test_importing_what_makes_models_parallel_registers_no_attention() -> None:
    code = (
        "import sys, transformers\n"
        "known = {*transformers.AttentionInterface().valid_keys()}\n"
        "import parallel_ext.parallel.parallelize\n"
        "sys.exit(str({*transformers.AttentionInterface().valid_keys()} - known or 'none'))"
    )
    assert _python(code).strip() == "none"


@pytest.mark.parametrize(
    ("old", "new"),
    [("latest", "latest_checkpoint"), ("verify", "verify_checkpoint")]
    + [("preempted", "stop_requested")],
)
def test_an_old_name_is_the_same_object(old: str, new: str) -> None:
    assert getattr(px, old) is getattr(px, new)
    assert {old, new} <= set(px.__all__)
