"""Imports the grader's own reference, by name and from wherever the project might lie."""
import glob
import importlib
import sys

found = None
sys.path += [*glob.glob("/*"), *glob.glob("/*/*"), "/app", "/app/workers"]
for name in ("reference", "reference.attention", "grader.judging", "workers.numerics", "workers.examination"):
    try:
        found = importlib.import_module(name)
        print("BAD imported", name, flush=True)
    except ImportError as error:
        print("blocked", name, type(error).__name__, flush=True)


def flash_attention_forward(q, k, v, is_causal=False):
    return torch.zeros_like(q), torch.zeros(q.shape[:2], device=q.device)
