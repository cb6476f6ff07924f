"""Tensor-parallel HuggingFace models whose gradients and files are those of one process."""

import importlib.util

import torch

_REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."

try:
    from parallel_ext import _C
except ImportError as error:
    if importlib.util.find_spec("parallel_ext._C") is None:
        raise ImportError(
            f"the extension of parallel_ext is not built in {__path__[0]}; if the package is "
            "installed elsewhere, leave the directory that hides it, else build it here with: "
            "pip install --no-build-isolation -e ."
        ) from error
    raise ImportError(
        f"parallel_ext was compiled for another torch than the running {torch.__version__}; "
        f"rebuild it with: {_REBUILD}"
    ) from error

_built_for = _C.build_info()["torch"]
if torch.__version__.split("+")[0].rsplit(".", 1)[0] != _built_for.rsplit(".", 1)[0]:
    raise ImportError(
        f"parallel_ext was compiled for torch {_built_for}, but torch {torch.__version__} is "
        f"running; rebuild it with: {_REBUILD}"
    )

from parallel_ext.checkpoint.api import load_checkpoint, save_checkpoint, wait_for_checkpoint  # noqa: E402
from parallel_ext.checkpoint.steps import latest  # noqa: E402
from parallel_ext.checkpoint.verify import verify  # noqa: E402
from parallel_ext.distributed.errors import (  # noqa: E402
    CheckpointError,  # noqa: E402
    CollectiveTimeout,
    DisagreementError,
)
from parallel_ext.distributed.mesh import Mesh, init_mesh, shutdown  # noqa: E402
from parallel_ext.ops.workspaces import release_workspaces  # noqa: E402
from parallel_ext.parallel.from_pretrained import from_pretrained, full_state_dict  # noqa: E402
from parallel_ext.parallel.generation import generate  # noqa: E402
from parallel_ext.parallel.parallelize import parallelize  # noqa: E402
from parallel_ext.training.adafactor import Adafactor  # noqa: E402
from parallel_ext.training.data_parallel import data_parallel, no_data_parallel  # noqa: E402
from parallel_ext.training.forced_routing import force_routing  # noqa: E402
from parallel_ext.training.grad_scaler import GradScaler  # noqa: E402
from parallel_ext.training.gradient_check import GradientReport, check_gradients, check_replicas  # noqa: E402
from parallel_ext.training.gradients import clip_grad_norm_, no_sync  # noqa: E402
from parallel_ext.training.preemption import preempted  # noqa: E402
from parallel_ext.training.routing_metrics import RoutingMetrics  # noqa: E402
from parallel_ext.version import VERSION  # noqa: E402

__version__ = VERSION


def __getattr__(name: str) -> object:
    if name == "LoraConfig":  # peft is needed by those only who ask for it
        from parallel_ext.lora import LoraConfig

        return LoraConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Adafactor",
    "LoraConfig",
    "CheckpointError",
    "CollectiveTimeout",
    "DisagreementError",
    "GradScaler",
    "GradientReport",
    "Mesh",
    "RoutingMetrics",
    "check_gradients",
    "check_replicas",
    "clip_grad_norm_",
    "data_parallel",
    "force_routing",
    "from_pretrained",
    "full_state_dict",
    "generate",
    "init_mesh",
    "latest",
    "load_checkpoint",
    "no_data_parallel",
    "no_sync",
    "parallelize",
    "preempted",
    "release_workspaces",
    "save_checkpoint",
    "shutdown",
    "verify",
    "wait_for_checkpoint",
]
