"""Memory that is kept from call to call: used again, and never while anyone can see it."""

from __future__ import annotations

import torch

import parallel_ext as px
from parallel_ext.ops import moe_gated_silu

MIB = 2**20


def _large(value: float, rows: int = 4096) -> torch.Tensor:
    """A tensor of 16 MiB by an op that keeps its memory; silu(20) * value."""
    gate_up = torch.full((rows, 2048), value)
    gate_up[:, :1024] = 20.0
    return moe_gated_silu(gate_up, torch.ones(rows))


def _expected(value: float) -> torch.Tensor:
    return torch.tensor(20.0 * value)


def test_memory_is_used_again_once_no_tensor_is_left_in_it():
    px.release_workspaces()
    first = _large(1.0)
    place = first.data_ptr()
    del first
    assert _large(2.0).data_ptr() == place


def test_what_is_held_is_not_written():
    held = _large(1.0)
    view = _large(2.0)[7:9]  # of whose tensor only this is left
    array = _large(4.0).numpy()
    for value in (5.0, 6.0, 7.0):
        _large(value)
    assert torch.allclose(held, _expected(1.0))
    assert torch.allclose(view, _expected(2.0))
    assert torch.allclose(torch.from_numpy(array), _expected(4.0))


def test_a_saved_tensor_is_not_written():
    leaf = torch.ones(4096, 1024, requires_grad=True)
    product = leaf * _large(3.0)  # saved for the gradient of the leaf
    for value in (5.0, 6.0):
        _large(value)
    product.sum().backward()
    assert torch.allclose(leaf.grad, _expected(3.0))


def test_memory_is_free_again_after_python_has_held_its_storage():
    px.release_workspaces()
    tensor = _large(1.0)
    tensor.untyped_storage()
    del tensor
    assert px.release_workspaces() == 16 * MIB


def test_the_storage_of_a_tensor_has_its_size_though_its_block_is_larger():
    px.release_workspaces()
    _large(1.0, rows=4096)
    tensor = _large(1.0, rows=3000)
    assert tensor.untyped_storage().nbytes() == 3000 * 4096


def test_release_gives_back_what_is_free_and_leaves_what_is_not():
    px.release_workspaces()
    held = _large(1.0)
    del_me = _large(2.0)
    assert px.release_workspaces() == 0
    del del_me
    assert px.release_workspaces() == 16 * MIB
    assert px.release_workspaces() == 0
    assert torch.allclose(held, _expected(1.0))


def test_sizes_that_differ_little_share_memory_and_others_do_not():
    px.release_workspaces()
    place = _large(1.0, rows=4096).data_ptr()
    assert _large(1.0, rows=4000).data_ptr() == place
    assert _large(1.0, rows=2100).data_ptr() != place


def test_what_is_kept_has_a_limit():
    px.release_workspaces()
    held = [_large(1.0) for _ in range(40)]  # 640 MiB
    for number, each in enumerate(held):
        assert torch.allclose(each[0], _expected(1.0)), number
    del held, each
    assert 0 < px.release_workspaces() <= 512 * MIB
