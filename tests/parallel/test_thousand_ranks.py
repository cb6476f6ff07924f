"""At 1,024 ranks, of which one is simulated: who owns, who reads, and what a plan costs."""

from __future__ import annotations

import copy
import json
import math
import time
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accelerate import init_empty_weights

from parallel_ext.checkpoint.manifest import Manifest
from parallel_ext.io.hashing import FileRecord, chunk_bytes_for
from parallel_ext.io.hf_reader import HFDirectory
from parallel_ext.io.hf_writer import index_of
from parallel_ext.io.places import GAP_BYTES
from parallel_ext.io.reading import Wanted, read_shard
from parallel_ext.io.safetensors_writer import DTYPE_NAMES, TensorSpec
from parallel_ext.io.stream import PlannedFile, plan_files, plan_turns
from parallel_ext.parallel.plan import layout_of
from parallel_ext.parallel.validate import spec_for
from parallel_ext.sharding.layout import ModelLayout, TensorLayout

TP, DTYPE = 8, torch.bfloat16
CONFIGS = {
    "Mixtral-8x7B": transformers.MixtralConfig(),
    "Mixtral of 64 experts": transformers.MixtralConfig(
        num_local_experts=64, intermediate_size=1792
    ),
    "Llama-405B": transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
    ),
}
EP = {"Mixtral-8x7B": 8, "Mixtral of 64 experts": 64, "Llama-405B": 1}
CASES = pytest.mark.parametrize("name", CONFIGS)


@lru_cache
def _model(name: str, layers: int = 2) -> transformers.PreTrainedModel:
    """Of few layers, which differ in their names alone."""
    config = copy.deepcopy(CONFIGS[name])
    config.num_hidden_layers = layers
    with init_empty_weights():
        return transformers.AutoModelForCausalLM.from_config(config)


def _layout(model: transformers.PreTrainedModel, ep: int) -> ModelLayout:
    return layout_of(model, spec_for(model), TP, ep)


def _with_zero(layout: ModelLayout, ep: int, world: int) -> ModelLayout:
    """The layout after ``px.data_parallel``, which shares rows out among the replicas."""
    tensors = {}
    for tensor in layout.tensors.values():
        inner = ep if ".experts." in tensor.name else TP
        columns = [range(first, world, inner) for first in range(inner)]
        tensors[tensor.name] = tensor.shard_rows_further(columns)
    return replace(layout, tensors=tensors)


def _kinds(layouts: Iterable[TensorLayout]) -> set[TensorLayout]:
    return {replace(layout, name="") for layout in layouts}


@CASES
def test_every_element_has_one_owner(name: str) -> None:
    world = TP * 128
    with_zero = _with_zero(_layout(_model(name), EP[name]), EP[name], world)
    for layout in _kinds(with_zero.tensors.values()):
        boxes = [box for rank in range(world) for box in layout.primary_boxes(rank)]
        _check_cover(boxes, layout.shape)


def _check_cover(boxes: list[Any], shape: tuple[int, ...]) -> None:
    """Count in a grid of all borders how many boxes hold each cell."""
    borders = [sorted({0, size}) for size in shape]
    for dim in range(len(shape)):
        borders[dim] = sorted({*borders[dim], *(end for box in boxes for end in box[dim])})
    held = np.zeros([len(each) - 1 for each in borders], dtype=int)
    for box in boxes:
        held[
            tuple(slice(*np.searchsorted(b, side)) for b, side in zip(borders, box, strict=True))
        ] += 1
    assert (held == 1).all()


def test_the_count_of_owners_notices_a_hole_and_an_overlap() -> None:
    _check_cover([((0, 3),), ((3, 7),)], (7,))
    for second in (4, 2):
        with pytest.raises(AssertionError):
            _check_cover([((0, 3),), ((second, 7),)], (7,))


def _specs(layout: ModelLayout) -> list[TensorSpec]:
    return [TensorSpec(each.name, DTYPE, each.shape) for each in layout.in_files().tensors.values()]


def _write_without_bytes(folder: Path, config: Any, files: list[PlannedFile]) -> None:
    """Write a model's directory whose files have headers, and holes for all tensors."""
    config.save_pretrained(folder)
    (folder / "model.safetensors.index.json").write_bytes(index_of(files))
    for file in files:
        header, offset = {}, 0
        for spec in file.tensors:
            header[spec.name] = {
                "dtype": DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [offset, offset + spec.num_bytes],
            }
            offset += spec.num_bytes
        text = json.dumps(header).encode()
        with open(folder / file.name, "wb") as written:
            written.write(len(text).to_bytes(8, "little") + text)
            written.truncate(8 + len(text) + offset)


class _Counted:
    """Stands for the reads of a rank: adds up the bytes of files, and reads none."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.places: list[tuple[Path, int, int]] = []

    def add(self, file: Any, places: Iterable[Any]) -> None:
        for place in places:
            pieces = place.memory(place.start, place.stop)
            self.num_bytes += sum(len(memory) for memory, _ in pieces)
            self.places.append((file.path, place.start, place.stop))


def _gap(layout: TensorLayout) -> int:
    """Bytes of a row that the rank does not hold."""
    return DTYPE.itemsize * layout.shape[1] * (TP - 1) // TP


@CASES
def test_a_rank_reads_its_rows_and_experts_alone(name: str, tmp_path: Path) -> None:
    model, rank = _model(name), 517
    layout = _layout(model, EP[name])
    files = plan_files(_specs(layout), 1)
    assert len(files) > 1
    _write_without_bytes(tmp_path, model.config, files)
    read: dict[str, int] = {}
    with HFDirectory(tmp_path) as directory:
        directory.check(layout.in_files())
        for whole in layout.tensors.values():
            reads = _Counted()
            for part in layout.parts_of(whole.name):
                # The memory of a shard is touched by reads alone.
                shard = torch.empty(whole.local_shape(rank), dtype=DTYPE)
                wanted = Wanted(part.name, whole, part)
                read_shard(directory.file_of[part.name], wanted, shard, rank, reads)
            assert len(set(reads.places)) == len(reads.places)
            read[whole.name] = reads.num_bytes
    sizes = {each.name: DTYPE.itemsize * each.numel for each in layout.tensors.values()}
    for each in layout.tensors.values():
        if ".experts." in each.name:
            expected = sizes[each.name] // EP[name]
        elif each.is_replicated or (each.dim == 1 and _gap(each) < GAP_BYTES):
            expected = sizes[each.name]
        else:
            expected = sizes[each.name] // TP
        assert read[each.name] == expected, each.name
    held = sum(DTYPE.itemsize * math.prod(t.local_shape(rank)) for t in layout.tensors.values())
    gigabytes = [f"{n / 1e9:.2f}" for n in (held, sum(read.values()), sum(sizes.values()))]
    print(f"{name}: holds {gigabytes[0]}, reads {gigabytes[1]} of {gigabytes[2]} GB")


@dataclass
class _Cost:
    seconds: float
    megabytes: float


def _with_cost(function: Callable[[], Any]) -> tuple[Any, _Cost]:
    """What a call returns, its CPU time in up to three tries below a second, and its memory."""
    for _ in range(3):
        start = time.process_time()
        result = function()
        seconds = time.process_time() - start
        if seconds < 1:
            break
    tracemalloc.start()
    function()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return result, _Cost(seconds, peak / 1e6)


@pytest.mark.parametrize("name", ["Mixtral-8x7B", "Llama-405B"])
def test_a_save_of_a_thousand_ranks_is_planned_in_a_second_and_100_mb(name: str) -> None:
    world, ep = 1024, EP[name]
    plain = _layout(_model(name, CONFIGS[name].num_hidden_layers), ep)

    def plan() -> list[PlannedFile]:
        """What each rank computes before it writes its first rows."""
        layout = _with_zero(plain, ep, world).in_files()
        specs = [TensorSpec(each.name, DTYPE, each.shape) for each in layout.tensors.values()]
        files = plan_files(specs, world)
        layouts = dict(layout.tensors)
        for key in ("exp_avg", "exp_avg_sq"):
            states = [replace(spec, name=f"{key}/{spec.name}") for spec in specs]
            layouts |= {
                state.name: layouts[spec.name] for state, spec in zip(states, specs, strict=True)
            }
            several = f"parallel_state/{key}-{{:05}}-of-{{:05}}.safetensors"
            files += plan_files(states, world, single=several, several=several)
        turn = next(plan_turns(files, layouts, world))
        assert len(turn) == world
        return files

    files, of_plan = _with_cost(plan)
    chunk = chunk_bytes_for(sum(file.num_bytes for file in files))
    records = {
        file.name: FileRecord(file.num_bytes, chunk, ("0" * 32,) * -(-file.num_bytes // chunk))
        for file in files
    }
    for other in ("loop.json", "rng.safetensors"):
        records[f"parallel_state/{other}"] = FileRecord(1, chunk, ("0" * 32,))
    tensors = {spec.name: (file.name, spec) for file in files for spec in file.tensors}
    assert len(tensors) == 3 * len(plain.in_files().tensors)
    manifest = Manifest("0" * 32, 1, 1, {}, records, tensors, {})
    content, of_writing = _with_cost(manifest.to_bytes)
    _, of_reading = _with_cost(lambda: Manifest.from_bytes(content, Path("manifest.json")))
    costs = {"plan": of_plan, "manifest written": of_writing, "manifest read": of_reading}
    print(f"{name}: {costs}")
    assert all(cost.seconds < 1 and cost.megabytes < 100 for cost in costs.values())
