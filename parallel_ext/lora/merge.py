"""Merging adapters into a base of which a rank holds a part, and putting the base back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import peft
import torch
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import check_adapters_to_merge
from peft.utils import ModulesToSaveWrapper
from torch import nn

from parallel_ext.distributed.errors import warn_user
from parallel_ext.lora.files import check_adapters, parallel_state
from parallel_ext.nn.lora import KeptParameters, low_rank_product
from parallel_ext.parallel.joining import arrive
from parallel_ext.parallel.state import ParallelState
from parallel_ext.sharding.named_shards import to_shards
from parallel_ext.sharding.slices import local_part


class Mergeable(nn.Module, LoraLayer):
    """The part of an adapted module that merges; works on shards, without communication.

    Attributes:
        parameter_name: what of the base the adapter is added to.
    """

    parameter_name = "weight"

    def __init__(self, base_layer: nn.Module) -> None:
        nn.Module.__init__(self)
        LoraLayer.__init__(self, base_layer)
        self._kept = KeptParameters()

    def here(self, names: list[str]) -> list[str]:
        """Return those of the named adapters that this module has."""
        return [name for name in names if name in self.scaling]

    def _factor_pair(self, adapter: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's A [r, in] and B [out, r]."""
        return self.lora_A[adapter].weight, self.lora_B[adapter].weight

    def _delta(self, adapter: str) -> torch.Tensor:
        """Compute what the adapter adds to this rank's part of the base, in fp32 or wider."""
        return low_rank_product(*self._factor_pair(adapter), self.scaling[adapter])

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        """Return what merging adds to the base weight, where one rank holds all of it.

        Raises:
            NotImplementedError: the base is spread over several ranks.
        """
        group = self.get_base_layer().group
        if group.size > 1:
            raise NotImplementedError(
                f"get_delta_weight over {group.size} ranks: each holds only a part of the factors"
            )
        return self._delta(adapter)

    def check_merge(self, safe_merge: bool, adapter_names: list[str] | None, keep: bool) -> None:
        """Raise what ``merge`` would raise, without changing anything."""
        names = self.here(check_adapters_to_merge(self, adapter_names))
        base = self.get_base_layer()
        if names and keep:
            refuse_to_keep(getattr(base, self.parameter_name))
        if names and getattr(base, "tied", False):
            raise ValueError(
                f"merge into {base.layouts['weight'].name}: embedding and head share this weight, "
                "and merging into one would change both; untie them first"
            )
        if any(self.lora_bias[name] for name in names) and base.bias is None:
            raise RuntimeError("lora_bias=True cannot be merged into a base without a bias")
        together = [*names, *self.merged_adapters]
        if names and len(together) > 1 and any(self.use_dora[name] for name in together):
            raise NotImplementedError(
                f"merging {', '.join(together)} together is not supported, since one is of DoRA; "
                "merge one of them"
            )
        if safe_merge and names:
            self._merged(names, safe_merge)

    def _merged(self, names: list[str], safe_merge: bool) -> dict[str, torch.Tensor]:
        """Compute the base's parameters with the adapters in them, rounded once."""
        base = self.get_base_layer()
        added = {self.parameter_name: sum(self._delta(name) for name in names)}
        biased = [name for name in names if self.lora_bias[name]]
        if biased:
            added["bias"] = sum(self.lora_B[n].bias.detach() * self.scaling[n] for n in biased)
        dtype = getattr(base, self.parameter_name).dtype
        merged = {}
        for name, value in added.items():
            parameter = getattr(base, name).detach()
            merged[name] = (local_part(parameter) + rows_here(value, parameter)).to(dtype)
        if safe_merge and not all(value.isfinite().all() for value in merged.values()):
            raise ValueError(
                f"NaN or infinite values in the merged weights: {', '.join(names)} seems broken"
            )
        return merged

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add adapters to this rank's part of the base, of which a copy is kept for ``unmerge``.

        ``safe_merge`` refuses a result that is not finite.
        """
        self._merge(safe_merge, adapter_names, keep=True)

    def _merge(self, safe_merge: bool, adapter_names: list[str] | None, keep: bool) -> None:
        self.check_merge(False, adapter_names, keep)
        names = self.here(check_adapters_to_merge(self, adapter_names))
        if not names:
            return
        self._kept.replace(self.get_base_layer(), self._written(names, safe_merge), keep)
        self.merged_adapters += names

    def _written(self, names: list[str], safe_merge: bool) -> dict[str, torch.Tensor]:
        """Return the base's parameters after a merge."""
        return self._merged(names, safe_merge)

    def unmerge(self) -> None:
        """Put the base back, bit for bit.

        Raises:
            RuntimeError: the base was changed since it was merged, which would be lost.
        """
        if not self.merged:
            warn_user("unmerge: nothing is merged")
        self._kept.put_back(self.get_base_layer())
        self.merged_adapters.clear()

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        """Return the base, with the adapters merged into it if ``merge``; called by PEFT."""
        if merge:
            self._merge(safe_merge, adapter_names, keep=False)
        return self.get_base_layer()


def refuse_to_keep(parameter: nn.Parameter) -> None:
    """Raise where a merge into a parameter could not be undone."""
    if hasattr(parameter, "to_local"):
        raise NotImplementedError(
            "merging after px.data_parallel is final, since the base is sharded over the dp "
            "ranks; call merge_and_unload, or merge before"
        )


def rows_here(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the rows of a value for a parameter of which dp ranks may share out the rows."""
    if not hasattr(parameter, "to_local"):
        return value
    mesh = parameter.device_mesh
    rows = value.chunk(mesh.size())  # as FSDP does, with which the last ranks may have none
    here = mesh.get_local_rank()
    return rows[here] if here < len(rows) else value[:0]


# --- Merging in a whole model ---


def _prepare_merge(
    model: nn.Module, safe_merge: bool, adapter_names: list[str] | None, keep: bool
) -> None:
    """Raise on all ranks what speaks against a merge into a parallel model, before any change."""
    state, op_name = parallel_state(model), "merging adapters"
    if state is None:
        return
    arrive(op_name)
    state.mesh.control.barrier(op_name)

    def check() -> None:
        to_shards(model)
        for module in model.modules():
            if hasattr(module, "check_merge"):
                module.check_merge(safe_merge, adapter_names, keep)
        _refuse_kept_ends(op_name, model, merges=True)

    state.mesh.control.run_on_all(op_name, check)
    check_adapters(model, state, op_name)
    if not keep:
        _take_over_all(model, state)


def _take_over_all(model: nn.Module, state: ParallelState) -> None:
    for module in list(model.modules()):
        if isinstance(module, ModulesToSaveWrapper):
            _take_over(module, state)


def _take_over(module: ModulesToSaveWrapper, state: ParallelState) -> None:
    """Write what was trained whole into the original, if dp ranks share out the rows of that.

    FSDP knows the original by its name, which then is what PEFT leaves of the two.
    """
    original = module.original_module
    if not (_is_shared_out(original) and module.active_adapters):
        return
    trained = module.modules_to_save[module.active_adapter]
    for name, parameter in original.named_parameters():
        value = trained.get_parameter(name).detach()
        is_shared_out = hasattr(value, "to_local")  # as experts are, each by itself
        rows = local_part(value) if is_shared_out else rows_here(value, parameter)
        local_part(parameter.data).copy_(rows)
    module.modules_to_save[module.active_adapter] = original
    tensors = dict(state.layout.tensors)
    for part in original.modules():  # whose layouts know it by the name that it has in PEFT
        for attribute, layout in vars(part).get("fsdp_layouts", {}).items():
            own = replace(layout, name=layout.name.replace("original_module.", ""))
            part.fsdp_layouts[attribute] = own
            if own.name in tensors:
                tensors[own.name] = own
    state.layout = replace(state.layout, tensors=tensors)


def _is_shared_out(module: nn.Module) -> bool:
    return any(hasattr(parameter, "to_local") for parameter in module.parameters())


def _refuse_kept_ends(op_name: str, model: nn.Module, merges: bool) -> None:
    """Raise for one of two tied ends that was trained whole, which the other has no part in."""
    wrappers = {p: m for p, m in model.named_modules() if isinstance(m, ModulesToSaveWrapper)}
    for path, module in wrappers.items():
        original = module.original_module
        tied = getattr(original, "tied", False)
        taken_over = _is_shared_out(original) and module.active_adapters  # it would change both
        ends = (getattr(each, "weight", None) for each in wrappers.values())
        if tied and sum(weight is module.weight for weight in ends) > 1:
            continue  # the copies of both ends are tied, too
        if (tied and merges) or (taken_over and (tied or getattr(original, "tied_heads", ()))):
            raise NotImplementedError(
                f"{op_name}: {path} was trained whole (modules_to_save), while embedding and "
                "head shared one weight when the model was made parallel; save the adapter and "
                "merge it with PEFT in one process, or train with ensure_weight_tying=True"
            )


def merge_adapter(
    plain: Callable[..., Any],
    self: peft.LoraModel,
    adapter_names: list[str] | None = None,
    safe_merge: bool = False,
) -> Any:
    """Extend ``LoraModel.merge_adapter``: on a parallel model all ranks merge, or none."""
    _prepare_merge(self.model, safe_merge, adapter_names, keep=True)
    return plain(self, adapter_names=adapter_names, safe_merge=safe_merge)


def unload(plain: Callable[..., Any], self: peft.LoraModel) -> Any:
    """Extend ``LoraModel.unload``: what was trained whole stays, as in PEFT, also over dp ranks."""
    state = parallel_state(self.model)
    if state is not None:
        refuse = partial(_refuse_kept_ends, "unload", self.model, merges=False)
        state.mesh.control.run_on_all("unload", refuse)
        _take_over_all(self.model, state)
    return plain(self)


def merge_and_unload(
    plain: Callable[..., Any],
    self: peft.LoraModel,
    progressbar: bool = False,
    safe_merge: bool = False,
    adapter_names: list[str] | None = None,
) -> Any:
    """Extend ``LoraModel.merge_and_unload``: on a parallel model all ranks merge, or none."""
    _prepare_merge(self.model, safe_merge, adapter_names, keep=False)
    return plain(self, progressbar, safe_merge=safe_merge, adapter_names=adapter_names)
