"""The random numbers of `tl.rand`, bit by bit, without Triton.

Source: Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3" (SC '11): Philox 4x32 with ten
rounds. The counter is (low half of the index, high half, 0, 0), the key (low half of the seed, high half); the first of
the four results becomes the number.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIER_A, _MULTIPLIER_B = 0xD2511F53, 0xCD9E8D57
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85  # the golden ratio and the square root of 3, less 1, as 32-bit fractions
_ROUNDS = 10


def uniform(seed: int, index: Tensor) -> Tensor:
    """What `tl.rand(seed, index)` gives: float32 in [0, 1), of the shape of `index` (whole numbers, not negative)."""
    index = index.to(torch.int64)
    c0, c1 = index & _MASK, index >> 32
    c2 = c3 = torch.zeros_like(index)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(_ROUNDS):
        high_a, low_a = _multiply(_MULTIPLIER_A, c0)
        high_b, low_b = _multiply(_MULTIPLIER_B, c2)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + _WEYL_A) & _MASK, (k1 + _WEYL_B) & _MASK
    return _to_float(c0)


def _multiply(constant: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32 bit product, in halves that int64 holds without its sign."""
    low = (constant & 0xFFFF) * word  # at most 48 bits
    high = (constant >> 16) * word
    total = low + ((high & 0xFFFF) << 16)
    return ((high >> 16) + (total >> 32)) & _MASK, total & _MASK


def _to_float(word: Tensor) -> Tensor:
    """A 32-bit word, read as a signed number, folded to [0, 2**31) and scaled so that the largest stays below 1."""
    signed = torch.where(word >= 1 << 31, word - (1 << 32), word)
    folded = torch.where(signed < 0, -signed - 1, signed)
    return folded.to(torch.float32) * torch.tensor(4.6566127342e-10, dtype=torch.float32)
