"""Which trainers of HuggingFace and TRL, and which of their arguments, train parallel models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import transformers

from parallel_ext.distributed.errors import warn_user
from parallel_ext.parallel.state import is_parallel, state_of
from parallel_ext.parallel.validate import transformers_version

OLDEST = (5, 23)
"""The oldest transformers whose trainer is served."""

# The classes of trl whose losses and metrics are those of one process.
_SERVED_OF_TRL = ("SFTTrainer", "DPOTrainer", "RewardTrainer")

WITHOUT_LABELS = ("DPOTrainer", "RewardTrainer")
"""Names the trainers of TRL whose loss counts every row of a batch, labels or not."""

# Whose losses are known.
_PACKAGES = ("parallel_ext", "transformers", "trl")

# Losses of TRL's DPOTrainer that are no mean over the rows of a batch -> why.
_OF_BATCHES = {
    "aot": "TRL sorts the rows of a rank, and not those of the job",
    "aot_unpaired": "TRL sorts the rows of a rank, and not those of the job",
    "sft": "TRL takes the mean of the tokens of a rank, whatever their number",
}

# Arguments of a trainer that are refused, unless they are None, False or 0 -> what to do.
_WHY_NOT = {
    "auto_find_batch_size": "one rank would try another batch size than the others",
    "deepspeed": "px.data_parallel(model, mesh, zero=3) shards gradients and optimizer",
    "enable_jit_checkpoint": "ranks would save at different steps; ask px.stop_requested",
    "fsdp": "px.data_parallel(model, mesh, zero=3) shards gradients and optimizer",
    "parallelism_config": "the mesh says it, as in px.init_mesh(tp=2)",
    "save_on_each_node": "all ranks write one checkpoint, to a directory that they share",
    "sync_ref_model": "TRL's callback pairs the parameters of two models that may be sharded apart",
}


def class_of_trl(trainer: transformers.Trainer) -> str | None:
    """Return the name of TRL's class that a trainer is of, if any."""
    of_trl = (each for each in type(trainer).__mro__ if each.__module__.startswith("trl."))
    return next((each.__name__ for each in of_trl), None)


def check_class(trainer: transformers.Trainer) -> None:
    """Raise unless the class of a trainer is served; before the trainer is made.

    The trainer of a transformers older than 5.23 counts tp ranks otherwise.
    """
    name, trl = type(trainer).__name__, class_of_trl(trainer)
    if transformers_version() < OLDEST:
        raise RuntimeError(
            f"{name}: px.Trainer needs transformers {'.'.join(map(str, OLDEST))} or newer; this is "
            f"{transformers.__version__}"
        )
    if trl is not None and trl not in _SERVED_OF_TRL:
        raise NotImplementedError(
            f"{name}: trl's {trl} is not supported around a parallel model; "
            f"{', '.join(_SERVED_OF_TRL)} are"
        )


def check_given(
    trainer: transformers.Trainer, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raise unless the arguments of a trainer are served that act when it is made; before that."""
    name = type(trainer).__name__
    if any(getattr(each, "precompute_ref_log_probs", False) for each in (*args, *kwargs.values())):
        raise ValueError(
            f"{name}: precompute_ref_log_probs=True is not served: TRL would keep them by a digest "
            "of the weights, of which a rank has its shards; give DPOTrainer a parallel ref_model"
        )


def check_served(trainer: transformers.Trainer) -> None:
    """Raise unless the model and the arguments of a trainer are served; when it has been made."""
    name, args = type(trainer).__name__, trainer.args
    if not is_parallel(trainer.model):
        raise TypeError(
            f"{name} trains a parallel model, but was given a "
            f"{type(trainer.model).__name__}; call px.parallelize or px.from_pretrained before"
        )
    mesh = state_of(trainer.model).mesh
    if mesh.dp_size > 1 and isinstance(trainer, transformers.Seq2SeqTrainer):
        raise NotImplementedError(
            f"{name}: transformers' Seq2SeqTrainer is not supported at dp={mesh.dp_size}: it "
            "counts rows that fill up a batch; use px.Trainer"
        )
    for argument, why in _WHY_NOT.items():
        if getattr(args, argument, None):
            raise ValueError(f"{name}: {argument}={getattr(args, argument)!r} is not served: {why}")
    if mesh.tp_size > 1 and args.train_sampling_strategy == "batch_rebalance":
        raise ValueError(
            f"{name}: train_sampling_strategy='batch_rebalance' gives each process other rows, but "
            "tp ranks share theirs; use 'group_by_length'"
        )
    if mesh.tp_size > 1 and args.neftune_noise_alpha is not None:
        raise ValueError(
            f"{name}: neftune_noise_alpha draws noise that depends on tp; leave it out"
        )
    if args.world_size != mesh.world_size or args.n_gpu > 1:
        raise ValueError(
            f"{name}: TrainingArguments see {args.world_size} processes with {args.n_gpu} GPUs "
            f"each, but the mesh has {mesh.world_size} ranks; start the job with torchrun, one "
            "rank for each GPU, and on CPUs pass use_cpu=True"
        )
    apart = mesh.dp_size > 1 and not args.average_tokens_across_devices
    if class_of_trl(trainer) == "SFTTrainer" and apart:
        raise ValueError(
            f"{name}: average_tokens_across_devices=False is not served at dp={mesh.dp_size}: TRL "
            "would divide the gradients by dp; leave it out"
        )
    if class_of_trl(trainer) == "DPOTrainer" and mesh.dp_size > 1:
        losses = [args.loss_type] if isinstance(args.loss_type, str) else args.loss_type
        for loss in losses:
            if loss in _OF_BATCHES:
                raise ValueError(
                    f"{name}: loss_type={loss!r} is not served at dp={mesh.dp_size}: "
                    f"{_OF_BATCHES[loss]}; leave it out, or use tp"
                )
    own = (each for each in type(trainer).__mro__ if "compute_loss" in vars(each))
    owner = next((c.__name__ for c in own if c.__module__.split(".")[0] not in _PACKAGES), None)
    if owner is not None and mesh.dp_size > 1:
        warn_user(
            f"{name}: what compute_loss of {owner} returns is averaged over the dp ranks, however "
            "many labels each has; compute_loss_func= is given num_items_in_batch, by which the "
            "loss is that of one process"
        )


def refuse_model_init(trainer: transformers.Trainer) -> NoReturn:
    """Refuse a function that makes a trainer's model: ``train`` would make it a second time."""
    raise NotImplementedError(
        f"{type(trainer).__name__}: model_init= is not supported with a parallel model, of which "
        "train() would make a second one beside the first; make one and pass model="
    )
