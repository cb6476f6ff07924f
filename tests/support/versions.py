"""Which releases of other packages a test needs."""

from __future__ import annotations

import pytest

from parallel_ext.training.trainer import OLDEST, transformers_version

HAS_TRAINER = transformers_version() >= OLDEST
needs_trainer = pytest.mark.skipif(
    not HAS_TRAINER, reason=f"px.Trainer needs transformers {'.'.join(map(str, OLDEST))}"
)
