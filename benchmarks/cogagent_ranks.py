"""What the processes of ``cogagent.py`` run: decoder layers in several ways, and parts of a model.

The port that the layers are compared with is made of the same modules: every linear that a rank
holds some input features of sums its output, and every expert and every other linear that reads a
whole tensor sums the gradient of that tensor.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import Tensor, nn

import parallel_ext as px
from parallel_ext import _C
from parallel_ext.models.cogagent import CogAgentConfig, CogAgentForCausalLM
from parallel_ext.models.cogagent.modeling import CogAgentModel
from parallel_ext.models.cogagent.spec import COGAGENT
from parallel_ext.models.cogagent.tokens import LANGUAGE, VISION, TokenRoute, build_position_ids
from parallel_ext.parallel.entering import CopyInput
from parallel_ext.parallel.plan import Plan
from parallel_ext.parallel.replace import Replacer
from parallel_ext.parallel.state import STATE_NAME
from parallel_ext.sharding.layout import ModelLayout
from parallel_ext.sharding.slices import take

OURS = "parallel_ext"
OURS_GLOO = "parallel_ext, gloo only"
PORT = "unmerged port"
PORT_GLOO = "unmerged port, gloo only"
ONE_PROCESS = "one process"

TOKENS, IMAGE_TOKENS = 512, 258
LAYERS = 2

# The published layer with its numbers of heads and all of its widths divided by 4. What the layers
# do not need is as small as it can be.
QUARTER = {
    "vocab_size": 64,
    "hidden_size": 1024,
    "intermediate_size": 2752,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "cross_hidden_size": 256,
    "cross_compute_hidden_size": 256,
    "vision_config": {
        **{"hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "num_hidden_layers": 1},
        **{"image_size": 14, "num_positions": 2},
    },
    "cross_vision_config": {"layers": 1, "width": 256},
}
# Published widths, one layer of each kind; the last block of EVA2-CLIP-L is never run.
ONE_OF_EACH = {
    "vocab_size": 64,
    "num_hidden_layers": 1,
    "vision_config": {"num_hidden_layers": 1},
    "cross_vision_config": {"layers": 2},
}
if harness.SMALLEST:
    SIZES = {
        **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8},
        **{"cross_hidden_size": 64, "cross_compute_hidden_size": 64, "cross_image_size": 56},
        "vision_config": {
            **{"hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "num_hidden_layers": 1},
            **{"image_size": 56, "num_positions": 17},
        },
        "cross_vision_config": {"layers": 2, "width": 64},
    }
    QUARTER, ONE_OF_EACH = QUARTER | SIZES, ONE_OF_EACH | SIZES


@dataclass
class DecoderInputs:
    """One row of text around one image, as the layers of the decoder get it.

    Attributes:
        hidden: [1, TOKENS, hidden_size].
        encoded: [1, S, cross_hidden_size], what the high-resolution tower would give.
        grad: of the output, like ``hidden``.
        route, rotary: of the tokens.
    """

    hidden: Tensor
    encoded: Tensor
    grad: Tensor
    route: TokenRoute
    rotary: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, model: CogAgentModel) -> DecoderInputs:
        """Those of a model, the same in every process."""
        config, device, dtype = model.config, model.device, model.dtype
        types = [LANGUAGE, *[VISION] * IMAGE_TOKENS]
        types = torch.tensor([types + [LANGUAGE] * (TOKENS - len(types))])
        positions = (config.cross_image_size // config.cross_vision_config["patch_size"]) ** 2
        whole = (1, TOKENS, config.hidden_size)
        draw = torch.Generator().manual_seed(3)
        hidden, encoded, grad = (
            torch.randn(shape, generator=draw).to(device, dtype)
            for shape in (whole, (1, positions, config.cross_hidden_size), whole)
        )
        route = TokenRoute.of(types)
        route = replace(route, order=route.order.to(device), places=route.places.to(device))
        rotary = model.layers[0].self_attn.rotary_emb(build_position_ids(types).to(device))
        cos, sin = (part.to(dtype) for part in rotary)
        return cls(hidden.requires_grad_(), encoded.requires_grad_(), grad, route, (cos, sin))

    def through(self, layers: nn.ModuleList, encoded: Tensor) -> Tensor:
        hidden = self.hidden
        for layer in layers:
            hidden = layer(hidden, encoded, self.route, None, position_embeddings=self.rotary)
        return hidden


# Decoder layers.


def _whole(dtype: torch.dtype) -> CogAgentForCausalLM:
    """The plain model, the same in every process; its tower gives what it is given."""
    torch.manual_seed(1)
    model = CogAgentForCausalLM(CogAgentConfig(**QUARTER)).to(dtype)
    model.model.cross_vision.forward = lambda encoded: encoded
    return model


def _port(dtype: torch.dtype, layout: ModelLayout, mesh: px.Mesh) -> CogAgentForCausalLM:
    """The same model with nothing merged: what one makes of it linear by linear."""
    model = _whole(dtype)
    regions = tuple(replace(region, merges=False) for region in COGAGENT.regions)
    Replacer(model, Plan(mesh, replace(COGAGENT, regions=regions), layout)).replace_all()
    for layer in model.model.layers:
        attention, cross, mlp = layer.self_attn, layer.cross_attn, layer.mlp
        for reads_whole in (
            attention.vision_expert_query_key_value,
            attention.language_expert_query_key_value,
            cross.query,
            cross.key_value,
            mlp.vision_mlp,
            mlp.language_mlp,
        ):
            reads_whole.register_forward_pre_hook(CopyInput(mesh.tp), with_kwargs=True)
    return model


class Layers:
    """One competitor's layers; called, they do forward and backward and return the seconds."""

    def __init__(self, model: CogAgentForCausalLM) -> None:
        self.model = model.model
        self.inputs = DecoderInputs.of(self.model)

    def forward(self) -> Tensor:
        for tensor in (self.inputs.hidden, self.inputs.encoded, *self.model.parameters()):
            tensor.grad = None
        encoded = self.model.cross_vision(self.inputs.encoded)
        return self.inputs.through(self.model.layers, encoded)

    def __call__(self) -> list[float]:
        start = time.perf_counter()
        self.forward().backward(self.inputs.grad)
        return [time.perf_counter() - start]

    def results(self) -> dict[str, Tensor]:
        """Output and gradients by name."""
        output = self.forward()
        output.backward(self.inputs.grad)
        named = self.model.layers.named_parameters(prefix="model.layers")
        return {
            "output": output.detach(),
            "hidden": self.inputs.hidden.grad,
            "encoded": self.inputs.encoded.grad,
            **{name: parameter.grad for name, parameter in named},
        }

    def collectives(self) -> dict[str, float]:
        """Sums over the ranks and their bytes on one rank, for each layer."""
        _C.reset_collective_counts()
        output = self.forward()
        forward = _C.collective_counts()
        _C.reset_collective_counts()
        output.backward(self.inputs.grad)
        backward = _C.collective_counts()
        return {
            f"{phase}{kind}": counts[f"all_reduce{kind}"] / LAYERS
            for phase, counts in (("forward", forward), ("backward", backward))
            for kind in ("", "_bytes")
        }


def _error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The worst difference, relative to the largest element of its tensor."""
    return max(
        ((found[name].double() - right.double()).abs().max() / right.double().abs().max()).item()
        for name, right in expected.items()
    )


def measure_layers(request: Mapping[str, Any]) -> dict[str, Any]:
    """Rounds, differences, collectives and profiles of ours and the port."""
    dtype, mesh = getattr(torch, request["dtype"]), px.init_mesh(tp=dist.get_world_size())
    expected = Layers(_whole(dtype)).results()
    model = px.parallelize(_whole(dtype), mesh)
    layout = getattr(model, STATE_NAME).layout
    ours, port = Layers(model), Layers(_port(dtype, layout, mesh))
    expected = {
        name: take(tensor, layout[name], mesh.rank) if name in layout else tensor
        for name, tensor in expected.items()
    }
    own, theirs = ours.results(), port.results()
    errors = {
        f"{OURS} and {ONE_PROCESS}": _error(own, expected),
        f"{PORT} and {ONE_PROCESS}": _error(theirs, expected),
        f"{OURS} and {PORT}": _error(own, theirs),
    }
    del expected, own, theirs

    def turn(layers: Layers, shared_memory: bool) -> Callable[[], list[float]]:
        def run() -> list[float]:
            _C.set_shared_memory(shared_memory)
            return layers()

        return run

    turns = {
        OURS: turn(ours, True),
        PORT: turn(port, True),
        OURS_GLOO: turn(ours, False),
        PORT_GLOO: turn(port, False),
    }
    rounds = harness.interleaved(turns, request["repetitions"], warm_up=2)
    profiled = turns if request["profile"] else ()
    return {
        "rounds": [asdict(each) for each in rounds],
        "errors": dict(zip(errors, harness.slowest(list(errors.values())), strict=True)),
        "collectives": {OURS: ours.collectives(), PORT: port.collectives()},
        "profile": {name: harness.profile(turns[name]).top(14) for name in profiled},
    }


def measure_one_process(request: Mapping[str, Any]) -> dict[str, Any]:
    """Rounds of the plain layers."""
    layers = Layers(_whole(getattr(torch, request["dtype"])))
    rounds = harness.interleaved({ONE_PROCESS: layers}, request["repetitions"], warm_up=2)
    return {"rounds": [asdict(each) for each in rounds]}


# One layer of each part of a model.

LOW, ADAPTER, HIGH, DECODER = "EVA2-CLIP-E", "its adapter", "EVA2-CLIP-L", "decoder"
PARTS = (LOW, ADAPTER, HIGH, DECODER)


def layers_run(config: CogAgentConfig) -> dict[str, int]:
    """How many layers of each part a forward runs."""
    return {
        LOW: config.vision_config["num_hidden_layers"],
        ADAPTER: 1,
        HIGH: config.cross_vision_config["layers"] - 1,
        DECODER: config.num_hidden_layers,
    }


def one_layer_each(model: CogAgentModel) -> dict[str, tuple[Callable[[], Tensor], list[Tensor]]]:
    """Part -> the forward of its first layer, and the inputs of that, which want gradients.

    The first block of the high-resolution tower takes this rank's positions itself.
    """
    low, high = model.vision.transformer.layers[0], model.cross_vision.vit.model.blocks[0]
    width, positions = model.config.vision_config["hidden_size"], model.config.image_tokens - 2
    text = DecoderInputs.of(model)
    patches = text.encoded.shape[1]

    def rows(count: int, features: int) -> Tensor:
        draw = torch.Generator().manual_seed(4)
        drawn = torch.randn((1, count, features), generator=draw)
        return drawn.to(model.device, model.dtype).requires_grad_()

    class_and_positions, without_class = rows(positions + 1, width), rows(positions, width)
    class_and_patches = rows(patches + 1, text.encoded.shape[2])
    return {
        LOW: (lambda: low(class_and_positions), [class_and_positions]),
        ADAPTER: (lambda: model.vision.linear_proj(without_class), [without_class]),
        HIGH: (lambda: high(class_and_patches), [class_and_patches]),
        # The sum of the gradient of `encoded` is left out: it is one for all layers.
        DECODER: (
            lambda: text.through(model.layers[:1], text.encoded),
            [text.hidden, text.encoded],
        ),
    }


def measure_parts(request: Mapping[str, Any]) -> dict[str, Any]:
    """Rounds of one layer of each part, in one process or on all ranks."""
    torch.set_default_dtype(getattr(torch, request["dtype"]))  # no weights in fp32 in between
    torch.manual_seed(1)
    model = CogAgentForCausalLM(CogAgentConfig(**ONE_OF_EACH))
    if dist.is_initialized():
        px.parallelize(model, px.init_mesh(tp=dist.get_world_size()))

    def turn(forward: Callable[[], Tensor], inputs: list[Tensor]) -> Callable[[], list[float]]:
        def run() -> list[float]:
            for tensor in (*inputs, *model.parameters()):
                tensor.grad = None
            start = time.perf_counter()
            output = forward()
            output.backward(torch.ones_like(output))
            return [time.perf_counter() - start]

        return run

    turns = {part: turn(*each) for part, each in one_layer_each(model.model).items()}
    rounds = harness.interleaved(turns, request["repetitions"], warm_up=1)
    return {"rounds": [asdict(each) for each in rounds]}


def main() -> None:
    warnings.filterwarnings("ignore")
    request = harness.arguments()
    if request["ranks"] > 1:
        dist.init_process_group("gloo")
    tasks = {"layers": measure_layers, "alone": measure_one_process, "parts": measure_parts}
    harness.finish(tasks[request["task"]](request))


if __name__ == "__main__":
    main()
