"""Modules of parallel_ext.nn in a model that is not HuggingFace's, on a plain process group."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import TORCHRUN, finished, run_forked
from ranks import pool
from reference import mesh_of
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from parallel_ext import ops
from parallel_ext.nn import (
    ColumnParallelLinear,
    ExpertParallelExperts,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from parallel_ext.nn.sharded_module import group_of_shards
from parallel_ext.sharding.slices import take

PAGE = Path(__file__).parents[2] / "docs" / "operators.md"
VOCAB, HIDDEN, INNER = 101, 12, 37


def _differences(plain: nn.Module, parallel: nn.Module, rank: int) -> list[float]:
    """How far this rank's gradients are from its parts of the plain module's."""
    layouts = getattr(parallel, "layouts", {})
    found = []
    for name, parameter in parallel.named_parameters():
        full = plain.get_parameter(name).grad
        expected = take(full, layouts[name], rank) if name in layouts else full
        found.append((parameter.grad - expected).abs().max().item() if expected.numel() else 0.0)
    return found


def _dense(bias: bool, tied: bool, logits: bool, broken: bool) -> float:
    torch.manual_seed(3)
    group = ops.Group.of(dist.group.WORLD)
    embedding = nn.Embedding(VOCAB, HIDDEN, padding_idx=4, dtype=torch.float64)
    up, down = (
        nn.Linear(a, b, bias, dtype=torch.float64) for a, b in ((HIDDEN, INNER), (INNER, HIDDEN))
    )
    head = nn.Linear(HIDDEN, VOCAB, bias, dtype=torch.float64)
    if tied:
        head.weight = embedding.weight
    ids, labels = torch.randint(VOCAB, (2, 9)), torch.randint(VOCAB, (18,))
    own_embedding = VocabParallelEmbedding.from_plain(embedding, dist.group.WORLD)
    own_head = VocabParallelHead.from_plain(
        head, group, weight=own_embedding.weight if tied else None
    )
    own_up = ColumnParallelLinear.from_plain(up, group, multiple_of=4)
    own_down = RowParallelLinear.from_sizes(
        INNER, HIDDEN, group, bias=bias, dtype=torch.float64, multiple_of=4
    )
    own_down.load_state_dict(down.state_dict())  # full tensors

    hidden = embedding(ids)
    hidden = hidden + down(up(hidden).relu())
    nn.functional.cross_entropy(head(hidden).flatten(0, 1), labels).backward()

    hidden = own_embedding(ids)
    entered = hidden if broken else ops.copy_to_region(hidden, group)
    hidden = hidden + own_down(own_up(entered).relu())
    if logits:
        nn.functional.cross_entropy(own_head(hidden).flatten(0, 1), labels).backward()
    else:
        own_head.loss(hidden.flatten(0, 1), labels).backward()
    pairs = [(embedding, own_embedding), (up, own_up), (down, own_down), (head, own_head)]
    return max(max(_differences(*pair, group.rank)) for pair in pairs)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("bias", "tied", "logits"), [(True, False, False), (True, False, True), (False, True, False)]
)
def test_gradients_are_those_of_the_plain_modules(
    ranks: int, logits: bool, bias: bool, tied: bool
) -> None:
    assert max(pool(ranks).run(_dense, bias, tied, logits, False)) < 1e-12


def test_a_missing_border_is_noticed() -> None:
    assert max(pool(2).run(_dense, True, False, False, True)) > 1e-4


def _experts(num_experts: int) -> float:
    torch.manual_seed(5)
    group = dist.group.WORLD
    shapes = {"gate_up_proj": (num_experts, 10, 6), "down_proj": (num_experts, 6, 5)}
    plain = nn.Module()
    for name, shape in shapes.items():
        plain.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.float64)))
    plain.act_fn = nn.SiLU()
    tokens = torch.randn(group.size(), 7, 6, dtype=torch.float64)
    choices = torch.rand(group.size(), 7, num_experts).topk(2).indices
    weights = torch.rand(group.size(), 7, 2, dtype=torch.float64)
    own = ExpertParallelExperts.from_plain(plain, group)

    expected = torch.zeros_like(tokens)
    for rank in range(group.size()):
        for token in range(7):
            for expert, weight in zip(choices[rank, token], weights[rank, token], strict=True):
                gate, up = (plain.gate_up_proj[expert] @ tokens[rank, token]).chunk(2)
                out = plain.down_proj[expert] @ (nn.functional.silu(gate) * up)
                expected[rank, token] = expected[rank, token] + weight * out
    expected.square().sum().backward()
    rank = group.rank()
    output = own(tokens[rank], choices[rank], weights[rank])
    output.square().sum().backward()
    return max((output - expected[rank]).abs().max().item(), *_differences(plain, own, rank))


@pytest.mark.parametrize(("ranks", "num_experts"), [(2, 5), (3, 2 + 1)])
def test_experts_are_those_of_one_process(ranks: int, num_experts: int) -> None:
    assert max(pool(ranks).run(_experts, num_experts)) < 1e-11


def _over(ranks: tuple[int, ...]) -> None:
    mesh_of()
    group = dist.new_group(list(ranks))
    if dist.get_rank() not in ranks:
        raise ValueError("not of the group")
    group_of_shards(group)


@pytest.mark.parametrize("ranks", [(0, 2), (1, 2)])
def test_a_group_of_ranks_that_are_not_consecutive_is_refused_on_all(
    ranks: tuple[int, ...],
) -> None:
    words = f"is of ranks {ranks[0]}, {ranks[1]}; a module is sharded over groups of consecutive"
    for rank, error in enumerate(pool(3).run_raising(_over, ranks)):
        assert (words if rank in ranks else "not of the group") in error.text


@pytest.mark.parametrize(
    "option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}]
)
def test_options_of_an_embedding_that_shards_have_not_are_refused(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(ValueError, match=f"the embedding has {name}=.*, which"):
        VocabParallelEmbedding.from_plain(nn.Embedding(7, 3, **option), ops.ALONE)


class Doubled(nn.Linear):
    """A layer with a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def _hooked() -> nn.Module:
    plain = nn.Linear(3, 7)
    plain.register_forward_hook(lambda module, args, output: 2 * output)
    return plain


@pytest.mark.parametrize("parallel", [ColumnParallelLinear, RowParallelLinear, VocabParallelHead])
@pytest.mark.parametrize(
    ("plain", "words"),
    [
        (lambda: nn.Conv1d(3, 7, 1), "takes a torch.nn.Linear, got Conv1d"),
        (lambda: Doubled(3, 7), "this Doubled has a forward, hooks"),
        (_hooked, "this Linear has a forward, hooks"),
        (lambda: weight_norm(nn.Linear(3, 7)), "this ParametrizedLinear has a forward, hooks"),
    ],
)
def test_what_shards_would_lose_is_refused(parallel: Any, plain: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{parallel.__name__}.from_plain.*{words}"):
        parallel.from_plain(plain(), ops.ALONE)


def test_what_is_no_group_is_refused() -> None:
    with pytest.raises(TypeError, match="of which this rank is a member"):
        ColumnParallelLinear.from_plain(nn.Linear(3, 7), dist.GroupMember.NON_GROUP_MEMBER)


def test_experts_with_biases_are_refused() -> None:
    plain = nn.Module()
    for name, shape in (
        ("gate_up_proj", (2, 6, 4)),
        ("down_proj", (2, 4, 3)),
        ("down_bias", (2, 4)),
    ):
        plain.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    with pytest.raises(ValueError, match="experts with down_bias are not supported"):
        ExpertParallelExperts.from_plain(plain, ops.ALONE, nn.SiLU())


def test_what_is_no_tensor_in_a_state_dict_is_torchs_error() -> None:
    layer = ColumnParallelLinear.from_sizes(3, 7, ops.ALONE)
    with pytest.raises(RuntimeError, match="expected torch.Tensor or Tensor-like object"):
        layer.load_state_dict({**layer.state_dict(), "weight": 3.0})


BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_script_of_the_page_prints_the_number_of_one_process(number: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(BLOCKS[number])
    plain, own = finished(run_forked([*TORCHRUN, script])).split()
    assert plain == own
