"""Methods of transformers' models, its Trainer and its optimizers."""

from __future__ import annotations

import re
from contextlib import nullcontext
from types import MethodType
from unittest import mock

import pytest
import torch
import transformers
from interplay import EVERYWHERE, TP, Spread, Trial, close, each_refused, exact, refused
from interplay_accelerate import processes
from reference import parallel
from torch import nn

import parallel_ext as px
from parallel_ext.sharding.slices import local_part

M = "transformers.PreTrainedModel"


@exact(f"{M}.forward", f"{M}.__call__", spreads=EVERYWHERE)
def forward(trial: Trial) -> None:
    trial.model.eval(), trial.reference.eval()
    with torch.no_grad():
        ours, theirs = trial.model(**trial.own), trial.reference(**trial.own)
    close(ours.logits, theirs.logits)


@refused(
    f"{M}.forward (replaced by one that takes shards for full tensors, as TRL's)",
    instead="undo that",
)
def replaced_forward(trial: Trial) -> None:
    model, layers = trial.model, trial.model.model.layers
    plain, computed = model.forward, mock.Mock(return_value=None)
    layers[0].register_forward_hook(lambda *_: computed())

    def fused(input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: object) -> torch.Tensor:
        hidden = model.model(input_ids).last_hidden_state
        return nn.functional.linear(hidden, model.lm_head.weight).logsumexp(-1).mean()

    def head_alone(input_ids: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return model.lm_head(model.model.embed_tokens(input_ids))

    def weight_alone(input_ids: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return model.model.embed_tokens(input_ids) @ model.lm_head.weight.T

    def failing(**kwargs: object) -> None:
        raise OSError("of the user")

    try:
        model.forward = failing
        with pytest.raises(OSError, match="of the user"):
            model(**trial.own)
        layers[0].mlp(model.model(trial.own["input_ids"]).last_hidden_state)  # no call of the model
        computed.reset_mock()
        for model.forward in (head_alone, weight_alone):
            with pytest.raises(RuntimeError, match="undo that"):
                model(**trial.own)
        model.forward = fused
        model(**trial.own)
    finally:
        model.forward = plain
        close(computed.called, False)


@exact(f"{M}.forward (wrapped)", how="where the wrapper calls the one that it wraps")
def wrapped_forward(trial: Trial) -> None:
    plain, embedding = trial.model.forward, trial.model.get_input_embeddings()

    def wrapper(input_ids: torch.Tensor, **kwargs: object) -> object:
        return plain(inputs_embeds=embedding(input_ids), **kwargs)

    trial.model.forward = wrapper
    close(trial.model(**trial.own).loss, trial.reference(**trial.own).loss)


@exact(f"{M}.forward (of a class that Liger has patched)", how="is not given the labels")
def patched_class(trial: Trial) -> None:
    cls, plain = type(trial.model), type(trial.model).forward

    def liger(self: nn.Module, *args: object, labels: object = None, **kwargs: object) -> object:
        output = plain(self, *args, **kwargs)
        if labels is not None:  # from the weights of the head, which are a shard
            output.loss = output.logits.sum() * 0
        return output

    cls.forward = liger
    try:
        ours = trial.model(**trial.own).loss
    finally:
        cls.forward = plain
    close(ours, trial.reference(**trial.own).loss)


class Norm(nn.Module):
    """As Liger's: a class of its own with the weight and the epsilon."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(hidden, hidden.shape[-1:], self.weight, self.variance_epsilon)


class SwiGLU(nn.Module):
    """As Liger's: one op of gate and up."""

    def __init__(self, config: transformers.LlamaConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj, self.down_proj = (
            nn.Linear(*sizes, bias=False) for sizes in [(hidden, inner)] * 2 + [(inner, hidden)]
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


def _bind_kernels(model: nn.Module) -> None:
    """What Liger does to an instance."""
    for module in model.modules():
        for end, kind in (("RMSNorm", Norm), ("MLP", SwiGLU)):
            if type(module).__name__.endswith(end):
                module.__dict__["forward"] = MethodType(kind.forward, module)


@exact(
    f"{M}.forward (Liger's RMSNorm, SwiGLU and RoPE)",
    how="applied to the class or the instance, before px.parallelize or after",
    spreads=(Spread(2), Spread(2, 2, 3)),
)
def kernels(trial: Trial) -> None:
    llama = transformers.models.llama.modeling_llama
    rope = mock.Mock(side_effect=llama.apply_rotary_pos_emb)
    replaced = {"LlamaRMSNorm": Norm, "LlamaMLP": SwiGLU, "apply_rotary_pos_emb": rope}
    trial.reference(**trial.whole).loss.backward()
    for when in ("before", "after", "class"):
        with mock.patch.multiple(llama, **replaced) if when == "class" else nullcontext():
            model = trial.tiny.model()
            if when == "before":
                _bind_kernels(model)
            trial.model = model = parallel(model, trial.mesh)
            if when == "after":
                _bind_kernels(model)
            if trial.spread.zero:
                px.data_parallel(model, trial.mesh, trial.spread.zero)
            model(**trial.own).loss.backward()
        trial.equal(gradients=True)
    close(rope.called, True)


@refused(
    f"{M}.forward (Liger's fused loss on an instance)", instead="fused_linear_cross_entropy=False"
)
def kernels_with_loss(trial: Trial) -> None:
    model = transformers.LlamaForCausalLM(trial.tiny.config())
    model.forward = MethodType(type(model).forward, model)
    close(trial.model.training, True)
    px.parallelize(model, trial.mesh)


@exact(f"{M}.generate", how="the same tokens on all tp ranks")
def generate(trial: Trial) -> None:
    ids = trial.whole["input_ids"][:1, 3:]
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    close(
        trial.model.eval().generate(ids, **options),
        trial.reference.eval().generate(ids, **options),
    )


@refused(f"{M}.generate_batch", f"{M}.init_continuous_batching", instead="px.generate")
def generate_batch(trial: Trial) -> None:
    each_refused(
        trial.model.init_continuous_batching, lambda: trial.model.generate_batch([[5, 6, 7]])
    )


@exact(
    f"{M}.save_pretrained",
    how="every byte once; with HuggingFace's options that change nothing",
    spreads=EVERYWHERE,
)
def save_pretrained(trial: Trial) -> None:
    path = trial.folder / "saved"
    trial.model.save_pretrained(
        path,
        is_main_process=trial.mesh.rank == 0,
        state_dict=None,
        save_function=torch.save,
        safe_serialization=True,
        push_to_hub=False,
        variant=None,
        token=None,
        max_shard_size="1GB",
    )
    again = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    for name, value in trial.reference.state_dict().items():
        close(again.state_dict()[name], value)


@exact(
    f"{M}.save_pretrained (state_dict=)",
    how="full tensors, which the main process writes alone",
    spreads=EVERYWHERE,
)
def save_pretrained_given(trial: Trial) -> None:
    path, first = trial.folder / "saved", trial.mesh.rank == 0
    full = {name: 2 * value for name, value in px.full_state_dict(trial.model).items()}
    trial.model.save_pretrained(path, is_main_process=first, state_dict=full)
    trial.model.save_pretrained(trial.folder / "own")
    if first:
        configs = ((path.with_name(each) / "config.json").read_text() for each in ("saved", "own"))
        close(len(set(configs)), 1)
        again = type(trial.reference).from_pretrained(path, dtype=torch.float64)
        for name, value in trial.reference.state_dict().items():
            close(again.state_dict()[name], 2 * value)
        if trial.mesh.world_size == 1:
            trial.model.save_pretrained(path, state_dict=trial.model.state_dict())
        name = next(iter(full))
        with pytest.raises(ValueError, match=f"{re.escape(name)} of state_dict is missing"):
            trial.model.save_pretrained(path, state_dict={})


@refused(f"{M}.save_pretrained (variant=, push_to_hub=)", instead="does not take")
def save_pretrained_options(trial: Trial) -> None:
    trial.model.save_pretrained(trial.folder, variant="fp8", push_to_hub=True)


@refused(f"{M}.save_pretrained (state_dict= of shards)", instead="px.full_state_dict")
def save_pretrained_of_shards(trial: Trial) -> None:
    shards = trial.model.state_dict()
    trial.model.save_pretrained(trial.folder, state_dict=shards, is_main_process=True)


@refused(f"{M}.push_to_hub", instead="upload it from one of them", spreads=EVERYWHERE)
def push_to_hub(trial: Trial) -> None:
    trial.model.push_to_hub("nobody/nothing")


@refused(
    f"{M}.load_adapter",
    f"{M}.add_adapter",
    f"{M}.get_adapter_state_dict",
    instead="peft.get_peft_model, peft.PeftModel.from_pretrained",
    spreads=(*TP, Spread(1, 1)),
)
def adapters(trial: Trial) -> None:
    import peft

    each_refused(
        lambda: trial.model.load_adapter(trial.folder),
        trial.model.get_adapter_state_dict,
        lambda: trial.model.add_adapter(peft.LoraConfig(target_modules=["q_proj"])),
    )


@refused(
    f"{M}.set_input_embeddings",
    f"{M}.set_output_embeddings",
    instead="model.resize_token_embeddings",
)
def set_embeddings(trial: Trial) -> None:
    embedding, head = nn.Embedding(101, 72), nn.Linear(72, 101)
    each_refused(
        lambda: trial.model.set_input_embeddings(embedding),
        lambda: trial.model.model.set_input_embeddings(embedding),
        lambda: trial.model.set_output_embeddings(head),
    )


@refused(
    *(f"{M}.{name}" for name in ("set_decoder", "set_encoder", "set_use_kernels")),
    instead="before px.parallelize",
)
def set_parts(trial: Trial) -> None:
    each_refused(
        lambda: trial.model.set_encoder(nn.Identity()),
        lambda: trial.model.set_use_kernels(True),
        lambda: trial.model.set_decoder(nn.Identity()),
    )


@refused(f"{M}.save_distributed_checkpoint", instead="px.save_checkpoint", spreads=EVERYWHERE)
def save_distributed_checkpoint(trial: Trial) -> None:
    trial.model.save_distributed_checkpoint(trial.folder)


@refused(f"{M}.lm_head = (a module assigned)", instead="model.resize_token_embeddings")
def assigned_head(trial: Trial) -> None:
    head = trial.model.lm_head
    trial.model.lm_head = nn.Linear(72, 101, dtype=torch.float64)
    try:
        trial.model(**trial.own)
    finally:
        trial.model.lm_head = head


@refused(f"{M}.init_weights", f"{M}.initialize_weights", instead="model.load_state_dict")
def init_weights(trial: Trial) -> None:
    each_refused(trial.model.initialize_weights, trial.model.init_weights)


@exact(f"{M}.resize_token_embeddings", how="rows keep their ids; optimizer= is carried along")
def resize(trial: Trial) -> None:
    for model in (trial.model, trial.reference):
        torch.manual_seed(3)
        model.resize_token_embeddings(107)
    trial.equal()


@exact(
    f"{M}.num_parameters",
    how="of the whole model; get_memory_footprint() is that of this rank",
    spreads=EVERYWHERE,
)
def num_parameters(trial: Trial) -> None:
    for options in ({}, {"exclude_embeddings": True}, {"only_trainable": True}):
        trial.model.lm_head.requires_grad_("only_trainable" not in options)
        trial.reference.lm_head.requires_grad_("only_trainable" not in options)
        close(trial.model.num_parameters(**options), trial.reference.num_parameters(**options))
    bytes_of = trial.model.get_memory_footprint
    buffers = sum(buffer.nbytes for buffer in trial.model.buffers())
    shards = sum(local_part(parameter).nbytes for parameter in trial.model.parameters())
    close([bytes_of(), bytes_of(return_buffers=False)], [shards + buffers, shards])


@exact(
    *(f"{M}.{name}" for name in ("get_input_embeddings", "get_output_embeddings", "tie_weights")),
    f"{M}.set_attn_implementation",
    f"{M}.enable_input_require_grads",
    f"{M}.gradient_checkpointing_enable",
)
def other_methods(trial: Trial) -> None:
    for model in (trial.model, trial.reference):
        model.tie_weights()
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
        close(len(model.get_input_embeddings().weight.shape), 2)
        close(len(model.get_output_embeddings().weight.shape), 2)
    trial.backward()
    trial.equal(gradients=True)
    ids = trial.whole["input_ids"]
    for model in (trial.model, trial.reference):
        model.eval().set_attn_implementation("eager")
    close(trial.model(ids).logits, trial.reference(ids).logits)


@refused("transformers.optimization.Adafactor", instead="use px.Adafactor", spreads=EVERYWHERE)
def transformers_adafactor(trial: Trial) -> None:
    for parameter in trial.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    transformers.optimization.Adafactor(trial.model.parameters()).step()


@refused(
    "transformers.Trainer",
    instead="px.Trainer trains parallel models",
    spreads=(Spread(2), Spread(1, 2), Spread(1, 2, 2)),
)
def trainer(trial: Trial) -> None:
    with processes():
        options = transformers.TrainingArguments(
            str(trial.folder), use_cpu=True, report_to=[], max_steps=1
        )
        data = [{name: value[0] for name, value in trial.own.items()}] * 4
        transformers.Trainer(trial.model, options, train_dataset=data).train()


@refused(
    "transformers.Trainer.evaluate",
    instead="px.Trainer trains parallel models",
)
def trainer_evaluate(trial: Trial) -> None:
    with processes():
        options = transformers.TrainingArguments(str(trial.folder), use_cpu=True, report_to=[])
        data = [{name: value[0] for name, value in trial.own.items()}] * 4
        transformers.Trainer(trial.model, options, eval_dataset=data).evaluate()


@exact("transformers.Trainer (one process)", how="its checkpoints too", spreads=(Spread(1, 1),))
def trainer_alone(trial: Trial) -> None:
    for model, folder in ((trial.model, "ours"), (trial.reference, "theirs")):
        options = transformers.TrainingArguments(
            str(trial.folder / folder),
            use_cpu=True,
            report_to=[],
            max_steps=2,
            seed=3,
            save_steps=1,
            lr_scheduler_type="constant",
            disable_tqdm=True,
            logging_steps=1000,
        )
        data = [{name: value[0] for name, value in trial.whole.items()}] * 4
        transformers.Trainer(model, options, train_dataset=data).train()
    trial.equal(tolerance=1e-7)
    again = px.from_pretrained(trial.folder / "ours" / "checkpoint-2", trial.mesh)
    close(again.lm_head.weight, trial.model.lm_head.weight)
