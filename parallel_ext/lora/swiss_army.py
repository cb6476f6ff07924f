"""Adapters that SwissArmyTransformer trained on CogAgent, made into plain PEFT adapters.

A checkpoint is a folder. Its file ``latest`` names a folder in it, into which each model-parallel
rank wrote ``mp_rank_00_model_states.pt`` with its own number: a pickled dict whose ``module`` is
the rank's state dict. An adapted layer ``L`` keeps its weight in ``L.original.weight``, and has one
pair of factors for each matrix that is joined in its rows (query, key and value, or key and value):
``L.matrix_A.j``, [r, in], and ``L.matrix_B.j``, [out / joined, r]. To its output it adds
``lora_alpha / r * cat_j(B_j A_j x)``. Matrices, heads and rotary pairs lie in the order of the
weights for transformers.

At a model-parallel size above 1, layers whose rows are sharded hold all of ``A_j`` and of each
``B_j`` a shard of its rows, in order. Layers whose columns are sharded (``dense``) hold what no
adapter can: every rank trained a ``B`` of its own and added only its own share, after the sum over
the ranks.

Formats and names: https://github.com/THUDM/SwissArmyTransformer, ``sat/model/finetune/lora2.py``,
and https://github.com/THUDM/CogVLM, ``utils/models/cogagent_model.py``.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import peft
import torch
from torch import Tensor

from parallel_ext.checkpoint.source import ADAPTER_NAME
from parallel_ext.distributed.errors import CheckpointError, first_few
from parallel_ext.io.replace_files import replaced_files
from parallel_ext.io.safetensors_writer import write_tensors
from parallel_ext.lora.swiss_army_files import FACTOR, SavedRank, Source, read_ranks
from parallel_ext.models.cogagent.configuration import CogAgentConfig
from parallel_ext.models.cogagent.modeling import CogAgentForCausalLM

# In a layer: theirs -> ours, matrices joined in its rows, whether ranks shard its columns.
_DECODER = {
    "attention.query_key_value": ("self_attn.language_expert_query_key_value", 3, False),
    "attention.dense": ("self_attn.language_expert_dense", 1, True),
    "cross_attention.query": ("cross_attn.query", 1, False),
    "cross_attention.key_value": ("cross_attn.key_value", 2, False),
    "cross_attention.dense": ("cross_attn.dense", 1, True),
}
_TOWER = {
    "attention.query_key_value": ("attention.query_key_value", 3, False),
    "attention.dense": ("attention.dense", 1, True),
}

# Parameters beside the factors: those that CogAgent's published trainer trains, and others.
_TRAINED = re.compile(
    r"mixins\.(encoder|eva\.(vit_model|linear_proj|boi|eoi)|(mlp|rotary)\.vision_\w+)\b"
    r"|transformer\.layers\.\d+\.(cross_attention|post_cross_attention_layernorm)\b"
)
_FROZEN = re.compile(
    r"transformer\.(word_embeddings|final_layernorm)\."
    r"|transformer\.layers\.\d+\.(attention|mlp|input_layernorm|post_attention_layernorm)\."
    r"|mixins\.(mlp\.gate_proj|lm\.lm_head|rotary\.rotary_emb|eva\.pos_embed)\b"
)


class _Linear(NamedTuple):
    """A layer of ours that can have been adapted.

    Attributes:
        name: of the module.
        shape: of its weight, [out, in].
        joined: how many matrices are joined in its rows.
        columns_sharded: whether model-parallel ranks shard its columns, not its rows.
    """

    name: str
    shape: tuple[int, ...]
    joined: int
    columns_sharded: bool


def import_swiss_army_lora(
    source: Source,
    out: str | os.PathLike[str],
    *,
    config: CogAgentConfig,
    lora_alpha: float = 1,
    adapters_only: bool = False,
    allow_pickle: bool = False,
) -> None:
    """Write the LoRA of a SwissArmyTransformer checkpoint as a PEFT adapter for our CogAgent.

    The adapter is exactly what was trained: of a layer of 3 joined matrices, ``lora_A`` is the
    stack of the three A, [3r, in], ``lora_B`` is block-diagonal, [out, 3r], and its alpha is three
    times ``lora_alpha``, so that the scale stays ``lora_alpha / r``. Factors keep their dtype.

    One process calls it, without a job. A file is read into memory whole, one after the other.

    Args:
        source: the folder of a checkpoint, or a folder or file in it; a safetensors file or a
            state dict with the same names; or a list of one of these for each model-parallel rank.
        out: a directory for ``adapter_model.safetensors`` and ``adapter_config.json``; made if it
            is not there.
        config: of the model that was adapted.
        lora_alpha: what the trainer used; 1, as by default, in the published script. No file says.
        adapters_only: import the adapters though the checkpoint also holds layers that the
            published trainer trains in full beside them (vision experts, cross attention, image
            towers). An adapter cannot hold these: they are left out, and on the published weights
            the model is not the one that was trained, unless your trainer kept them frozen.
        allow_pickle: read a file that holds more than tensors, numbers and texts. That RUNS CODE
            out of the file: only for files whose origin you trust. Without it none is ever run.

    Raises:
        CheckpointError: the checkpoint is damaged; holds no adapters, or factors that are missing,
            unknown, of a wrong shape, not finite, or different where ranks hold replicas; holds
            something that would be lost; was trained at a model-parallel size above 1 with adapters
            on ``dense``; was saved by ZeRO-3. Nothing is written.
        FileExistsError: ``out`` holds an adapter.

    Example:
        >>> import tempfile, peft, torch
        >>> from parallel_ext.models.cogagent import CogAgentConfig
        >>> config = CogAgentConfig(num_hidden_layers=1)
        >>> name = "transformer.layers.0.cross_attention.key_value.matrix_{}.{}"
        >>> trained = {name.format("A", j): torch.randn(8, 1024) for j in range(2)}
        >>> trained |= {name.format("B", j): torch.randn(1024, 8) for j in range(2)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     import_swiss_army_lora(trained, folder, config=config)
        ...     peft.LoraConfig.from_pretrained(folder).rank_pattern
        {'key_value': 16}
    """
    folder = Path(out)
    if (folder / ADAPTER_NAME).exists():
        raise FileExistsError(
            f"{folder / ADAPTER_NAME} is there already; import into another directory"
        )
    if not math.isfinite(lora_alpha):
        raise ValueError(f"lora_alpha must be a finite number, got {lora_alpha}")
    ranks = read_ranks(source, allow_pickle)
    for one in ranks:
        _check_beside(one, adapters_only)
    first = ranks[0]
    r = next((f.shape[0] for n, f in first.factors.items() if ".matrix_A." in n and f.ndim), 0)
    if r == 0:
        raise CheckpointError(
            f"{first.where}: there are no adapters in it (matrix_A.0, ...); it was trained without "
            "LoRA, or they were merged into the weights"
        )
    linears = _linears(config)
    if problems := list(_problems(ranks, linears, r)):
        raise CheckpointError(f"{first.where}: {first_few(problems, between='; ')}")
    adapted = sorted({FACTOR.fullmatch(name)[1] for name in first.factors})
    fused = {
        linears[path].name.rpartition(".")[2]: linears[path].joined
        for path in adapted
        if linears[path].joined > 1
    }
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM",
        inference_mode=True,
        r=r,
        lora_alpha=lora_alpha,
        target_modules=[linears[path].name for path in adapted],
        rank_pattern={name: joined * r for name, joined in fused.items()},
        alpha_pattern={name: joined * lora_alpha for name, joined in fused.items()},
    )
    with replaced_files(folder, last=ADAPTER_NAME) as temporary:  # what an import finds there
        write_tensors(temporary / ADAPTER_NAME, _adapter(ranks, linears, adapted))
        lora.save_pretrained(os.fspath(temporary))


# --- Checks ---


def _check_beside(one: SavedRank, adapters_only: bool) -> None:
    """Raise if a tensor beside the adapters was trained, or is unknown, and would be lost."""
    trained: Counter[str] = Counter()
    for name in one.beside:
        if match := _TRAINED.match(name):
            trained[re.sub(r"\.\d+\.", ".N.", match[0])] += 1
        elif not _FROZEN.match(name):
            raise CheckpointError(
                f"{one.where}: {name} is neither an adapter nor a weight of CogAgent; it would be "
                "lost. Remove it if the adapters do not need it"
            )
    if trained and not adapters_only:
        shown = ", ".join(f"{count} of {name}" for name, count in sorted(trained.items()))
        raise CheckpointError(
            f"{one.where}: beside the adapters there are tensors that the published trainer "
            f"trains in full: {shown}. An adapter cannot hold them, and without them the model is "
            "not the one that was trained. adapters_only=True leaves them out"
        )


def _linears(config: CogAgentConfig) -> dict[str, _Linear]:
    """Map the checkpoint's name of each layer that can have been adapted to our layer."""
    with torch.device("meta"):
        model = CogAgentForCausalLM(config)
    stacks = (
        ("transformer.layers", "model.layers", config.num_hidden_layers, _DECODER),
        (
            "mixins.eva.vit_model.transformer.layers",
            "model.vision.transformer.layers",
            config.vision_config["num_hidden_layers"],
            _TOWER,
        ),
    )
    linears = {}
    for theirs, ours, layers, table in stacks:
        for layer in range(layers):
            for path, (own, joined, columns_sharded) in table.items():
                name = f"{ours}.{layer}.{own}"
                shape = tuple(model.get_submodule(name).weight.shape)
                linears[f"{theirs}.{layer}.{path}"] = _Linear(name, shape, joined, columns_sharded)
    return linears


def _problems(ranks: list[SavedRank], linears: dict[str, _Linear], r: int) -> Iterator[str]:
    """Yield in words why these are not the factors of these layers at LoRA rank ``r``."""
    size = len(ranks)
    shapes: dict[str, tuple[int, int]] = {}
    apart: list[str] = []
    for path in sorted({FACTOR.fullmatch(name)[1] for one in ranks for name in one.factors}):
        if path not in linears:
            yield f"{path} has adapters, but is none of the layers that this format adapts"
            continue
        linear = linears[path]
        if linear.columns_sharded and size > 1:
            apart.append(path)
        rows = linear.shape[0] // linear.joined
        if rows % size:
            yield f"{path}: {size} model-parallel ranks do not divide its matrices of {rows} rows"
        for number in range(linear.joined):
            shapes[f"{path}.matrix_A.{number}"] = (r, linear.shape[1])
            shapes[f"{path}.matrix_B.{number}"] = (rows // size, r)
    if apart:
        yield (
            f"adapters on {len(apart)} dense layers, {apart[0]} first, were trained at "
            f"model-parallel size {size}, where each rank has factors of its own and adds only its "
            "own share: the ranks computed different models, and no adapter equals them all. "
            "Adapters on dense can be imported if they were trained at size 1"
        )
        return
    for one in ranks:
        for name in sorted(shapes.keys() - one.factors.keys()):
            yield f"{name} is missing in {one.where}"
        for name, factor in one.factors.items():
            if name not in shapes:
                if FACTOR.fullmatch(name)[1] in linears:
                    yield f"{name} is one more than the layer joins"
            elif tuple(factor.shape) != shapes[name]:
                yield (
                    f"{name} has the shape {tuple(factor.shape)} in {one.where}, expected "
                    f"{shapes[name]} at LoRA rank {r} and model-parallel size {size}"
                )
            elif not factor.is_floating_point() or not factor.isfinite().all():
                yield f"{name} in {one.where} is not of finite floating-point numbers"
            elif "matrix_A" in name and not torch.equal(factor, ranks[0].factors.get(name, factor)):
                yield (
                    f"{name} differs between {ranks[0].where} and {one.where}, which must hold the "
                    "same; releases before 0.4.11 trained it differently on each rank"
                )


# --- Writing ---


def _adapter(
    ranks: list[SavedRank], linears: dict[str, _Linear], adapted: list[str]
) -> dict[str, Tensor]:
    """Return the tensors of an adapter's file, by name."""
    tensors = {}
    for path in adapted:
        linear = linears[path]
        numbers = range(linear.joined)
        factors_b = (
            torch.cat([one.factors[f"{path}.matrix_B.{number}"] for one in ranks])
            for number in numbers
        )
        saved = f"base_model.model.{linear.name}"
        tensors[f"{saved}.lora_A.weight"] = torch.cat(
            [ranks[0].factors[f"{path}.matrix_A.{number}"] for number in numbers]
        )
        tensors[f"{saved}.lora_B.weight"] = torch.block_diag(*factors_b)
    return tensors
