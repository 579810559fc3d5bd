"""What grades a submission, as one word: `cpu`, `cuda` for any GPU, or `cuda:h200` for one model of GPU.

The same word names the bell's queue. A worker on an H200 answers to `cuda` and to `cuda:h200`.
"""

from __future__ import annotations

import re

from grader.errors import UserError

KINDS = ("cpu", "cuda")
MAX_LENGTH = 16  # of the database's columns
# words of a GPU's full name that do not tell models apart, or tell apart what students need not
_MAKERS = frozenset({"nvidia", "geforce", "tesla", "quadro", "generation", "graphics", "gpu"})
_WORD = re.compile(r"cuda:[a-z0-9]{1,11}")


def model_of(gpu_name: str) -> str:
    """A GPU's model in a few letters: "NVIDIA H200" is h200, "NVIDIA GeForce RTX 4090" rtx4090. May be empty.

    Memory sizes, sockets and slices are left out, so that all cards of one model share a queue.
    """
    words = [word for word in re.split(r"[^a-z0-9]+", gpu_name.lower()) if word and word not in _MAKERS]
    model = ""
    for word in words:
        model += word
        if any(letter.isdigit() for letter in word):  # "RTX" says nothing without its number
            break
    return model[: MAX_LENGTH - len("cuda:")]


def on_gpu(gpu_name: str) -> str:
    """The device of a worker on that GPU."""
    model = model_of(gpu_name)
    return f"cuda:{model}" if model else "cuda"


def served_by(device: str) -> tuple[str, ...]:
    """The devices whose submissions a worker of `device` takes."""
    return (kind_of(device), device) if ":" in device else (device,)


def serves(worker_device: str, wanted: str) -> bool:
    """Whether a worker of the first takes a submission for the second."""
    return wanted in served_by(worker_device)


def kind_of(device: str) -> str:
    """`cpu` or `cuda`."""
    return device.partition(":")[0]


def parse(text: str) -> str:
    """A device as somebody wrote it. Raises UserError when it is none."""
    device = text.strip().lower()
    if device in KINDS or _WORD.fullmatch(device):
        return device
    raise UserError(
        f"{text!r} is no device. Write cpu, cuda for any GPU, or cuda: and a model in small letters and digits without "
        f"spaces, as `tilegrade worker check --device cuda` prints it, e.g. cuda:h200."
    )
