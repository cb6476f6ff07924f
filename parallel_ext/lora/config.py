"""``px.LoraConfig``, and what of a configuration a parallel model can serve."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import peft

# Everything else must be as PEFT's default.
_SUPPORTED = {
    *("r", "lora_alpha", "use_rslora", "init_lora_weights", "rank_pattern", "alpha_pattern"),
    *("use_dora", "lora_dropout", "bias", "lora_bias", "modules_to_save"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("target_parameters", "trainable_token_indices", "ensure_weight_tying"),
    *("task_type", "peft_type", "auto_mapping", "peft_version", "inference_mode"),
    *("base_model_name_or_path", "revision", "runtime_config"),
    "eva_config",  # of a start that is refused; PEFT ignores it with any other
}
_OF_FACTORS_ALONE = ("eva", "orthogonal")  # starts that leave the base as it is
_OF_BASE = ("pissa", "olora", "corda")  # starts that PEFT can make a plain adapter of


class LoraConfig(peft.LoraConfig):
    """``peft.LoraConfig``, by the name that reads best beside ``px.parallelize``.

    Everything is as in PEFT; on a parallel model each rank holds its part of the factors, and what
    is not supported there is refused by name. A plain ``peft.LoraConfig`` serves as well.

    Example:
        >>> config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "o_proj"])
        >>> config.r
        8
    """

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> LoraConfig:
        """Read a configuration as ``peft.LoraConfig.from_pretrained`` does, into this class.

        Raises:
            TypeError: it is of another kind of adapter, which PEFT would return.
        """
        config = peft.LoraConfig.from_pretrained(*args, **kwargs)
        if not isinstance(config, peft.LoraConfig):
            raise TypeError(f"the configuration is a {type(config).__name__}, not one of LoRA")
        fields = (field.name for field in dataclasses.fields(peft.LoraConfig) if field.init)
        return cls(**{name: getattr(config, name) for name in fields})


def refuse_unsupported(config: peft.PeftConfig, op_name: str) -> None:
    """Raise unless a parallel model can serve ``config``.

    Raises:
        NotImplementedError: names each option that is not supported.
        ValueError: a number is out of range.
    """
    if not isinstance(config, peft.LoraConfig) or config.peft_type != peft.PeftType.LORA:
        raise NotImplementedError(
            f"{op_name}: only LoRA is supported on a parallel model, not {type(config).__name__}"
        )
    default = peft.LoraConfig()

    def changed(name: str) -> bool:
        # PEFT writes an empty list where nothing was given, as in target_parameters
        return (getattr(config, name) or None) != (getattr(default, name) or None)

    given = [
        f"{field.name}={getattr(config, field.name)!r}"
        for field in dataclasses.fields(peft.LoraConfig)
        if field.name not in _SUPPORTED and changed(field.name)
    ]
    start = config.init_lora_weights
    if not isinstance(start, bool) and start != "gaussian":  # 0 is not False everywhere in PEFT
        given.append(f"init_lora_weights={start!r}")
    if given:
        raise NotImplementedError(
            f"{op_name}: LoRA on a parallel model does not support {', '.join(given)}"
            + _advice(start)
        )
    for name, rank in {"r": config.r, **(config.rank_pattern or {})}.items():
        if type(rank) is not int or rank < 1:
            raise ValueError(
                f"{op_name}: the rank must be an integer of at least 1, got {name}={rank!r}"
            )
    for name, alpha in {"lora_alpha": config.lora_alpha, **(config.alpha_pattern or {})}.items():
        if (
            isinstance(alpha, bool)
            or not isinstance(alpha, (int, float))
            or not math.isfinite(alpha)
        ):
            raise ValueError(f"{op_name}: lora_alpha must be a finite number, got {name}={alpha!r}")
    p = config.lora_dropout
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p <= 1:
        raise ValueError(f"{op_name}: lora_dropout must be in [0, 1], got {p!r}")


def _advice(start: bool | str) -> str:
    """Return what to do with a saved adapter that was started so, for an error."""
    if start in _OF_FACTORS_ALONE:
        return (
            "; a saved adapter has no use for it: pass PeftModel.from_pretrained a config of it "
            "whose init_lora_weights is True"
        )
    if isinstance(start, str) and start.startswith(_OF_BASE):
        return (
            ", which changes the base: in one process, PEFT's save_pretrained(..., "
            "path_initial_model_for_weight_conversion=FOLDER) makes a plain adapter of it"
        )
    return ""
