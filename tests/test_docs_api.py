"""``make docs`` builds pages of every public name, without a warning."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from launch import run_forked

import parallel_ext as px

SCRIPT = Path(__file__).parents[1] / "docs" / "build_api.py"
PUBLIC = ["parallel_ext", "parallel_ext.ops", "parallel_ext.nn", "parallel_ext.models"]
PUBLIC += ["parallel_ext.models.cogagent"]


def _build(pages: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    script = pages.with_suffix(".py")
    script.write_text(
        f"{before}\nimport runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    return run_forked([sys.executable, script, pages])


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api")
    built = _build(folder)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.parametrize("module", [*PUBLIC, "parallel_ext.lora"])
def test_every_public_name_is_on_a_page(pages: Path, module: str) -> None:
    text = (pages / f"{module.replace('.', '/')}.html").read_text()
    public = set(importlib.import_module(module).__all__) - set(px._ROOMS)  # pages of their own
    assert {name for name in public if f'id="{name}"' not in text} == set()


def test_lora_of_others_is_on_a_page(pages: Path) -> None:
    text = (pages / "parallel_ext/lora/swiss_army.html").read_text()
    assert 'id="import_swiss_army_lora"' in text


def test_a_docstring_that_pdoc_cannot_read_is_an_error(tmp_path: Path) -> None:
    """An annotation of a name that its module does not have, which pdoc warns of."""
    broken = "import parallel_ext as px; px.init_mesh.__annotations__['tp'] = 'NoSuchName'"
    built = _build(tmp_path, before=broken)
    assert built.returncode == 1
    assert "NoSuchName" in built.stderr
