"""The same bits on any number of tp ranks: losses, norms, and digests of weights and gradients."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from ranks import pool
from reference import Tiny, batch, mesh_of

import parallel_ext as px
from parallel_ext.nn.sharded_module import named_shards
from parallel_ext.sharding.blocks import counted_blocks


def _digests(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Of every block of the weights, gradients and second moments on this rank."""
    rank, found = px.parallel.state.state_of(model).mesh.rank, {}
    for name, parameter, layout in named_shards(model):
        first = layout.ranges(rank)[0][0] if layout.dim is not None else 0
        for start, stop in counted_blocks(layout, rank):
            for kind, tensor in (
                ("weight", parameter),
                ("gradient", parameter.grad),
                ("moment", optimizer.state[parameter]["exp_avg_sq"]),
            ):
                block = tensor.detach().narrow(layout.dim or 0, start, stop - start).contiguous()
                data = block.flatten().view(torch.uint8).numpy()
                found[f"{kind} of {name} at {first + start}"] = hashlib.sha256(data).hexdigest()
    return found


def _train(tiny: Tiny, blocks: int, steps: int, options: dict[str, Any]) -> tuple[Any, ...]:
    torch.set_num_threads(options.get("threads", 1))
    model = tiny.model()
    if options.get("checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": options["checkpointing"] == 2})
    invariant = px.Invariant(blocks) if options.get("invariant", True) else None
    model = px.parallelize(model, mesh_of(), invariant=invariant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    log = []
    for step in range(steps):
        loss = model(**batch(tiny.vocab_size, 2, 19, seed=step)).loss
        loss.backward()
        norm = px.clip_grad_norm_(model, 0.5)
        optimizer.step()
        log.append((loss.item().hex(), norm.item().hex()))
        if step < steps - 1:
            optimizer.zero_grad()
    torch.set_num_threads(1)
    digest = px.digest(model) if invariant else None
    return log, _digests(model, optimizer), digest


KINDS = {
    "odd": Tiny(dtype=torch.float32, inner=145),
    "tied": Tiny(dtype=torch.float32, inner=145, tied=True),
    "bf16": Tiny(dtype=torch.bfloat16, inner=145),
    "shared heads": Tiny(dtype=torch.float32, heads=8, key_value_heads=2, inner=33),
    "wide": Tiny(dtype=torch.float32, heads=8, key_value_heads=4, inner=512, vocab_size=257),
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_tp_has_the_bits_of_one_process(kind: str) -> None:
    tiny = KINDS[kind]
    ((log, whole, digest),) = pool(1).run(_train, tiny, 8, 4, {})
    for tp in (2, 3) if tiny.key_value_heads == 3 else (2, 3, 4):
        results = pool(tp).run(_train, tiny, 8, 4, {})
        found = {}
        for own_log, own, own_digest in results:
            assert own_log == log
            assert own_digest == digest
            assert not found.keys() & own.keys()
            found |= own
        assert {name for name in whole if found.get(name) != whole[name]} == set()
        assert found.keys() == whole.keys()
