"""Blocks every signal that can be blocked, and a call never ends."""
import signal

signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))


def flash_attention_forward(q, k, v, is_causal=False):
    while True:
        pass
