"""Training checkpoints of adapters: directories that PEFT reads, resumed on any layout."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
from ranks import pool
from reference import Tiny, assert_within, batch, difference, parallel, quietly, worst
from reference_cogagent import batches_of, picture, text, tiny_model
from reference_cogagent import exact as exact_cogagent
from reference_lora import ALL, BOTH, FILE, config, plain
from reference_mixtral import Layout, TinyMixtral
from safetensors.torch import load_file
from test_cogagent_lora import EVERYWHERE

import parallel_ext as px
from parallel_ext.lora.layers import Adapted
from parallel_ext.sharding.named_shards import named_shards, to_shards
from parallel_ext.sharding.slices import local_part, take

LLAMA, MIXTRAL = Tiny(layers=1, bias=True), TinyMixtral(num_experts=5, layers=1)
LINEARS = {"target_modules": ALL, "r": 16, "lora_dropout": 0.3}
ENDS = {"target_modules": [*ALL, "lm_head", "embed_tokens"], "lora_dropout": 0.1}
WHOLE_BESIDE = {"lora_bias": True, "bias": "all", "modules_to_save": ["lm_head", "norm"]}
EXPERTS = {**BOTH, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
COGAGENT = {**EVERYWHERE, "modules_to_save": ["cross_vision"]}
IMAGES = [[[picture(6)], [text(9)]], [[text(9)], [text(7)]]] * 2


@dataclass(frozen=True)
class Job:
    """An adapter on a model that is spread and trained."""

    tiny: Any = LLAMA  # None is CogAgent
    changes: dict[str, Any] = field(default_factory=lambda: LINEARS)
    layout: Layout = Layout(1, 1, 1)
    zero: int | None = None
    dtype: torch.dtype = torch.float64

    def on(self, layout: Layout, zero: int | None = None) -> Job:
        return Job(self.tiny, self.changes, layout, zero, self.dtype)


def _build(job: Job, seed: int) -> tuple[Any, Any]:
    """A model whose adapter is that of the seed, and an optimizer."""
    mesh = job.layout.mesh() if dist.is_initialized() else px.init_mesh()
    base = tiny_model().train() if job.tiny is None else job.tiny.model()
    base = exact_cogagent(base) if job.tiny is None else base
    with quietly():
        model = parallel(base, mesh)
        torch.manual_seed(seed + mesh.rank)
        model = peft.get_peft_model(model, config(**job.changes)).to(job.dtype)
    if job.zero:
        px.data_parallel(model, mesh, job.zero)
    factors = [p for name, p in model.named_parameters() if "lora_" in name]
    others = [p for name, p in model.named_parameters() if "lora_" not in name]  # frozen too
    groups = [{"params": others}, {"params": factors, "weight_decay": 0.1}]
    return model.train(), torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95))


def _train(job: Job, model: Any, optimizer: Any, steps: range) -> None:
    """Every step has the same four rows, of which a dp rank has those that follow each other."""
    mesh = px.parallel.state.state_of(model).mesh
    for step in steps:
        if job.tiny is None:
            whole, parts = batches_of(IMAGES[step])
            own = whole if mesh.dp_size == 1 else parts[mesh.dp_rank]
        else:
            whole = batch(job.tiny.vocab_size, rows=4, tokens=6, seed=step)
            own = {n: value.chunk(mesh.dp_size)[mesh.dp_rank] for n, value in whole.items()}
        model(**own).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _trained(model: Any) -> dict[str, torch.Tensor]:
    to_shards(model)
    return {
        name: local_part(parameter.detach()).clone()
        for name, parameter, _ in named_shards(model)
        if parameter.requires_grad
    }


def _uninterrupted(job: Job) -> dict[str, torch.Tensor]:
    model, optimizer = _build(job, seed=11)
    _train(job, model, optimizer, range(4))
    return _trained(model)


@lru_cache
def _reference(kind: str) -> dict[str, torch.Tensor]:
    (found,) = pool(1).run(_uninterrupted, KINDS[kind])
    return found


def _save_after_two_steps(job: Job, root: Path) -> None:
    model, optimizer = _build(job, seed=11)
    _train(job, model, optimizer, range(2))
    px.save_checkpoint(root, 2, model, optimizer, data_state={"samples": 8})


def _go_on(
    job: Job, root: Path, reference: dict[str, torch.Tensor], break_it: str = ""
) -> tuple[float, str]:
    """Two more steps from another adapter than the saved one; how far off this is."""
    model, optimizer = _build(job, seed=5)
    restore = Adapted.restore_dropout_masks

    def broken(self: Adapted, adapter: str, key: int, forwards: int) -> None:
        key, forwards = 1 if break_it == "key" else key, 0 if break_it == "count" else forwards
        restore(self, adapter, key, forwards)

    with mock.patch.object(Adapted, "restore_dropout_masks", broken), quietly():
        resumed = px.load_checkpoint(root, model, optimizer)
    assert (resumed.step, resumed.data_state) == (2, {"samples": 8})
    _train(job, model, optimizer, range(2, 4))
    found = _trained(model)
    assert found.keys() == reference.keys()
    rank, layouts = job.layout.mesh().rank, {n: at for n, _, at in named_shards(model)}
    return worst(
        {
            name: difference(value, take(reference[name], layouts[name], rank), reference[name])
            for name, value in found.items()
        }
    )


KINDS = {
    "linears": Job(),
    "ends": Job(changes=ENDS),
    "whole beside": Job(changes=WHOLE_BESIDE),
    "tied": Job(replace(LLAMA, tied=True), {"target_modules": ["embed_tokens", "k_proj"]}),
    "rows of tokens": Job(
        replace(LLAMA, tied=True),
        {"target_modules": ["k_proj"], "trainable_token_indices": [64, 0, 14, 100]},
    ),
    "DoRA": Job(changes={**LINEARS, "use_dora": True}),
    "copies that stay tied": Job(
        replace(LLAMA, tied=True),
        {
            "target_modules": ["k_proj"],
            "modules_to_save": ["embed_tokens"],
            "ensure_weight_tying": True,
        },
    ),
    "experts": Job(MIXTRAL, EXPERTS),
    "CogAgent": Job(None, COGAGENT),
    # whose tokens go two ways, so that only the masks of tp are those of one process
    "CogAgent, dropout": Job(None, {**COGAGENT, "lora_dropout": 0.2}),
}
CHANGES: list[tuple[str, tuple[Layout, int | None], tuple[Layout, int | None]]] = [
    ("linears", (Layout(1, 2, 1), None), (Layout(2, 2, 1), 3)),
    ("linears", (Layout(2, 1, 1), 2), (Layout(1, 4, 1), None)),
    ("ends", (Layout(1, 3, 1), None), (Layout(2, 1, 1), 3)),
    ("ends", (Layout(2, 2, 1), 2), (Layout(1, 1, 1), None)),
    ("whole beside", (Layout(1, 1, 1), None), (Layout(2, 2, 1), 2)),
    ("whole beside", (Layout(2, 1, 1), 3), (Layout(1, 2, 1), None)),
    ("tied", (Layout(2, 1, 1), 3), (Layout(1, 3, 1), None)),
    ("rows of tokens", (Layout(1, 2, 1), None), (Layout(2, 1, 1), 3)),
    ("rows of tokens", (Layout(2, 2, 1), 3), (Layout(1, 3, 1), None)),
    ("copies that stay tied", (Layout(1, 2, 1), None), (Layout(2, 2, 1), 3)),
    ("copies that stay tied", (Layout(2, 1, 1), 3), (Layout(1, 3, 1), None)),
    ("DoRA", (Layout(1, 2, 1), None), (Layout(2, 2, 1), 3)),
    ("DoRA", (Layout(2, 1, 1), 2), (Layout(1, 3, 1), None)),
    ("experts", (Layout(1, 2, 2), None), (Layout(2, 2, 4), 3)),
    ("experts", (Layout(2, 1, 2), 2), (Layout(1, 3, 3), None)),
    ("CogAgent", (Layout(1, 2, 1), None), (Layout(2, 1, 1), 2)),
    ("CogAgent", (Layout(2, 2, 1), 3), (Layout(1, 1, 1), None)),
    ("CogAgent, dropout", (Layout(1, 4, 1), None), (Layout(1, 2, 1), None)),
]


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`")
@pytest.mark.parametrize(("kind", "before", "after"), CHANGES, ids=str)
def test_training_goes_on_as_if_it_had_never_stopped(
    kind: str, before: Any, after: Any, tmp_path: Path
) -> None:
    first, second, reference = KINDS[kind].on(*before), KINDS[kind].on(*after), _reference(kind)
    pool(first.layout.world).run(_save_after_two_steps, first, tmp_path)
    assert_within(pool(second.layout.world).run(_go_on, second, tmp_path, reference), 1e-9)


@pytest.mark.parametrize("what", ["key", "count"])
def test_the_test_above_notices_other_masks(what: str, tmp_path: Path) -> None:
    job, reference = KINDS["linears"].on(Layout(1, 2, 1)), _reference("linears")
    pool(2).run(_save_after_two_steps, job, tmp_path)
    for error, _ in pool(2).run(_go_on, job, tmp_path, reference, what):
        assert error > 1e-3


def _on_the_same_mesh(job: Job, root: Path) -> list[str]:
    """What differs after two steps from before, in bits."""
    expected, differing = _uninterrupted(job), []
    model, optimizer = _build(job, seed=11)
    _train(job, model, optimizer, range(2))
    px.save_checkpoint(root, 2, model, optimizer)
    _train(job, model, optimizer, range(2, 3))
    # a step back in the same model, which remembers its forwards, and in another
    for each in ((model, optimizer), _build(job, seed=5)):
        px.load_checkpoint(root, *each)
        _train(job, *each, range(2, 4))
        found = _trained(each[0])
        assert found.keys() == expected.keys()
        differing += [n for n, value in expected.items() if not torch.equal(found[n], value)]
    return differing


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`")
@pytest.mark.parametrize(
    ("kind", "layout", "zero"),
    [
        ("linears", Layout(2, 2, 1), 3),
        ("ends", Layout(1, 3, 1), None),
        ("experts", Layout(2, 1, 2), 2),
        ("CogAgent, dropout", Layout(2, 1, 1), 3),
    ],
    ids=str,
)
def test_on_the_same_mesh_every_bit_is_that_of_the_uninterrupted_run(
    kind: str, layout: Layout, zero: int | None, tmp_path: Path
) -> None:
    job = replace(KINDS[kind].on(layout, zero), dtype=torch.float32)
    if job.tiny is not None:
        job = replace(job, tiny=replace(job.tiny, dtype=torch.float32))
    for differing in pool(layout.world).run(_on_the_same_mesh, job, tmp_path):
        assert differing == []


# The directory.


def _logits(job: Job, model: Any) -> torch.Tensor:
    inputs = {n: value for n, value in batch(job.tiny.vocab_size).items() if n != "labels"}
    with torch.no_grad():
        return model.eval()(**inputs).logits


def _save_both(job: Job, root: Path) -> torch.Tensor:
    """Saves a model in both ways; its logits."""
    model, optimizer = _build(job, seed=11)
    _train(job, model, optimizer, range(1))
    px.save_checkpoint(root, 1, model, optimizer)
    model.save_pretrained(root / "plain")
    return _logits(job, model)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`")
@pytest.mark.parametrize("kind", ["ends", "whole beside", "experts"])
def test_peft_reads_the_directory_which_is_that_of_save_pretrained(
    kind: str, tmp_path: Path
) -> None:
    job = KINDS[kind].on(Layout(2, 2, 2) if kind == "experts" else Layout(2, 2, 1), 3)
    logits = pool(4).run(_save_both, job, tmp_path)[0]
    step, saved = tmp_path / "step-00000001", tmp_path / "plain"
    assert px.verify_checkpoint(step) == 1
    names = {FILE, "adapter_config.json", "parallel_state", "COMMIT"}
    assert {path.name for path in step.iterdir()} == names
    found, expected = load_file(step / FILE), load_file(saved / FILE)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    configs = [json.loads((d / "adapter_config.json").read_text()) for d in (step, saved)]
    for each in configs:
        for name in ("target_modules", "target_parameters", "modules_to_save"):
            each[name] = sorted(each[name] or [])
    module = type(job.tiny.model()).__module__
    assert configs[0].pop("auto_mapping")["parent_library"] == module
    del configs[1]["auto_mapping"]  # names the class that FSDP has made
    assert configs[0] == configs[1]
    by_peft = plain(step, job.tiny)
    assert difference(logits, _logits(job, by_peft)) < 1e-9
    state: dict[str, torch.Tensor] = {}
    for path in (step / "parallel_state").glob("optim-*"):
        state |= load_file(path)
    trained = {name for name in found if "base_layer.weight" not in name}
    assert state.keys() == {f"{key}/{n}" for key in ("exp_avg", "exp_avg_sq") for n in trained}
    assert all(value.shape == found[n.partition("/")[2]].shape for n, value in state.items())


# What does not fit.

SMALL = Job(Tiny(layers=1, dtype=torch.float32), {"r": 3}, Layout(1, 2, 1), None, torch.float32)


def _merged_for_good(root: Path) -> list[bool]:
    model = _build(SMALL, seed=1)[0].merge_and_unload()
    px.save_checkpoint(root, 1, model)
    again = parallel(SMALL.tiny.model(), SMALL.layout.mesh())
    px.load_checkpoint(root, again)
    expected = dict(model.named_parameters())
    return [torch.equal(value, expected[name]) for name, value in again.named_parameters()]


def test_a_model_that_took_its_adapter_in_is_saved_whole(tmp_path: Path) -> None:
    assert all(all(same) for same in pool(2).run(_merged_for_good, tmp_path))


def _one_of_two(root: Path) -> tuple[bool, bool]:
    """Save the trained one of two adapters, on other modules, and load it while one is merged."""
    changes = {"r": 3, "lora_dropout": 0.1, "target_modules": ["q_proj"]}
    model = _build(replace(SMALL, changes=changes), seed=1)[0]
    model.add_adapter("frozen", config(r=2, target_modules=["k_proj"], lora_dropout=0.1))
    model.set_adapter("default")
    px.save_checkpoint(root, 1, model)
    trained = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if ".frozen." in n}
    with torch.no_grad():
        for name in trained:
            model.get_parameter(name).zero_()
    model.merge_adapter(["frozen"])
    px.load_checkpoint(root, model)
    return tuple(
        all(torch.equal(model.get_parameter(name), value) for name, value in each.items())
        for each in (trained, frozen)
    )


def test_an_adapter_beside_one_on_other_modules_is_saved_and_loaded(tmp_path: Path) -> None:
    assert pool(2).run(_one_of_two, tmp_path) == [(True, True)] * 2


def _refused(case: str, root: Path) -> None:
    mesh, changes = SMALL.layout.mesh(), SMALL.changes
    model, optimizer = _build(SMALL, seed=1)
    px.save_checkpoint(root, 1, model, optimizer)
    save, load = px.save_checkpoint, px.load_checkpoint
    base = model.base_model.model.model
    if case == "base":
        base.norm.weight.requires_grad_(True)
        save(root, 2, model, optimizer)
    elif case == "several":
        model.add_adapter("second", config())
        model.base_model.set_adapter(["default", "second"])
        save(root, 2, model, optimizer)
    elif case == "state of the base":
        optimizer.state[base.norm.weight]["step"] = torch.tensor(1.0)
        save(root, 2, model, optimizer)
    elif case == "inner model":
        save(root, 2, model.get_base_model(), optimizer)
    elif case == "whole":
        load(root, parallel(SMALL.tiny.model(), mesh))
    elif case == "adapter":
        save(root / "whole", 2, parallel(SMALL.tiny.model(), mesh))
        load(root / "whole", model)
    elif case == "merged":
        model.merge_adapter()
        load(root, model)
    elif case == "optimizer":
        _, *factors = [p for p in model.parameters() if p.requires_grad]
        load(root, model, torch.optim.AdamW([{"params": [base.norm.weight]}, {"params": factors}]))
    else:
        other = OTHER_ADAPTERS[case]
        load(root, _build(replace(SMALL, changes={**changes, **other}), seed=1)[0])


OTHER_ADAPTERS: dict[str, dict[str, Any]] = {
    "rank": {"r": 4},
    "scale": {"lora_alpha": 5, "use_rslora": True},
    "pattern": {"alpha_pattern": {"q_proj": 2}},
    "tokens": {"trainable_token_indices": [7]},
    "fewer targets": {"target_modules": ALL[1:]},
    "more targets": {"target_modules": [*ALL, "lm_head"]},
    "whole module": {"modules_to_save": ["norm"]},
}
Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
REFUSED = {
    "base": "base_model.model.model.norm.weight would be trained, but a checkpoint of an adapter",
    "several": "the model trains 2 adapters, default, second, but a training checkpoint holds",
    "state of the base": "AdamW holds state of base_model.model.model.norm.weight, which is frozen",
    "inner model": "LlamaForCausalLM has adapters, but is no PeftModel",
    "whole": "step-00000001 holds an adapter, but the model has none",
    "adapter": "step-00000002 holds a whole model, but this one has the adapter 'default'",
    "merged": "the adapter 'default' is merged into",
    "optimizer": f"group 1 of the optimizer lacks '{Q_A}'",
    "rank": "holds an adapter of r=3, but that of the model, 'default', has r=4",
    "scale": "lora_alpha=7, use_rslora=False, but that of the model, 'default', has lora_alpha=5",
    "pattern": "alpha_pattern={}, but that of the model, 'default', has alpha_pattern={'q_proj'",
    "tokens": "_indices=None, but that of the model, 'default', has trainable_token_indices=[7]",
    "fewer targets": f"it holds {Q_A}, unknown here",
    "more targets": "it lacks base_model.model.lm_head.lora_A.weight",
    "whole module": "it lacks base_model.model.model.norm.weight",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_on_all_ranks(case: str, tmp_path: Path) -> None:
    pool(2).assert_raises(_refused, case, tmp_path, words=REFUSED[case])
    assert px.verify_checkpoint(px.latest_checkpoint(tmp_path)) == 1
