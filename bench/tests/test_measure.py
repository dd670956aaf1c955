import time

import pytest
from flowgrpo_bench.measure import SMOKE, Effort, Timing, measure


def test_wall_time_of_a_call_that_takes_two_milliseconds_is_two_milliseconds():
    def busy():
        end = time.perf_counter() + 2e-3
        while time.perf_counter() < end:
            pass

    timing = measure(busy, [()], "wall", Effort(samples=5, sample_seconds=1e-3))
    assert timing.samples == 5
    assert 2e-3 <= timing.median < 2e-2  # this machine may take the core away, never give time back


def test_inputs_rotate():
    seen = []
    measure(seen.append, [(0,), (1,), (2,)], "wall", SMOKE)
    assert seen[:3] == [0, 1, 2]  # warm-up
    assert seen[3:9] == [0, 1, 2, 0, 1, 2]


def test_the_spread_ignores_outliers_and_is_relative():
    steady = Timing.of([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 50.0])
    assert (steady.median, steady.spread) == (1.0, 0.0)
    assert Timing.of([2.0, 2.2, 2.4, 2.6, 2.8]).spread == pytest.approx(0.2 / 2.4)
