"""Every op on the device: against the CPU's loops in fp64 on the same inputs, rounded alike."""

from __future__ import annotations

import pytest
import torch
from on_device import assert_as_in_fp64
from test_every_op import REGISTERED, opcheck_samples

from parallel_ext.ops import ALONE


@pytest.mark.parametrize("name", REGISTERED)
def test_an_op_is_that_of_the_cpu_in_fp64(name: str, device: torch.device) -> None:
    op = getattr(torch.ops.parallel_ext, name)
    for sample in opcheck_samples(ALONE)[name]:
        assert_as_in_fp64(op, sample, device)
