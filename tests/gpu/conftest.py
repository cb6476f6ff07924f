"""The device of these tests: a GPU where there is one, else the CPU on the path of a GPU's ops."""

from __future__ import annotations

import os
from collections.abc import Iterator

# What px.Invariant asks for on a GPU, before the first product, also in processes of tests.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from on_device import device_path

from parallel_ext import _C


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), help="where the tests of tests/gpu run")


def pytest_report_header() -> str:
    return f"parallel_ext was built with CUDA kernels: {_C.build_info()['cuda_kernels']}"


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Return where tests place their tensors."""
    usable = torch.cuda.is_available() and _C.build_info()["cuda_kernels"]
    # The option is unknown where pytest found this file only after it had read the command line.
    asked = request.config.getoption("--device", default=None) or ("cuda" if usable else "cpu")
    if asked == "cuda" and not usable:
        pytest.fail("--device cuda needs a GPU and a build with CUDA kernels")
    return torch.device(asked, 0) if asked == "cuda" else torch.device("cpu")


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """Return the GPU, for what no CPU can show."""
    if device.type != "cuda":
        pytest.skip("only a GPU can show this: a CPU has no stream that the host waits for")
    return device


@pytest.fixture(autouse=True)
def _path_of_the_device(device: torch.device) -> Iterator[None]:
    with device_path(device):
        yield
