"""README and docs: their code runs, their links lead somewhere, their pictures are up to date."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import transformers
from launch import TORCHRUN, finished, run_forked
from pages import EXAMPLE, prepare_models, run_steps, steps_of
from ranks import RankError, pool
from versions import HAS_TRAINER

import parallel_ext as px

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Pages whose blocks another test runs, and that test.
RUN_ELSEWHERE = {"operators.md": "nn/test_operators.py"}
RANKS = {"training.md": 4}  # of pages that have dp and tp at once
ROOMS = [path.name for path in (ROOT / "parallel_ext").iterdir() if path.is_dir()]
WIDE = {"interplay.md", "operators.md"}  # with tables of their own

PAGES_WITH_CODE = [
    page
    for page in PAGES
    if page.name not in RUN_ELSEWHERE and any("block" in step.place for step in steps_of(page))
]


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    prepare_models(directory)
    return directory


@pytest.fixture
def directory(tiny_models: Path, tmp_path: Path) -> Path:
    """An empty directory but for the models that the pages name."""
    (tmp_path / "path").symlink_to(tiny_models / "path")
    return tmp_path


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page: Path, directory: Path) -> None:
    if page.name == "trainer.md" and not HAS_TRAINER:
        pytest.skip("px.Trainer needs a newer transformers")
    pool(RANKS.get(page.name, 2)).run(run_steps, steps_of(page), str(directory))


def test_a_broken_block_is_an_error_with_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Text.\n\n```python\nx = 1\n```\n\n```python\nassert x == 1\nprint(y)\n```\n")
    with pytest.raises(RankError, match=r'page.md, block", line 9.*\n.*\n?.*\'y\' is not defined'):
        pool(2).run(run_steps, steps_of(page), str(tmp_path))


def test_blocks_that_are_run_elsewhere_are() -> None:
    for page, test in RUN_ELSEWHERE.items():
        assert page in (ROOT / "tests" / test).read_text()


def test_no_block_of_a_page_is_skipped() -> None:
    for page in PAGES:
        text, found = page.read_text(), [step.place for step in steps_of(page)]
        blocks = len(re.findall(r"^\s*```python", text, re.MULTILINE))
        alone = page == ROOT / "README.md"  # the minimal example
        assert blocks == sum("block" in place for place in found) + alone, page.name
        assert text.count("<!-- setup") == sum("setup" in place for place in found), page.name


def test_the_quickstart_of_readme_is_the_minimal_example_which_trains(directory: Path) -> None:
    code = EXAMPLE.read_text()
    assert len(code.splitlines()) <= 30
    assert code.split('"""\n\n', 1)[1] in (ROOT / "README.md").read_text()
    words = directory / "words.txt"
    words.write_text("of all that is said, " * 60)
    command = [*TORCHRUN, EXAMPLE, "path/to/llama", words, "out"]
    printed = finished(run_forked(command, cwd=directory))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    trained = transformers.AutoModelForCausalLM.from_pretrained(directory / "out")
    assert trained.get_input_embeddings().weight.shape == (259, 72)


def _anchors(page: Path) -> set[str]:
    """The names by which a page's headings are linked, as GitHub makes them."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    heads = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if anchor:
            assert anchor in _anchors(linked), target


def test_every_page_of_docs_is_in_the_list_of_pages() -> None:
    assert "docs/README.md" in (ROOT / "README.md").read_text()
    listed = (ROOT / "docs" / "README.md").read_text()
    pages = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md"]
    assert [name for name in pages if f"({name}" not in listed] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_fit_a_screen(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert page != ROOT / "README.md" or len(lines) <= 250
    wide = [number for number, line in enumerate(lines, 1) if len(line) > 100]
    assert page.name in WIDE or wide == []


def _commands(page: Path) -> list[str]:
    """The lines of a page's ```bash blocks, continued ones joined."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split("  #")[0] for line in lines if line.strip()]


def _source_with_imports(script: Path) -> str:
    """An example and those of its neighbours that it imports, which have some of its options."""
    text = script.read_text()
    others = re.findall(r"^from (\w+) import", text, re.MULTILINE)
    beside = [script.with_name(f"{name}.py") for name in others]
    return text + "".join(_source_with_imports(each) for each in beside if each.exists())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_name_files_options_and_targets_that_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for command in _commands(page):
        for target in re.findall(r"^make ((?:[\w-]+ ?)+)", command):
            for name in target.split():
                assert re.search(rf"^{name}:", makefile, re.MULTILINE), command
        for script in re.findall(r"[\w/]+\.py", command):
            if script.startswith(("examples/", "benchmarks/", "tests/", "docs/")):
                path = ROOT / script
                assert path.exists(), command
                source = _source_with_imports(path)
                for option in re.findall(r" (--[\w-]+)", command.split(script, 1)[1]):
                    assert f'"{option}"' in source, f"{command}: {option}"


def test_named_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for name in re.findall(r"`make ([\w-]+)", page.read_text()):
            assert re.search(rf"^{name}:", makefile, re.MULTILINE), f"{page.name}: make {name}"


def test_named_source_files_exist() -> None:
    folders = ["", "parallel_ext", "csrc", "tests", *(f"parallel_ext/{room}" for room in ROOMS)]
    for page in PAGES:
        for name in re.findall(r"`([\w/]+\.(?:py|cpp|cu|h))`", page.read_text()):
            found = [folder for folder in folders if (ROOT / folder / name).exists()]
            assert found or name == "own_model.py", f"{page.name}: {name}"


def test_named_public_functions_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"\bpx\.([a-zA-Z_]+)", page.read_text()):
            assert hasattr(px, name), f"{page.name}: px.{name}"


def _sources() -> str:
    """The texts of the package, literals that are broken over lines joined."""
    files = [ROOT / "setup.py", *(ROOT / "tests" / "parallel").glob("*.py")]
    files += [*(ROOT / "parallel_ext").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp")]
    return "\n".join(re.sub(r'"\s*\n\s*f?"', "", path.read_text()) for path in files)


def test_errors_of_the_faq_are_raised_somewhere() -> None:
    sources = _sources()
    errors = re.findall(r"^### `(.*)`$", (ROOT / "docs" / "faq.md").read_text(), re.MULTILINE)
    assert len(errors) > 20
    for error in errors:
        if not error.startswith("AttributeError"):  # Python's own
            for words in re.split(r"…", error):
                assert words.strip(" :;,") in sources, error


def _pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_those_that_their_script_draws() -> None:
    drawn = _pictures().pictures()
    assert {path.name for path in (ROOT / "docs" / "img").iterdir()} == set(drawn)
    for name, svg in drawn.items():
        assert (ROOT / "docs" / "img" / name).read_text() == svg, "run python docs/pictures.py"
