"""Save all that a job needs to resume, in a directory that HuggingFace can read."""

from __future__ import annotations

import json
import os
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallel_ext.checkpoint import rng
from parallel_ext.checkpoint.lock import one_writer
from parallel_ext.checkpoint.manifest import (
    COMMIT_NAME,
    LOOP_NAME,
    RNG_NAME,
    STATE_FOLDER,
    Manifest,
    bits_of,
    is_beside_model,
)
from parallel_ext.checkpoint.optimizer_state import OptimizerState, collect
from parallel_ext.checkpoint.scheduler_state import Scheduler, describe
from parallel_ext.checkpoint.source import Contents, contents_of
from parallel_ext.checkpoint.staging import Copies, copies_of
from parallel_ext.checkpoint.steps import (
    TEMPORARY_NAME,
    check_keep,
    check_may_save,
    complete_steps,
    name_of_step,
    numbers_of_saves,
    prune,
    publish_step,
    remove_leftovers,
)
from parallel_ext.distributed.control import ControlPlane
from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.distributed.mesh import Mesh
from parallel_ext.distributed.require_equal import require_equal
from parallel_ext.io import disk
from parallel_ext.io.hashing import FileRecord, chunk_bytes_for
from parallel_ext.io.hf_writer import values_in_files
from parallel_ext.io.safe_open import one_error
from parallel_ext.io.safetensors_writer import TensorSpec
from parallel_ext.io.same_directory import check_same_directory
from parallel_ext.io.schema import to_json, to_own_json
from parallel_ext.io.stream import (
    TensorStream,
    digest_of,
    plan_files,
    warn_of_non_finite,
)
from parallel_ext.nn.replicas import compare
from parallel_ext.parallel.joining import arrive
from parallel_ext.parallel.state import state_of
from parallel_ext.sharding.layout import TensorLayout
from parallel_ext.sharding.reshard import is_needed
from parallel_ext.version import VERSION

_OPTIMIZER_FILES = STATE_FOLDER + "/optim-{:05}-of-{:05}.safetensors"


def save_checkpoint(
    root: str | os.PathLike[str],
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Scheduler | None = None,
    data_state: Any = None,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    asynchronous: bool = False,
    progress: bool | None = None,
) -> Path:
    """Write all that training needs to resume, on any number of ranks, as ``root/step-<step>``.

    Every rank calls it. The directory is one that plain ``from_pretrained`` reads, with a folder
    ``parallel_state`` beside the model's files; of a model with an adapter, one that plain
    ``PeftModel.from_pretrained`` reads: the adapter and its ``modules_to_save``, and of the base
    only what PEFT saves too (embeddings that have an adapter). Each tensor is written once,
    unpadded and under its HuggingFace name, by one of all ranks, and hashed on the way; rows stream
    to the rank that writes them. The directory appears under its name when it is complete, and
    ``root/LATEST`` names it then. A save that is killed, or loses its power, leaves the last
    checkpoint as it is, and what it left behind is removed by the next. One job at a time saves
    into a root: the file ``.lock`` is there meanwhile, and stops nobody once its holder is dead.
    Gradients are not saved: call it between ``optimizer.step()`` and the next backward.

    When ``asynchronous``, each rank copies what it will send or write to its host's memory, at most
    once its shard, and a thread writes it while training continues. One save is in flight at a
    time: the next save, load or :func:`wait_for_checkpoint` waits for it, and raises the error with
    which it failed instead of doing its own work. End a job with :func:`wait_for_checkpoint`,
    before the process group is destroyed.

    Args:
        root: directory of all checkpoints of a job, the same place for all ranks.
        step: number of the training step. It must not be that of the last checkpoint there; an
            older save of the same step, of a run that was given up, is replaced.
        model: a parallel model, or PEFT's around one, with one adapter; or a module of the user's
            own that holds one, whose names are then those of its ``state_dict()``. What is trained
            beside an adapter is refused, since it would be lost.
        optimizer: built from the model's parameters. What it keeps of one are plain tensors of its
            shape, and numbers in tensors; or it is :class:`parallel_ext.Adafactor`, or torch's own
            where no parameter is sharded.
        scheduler: of the learning rate: any of torch's, or one whose ``state_dict()`` consists of
            plain values, such as numbers, text, lists, dicts and small tensors.
        data_state: where the data is, as JSON, for example the number of samples that all ranks
            together have taken; equal on all ranks.
        keep_last: how many checkpoints stay, with this one, in the order in which they were saved;
            all when None. Others are removed once this one is durable; what cannot be removed is a
            warning.
        keep_every: those whose step is a multiple of it stay too.
        asynchronous: return when the values are copied, not when they are on the disk; on a GPU
            when its stream is to copy them before it does anything else.
        progress: whether rank 0 shows a bar. When None it does on a terminal, where the save takes
            longer than a second and is not asynchronous.

    Returns:
        The directory, on every rank; of an asynchronous save the one that will be there.

    Raises:
        CheckpointError: it cannot be saved, for example since the disk is full, or another job
            saves there; on all ranks, with the rank that failed. Checkpoints that were there stay
            whole. It is a :class:`CollectiveTimeout` too where not all ranks called it, or one was
            killed or stopped meanwhile; a :class:`DisagreementError` where they were given
            different things.

    Example:
        >>> save_checkpoint("ckpts", 1200, model, optimizer, keep_last=2)  # doctest: +SKIP
    """
    arrive("save_checkpoint")
    state = state_of(model)
    mesh = state.mesh
    op_name = f"save_checkpoint of step {step} to {os.fspath(root)}"
    with one_error(op_name), ExitStack() as cleanup:
        given = type(optimizer).__name__, type(scheduler).__name__, asynchronous
        mesh.control.barrier(
            f"{op_name}, with optimizer {given[0]}, scheduler {given[1]}, asynchronous {given[2]}"
        )
        mesh.control.run_on_all(op_name, mesh.background.finish, patient=mesh.background.busy)

        def look() -> tuple[Path, Contents, Any]:
            at = _check(root, step, keep_last, keep_every)
            return at, contents_of(model), None if scheduler is None else describe(scheduler)

        at, contents, rates = mesh.control.run_on_all(op_name, look)
        check_same_directory(at, mesh.control, op_name)
        kept = OptimizerState({}, {})
        if optimizer is not None:
            kept = collect(optimizer, contents, mesh, op_name)

        def prepare() -> tuple[dict[str, Any], _Plan, dict[str, str], dict[str, torch.Tensor]]:
            loop = {
                "step": step,
                "optimizer": kept.description or None,
                "scheduler": rates,
                "data_state": data_state,
                "dropout_masks": contents.dropout_masks(),
            }
            plan = _Plan(contents, mesh, kept)
            given = {**loop, "keep_last": keep_last, "keep_every": keep_every}
            to_json(given, "what to save")  # refuses what JSON cannot hold
            texts = {name: json.dumps(each, sort_keys=True) for name, each in given.items()}
            texts["root"] = str(at)  # a relative one may lie elsewhere on each rank
            return loop, plan, {**texts, **plan.in_words()}, rng.capture(mesh)

        loop, plan, given, random_state = mesh.control.run_on_all(op_name, prepare)
        require_equal(mesh.control, op_name, given)
        states_of = mesh.control.all_gather_object(random_state)
        compare({n: (value, plan.layouts[n]) for n, value in plan.values.items()}, mesh, op_name)
        if asynchronous:
            mesh.background.connect()
            mesh.control.run_on_all(op_name, lambda: plan.copy_values(mesh))

        def begin() -> tuple[Path, dict[str, str], Manifest] | None:
            """Make the directory and write all but the tensors, on rank 0."""
            if mesh.rank != 0:
                return None
            temporary, save_id = _begin(at, step, cleanup)
            metadata = {"save_id": save_id, "parallel_ext": VERSION}
            described = {**loop, "random": rng.describe(states_of, mesh)}
            of_model = [f for f in plan.files if not is_beside_model(f.name)]
            loop_text = to_own_json(described, "data_state with the states of the loop")
            texts = {**contents.json_files(of_model), LOOP_NAME: loop_text}
            records = {name: FileRecord.of(t, plan.chunk_bytes) for name, t in texts.items()}
            for name, text in texts.items():
                disk.write_file(temporary / name, text)
            records[RNG_NAME] = rng.write(
                temporary / RNG_NAME, states_of, metadata, plan.chunk_bytes
            )
            number = 1 + max(numbers_of_saves(complete_steps(at)).values(), default=0)
            bits = bits_of(state.invariant, mesh.device)
            by = {"parallel_ext": VERSION, "torch": torch.__version__}
            by |= {"transformers": version("transformers"), **rng.mesh_sizes(mesh)}
            by |= {"bits": bits} if bits else {}
            manifest = Manifest(save_id, step, number, by, records, plan.tensors, {})
            return temporary, metadata, manifest

        begun = mesh.control.run_on_all(op_name, begin, patient=True)
        name, metadata = mesh.control.all_gather_object(begun and (begun[0].name, begun[1]))[0]
        keep = (keep_last, keep_every)
        shown = False if asynchronous and progress is None else progress  # the loop has its own
        save = _Save(op_name, at, keep, at / name, metadata, plan, begun and begun[2], shown)
        if asynchronous:
            mesh.background.start(op_name, partial(save.run, cleanup.pop_all()))
        else:
            save.run(cleanup, mesh.control)
    return Path(root) / name_of_step(step)


def wait_for_checkpoint(model: nn.Module) -> None:
    """Wait until no asynchronous save is in flight; every rank calls it.

    Args:
        model: the parallel model that was saved.

    Raises:
        CheckpointError: the save failed, as ``save_checkpoint`` would have; raised once, by the
            first call after it. Or not all ranks called it.

    Example:
        >>> wait_for_checkpoint(model)  # doctest: +SKIP
    """
    mesh, op_name = state_of(model).mesh, "wait_for_checkpoint"
    arrive(op_name)
    with one_error(op_name):
        mesh.control.barrier(op_name)
        mesh.control.run_on_all(op_name, mesh.background.finish, patient=mesh.background.busy)


def _check(
    root: str | os.PathLike[str], step: int, keep_last: int | None, keep_every: int | None
) -> Path:
    """Raise unless the numbers make sense, and return ``root`` as an absolute path."""
    if type(step) is not int or not 0 <= step < 2**63:
        raise ValueError(
            f"save_checkpoint: step must be a whole number from 0 to 2**63 - 1, got {step!r}"
        )
    check_keep(keep_last, keep_every)
    if not os.fspath(root):
        raise ValueError("save_checkpoint: root is empty; '.' is the working directory")
    at = Path(root).absolute()
    if os.path.lexists(at / COMMIT_NAME):
        raise CheckpointError(
            f"{at} is a checkpoint of one step, and would be removed with all that lies in it; "
            f"pass the root of all steps, {at.parent}"
        )
    return at


class _Plan:
    """The files of a save and the tensors in them; equal on every rank but for ``values``."""

    def __init__(self, contents: Contents, mesh: Mesh, kept: OptimizerState) -> None:
        writers = mesh.world_size
        self.copies = Copies()  # of no values, so far
        of_model = values_in_files(contents.values(mesh.rank), contents.layout, mesh.rank)
        in_files = contents.layout.in_files()
        self.values = {**of_model, **{name: value for name, (value, _) in kept.tensors.items()}}
        self.layouts: dict[str, TensorLayout] = {
            **in_files.tensors,
            **{name: layout for name, (_, layout) in kept.tensors.items()},
        }
        specs = {
            name: TensorSpec(name, value.dtype, self.layouts[name].shape)
            for name, value in self.values.items()
        }
        self.files = contents.plan([specs[name] for name in of_model], writers)
        self.files += plan_files(
            [specs[name] for name in kept.tensors],
            writers,
            single=_OPTIMIZER_FILES.format(1, 1),
            several=_OPTIMIZER_FILES,
        )
        self.tensors = {
            spec.name: (file.name, spec) for file in self.files for spec in file.tensors
        }
        self.chunk_bytes = chunk_bytes_for(sum(spec.num_bytes for _, spec in self.tensors.values()))

    def in_words(self) -> dict[str, str]:
        """Return what must be equal on all ranks, by its name in errors."""
        words = {
            f"the tensor {name}": f"of {spec.dtype} and shape {spec.shape} in {file}"
            for name, (file, spec) in self.tensors.items()
        }
        return {**words, "the tensors' order in files": f"of digest {digest_of(self.files)}"}

    def copy_values(self, mesh: Mesh) -> None:
        """Copy what this rank will send or write to memory of its own, and drop the rest.

        The copies hold what the values are now, whatever training makes of them. They may be read
        after ``copies.wait()``.
        """
        needed = {
            spec.name: self.values[spec.name]
            for file in self.files
            for spec in file.tensors
            if is_needed(self.layouts[spec.name], mesh.rank, file.writer)
        }
        self.copies = copies_of(mesh)
        copied = self.copies.take(needed)
        self.values = {
            name: copied[name] if name in copied else torch.empty_like(value, device="meta")
            for name, value in self.values.items()
        }


@dataclass(frozen=True)
class _Save:
    """A save of which only the tensors are missing.

    Attributes:
        keep: ``keep_last`` and ``keep_every`` of :func:`save_checkpoint`.
        manifest: of the other files; None but on rank 0.
        progress: whether rank 0 shows a bar; None for one on a terminal.
    """

    op_name: str
    root: Path
    keep: tuple[int | None, int | None]
    temporary: Path
    metadata: Mapping[str, str]
    plan: _Plan
    manifest: Manifest | None
    progress: bool | None

    def run(self, cleanup: ExitStack, control: ControlPlane) -> None:
        """Write the tensors and publish the directory; every rank runs it, on any thread.

        Args:
            cleanup: what is to be done in the end, successful or not.
            control: of the ranks, as this thread may use it.
        """
        with one_error(self.op_name), cleanup:  # which another call may raise
            control.run_on_all(self.op_name, self.plan.copies.wait)
            stream = TensorStream(self.plan.values, control, self.plan.chunk_bytes)
            plan, where = self.plan, (self.temporary, self.metadata, self.op_name)
            stream.write(plan.files, plan.layouts, *where, self.progress)
            written = control.all_gather_object((stream.records(), stream.non_finite), FileRecord)
            control.run_on_all(self.op_name, lambda: self._publish(written), patient=True)
        warn_of_non_finite([counts for _, counts in written], self.op_name, control)

    def _publish(self, written: Sequence[tuple[dict[str, FileRecord], Counter[str]]]) -> None:
        if self.manifest is None:
            return
        files, non_finite = dict(self.manifest.files), Counter[str]()
        for records, counts in written:
            files |= records
            non_finite += counts
        manifest = replace(self.manifest, files=files, non_finite=non_finite)
        publish_step(self.temporary, self.root, manifest)
        prune(self.root, manifest.step, manifest.save_id, *self.keep)


def _begin(root: Path, step: int, cleanup: ExitStack) -> tuple[Path, str]:
    """Lock the root, and make a directory to write into, which vanishes unless it is published."""
    disk.make_directories(root)
    cleanup.enter_context(one_writer(root))
    check_may_save(root, step)
    remove_leftovers(root)
    save_id = secrets.token_hex(16)
    temporary = root / TEMPORARY_NAME.format(name=name_of_step(step), save_id=save_id)
    cleanup.callback(disk.discard, temporary)
    disk.make_directory(temporary)
    disk.make_directory(temporary / STATE_FOLDER)
    return temporary, save_id
