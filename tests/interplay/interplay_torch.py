"""Functions of torch on models, parameters, gradients and optimizers."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import torch
from interplay import (
    DATA_PARALLEL,
    EVERYWHERE,
    ONCE_A_STAGE,
    TP,
    Spread,
    Trial,
    close,
    each_refused,
    exact,
    expect,
    refused,
    step,
)
from torch import nn
from torch.nn import functional, utils
from torch.nn.utils import clip_grad_norm_ as imported_by_name
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.flop_counter import FlopCounterMode

import parallel_ext as px
from parallel_ext.sharding.shards import LocalShard
from parallel_ext.sharding.slices import local_part

OPTIMIZERS = ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam")
OPTIMIZERS += ("RMSprop", "SGD")

# Models


@exact("torch.nn.Module.to", "torch.nn.Module.half", "torch.nn.Module.requires_grad_")
def casts(trial: Trial) -> None:
    for model in (trial.model, trial.reference):
        model.to(torch.float32).double().lm_head.requires_grad_(False)
    trial.backward()
    trial.equal(gradients=True, tolerance=1e-5)


@exact("torch.nn.Module.zero_grad", "torch.nn.Module.train", spreads=EVERYWHERE)
def zero_grad(trial: Trial) -> None:
    for model in (trial.model, trial.reference):
        model.train(False).train()
    trial.backward()
    trial.model.zero_grad()
    assert_none(parameter.grad for parameter in trial.model.parameters())


def assert_none(values: Any) -> None:
    if any(value is not None for value in values):
        raise AssertionError("something is not None")


@exact(
    "torch.nn.Module.state_dict",
    "torch.save",
    how="this rank's shards, with a marker that a plain model refuses",
)
def state_dict(trial: Trial) -> None:
    state = trial.model.state_dict()
    path = trial.folder / f"{trial.mesh.rank}.pt"
    torch.save({name: value.cpu() for name, value in state.items()}, path)
    saved = torch.load(path)
    if any(type(value) is not torch.Tensor for value in saved.values()):
        raise AssertionError("a file holds more than tensors")
    other = trial.another(seed=2)
    other.load_state_dict(saved)
    trial.model = other
    trial.equal()
    load = trial.reference.load_state_dict
    expect(RuntimeError, "parallel_ext_local_shards", lambda: load(saved))


@exact("torch.nn.Module.load_state_dict", how="full tensors, or what this rank has saved")
def load_state_dict(trial: Trial) -> None:
    trial.model.load_state_dict(trial.tiny.model(seed=2).state_dict())
    trial.reference.load_state_dict(trial.tiny.model(seed=2).state_dict())
    trial.equal()


@refused(
    "torch.nn.Module.load_state_dict (another rank's shards)",
    instead="this state_dict holds the shards of tp_rank=",
)
def foreign_state_dict(trial: Trial) -> None:
    torch.save(trial.model.state_dict(), trial.folder / f"{trial.mesh.rank}.pt")
    trial.mesh.control.barrier("saved")
    trial.model.load_state_dict(torch.load(trial.folder / f"{1 - trial.mesh.rank}.pt"))


@refused(
    "torch.nn.Module.forward (of a sharded linear that sums, or of experts: replaced)",
    instead="what stands in its place, or uses the weight, must call it",
)
def patched(trial: Trial) -> None:
    layer = trial.model.model.layers[0].self_attn.o_proj
    own = layer.forward
    try:
        layer.forward = partial(lambda forward, x: forward(x), own)
        trial.model(**trial.own)  # which calls it
        layer.forward = lambda x: functional.linear(x, layer.weight)
        with torch.no_grad():
            trial.model(**trial.own)
    finally:
        layer.forward = own


@exact(
    "torch.nn.Module.register_forward_hook",
    "torch.nn.Module.register_full_backward_hook",
    how="on layers, attentions, MLPs and the head; inside of attentions and MLPs they see "
    "[this rank's features](limits.md#training); with "
    "[sequence_parallel](parallelize.md#sequence-parallelism) some see a rank's own tokens",
)
def module_hooks(trial: Trial) -> None:
    norms: list[list[float]] = []
    for model in (trial.model, trial.reference):
        seen: list[float] = []
        norms.append(seen)
        layer = model.model.layers[0]
        layer.register_forward_hook(lambda m, a, out, seen=seen: seen.append(out.norm().item()))
        layer.register_full_backward_hook(
            lambda m, i, o, seen=seen: seen.append(o[0].norm().item())
        )
    trial.backward()
    close(torch.tensor(norms[0]), torch.tensor(norms[1]))


@exact(
    "torch.nn.Module.register_forward_pre_hook",
    how="the same; what one on a linear of an attention or MLP adds has "
    "[its part](limits.md#training) of a gradient",
)
def pre_hooks(trial: Trial) -> None:
    # Of a copy too, whose own hooks come behind as well.
    for model in (copy.deepcopy(trial.model), trial.model):
        gradients = []
        for each in (model, copy.deepcopy(trial.reference)):
            layer, added = each.model.layers[0], []
            for name in ("self_attn", "mlp"):
                vector = torch.full((72,), 0.1, dtype=torch.float64, requires_grad=True)
                layer.get_submodule(name).register_forward_pre_hook(
                    partial(with_added, vector), with_kwargs=True
                )
                added.append(vector)
            each(**trial.whole).loss.backward()
            gradients.append([vector.grad for vector in added])
        for ours, theirs in zip(*gradients, strict=True):
            close(ours, theirs)


def with_added(
    vector: torch.Tensor, module: nn.Module, args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    if args:
        return (args[0] + vector, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": kwargs["hidden_states"] + vector}


def first(values: Any) -> torch.Tensor:
    return values[0] if isinstance(values, tuple) else values


@exact(
    "torch.Tensor.register_hook",
    "torch.Tensor.register_post_accumulate_grad_hook",
    how="with the final gradient; the optimizer may step in them; `register_hook` not under FSDP",
    spreads=(Spread(2), Spread(4)),
)
def gradient_hooks(trial: Trial) -> None:
    def twice(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2

    def descend(parameter: nn.Parameter) -> None:
        parameter.data.sub_(parameter.grad, alpha=0.1)

    for model in (trial.model, trial.reference):
        for parameter in model.parameters():
            parameter.register_hook(twice)
            parameter.register_post_accumulate_grad_hook(descend)
    trial.backward()
    trial.equal(gradients=True)
    trial.equal()


@exact(
    "torch.nn.utils.stateless.functional_call",
    "torch.func.functional_call",
    how="with tensors of the shapes of this rank's shards",
    spreads=(Spread(2), Spread(4)),
)
def functional_call(trial: Trial) -> None:
    losses = []
    for model in (trial.model, trial.reference):
        others = {name: parameter * 1.5 for name, parameter in model.named_parameters()}
        for given in ({"model.norm.weight": model.model.norm.weight * 2}, others):
            loss = torch.func.functional_call(model, given, (), trial.whole).loss
            loss.backward()
            losses.append(loss.detach())
    close(torch.stack(losses[:2]), torch.stack(losses[2:]))
    trial.equal(gradients=True)


@refused(
    "torch.autograd.grad (of what ranks sum)",
    "torch.autograd.backward (inputs= of what ranks sum)",
    instead="call loss.backward() and read .grad",
    spreads=(Spread(4), *DATA_PARALLEL),
)
def gradients_of_some(trial: Trial) -> None:
    projection = trial.model.model.layers[0].self_attn.k_proj
    weight, loss = projection.weight, trial.model(**trial.own).loss
    gathered = projection.weight  # by FSDP of stage 2
    each_refused(
        lambda: torch.autograd.grad(loss, weight),
        lambda: torch.autograd.grad(loss, inputs=[weight], allow_unused=True),
        lambda: torch.autograd.grad(loss, {"of keys": weight}, allow_unused=True),
        lambda: loss.backward(inputs=weight),
        lambda: torch.autograd.grad(loss, gathered),  # which the first refusal has put aside
        lambda: torch.autograd.backward([loss], inputs=[trial.model.lm_head.weight, weight]),
        lambda: torch.autograd.backward([loss], None, None, False, None, [weight]),
    )


@exact(
    "torch.autograd.grad",
    "torch.autograd.backward (inputs=)",
    how="of what tp shards and no dp rank",
)
def gradients_of_one(trial: Trial) -> None:
    for model in (trial.model, trial.reference):
        head, query = model.lm_head.weight, model.model.layers[0].self_attn.q_proj.weight
        loss = model(**trial.whole).loss
        (head.grad,) = torch.autograd.grad(loss, (p for p in [head]), retain_graph=True)
        loss.backward(inputs=query)
    trial.equal(gradients=True)


@refused(
    "torch.optim.swa_utils.AveragedModel (after px.data_parallel)",
    "copy.deepcopy (after px.data_parallel)",
    instead="px.full_state_dict",
    spreads=DATA_PARALLEL,
)
def averaged_over_dp(trial: Trial) -> None:
    each_refused(
        lambda: copy.deepcopy(trial.model),
        lambda: torch.optim.swa_utils.AveragedModel(trial.model),
    )


@exact("torch.optim.swa_utils.AveragedModel", "copy.deepcopy", how="shard by shard")
def averaged(trial: Trial) -> None:
    means = [
        torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda a, b, n: 0.9 * a + 0.1 * b)
        for model in (trial.model, trial.reference)
    ]
    for model, mean in zip((trial.model, trial.reference), means, strict=True):
        for _ in range(2):
            step(model, torch.optim.SGD(model.parameters(), lr=0.1), trial.whole)
            mean.update_parameters(model)
    trial.model, trial.reference = (mean.module for mean in means)
    trial.equal()


@refused("torch.save (of the model itself)", "pickle.dumps", instead="model.save_pretrained")
def pickled(trial: Trial) -> None:
    pickle.dumps(trial.model)


@refused(
    *("torch.nn.init.uniform_", "torch.nn.init.normal_", "torch.nn.init.trunc_normal_"),
    *("torch.nn.init.eye_", "torch.nn.init.dirac_", "torch.nn.init.orthogonal_"),
    *("torch.nn.init.sparse_", "torch.nn.init.xavier_uniform_", "torch.nn.init.xavier_normal_"),
    *("torch.nn.init.kaiming_uniform_", "torch.nn.init.kaiming_normal_"),
    instead="model.load_state_dict takes full tensors",
)
def drawn(trial: Trial) -> None:
    each_refused(
        *(lambda n=n: getattr(nn.init, f"{n}_")(trial.model.lm_head.weight) for n in DRAWS),
        lambda: nn.init.sparse_(trial.model.lm_head.weight, 0.5),
        *(lambda part=part: nn.init.normal_(part(trial.model.lm_head.weight)) for part in PARTS),
    )


DRAWS = ("uniform", "normal", "trunc_normal", "eye", "dirac", "orthogonal", "xavier_uniform")
DRAWS += ("xavier_normal", "kaiming_uniform", "kaiming_normal")
PARTS = (
    *(lambda weight: weight.data, lambda weight: weight[-2:], lambda weight: weight.data[-2:]),
    lambda weight: weight.detach().t(),
)


@exact("torch.nn.init.zeros_", "torch.nn.init.ones_", "torch.nn.init.constant_")
def filled(trial: Trial) -> None:
    for model in (trial.model, trial.reference):
        nn.init.constant_(model.lm_head.weight, 0.5)
        nn.init.zeros_(model.model.embed_tokens.weight)
    trial.equal()


# torch.nn.utils


@exact(
    *("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_norm"),
    how="by the norm of the full gradients; every rank calls it",
    spreads=ONCE_A_STAGE,
)
def clip_grad_norm(trial: Trial) -> None:
    both = (trial.model, trial.reference)
    for norm_type in (1, 2.0, 3, float("inf")):
        for foreach in (None, True, False):
            for model in both:
                model.zero_grad()
            trial.backward()
            close(
                *(imported_by_name(m.parameters(), 0.05, norm_type, foreach=foreach) for m in both)
            )
            trial.equal(gradients=True)
    some = [[m.lm_head.weight, *m.model.layers[0].parameters()] for m in both]
    close(*(utils.clip_grad_norm_(each, 0.04) for each in some))
    trial.equal(gradients=True)
    close(*(utils.clip_grad_norm_(m.lm_head.weight, 0.01) for m in both))
    trial.equal(gradients=True)
    for model in both:
        model.zero_grad()
    close(*(utils.clip_grad_norm_(m.parameters(), 0.01) for m in both))


@exact(
    "torch.nn.utils.clip_grad_norm_ (several models)",
    how="the norm of all, parameters of no parallel model included",
)
def clip_several(trial: Trial) -> None:
    ours = [trial.model, trial.another(seed=2), nn.Linear(3, 2, dtype=torch.float64)]
    theirs = [trial.reference, trial.tiny.model(seed=2), copy.deepcopy(ours[2])]
    for models in (ours, theirs):
        for model in models[:2]:
            model(**trial.whole).loss.backward()
        models[2](torch.ones(3, dtype=torch.float64)).sum().backward()
    close(
        *(
            utils.clip_grad_norm_([p for m in each for p in m.parameters()], 0.1)
            for each in (ours, theirs)
        )
    )
    trial.equal(gradients=True)
    close(ours[2].weight.grad, theirs[2].weight.grad)


@exact("torch.nn.utils.get_total_norm", "torch.nn.utils.clip_grads_with_norm_", spreads=EVERYWHERE)
def total_norm(trial: Trial) -> None:
    trial.backward()
    norms = []
    for model in (trial.model, trial.reference):
        norms.append(utils.get_total_norm(p.grad for p in model.parameters()))
        utils.clip_grads_with_norm_(model.parameters(), 0.05, norms[-1])
    close(*norms)
    trial.equal(gradients=True)
    close(*(utils.get_total_norm(m.parameters()) for m in (trial.model, trial.reference)))


@exact("torch.nn.utils.clip_grad_value_", how="element by element", spreads=EVERYWHERE)
def clip_grad_value(trial: Trial) -> None:
    trial.backward()
    for model in (trial.model, trial.reference):
        utils.clip_grad_value_(model.parameters(), 1e-3)
    trial.equal(gradients=True)


@refused("torch.nn.functional.linear_cross_entropy", instead="px.ops.linear_vocab_cross_entropy")
def linear_cross_entropy(trial: Trial) -> None:
    hidden = torch.ones(2, trial.model.config.hidden_size, dtype=torch.float64)
    functional.linear_cross_entropy(hidden, trial.model.lm_head.weight, torch.tensor([1, 2]))


@refused("torch.nn.utils.parameters_to_vector", instead="px.full_state_dict", spreads=EVERYWHERE)
def parameters_to_vector(trial: Trial) -> None:
    each_refused(
        lambda: utils.parameters_to_vector(trial.model.parameters()),
        lambda: utils.parameters_to_vector(filter(torch.is_tensor, trial.model.parameters())),
        lambda: utils.parameters_to_vector(dict(trial.model.named_parameters()).values()),
    )


@refused("torch.nn.utils.vector_to_parameters", instead="model.load_state_dict", spreads=EVERYWHERE)
def vector_to_parameters(trial: Trial) -> None:
    utils.vector_to_parameters(torch.zeros(10**6), trial.model.parameters())


@refused(
    *("torch.nn.utils.parametrizations.weight_norm", "torch.nn.utils.parametrizations.orthogonal"),
    *("torch.nn.utils.parametrizations.spectral_norm", "torch.nn.utils.weight_norm"),
    *("torch.nn.utils.spectral_norm", "torch.nn.utils.parametrize.register_parametrization"),
    "torch.nn.utils.parametrize.transfer_parametrizations_and_params",
    instead="call it before px.parallelize",
)
def parametrized(trial: Trial) -> None:
    module = trial.model.model.layers[0].mlp.gate_proj
    each_refused(
        lambda: parametrizations.weight_norm(module),
        lambda: parametrizations.orthogonal(module),
        lambda: parametrizations.spectral_norm(module),
        lambda: utils.weight_norm(module),
        lambda: utils.spectral_norm(module),
        lambda: parametrize.transfer_parametrizations_and_params(module, nn.Linear(3, 3)),
        lambda: parametrize.register_parametrization(module, "weight", nn.Tanh()),
    )


@refused(
    "torch.nn.utils.fuse_linear_bn_eval",
    "torch.nn.utils.fuse_conv_bn_eval",
    instead="call it before px.parallelize",
)
def fused(trial: Trial) -> None:
    module = trial.model.model.layers[0].mlp.gate_proj
    each_refused(
        lambda: utils.fuse_conv_bn_eval(module, nn.BatchNorm2d(97)),
        lambda: utils.fuse_linear_bn_eval(module, nn.BatchNorm1d(97)),
    )


@exact("torch.nn.utils.parametrize (of what every rank holds whole)")
def parametrized_norm(trial: Trial) -> None:
    for model in (trial.model, trial.reference):
        parametrize.register_parametrization(model.model.norm, "weight", nn.Tanh())
    close(trial.model(**trial.whole).loss, trial.reference(**trial.whole).loss)


@refused(
    *(f"torch.nn.utils.prune.{name}_unstructured" for name in ("l1", "random", "global")),
    *(f"torch.nn.utils.prune.{name}_structured" for name in ("ln", "random")),
    *("torch.nn.utils.prune.identity", "torch.nn.utils.prune.custom_from_mask"),
    instead="call it before px.parallelize",
)
def pruned(trial: Trial) -> None:
    module = trial.model.model.layers[0].mlp.gate_proj
    each_refused(
        lambda: prune.l1_unstructured(module, "weight", 0.3),
        lambda: prune.random_unstructured(module, "weight", 0.3),
        lambda: prune.ln_structured(module, "weight", 0.3, 2, 0),
        lambda: prune.random_structured(module, "weight", 0.3, 0),
        lambda: prune.identity(module, "weight"),
        lambda: prune.custom_from_mask(module, "weight", torch.ones_like(module.weight)),
        lambda: prune.global_unstructured([(module, "weight")], prune.L1Unstructured, amount=0.3),
        # Of what every rank holds whole, each would draw a mask of its own.
        lambda: prune.random_unstructured(trial.model.model.norm, "weight", 0.3),
    )


@refused("torch.ao.quantization.quantize_dynamic", instead="do it to a plain model")
def quantized(trial: Trial) -> None:
    torch.ao.quantization.quantize_dynamic(trial.model, {nn.Linear})


# torch.optim


@exact(
    *(f"torch.optim.{name}" for name in OPTIMIZERS),
    how="fused and foreach too; torch has no fused SGD and Adagrad after px.data_parallel",
    spreads=ONCE_A_STAGE,
)
def elementwise_optimizers(trial: Trial) -> None:
    runs: list[tuple[str, dict[str, bool]]] = [(name, {}) for name in OPTIMIZERS]
    runs += [("AdamW", {"foreach": True}), ("AdamW", {"fused": True}), ("SGD", {"foreach": True})]
    for name, options in runs:
        trial.model, trial.reference = trial.another(), trial.tiny.model()
        for model, batch in ((trial.model, trial.own), (trial.reference, trial.whole)):
            optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3, **options)
            for _ in range(2):
                step(model, optimizer, batch)
        trial.equal(tolerance=1e-7)


@exact("torch.optim.Rprop", how="without px.data_parallel, after which torch refuses it")
def rprop(trial: Trial) -> None:
    for model in (trial.model, trial.reference):
        optimizer = torch.optim.Rprop(model.parameters(), lr=1e-3)
        for _ in range(2):
            step(model, optimizer, trial.whole)
    trial.equal(tolerance=1e-7)


class Lion(torch.optim.Optimizer):
    """An optimizer of somebody else that looks at single elements."""

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 1 - group["beta"])
                parameter.sub_(self.direction(mean), alpha=group["lr"])

    @staticmethod
    def direction(mean: torch.Tensor) -> torch.Tensor:
        return mean.sign()


class Normalized(Lion):
    """One that takes norms of tensors, as LAMB and LARS do."""

    @staticmethod
    def direction(mean: torch.Tensor) -> torch.Tensor:
        return mean / mean.norm()


class Closed(Lion):
    """One that cannot be tried."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        if len(self.param_groups[0]["params"]) < 2:
            raise ValueError("only for models")


@exact(
    "torch.optim.Optimizer (others that look at single elements)",
    how="found out by steps on the parts of a matrix",
)
def foreign_optimizer(trial: Trial) -> None:
    for model in (trial.model, trial.reference):
        optimizer = Lion(model.parameters())
        for _ in range(2):
            step(model, optimizer, trial.whole)
    trial.equal()


def _one_step(trial: Trial, optimizer: torch.optim.Optimizer) -> None:
    for parameter in trial.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(lambda: 0.0)


@refused(
    "torch.optim.Optimizer (others that take norms, as LAMB and LARS)",
    instead="looks at more than single elements",
)
def normalized(trial: Trial) -> None:
    _one_step(trial, Normalized(trial.model.parameters()))


@refused("torch.optim.Optimizer (that cannot be tried)", instead="an attribute elementwise = True")
def closed(trial: Trial) -> None:
    _one_step(trial, Closed(trial.model.parameters()))


@refused("torch.optim.Adafactor", instead="use px.Adafactor", spreads=EVERYWHERE)
def adafactor(trial: Trial) -> None:
    _one_step(trial, torch.optim.Adafactor(trial.model.parameters()))


@refused("torch.optim.Muon", instead="px.Adafactor", spreads=EVERYWHERE)
def muon(trial: Trial) -> None:
    _one_step(trial, torch.optim.Muon([p for p in trial.model.parameters() if p.dim() == 2]))


@refused("torch.optim.LBFGS", instead="px.Adafactor", spreads=EVERYWHERE)
def lbfgs(trial: Trial) -> None:
    _one_step(trial, torch.optim.LBFGS(trial.model.parameters()))


@refused("torch.optim.SparseAdam", instead="use torch's AdamW or SGD")
def sparse_adam(trial: Trial) -> None:
    _one_step(trial, torch.optim.SparseAdam(trial.model.parameters()))


@exact(
    "torch.optim.Optimizer.state_dict",
    "torch.optim.Optimizer.load_state_dict",
    how="this rank's shards, with a marker; loads them, or full tensors",
    spreads=EVERYWHERE,
)
def optimizer_state(trial: Trial) -> None:
    def made(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    ours, theirs = made(trial.model), made(trial.reference)
    for _ in range(2):
        step(trial.model, ours, trial.own)
        step(trial.reference, theirs, trial.whole)
    path = trial.folder / f"{trial.mesh.rank}.pt"
    torch.save(ours.state_dict(), path)
    for state in (torch.load(path), ours.state_dict(), theirs.state_dict()):
        loaded = made(trial.model)
        loaded.load_state_dict(copy.deepcopy(state))
        for parameter, expected in ours.state.items():
            for key, value in loaded.state[parameter].items():
                if isinstance(value, LocalShard) or type(value) is not type(expected[key]):
                    raise AssertionError(f"{key} is a {type(value).__name__}")
                close(local_part(value), local_part(expected[key]))
        step(trial.model, loaded, trial.own)


@refused(
    "torch.optim.Optimizer.load_state_dict (another rank's)",
    instead="this state of an optimizer holds the shards of",
)
def foreign_optimizer_state(trial: Trial) -> None:
    optimizer = torch.optim.AdamW(trial.model.parameters(), lr=0.0, weight_decay=0.0)
    step(trial.model, optimizer, trial.own)
    torch.save(optimizer.state_dict(), trial.folder / f"{trial.mesh.rank}.pt")
    trial.mesh.control.barrier("saved")
    optimizer.load_state_dict(torch.load(trial.folder / "0.pt"))


@refused("torch.optim.swap_in_optimizer_params_and_state", instead="step the optimizer itself")
def swapped_in(trial: Trial) -> None:
    optimizer = torch.optim.AdamW(trial.model.parameters(), lr=0.0, weight_decay=0.0)
    step(trial.model, optimizer, trial.own)
    parameters = dict(trial.model.named_parameters())
    with torch.optim.swap_in_optimizer_params_and_state(
        optimizer, parameters, optimizer.state_dict()
    ):
        optimizer.step()


@exact("torch.optim.swa_utils.update_bn")
def update_bn(trial: Trial) -> None:
    torch.optim.swa_utils.update_bn([trial.own["input_ids"]], trial.model)
    trial.equal()


@exact("torch.optim.lr_scheduler", "torch.optim.swa_utils.SWALR")
def scheduler(trial: Trial) -> None:
    for model in (trial.model, trial.reference):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for _ in range(3):
            step(model, optimizer, trial.whole)
            decay.step()
    trial.equal()


# Precision and compilers


@exact("torch.amp.GradScaler", how="all ranks skip a step, or none", spreads=EVERYWHERE)
def grad_scaler(trial: Trial) -> None:
    optimizer = torch.optim.SGD(trial.model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(trial.model(**trial.own).loss).backward()
    if trial.mesh.rank == 1:
        gradient = trial.model.model.layers[0].mlp.up_proj.weight.grad
        local_part(gradient)[0, 0] = float("inf")
    before = [local_part(p.detach()).clone() for p in trial.model.parameters()]
    scaler.unscale_(optimizer)
    utils.clip_grad_norm_(trial.model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    close(scaler.get_scale(), 1.0)
    for parameter, old in zip(trial.model.parameters(), before, strict=True):
        close(local_part(parameter.detach()), old)


@exact("torch.autocast")
def autocast(trial: Trial) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = trial.model(**trial.whole).loss, trial.reference(**trial.whole).loss
    close(ours, theirs, 2e-2)


@exact(
    "torch.utils.flop_counter.FlopCounterMode",
    how="of this rank; the sum over the ranks of a tp group is that of one process",
)
def flops(trial: Trial) -> None:
    ours, theirs = (counted(m, trial.whole) for m in (trial.model, trial.reference))
    # To 1e-4: older transformers compute rotary angles by a product, on each rank.
    close(sum(trial.mesh.control.all_gather_object(ours)) / theirs, 1.0, tolerance=1e-4)


def counted(model: nn.Module, batch: dict[str, Any]) -> int:
    """The floating-point operations of a forward and a backward."""
    with FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    return counter.get_total_flops()


@exact("torch.compile", how="of a model but for checks and loss; of a layer without graph breaks")
def compiled(trial: Trial) -> None:
    loss = trial.reference(**trial.whole).loss
    close(torch.compile(trial.model, backend="eager")(**trial.whole).loss, loss)
    for layer in trial.model.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    trial.backward()
    trial.equal(gradients=True)


@exact("torch.export.export")
def exported(trial: Trial) -> None:
    class Logits(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(ids, use_cache=False).logits

    ids = trial.whole["input_ids"]
    program = torch.export.export(Logits(trial.model.eval()), (ids,), strict=False)
    with torch.no_grad():
        close(program.module()(ids), trial.reference.eval()(ids).logits)


@refused("torch.jit.trace", instead="torch.export.export, and torch.compile, do")
def traced(trial: Trial) -> None:
    torch.jit.trace(trial.model.eval(), trial.whole["input_ids"], strict=False)


@exact("torch.utils.checkpoint.checkpoint", how="by model.gradient_checkpointing_enable()")
def checkpointed(trial: Trial) -> None:
    for model in (trial.model, trial.reference):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    trial.backward()
    trial.equal(gradients=True)


# torch.distributed


@exact(
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    how="names in files are those without the wrapper",
)
def checkpoint_wrapper(trial: Trial) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for model in (trial.model, trial.reference):
        model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
        model.config.use_cache = False
    trial.backward()
    trial.model.save_pretrained(trial.folder / "saved")
    full = px.full_state_dict(trial.model)
    plain = trial.tiny.model().state_dict()
    if trial.mesh.rank == 0:
        close(full.keys() == plain.keys(), True)


@refused(
    *("torch.distributed.fsdp.fully_shard", "torch.distributed.fsdp.FullyShardedDataParallel"),
    instead="px.data_parallel",
    spreads=(Spread(2), Spread(1, 2)),
)
def fully_sharded(trial: Trial) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    if trial.spread.dp > 1:
        px.no_data_parallel(trial.model)
    each_refused(
        lambda: FullyShardedDataParallel(trial.model),
        lambda: fully_shard(trial.model.model.layers[0]),
        lambda: fully_shard(trial.model),
    )


@refused("torch.nn.parallel.DistributedDataParallel", instead="px.data_parallel")
def distributed_data_parallel(trial: Trial) -> None:
    wrapper = nn.ModuleList([trial.model])
    each_refused(
        lambda: nn.parallel.DistributedDataParallel(trial.model),
        lambda: nn.parallel.DistributedDataParallel(wrapper),
    )


@exact(
    "torch.nn.parallel.DistributedDataParallel (tp=1, ep=1)",
    how="gradients of the job; the loss of a rank is its share",
    spreads=(Spread(1, 2),),
)
def distributed_data_parallel_alone(trial: Trial) -> None:
    trial.reference(**trial.whole).loss.backward()
    wrapped = nn.parallel.DistributedDataParallel(trial.model)
    wrapped(**trial.own).loss.backward()
    trial.equal(gradients=True)


@refused(
    "torch.nn.Module.forward (in training, dp > 1, without px.data_parallel)",
    instead="px.no_data_parallel(model) says that you do",
    spreads=(Spread(1, 2), Spread(2, 2)),
)
def trained_apart(trial: Trial) -> None:
    expect(RuntimeError, "gradients of the dp ranks", lambda: trial.model(**trial.own))
    trial.model.model(trial.own["input_ids"])  # the decoder alone


@refused(
    "torch.nn.DataParallel",
    "torch.distributed.tensor.parallel.parallelize_module",
    instead="px.",
)
def other_wrappers(trial: Trial) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    each_refused(
        lambda: nn.DataParallel(trial.model),
        lambda: parallelize_module(
            trial.model, init_device_mesh("cpu", (2,)), {"lm_head": ColwiseParallel()}
        ),
    )


@refused("torch.distributed.optim.ZeroRedundancyOptimizer", instead="px.data_parallel", spreads=TP)
def zero_redundancy(trial: Trial) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer(
        trial.model.parameters(), optimizer_class=torch.optim.SGD, lr=0.0
    )
    _one_step(trial, optimizer)


@refused(
    "torch.distributed.algorithms.model_averaging.utils.average_parameters",
    instead="px.data_parallel",
    spreads=TP + DATA_PARALLEL[-1:],
)
def average_parameters(trial: Trial) -> None:
    from torch.distributed.algorithms.model_averaging.utils import average_parameters

    average_parameters(trial.model.parameters(), torch.distributed.group.WORLD)
