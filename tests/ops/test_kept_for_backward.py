"""What ops keep for their backward, and that their outputs are tensors of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reference_ops import BOTH_PATHS, aten_path
from torch.autograd.graph import saved_tensors_hooks

from parallel_ext import ops
from parallel_ext.ops import Blocks

TOKENS, IN, OUT = 64, 16, 8
ROWS, COLUMNS = Blocks(((0, OUT),), 1), Blocks(((0, IN),), 1)
Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

LAYERS: dict[str, tuple[Layer, tuple[int, ...]]] = {
    "column_linear": (ops.column_linear, (OUT, IN)),
    "column_linears": (lambda x, w: ops.column_linears(x, [w, w])[0], (OUT, IN)),
    "row_linear": (ops.row_linear, (OUT, IN)),
    "moe_linear": (lambda x, w: ops.moe_linear(x, w, [TOKENS, 0]), (2, OUT, IN)),
    "moe_linear on the device": (
        lambda x, w: ops.moe_linear(x, w, torch.tensor([TOKENS, 0])),
        (2, OUT, IN),
    ),
    "block_linears": (lambda x, w: ops.block_linears(x, [w], [ROWS])[0], (OUT, IN)),
    "block_row_linear": (lambda x, w: ops.block_row_linear(x, w, COLUMNS), (OUT, IN)),
    "block_experts": (lambda x, w: ops.block_experts(x, w, [TOKENS]), (1, 1, OUT, IN)),
    "block_scale": (
        lambda x, w: ops.block_scale(x.view(TOKENS, 2, IN // 2), w, Blocks(((0, 2),), 1)),
        (IN // 2,),
    ),
}


def _bytes_kept(layer: Layer, weight: torch.Tensor) -> int:
    """Bytes that a graph keeps beside the weight, and that it still has the right gradient."""
    input = torch.randn(TOKENS, IN, requires_grad=True)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() != weight.untyped_storage().data_ptr():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(input * 1, weight)
    grad = torch.randn_like(output)
    output.backward(grad)
    expected = layer(input, weight.detach().requires_grad_())
    (theirs,) = torch.autograd.grad(expected, input, grad)
    assert torch.equal(input.grad, theirs)
    return sum(kept.values())


@pytest.mark.parametrize("name", LAYERS)
@BOTH_PATHS
def test_a_frozen_layer_keeps_no_input(name: str, aten: bool) -> None:
    layer, shape = LAYERS[name]
    with aten_path(aten):
        assert _bytes_kept(layer, torch.randn(shape)) < 100
        trained = _bytes_kept(layer, torch.randn(shape, requires_grad=True))
    assert trained >= TOKENS * IN * 4


@BOTH_PATHS
def test_outputs_are_never_inputs(aten: bool) -> None:
    value = torch.randn(2, 6)
    with aten_path(aten):
        found = {
            "repeat_heads": ops.repeat_heads(value, 3, 1),
            "its backward": torch.ops.parallel_ext.repeat_heads_backward(value, 3, 1),
            "sum_leaves": ops.sum_leaves([value], [(0, 1)], torch.float32),
        }
    for name, output in found.items():
        assert torch.equal(output, value), name
        assert output.data_ptr() != value.data_ptr(), name


@pytest.mark.parametrize("op", ["block_bias", "block_row_linear"])
def test_the_gradient_of_a_bias_keeps_no_rows_alive(op: str) -> None:
    bias = torch.zeros(OUT, requires_grad=True)
    if op == "block_bias":
        output = ops.block_bias(torch.randn(TOKENS, OUT), bias, ROWS)
    else:
        output = ops.block_row_linear(torch.randn(TOKENS, IN), torch.randn(OUT, IN), COLUMNS, bias)
    output.sum().backward()
    assert bias.grad.untyped_storage().nbytes() == bias.nbytes


def test_compiled_gradients_of_transposed_tensors_equal_eager_ones() -> None:
    """The strides that a compiler expects are those that come."""
    bias, weight = torch.zeros(OUT, requires_grad=True), torch.randn(IN, OUT).t().requires_grad_()

    def loss(input: torch.Tensor) -> torch.Tensor:
        outputs = ops.block_bias(input @ weight.t(), bias, ROWS).t()
        return (outputs * 2).sum() + (ops.block_row_linear(input, weight, COLUMNS) * 3).sum()

    input = torch.randn(TOKENS, IN)
    eager = torch.autograd.grad(loss(input), [weight, bias])
    compiled = torch.autograd.grad(torch.compile(loss)(input), [weight, bias])
    for ours, theirs in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours, theirs)
