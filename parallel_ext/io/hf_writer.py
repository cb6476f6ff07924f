"""Write a model as a HuggingFace directory: every byte once, streamed to its writer."""

from __future__ import annotations

import copy
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from decimal import Decimal, InvalidOperation
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from parallel_ext.distributed.mesh import Mesh
from parallel_ext.io import disk
from parallel_ext.io.hf_reader import CONFIG_NAME, INDEX_NAME, progress_as_in_transformers
from parallel_ext.io.publish import Publication
from parallel_ext.io.safetensors_writer import TensorSpec
from parallel_ext.io.same_directory import check_same_directory
from parallel_ext.io.state_dict import local_values
from parallel_ext.io.stream import (
    PlannedFile,
    TensorStream,
    digest_of,
    plan_files,
    warn_of_non_finite,
)
from parallel_ext.sharding.layout import ModelLayout
from parallel_ext.sharding.reshard import part_value

if TYPE_CHECKING:  # they would load most of transformers
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(size: int | str) -> int:
    """Return a number of bytes, given as one or as HuggingFace writes it: ``5GB`` is 5 * 10^9.

    Raises:
        ValueError: it is neither, or no integer of at least 1.

    Example:
        >>> parse_size("5GB")
        5000000000
    """
    match = re.fullmatch(r"([\d.]+)\s*([a-z]*)", str(size).strip(), re.IGNORECASE)
    try:
        num_bytes = Decimal(match[1]) * _UNITS[match[2].upper()]
    except (TypeError, InvalidOperation, KeyError):
        num_bytes = Decimal(0)
    if num_bytes < 1 or num_bytes % 1:
        raise ValueError(f"max_shard_size must be bytes, or text like '5GB', got {size!r}")
    return int(num_bytes)


def values_in_files(
    values: Mapping[str, torch.Tensor], layout: ModelLayout, rank: int
) -> dict[str, torch.Tensor]:
    """Return this rank's shard of every tensor of a model's files, by its name in them."""
    return {
        part.name: part_value(value, layout[name], part, rank)
        for name, value in values.items()
        for part in layout.parts_of(name)
    }


def write_directory(
    model: PreTrainedModel,
    directory: str | os.PathLike[str],
    mesh: Mesh,
    layout: ModelLayout,
    *,
    config: PreTrainedConfig,
    generation_config: GenerationConfig | None = None,
    max_shard_size: int | str = "5GB",
    note: Mapping[str, Any] | None = None,
) -> None:
    """Write a parallel model as a directory that plain ``from_pretrained`` reads.

    Every rank must call it. The first ranks, as many as hold one copy of the model, share the
    tensors out, balanced by bytes; rows stream to the rank that writes them, so that no rank holds
    more than a few stripes of ``STRIPE_BYTES`` beyond its shard. Everything is written beside
    ``directory`` and takes its place at the end. What a previous save left there vanishes; other
    files and subdirectories stay.
    Values that are NaN or infinite are saved as they are, with a warning on rank 0 that counts
    them.

    Args:
        directory: where to; the same absolute path on all ranks.
        layout: where its tensors live, and under which names files hold them; tied aliases are not
            written.
        config: written as ``config.json``, with the dtype and the class of ``model``.
        generation_config: written too, if given.
        max_shard_size: bytes of tensors a file, or text such as ``"5GB"``; one larger tensor is
            alone in its file.
        note: JSON that is kept in every file under ``__metadata__``, key ``parallel_ext``.

    Raises:
        CollectiveTimeout: not all ranks called it, or one was killed or stopped meanwhile.
        DisagreementError: the ranks named different directories, or would write different files.
        CheckpointError, ValueError, OSError: it cannot be saved. All ranks raise the same class;
            the previous directory stays whole.
    """
    directory = os.path.abspath(directory)  # as the ranks name it that join the save of another
    op_name = f"save_pretrained to {directory}"
    mesh.control.barrier(op_name)
    in_files = layout.in_files()

    def plan() -> tuple[dict[str, torch.Tensor], list[PlannedFile]]:
        values = values_in_files(local_values(model, layout, mesh.rank), layout, mesh.rank)
        specs = [TensorSpec(name, v.dtype, in_files[name].shape) for name, v in values.items()]
        return values, plan_files(specs, in_files.copy_size, parse_size(max_shard_size))

    check_same_directory(Path(directory), mesh.control, op_name)
    values, files = mesh.control.run_on_all(op_name, plan)
    mesh.control.barrier(f"{op_name} as {len(files)} files, plan {digest_of(files)}")
    with ExitStack() as cleanup:

        def begin() -> Publication | None:
            if mesh.rank != 0:
                return None
            contents = json_files(model, files, config, generation_config)
            publication = Publication(directory)
            cleanup.callback(publication.discard)
            for name, content in contents.items():
                disk.write_file(publication.temporary / name, content)
            return publication

        def finish() -> None:
            if publication is not None:
                publication.publish()

        publication = mesh.control.run_on_all(op_name, begin, patient=True)
        made = publication and str(publication.temporary)
        temporary = Path(mesh.control.all_gather_object(made)[0])
        metadata = {"parallel_ext": json.dumps(note)} if note else {}
        stream = TensorStream(values, mesh.control)
        shown = progress_as_in_transformers()
        stream.write(files, in_files, temporary, metadata, op_name, shown)
        mesh.control.run_on_all(op_name, finish, patient=True)
    non_finite = mesh.control.all_gather_object(stream.non_finite)
    warn_of_non_finite(non_finite, op_name, mesh.control)


def json_files(
    model: PreTrainedModel,
    files: Sequence[PlannedFile],
    config: PreTrainedConfig,
    generation_config: GenerationConfig | None,
) -> dict[str, bytes]:
    """Return the JSON files that HuggingFace's ``save_pretrained`` would write, by name."""
    config = copy.deepcopy(config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # fully_shard's prefix
    configs = [config] if generation_config is None else [config, generation_config]
    contents = files_that(*(each.save_pretrained for each in configs))
    contents[CONFIG_NAME] = with_old_rope_names(contents[CONFIG_NAME])
    if len(files) > 1:  # a single one needs no index
        contents[INDEX_NAME] = index_of(files)
    return contents


def files_that(*saves: Callable[[str], Any]) -> dict[str, bytes]:
    """Return the files that a library saves, as name -> content, for this package to write."""
    with TemporaryDirectory() as folder:
        for save in saves:
            save(folder)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def index_of(files: Sequence[PlannedFile]) -> bytes:
    """Return the content of the index, which says which of several files holds which tensor."""
    specs = [spec for file in files for spec in file.tensors]
    index = {
        "metadata": {
            "total_parameters": sum(math.prod(spec.shape) for spec in specs),
            "total_size": sum(file.num_bytes for file in files),
        },
        "weight_map": {spec.name: file.name for file in files for spec in file.tensors},
    }
    return to_file(index)


def with_old_rope_names(content: bytes) -> bytes:
    """Add to a ``config.json`` the names by which transformers 4 reads rotary positions.

    Without them it would take its defaults.
    """
    config = json.loads(content)
    rope, kind = config.get("rope_parameters"), config.get("model_type")
    if not isinstance(rope, dict) or "rope_theta" in config:
        return content
    if kind in ("gemma3_text", "olmo3"):  # whose sliding windows rotate otherwise
        if kind == "gemma3_text":
            config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if "rope_theta" not in rope:
        return content
    beside = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    if rope.get("rope_type", "default") != "default":
        scaling = {name: value for name, value in rope.items() if name not in beside}
        if kind == "phi3":  # which takes three fields, of which one has its older name
            scaling["type"] = scaling.pop("rope_type")
            scaling.pop("original_max_position_embeddings", None)  # stands beside it
        config["rope_scaling"] = scaling
    return to_file(config | beside)


def to_file(value: dict[str, Any]) -> bytes:
    """Return the content of a JSON file as HuggingFace writes it."""
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
