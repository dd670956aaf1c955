"""Axis ticks at round values, and their labels."""

import math
from collections.abc import Sequence
from itertools import pairwise


def nice_ticks(low: float, high: float, *, target: int = 5, whole: bool = False) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that cover [low, high], about `target` of them.

    The first is at or below `low` and the last at or above `high`. With `whole`, steps are whole numbers.
    """
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise ValueError(f"an axis needs finite low <= high, got {low} and {high}")
    if low == high:  # one value: give it room on both sides
        room = abs(low) * 0.05 or 0.5
        low, high = low - room, high + room
    rough = (high - low) / max(target - 1, 1)
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(magnitude * factor for factor in (1, 2, 5, 10) if magnitude * factor >= rough * (1 - 1e-9))
    if whole:
        step = max(1.0, step)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [k * step for k in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten that cover [low, high]; both above 0."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**k for k in range(first, max(last, first + 1) + 1)]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Labels with just the decimals that tell the ticks apart: 0.75, 0.80; 1.0000, 1.0001; 2e-6."""
    largest = max(abs(tick) for tick in ticks)
    if largest and not 1e-4 <= largest < 1e6:
        return [_scientific(tick) for tick in ticks]
    step = min(b - a for a, b in pairwise(ticks)) if len(ticks) > 1 else largest or 1.0
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{0.0 if abs(tick) < step * 1e-6 else tick:.{decimals}f}" for tick in ticks]


def _scientific(value: float) -> str:
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.6e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"
