"""Tensor-parallel HuggingFace models whose gradients and files are those of one process.

``parallel_ext.ops`` and ``parallel_ext.nn`` need torch alone. Everything else here is loaded
when it is first used; importing the package registers nothing with other packages.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

import torch

_REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."

try:
    from parallel_ext import _C
except ImportError as error:
    if importlib.util.find_spec("parallel_ext._C") is None:
        raise ImportError(
            f"parallel_ext is imported from {__path__[0]}, where its extension is not built. If "
            "the package is installed, run Python from another folder, since this one hides it; "
            "else build it, in the root of the sources: pip install --no-build-isolation -e ."
        ) from None
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

from parallel_ext.parallel.extending import register_extension  # noqa: E402
from parallel_ext.version import VERSION  # noqa: E402

if TYPE_CHECKING:
    from parallel_ext.checkpoint.load import load_checkpoint
    from parallel_ext.checkpoint.save import save_checkpoint, wait_for_checkpoint
    from parallel_ext.checkpoint.steps import latest, latest_checkpoint
    from parallel_ext.checkpoint.verify import verify, verify_checkpoint
    from parallel_ext.distributed.errors import (
        CheckpointError,
        CollectiveTimeout,
        DisagreementError,
    )
    from parallel_ext.distributed.mesh import Mesh, init_mesh, shutdown
    from parallel_ext.interplay.patch import patch, unpatch
    from parallel_ext.lora.config import LoraConfig
    from parallel_ext.models import register
    from parallel_ext.ops.workspaces import release_workspaces
    from parallel_ext.parallel.compare import check_replicas, digest
    from parallel_ext.parallel.from_pretrained import from_pretrained, full_state_dict
    from parallel_ext.parallel.generation import generate
    from parallel_ext.parallel.parallelize import parallelize
    from parallel_ext.parallel.plan import Invariant
    from parallel_ext.training.adafactor import Adafactor
    from parallel_ext.training.data_parallel import data_parallel, no_data_parallel
    from parallel_ext.training.forced_routing import force_routing
    from parallel_ext.training.gradient_check import GradientReport, check_gradients
    from parallel_ext.training.gradients import clip_grad_norm_, no_sync
    from parallel_ext.training.leaves import leaves, train_leaves
    from parallel_ext.training.preemption import preempted, stop_requested
    from parallel_ext.training.profile import profile_step
    from parallel_ext.training.profile_report import StepProfile
    from parallel_ext.training.routing_metrics import RoutingMetrics
    from parallel_ext.training.trainer import Trainer, TrainerMixin

__version__ = VERSION

_HOMES = {
    "checkpoint.load": ("load_checkpoint",),
    "checkpoint.save": ("save_checkpoint", "wait_for_checkpoint"),
    "checkpoint.steps": ("latest", "latest_checkpoint"),
    "checkpoint.verify": ("verify", "verify_checkpoint"),
    "distributed.errors": ("CheckpointError", "CollectiveTimeout", "DisagreementError"),
    "distributed.mesh": ("Mesh", "init_mesh", "shutdown"),
    "interplay.patch": ("patch", "unpatch"),
    "lora.config": ("LoraConfig",),
    "models": ("register",),
    "ops.workspaces": ("release_workspaces",),
    "parallel.compare": ("check_replicas", "digest"),
    "parallel.from_pretrained": ("from_pretrained", "full_state_dict"),
    "parallel.generation": ("generate",),
    "parallel.parallelize": ("parallelize",),
    "parallel.plan": ("Invariant",),
    "training.adafactor": ("Adafactor",),
    "training.data_parallel": ("data_parallel", "no_data_parallel"),
    "training.forced_routing": ("force_routing",),
    "training.gradient_check": ("GradientReport", "check_gradients"),
    "training.gradients": ("clip_grad_norm_", "no_sync"),
    "training.leaves": ("leaves", "train_leaves"),
    "training.preemption": ("preempted", "stop_requested"),
    "training.profile": ("profile_step",),
    "training.profile_report": ("StepProfile",),
    "training.routing_metrics": ("RoutingMetrics",),
    "training.trainer": ("Trainer", "TrainerMixin"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_ROOMS = ("models", "nn", "ops")

__all__ = sorted([*_HOME_OF, *_ROOMS])


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"parallel_ext.{name}")
    if name in _HOME_OF:
        value = getattr(importlib.import_module(f"parallel_ext.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _extend_others() -> None:
    """Extend torch, transformers, accelerate and PEFT so that they know parallel models."""
    from parallel_ext.interplay import serve

    serve()
    if importlib.util.find_spec("peft"):
        from parallel_ext.lora import extend_peft

        extend_peft()


register_extension(_extend_others)
