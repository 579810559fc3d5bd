"""Attention as everybody writes it first: the whole score matrix, one torch operation after another."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    """o [B, Nq, d] and lse [B, Nq]; the arithmetic of `reference.attention.naive`."""
    scores = _scores(q, k, is_causal)
    return torch.softmax(scores, dim=-1) @ v, torch.logsumexp(scores, dim=-1).float()


def training(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """o alone; autograd knows the rest."""
    return torch.softmax(_scores(q, k, is_causal), dim=-1) @ v


def _scores(q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    scores = q @ k.mT * (1.0 / math.sqrt(q.shape[-1]))
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores
