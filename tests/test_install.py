"""README's two install commands, as they stand, in bare environments, and imports after them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import venv
from pathlib import Path

import pytest
import setuptools
import torch

import parallel_ext as px

SOURCE = Path(__file__).parents[1]
TORCH = torch.__version__.split("+")[0]
_PARTS = ("csrc", "parallel_ext", "setup.py", "pyproject.toml", "README.md", "LICENSE")
_BUILD_TOOLS = ("wheel", "ninja")  # a bare environment has neither, and the build needs neither


def readme_commands() -> list[list[str]]:
    """Return README's first two commands of pip under "Install", without the word pip."""
    section = (SOURCE / "README.md").read_text().split("\n## Install\n")[1].split("\n## ")[0]
    lines = re.findall(r"^\s*pip (install .*)$", section, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines[:2]]


class Environment:
    """A virtual environment of its own, with nothing of this one's in it."""

    def __init__(self, folder: Path, with_pip: bool) -> None:
        venv.create(folder, with_pip=with_pip)
        self.python = folder / "bin" / "python"
        (self.packages,) = folder.glob("lib/python*/site-packages")
        hidden = folder / "bin" / "ninja"  # the machine may have one, which pip did not install
        hidden.write_text("#!/bin/sh\nexit 1\n")
        hidden.chmod(0o755)
        self.variables = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
        } | {"PATH": f"{folder / 'bin'}:/usr/local/bin:/usr/bin:/bin"}

    def run(self, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
        command = [str(self.python), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=folder, env=self.variables, timeout=3600
        )

    def pip(self, arguments: list[str], folder: Path) -> None:
        done = self.run("-m", "pip", *arguments, folder=folder)
        assert done.returncode == 0, f"{arguments}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"

    def lacks(self, module: str) -> bool:
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        return self.run("-c", code, folder=self.packages).returncode == 1


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of the sources, as a clone has them: nothing is built."""
    clone = tmp_path / "clone"
    clone.mkdir()
    ignored = shutil.ignore_patterns("_C*", "__pycache__")
    for name in _PARTS:
        if (SOURCE / name).is_dir():
            shutil.copytree(SOURCE / name, clone / name, ignore=ignored)
        else:
            shutil.copy(SOURCE / name, clone)
    return clone


def _environment_with_torch(folder: Path) -> Environment:
    """As after README's first command: torch, and packages of this environment, but for ours."""
    environment = Environment(folder, with_pip=False)
    beside = folder / "packages"
    beside.mkdir()
    for root in {Path(module.__file__).parents[1] for module in (torch, setuptools)}:
        for entry in root.iterdir():
            if not entry.name.startswith(("parallel_ext", "__editable__", *_BUILD_TOOLS)):
                (beside / entry.name).symlink_to(entry)
    # By a path: what lies outside of the environment, pip neither changes nor removes.
    (environment.packages / "beside.pth").write_text(f"{beside}\n")
    return environment


def _compile_nothing(environment: Environment, folder: Path) -> None:
    """Let the compiler be one that takes no time: what it links is the extension that runs here."""
    compiler = folder / "compiler"
    compiler.write_text(
        "#!/bin/sh\n"
        'for argument in "$@"; do [ "$before" = -o ] && out=$argument; before=$argument; done\n'
        'case "$out" in\n'
        f'*.so) cp {shlex.quote(px._C.__file__)} "$out" ;;\n'
        '*.o) : > "$out" ;;\n'
        '*) exec g++ "$@" ;;\n'
        "esac\n"
    )
    compiler.chmod(0o755)
    environment.variables |= dict.fromkeys(("CC", "CXX", "LDSHARED", "LDCXXSHARED"), str(compiler))


def _check_imports(environment: Environment, clone: Path, elsewhere: Path) -> None:
    code = (
        "import parallel_ext.ops, parallel_ext.nn, torch; "
        "print(parallel_ext.__file__); "
        "print(parallel_ext.ops.vocab_embedding(torch.tensor([1]), torch.eye(2), 2, 0))"
    )
    outside = environment.run("-c", code, folder=elsewhere)
    assert outside.returncode == 0, outside.stderr
    installed, row = outside.stdout.splitlines()
    assert Path(installed) == environment.packages / "parallel_ext" / "__init__.py"
    assert row == "tensor([[0., 1.]])"
    inside = environment.run("-c", code, folder=clone)
    assert inside.returncode == 1
    last = inside.stderr.splitlines()[-1]
    assert f"imported from {clone / 'parallel_ext'}, where its extension is not built" in last
    assert "run Python from another folder" in last
    assert "another torch" not in inside.stderr


def test_readme_names_torch_first_and_then_the_sources() -> None:
    first, second = readme_commands()
    assert first == ["install", "torch"]
    assert second[0] == "install"
    assert second[-1].startswith(".")
    assert "--no-build-isolation" in second


def test_the_second_command_installs_what_imports_elsewhere(tmp_path: Path, sources: Path) -> None:
    environment = _environment_with_torch(tmp_path / "environment")
    assert all(environment.lacks(module) for module in ("parallel_ext", *_BUILD_TOOLS))
    _compile_nothing(environment, tmp_path)
    environment.pip(readme_commands()[1], folder=sources)
    _check_imports(environment, sources, tmp_path)


def test_an_editable_install_imports_inside_the_sources(tmp_path: Path, sources: Path) -> None:
    """The command that the error names to who imports sources where nothing is built."""
    environment = _environment_with_torch(tmp_path / "environment")
    error = environment.run("-c", "import parallel_ext", folder=sources).stderr
    command = error.rsplit("in the root of the sources: pip ", 1)[1].strip()
    _compile_nothing(environment, tmp_path)
    environment.pip(shlex.split(command), folder=sources)
    for folder in (sources, tmp_path):
        code = "import parallel_ext.ops; print(parallel_ext.__file__)"
        done = environment.run("-c", code, folder=folder)
        assert done.stdout.strip() == str(sources / "parallel_ext" / "__init__.py"), done.stderr


@pytest.mark.slow
def test_both_commands_in_a_bare_environment(tmp_path: Path, sources: Path) -> None:
    """All is downloaded and compiled: ten minutes or more."""
    environment = Environment(tmp_path / "environment", with_pip=True)
    first, second = readme_commands()
    environment.pip([f"torch=={TORCH}" if each == "torch" else each for each in first], sources)
    assert all(environment.lacks(module) for module in ("parallel_ext", *_BUILD_TOOLS))
    environment.pip(second, folder=sources)
    _check_imports(environment, sources, tmp_path)
