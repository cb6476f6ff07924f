"""What the processes of the benchmark of sequence parallelism run: a checkpointed step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import parallel_ext as px
from parallel_ext.training.step_events import sort_events

REPLICATED, OURS = "parallel_ext, tokens on every rank", "parallel_ext, sequence_parallel"
TRANSFORMERS, TORCHTITAN = "transformers' tp_plan", "torchtitan's plan"
COMPETITORS = (REPLICATED, OURS, TRANSFORMERS, TORCHTITAN)
DIVIDED = (OURS, TORCHTITAN)  # which keep their own tokens between the sublayers


def torchtitan_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Return the plan of torchtitan's Llama with sequence parallelism, by HuggingFace's names."""
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=True
        ),
        "model.norm": SequenceParallel(use_local_output=True),
        "lm_head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    for number in range(len(model.model.layers)):
        layer = f"model.layers.{number}."
        plan |= {
            f"{layer}input_layernorm": SequenceParallel(use_local_output=True),
            f"{layer}self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
                use_local_output=True,
            ),
            f"{layer}self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
            f"{layer}post_attention_layernorm": SequenceParallel(use_local_output=True),
            f"{layer}mlp": PrepareModuleInput(
                input_layouts=(Shard(1),),
                desired_input_layouts=(Replicate(),),
                use_local_output=True,
            ),
            f"{layer}mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        }
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        for name in (*columns, "mlp.gate_proj", "mlp.up_proj"):
            plan[layer + name] = ColwiseParallel()
    return plan


class Step:
    """A competitor's model and optimizer; called, it trains a step.

    Attributes:
        losses: of all steps so far.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.competitor, weights = request["competitor"], request["weights"]
        size = dist.get_world_size()
        if self.competitor == TRANSFORMERS:
            config = DistributedConfig(tp_size=size)
            model = LlamaForCausalLM.from_pretrained(weights, distributed_config=config)
        else:
            model = AutoModelForCausalLM.from_pretrained(weights)
        if self.competitor == TORCHTITAN:
            parallelize_module(model, init_device_mesh("cpu", (size,)), torchtitan_plan(model))
        elif self.competitor != TRANSFORMERS:
            own, is_mixture = self.competitor == OURS, hasattr(model.config, "num_local_experts")
            mesh = px.init_mesh(tp=size, ep=size if is_mixture else 1)
            px.parallelize(model, mesh, sequence_parallel=own)
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
        self.model, self.losses = model, []
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
        shape, generator = (request["rows"], request["tokens"]), torch.Generator().manual_seed(3)
        self.ids = torch.randint(0, model.config.vocab_size, shape, generator=generator)

    def _backward(self) -> torch.Tensor:
        if self.competitor != TORCHTITAN:
            with record_function("forward"):
                loss = self.model(input_ids=self.ids, labels=self.ids).loss
            loss.backward()
            return loss
        # The model would count positions by the tokens that this rank has of the embedding.
        positions = torch.arange(self.ids.size(1))[None]
        labels = nn.functional.pad(self.ids, (0, 1), value=-100)[:, 1:].flatten()
        with loss_parallel():
            with record_function("forward"):
                logits = self.model(input_ids=self.ids, position_ids=positions).logits
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels)
            loss.backward()
        return loss

    def __call__(self) -> None:
        loss = self._backward()
        self.losses.append(float(loss.detach()))
        self.optimizer.step()
        self.optimizer.zero_grad()


def allocated(step: Step) -> list[float]:
    """Return the MiB that torch allocates in a step: left by its forward, and at its peak."""
    profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True)
    with profiler, record_function("step"):
        step()
    seen = sort_events(profiler.profiler.kineto_results.events(), "step", ["forward"], "cpu")
    return [seen.after["forward"] / 2**20, seen.peak / 2**20]


def main() -> None:
    warnings.filterwarnings("ignore")
    request = harness.arguments()
    dist.init_process_group("gloo")
    step = Step(request)
    for _ in range(request["warm_up"]):
        step()
    growths = [harness.peak_growth(step) for _ in range(request["repetitions"])]
    after_forward, peak = harness.slowest(allocated(step))
    harness.finish(
        {
            "growths": harness.slowest(growths),
            "after_forward": after_forward,
            "peak": peak,
            "losses": step.losses,
        }
    )


if __name__ == "__main__":
    main()
