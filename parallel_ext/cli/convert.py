"""Convert a saved model, a training checkpoint, a DCP or an adapter to another format."""

from __future__ import annotations

import argparse
import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from parallel_ext.cli.options import existing, positive
from parallel_ext.cli.saved import (
    ADAPTER,
    CHECKPOINT,
    FILE,
    MODEL,
    NothingSavedError,
    kind_of,
    newest_step,
)
from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.io.progress import Progress, progress_bar
from parallel_ext.io.publish import Publication
from parallel_ext.io.rewrite import check_new
from parallel_ext.io.safetensors_reader import SafetensorsFile

# These import torch's DCP, transformers and PEFT, which takes seconds, where they are needed.

_DCP, _SWISS_ARMY = "DCP", "checkpoint of SwissArmyTransformer"
_FORMATS = {  # of a source -> what can be made of it; the first by default
    MODEL: ("hf",),
    CHECKPOINT: ("hf", "dcp"),
    _DCP: ("checkpoint", "hf"),
    _SWISS_ARMY: ("peft",),
}
_OPTIONS = {  # what an option is for: kinds of sources, and what is made of them
    "--vocab-size": ((MODEL, "hf"),),
    "--filled-padding": ((MODEL, "hf"),),
    "--config": ((_DCP, "hf"), (_SWISS_ARMY, "peft")),
    "--lora-alpha": ((_SWISS_ARMY, "peft"),),
    "--adapters-only": ((_SWISS_ARMY, "peft"),),
    "--allow-pickle": ((_SWISS_ARMY, "peft"),),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``convert``."""
    parser.add_argument(
        "source",
        type=existing,
        help="a model with a padded vocabulary; a training checkpoint; a directory of "
        "torch.distributed.checkpoint; a checkpoint of SwissArmyTransformer",
    )
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument(
        "--to",
        choices=sorted({name for names in _FORMATS.values() for name in names}),
        help="a training checkpoint: hf (default) or dcp; a DCP: checkpoint (default) or hf",
    )
    padded = parser.add_argument_group("of a padded vocabulary")
    padded.add_argument("--vocab-size", type=positive, metavar="V", help="its true number of rows")
    padded.add_argument(
        "--filled-padding",
        action="store_true",
        help="drop also rows that are not zero, if no id of the tokenizer reaches them",
    )
    parser.add_argument(
        "--config", type=existing, metavar="DIR", help="of the model, for a DCP or an adapter"
    )
    adapter = parser.add_argument_group("of SwissArmyTransformer")
    adapter.add_argument("--lora-alpha", type=float, help="of its training (1)")
    adapter.add_argument(
        "--adapters-only", action="store_true", help="leave out layers that were trained in full"
    )
    adapter.add_argument(
        "--allow-pickle", action="store_true", help="RUN CODE out of files, if you trust them"
    )


def run(options: argparse.Namespace) -> int:
    """Convert a model, print what was made, and return 0."""
    source = newest_step(options.source)
    kind = _kind(source)
    to = options.to or _FORMATS[kind][0]
    if to not in _FORMATS[kind]:
        raise CheckpointError(
            f"{source} is a {kind}, of which {' or '.join(_FORMATS[kind])} can be made, not {to}"
        )
    for option, served in _OPTIONS.items():
        value = vars(options)[option.removeprefix("--").replace("-", "_")]
        if value is not None and value is not False and (kind, to) not in served:
            known = " or ".join(f"--to {name} of a {each}" for each, name in served)
            raise CheckpointError(f"{option} is for {known}, but {source} is a {kind}, --to {to}")
    with _progress(source, options.json) as progress:
        made = _CONVERSIONS[kind, to](source, options, progress)
    report = {"source": str(source), "out": str(options.out), "from": kind, "to": to, **made}
    if options.json:
        print(json.dumps(report))
    else:
        facts = {n: " and ".join(v) if isinstance(v, tuple) else v for n, v in made.items()}
        print(f"{options.out}: " + ", ".join(f"{name} {value}" for name, value in facts.items()))
    return 0


def _kind(source: Path) -> str:
    names = [path.name for path in (source.iterdir() if source.is_dir() else [source])]
    if ".metadata" in names:
        return _DCP
    try:
        kind = kind_of(source)
    except NothingSavedError:
        kind = ""
    if kind == ADAPTER:
        raise CheckpointError(
            f"{source} is an adapter of PEFT already; parallel-ext merge merges it"
        )
    if kind in _FORMATS:
        return kind
    if kind == FILE and source.suffix == ".safetensors":
        _check_swiss_army(source)
    if any(name == "latest" or name.endswith((".pt", ".safetensors")) for name in names):
        return _SWISS_ARMY
    raise CheckpointError(f"{source} is no {MODEL}, {CHECKPOINT}, {_DCP} or {_SWISS_ARMY}")


def _check_swiss_army(source: Path) -> None:
    from parallel_ext.lora.swiss_army_files import FACTOR

    with SafetensorsFile(source) as file:
        if not any(map(FACTOR.fullmatch, file.tensors)):
            raise CheckpointError(
                f"{source} is a safetensors file without an adapter of SwissArmyTransformer; of a "
                f"{MODEL} or {CHECKPOINT} convert takes the folder"
            )


def _progress(source: Path, quiet: bool) -> AbstractContextManager[Progress]:
    paths = source.rglob("*") if source.is_dir() else [source]
    total = sum(path.stat().st_size for path in paths if path.is_file())
    return progress_bar("", total, 0, False if quiet else None)


def _unpad(source: Path, options: argparse.Namespace, progress: Progress) -> dict:
    from parallel_ext.parallel.unpad_files import unpad_files

    return vars(
        unpad_files(source, options.out, options.vocab_size, options.filled_padding, progress)
    )


def _plain(source: Path, options: argparse.Namespace, progress: Progress) -> dict:
    from parallel_ext.checkpoint.plain_copy import copy_model

    return {"tensors": copy_model(source, options.out, progress)}


def _to_dcp(source: Path, options: argparse.Namespace, progress: Progress) -> dict:
    from parallel_ext.checkpoint.to_dcp import to_dcp

    return {"tensors": to_dcp(source, options.out, progress)}


def _restore(source: Path, options: argparse.Namespace, progress: Progress) -> dict:
    from parallel_ext.checkpoint.from_dcp import restore_checkpoint

    return {"step": str(restore_checkpoint(source, options.out, progress))}


def _of_dcp(source: Path, options: argparse.Namespace, progress: Progress) -> dict:
    from parallel_ext.checkpoint.from_dcp import model_of_dcp
    from parallel_ext.parallel.expected_files import NoFiles, check_files, names_for_files

    def names(folder: Path, config: dict, shapes: dict) -> dict[str, str]:
        return names_for_files(NoFiles(folder, config, shapes))

    made = model_of_dcp(source, options.out, options.config, check_files, names, progress)
    return {"tensors": made}


def _adapter(source: Path, options: argparse.Namespace, progress: Progress) -> dict:
    from parallel_ext.lora.swiss_army import import_swiss_army_lora
    from parallel_ext.models.cogagent import CogAgentConfig

    if options.config is None:
        raise CheckpointError("pass --config FOLDER of the CogAgent that the adapter is of")
    check_new(options.out, source)
    config: Any = CogAgentConfig.from_pretrained(options.config)
    with Publication(options.out) as temporary:
        import_swiss_army_lora(
            source,
            temporary,
            config=config,
            lora_alpha=1.0 if options.lora_alpha is None else options.lora_alpha,
            adapters_only=options.adapters_only,
            allow_pickle=options.allow_pickle,
        )
    return {"adapter": str(options.out)}


_CONVERSIONS = {
    (MODEL, "hf"): _unpad,
    (CHECKPOINT, "hf"): _plain,
    (CHECKPOINT, "dcp"): _to_dcp,
    (_DCP, "checkpoint"): _restore,
    (_DCP, "hf"): _of_dcp,
    (_SWISS_ARMY, "peft"): _adapter,
}
