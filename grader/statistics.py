"""Numbers about numbers: how bytes grow with size, how sure a ratio of medians is, when two results are a tie."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate and the range that holds it with 95 % confidence (or as asked)."""

    value: float
    low: float
    high: float

    @property
    def relative_width(self) -> float:
        """Half the width over the value: 0.01 means "within 1 %"."""
        return (self.high - self.low) / 2 / self.value if self.value else math.inf


def fit_exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Exponent k of the best power law value = c * size**k: the least-squares slope in log-log space.

    Raises:
        ValueError: fewer than two different sizes, or anything that is not a positive finite number.
    """
    if len(sizes) != len(values):
        raise ValueError(f"{len(sizes)} sizes but {len(values)} values")
    if len(set(sizes)) < 2:
        raise ValueError("a slope needs at least two different sizes")
    if not all(math.isfinite(one) and one > 0 for one in (*sizes, *values)):
        raise ValueError("sizes and values must be positive finite numbers")
    xs, ys = [math.log(one) for one in sizes], [math.log(one) for one in values]
    x_mean, y_mean = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    above = math.fsum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    below = math.fsum((x - x_mean) ** 2 for x in xs)
    return above / below


def last_exponent(sizes: Sequence[float], values: Sequence[float]) -> float | None:
    """Local exponent between the two largest sizes; None when there are not two, or either value is not positive.

    The last step is the least biased one: a constant part or a linear part weighs less there than in a fit over all
    sizes. From a doubling, a T² allocation gives 2.0 and a linear one 1.0.
    """
    points = sorted(set(zip(sizes, values, strict=True)))
    if len({size for size, _ in points}) < 2:
        return None
    (size_a, value_a), (size_b, value_b) = points[-2:]
    if not (size_a > 0 and size_b > size_a and value_a > 0 and value_b > 0):
        return None
    return math.log(value_b / value_a) / math.log(size_b / size_a)


def predict(sizes: Sequence[float], values: Sequence[float], size: float) -> float | None:
    """What the power law through the two largest sizes gives at `size`; None where there is no such law."""
    exponent = last_exponent(sizes, values)
    if exponent is None:
        return None
    largest, value = max(zip(sizes, values, strict=True))
    return float(value * (size / largest) ** exponent)


def reach(sizes: Sequence[float], values: Sequence[float], value: float) -> float | None:
    """The size at which that power law gives `value`; None where there is no such law, or it does not grow."""
    exponent = last_exponent(sizes, values)
    if exponent is None or not exponent > 0.1:
        return None
    largest, at_largest = max(zip(sizes, values, strict=True))
    return float(largest * (value / at_largest) ** (1 / exponent))


def bootstrap_ratio(
    above: Sequence[float],
    below: Sequence[float],
    *,
    seed: int,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
) -> Interval:
    """Ratio of medians, median(above) / median(below), with its percentile bootstrap interval.

    Both samples are drawn again with replacement, independently. The same arguments give the same interval.

    Raises:
        ValueError: an empty sample, or a value that is not a positive finite number.
    """
    if not above or not below:
        raise ValueError("a ratio needs at least one value above and one below")
    if not all(math.isfinite(one) and one > 0 for one in (*above, *below)):
        raise ValueError("values must be positive finite numbers")
    rng = random.Random(seed)  # noqa: S311 - statistics, not secrets
    ratios = sorted(
        median(rng.choices(above, k=len(above))) / median(rng.choices(below, k=len(below))) for _ in range(resamples)
    )
    tail = (1 - confidence) / 2
    return Interval(value=median(above) / median(below), low=quantile(ratios, tail), high=quantile(ratios, 1 - tail))


def quantile(ordered: Sequence[float], fraction: float) -> float:
    """Value at `fraction` (0 to 1) of an ordered sample, linear between neighbours."""
    place = fraction * (len(ordered) - 1)
    lower = min(int(place), len(ordered) - 2) if len(ordered) > 1 else 0
    if len(ordered) == 1:
        return ordered[0]
    return ordered[lower] + (place - lower) * (ordered[lower + 1] - ordered[lower])


def tied(a: Interval, b: Interval) -> bool:
    """True when the measurements do not tell the two apart.

    They do when each value lies outside the other's interval, on the far side.
    """
    better, worse = (a, b) if a.value >= b.value else (b, a)
    return not (better.low > worse.value and worse.high < better.value)
