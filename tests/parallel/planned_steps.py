"""Models as the steps of a plan train them, and what their ranks hold and send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest import mock

import torch
import transformers
from reference_ops import aten_path

import parallel_ext as px
from parallel_ext.lora import adapt_all_linears
from parallel_ext.parallel.estimate import Planner, Step
from parallel_ext.parallel.repeated import Repeated
from parallel_ext.training import fsdp_collectives


def config_of(kind: str, hidden: int = 512) -> transformers.PreTrainedConfig:
    """Return a configuration large enough for its tensors to be most of a process."""
    sizes = {
        "vocab_size": 16 * hidden,
        "hidden_size": hidden,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    if kind == "mixtral":
        return transformers.MixtralConfig(
            intermediate_size=11 * hidden // 8, num_local_experts=8, **sizes
        )
    return transformers.LlamaConfig(intermediate_size=11 * hidden // 4, **sizes)


def adapter(r: int | None) -> Callable[[torch.nn.Module], Any] | None:
    """What a step adapts its model by: LoRA of this rank on all linears; None for none."""
    return r and partial(adapt_all_linears, r=r)


def as_planned(model: Any, mesh: px.Mesh, step: Step) -> Any:
    """A plain model made parallel and ready to train as a step says; a mixture routes evenly."""
    model = model.to(step.dtype)
    model = px.parallelize(model, mesh, sequence_parallel=step.sequence_parallel).train()
    if step.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if step.adapt:
        model = step.adapt(model)
    px.data_parallel(model, mesh, step.zero)
    if hasattr(model.config, "num_experts_per_tok"):
        px.force_routing(model, "balanced")
    if step.autocast is not None:
        model.forward = torch.autocast("cpu", step.autocast)(model.forward)
    return model


def config_as_planned(
    config: transformers.PreTrainedConfig, tp: int, ep: int, step: Step
) -> tuple[Any, px.Mesh]:
    """The same of a new model of a configuration, and its mesh."""
    torch.manual_seed(0)
    mesh = px.init_mesh(tp=tp, ep=ep)
    return as_planned(transformers.AutoModelForCausalLM.from_config(config), mesh, step), mesh


def bytes_held(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> tuple[int, int]:
    """Bytes of this rank's weights, and of its optimizer's states without their step counts."""

    def held(tensors: Iterable[torch.Tensor]) -> int:
        own = (each.to_local() if hasattr(each, "to_local") else each for each in tensors)
        return sum(each.nbytes for each in own if each.dim())

    states = optimizer.state.values() if optimizer else []
    return held(model.parameters()), sum(held(state.values()) for state in states)


def counted(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, int]:
    """What this rank counts in a second step, on the kernels of other devices than the CPU."""
    plain, counts = fsdp_collectives.Collective.__call__, Counter[str]()

    def counting(self: Any, **options: Any) -> Any:
        if self._group.size > 1:
            counts[f"zero_{self._kind}"] += 1
            counts[f"zero_{self._kind}_bytes"] += options["input_tensor"].nbytes
        return plain(self, **options)

    with aten_path(True), mock.patch.object(fsdp_collectives.Collective, "__call__", counting):
        model(**batch).loss.backward()
        counts.clear()
        px._C.reset_collective_counts()
        model(**batch).loss.backward()
        own = px._C.collective_counts()
    counts.update({n: value for n, value in own.items() if "/" not in n and value})
    counts.pop("in_shared_memory", None)
    return dict(counts)


def planned(
    config: transformers.PreTrainedConfig, world: int, tp: int, ep: int, step: Step
) -> list[dict[str, int]]:
    """What the first and the last rank send, under the names of what is counted."""
    planned = []
    for sent in Planner(config).estimate(world, tp, ep, step).sent:
        counts = Counter[str]()
        for kinds in sent.values():
            for name, numbers in kinds.items():
                counts[name] += numbers["collectives"]
                counts[f"{name}_bytes"] += numbers["bytes"]
        if tp > 1:  # on the CPU the statistics of the loss have the range of a rank's ids as well
            counts["all_gather_bytes"] += 2 * 4
        planned.append({name: number for name, number in counts.items() if number})
    return planned


def assert_few_layers_tell_of_many(
    config: transformers.PreTrainedConfig,
    step: Step,
    layouts: tuple[tuple[int, int, int], ...] = ((1, 1, 1), (2, 2, 1), (4, 2, 1)),
) -> None:
    few, all_of_them = Planner(config), Planner(config)
    assert few._repeated.further
    all_of_them._repeated = Repeated.of(range(len(all_of_them._layers)))
    for world, tp, ep in layouts:
        assert few.estimate(world, tp, ep, step) == all_of_them.estimate(world, tp, ep, step)
