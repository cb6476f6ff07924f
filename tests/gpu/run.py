"""Build for the GPU of this machine, without a network, and run the tests of this folder on it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parents[1]
MOST_PROCESSES = 11  # which share the memory of the GPU


def compute_capability() -> str | None:
    """Return that of the first GPU; None where there is none.

    Raises:
        SystemExit: there is a GPU that torch cannot use.
    """
    try:
        import torch

        found = torch.cuda.is_available()
        missing = f"torch {torch.__version__} of {sys.executable} sees no GPU"
    except ImportError:
        found, missing = False, f"{sys.executable} has no torch"
    if found:
        return "{}.{}".format(*torch.cuda.get_device_capability())
    if Path("/dev/nvidia0").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        sys.exit(f"make test-gpu: /dev/nvidia0 is there, but {missing}. Name another PYTHON=")
    return None


def build(target: Path, capability: str) -> None:
    """Install the package into the folder ``target``."""
    shutil.rmtree(target, ignore_errors=True)
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(target)]
    environment = {
        "MAX_JOBS": str(os.cpu_count()),
        **os.environ,
        "FORCE_CUDA": "1",
        "TORCH_CUDA_ARCH_LIST": capability,
    }
    pip = [sys.executable, "-m", "pip", "install", "--quiet", *options, str(ROOT)]
    subprocess.run(pip, env=environment, check=True)


def main(target: Path) -> int:
    """Return the exit status of pytest; 0 where there is no GPU."""
    capability = compute_capability()
    if capability is None:
        count = json.loads((TESTS / "budget.json").read_text())["tests"]
        print(f"0 passed, 0 failed, {count} skipped: no CUDA device")
        return 0
    build(target, capability)
    # Before the sources, which have no library; also of the ranks.
    paths = filter(None, [str(target), os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    sys.path.insert(0, str(target))
    import pytest

    several = importlib.util.find_spec("xdist") is not None
    processes = ["-n", str(min(MOST_PROCESSES, os.cpu_count() or 1))] if several else []
    options = ["-q", *processes, "-p", "no:cacheprovider", "--device", "cuda"]
    return pytest.main([*options, str(TESTS)])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
