"""Loads and saves stream: little memory beyond the shard, every byte once, errors before work."""

from __future__ import annotations

import json
import os
import resource
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import pool
from reference import Tiny, mesh_of, parallel
from reference_memory import needs_peak, peak_growth
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedConfig

import parallel_ext as px
from parallel_ext.io.header_hashes import in_header
from parallel_ext.io.hf_reader import HFDirectory
from parallel_ext.io.safetensors_reader import SafetensorsFile
from parallel_ext.io.safetensors_writer import TensorSpec
from parallel_ext.io.stream import TensorStream, plan_files, plan_turns
from parallel_ext.parallel.state import state_of
from parallel_ext.sharding.layout import ModelLayout, TensorLayout, shard_along, split
from parallel_ext.sharding.named_shards import named_shards
from parallel_ext.sharding.reshard import STRIPE_BYTES

MIB = 2**20


# Memory.


def _large_config() -> LlamaConfig:
    """A model whose embedding takes 1 GiB and the rest almost nothing."""
    return LlamaConfig(
        vocab_size=131073,
        hidden_size=2048,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        dtype="float32",
    )


_EXPERT_MIB = 28


def _large_mixture_config() -> MixtralConfig:
    """One layer, of which each matrix of an expert takes 28 MiB; 0.7 GiB in all."""
    return MixtralConfig(
        vocab_size=128,
        hidden_size=2048,
        intermediate_size=7168,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=4,
        num_local_experts=8,
        dtype="bfloat16",
    )


def _write_sparse(directory: Path, config: PreTrainedConfig) -> None:
    """A large model as a file of holes: it reads as zeros and takes no disk."""
    config.save_pretrained(directory)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    name_of_dtype = {torch.float32: "F32", torch.bfloat16: "BF16"}[config.dtype]
    header, offset = {}, 0
    for name, layout in state_of(px.parallelize(model, px.init_mesh())).layout.in_files().items():
        stop = offset + layout.numel * config.dtype.itemsize
        shape = list(layout.shape)
        header[name] = {"dtype": name_of_dtype, "shape": shape, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header).encode()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)


def _load_and_save(source: Path, target: Path, ep: int = 1) -> dict[str, float]:
    mesh = mesh_of(ep=ep)
    loaded, model = peak_growth(lambda: px.from_pretrained(source, mesh))
    shard = sum(parameter.nbytes for parameter in model.parameters()) / MIB
    saved, _ = peak_growth(lambda: model.save_pretrained(target))
    return {"shard": shard, "load": loaded - shard, "save": saved}


@needs_peak
def test_no_rank_holds_an_expert_of_another_while_it_loads_or_saves(tmp_path: Path) -> None:
    _write_sparse(tmp_path, _large_mixture_config())
    for rank in pool(2).run(_load_and_save, tmp_path, tmp_path / "out", 2):
        assert rank["shard"] > 12 * _EXPERT_MIB, rank
        assert rank["load"] < _EXPERT_MIB, rank
        assert rank["save"] < 2 * _EXPERT_MIB, rank
    names = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert "model.layers.0.block_sparse_moe.experts.7.w3.weight" in names["weight_map"]


@needs_peak
def test_a_gibibyte_of_embedding_takes_little_memory_beyond_the_shard(tmp_path: Path) -> None:
    _write_sparse(tmp_path, _large_config())
    for rank in pool(2).run(_load_and_save, tmp_path, tmp_path / "out"):
        assert rank["shard"] > 512, rank
        assert rank["load"] < 24, rank
        assert rank["save"] < 32, rank
    with SafetensorsFile(tmp_path / "out" / "model-00001-of-00002.safetensors") as file:
        assert file.tensors["model.embed_tokens.weight"].shape == (131073, 2048)


def _train_save_and_load(source: Path, root: Path) -> dict[str, float]:
    model = px.from_pretrained(source, mesh_of())
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    shard = sum(parameter.nbytes for parameter in model.parameters()) / MIB
    saved, _ = peak_growth(lambda: px.save_checkpoint(root, 1, model, optimizer))
    optimizer.state.clear()
    loaded, _ = peak_growth(lambda: px.load_checkpoint(root, model, optimizer))
    return {"shard": shard, "save": saved, "load": loaded - shard}  # the new state


@needs_peak
def test_a_training_checkpoint_takes_little_memory_beyond_the_shards(tmp_path: Path) -> None:
    config = _large_config()
    config.vocab_size //= 4
    _write_sparse(tmp_path, config)
    for rank in pool(2).run(_train_save_and_load, tmp_path, tmp_path / "steps"):
        assert rank["shard"] > 128, rank
        assert rank["save"] < 32, rank
        assert rank["load"] < 24, rank
    files = (tmp_path / "steps" / "step-00000001").rglob("*.safetensors")
    size = sum(path.stat().st_size for path in files)
    assert size < 1.002 * 2 * (tmp_path / "model.safetensors").stat().st_size, "every byte once"


# Bytes.


def _count_bytes(name: str, function: Callable[[], Any]) -> int:
    """Bytes that ``os.<name>`` moves during a call."""
    original, moved = getattr(os, name), 0

    def counting(*args: Any) -> int:
        nonlocal moved
        count = original(*args)
        moved += count
        return count

    with mock.patch.object(os, name, counting):
        function()
    return moved


def _save_counted(directory: Path, max_shard_size: str) -> int:
    model = parallel(Tiny(vocab_size=4099).model(), mesh_of())
    return _count_bytes(
        "pwrite", lambda: model.save_pretrained(directory, max_shard_size=max_shard_size)
    )


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("max_shard_size", ["5GB", "300KB"])
def test_every_byte_but_hashes_is_written_once(
    tmp_path: Path, ranks: int, max_shard_size: str
) -> None:
    written = pool(ranks).run(_save_counted, tmp_path / "out", max_shard_size)
    sizes = [path.stat().st_size for path in (tmp_path / "out").iterdir()]
    with HFDirectory(tmp_path / "out") as saved:
        hashes = sum(len(in_header(text)) for text in {f.hashes for f in saved.file_of.values()})
    assert hashes
    assert sum(written) == sum(sizes) + hashes
    if ranks <= 2:  # two tensors, the embedding and the head, are most of this model
        assert max(written) < sum(sizes) / ranks * 1.25, "the ranks share the work"


def _load_counted(directory: Path) -> tuple[int, int, int]:
    """Bytes read, bytes of the shards that are rows, bytes of whole tensors cut by columns."""
    mesh, models = mesh_of(), []
    read = _count_bytes("preadv", lambda: models.append(px.from_pretrained(directory, mesh)))
    rows = columns = 0
    for _, parameter, layout in named_shards(models[0]):
        if layout.dim == 1:
            columns += layout.numel * parameter.element_size()
        else:
            rows += parameter.nbytes
    return read, rows, columns


def test_a_rank_reads_its_rows_only_and_columns_by_stripes(tmp_path: Path) -> None:
    Tiny(vocab_size=4099).model().save_pretrained(tmp_path)
    with open(tmp_path / "model.safetensors", "rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    for read, rows, columns in pool(2).run(_load_counted, tmp_path):
        assert read == header + rows + columns


# Plans.


@st.composite
def _plans(draw: Any) -> tuple[ModelLayout, list[TensorSpec], int, int]:
    tp = draw(st.integers(1, 5))
    layouts, specs = {}, []
    for index in range(draw(st.integers(1, 8))):
        shape = tuple(draw(st.lists(st.integers(0, 5000), max_size=2)))
        dtype = draw(st.sampled_from([torch.float64, torch.bfloat16, torch.uint8]))
        dim = draw(st.sampled_from([None, *range(len(shape))]))
        name = f"t{index}"
        layouts[name] = (
            TensorLayout(name, shape)
            if dim is None
            else shard_along(name, shape, dim, split(shape[dim], tp))
        )
        specs.append(TensorSpec(name, dtype, shape))
    size = draw(st.sampled_from([1000, 10**6, 10**9]))
    return ModelLayout(layouts, {}), specs, tp, size


@given(_plans())
@settings(max_examples=200)
def test_the_turns_of_a_save_hold_every_row_once_and_in_file_order(plan: Any) -> None:
    layout, specs, writers, size = plan
    files = plan_files(specs, writers, size)
    itemsize = {spec.name: spec.dtype.itemsize for spec in specs}
    turns = list(plan_turns(files, layout, writers))
    for writer in range(writers):
        own = [turn[writer] for turn in turns if turn[writer] is not None]
        mine = [file for file in files if file.writer == writer]
        assert list(dict.fromkeys(turn.file.name for turn in own)) == [file.name for file in mine]
        for file in mine:
            stripes = [stripe for turn in own if turn.file is file for stripe in turn.stripes]
            expected = [
                (spec.name, row)
                for spec in file.tensors
                if spec.num_bytes
                for row in range(spec.shape[0] if spec.shape else 1)
            ]
            rows = [(s.layout.name, row) for s in stripes for row in range(s.start, s.stop)]
            assert rows == expected
        for turn in own:
            sizes = [itemsize[s.layout.name] * torch.Size(s.shape).numel() for s in turn.stripes]
            assert sum(sizes) <= STRIPE_BYTES or len(turn.stripes) == 1


# What is said of a save, and what is found before it begins.


def _save_with_holes(directory: Path) -> list[str]:
    model = parallel(Tiny(dtype=torch.float32).model(), mesh_of())
    with torch.no_grad():
        model.lm_head.weight[1] = float("nan")
        model.model.norm.weight[:3] = float("inf")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.save_pretrained(directory)
    said = [each for each in caught if "NaN" in str(each.message)]
    assert all(each.filename == __file__ for each in said), "a warning points at the user's line"
    return [str(each.message) for each in said]


def test_values_that_are_not_finite_are_counted_and_kept(tmp_path: Path) -> None:
    first, second = pool(2).run(_save_with_holes, tmp_path / "out")
    assert second == []
    assert "147 values are NaN or infinite" in first[0]
    assert "lm_head.weight (144), model.norm.weight (3)" in first[0]
    tensors = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert int(tensors["lm_head.weight"].isnan().sum()) == 144
    assert int(tensors["model.norm.weight"].isinf().sum()) == 3


def test_values_of_every_floating_dtype_are_counted() -> None:
    stream = TensorStream({}, px.init_mesh().control)
    for dtype in (torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        values = torch.tensor([1.0, float("nan"), 2.0, float("nan")]).to(dtype)
        stream._count_non_finite(str(dtype), values)
        stream._count_non_finite("large but finite", torch.full((9,), 400.0).to(dtype))
        stream._count_non_finite("large but finite", torch.full((9,), 1e300, dtype=torch.float64))
    stream._count_non_finite("integers", torch.ones(3, dtype=torch.int64))
    assert stream.non_finite.total() == 10
    assert len(stream.non_finite) == 5


def _save(directory: Path) -> None:
    parallel(Tiny().model(), mesh_of()).save_pretrained(directory)


def test_every_file_says_what_wrote_it(tmp_path: Path) -> None:
    pool(2).run(_save, tmp_path / "out")
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        assert metadata["format"] == "pt"
        note = json.loads(metadata["parallel_ext"])
        assert note == {"version": px.__version__, "vocab_size": 101, "tp": 2, "ep": 1, "dp": 1}


def _save_without_room(directory: Path) -> None:
    model, limits = parallel(Tiny().model(), mesh_of()), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with mock.patch("parallel_ext.io.stream.Swap") as swap:
            model.save_pretrained(directory)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert not swap.called, "the room is reserved before anything is sent"


def test_missing_room_on_the_disk_is_found_before_anything_is_sent(tmp_path: Path) -> None:
    pool(2).run(_save, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    pool(2).assert_raises(_save_without_room, tmp_path / "out", words="File too large")
    assert os.listdir(tmp_path) == ["out"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def _save_and_load_under_a_default_device(directory: Path) -> None:
    model = parallel(Tiny().model(), mesh_of())
    with torch.device("meta"):  # as torch.set_default_device("cuda") does for who has one
        model.save_pretrained(directory)
        full = px.full_state_dict(model, writer_only=False)
        loaded = px.from_pretrained(directory, mesh_of())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name]), name
    assert torch.equal(full["lm_head.weight"], Tiny().model().lm_head.weight)


def test_a_default_device_changes_nothing(tmp_path: Path) -> None:
    pool(2).run(_save_and_load_under_a_default_device, tmp_path / "out")
