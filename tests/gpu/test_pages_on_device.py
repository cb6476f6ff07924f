"""The code of pages that a reader tries first, on a GPU: what it computes with must lie there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pages import prepare_models, run_steps, steps_of
from ranks import pool

DOCS = Path(__file__).parents[2] / "docs"
# Those without px.data_parallel at dp > 1, which needs a newer torch than others of these tests.
PAGES = ["checkpoints", "generation", "lora", "profile", "quickstart", "vocabulary"]


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path, cuda: torch.device) -> None:
    # A page's init_mesh takes the GPU: the pool has initialised torch.distributed with gloo.
    prepare_models(tmp_path)
    pool(2).run(run_steps, steps_of(DOCS / f"{page}.md"), str(tmp_path))
