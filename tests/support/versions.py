"""Which releases of other packages a test needs."""

from __future__ import annotations

import pytest
import transformers

from parallel_ext.training.trainer import OLDEST

HAS_TRAINER = tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= OLDEST
needs_trainer = pytest.mark.skipif(
    not HAS_TRAINER, reason=f"px.Trainer needs transformers {'.'.join(map(str, OLDEST))}"
)
