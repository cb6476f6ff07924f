"""The end of a job: what the ranks still do before their groups are destroyed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from parallel_ext.distributed.mesh import Mesh
from parallel_ext.parallel import joining


def destroy_process_group(plain: Callable[..., None], group: Any = None) -> None:
    """Extend torch's function, which accelerate calls too, to wait for what ranks still do.

    Under ``px.patch`` they join the saves of others; asynchronous saves are written.
    """
    if group in (None, dist.group.WORLD):
        joining.end()
        for mesh in list(Mesh.live):
            mesh.background.join()
    plain(group)
