"""Runs cases: the gate first, then ours, the rivals and the copy floor, all in one process."""

import gc
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime

import torch

from flowgrpo_bench.case import BenchCase, Workload
from flowgrpo_bench.machine import describe
from flowgrpo_bench.measure import SMOKE, Effort, copy_floor, count_launches, measure
from flowgrpo_bench.results import COPY, OURS, Report, Row

BANDWIDTH = "copy_bandwidth"
_BANDWIDTH_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}


def run(cases: Iterable[BenchCase], device: str, *, smoke: bool = False, say: Callable[[str], None] = print) -> Report:
    """Measures every size of `cases` on `device`. A failed gate is reported and its size not timed."""
    effort = SMOKE if smoke else Effort()
    report = Report(date=datetime.now(UTC).isoformat(timespec="seconds"), machine=describe(device))
    if not smoke:
        report.rows.append(_bandwidth(device, effort))
        report.tolerance[BANDWIDTH] = 0.5 if device == "cpu" else 0.05
    for case in cases:
        if device not in case.devices:
            continue
        if device == "cuda" and torch.cuda.device_count() < case.gpus:
            say(f"{case.name}: left out, it takes {case.gpus} GPUs")
            continue
        report.tolerance[case.name] = case.tolerance[device]
        for size, arguments in (case.smoke if smoke else case.sizes_on(device)).items():
            say(f"{case.name} {size}")
            workload = case.setup(device, **arguments)
            try:
                workload.gate()
            except AssertionError as error:
                report.failed[f"{case.name} {size}"] = str(error) or "the gate failed without a word"
                continue
            of_case = effort if smoke or case.samples is None else replace(effort, samples=case.samples)
            report.rows.extend(_rows(case, size, workload, device, of_case))
            del workload
            _free(device)
    return report


def _rows(case: BenchCase, size: str, workload: Workload, device: str, effort: Effort) -> list[Row]:
    rows = []
    for timer in case.timers_on(device):
        for variant, call in {OURS: workload.ours, **workload.rivals}.items():
            prepare = workload.prepare.get(variant)
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            timing = measure(call, workload.inputs, timer, effort, prepare)
            peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
            counted = device == "cuda" and case.launches and prepare is None
            launches = count_launches(call, workload.inputs[0]) if counted else None
            rows.append(
                Row(
                    case=case.name,
                    size=size,
                    timer=timer,
                    variant=variant,
                    seconds=timing.median,
                    spread=timing.spread,
                    launches=launches,
                    bytes_moved=workload.bytes_moved or workload.bytes_stored,
                    operations=workload.operations,
                    peak_bytes=peak,
                )
            )
            _free(device)
        if workload.bytes_moved:
            timing = copy_floor(workload.bytes_moved, device, timer, effort)
            rows.append(
                Row(
                    case=case.name,
                    size=size,
                    timer=timer,
                    variant=COPY,
                    seconds=timing.median,
                    spread=timing.spread,
                    bytes_moved=workload.bytes_moved,
                )
            )
            _free(device)
    return rows


def _bandwidth(device: str, effort: Effort) -> Row:
    """A copy far larger than any cache: the rate that memory-bound work is held against."""
    moved = _BANDWIDTH_BYTES[device]
    timer = "graph" if device == "cuda" else "wall"
    timing = copy_floor(moved, device, timer, effort)
    return Row(
        case=BANDWIDTH,
        size=f"{moved >> 20} MiB",
        timer=timer,
        variant=OURS,
        seconds=timing.median,
        spread=timing.spread,
        bytes_moved=moved,
    )


def _free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
