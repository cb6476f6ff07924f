"""Philox4x32-10 and the dropout masks drawn with it, in numpy: what the C++ is held against."""

from __future__ import annotations

import numpy as np
import torch

LOW = np.uint64(0xFFFFFFFF)


def philox(counter: np.ndarray, key: int) -> np.ndarray:
    """Four random 32-bit words for each counter of four, [..., 4]; ``key`` has 64 bits."""
    words = [counter[..., i].astype(np.uint64) for i in range(4)]
    keys = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        a, b = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        first, second = (np.uint64(k) for k in keys)
        high = np.uint64(32)
        words = [(b >> high) ^ words[1] ^ first, b & LOW, (a >> high) ^ words[3] ^ second, a & LOW]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(words, -1)


def kept(
    tokens: int, features: int, p: float, key: int, step: int, token: int = 0, feature: int = 0
) -> torch.Tensor:
    """The mask [tokens, features] from the global ``token`` and ``feature`` on: True where kept."""
    f = np.arange(feature, feature + features)
    counter = np.zeros((tokens, features, 4), np.uint64)
    counter[..., 0] = f // 128 * 16 + f % 16
    counter[..., 1] = np.arange(token, token + tokens)[:, None]
    counter[..., 2] = step
    half = f // 16 % 8
    words = np.take_along_axis(philox(counter, key), (half // 2)[None, :, None], -1)[..., 0]
    bits = (words >> (16 * (half % 2)).astype(np.uint64)) & np.uint64(0xFFFF)
    return torch.from_numpy(bits >= np.uint64(round(p * 65536)))


def scale(p: float) -> float:
    """What kept elements are multiplied by: 1 / (1 - p) for the p in effect."""
    dropped = round(p * 65536)
    return 65536 / (65536 - dropped) if dropped < 65536 else 0.0
