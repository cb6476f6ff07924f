"""What holds for every registered op: samples exist, opcheck passes, it sends what it should.

A new op needs an entry in :func:`op_samples.samples_of_users`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from op_samples import (
    IN_GRAPHS_OF_OTHERS,
    NAMESPACE,
    REGISTERED,
    as_tuple,
    is_float,
    op_of,
    samples_of,
    samples_of_users,
    trained,
    with_trained,
)
from reference_ops import BOTH_PATHS, aten_path, counted_both_ways, on_ranks
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from parallel_ext.ops import ALONE, Group, column_linear

PUBLIC = [name for name in REGISTERED if not IN_GRAPHS_OF_OTHERS.fullmatch(name)]


def test_every_registered_op_has_samples():
    assert sorted(samples_of_users(ALONE)) == PUBLIC
    assert all(samples_of(name, ALONE) for name in REGISTERED)


COMMUNICATING = [
    name for name in REGISTERED if "group_name" in {a.name for a in op_of(name)._schema.arguments}
]


def _opcheck(group: Group, name: str, compiled: bool) -> None:
    for number, sample in enumerate(samples_of(name, group)):
        checks = ["test_schema", "test_faketensor"]
        checks += ["test_autograd_registration"] * (number == 0)
        checks += ["test_aot_dispatch_dynamic"] * (compiled and number < 4)  # which takes seconds
        torch.library.opcheck(op_of(name), sample, test_utils=checks)


@pytest.mark.parametrize(
    ("name", "size"), [(n, 1) for n in REGISTERED] + [(n, 2) for n in COMMUNICATING]
)
def test_op_passes_opcheck(name, size):
    """An op that communicates is compiled in a group of two."""
    compiled = size == 2 or name not in COMMUNICATING
    on_ranks(size, _opcheck, name, compiled and not IN_GRAPHS_OF_OTHERS.fullmatch(name))


def _memory(outputs: Any) -> list[Any]:
    tensors = () if outputs is None else as_tuple(outputs)
    return [(each.shape, each.dtype, each.numel() and each.stride()) for each in tensors]


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@BOTH_PATHS
@pytest.mark.parametrize("name", REGISTERED)
def test_outputs_lie_in_memory_as_meta_kernels_say(name, aten):
    for sample in samples_of(name, ALONE):
        with aten_path(aten), torch.no_grad():
            ours = op_of(name)(*sample)
        on_meta = tree_map_only(torch.Tensor, _on_meta, list(sample))
        assert _memory(ours) == _memory(op_of(name)(*on_meta))


# op -> kind and bytes of the one collective of its first sample's forward, and of its backward.
COLLECTIVES: dict[str, tuple[tuple[str, int] | None, tuple[str, int] | None]] = {
    "reduce_from_region": (("all_reduce", 3 * 4 * 4), None),
    "copy_to_region": (None, ("all_reduce", 3 * 4 * 4)),
    "gather_from_region": (("all_gather", 3 * 3 * 4), None),
    "column_linear": (None, ("all_reduce", 3 * 4 * 4)),
    "column_linears": (None, ("all_reduce", 3 * 4 * 4)),
    "row_linear": (("all_reduce", 3 * 4 * 4), None),
    "lora_linear": (("all_reduce", 3 * 4 * 4), None),
    "vocab_cross_entropy": (("all_gather", (4 * 3 + 2) * 4), None),
}


def _collectives(group: Group, name: str) -> list[dict[str, int]]:
    """What the op's forward sends, and what its backward sends."""
    sample = samples_of(name, group)[0]

    return counted_both_ways(lambda: as_tuple(op_of(name)(*sample))[0])


def _expected_counts(sent: tuple[str, int] | None) -> dict[str, int]:
    return {} if sent is None else {sent[0]: 1, f"{sent[0]}_bytes": sent[1], "in_shared_memory": 1}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_op_sends_one_message_and_a_group_of_one_nothing(name, size):
    sent = COLLECTIVES[name] if size > 1 else (None, None)
    assert on_ranks(size, _collectives, name) == [[*map(_expected_counts, sent)]] * size


class _Cut(torch.autograd.Function):
    """A number made of tensors, which get no gradient of it."""

    @staticmethod
    def forward(ctx: object, *tensors: torch.Tensor) -> torch.Tensor:
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


def _leaves_with_gradient(group: Group, name: str, used: int | None) -> list[int]:
    """Numbers of the arguments that get a gradient where only one output, or none, gets one."""
    sample = samples_of(name, group)[0]
    outputs = [each for each in as_tuple(op_of(name)(*sample)) if each.requires_grad]
    if used is not None:
        outputs[used].sum().backward()
    elif outputs:
        _Cut.apply(*outputs).backward()
    leaves = [i for i, each in enumerate(sample) if isinstance(each, torch.Tensor)]
    return [i for i in leaves if sample[i].grad is not None]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", PUBLIC)
def test_op_whose_outputs_get_no_gradient_gives_none(name, size):
    assert on_ranks(size, _leaves_with_gradient, name, None) == [[]] * size


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["column_linears", "block_linears"])
def test_layer_of_several_in_one_op_gets_a_gradient_only_of_its_own_output(name, size):
    for with_gradient in on_ranks(size, _leaves_with_gradient, name, 1):
        assert [i for i in with_gradient if i < 4] == [0, 2]


class _DtypesOfZeros(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.dtype] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.zeros.default:
            self.found.append(output.dtype)
        return output


@pytest.mark.parametrize("name", ["moe_router", "moe_dispatch"])
def test_ids_get_no_gradient_of_zeros(name):
    outputs = [each for each in op_of(name)(*samples_of(name, ALONE)[0]) if is_float(each)]
    with _DtypesOfZeros() as zeros:
        torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
    assert torch.int64 not in zeros.found


def _outputs_with_gradient(group: Group, name: str, argument: int) -> list[int]:
    """Numbers of the outputs that need a gradient where only one argument does."""
    return trained(op_of(name)(*with_trained(samples_of(name, group)[0], [argument])))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("name", "argument"), [("column_linears", 2), ("block_linears", 2), ("moe_take_tokens", 1)]
)
def test_output_of_constants_alone_is_constant(name, argument, size):
    assert on_ranks(size, _outputs_with_gradient, name, argument) == [[1]] * size


# Sums and gathers, whose gradients are such again.
LINEAR = {
    *("copy_to_region", "gather_from_region", "reduce_from_region"),
    *("gather_tokens", "sum_tokens", "take_tokens"),
}
WITHOUT_GRADIENT = {"moe_route_plan", "sum_leaves", "vocab_argmax", "vocab_sample"}
REFUSING = [name for name in PUBLIC if name not in LINEAR | WITHOUT_GRADIENT]
DIFFERENTIABLE = sorted({*REFUSING, *LINEAR})

# Samples whose gradients are others on purpose: of a padding id none, of some weights scaled.
NOT_THE_DERIVATIVE = {
    *(("moe_lora_linear", 1), ("vocab_embedding", 1), ("vocab_embedding_of_tokens", 1))
}
HAS_ONE_BACKWARD = "block_linear_cross_entropy"  # and gradcheck makes several of one output


@BOTH_PATHS
@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if name != HAS_ONE_BACKWARD])
def test_op_passes_gradcheck(name, aten):
    """In fp64. What an op does on several ranks, its own tests compare with one process.

    It notices the samples whose gradients are others.
    """
    checked = 0
    for number, sample in enumerate(samples_of(name, ALONE)):
        places = trained(sample)
        if not places:
            continue
        arguments = [each.detach().double() if is_float(each) else each for each in sample]

        def outputs(
            *leaves: torch.Tensor, arguments: list[Any] = arguments, places: list[int] = places
        ) -> tuple[torch.Tensor, ...]:
            given = dict(zip(places, leaves, strict=True))
            found = op_of(name)(*(given.get(i, each) for i, each in enumerate(arguments)))
            return tuple(each for each in as_tuple(found) if each.requires_grad)

        leaves = [arguments[i].requires_grad_() for i in places]
        right = (name, number) not in NOT_THE_DERIVATIVE
        with aten_path(aten):
            assert torch.autograd.gradcheck(outputs, leaves, raise_exception=right) == right
            assert name not in LINEAR or torch.autograd.gradgradcheck(outputs, leaves)
        checked += 1
    assert checked


def _gradients(name: str, sample: tuple, places: Sequence[int]) -> list[torch.Tensor | None]:
    """Gradients of the arguments at these places, where all others are frozen."""
    copies = with_trained(sample, places)
    outputs = as_tuple(op_of(name)(*copies))
    sum(each.double().square().sum() for each in outputs if each.requires_grad).backward()
    return [copies[i].grad for i in places]


def _frozen_in_turn(group: Group) -> None:
    samples = samples_of_users(group)
    # With a frozen head the gradients are computed in another way.
    for name in (name for name in DIFFERENTIABLE if name != "linear_vocab_cross_entropy"):
        for number, sample in enumerate(samples[name]):
            places = trained(sample)
            if not places:
                continue
            everything = dict(zip(places, _gradients(name, sample, places), strict=True))
            for count in range(1, len(places)):
                for some in combinations(places, count):
                    for place, ours in zip(some, _gradients(name, sample, some), strict=True):
                        theirs = everything[place]
                        assert ours is theirs or torch.equal(ours, theirs), (name, number, some)


@pytest.mark.parametrize(("size", "aten"), [(1, False), (1, True), (2, False)])
def test_what_is_frozen_changes_no_other_gradient(size, aten):
    """Not in a bit."""
    on_ranks(size, _frozen_in_turn, aten=aten)


@pytest.mark.parametrize("name", REFUSING)
def test_a_second_derivative_is_refused_by_name(name):
    refused = 0
    for sample in samples_of(name, ALONE):
        found = [each for each in as_tuple(op_of(name)(*sample)) if each.requires_grad]
        outputs = [each.float().square().sum() for each in found]
        leaves = [sample[i] for i in trained(sample)]
        if outputs:
            with pytest.raises(NotImplementedError, match=f"{name}: second derivatives"):
                torch.autograd.grad(outputs, leaves, create_graph=True)
            refused += 1
    assert refused


def test_a_derivative_in_forward_mode_is_refused_by_name():
    input = torch.ones(3, 4, requires_grad=True)
    output, ones = column_linear(input, torch.ones(7, 4)), torch.ones(3, 7)
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="^column_linear: second derivatives"),
    ):
        torch.autograd.grad(output, input, forward_ad.make_dual(ones, ones))


def _doubled(name: str, sample: tuple, number: int, in_place: bool) -> list[torch.Tensor | None]:
    """Twice an output of an op, and the gradients of it and of the other ones."""
    leaves = [sample[i] for i in trained(sample)]
    copies = [each * 1 if isinstance(each, torch.Tensor) else each for each in sample]
    outputs = [each for each in as_tuple(op_of(name)(*copies)) if each.requires_grad]
    own = outputs.pop(number)
    own = own.mul_(2) if in_place else 2 * own
    sums = [each.sum() for each in (own, *outputs)]
    return [own.detach(), *torch.autograd.grad(sums, leaves, allow_unused=True)]


def _changed_in_place(group: Group) -> None:
    for name, samples in samples_of_users(group).items():
        for sample in samples if name in DIFFERENTIABLE else ():
            outputs = as_tuple(op_of(name)(*sample))
            for number in range(sum(each.requires_grad for each in outputs)):
                plain, changed = (_doubled(name, sample, number, each) for each in (False, True))
                for ours, theirs in zip(changed, plain, strict=True):
                    assert ours is theirs or torch.equal(ours, theirs), (name, number)


@pytest.mark.parametrize(("size", "aten"), [(1, False), (1, True), (2, False)])
def test_an_output_may_be_changed_in_place(size, aten):
    """Models scale embeddings and add to losses."""
    on_ranks(size, _changed_in_place, aten=aten)


# Places of the arguments that autocast casts. Adapters keep their dtype.
CAST: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("column_linear", "row_linear", "block_row_linear"), (0, 1, 2)),
    **dict.fromkeys(("moe_linear", "moe_linear_on_device", "moe_lora_linear"), (0, 1)),
    **dict.fromkeys(("block_linears", "block_linear_cross_entropy"), (0, 1, 2, 3)),
    **dict.fromkeys(("block_experts", "block_bias"), (0, 1)),
    "column_linears": (0, 1, 2, 3, 4, 5, 6),
    "linear_vocab_cross_entropy": (0, 1, 2),
    "lora_linear": (0, 1, 4),
}


def test_the_ops_that_autocast_casts_are_those_that_multiply():
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for device in ("CPU", "CUDA"):
        assert {n for n in REGISTERED if has_kernel(NAMESPACE + n, f"Autocast{device}")} == {*CAST}


def _with_gradients(returned: Any, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs, and the gradients of their squares."""
    outputs = as_tuple(returned)
    sums = [each.double().square().sum() for each in outputs if each.requires_grad]
    return [*outputs, *(torch.autograd.grad(sum(sums), leaves) if sums else ())]


@pytest.mark.parametrize("name", sorted(CAST))
def test_under_autocast_an_op_has_the_bits_of_one_on_cast_tensors(name):
    for sample in samples_of(name, ALONE):
        leaves = [sample[i] for i in trained(sample)]
        lower = list(sample)
        for place in CAST[name]:
            lower[place] = sample[place] if sample[place] is None else sample[place].bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            returned = op_of(name)(*sample)
        found = _with_gradients(returned, leaves)
        expected = _with_gradients(op_of(name)(*lower), leaves)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)
