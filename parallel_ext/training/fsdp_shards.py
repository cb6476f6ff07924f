"""How FSDP2 shards a parallel model over its dp ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallel_ext.distributed.mesh import Mesh
from parallel_ext.nn.fsdp_gradients import FSDPGradients
from parallel_ext.nn.leaf_sums import LeafSums
from parallel_ext.nn.moe import ExpertParallelExperts
from parallel_ext.nn.routing import is_routed
from parallel_ext.nn.sharded_module import ShardedModule
from parallel_ext.nn.stale_parameters import mark_replaced, mark_stale
from parallel_ext.ops import Group
from parallel_ext.parallel.joining import arrive
from parallel_ext.parallel.replace import names_of_parts
from parallel_ext.parallel.state import ParallelState
from parallel_ext.sharding._torch_private import disable_compiler, tree_leaves
from parallel_ext.sharding.layout import TensorLayout
from parallel_ext.sharding.named_shards import named_shards, to_shards
from parallel_ext.training.fsdp_collectives import exchange_by
from parallel_ext.training.fsdp_parameters import FSDPParameters
from parallel_ext.training.gradients_of_inputs import GradientsOfInputs

_OF_ADAPTERS = (".lora_", ".trainable_tokens_delta.")


def shard_over_dp(model: nn.Module, state: ParallelState, zero: int) -> None:
    """Let FSDP shard a parallel model over its dp ranks, experts over the edp ranks.

    Every rank calls it, once; ``zero`` is that of :func:`parallel_ext.data_parallel`.
    """
    # torch.distributed.fsdp takes longer to import than all of this package
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = state.mesh
    before = {name: (parameter, layout) for name, parameter, layout in named_shards(model)}
    copy_sizes = _copy_sizes(model, mesh)
    averaged = _averaged(model, state, {name: each for name, (each, _) in before.items()})
    # FSDP cannot flatten what is empty.
    empty = {name: each for name, (each, _) in before.items() if each.numel() == 0}
    halves = any(p.dtype in (torch.bfloat16, torch.float16) for p, _ in before.values())
    ignored = {*averaged.values(), *empty.values()}
    options = {
        "reshard_after_forward": zero == 3,
        "ignored_params": ignored,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32 if halves else None),
    }
    dense, of_experts = _device_mesh(mesh, mesh.tp_size), _device_mesh(mesh, mesh.ep_size)
    for path in (state.spec.layers, *state.spec.towers):
        for layer in model.get_submodule(path):
            for module in layer.modules():
                # Also with edp_size 1: no optimizer takes plain tensors and DTensors at once.
                if isinstance(module, ExpertParallelExperts):
                    fully_shard(module, mesh=of_experts, **options)
            for module in (*_of_other_dtypes(layer, ignored, frozen=True), layer):
                fully_shard(module, mesh=dense, **options)
    for module in (*_of_other_dtypes(model, ignored, frozen=False), model):
        fully_shard(module, mesh=dense, **options)
    if state.partials is not None:
        inputs = GradientsOfInputs(model.get_submodule(state.spec.embedding), state.partials, mesh)
        model.register_forward_pre_hook(inputs, prepend=True, with_kwargs=True)
    # Before FSDP's, which gathers.
    model.register_forward_pre_hook(lambda *_: arrive("forward"), prepend=True)
    if state.invariant is not None:
        state.leaf_sums = LeafSums(mesh.dp_size)
    collectives = exchange_by(model, mesh, state.leaf_sums)
    _record(model, state, before, copy_sizes, empty.keys() - averaged.keys())
    state.fsdp_gradients, gathered = FSDPGradients(model, collectives), FSDPParameters(model)
    model.before_reshard = gathered.before_reshard
    around = _AroundForward(state, gathered)
    model.register_forward_pre_hook(around.before, prepend=True)
    model.register_forward_hook(around.after)
    if state.partials is not None:
        for module in model.modules():
            if "partials" in vars(module):  # what PEFT trains whole is a copy, and has its own
                module.partials = state.partials
        # FSDP reduces a gradient as soon as it is there, so that no part of it may come later.
        state.partials.sum_at_once(names_of_parts(model))
        of_group: dict[Group, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in averaged.items():
            if parameter.numel() > 0:
                group = mesh.dp if copy_sizes[id(parameter)] == mesh.tp_size else mesh.edp
                of_group.setdefault(group, []).append((name, parameter))
        for group, parameters in of_group.items():
            state.partials.average(parameters, group)


def _of_other_dtypes(whole: nn.Module, ignored: set[nn.Parameter], frozen: bool) -> list[nn.Module]:
    """Return the modules in ``whole`` that are trained in other dtypes, as a router in fp32.

    FSDP shards what has one dtype together. What it has sharded already, or shall not, is left out.
    With ``frozen`` modules that may be trained later are among them.
    """
    own = {
        module: {
            parameter.dtype
            for parameter in module.parameters(recurse=False)
            if (frozen or parameter.requires_grad)
            and not hasattr(parameter, "to_local")
            and parameter not in ignored
        }
        for module in whole.modules()
    }
    found = [dtype for dtypes in own.values() for dtype in dtypes]
    others = [each for each, dtypes in own.items() if each is not whole and dtypes - {*found[:1]}]
    for router in filter(is_routed, whole.modules()):  # which reads the parameters in it itself
        inside = {*router.modules()}
        others = list(dict.fromkeys(router if each in inside else each for each in others))
    inner = {each for outer in others for each in outer.modules() if each is not outer}
    return [each for each in others if each not in inner]


def _averaged(
    model: nn.Module, state: ParallelState, parameters: Mapping[str, nn.Parameter]
) -> dict[str, nn.Parameter]:
    """Return the parameters that stay whole, and whose gradients are averaged.

    Those of adapters, but for experts, of which other dp ranks may have others; a frozen one,
    known by its name in PEFT, may be trained later. And those of a mixture itself, as AFMoE's
    correction of scores, which may have another dtype than all that is in it.
    """
    experts: set[int] = set()
    of_mixtures: set[int] = set()
    for module in model.modules():
        own = {id(parameter) for parameter in module.parameters(recurse=False)}
        if isinstance(module, ExpertParallelExperts):
            experts |= own
        elif any(isinstance(each, ExpertParallelExperts) for each in module.children()):
            of_mixtures |= own
    return {
        name: parameter
        for name, parameter in parameters.items()
        if id(parameter) in of_mixtures
        or (state.adapted and id(parameter) not in experts)
        and (parameter.requires_grad or any(part in f".{name}" for part in _OF_ADAPTERS))
    }


def _copy_sizes(model: nn.Module, mesh: Mesh) -> dict[int, int]:
    """Map the id of each parameter to how many consecutive ranks hold one copy of it."""
    return {
        id(parameter): module.group.size if isinstance(module, ShardedModule) else mesh.tp_size
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    }


def _device_mesh(mesh: Mesh, inner: int) -> DeviceMesh:
    """Return the ranks that hold equal shards, if ``inner`` consecutive ranks hold one copy."""
    process_group = mesh.process_group(mesh.group_of_columns(inner))
    return DeviceMesh.from_group(process_group, mesh.device.type)


def _record(
    model: nn.Module,
    state: ParallelState,
    before: dict[str, tuple[nn.Parameter, TensorLayout]],
    copy_sizes: dict[int, int],
    sharded_elsewhere: Collection[str],
) -> None:
    """Record what each rank holds now; the record is equal on all ranks."""
    mesh, layout = state.mesh, state.layout
    tensors = dict(layout.tensors)
    after, sharded_names = dict(model.named_parameters()), set()
    for name, (old, whole) in before.items():
        if after[name] is old and name not in sharded_elsewhere:
            continue
        further = whole.shard_rows_further(mesh.columns(copy_sizes[id(old)]))
        path, _, attribute = name.rpartition(".")
        # The module keeps the layout, since ``model.to`` loses what a parameter itself carries.
        vars(model.get_submodule(path)).setdefault("fsdp_layouts", {})[attribute] = further
        logical = layout.tied.get(further.name, further.name)
        if logical in tensors:
            tensors[logical] = further
        if after[name] is not old:
            mark_replaced(old, after[name], name, "px.data_parallel")
            sharded_names.add(name)
    state.fsdp_sharded = frozenset(sharded_names)
    state.layout = replace(layout, tensors=tensors)


class _AroundForward:
    """Hooks around those of FSDP, for what a step leaves behind, and what stands in between."""

    def __init__(self, state: ParallelState, parameters: FSDPParameters) -> None:
        self._state, self._parameters, self._remembered = state, parameters, False

    @disable_compiler
    def before(self, model: nn.Module, args: object) -> None:
        """Let training continue from whatever the last step has left.

        After a backward has raised FSDP would wait for its end, and reduce no more gradients.
        What it has gathered for a forward that no backward followed, it would take for the weights.
        """
        if self._state.fsdp_gradients.backward_broke_off():
            self._state.fsdp_gradients.reset()
        if torch.is_grad_enabled():
            # FSDP would miss gradients that come through casts which an earlier forward has made.
            torch.clear_autocast_cache()
        if not self._state.generates:
            self._parameters.before_forward()
        self._parameters.make_room()

    @disable_compiler
    def after(self, model: nn.Module, args: object, output: object) -> None:
        """Keep an optimizer from training what FSDP has gathered.

        With stage 2, and for the root always, FSDP leaves gathered parameters in the place of the
        shards until backward, where an optimizer that is built then would find them.
        """
        if not self._remembered:
            self._remembered = True
            reason = "was built between forward and backward, and holds what FSDP had gathered"
            for name, parameter in model.named_parameters():
                if name in self._state.fsdp_sharded and not hasattr(parameter, "to_local"):
                    mark_stale(parameter, name, reason)
        if torch.is_grad_enabled():
            self._parameters.after_forward()
        elif not self._state.generates:
            to_shards(model)
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self._before_backward)

    def _before_backward(self, gradient: torch.Tensor) -> None:
        torch.clear_autocast_cache()  # so that what is recomputed makes casts of its own, too
        # FSDP comes first, so that it can be mended after a refusal by the next.
        self._state.fsdp_gradients.begin_backward()
        if self._state.partials is not None:
            self._state.partials.open()
