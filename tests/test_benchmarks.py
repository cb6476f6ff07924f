"""Every benchmark runs at its smallest sizes and prints the rows that it promises; its pages."""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from launch import finished, run_forked
from versions import needs_newer

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PAGES = BENCHMARKS.parent / "docs" / "benchmarks"
# By the command line: beginnings of lines of its tables, and how many lines begin so.
PROMISED = {
    "cold_read.py": {"bare": 1, "parallel_ext": 2},
    "invariant.py --layout dp=2 tp=ep=2": {"float32, default": 2},
    "gpu.py --device cpu": {
        **{"copy": 1, "cross entropy": 8, "head": 2, "embedding": 2, "4 experts": 1},
        **{"linear with LoRA": 2, "dropout": 1, "argmax": 2, "sample": 6, "step of": 3},
        **{"clipping": 3, "px.Invariant": 2, "generate": 2, "save": 1, "the call": 1},
    },
    "generation.py": {"greedy, 2 x, default": 1},
    "lora.py --part linear": {"32 -> 64, r=4, float32, default": 3},
    "lora.py --part dora": {"32 -> 64, r=4, float32, default": 3},
    "moe.py": {"float32, zipf, default": 4},
    "training_checkpoint.py --part speed": {
        **{"parallel_ext, default": 2, "DCP, default": 2, "torch.save, a file a rank, default": 2},
    },
    "training_checkpoint.py --part memory": {"parallel_ext |": 1, "DCP |": 1},
    "training_checkpoint.py --part asynchronous": {"no save": 1, "save |": 1, "asynchronous": 1},
    "training_checkpoint.py --part planner": {"replicated over dp": 1, "ZeRO over dp": 1},
    "vocab.py --part cross_entropy": {
        **{"parallel_ext: V = 509, float32, default": 1, "V = 509, float32, default": 2},
    },
    "vocab.py --part embedding": {"V = 508, float32, default": 3},
    "vocab.py --part linear": {"V = 508, float32, default": 5},
}
AS_THEY_ARE = ["generation.py"]  # under torchrun, each process with imports of its own
SLOW = {
    "checkpoint.py": {"parallel_ext, default": 2, "transformers": 2, "DCP": 2},
    "cogagent.py --part layers": {"float32, default": 2, "parallel_ext, float32": 1},
    "training_checkpoint.py --part large": {"parallel_ext, default": 2, "bound, default": 2},
    "train_step.py": {"float32, default": 3},
    "train_step.py --model llava": {"float32, default": 3},
    "cogagent.py --part towers": {"EVA2-CLIP-E": 2},
    "lora.py --part step": {"float32, default": 3},
    "sequence_parallel.py": {"Llama, tp = 2, default": 4, "Mixtral, tp = 2, default": 2},
}


def test_all_benchmarks_are_run_here() -> None:
    found = {path.name for path in BENCHMARKS.glob("*.py") if "harness.publish" in path.read_text()}
    assert found == {command.split()[0] for command in PROMISED | SLOW}


@pytest.mark.parametrize(
    "command", [*PROMISED, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)]
)
@needs_newer("a benchmark's peer")
def test_it_prints_its_tables(command: str) -> None:
    script, *options = command.split()
    run = [sys.executable, str(BENCHMARKS / script), "--smallest", *options]
    if command in AS_THEY_ARE:
        result = subprocess.run(run, capture_output=True, text=True, timeout=600)
    else:
        result = run_forked(run, timeout=600)
    printed = finished(result)
    lines = printed.splitlines()
    for row, count in (PROMISED | SLOW)[command].items():
        found = sum(line.startswith(f"| {row}") for line in lines)
        assert found >= count, f"{row}: {found} of {count} in\n{printed}"


def _harness() -> ModuleType:
    spec = importlib.util.spec_from_file_location("harness", BENCHMARKS / "harness.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["harness"] = module  # where its dataclasses look for their annotations
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["harness"]
    return module


def test_tables_are_written_between_the_markers_of_their_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = _harness()
    monkeypatch.setattr(harness, "PAGES", tmp_path)
    page, other = tmp_path / "a.md", tmp_path / "b.md"
    page.write_text("before\n<!-- a one: begin -->\nold\n<!-- a one: end -->\nafter\n")
    other.write_text("<!-- b: begin -->\nold\n<!-- b: end -->\n")
    harness.publish("a one", "printed alone", argparse.Namespace(update_docs=False))
    assert "old" in page.read_text()
    harness.publish("a one", "new", argparse.Namespace(update_docs=True))
    expected = "before\n<!-- a one: begin -->\nnew\n<!-- a one: end -->\nafter\n"
    assert page.read_text() == expected
    assert "old" in other.read_text()


def test_every_section_that_is_published_has_one_place_in_its_page() -> None:
    pattern = r'harness\.publish\(\s*f?"([^"]+)"'
    for path in BENCHMARKS.glob("*.py"):
        page = PAGES / f"{path.stem}.md"
        for section in re.findall(pattern, path.read_text()):
            name = re.escape(section).replace(r"\{part\}", r"\w+")
            for border in ("begin", "end"):
                found = re.findall(rf"^<!-- {name}: {border} -->$", page.read_text(), re.MULTILINE)
                assert found, f"{section} of {path.name}"
                assert len(found) == len(set(found))


def _numbers(text: str) -> set[str]:
    return set(re.findall(r"\d+\.\d+|\d{2,}", text))


def _stale(readme: str) -> dict[str, set[str]]:
    """Return the numbers in each section's tables that the page to which it links does not show."""
    summary, *sections = readme.split("\n## ")
    stale = {"summary": _numbers(_rows(summary)) - _numbers(_rows("\n".join(sections)))}
    for section in sections:
        for name in re.findall(r"\[Everything\]\(\.\./docs/benchmarks/(\w+)\.md\)", section):
            page = (PAGES / f"{name}.md").read_text()
            stale[name] = _numbers(_rows(section)) - _numbers(page)
    return stale


def _rows(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.startswith("|"))


def test_numbers_in_the_readme_are_those_of_the_pages() -> None:
    readme = (BENCHMARKS / "README.md").read_text()
    pages = {path.stem: set() for path in PAGES.glob("*.md")}
    assert _stale(readme) == {"summary": set(), **pages}
    stale = _stale(readme.replace("| 1.92 |", "| 1.97 |").replace("| 1096 |", "| 1097 |"))
    assert stale["train_step"] == {"1.97", "1097"}
    assert stale["summary"] == {"1.92"}
