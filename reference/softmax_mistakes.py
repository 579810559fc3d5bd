"""Known mistakes."""

from reference.operation import Mistake

MISTAKES: tuple[Mistake, ...] = ()
