"""``PARALLEL_EXT_INVARIANT=strict``: one product a block everywhere, with the same bits."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from launch import finished, run_forked
from reference import Tiny, batch

import parallel_ext as px

WIDE = Tiny(dtype=torch.float32, heads=8, key_value_heads=4, inner=512, vocab_size=257)


def print_digests() -> None:
    """Print those of the weights after each of some steps; in a process of its own."""
    torch.set_num_threads(1)
    model = px.parallelize(WIDE.model(), px.init_mesh(), invariant=px.Invariant(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        model(**batch(WIDE.vocab_size, 2, 19, seed=step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(px.digest(model))


def _digests(mode: str, folder: Path) -> list[str]:
    script = folder / "script.py"
    script.write_text("import test_invariant_strict as test\ntest.print_digests()\n")
    environment = {**os.environ, "PARALLEL_EXT_INVARIANT": mode}
    return finished(run_forked([sys.executable, script], env=environment)).split()[-3:]


def test_products_of_single_blocks_have_the_same_bits(tmp_path: Path) -> None:
    found = _digests("strict", tmp_path)
    assert len(set(found)) == 3
    assert found == _digests("", tmp_path)
