"""Any vocabulary on any number of ranks, also with ranks that hold none of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from ranks import pool
from reference import Tiny, assert_within
from reference_life import differences_in_life
from reference_mixtral import Layout, TinyMixtral

NARROW = Tiny(heads=4, key_value_heads=2, inner=13, layers=1)
MIXTRAL = TinyMixtral(num_experts=3, layers=1)
CASES = {
    # vocabulary, ranks: the model, its mesh, whether the head has a bias
    "1 on 2": (replace(NARROW, vocab_size=1), Layout(1, 2, 1), False),
    "1 on 2, tied": (replace(NARROW, vocab_size=1, tied=True), Layout(1, 2, 1), True),
    "3 on 4": (replace(NARROW, vocab_size=3), Layout(1, 4, 1), True),
    "65 on 3, tied": (replace(NARROW, vocab_size=65, tied=True), Layout(1, 3, 1), True),
    "151669 on 4, tied": (replace(NARROW, vocab_size=151669, tied=True), Layout(1, 4, 1), False),
    "Mixtral of 3 on 4, tied": (
        replace(MIXTRAL, vocab_size=3, tied=True),
        Layout(1, 4, 2),
        True,
    ),
    "Mixtral of 65 on 3": (replace(MIXTRAL, vocab_size=65), Layout(1, 3, 3), True),
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_is_that_of_one_process_from_its_first_save_to_its_last(
    case: str, tmp_path: Path
) -> None:
    tiny, layout, bias = CASES[case]
    ranks = pool(layout.world)
    assert_within(ranks.run(differences_in_life, tiny, layout, str(tmp_path), bias))
