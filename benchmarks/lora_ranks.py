"""What the processes of ``lora.py`` run: one LoRA linear, or training steps with adapters."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import harness
import peft
import torch
import train_step_ranks
from peft.tuners.lora import LoraLayer
from torch import nn
from train_step_ranks import OURS, TRANSFORMERS_TP

import parallel_ext as px
from parallel_ext.lora.inject import LAYERS
from parallel_ext.nn.linear import ColumnParallelLinear
from parallel_ext.ops import ALONE
from parallel_ext.sharding.layout import TensorLayout

FROZEN = "frozen linear"
OURS_IN_DTYPE = "parallel_ext, factors in the base's dtype"
OURS_DROPOUT = "parallel_ext, dropout"
PEFT = "PEFT"
PEFT_IN_DTYPE = "PEFT, factors in the base's dtype"
PEFT_DROPOUT = "PEFT, dropout"
OURS_DORA = "parallel_ext, DoRA"
PEFT_DORA = "PEFT, DoRA"
PEFT_TP = "PEFT on transformers TP"

COMPETITORS = (FROZEN, OURS, OURS_IN_DTYPE, PEFT, PEFT_IN_DTYPE, OURS_DROPOUT, PEFT_DROPOUT)
IN_DTYPE = (OURS_IN_DTYPE, PEFT_IN_DTYPE)  # the same as without it over a base in fp32
WITH_DROPOUT = (OURS_DROPOUT, PEFT_DROPOUT)
OF_DORA = (FROZEN, OURS_DORA, PEFT_DORA)

ALPHA, DROPOUT = 32, 0.05
TOKENS = harness.size(2048, 32)
CALLS = 3  # of a competitor's turn: it shall last long against the clock that sees others at work


# One linear layer.


class _Holder(nn.Module):
    """The smallest model that PEFT wraps."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@dataclass(frozen=True)
class Case:
    """The tensors of one shape: what all competitors compute with.

    Attributes:
        x, grad: [T, K] and [T, F], in the dtype of the base.
        weight: [F, K], frozen.
        lora_a, lora_b: [r, K] and [F, r] in fp32, with values that bf16 holds as well.
    """

    x: torch.Tensor
    grad: torch.Tensor
    weight: torch.Tensor
    lora_a: torch.Tensor
    lora_b: torch.Tensor

    @classmethod
    def random(cls, in_features: int, out_features: int, r: int, dtype: torch.dtype) -> Case:
        generator = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

        factors = (draw(r, in_features), draw(out_features, r))
        return cls(
            draw(TOKENS, in_features).to(dtype).requires_grad_(),
            draw(TOKENS, out_features).to(dtype),
            draw(out_features, in_features).to(dtype),
            *(factor.bfloat16().float() for factor in factors),
        )

    @property
    def scale(self) -> float:
        return ALPHA / self.lora_a.size(0)

    @property
    def lengths(self) -> torch.Tensor:
        """Trained lengths of rows [F], other than those that DoRA begins with."""
        return self.weight.float().norm(dim=1) * 1.25

    def expected(self, dora: bool) -> list[torch.Tensor]:
        """Output and gradients of x, the factors and the lengths in fp64, by plain formulas."""
        x, grad, weight, a, b = (t.detach().double() for t in vars(self).values())
        norms = (weight + self.scale * b @ a).norm(dim=1)
        factor = self.lengths.double() / norms if dora else torch.ones_like(norms)
        low = x @ a.T * self.scale
        output = x @ weight.T + low @ b.T
        grad_lengths = (grad * output).sum(0) / norms
        grad = grad * factor
        grad_low = grad @ b * self.scale
        gradients = [grad @ weight + grad_low @ a, grad_low.T @ x, grad.T @ low]
        return [output * factor, *gradients, *([grad_lengths] if dora else [])]

    def model(self, competitor: str) -> nn.Module:
        """The module that a user would train: a wrapped linear, or the frozen one."""
        weight = nn.Parameter(self.weight, requires_grad=False)
        if competitor.startswith(OURS):
            layouts = {"weight": TensorLayout("linear.weight", tuple(weight.shape))}
            base: nn.Module = ColumnParallelLinear(weight, None, layouts, ALONE)
        else:
            base = nn.Linear(weight.size(1), weight.size(0), bias=False, device="meta")
            base.weight = weight
        if competitor == FROZEN:
            return _Holder(base)
        config = peft.LoraConfig(
            r=self.lora_a.size(0),
            lora_alpha=ALPHA,
            target_modules=["linear"],
            lora_dropout=DROPOUT if competitor in WITH_DROPOUT else 0.0,
            use_dora=competitor in OF_DORA,
        )
        config._register_custom_module(LAYERS)  # as parallelize would have it for a whole model
        wrapped = peft.get_peft_model(
            _Holder(base), config, autocast_adapter_dtype=competitor not in IN_DTYPE
        )
        with torch.no_grad():
            values = {"lora_A": self.lora_a, "lora_B": self.lora_b}
            values["lora_magnitude_vector"] = self.lengths
            for name, parameter in wrapped.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(next(v for part, v in values.items() if part in name))
        return wrapped.train()


class Layer:
    """One competitor on one case; called, it returns the seconds of forward and backward."""

    def __init__(self, competitor: str, case: Case) -> None:
        self.case, self.model = case, case.model(competitor)
        self.factors = [p for p in self.model.parameters() if p.requires_grad]

    def forget(self) -> None:
        """Drop the gradients."""
        for tensor in (self.case.x, *self.factors):
            tensor.grad = None

    def forward_backward(self) -> torch.Tensor:
        self.forget()
        output = self.model(self.case.x)
        output.backward(self.case.grad)
        return output

    def __call__(self) -> list[float]:
        start = time.perf_counter()
        for _ in range(CALLS):
            self.forward_backward()
        return [(time.perf_counter() - start) / CALLS]

    def error(self, expected: list[torch.Tensor]) -> float:
        """The worst relative difference of output and gradients from those expected."""
        output = self.forward_backward()
        found = [output, *(tensor.grad for tensor in (self.case.x, *self.factors))]
        return max(
            ((a.detach().double() - b).abs().max() / b.abs().max()).item()
            for a, b in zip(found, expected, strict=True)
        )


def measure_linear(
    features: tuple[int, int], r: int, dtype: torch.dtype, request: Mapping[str, Any]
) -> dict[str, Any]:
    """Times, memory, errors and profiles of all competitors on one shape."""
    case = Case.random(*features, r, dtype)
    dora = request["task"] == "dora"
    names = [
        name
        for name in (OF_DORA if dora else COMPETITORS)
        if dtype != torch.float32 or name not in IN_DTYPE
    ]
    layers = {name: Layer(name, case) for name in names}
    expected = case.expected(dora)
    comparable = [n for n in names if n != FROZEN and n not in WITH_DROPOUT]
    errors = {name: layers[name].error(expected) for name in comparable}
    rounds = harness.interleaved(layers, request["repetitions"], warm_up=2)
    growth, profiles = {}, {}
    for name, layer in layers.items():
        for each in layers.values():
            each.forget()
        growth[name] = harness.peak_growth(layer.forward_backward)
        if request["profile"]:
            profiles[name] = harness.profile(layer.forward_backward).top(12)
    return {
        "rounds": [asdict(each) for each in rounds],
        "growth_mib": growth,
        "errors": errors,
        "profile": profiles,
    }


def measure_linears(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One answer for each of the shapes, in their order."""
    dtype = getattr(torch, request["dtype"])
    return [measure_linear(features, r, dtype, request) for features, r in request["shapes"]]


# A whole training step.


def load_adapted(competitor: str, request: Mapping[str, Any]) -> nn.Module:
    """The Llama of a competitor with the adapter that all read, ready for training."""
    base = TRANSFORMERS_TP if competitor == PEFT_TP else competitor
    model = peft.PeftModel.from_pretrained(
        train_step_ranks.build(base, request),
        request["adapter"],
        is_trainable=True,
        config=(px if competitor == OURS else peft).LoraConfig.from_pretrained(request["adapter"]),
    )
    if competitor == PEFT_TP:
        _correct_in_features(model)
    return model.train()


def _correct_in_features(model: nn.Module) -> None:
    """Let PEFT train on layers that transformers cuts by columns.

    PEFT gives their first factor the rank's number of features; transformers 5.21 and later take
    it for the global one and shard again, so that the first forward of a training fails.
    """
    for module in model.modules():
        if isinstance(module, LoraLayer):
            for factor in module.lora_A.values():
                factor.in_features = factor.weight.shape[1]


def main() -> None:
    warnings.filterwarnings("ignore")
    request = harness.arguments()
    torch.manual_seed(0)
    if request["task"] in ("linear", "dora"):
        harness.finish(measure_linears(request))
    else:
        train_step_ranks.answer(request, load_adapted)


if __name__ == "__main__":
    main()
