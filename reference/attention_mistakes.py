"""Known mistakes."""

from reference.operation import Mistake

FORWARD_MISTAKES: tuple[Mistake, ...] = ()
TRAINING_MISTAKES: tuple[Mistake, ...] = ()
