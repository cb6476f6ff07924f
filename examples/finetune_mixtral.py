"""Fine-tune any HuggingFace Mixtral on any text file, its experts sharded over ep ranks.

    torchrun --nproc_per_node 4 examples/finetune_mixtral.py MODEL --tp 2 --ep 4 --out OUT

MODEL is a HuggingFace directory or hub id; with ``--from-dense LLAMA`` it is made first, out of a
Llama of which every MLP becomes ``--experts`` experts: a Mixtral with exactly the Llama's loss.
The ranks that ``--tp`` leaves over are data parallel: each takes its share of the ``--rows``.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from finetune_llama import (
    asked_batches,
    continuation,
    finetuning_parser,
    made_by_rank_0,
    of_all_ranks,
    save_and_finish,
    train,
)

import parallel_ext as px

_KEPT = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps"),
    *("rope_parameters", "tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id"),
)


def mixtral_from_dense(dense: str, out: Path, experts: int, top_k: int, layers: int | None) -> None:
    """Write a Mixtral whose experts all start as the MLP of a Llama, which weights of sum 1 keep.

    Args:
        dense: HuggingFace directory or hub id of the Llama.
        out: directory to write, with the tokenizer.
        experts: of each layer.
        top_k: experts that a token goes to.
        layers: take only the first so many; all when None.
    """
    llama = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    numbers = {name: getattr(llama.config, name) for name in _KEPT}
    layers = layers or llama.config.num_hidden_layers
    config = transformers.MixtralConfig(
        **numbers,
        num_hidden_layers=layers,
        num_local_experts=experts,
        num_experts_per_tok=top_k,
        sliding_window=None,
    )
    torch.manual_seed(0)  # for the routers
    mixtral = transformers.MixtralForCausalLM(config)
    state = mixtral.state_dict()
    for name, tensor in llama.state_dict().items():
        if name in state:
            state[name].copy_(tensor)
    for index, layer in enumerate(llama.model.layers[:layers]):
        prefix = f"model.layers.{index}.mlp.experts"
        fused = torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])
        state[f"{prefix}.gate_up_proj"].copy_(fused.expand(experts, -1, -1))
        state[f"{prefix}.down_proj"].copy_(layer.mlp.down_proj.weight.expand(experts, -1, -1))
    mixtral.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(dense).save_pretrained(out)


def own_rows(batch: dict[str, torch.Tensor], mesh: px.Mesh) -> dict[str, torch.Tensor]:
    """This dp rank's share of a batch."""
    return {name: value.chunk(mesh.dp_size)[mesh.dp_rank] for name, value in batch.items()}


def loss_of_job(losses: list[float]) -> list[float]:
    """The mean over the dp ranks, which is the loss of all their rows."""
    return torch.tensor(of_all_ranks(losses), dtype=torch.float64).mean(0).tolist()


def train_watched(
    options: argparse.Namespace, mesh: px.Mesh, model: Any, data: list[dict[str, torch.Tensor]]
) -> dict[str, Any]:
    """``train``, with the metrics of the routing of each step if they are asked for."""
    arguments = (model, data, options.learning_rate, px.clip_grad_norm_, mesh.rank != 0)
    if not options.routing:
        return train(*arguments)
    routing: list[dict[str, float]] = []
    with px.RoutingMetrics(model, options.routing) as metrics:

        def keep(step: int) -> None:
            routing.append(metrics.step(options.first + step))

        return train(*arguments, after_step=keep) | {"routing": routing}


def main() -> None:
    parser = finetuning_parser(__doc__.splitlines()[0])
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts")
    parser.add_argument("--zero", type=int, default=2, choices=(2, 3), help="stage of ZeRO over dp")
    parser.add_argument("--from-dense", help="a Llama to make MODEL from, if it is not there")
    parser.add_argument("--experts", type=int, default=8, help="of the Mixtral that is made")
    parser.add_argument("--top-k", type=int, default=2, help="of the Mixtral that is made")
    parser.add_argument("--layers", type=int, help="of the Mixtral that is made; all by default")
    parser.add_argument("--balance", action="store_true", help="train with the balance loss too")
    parser.add_argument("--check-gradients", action="store_true", help="against one process")
    parser.add_argument("--routing", type=Path, help="JSON lines to append to, for plot_routing.py")
    options = parser.parse_args()

    mesh = px.init_mesh(tp=options.tp, ep=options.ep)
    made_by_rank_0(partial(make_model, options), mesh)
    model = px.from_pretrained(options.model, mesh, dtype=getattr(torch, options.dtype))
    model.config.output_router_logits = options.balance
    px.data_parallel(model, mesh, zero=options.zero)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    data = asked_batches(options, tokenizer, mesh)
    if options.rows % mesh.dp_size:
        raise SystemExit(f"{options.rows} rows are not divisible by dp={mesh.dp_size}")
    own = [own_rows(batch, mesh) for batch in data]

    report: dict[str, Any] = {"tokens": continuation(model, tokenizer, options.prompt)}
    report |= train_watched(options, mesh, model, own)
    report["loss"] = loss_of_job(report["loss"])
    if options.check_gradients:  # experts that start as copies give their router no gradient
        report["gradients"] = px.check_gradients(model.train(), own[0]).worst
        model.eval()
    save_and_finish(options, mesh, model, tokenizer, data[0]["input_ids"], report)


def make_model(options: argparse.Namespace) -> None:
    """Write MODEL if it shall be made and is not there yet."""
    out = Path(options.model)
    if options.from_dense and not (out / "config.json").exists():
        mixtral_from_dense(options.from_dense, out, options.experts, options.top_k, options.layers)


if __name__ == "__main__":
    main()
