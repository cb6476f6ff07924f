"""The modules of a model under ``px.Invariant``: blocks in the place of plain layers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from types import MethodType
from typing import Any

import torch
import transformers.activations
from torch import nn

from parallel_ext import ops
from parallel_ext.distributed.mesh import Mesh
from parallel_ext.models._transformers_private import attention_of
from parallel_ext.models.invariant import attention_blocks, check_attention, check_can_be_invariant
from parallel_ext.models.mixture_names import MixtureNames
from parallel_ext.models.spec import HeadSizes, ModelSpec
from parallel_ext.models.sublayers import AttentionNames, RegionNames
from parallel_ext.nn.blocks import (
    BlockColumnLinear,
    BlockExperts,
    BlockExpertsOfWeighedTokens,
    BlockHeadNorm,
    BlockNorm,
    BlockRowLinear,
    ComputedTogether,
    FixedErfGelu,
    FixedGelu,
    FixedSilu,
    replicated_linear,
)
from parallel_ext.nn.replicated import check_replicated, fix_replicated
from parallel_ext.nn.rotations import fix_rotations
from parallel_ext.nn.routing import Numerics, fixed_softmax
from parallel_ext.nn.shared_key import SharedKey
from parallel_ext.ops import Blocks
from parallel_ext.parallel.replace import ConfigOfRank, Replacer
from parallel_ext.parallel.validate import dropouts_of
from parallel_ext.sharding.blocks import own_blocks

_SILU = (nn.SiLU, transformers.activations.SiLUActivation)
_GELU = (type(transformers.activations.ACT2FN["gelu_pytorch_tanh"]),)
_ERF_GELU = (transformers.activations.GELUActivation,)
# Torch's bits of an element depend on nothing else: one comparison, and one product.
_SQUARED_RELU = (transformers.activations.ReLUSquaredActivation,)
_ACTIVATIONS = (nn.modules.activation.__name__, transformers.activations.__name__)
_TOKENS_OF_A_GATE = 32768  # torch's grain: of so many elements one thread computes a sigmoid
_OF_ROUTERS = Numerics(replicated_linear, ops.fixed_sigmoid, fixed_softmax)
# Classes of norms of heads: of [..., heads, head_dim], or of [..., heads, tokens, head_dim].
_HEAD_NORMS = (
    *("Qwen3RMSNorm", "Qwen3MoeRMSNorm", "Glm4MoeRMSNorm", "Dots1RMSNorm"),
    *("MellumRMSNorm", "Gemma4RMSNorm", "Gemma4UnifiedRMSNorm"),
)
_TRANSPOSED_HEAD_NORMS = (
    *("Gemma3RMSNorm", "Exaone4RMSNorm", "ExaoneMoeRMSNorm"),
    *("HunYuanDenseV1RMSNorm", "HunYuanMoEV1RMSNorm", "HYV3RMSNorm"),
)
_SCALED_FIRST = {  # norms that are multiplied by what stands here + weight, and then rounded
    **{"Gemma3RMSNorm": 1.0, "Gemma4RMSNorm": 0.0, "Gemma4UnifiedRMSNorm": 0.0},
}
_LATENT_ATTENTION = "parallel_ext_latent"  # its name in transformers


def check_invariant(model: nn.Module, spec: ModelSpec, mesh: Mesh, leaves: int) -> None:
    """Raise a ValueError unless a plain model can be trained with the same bits on any layout."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    check_can_be_invariant(spec, names)
    if mesh.dp_size > leaves:
        raise ValueError(
            f"px.Invariant(leaves={leaves}) divides a batch into fewer parts than dp="
            f"{mesh.dp_size} ranks; leaves= must be at least dp, and equal where runs are compared"
        )
    _check_settings(mesh.device)
    check_attention(model.config, mesh.device)
    if getattr(model.config, "attention_dropout", 0.0):
        raise ValueError(
            "px.Invariant does not serve attention_dropout, whose masks depend on the layout; set "
            "it to 0"
        )
    for place, probability in dropouts_of(model).items():
        raise ValueError(
            f"px.Invariant does not serve the model's own dropout, whose masks depend on the "
            f"layout; set that of {place}, {probability}, to 0"
        )
    for path, sublayer in spec.sublayers(names).items():
        module = model.get_submodule(path)
        if isinstance(sublayer, AttentionNames):
            _check_attention(module, model.config, path, sublayer)
        elif isinstance(sublayer, MixtureNames):
            _check_mixture(model, path, sublayer, mesh)
        elif sublayer in spec.regions:
            _check_region(module, path, sublayer, model.config)
        else:
            for name, child in module.named_children():
                if name not in sublayer.modules() and _fixed(child) is None:
                    raise _of_unknown_activation(f"{path}.{name}", child)
    check_replicated(model)
    if spec.regions:
        for name, child in model.named_modules():
            if type(child).__module__ in _ACTIVATIONS and _fixed(child) is None:
                raise _of_unknown_activation(name, child)


def _fixed(activation: nn.Module) -> nn.Module | None:
    """Return the module of the same activation with fixed bits, None where there is none."""
    by_tanh = type(activation) is nn.GELU and activation.approximate == "tanh"
    if by_tanh or isinstance(activation, _GELU):
        return FixedGelu()
    if isinstance(activation, (nn.GELU, *_ERF_GELU)):
        return FixedErfGelu()
    if isinstance(activation, _SQUARED_RELU):
        return activation
    return FixedSilu() if isinstance(activation, _SILU) else None


def _of_unknown_activation(name: str, activation: nn.Module) -> ValueError:
    return ValueError(
        f"px.Invariant serves SiLU, GELU and squared ReLU, but {name} is a "
        f"{type(activation).__name__}, whose bits may depend on the place of an element"
    )


def _check_attention(module: nn.Module, config: Any, path: str, names: AttentionNames) -> None:
    _check_head_dim(path, module.head_dim)
    sizes = HeadSizes.of(module, config.num_attention_heads)
    if names.full_norms and sizes.query != sizes.key_value:
        raise ValueError(
            f"px.Invariant serves norms over all heads, as {path}.{names.full_norms[0]}, with as "
            f"many key-value heads as query heads, but the model has {sizes.key_value} and "
            f"{sizes.query}"
        )
    for norm in names.head_norms:
        kind = type(module.get_submodule(norm)).__name__
        if kind not in (*_HEAD_NORMS, *_TRANSPOSED_HEAD_NORMS):
            raise ValueError(
                f"px.Invariant serves norms of heads of the classes {', '.join(_HEAD_NORMS)}, "
                f"{', '.join(_TRANSPOSED_HEAD_NORMS)}, but {path}.{norm} is a {kind}"
            )


def _check_region(module: nn.Module, path: str, names: RegionNames, config: Any) -> None:
    if names.in_parts:
        _check_head_dim(path, max(module.qk_head_dim, module.v_head_dim))
        if (attention := attention_of(config)) != "sdpa":
            raise ValueError(
                f"px.Invariant serves attention 'sdpa' through low ranks, as {path}, which has "
                f'{attention!r}: pass attn_implementation="sdpa"'
            )
        return
    if names.heads is None:
        return
    for name, joined in names.inputs.items():
        features = module.get_submodule(name).out_features // joined
        _check_head_dim(path, features // getattr(module, names.heads))


def _check_head_dim(path: str, head_dim: int) -> None:
    if head_dim % 4:
        raise ValueError(
            f"px.Invariant serves heads of a multiple of 4 features, but those of {path} have "
            f"{head_dim}: torch's attention then has other bits on other tp"
        )
    # MKL's kernels for AVX2 then depend on where a thread's buffer lies.
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    if head_dim == 8 and torch.get_num_threads() > 1 and not has_avx512:
        raise ValueError(
            f"px.Invariant serves heads of 8 features, as those of {path}, with one thread a rank "
            "on this CPU without AVX-512: torch's attention then has other bits with other numbers "
            "of threads; set OMP_NUM_THREADS=1"
        )


def _check_settings(device: torch.device) -> None:
    """Raise where torch may choose other kernels for a GPU by how many heads a rank holds.

    Flash attention shares the keys of a head among blocks of threads by the number of heads; the
    math kernel is a batched product of all heads; and only deterministic backwards add in order.
    """
    if device.type != "cuda":
        return
    cuda = torch.backends.cuda
    wanted = {
        'os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before the first product': (
            os.environ.get("CUBLAS_WORKSPACE_CONFIG") in (":4096:8", ":16:8")
        ),
        "torch.use_deterministic_algorithms(True)": torch.are_deterministic_algorithms_enabled(),
        "torch.backends.cuda.enable_flash_sdp(False)": not cuda.flash_sdp_enabled(),
        "torch.backends.cuda.enable_cudnn_sdp(False)": not cuda.cudnn_sdp_enabled(),
        "torch.backends.cuda.enable_math_sdp(False)": not cuda.math_sdp_enabled(),
    }
    if missing := [line for line, is_set in wanted.items() if not is_set]:
        raise ValueError(
            "px.Invariant on a GPU needs kernels that do not depend on how many heads a rank has; "
            "set before parallelize:\n  " + "\n  ".join(missing)
        )


def _check_mixture(model: nn.Module, path: str, names: MixtureNames, mesh: Mesh) -> None:
    module = model.get_submodule(path)
    if mesh.ep_size % mesh.tp_size and mesh.tp_size % mesh.ep_size:
        raise ValueError(
            f"px.Invariant serves a mixture of experts where one of ep and tp divides the other, "
            f"but the mesh has ep={mesh.ep_size} and tp={mesh.tp_size}"
        )
    served = {*names.modules(), names.shared and names.shared.name, names.shared_gate}
    if others := [name for name, _ in module.named_children() if name not in served]:
        raise ValueError(
            f"px.Invariant does not serve {path}.{others[0]} beside the experts of a mixture yet"
        )
    if names.jitter_of(model.config) > 0:
        raise ValueError(
            f"px.Invariant does not serve {names.jitter}, whose noise depends on the layout; set "
            "it to 0"
        )
    act_fn = module.get_submodule(names.experts).act_fn
    if not isinstance(act_fn, _SILU):
        raise ValueError(
            f"px.Invariant serves the activation SiLU, but that of {path}.{names.experts} is a "
            f"{type(act_fn).__name__}"
        )


class BlockReplacer(Replacer):
    """The replacement of plain modules by those of blocks."""

    def replace_all(self) -> None:
        super().replace_all()
        if self.spec.regions:
            _replace_activations(self.model)
        fix_replicated(self.model)
        fix_rotations(self.model)

    def head(self) -> None:
        super().head()
        head = self.model.get_submodule(self.spec.head)
        head.blocks = own_blocks(head.layouts["weight"], self.mesh.tp_rank)

    def attention(self, path: str, names: AttentionNames) -> None:
        module, tp = self.model.get_submodule(path), self.mesh.tp
        sizes = HeadSizes.of(module, self.model.config.num_attention_heads)
        heads = attention_blocks(names, sizes, self.options.invariant.blocks)
        of_heads, times = (heads.copies, module.head_dim), heads.repeats
        if names.is_joined:
            layers = {names.query: (*of_heads, (1, times, times))}
        else:
            shared = (*of_heads, (times,))
            layers = {names.query: (), **dict.fromkeys(names.keys_and_values, shared)}
        self._inputs(path, layers)
        self._outputs(path, names.inputs, [names.output])
        module.num_key_value_groups = 1  # each query head gets a key-value head of its own
        rows, count = module.get_submodule(names.query).blocks[0]
        if names.is_joined:
            own_heads = (rows[-1][1] - rows[0][0]) // module.head_dim
            module.num_key_value_heads = own_heads
            module.config = ConfigOfRank(module.config, num_attention_heads=own_heads)
        own = Blocks(tuple((a // module.head_dim, b // module.head_dim) for a, b in rows), count)
        for name in names.full_norms:
            weight, _, layouts = self.shards(f"{path}.{name}")
            eps = module.get_submodule(name).variance_epsilon
            self.put(f"{path}.{name}", BlockNorm(weight, layouts, eps, tp))
        for name in names.head_norms:
            norm = module.get_submodule(name)
            kind = type(norm).__name__
            eps = norm.eps if kind in _SCALED_FIRST else norm.variance_epsilon
            how = {"transposed": kind in _TRANSPOSED_HEAD_NORMS, "plus": _SCALED_FIRST.get(kind)}
            self.put(f"{path}.{name}", BlockHeadNorm(norm.weight, eps, own, tp, **how))

    joined_attention = attention

    def region(self, path: str, names: RegionNames) -> None:
        if names not in self.spec.regions:  # an MLP
            _replace_activations(self.model.get_submodule(path))
            self._inputs(path, {name: () for name in names.inputs})
            self._outputs(path, names.inputs, names.outputs)
            return
        module, tp = self.model.get_submodule(path), self.mesh.tp
        for name in names.inputs:
            layer = BlockColumnLinear(*self.shards(f"{path}.{name}"), tp, alone=True)
            self.put(f"{path}.{name}", layer)
        if names.heads is not None:  # all its layers have the same blocks of heads
            num_heads = getattr(module, names.heads)
            features = layer.out_features // len(layer.blocks) // num_heads  # of a head
            own, count = layer.blocks[0]
            heads = Blocks(tuple((a // features, b // features) for a, b in own), count)
            setattr(module, names.heads, heads.own[-1][1])
            if names.in_parts:
                module.shared_key = SharedKey(module.qk_rope_head_dim, heads, tp)
                transformers.AttentionInterface.register(_LATENT_ATTENTION, _latent_attention)
                latent = _LATENT_ATTENTION
                module.config = ConfigOfRank(module.config, _attn_implementation=latent)
        self._outputs(path, names.inputs, names.outputs)

    def mixture(self, path: str, names: MixtureNames) -> None:
        routing, mesh = self.routing(path, names, _OF_ROUTERS), self.mesh
        experts = f"{path}.{names.experts}"
        shards = self.shards(experts, (names.gate_up, names.down))
        # Where ep groups lie in tp groups, each computes all tokens: no expert has rows elsewhere.
        tp = mesh.tp if mesh.ep_size >= mesh.tp_size else mesh.ep
        cls = BlockExpertsOfWeighedTokens if names.weighs_inputs else BlockExperts
        self.put(experts, cls(*shards, FixedSilu(), mesh.ep, tp=tp, routing=routing))
        self.block_of_experts(path, names)
        if names.shared_gate is not None:
            gate = self.model.get_submodule(f"{path}.{names.shared_gate}")
            gate.forward = MethodType(_gate_logits, gate)

    def _inputs(self, path: str, layers: Mapping[str, tuple]) -> None:
        """Replace the layers that read one input; ``layers``: what is said about their heads."""
        for name, of_heads in layers.items():
            shards = self.shards(f"{path}.{name}")
            self.put(f"{path}.{name}", BlockColumnLinear(*shards, self.mesh.tp, *of_heads))
        ComputedTogether([*layers]).attach(self.model.get_submodule(path))

    def _outputs(self, path: str, inputs: Iterable[str], outputs: Iterable[str]) -> None:
        """Replace the layers that write hidden states, after those that read them."""
        for name in outputs:
            shards = self.shards(f"{path}.{name}")
            self.put(f"{path}.{name}", BlockRowLinear(*shards, self.mesh.tp))
        self.watch(path, *inputs, *outputs)


def _replace_activations(module: nn.Module) -> None:
    for name, child in list(module.named_modules()):
        if (fixed := _fixed(child)) is not None:
            module.set_submodule(name, fixed)


def _latent_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of :class:`SharedKey` as transformers' "sdpa", of one size of heads.

    Of two sizes torch computes one product of all heads, whose bits may depend on their number.
    """
    heads, size = [query, module.shared_key(key), value], value.size(-1)
    width = max(each.size(-1) for each in heads)
    heads = [nn.functional.pad(each, (0, width - each.size(-1))) for each in heads]
    output, _ = transformers.AttentionInterface()["sdpa"](module, *heads, mask, **options)
    return output[..., :size], None


def _gate_logits(gate: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """Stand for the forward of the gate of a shared expert, whose sigmoid the model takes."""
    if input.device.type == "cpu" and len(input) > _TOKENS_OF_A_GATE:
        raise ValueError(
            f"px.Invariant serves a shared expert in leaves of at most {_TOKENS_OF_A_GATE} tokens, "
            f"but this one has {len(input)}: torch's sigmoid of more has other bits on other "
            "numbers of threads; choose more leaves"
        )
    return replicated_linear(input, gate.weight, gate.bias)
