"""Which releases of other packages a test needs."""

from __future__ import annotations

import pytest

from parallel_ext.parallel.validate import transformers_version
from parallel_ext.training.trainer_checks import OLDEST

HAS_TRAINER = transformers_version() >= OLDEST


def needs_newer(what: str) -> pytest.MarkDecorator:
    """Skip a test of what transformers has only from the release of ``px.Trainer`` on."""
    release = ".".join(map(str, OLDEST))
    return pytest.mark.skipif(not HAS_TRAINER, reason=f"{what} needs transformers {release}")


needs_trainer = needs_newer("px.Trainer")
