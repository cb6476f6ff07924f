"""Modules of a user's own around a parallel model: a decoder, a head, and a loss of the user's."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from ranks import pool
from reference import FLOOR, Tiny, difference, parallel, quietly, refusal
from reference_mixtral import Layout, TinyMixtral
from reference_training import difference_trained, full_difference
from torch import nn

import parallel_ext as px

TINY = Tiny(bias=True)
WIDTH = 8 * TINY.heads
EXACT = FLOOR[torch.float64]


class Scores(transformers.PreTrainedModel):
    """Scores three classes of a text by the hidden state of its last token."""

    config_class = transformers.LlamaConfig
    _supports_sdpa = True

    def __init__(self, config: Any, inner: nn.Module | None = None) -> None:
        super().__init__(config)
        self.inner = transformers.LlamaModel(config) if inner is None else inner
        self.head = nn.Linear(config.hidden_size, 3)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("offset", torch.arange(3.0))
        self.post_init()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if isinstance(self.inner, transformers.LlamaForCausalLM):
            hidden = self.inner(input_ids=ids, output_hidden_states=True).hidden_states[-1]
        else:
            hidden = self.inner(input_ids=ids).last_hidden_state
        return self.head(hidden[:, -1]) + self.offset


def scores(kind: str = "decoder") -> Scores:
    """In one process, the same on every rank."""
    if kind in ("decoder", "model"):
        inner = TINY.model()
        del inner._loss_function
        inner = inner if kind == "model" else inner.model
    else:
        torch.manual_seed(1)
        sizes = {"head_dim": 8, "vocab_size": 101, "hidden_size": WIDTH, "intermediate_size": 50}
        sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes |= {"num_local_experts": 5, "num_experts": 5, "num_experts_per_tok": 2}
        sizes |= {"moe_intermediate_size": 12}
        if kind == "deepseek_v3":
            sizes |= {"q_lora_rank": 5, "kv_lora_rank": 6, "qk_rope_head_dim": 4, "n_group": 1}
            sizes |= {"qk_nope_head_dim": 4, "v_head_dim": 6, "first_k_dense_replace": 1}
            sizes |= {"topk_group": 1, "num_key_value_heads": 4, "head_dim": 4}
        config = transformers.AutoConfig.for_model(kind, **sizes, pad_token_id=0)
        inner = transformers.AutoModel.from_config(config, experts_implementation="eager").train()
    torch.manual_seed(2)
    return Scores(inner.config, inner).double().train()


def split(kind: str, mesh: px.Mesh, zero: int = 2, **options: Any) -> tuple[Scores, Scores]:
    """The model of one process, and the same with a parallel model inside."""
    reference = scores(kind)
    ours = copy.deepcopy(reference)
    with quietly():
        px.parallelize(ours.inner, mesh, **options)
        px.data_parallel(ours, mesh, zero)
    return reference, ours


def losses(
    reference: Scores, ours: Scores, mesh: px.Mesh, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of twelve rows in one process, and of this dp rank's share of them."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(1, 101, (12, 7), generator=generator)
    classes = torch.randint(3, (12,), generator=generator)
    whole = nn.functional.cross_entropy(reference(ids), classes)
    own = slice(*(12 * rank // mesh.dp_size for rank in (mesh.dp_rank, mesh.dp_rank + 1)))
    return whole, nn.functional.cross_entropy(ours(ids[own]), classes[own])


def _trained(kind: str, layout: Layout, zero: int, how: str, **options: Any) -> float:
    mesh = layout.mesh()
    reference, ours = split(kind, mesh, zero, **options)
    if how == "frozen":
        for model in (reference, ours):
            model.inner.requires_grad_(False)
    within = EXACT if kind in EXACTLY else 1e-5
    of_batch = partial(losses, reference, ours, mesh)
    found = difference_trained(reference, ours, of_batch, how == "accumulated", within)
    assert ours.unused.weight.grad is None
    return found


EXACTLY = ["decoder", "model"]  # the norms of others go by fp32


@pytest.mark.parametrize(
    ("kind", "layout", "zero"),
    [
        *(("model", Layout(1, 2, 1), 2), ("model", Layout(2, 2, 1), 3)),
        *(("decoder", Layout(2, 1, 1), 2), ("decoder", Layout(3, 1, 1), 3)),
    ],
    ids=str,
)
def test_it_trains_as_in_one_process(kind: str, layout: Layout, zero: int) -> None:
    assert max(pool(layout.world).run(_trained, kind, layout, zero, "")) <= EXACT


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *(("gemma2", Layout(1, 2, 1)), ("phi3", Layout(1, 2, 1)), ("mixtral", Layout(1, 2, 2))),
        *(("qwen3_moe", Layout(2, 1, 2)), ("mixtral", Layout(2, 2, 4))),
        ("deepseek_v3", Layout(1, 2, 2)),
    ],
    ids=str,
)
def test_decoders_of_other_architectures(kind: str, layout: Layout) -> None:
    assert max(pool(layout.world).run(_trained, kind, layout, 2, "")) <= 1e-5


@pytest.mark.parametrize("how", ["frozen", "accumulated"])
def test_a_frozen_decoder_and_accumulated_gradients(how: str) -> None:
    assert max(pool(4).run(_trained, "decoder", Layout(2, 2, 1), 2, how)) <= EXACT


def _with_own_tokens(kind: str) -> float:
    return _trained(kind, Layout(1, 2, 1), 2, "", sequence_parallel=True)


@pytest.mark.parametrize("kind", ["decoder", "deepseek_v3"])
def test_a_decoder_returns_all_tokens_under_sequence_parallelism(kind: str) -> None:
    assert max(pool(2).run(_with_own_tokens, kind)) <= (EXACT if kind in EXACTLY else 1e-5)


def _used_on_one_rank() -> tuple[float, float]:
    """Only dp rank 0 uses the head, and a part of it only in the second step."""
    mesh = Layout(2, 1, 1).mesh()
    ours = split("decoder", mesh)[1]
    hidden = torch.ones(1, WIDTH, dtype=torch.float64)
    for _ in range(2):
        ids = torch.full((1, 3), 5)
        used = ours(ids).sum() if mesh.dp_rank == 0 else ours.inner(input_ids=ids)[0].sum()
        used.backward()
    found = ours.head.bias.grad.clone()
    ours.zero_grad()
    (ours.head(hidden).sum() * (1 + mesh.dp_rank)).backward()  # nothing of the parallel model
    return (found - 1.0).abs().max().item(), (ours.head.bias.grad - 1.5).abs().max().item()


def test_dp_ranks_may_use_other_parts_of_it() -> None:
    for each in pool(2).run(_used_on_one_rank):
        assert max(each) <= 1e-12


def _later(mesh: px.Mesh, again: bool) -> str:
    """What a step says whose head has its first gradients after the model's, or is another one."""
    ours = split("decoder", mesh)[1]
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    ids = torch.full((1, 3), 5 + mesh.rank)
    ours.inner(input_ids=ids).last_hidden_state.sum().backward()
    optimizer.step()
    torch.manual_seed(3)
    ours.head = nn.Linear(WIDTH, 3).double()
    optimizer.add_param_group({"params": ours.head.parameters()})
    if again:
        px.data_parallel(ours, mesh)
    ours(ids).pow(2).sum().backward()
    return refusal(optimizer.step)


def _first_used_later(mesh: px.Mesh) -> str:
    """What the second step says of a head that nobody averages, and the first has not used."""
    ours = scores()
    px.parallelize(ours.inner, mesh)
    px.data_parallel(ours.inner, mesh)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    ids = torch.full((1, 3), 5 + mesh.rank)
    ours.inner(input_ids=ids).last_hidden_state.sum().backward()
    optimizer.step()
    ours(ids).pow(2).sum().backward()
    return refusal(optimizer.step)


def _stepped_alone(mesh: px.Mesh, averages: bool) -> str:
    """What the optimizer of the head alone says."""
    ours = scores()
    px.parallelize(ours.inner, mesh)
    px.data_parallel(ours if averages else ours.inner, mesh)
    holder = nn.ModuleDict({"system": ours})
    ours(torch.full((1, 3), 5 + mesh.rank)).pow(2).sum().backward()
    return refusal(torch.optim.SGD(holder["system"].head.parameters()).step)


def _with_a_head_on_one_rank(mesh: px.Mesh, averages: bool) -> str:
    """What the optimizer says of a head that rank 0 alone uses."""
    ours = scores()
    px.parallelize(ours.inner, mesh)
    px.data_parallel(ours if averages else ours.inner, mesh)
    ids = torch.full((1, 3), 5 + mesh.rank)
    loss = ours.inner(input_ids=ids).last_hidden_state.sum()
    if mesh.rank == 0:
        loss = loss + ours.head(torch.ones(WIDTH).double()).sum()
    loss.backward()
    return refusal(torch.optim.SGD(ours.parameters(), lr=0.1).step)


def _heads_on_one_rank() -> list[str]:
    mesh = Layout(2, 1, 1).mesh()
    return [_with_a_head_on_one_rank(mesh, averages) for averages in (False, True)]


def test_a_gradient_that_only_one_rank_has_raises_on_all() -> None:
    for alone, averaged in pool(2).run(_heads_on_one_rank, timeout_s=60.0):
        assert "which parameters beside the parallel model have a gradient must be" in alone
        assert "is number 1, of shape (3, " in alone
        assert "on rank 0 and none on rank 1; give px.data_parallel the module" in alone
        assert averaged == "nothing was raised"


def _later_gradients() -> list[str]:
    mesh = Layout(2, 1, 1).mesh()
    later = [_first_used_later(mesh), _later(mesh, again=False), _stepped_alone(mesh, False)]
    return [*later, _later(mesh, again=True), _stepped_alone(mesh, True)]


def test_gradients_that_come_later_must_be_equal_too() -> None:
    for *refused, again, averaged in pool(2).run(_later_gradients):
        for text in refused:
            assert "SGD.step: the norm of the gradients of parameters beside" in text
        assert again == averaged == "nothing was raised"


def _of_other_kinds() -> tuple[float, str, str]:
    """Complex gradients are averaged; sparse ones, and hooks, are refused."""
    mesh = Layout(2, 1, 1).mesh()
    ours = split("decoder", mesh)[1]
    phase = nn.Parameter(torch.tensor(1 + 1j, dtype=torch.complex128))
    ours.table, ours.phase = nn.Embedding(9, 2, sparse=True, dtype=torch.float64), phase
    with torch.no_grad():
        ours.table.weight.fill_(1.0)
    px.data_parallel(ours, mesh)
    ((1 + mesh.dp_rank) * phase.abs()).backward()
    error = abs(phase.grad.item() - 1.5 * (1 + 1j) / 2**0.5)
    sparse = refusal(ours.table(torch.tensor([3])).sum().backward)
    ours.head.weight.register_hook(lambda gradient: gradient)
    return error, sparse, refusal(ours(torch.full((1, 3), 5)).sum().backward)


def test_gradients_of_other_kinds() -> None:
    for error, sparse, hooked in pool(2).run(_of_other_kinds):
        assert error <= 1e-12
        assert "make the embedding with sparse=False" in sparse
        assert f"beside the model, of shape (3, {WIDTH}), has gradient hooks" in hooked


def _files(folder: str) -> float:
    mesh = Layout(2, 2, 1).mesh()
    reference, ours = split("model", mesh)
    ours.save_pretrained(folder)
    ours.inner.save_pretrained(f"{folder}/inner")
    found = transformers.LlamaForCausalLM.from_pretrained(f"{folder}/inner", dtype=torch.float64)
    inner = transformers.LlamaForCausalLM(reference.inner.config).double()
    read = Scores.from_pretrained(folder, inner=inner, dtype=torch.float64)
    return max(
        difference(ours.state_dict()[name], tensor)
        for ours, theirs in ((read, reference), (found, reference.inner))
        for name, tensor in theirs.state_dict().items()
    )


def test_its_own_save_pretrained_writes_full_tensors(tmp_path: Path) -> None:
    assert max(pool(4).run(_files, str(tmp_path))) == 0


def _shards_given(folder: str) -> None:
    ours = split("model", Layout(1, 2, 1).mesh())[1]
    ours.save_pretrained(folder, state_dict=ours.state_dict())


def test_a_state_dict_of_shards_is_not_written(tmp_path: Path) -> None:
    pool(2).assert_raises(_shards_given, str(tmp_path), words="this rank's shards")
    assert not list(tmp_path.iterdir())


def _decoder_from_files(folder: str) -> tuple[str, float]:
    mesh, reference = Layout(1, 2, 1).mesh(), TINY.model().model.eval()
    if mesh.rank == 0:
        reference.save_pretrained(folder)
    torch.distributed.barrier()
    model = px.from_pretrained(folder, mesh)
    ids = torch.arange(14).view(2, 7)
    found = model(input_ids=ids).last_hidden_state
    return type(model).__name__, difference(found, reference(input_ids=ids).last_hidden_state)


def test_a_decoder_is_read_from_its_files(tmp_path: Path) -> None:
    for name, error in pool(2).run(_decoder_from_files, str(tmp_path)):
        assert name == "LlamaModel"
        assert error <= 1e-6  # transformers' norms go by fp32


def _resumed(folder: str) -> float:
    """Two steps at dp = 2, tp = 2, and two more at tp = 4 from what was saved between."""
    kind, mesh = "decoder", Layout(2, 2, 1).mesh()
    reference, ours = split(kind, mesh, 3)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.01)
    for part in (0, 1):
        if part == 1:
            mesh = Layout(1, 4, 1).mesh()
            ours = split(kind, mesh)[1]
            with torch.no_grad():
                for parameter in ours.parameters():
                    parameter.zero_()
        own = torch.optim.AdamW(ours.parameters(), lr=0.01)
        if part == 1:
            assert px.load_checkpoint(folder, ours, own).step == 1
        for step in (2 * part, 2 * part + 1):
            for loss in losses(reference, ours, mesh, step):
                loss.backward()
            for optimizer in (theirs, own):
                optimizer.step()
                optimizer.zero_grad()
        if part == 0:
            at = px.save_checkpoint(folder, 1, ours, own)
            inner = type(reference.inner)(reference.inner.config).double()
            read = Scores.from_pretrained(at, inner=inner, dtype=torch.float64).state_dict()
            expected = reference.state_dict()
            assert max(difference(read[name], expected[name]) for name in expected) <= EXACT
    return full_difference(ours, reference)


def test_a_checkpoint_of_it_is_resumed_on_another_layout(tmp_path: Path) -> None:
    assert max(pool(4).run(_resumed, str(tmp_path))) <= EXACT


def _refusals(folder: str) -> dict[str, str]:
    mesh = Layout(2, 1, 1).mesh()
    found = {}
    ours = split("decoder", mesh)[1]
    both = nn.ModuleList([ours, split("decoder", mesh)[1]])
    found["two"] = refusal(lambda: px.save_checkpoint(folder, 1, both))
    adapted = scores("model")
    with quietly():
        px.parallelize(adapted.inner, mesh)
    adapted.inner = peft.get_peft_model(adapted.inner, peft.LoraConfig(target_modules=["q_proj"]))
    found["adapter"] = refusal(lambda: px.save_checkpoint(folder, 1, adapted))
    drawn = scores()
    equal = drawn.head.weight.detach().clone()
    with torch.no_grad():
        drawn.head.weight += mesh.rank
    px.parallelize(drawn.inner, mesh)
    found["drawn"] = refusal(lambda: px.data_parallel(drawn, mesh))
    with torch.no_grad():
        drawn.head.weight.copy_(equal)
    assert not hasattr(next(drawn.inner.parameters()), "to_local")  # nothing has changed
    px.data_parallel(drawn, mesh, zero=3)
    apart = scores()
    px.parallelize(apart.inner, mesh)
    px.data_parallel(apart.inner, mesh)  # without what is beside it
    ids = torch.full((1, 3), 5 + mesh.rank)
    apart(ids).sum().backward()
    found["apart"] = refusal(torch.optim.AdamW(apart.parameters()).step)
    own = scores("model")
    with quietly():
        px.parallelize(own.inner, mesh, invariant=px.Invariant(blocks=3, leaves=2))
    found["invariant"] = refusal(lambda: px.data_parallel(own, mesh))
    mixture = transformers.MixtralForSequenceClassification(TinyMixtral().config())
    found["mixture"] = refusal(lambda: px.parallelize(mixture, mesh))
    return found


def test_what_is_refused(tmp_path: Path) -> None:
    for found in pool(2).run(_refusals, str(tmp_path)):
        assert "0.head.weight is beside several parallel models, 0.inner, 1.inner" in found["two"]
        assert "an adapter holds nothing else, and head.weight is beside PEFT" in found["adapter"]
        assert "head.weight must be equal on all ranks" in found["drawn"]
        assert "torch.manual_seed" in found["drawn"]
        assert "AdamW.step: the norm of the gradients of parameters beside" in found["apart"]
        assert "give px.data_parallel the module that holds the model" in found["apart"]
        assert "px.Invariant" in found["invariant"]
        assert "MixtralForSequenceClassification is not served" in found["mixture"]


class _WithTwoNames(nn.Module):
    """It holds one model under two names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = self.backbone = model
        self.score = nn.Linear(model.config.hidden_size, 1)


def _full_under_two_names(layout: Layout, folder: str) -> float:
    torch.manual_seed(1)
    plain = _WithTwoNames(Tiny().model())
    torch.manual_seed(1)
    ours, mesh = _WithTwoNames(parallel(Tiny().model(), layout.mesh())), layout.mesh()
    ours.score.load_state_dict(plain.score.state_dict())
    px.data_parallel(ours, mesh)
    full, expected = px.full_state_dict(ours, writer_only=False), plain.state_dict()
    assert full.keys() == expected.keys()
    assert px.save_checkpoint(folder, 1, ours)
    return max(difference(full[name], each) for name, each in expected.items())


@pytest.mark.parametrize("layout", [Layout(1, 2, 1), Layout(2, 1, 1)], ids=str)
def test_a_module_may_hold_a_model_under_two_names(layout: Layout, tmp_path: Path) -> None:
    assert max(pool(2).run(_full_under_two_names, layout, str(tmp_path))) == 0.0
