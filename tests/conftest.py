import gc
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Threads that wait spin otherwise, which halves the speed of a shared machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Also in worker processes, which import test modules by their names.
_FOLDERS = [str(each) for each in Path(__file__).parent.iterdir() if each.is_dir()]
sys.path[:0] = _FOLDERS
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*_FOLDERS, os.environ.get("PYTHONPATH")]))

if importlib.util.find_spec("hypothesis"):  # which `make test-gpu` does without
    from hypothesis import settings

    # Two busy cores make no promises about time, and a test leaves no files in the checkout.
    settings.register_profile("parallel_ext", deadline=None, database=None)
    settings.load_profile("parallel_ext")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: Counter[str] = Counter()  # by their test
    for item in items:
        if (mark := item.get_closest_marker("one_in")) is not None:
            test = item.nodeid.partition("[")[0]
            if cases[test] % mark.args[0]:
                item.add_marker("slow")
            cases[test] += 1


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What test modules import stays: each collection of garbage would look it through again."""
    gc.collect()
    gc.freeze()


# What torch before 2.13 says to a test that needs more.
LACKED = (
    "data_parallel needs the fully_shard of torch 2.13",
    "has no attribute 'linear_cross_entropy'",
    "has no attribute 'reset_iter_state'",
    "swap_in_optimizer_params_and_state",
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Skip the tests that an older torch cannot run, though the package can run on it."""
    report = yield
    import torch  # after the environment is set

    if report.failed and torch.__version__ < "2.13":
        lacked = [each for each in LACKED if each in report.longreprtext]
        if lacked:
            report.outcome = "skipped"
            report.longrepr = (str(item.path), None, f"Skipped: needs torch 2.13: {lacked[0]}")
    return report


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """What a test draws does not depend on the tests before it, which differ from run to run."""
    import torch  # after the environment is set

    torch.manual_seed(0)


def _parallel_models() -> list[Any]:
    state = sys.modules.get("parallel_ext.parallel.state")
    return [] if state is None else state.parallel_models()


@pytest.fixture(autouse=True)
def _models_end_with_their_test() -> Iterator[None]:
    """A model refers to itself, and what initializes another one looks at all that are parallel."""
    before = len(_parallel_models())
    yield
    if len(_parallel_models()) > before:
        gc.collect()


@pytest.fixture(autouse=True, scope="module")
def _ranks_end_with_their_module() -> Iterator[None]:
    yield
    from ranks import close_pools  # after the environment is set

    close_pools()
