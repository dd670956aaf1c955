"""Timing: warm-up, then medians and spread of repeated samples, inputs rotating against the cache.

All times are seconds per call.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flowgrpo_bench.case import Timer


@dataclass(frozen=True, slots=True)
class Effort:
    """How long one measurement may take."""

    samples: int = 15
    """Samples of a measurement; its median is reported."""
    sample_seconds: float = 0.01
    """Least time of one sample: shorter calls are repeated inside it."""
    enough_seconds: float = 60.0
    """A measurement by `wall` that took this long ends, once it has three samples."""
    slow_seconds: float = 10.0
    """Of a call by `wall` that takes this long one sample is enough."""


SMOKE = Effort(samples=3, sample_seconds=0.0005)


@dataclass(frozen=True, slots=True)
class Timing:
    """The samples of one measurement."""

    median: float
    """Seconds per call."""
    spread: float
    """Half the range of the middle half of the samples, relative to the median: the noise of this measurement."""
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Timing":
        """From seconds per call, one a sample."""
        ordered = sorted(samples)
        cut = len(ordered) // 4
        median = statistics.median(ordered)
        return cls(median, (ordered[len(ordered) - 1 - cut] - ordered[cut]) / (2 * median), len(ordered))


def measure(
    call: Callable[..., Any],
    inputs: Sequence[tuple],
    timer: Timer,
    effort: Effort,
    prepare: Callable[[], None] | None = None,
) -> Timing:
    """Times `call` over rotating `inputs` by `timer` (see `case.Timer`); `prepare` comes before each call, untimed."""
    if prepare is not None:
        return Timing.of([_one_call(call, inputs[turn % len(inputs)], prepare) for turn in range(effort.samples)])
    for arguments in inputs[:3]:
        call(*arguments)
    if timer == "wall":
        return _wall(call, inputs, effort)
    if timer == "graph":
        return _events(_captured(call, inputs), len(inputs), effort)

    def once_through() -> None:
        for arguments in inputs:
            call(*arguments)

    return _events(once_through, len(inputs), effort)


def _one_call(call: Callable[..., Any], arguments: tuple, prepare: Callable[[], None]) -> float:
    prepare()
    _synchronize()
    start = time.perf_counter()
    call(*arguments)
    _synchronize()
    return time.perf_counter() - start


def _wall(call: Callable[..., Any], inputs: Sequence[tuple], effort: Effort) -> Timing:
    samples, turn = [], 0
    _synchronize()
    while len(samples) < effort.samples and (len(samples) < 3 or sum(samples) < effort.enough_seconds):
        if samples and samples[0] >= effort.slow_seconds:
            break
        calls, start = 0, time.perf_counter()
        while True:
            call(*inputs[turn % len(inputs)])
            _synchronize()
            turn, calls = turn + 1, calls + 1
            elapsed = time.perf_counter() - start
            if elapsed >= effort.sample_seconds:
                break
        samples.append(elapsed / calls)
    return Timing.of(samples)


def _captured(call: Callable[..., Any], inputs: Sequence[tuple]) -> Callable[[], None]:
    """One CUDA graph that calls once with each input set: replays cost no host time."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for arguments in inputs[:3]:
            call(*arguments)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for arguments in inputs:
            call(*arguments)
    return graph.replay


def _events(repeat: Callable[[], None], calls: int, effort: Effort) -> Timing:
    """Times `repeat`, which makes `calls` calls, between CUDA events."""

    def seconds(times: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(times):
            repeat()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    repeat()
    torch.cuda.synchronize()
    times = max(1, round(effort.sample_seconds / seconds(1)))
    seconds(times)
    return Timing.of([seconds(times) / (times * calls) for _ in range(effort.samples)])


def count_launches(call: Callable[..., Any], arguments: tuple) -> int:
    """Kernels, copies and fills that one call puts on the GPU, counted by the profiler."""
    call(*arguments)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        call(*arguments)
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def copy_floor(bytes_moved: int, device: str, timer: Timer, effort: Effort) -> Timing:
    """Reading and writing `bytes_moved` bytes together, once each, timed the same way.

    Negation stands for the copy: it streams as a kernel does, where a copy captured in a graph may go to the copy
    engine (2.7 instead of 4.2 TB/s for 4 GiB on an H200).
    """
    sets = rotation(bytes_moved, device)
    source = torch.randn(sets, max(1, bytes_moved // 8), device=device)  # zeros may move faster than data
    target = torch.empty_like(source)
    pairs = list(zip(source, target, strict=True))
    return measure(lambda read, write: torch.neg(read, out=write), pairs, timer, effort)


def rotation(bytes_moved: int, device: str) -> int:
    """How many input sets keep one call's data out of the cache when the next round comes."""
    if device == "cpu":
        return 2
    cache = 2 * torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, min(128, -(-cache // max(1, bytes_moved))))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
