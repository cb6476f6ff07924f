"""Ops whose bits do not depend on the layout, held against plain arithmetic and themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_ops import ALL_SIZES, BOTH_PATHS, aten_path, on_ranks, threads, wide_type
from torch.profiler import ProfilerActivity, profile

from parallel_ext import ops
from parallel_ext.ops import Blocks, Group, LossOptions
from parallel_ext.sharding.blocks import AttentionBlocks, share_blocks, split_in_blocks
from parallel_ext.sharding.layout import split
from parallel_ext.sharding.tree import Node
from parallel_ext.training.leaf_loop import push_sums

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def _tree(addends: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum over the tree, as its definition says it."""
    if len(addends) == 1:
        return addends[0]
    half = 1
    while 2 * half < len(addends):
        half *= 2
    return _tree(addends[:half]) + _tree(addends[half:])


def _summed(group: Group, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of ``count`` blocks by the op, on this pool's ranks, and by the definition."""
    input = torch.randn(3, count, dtype=dtype, generator=torch.Generator().manual_seed(count))
    first, stop = split(count, group.size)[group.rank]
    blocks = Blocks(tuple((i, i + 1) for i in range(stop - first)), count)
    ones = torch.ones(1, stop - first, dtype=dtype)
    ours = ops.block_row_linear(input[:, first:stop], ones, blocks, group=group)
    return ours, _tree(input.to(wide_type(dtype)).unbind(1)).to(dtype).unsqueeze(1)


def _all_sums(group: Group, largest: int) -> None:
    for dtype in DTYPES:
        for count in range(group.size, largest):
            ours, theirs = _summed(group, count, dtype)
            assert torch.equal(ours, theirs), (dtype, count)


@BOTH_PATHS
@ALL_SIZES
def test_sums_are_those_of_the_tree(size: int, aten: bool) -> None:
    on_ranks(size, _all_sums, 20, aten=aten)


def test_a_chain_is_not_the_tree() -> None:
    """The test above can fail."""
    addends = torch.randn(7, 300, generator=torch.Generator().manual_seed(0)).unbind(0)
    assert not torch.equal(_tree(addends), sum(addends))


ACTIVATIONS = {
    ops.fixed_sigmoid: torch.sigmoid,
    ops.fixed_silu: torch.nn.functional.silu,
    ops.fixed_gelu: partial(torch.nn.functional.gelu, approximate="tanh"),
}


@BOTH_PATHS
@pytest.mark.parametrize("op", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_activations(dtype: torch.dtype, op: Any, aten: bool) -> None:
    on_ranks(1, _activation, dtype, op.__name__, aten=aten)


def _activation(group: Group, dtype: torch.dtype, name: str) -> None:
    op = getattr(ops, name)
    input = torch.linspace(-30, 30, 1001, dtype=dtype, requires_grad=True)
    factors = torch.linspace(1, 2, 1001, dtype=dtype)
    wide = input.detach().double().requires_grad_()
    output, expected = op(input), ACTIVATIONS[op](wide)
    (output * factors).sum().backward()
    (expected * factors).sum().backward()
    close = {} if dtype != torch.float64 else {"rtol": 1e-12, "atol": 1e-13}
    torch.testing.assert_close(output, expected.to(dtype), **close)
    torch.testing.assert_close(input.grad, wide.grad.to(dtype), **close)


@pytest.mark.parametrize("op", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_depend_on_the_element_alone(dtype: torch.dtype, op: Any) -> None:
    input = torch.randn(5003, generator=torch.Generator().manual_seed(0)).mul(4).to(dtype)
    input.requires_grad_()
    whole = op(input)
    whole.sum().backward()
    for start, stop in ((0, 5), (1, 4999), (77, 5003), (4001, 4018)):
        part = input.detach()[start:stop].requires_grad_()
        op(part).sum().backward()
        assert torch.equal(op(part), whole[start:stop])
        assert torch.equal(part.grad, input.grad[start:stop])


def _linears(group: Group, rows: Sequence[int], blocks: int, copies: int) -> None:
    """Outputs and gradients of layers that share an input equal plain ones, in fp64."""
    generator = torch.Generator().manual_seed(1)
    input = torch.randn(2, 5, 7, dtype=torch.float64, generator=generator, requires_grad=True)
    wholes = [torch.randn(n, 7, dtype=torch.float64, generator=generator) for n in rows]
    weights, of_layers, expected = [], [], []
    first, last = split(blocks, group.size)[group.rank]
    for number, whole in enumerate(wholes):
        shared = copies if number else 1
        of_rows = split_in_blocks(len(whole), blocks // shared)
        every = [block for block in of_rows for _ in range(shared)]
        start, stop = share_blocks(every, group.size, "rows")[group.rank]
        weights.append(whole[start:stop].clone().requires_grad_())
        own = tuple((a - start, b - start) for a, b in every[first:last])
        of_layers.append(Blocks(own, blocks))
        whole.requires_grad_()
        expected.append((whole, start, stop, every))
    outputs = ops.block_linears(input, weights, of_layers, copies, group)
    factors = torch.arange(1.0, blocks + 1, dtype=torch.float64)  # another gradient in each block
    ours, theirs = 0, 0
    plain = input.detach().clone().requires_grad_()
    for output, (whole, _, _, every) in zip(outputs, expected, strict=True):
        parts = [plain @ whole[a:b].T for a, b in every]
        torch.testing.assert_close(output, torch.cat(parts[first:last], -1))
        widths = [b - a for a, b in every[first:last]]
        own_parts = output.split(widths, -1)
        ours += sum((p * f).sum() for p, f in zip(own_parts, factors[first:last], strict=True))
        theirs += sum((p * f).sum() for p, f in zip(parts, factors, strict=True))
    ours.backward()
    theirs.backward()
    torch.testing.assert_close(input.grad, plain.grad)
    for weight, (whole, start, stop, _) in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.grad, whole.grad[start:stop])


@ALL_SIZES
@pytest.mark.parametrize(
    ("rows", "blocks", "copies"),
    [((9,), 4, 1), ((145, 145), 8, 1), ((64, 80, 96), 4, 1), ((16, 4, 4), 8, 4), ((8, 2, 6), 4, 2)],
)
def test_linears_equal_plain_ones(
    rows: tuple[int, ...], blocks: int, copies: int, size: int
) -> None:
    on_ranks(size, _linears, rows, blocks, copies)


def _loss_of_an_adapted_head(group: Group, trained: str) -> None:
    """Loss and gradients are those of plain logits, in fp64."""
    generator = torch.Generator().manual_seed(1)
    sizes = {"input": (9, 7), "head": (37, 7), "low": (9, 3), "lora_b": (37, 3)}
    full = {
        name: torch.randn(size, dtype=torch.float64, generator=generator)
        for name, size in sizes.items()
    }
    labels = torch.randint(0, 37, (9,), generator=generator)
    every = split_in_blocks(37, 5)
    start, stop = share_blocks(every, group.size, "ids")[group.rank]
    first, last = split(5, group.size)[group.rank]
    own = {n: t[start:stop] if len(t) == 37 else t for n, t in full.items()}
    for name in trained.split():
        full[name].requires_grad_()
        own[name] = own[name].detach().clone().requires_grad_()
    blocks = Blocks(tuple((a - start, b - start) for a, b in every[first:last]), 5)
    loss = ops.block_linear_cross_entropy(
        *(own["input"], own["head"], labels, blocks, 37, (start, stop), ops.LossOptions()),
        adapter=(own["low"], own["lora_b"]),
        group=group,
    )
    logits = full["input"] @ full["head"].T + full["low"] @ full["lora_b"].T
    expected = torch.nn.functional.cross_entropy(logits, labels)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for name in trained.split():
        gradient = full[name].grad
        torch.testing.assert_close(
            own[name].grad, gradient[start:stop] if len(gradient) == 37 else gradient
        )


@ALL_SIZES
@pytest.mark.parametrize("trained", ["input head low lora_b", "input lora_b low", "lora_b"])
def test_the_loss_of_an_adapted_head(trained: str, size: int) -> None:
    on_ranks(size, _loss_of_an_adapted_head, trained)


def test_a_second_backward_of_a_loss_of_blocks_is_refused() -> None:
    """The first one has scaled its gradients in place."""
    input = torch.ones(2, 3, requires_grad=True)
    loss = ops.block_linear_cross_entropy(
        *(input, torch.ones(5, 3), torch.tensor([1, 4]), Blocks(((0, 5),), 1), 5, (0, 5)),
        ops.LossOptions(),
    )
    loss.backward(retain_graph=True)
    with pytest.raises(NotImplementedError, match="second backward of one loss is not implemented"):
        loss.backward()


def test_what_would_have_wrong_gradients_is_refused() -> None:
    input, rows = torch.randn(3, 4), torch.randn(6, 4)
    heads = Blocks(tuple((2 * i, 2 * i + 2) for i in range(6)), 6)
    unequal = Blocks(((0, 2), (0, 2), (2, 3), (2, 3), (3, 6), (3, 6)), 6)
    with pytest.raises(ValueError, match="with copies must be of one size"):
        ops.block_linears(input, [torch.randn(12, 4), rows], [heads, unequal], copies=2)
    with pytest.raises(ValueError, match="with copies must be of one size"):
        ops.block_bias(torch.randn(3, 12), torch.zeros(6), unequal, copies=2)
    weight = torch.ones(6, requires_grad=True)
    options = ops.LossOptions(weight=weight)
    of_blocks = torch.tensor([1, 4, 5]), Blocks(((0, 6),), 1), 6, (0, 6), options
    with pytest.raises(ValueError, match="weight requires a gradient, and there is none"):
        ops.block_linear_cross_entropy(input, rows, *of_blocks)


@pytest.mark.parametrize(
    ("of", "to"),
    [
        (torch.float64, torch.float32),
        (torch.float32, torch.float64),
        (torch.float32, torch.int64),
    ],
)
def test_a_sum_of_another_wideness_is_refused(of: torch.dtype, to: torch.dtype) -> None:
    for device in ("cpu", "meta"):
        with pytest.raises(TypeError, match="sum_leaves: the sum of .* cannot be of"):
            ops.sum_leaves([torch.ones(3, dtype=of, device=device)] * 2, [(0, 1), (1, 1)], to)


@pytest.mark.parametrize(
    ("heads", "key_value_heads", "blocks", "count", "copies"),
    [(9, 3, 8, 3, 1), (8, 2, 8, 8, 4), (32, 8, 8, 8, 1), (12, 2, 8, 4, 2), (6, 6, 4, 4, 1)],
)
def test_blocks_of_heads(
    heads: int, key_value_heads: int, blocks: int, count: int, copies: int
) -> None:
    found = AttentionBlocks.of(heads, key_value_heads, blocks)
    assert (len(found.query), found.copies) == (count, copies)
    assert [a for a, _ in found.query] == [0, *(b for _, b in found.query[:-1])]
    assert found.query[-1][1] == heads
    group = heads // key_value_heads
    for (q0, q1), (k0, k1) in zip(found.query, found.key_value, strict=True):
        assert (q0 // group, (q1 - 1) // group + 1) == (k0, k1)
        assert (q1 - q0) == (k1 - k0) * found.repeats


def _gradients(op: Callable[[], torch.Tensor], *leaves: torch.Tensor) -> list[torch.Tensor]:
    output = op()
    factors = torch.arange(1.0, output.size(-1) + 1).to(output.dtype)
    return [output, *torch.autograd.grad((output * factors).sum(), leaves)]


@settings(max_examples=200)
@given(
    tokens=st.sampled_from([1, 3, 15, 16, 38]),
    width=st.integers(1, 40),
    other=st.sampled_from([1, 5, 16, 25, 72]),
    before=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
)
def test_the_bits_of_a_block_do_not_depend_on_its_place(
    tokens: int, width: int, other: int, before: int, dtype: torch.dtype
) -> None:
    """A rank that holds one block computes what one that holds more blocks does."""
    generator = torch.Generator().manual_seed(tokens)
    columns = (before + 2) * width
    own = slice(before * width, (before + 1) * width)
    bounds = tuple((start, start + width) for start in range(0, columns, width))
    blocks, alone = Blocks(bounds, before + 2), Blocks(((0, width),), 1)
    features = torch.randn(tokens, columns, dtype=dtype, generator=generator, requires_grad=True)
    weight = torch.randn(other, columns, dtype=dtype, generator=generator, requires_grad=True)
    part, of_part = (t.detach()[:, own].clone().requires_grad_() for t in (features, weight))
    _, *whole = _gradients(lambda: ops.block_row_linear(features, weight, blocks), features, weight)
    _, *ours = _gradients(lambda: ops.block_row_linear(part, of_part, alone), part, of_part)
    for expected, found in zip(whole, ours, strict=True):
        assert torch.equal(expected[:, own], found)

    input = torch.randn(tokens, other, dtype=dtype, generator=generator)
    rows = weight.detach().T.contiguous().requires_grad_()
    of_rows = rows.detach()[own].clone().requires_grad_()
    factors = torch.randn(tokens, columns, dtype=dtype, generator=generator)
    (whole_output,) = ops.block_linears(input, [rows], [blocks])
    (output,) = ops.block_linears(input, [of_rows], [alone])
    assert torch.equal(whole_output[:, own], output)
    (expected,) = torch.autograd.grad((whole_output * factors).sum(), rows)
    (found,) = torch.autograd.grad((output * factors[:, own]).sum(), of_rows)
    assert torch.equal(expected[own], found)


def _experts(group: Group, dtype: torch.dtype) -> None:
    """Each product is that of a layer alone, and so are its gradients."""
    counts, leaves, features = [3, 0, 40, 17, 1, 25], 2, (20, 1300)
    experts, rows = len(counts) // leaves, sum(counts)
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(experts, *features[::-1], generator=generator).to(dtype)
    input = torch.randn(rows, features[0], generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(rows, features[1], generator=generator).to(dtype)
    copies = weight.expand(leaves, *weight.shape).clone().requires_grad_()
    output = ops.block_experts(input, copies, counts)
    output.backward(grad)
    parts = zip(*(each.split(counts) for each in (input, grad, output, input.grad)), strict=True)
    for number, (own, of_own, found, found_grad) in enumerate(parts):
        expert, leaf = divmod(number, leaves)
        alone = [t.detach().clone().requires_grad_() for t in (own, weight[expert])]
        (expected,) = ops.block_linears(alone[0], [alone[1]], [Blocks(((0, features[1]),), 1)])
        expected.backward(of_own)
        assert torch.equal(found, expected)
        assert torch.equal(found_grad, alone[0].grad)
        assert torch.equal(copies.grad[leaf, expert], alone[1].grad)
    wide = [t.detach().double() for t in (input, weight)]
    plain = [own @ wide[1][i // leaves].T for i, own in enumerate(wide[0].split(counts))]
    torch.testing.assert_close(output, torch.cat(plain).to(dtype))


@BOTH_PATHS
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_expert_is_a_layer_alone(dtype: torch.dtype, aten: bool) -> None:
    on_ranks(1, _experts, dtype, aten=aten)


def test_products_of_experts_are_made_once() -> None:
    """Their numbers of rows hardly come again."""
    with threads(1), profile(activities=[ProfilerActivity.CPU]) as made:
        ops.block_experts(torch.ones(70, 20), torch.ones(1, 1, 1300, 20), [70])
    assert sum(event.name == "aten::mm" for event in made.events()) == 2  # pieces


@BOTH_PATHS
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_leaves_are_those_of_the_tree(dtype: torch.dtype, aten: bool) -> None:
    """In fp32 and rounded once, whatever is held of the leaves before."""
    wide = torch.promote_types(dtype, torch.float32)
    generator = torch.Generator().manual_seed(3)
    with aten_path(aten):
        for count in range(1, 20):
            leaves = torch.randn(count, 1031, generator=generator).to(dtype).unbind()
            nodes: list[Node] = []
            for number, leaf in enumerate(leaves):
                push_sums(nodes, (number, 1, [leaf.clone()]), count)
            ((_, _, (total,)),) = nodes
            assert torch.equal(total, _tree([leaf.to(wide) for leaf in leaves]).to(dtype))


def _products(tokens: int, width: int) -> list[int]:
    """How many products three calls of one shape make."""
    input = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(4 * width, 64, generator=torch.Generator().manual_seed(1))
    blocks = Blocks(tuple((i * width, (i + 1) * width) for i in range(4)), 4)
    found = []
    for factor in (0.0, 1.0, 1.0):  # a product of zeros shows nothing
        with threads(1), profile(activities=[ProfilerActivity.CPU]) as made:
            ops.block_linears(input * factor, [weight], [blocks])
        found.append(sum(event.name == "aten::mm" for event in made.events()))
    return found


def test_the_first_product_of_a_shape_is_made_twice() -> None:
    """At once and block by block; the next ones at once, where both had the same bits."""
    assert _products(37, 19) == [5, 5, 1]
    assert _products(37, 15) == [4, 4, 4]  # blocks that are too small


def _calls(events: Iterable[Any], name: str) -> Iterator[Any]:
    for event in events:
        if event.name == name:
            yield event
        yield from _calls(event.children, name)


def _matrices(blocks: int) -> set[Any]:
    """Sizes and strides of all products, on the path of a GPU, of a rank with that many blocks."""
    tokens, width, other = 20, 24, 40
    own = Blocks(tuple((i * width, (i + 1) * width) for i in range(blocks)), blocks)
    features = torch.randn(tokens, blocks * width, requires_grad=True)
    columns = torch.randn(other, blocks * width, requires_grad=True)
    hidden = torch.randn(tokens, other, requires_grad=True)
    rows = torch.randn(blocks * width, other, requires_grad=True)
    labels = torch.arange(tokens)
    size = blocks * width
    with (
        aten_path(True),
        profile(activities=[ProfilerActivity.CPU], record_shapes=True) as made,
    ):
        ops.block_row_linear(features, columns, own).sum().backward()
        ops.block_linears(hidden, [rows], [own])[0].sum().backward()
        options = LossOptions()
        ops.block_linear_cross_entropy(
            hidden, rows, labels, own, size, (0, size), options
        ).backward()
    events = made.profiler.kineto_results.experimental_event_tree()
    return {
        tuple((tuple(each.sizes), tuple(each.strides)) for each in call.extra_fields.inputs[:2])
        for call in _calls(events, "aten::mm")
    }


def test_a_gpu_multiplies_the_same_matrices_whatever_a_rank_holds() -> None:
    """It chooses by sizes and leading dimensions."""
    found = _matrices(1)
    assert len(found) == 6
    assert _matrices(3) == found
