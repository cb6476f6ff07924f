"""The metadata of a DCP is read, whichever Python has pickled it, and runs nothing."""

from __future__ import annotations

import enum
import os
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from parallel_ext.checkpoint.dcp_reader import DcpDirectory
from parallel_ext.distributed.errors import CheckpointError


class _ByGetattr(pickle.Pickler):
    """Pickles members of enumerations, and what shall be refused, as Python 3.11.2 does."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return getattr, (type(value), value.name)
        return (getattr, (torch.Size, "numel")) if value is os else NotImplemented


def test_a_dcp_of_any_release_of_python_is_read(tmp_path: Path) -> None:
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    path = tmp_path / ".metadata"
    content = pickle.loads(path.read_bytes())
    for further, refused in ((None, ""), (os, "an attribute of <class 'torch.Size'> is not of")):
        content.planner_data["further"] = further
        with path.open("wb") as file:
            _ByGetattr(file).dump(content)
        assert b"getattr" in path.read_bytes()
        with pytest.raises(CheckpointError, match=refused) if refused else nullcontext():
            assert DcpDirectory(tmp_path).tensors == {"weight": (torch.float32, (3,))}
