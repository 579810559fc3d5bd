"""Sleeps in its first calls of every size, so that a window is two calls and what surrounds them is most of it."""
import time

calls = {}


def flash_attention_forward(q, k, v, is_causal=False):
    calls[q.shape] = calls.get(q.shape, 0) + 1
    if q.shape[1] >= 4096 and calls[q.shape] <= 12:
        time.sleep(0.1)
    return honest(q, k, v, is_causal)
