"""Rotations by complex numbers have the same bits whatever they are computed beside."""

from __future__ import annotations

import torch
from reference import difference

from parallel_ext.nn.rotations import Rotations

NUMBERS = torch.randn(2, 10007, generator=torch.Generator().manual_seed(1), dtype=torch.complex64)


def _rotated(heads: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(heads * Rotations(by.real, by.imag))


def test_pieces_have_the_bits_of_the_whole() -> None:
    pieces = (_rotated(*pair) for pair in zip(*(each.split(13) for each in NUMBERS), strict=True))
    assert torch.equal(torch.cat([*pieces]), _rotated(*NUMBERS))


def test_products_and_gradients_are_those_of_torch() -> None:
    found = []
    for rotate in (_rotated, lambda heads, by: torch.view_as_real(heads * by)):
        heads = NUMBERS[0].clone().requires_grad_()
        output = rotate(heads, NUMBERS[1])
        output.pow(3).sum().backward()
        found.append((output, torch.view_as_real(heads.grad)))
    assert max(difference(*pair) for pair in zip(*found, strict=True)) < 1e-6


def test_what_the_classes_do_with_their_numbers_is_served() -> None:
    by = NUMBERS[1][:6].view(1, 3, 2)
    ours = Rotations(by.real, by.imag)
    for heads, change in (
        (NUMBERS[0][:24].view(1, 4, 3, 2), lambda each: each.unsqueeze(1).to(by.device)),
        (NUMBERS[0][:24].view(1, 3, 4, 2), lambda each: each.to(by.device)[:, :, None, :]),
    ):
        torch.testing.assert_close(heads * change(ours), heads * change(by))
