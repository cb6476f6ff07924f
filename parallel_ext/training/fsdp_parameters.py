"""Refuse what FSDP would lose of a user's changes to the parameters that it has sharded."""

from __future__ import annotations

import torch
from torch import nn

from parallel_ext.sharding._torch_private import (
    fsdp_parameters,
    gathered_parameter,
    gathers_into_unfit,
    gradient_hooks,
    own_parameters,
    renew_gathered,
    storage_of,
    version_of,
)
from parallel_ext.sharding.named_shards import to_shards
from parallel_ext.sharding.slices import address_of


class FSDPParameters:
    """The parameters of one model that FSDP has sharded, looked at around its forwards.

    From a forward to its backward FSDP puts gathered parameters into the model, with stage 2 all of
    them, and without a backward it leaves them there. The model is the root of ``fully_shard``.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        of_shards = {id(each.sharded_param): each for each in fsdp_parameters(model)}
        self._parameters = [
            (f"{path}.{attribute}" if path else attribute, of_shards[id(shard)], module, attribute)
            for path, module in model.named_modules()
            for attribute, shard in own_parameters(module).items()
            if id(shard) in of_shards  # a tied one in each of its places
        ]
        self._versions: dict[str, int] = {}
        self._storages: dict[str, int] = {}

    def make_room(self) -> None:
        """Let FSDP gather into new memory after ``model.to(dtype)`` or an inference mode."""
        if any(gathers_into_unfit(each) for _, each, _, _ in self._parameters):
            renew_gathered(self._model)

    def before_forward(self) -> None:
        """Put the shards back into the model, which an optimizer may have changed meanwhile.

        What FSDP would lose raises: a parameter that was replaced, or a hook that it never calls.
        """
        trains = torch.is_grad_enabled()
        for name, each, module, attribute in self._parameters:
            shard, own = each.sharded_param, own_parameters(module).get(attribute)
            is_lost = own is not shard and own is not gathered_parameter(each)
            if (storage := storage_of(shard)) != self._storages.get(name):
                is_lost = is_lost or address_of(shard) != 0
                self._storages[name] = -1 if is_lost else storage  # -1 is refused again
            if is_lost:
                raise RuntimeError(
                    f"{name} was replaced after px.data_parallel, and FSDP would overwrite it: "
                    "replace it before, or copy into it under torch.no_grad()"
                )
            if trains and gradient_hooks(shard)[0]:
                raise RuntimeError(
                    f"{name} has a hook of register_hook, which FSDP never calls; a hook of "
                    "register_post_accumulate_grad_hook gets the parameter with its final gradient"
                )
        to_shards(self._model)

    def after_forward(self) -> None:
        """Remember the gathered parameters as FSDP has made them."""
        self._versions = {
            name: version_of(gathered)
            for name, each, module, attribute in self._parameters
            if (gathered := own_parameters(module).get(attribute)) is gathered_parameter(each)
        }

    def before_reshard(self) -> None:
        """Take over whether gathered parameters are trained, and refuse all other changes."""
        versions, self._versions = self._versions, {}
        for name, each, module, attribute in self._parameters if versions else ():
            gathered = own_parameters(module).get(attribute)
            if name not in versions or gathered is not gathered_parameter(each):
                continue
            if version_of(gathered) != versions[name]:
                raise RuntimeError(
                    f"{name} was changed between a forward and its backward, when FSDP holds it "
                    "gathered, and the change would be lost: change it after the backward, or run "
                    "a forward that no backward follows under torch.no_grad()"
                )
            each.sharded_param.requires_grad_(gathered.requires_grad)
