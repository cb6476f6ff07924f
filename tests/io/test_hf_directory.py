"""Saved models as directories: what two ranks write HuggingFace reads, and the other way round."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from disk_faults import in_child
from ranks import pool
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.distributed.mesh import Mesh, init_mesh
from parallel_ext.io import disk, publish, stream
from parallel_ext.io.hf_reader import HFDirectory
from parallel_ext.io.hf_writer import parse_size, with_old_rope_names, write_directory
from parallel_ext.io.publish import Publication
from parallel_ext.io.safetensors_writer import SafetensorsWriter, TensorSpec
from parallel_ext.io.state_dict import check_shapes, gather_state_dict, local_values
from parallel_ext.io.stream import plan_files
from parallel_ext.parallel.parallelize import parallelize
from parallel_ext.parallel.state import state_of
from parallel_ext.sharding import reshard
from parallel_ext.sharding.layout import ModelLayout, TensorLayout, shard_ranges
from parallel_ext.sharding.named_shards import named_shards
from parallel_ext.sharding.reshard import gather_tensor
from parallel_ext.sharding.slices import take
from parallel_ext.training.data_parallel import data_parallel

VOCAB_SIZE = 101
HEAD = "lm_head.weight"
TABLE = "model.embed_tokens.weight"


def _config(**changes: Any) -> LlamaConfig:
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 24,
        "intermediate_size": 50,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 4,
        "attention_bias": True,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**{**sizes, **changes})


def _model(**changes: Any) -> LlamaForCausalLM:
    """The same weights in every process that asks for the same model."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(_config(**changes))
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too
            parameter.normal_()
    return model


def _parallel(
    changes: dict[str, Any], tp: int = 2, multiple_of: int = 1, dtype: torch.dtype | None = None
) -> tuple[LlamaForCausalLM, Mesh, ModelLayout]:
    mesh = init_mesh(tp=tp, timeout=20)
    model = _model(**changes).to(dtype or torch.float32)
    model = parallelize(model, mesh, vocab_multiple_of=multiple_of)
    return model, mesh, state_of(model).layout


def _save(path: Path, changes: dict[str, Any], max_shard_size: Any = "5GB", **options: Any) -> None:
    model, mesh, layout = _parallel(changes, **options)
    write_directory(
        model,
        path,
        mesh,
        layout,
        config=model.config,
        generation_config=model.generation_config,
        max_shard_size=max_shard_size,
    )


def _save_of(path: Path, options: dict[str, Any]) -> None:
    _save(path, **options)


def _assert_loads_as(path: Path, expected: LlamaForCausalLM) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert loaded.config.vocab_size == VOCAB_SIZE
    ours, theirs = loaded.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor), name


def _files(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


# Writing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({"tie_word_embeddings": True}, {}),
        ({"num_key_value_heads": 1}, {}),  # replicated on both ranks
        ({}, {"multiple_of": 128}),  # rank 1 has no row of the vocabulary
        ({"attention_bias": False, "mlp_bias": True}, {"dtype": torch.bfloat16}),
        ({}, {"tp": 1}),  # two replicas of the whole model
        ({}, {"max_shard_size": 7000}),
    ],
    ids=["untied", "tied", "kv replicated", "empty shard", "bf16", "dp", "many files"],
)
def test_huggingface_reads_bit_for_bit_what_the_ranks_save(
    tmp_path: Path, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    pool(2).run(_save_of, tmp_path / "out", {"changes": changes, **options})
    _assert_loads_as(tmp_path / "out", _model(**changes).to(options.get("dtype", torch.float32)))
    assert os.listdir(tmp_path) == ["out"]


def test_the_configuration_files_are_those_huggingface_writes(tmp_path: Path) -> None:
    pool(2).run(_save_of, tmp_path / "ours", {"changes": {}, "dtype": torch.float16})
    _model().half().save_pretrained(tmp_path / "theirs")
    ours, theirs = _files(tmp_path / "ours"), _files(tmp_path / "theirs")
    config = json.loads(ours["config.json"])
    assert config.pop("rope_theta") == config["rope_parameters"]["rope_theta"]
    assert config == json.loads(theirs["config.json"])
    assert ours["generation_config.json"] == theirs["generation_config.json"]


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_both_transformers_4_and_5_find_how_positions_rotate(tmp_path: Path) -> None:
    """The older one knows ``rope_theta`` and ``rope_scaling`` only, and has defaults for them."""
    rope = {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 16}
    model = _model(rope_parameters=rope)
    parallelize(model, init_mesh()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_theta"] == 5e5
    assert config["rope_scaling"] == {**LLAMA3, "original_max_position_embeddings": 16}
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.rope_parameters == rope
    assert torch.equal(again.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


_LONG = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [4.0]}
_WINDOWS = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
}


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (
            "phi3",  # as Phi-4-mini: transformers 4 takes three fields, by their older names
            {"rope_parameters": {**_LONG, "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            {
                "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [4.0]},
                **{"rope_theta": 1e4, "partial_rotary_factor": 0.5},
            },
        ),
        (
            "gemma3_text",
            {"rope_parameters": _WINDOWS, "head_dim": 4},
            {
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                **{"rope_theta": 1e6, "rope_local_base_freq": 2e4},
            },
        ),
    ],
)
def test_transformers_4_finds_rotations_of_a_part_and_of_windows(
    kind: str, options: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
    }
    config = CONFIG_MAPPING[kind](num_hidden_layers=1, **sizes, **options)
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_bytes(with_old_rope_names(path.read_bytes()))
    assert expected.items() <= json.loads(path.read_text()).items()
    again = AutoConfig.from_pretrained(tmp_path).rope_parameters
    again.pop("type", None)
    assert again == config.rope_parameters


def test_each_tensor_is_in_one_file_written_by_one_rank_within_the_size(tmp_path: Path) -> None:
    pool(2).run(_save_of, tmp_path, {"changes": {}, "max_shard_size": 7000})
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in tmp_path.glob("*.safetensors")}
    held = [(name, file) for file, tensors in files.items() for name in tensors]
    assert sorted(held) == sorted(index["weight_map"].items())
    sizes = [sum(t.nbytes for t in tensors.values()) for tensors in files.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert all(
        size <= 7000 or len(tensors) == 1
        for size, tensors in zip(sizes, files.values(), strict=True)
    )


def test_what_the_previous_save_left_is_gone_and_other_files_stay(tmp_path: Path) -> None:
    out = tmp_path / "out"
    pool(2).run(_save_of, out, {"changes": {}, "max_shard_size": 7000})
    before = set(os.listdir(out))
    (out / "pytorch_model.bin").write_bytes(b"old")
    (out / "tokenizer.json").write_text("words")
    (out / "checkpoint-7").mkdir()
    (out / "checkpoint-7" / "state").write_text("step 7")
    (out / "link").symlink_to("tokenizer.json")
    pool(2).run(_save_of, out, {"changes": {"tie_word_embeddings": True}})
    assert sorted(os.listdir(out)) == [
        "checkpoint-7",
        "config.json",
        "generation_config.json",
        "link",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert len(before) > 6, "the previous save must have had more files for this to show anything"
    assert (out / "checkpoint-7" / "state").read_text() == "step 7"
    assert (out / "link").read_text() == "words"
    _assert_loads_as(out, _model(tie_word_embeddings=True))
    assert os.listdir(tmp_path) == ["out"]


class _FullDisk(SafetensorsWriter):
    """A writer whose disk is full after a few tensors, on rank 1 only."""

    appended = 0

    def append(self, name: str, tensor: torch.Tensor) -> None:
        type(self).appended += 1
        if torch.distributed.get_rank() == 1 and self.appended > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().append(name, tensor)


def _save_on_a_full_disk(path: Path) -> None:
    _FullDisk.appended = 0
    with mock.patch.object(stream, "SafetensorsWriter", _FullDisk):
        _save(path, {"tie_word_embeddings": True})


def test_a_full_disk_on_one_rank_raises_on_all_and_leaves_the_previous_save(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    pool(2).run(_save_of, out, {"changes": {}})
    (out / "tokenizer.json").write_text("words")
    before = _files(out)
    first, second = pool(2).run_raising(_save_on_a_full_disk, out)
    assert "No space left on device" in second.text
    assert second.type == "OSError"
    assert "failed on rank 1" in first.text
    assert "No space left on device" in first.text
    assert _files(out) == before
    assert os.listdir(tmp_path) == ["out"]
    pool(2).run(_save_of, out, {"changes": {}})  # the ranks still work together


def _save_to_a_place_of_its_own(path: Path) -> None:
    _save(path / str(torch.distributed.get_rank()), {})


def test_ranks_that_save_to_different_places_or_sizes_raise(tmp_path: Path) -> None:
    pool(2).assert_raises(
        _save_to_a_place_of_its_own,
        tmp_path,
        error="DisagreementError",
        words=f"save_pretrained to {tmp_path}/1",
    )
    pool(2).assert_raises(
        _save_of,
        tmp_path / "x",
        {"changes": {}, "max_shard_size": "5 apples"},
        words="max_shard_size must be bytes, or text like '5GB', got '5 apples'",
    )
    assert os.listdir(tmp_path) == []


def test_saving_to_a_file_raises_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    words = "file is a file; a directory is needed"
    pool(2).assert_raises(_save_of, tmp_path / "file", {"changes": {}}, words=words)
    assert (tmp_path / "file").read_text() == "mine"


def test_saving_to_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("out")
    with pytest.raises(CheckpointError, match="out is a link that leads back to itself"):
        Publication(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("name", "is_directory", "words"),
    [
        ("adapter_config.json", False, "holds an adapter, which from_pretrained would add"),
        ("config.json", True, "config.json is a directory, but must be a file of the model"),
    ],
)
def test_what_would_be_read_as_part_of_the_model_is_refused(
    name: str, is_directory: bool, words: str, tmp_path: Path
) -> None:
    target = tmp_path / "out"
    (target / name).mkdir(parents=True) if is_directory else target.mkdir()
    if not is_directory:
        (target / name).write_text("{}")
    with pytest.raises(CheckpointError, match=words):
        Publication(target)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_of_others_that_may_not_be_read_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "README.md").write_text("of others")
    sync_path = disk.sync_path

    def refused(path: Path) -> None:
        if path.name == "README.md":
            raise PermissionError(13, "Permission denied", str(path))
        sync_path(path)

    with mock.patch.object(disk, "sync_path", refused), Publication(target) as temporary:
        (temporary / "config.json").write_text("{}")
    assert (target / "README.md").read_text() == "of others"
    assert (target / "config.json").exists()


def _replaced(folder: Path) -> Publication:
    """A directory that is to be replaced, which holds an old file and another directory."""
    target = folder / "out"
    (target / "runs").mkdir(parents=True)
    (target / "config.json").write_text("old")
    publication = Publication(target)
    (publication.temporary / "config.json").write_text("new")
    return publication


def _no_exchange(one: Path, other: Path) -> None:
    raise OSError(errno.EINVAL, "Invalid argument")


def test_a_file_that_is_written_again_is_the_new_one(tmp_path: Path) -> None:
    """Such as the code of a model, which is no file of every save."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "modeling.py").write_text("old")
    (tmp_path / "out" / "notes").write_text("kept")
    with Publication(tmp_path / "out") as temporary:
        (temporary / "modeling.py").write_text("new")
    assert _files(tmp_path) == {"out/modeling.py": b"new", "out/notes": b"kept"}


@pytest.mark.parametrize("interrupted", [False, True], ids=["failed", "interrupted"])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_last_rename_that_does_not_come_puts_the_previous_directory_back(
    at_once: bool, interrupted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publication = _replaced(tmp_path)
    if not at_once:
        monkeypatch.setattr(disk, "exchange", _no_exchange)
    rename, calls = os.rename, []

    def broken(source: Path, destination: Path) -> None:
        calls.append(source)
        if len(calls) == 2 - at_once and not interrupted:
            raise OSError(errno.EIO, "Input/output error")
        if interrupted and at_once:
            raise KeyboardInterrupt
        rename(source, destination)
        if interrupted and len(calls) == 1:
            raise KeyboardInterrupt

    error = pytest.raises(KeyboardInterrupt if interrupted else OSError)
    with mock.patch.object(publish.os, "rename", broken), error:
        publication.publish()
    publication.discard()
    assert _files(tmp_path) == {"out/config.json": b"old"}
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out" / "runs").is_dir()


def test_an_interrupt_behind_the_exchange_keeps_what_the_directory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, calls = disk.exchange, []

    def interrupted(one: Path, other: Path) -> None:
        exchange(one, other)
        calls.append(one)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(disk, "exchange", interrupted)
    with pytest.raises(KeyboardInterrupt), _replaced(tmp_path):
        pass
    assert _files(tmp_path) == {"out/config.json": b"old"}
    assert (tmp_path / "out" / "runs").is_dir()
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("number", [1, 2], ids=["tmp", "old"])
def test_subdirectories_that_a_killed_save_left_are_named(number: int, tmp_path: Path) -> None:
    publication = _replaced(tmp_path)
    original, calls = disk.rename, []

    def killed(*paths: Path) -> None:
        calls.append(paths)
        if len(calls) == number:
            os._exit(7)
        original(*paths)

    def save() -> None:
        with mock.patch.object(disk, "rename", killed):
            publication.publish()

    assert in_child(save) == 7
    (left,) = tmp_path.glob(".out.*")
    assert left.name.startswith(f".out.{'tmp' if number == 1 else 'old'}-")
    assert os.listdir(tmp_path / "out") == ["config.json"]
    with pytest.warns(UserWarning, match=f"{left}.* with subdirectories of {tmp_path}/out: runs;"):
        Publication(tmp_path / "out").discard()
    (left / "runs").rename(tmp_path / "out" / "runs")
    Publication(tmp_path / "out").discard()


@pytest.mark.parametrize("at_once", [True, False])
def test_a_directory_that_is_replaced_is_there_at_any_time(
    at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But between two renames, where the file system cannot let directories change places."""
    publication = _replaced(tmp_path)
    if not at_once:
        monkeypatch.setattr(disk, "exchange", _no_exchange)
    missing = []
    for name in ("exchange", "rename", "sync_path", "discard"):
        original = getattr(disk, name)

        def watched(*paths: Path, original: Any = original) -> None:
            original(*paths)
            missing.append(not (publication.target / "config.json").exists())

        monkeypatch.setattr(disk, name, watched)
    publication.publish()
    assert missing.count(True) == (0 if at_once else 1)
    assert _files(tmp_path) == {"out/config.json": b"new"}
    assert (tmp_path / "out" / "runs").is_dir()
    assert os.listdir(tmp_path) == ["out"]


def test_a_mount_point_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish.os.path, "ismount", lambda path: Path(path) == tmp_path)
    with pytest.raises(CheckpointError, match="is a mount point, which cannot be renamed"):
        Publication(tmp_path)


def test_the_working_directory_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="working directory"):
        Publication(".")


def test_a_working_directory_that_is_gone_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, out = tmp_path / "gone", tmp_path / "out"
    gone.mkdir()
    out.mkdir()
    with monkeypatch.context() as patch:
        patch.chdir(gone)
        gone.rmdir()
        with Publication(out) as temporary:
            (temporary / "config.json").write_bytes(b"new")
    assert (out / "config.json").read_bytes() == b"new"


def test_the_plan_balances_bytes_and_keeps_wide_dtypes_aligned() -> None:
    sizes = [3, 1000, 7, 500, 501, 2, 400]
    dtypes = [torch.bfloat16, torch.float32]
    specs = [TensorSpec(str(n), dtypes[n % 2], (n,)) for n in sizes]
    for writers in (1, 2, 3, 9):
        files = plan_files(specs, writers, 10**6)
        assert sorted(s.name for f in files for s in f.tensors) == sorted(s.name for s in specs)
        assert len({file.writer for file in files}) == min(writers, len(specs))
        loads = [file.num_bytes for file in files]
        if writers <= 3:
            assert max(loads) <= max(sum(loads) / writers * 1.25, 4000)
        for file in files:
            widths = [spec.dtype.itemsize for spec in file.tensors]
            assert widths == sorted(widths, reverse=True)
    assert [file.name for file in plan_files(specs, 1, 10**6)] == ["model.safetensors"]


def test_sizes_are_read_as_huggingface_reads_them() -> None:
    sizes = {"5GB": 5 * 10**9, "1 MiB": 2**20, "300": 300, 7: 7, "1.5GB": 15 * 10**8, ".5kb": 500}
    assert {size: parse_size(size) for size in sizes} == sizes
    for wrong in ("GB", "-1", 0, "1.0001KB", 2.5, True, "1.2.3GB", "5PB"):
        with pytest.raises(ValueError, match="max_shard_size"):
            parse_size(wrong)


# Full state dicts ---------------------------------------------------------------------------------


def _full_state(changes: dict[str, Any], writer_only: bool) -> dict[str, Any]:
    model, mesh, layout = _parallel(changes)
    state = gather_state_dict(model, mesh, layout, writer_only)
    if HEAD in layout.tied and state:
        assert state[HEAD] is state[TABLE]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # what was returned must be a copy
    return {name: tensor.numpy() for name, tensor in state.items()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("writer_only", [False, True])
def test_the_full_state_dict_is_that_of_the_unsharded_model(tied: bool, writer_only: bool) -> None:
    changes = {"tie_word_embeddings": tied}
    expected = _model(**changes).state_dict()
    states = pool(2).run(_full_state, changes, writer_only)
    assert [bool(state) for state in states] == [True, not writer_only]
    for state in filter(None, states):
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(torch.from_numpy(state[name]), tensor), name


def _gathered_on_each(dtype: torch.dtype) -> list[bool]:
    """Gather something that is no parameter, in stripes, on both ranks in turn."""
    mesh = init_mesh(tp=2, timeout=20)
    cases = [
        shard_ranges("rows", (11, 6), 0, (((0, 6),), ((6, 11),))),
        shard_ranges("columns", (7, 10), 1, (((0, 3), (8, 10)), ((3, 8),))),
        shard_ranges("replicas", (8, 3), 0, (((0, 4),), ((0, 4), (4, 8)))),
        shard_ranges("nothing", (5, 3), 0, (((0, 0),), ((0, 5),))),
        TensorLayout("all", (4,)),
        TensorLayout("scalar", ()),
    ]
    right = []
    for layout in cases:
        full = (torch.arange(layout.numel).reshape(layout.shape) % 7).to(dtype)
        shard = take(full, layout, mesh.tp_rank)
        for owner in range(2):
            with mock.patch("parallel_ext.sharding.reshard.STRIPE_BYTES", 40):
                gathered = gather_tensor(shard, layout, mesh, [owner])
            if mesh.tp_rank == owner:
                right.append(torch.equal(gathered.double(), full.double()))
            else:
                right.append(gathered is None)
    return right


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_gathers_any_value_that_is_laid_out_like_a_parameter(dtype: torch.dtype) -> None:
    assert pool(2).run(_gathered_on_each, dtype) == [[True] * 12] * 2


def test_a_model_that_no_longer_fits_its_layout_is_refused() -> None:
    model = _model(tie_word_embeddings=True)
    layout = state_of(parallelize(model, init_mesh())).layout
    local_values(model, layout, 0)
    model.register_buffer("scale", torch.ones(2))
    with pytest.raises(CheckpointError, match="holds scale, added to it since"):
        local_values(model, layout, 0)
    del model.scale
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(CheckpointError, match=r"lm_head.weight was tied to model.embed_tokens"):
        local_values(model, layout, 0)
    model.lm_head.weight = model.model.embed_tokens.weight
    model.model.norm.weight = torch.nn.Parameter(torch.ones(25))
    with pytest.raises(CheckpointError, match=r"norm.weight: expected .*\(24,\).*got \(25,\)"):
        local_values(model, layout, 0)


def _exchange(model: Any, how: str) -> None:
    layers = model.model.layers
    if how == "layers":
        layers[0], layers[1] = layers[1], layers[0]
    elif how == "reversed":
        model.model.layers = torch.nn.ModuleList(reversed(layers))
    elif how == "MLPs":
        layers[0].mlp, layers[1].mlp = layers[1].mlp, layers[0].mlp
    else:
        attention = layers[1].self_attn
        attention.q_proj, attention.o_proj = attention.o_proj, attention.q_proj


def _save_after_exchange(how: str, zero: bool, folder: str) -> None:
    mesh = init_mesh() if zero else init_mesh(tp=2)
    model = parallelize(_model(num_key_value_heads=6), mesh)
    if zero:
        data_parallel(model, mesh)
    _exchange(model, how)
    model.save_pretrained(folder)


@pytest.mark.parametrize("zero", [False, True], ids=["tp", "dp"])
@pytest.mark.parametrize("how", ["layers", "reversed", "MLPs", "projections"])
def test_modules_that_were_moved_are_refused_with_both_their_names(
    how: str, zero: bool, tmp_path: Path
) -> None:
    words = [".weight was model.layers.", " when the model was made parallel"]
    pool(2).assert_raises(
        _save_after_exchange, how, zero, str(tmp_path), words=words, error="CheckpointError"
    )


def test_weights_that_were_tied_too_late_are_told_so() -> None:
    model = _model()
    layout = state_of(parallelize(model, init_mesh())).layout
    model.lm_head.weight = model.model.embed_tokens.weight
    with pytest.raises(CheckpointError, match=r"lacks lm_head.weight, tied since .* before px"):
        local_values(model, layout, 0)


# Reading ------------------------------------------------------------------------------------------


def _load(path: Path, changes: dict[str, Any], dtype: torch.dtype | None) -> list[str]:
    """Load into a model on meta; the names of the shards that are not as they should be."""
    mesh = init_mesh(tp=2, timeout=20)
    with torch.device("meta"):
        model = LlamaForCausalLM(_config(**changes))
    model = parallelize(model, mesh)
    model.model.norm.weight.requires_grad_(False)
    with HFDirectory(path) as directory:
        directory.check(state_of(model).layout)
        directory.load_into(model, mesh, state_of(model).layout, "load", dtype)
    expected, wrong = _model(**changes).state_dict(), []
    for name, parameter, layout in named_shards(model):
        shard = take(expected[name], layout, mesh.tp_rank).to(dtype or torch.float32)
        if parameter.dtype != shard.dtype or not torch.equal(parameter, shard):
            wrong.append(name)
        if parameter.requires_grad == (name == "model.norm.weight"):
            wrong.append(f"{name}.requires_grad")
        if parameter.untyped_storage().nbytes() != shard.nbytes:
            wrong.append(f"{name} holds more than its shard")
    if (
        model.lm_head.weight is model.model.embed_tokens.weight
    ) != model.config.tie_word_embeddings:
        wrong.append("tie")
    return wrong


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, {"num_key_value_heads": 1}],
    ids=["untied", "tied", "kv replicated"],
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_shard_size", ["5GB", "7KB"])
def test_each_rank_reads_exactly_its_slices(
    tmp_path: Path, changes: dict[str, Any], dtype: torch.dtype | None, max_shard_size: str
) -> None:
    _model(**changes).save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert pool(2).run(_load, tmp_path, changes, dtype) == [[], []]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """An untied model as HuggingFace saves it, in one file."""
    _model().save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def _layout(**changes: Any) -> ModelLayout:
    return state_of(parallelize(_model(**changes), init_mesh())).layout


def _add_head(path: Path, head: torch.Tensor) -> None:
    """Put a head into ``model.safetensors``."""
    tensors = {**load_file(path / "model.safetensors"), HEAD: head}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def _refused(path: Path, layout: ModelLayout) -> str:
    with pytest.raises(CheckpointError) as raised, HFDirectory(path) as directory:
        directory.check(layout)
    assert str(path) in str(raised.value)
    return str(raised.value)


def test_a_long_list_of_problems_is_cut_short(saved: Path) -> None:
    message = _refused(saved, _layout(hidden_size=36))
    assert message.count("has the shape") == 8
    assert "more" in message


def test_a_tied_alias_may_be_present_if_it_is_equal(tmp_path: Path) -> None:
    _model(tie_word_embeddings=True).save_pretrained(tmp_path)
    table = load_file(tmp_path / "model.safetensors")[TABLE]
    layout = _layout(tie_word_embeddings=True)
    _add_head(tmp_path, table.clone())
    with HFDirectory(tmp_path) as directory, mock.patch.object(reshard, "STRIPE_BYTES", 1000):
        directory.check(layout)
    table[100, 23] += 1
    _add_head(tmp_path, table)
    message = _refused(tmp_path, layout)
    assert f"{HEAD} differs from {TABLE}" in message
    assert "untie them in the configuration: tie_word_embeddings=False" in message
    with HFDirectory(tmp_path) as directory:
        directory.check(_layout(tie_word_embeddings=False))
    _add_head(tmp_path, table[:100].clone())
    assert f"{HEAD} in model.safetensors has the shape (100, 24)" in _refused(tmp_path, layout)


def test_nothing_changes_when_a_tensor_cannot_be_read(saved: Path) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(_config())
    parallelize(model, mesh := init_mesh())
    with HFDirectory(saved) as directory:
        os.truncate(saved / "model.safetensors", (saved / "model.safetensors").stat().st_size - 4)
        with pytest.raises(CheckpointError, match="or it was changed"):
            directory.load_into(model, mesh, state_of(model).layout, "load")
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_tensor_of_another_shape_than_its_shard_is_refused() -> None:
    layout = _layout()
    shape = layout[TABLE].local_shape(0)
    for wrong in (torch.ones(3, 5), torch.empty(shape, device="meta")):
        with pytest.raises(CheckpointError, match=rf"{TABLE}: expected a shard of shape .* on "):
            check_shapes({TABLE: wrong}, layout, 0)
    check_shapes({TABLE: torch.ones(shape)}, layout, 0)
