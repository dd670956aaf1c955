"""What a benchmark case is. A case is one file in `cases/` that defines `CASE`; nothing else names it.

def setup(device, *, B):                 # builds inputs, returns what is timed
    return Workload(ours=..., rivals={...}, inputs=[...], gate=..., bytes_moved=...)

CASE = BenchCase(name="...", about="...", setup=setup, sizes={"B=8": {"B": 8}}, smoke={"B=2": {"B": 2}})
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Literal

Timer = Literal["graph", "calls", "wall"]
"""graph: device time per call, from replays of a captured CUDA graph. calls: per call of a stream of calls, host work
included. wall: wall-clock time of one call at a time, synchronized before and after."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One size of a case: what is timed, against what, and how it is known to be right."""

    ours: Callable[..., Any]
    """The call to time; takes one element of `inputs`, unpacked."""
    rivals: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Other ways to the same result, timed in the same run with the same inputs."""
    inputs: Sequence[tuple] = ((),)
    """Input sets to rotate through. On a GPU their bytes together should exceed the cache (60 MB on an H200)."""
    gate: Callable[[], None]
    """Raises AssertionError if `ours` or a rival is wrong. Nothing is timed before it has passed."""
    bytes_moved: int = 0
    """Fewest bytes one call must read and write; 0 where that is not the limit. Gives GB/s and the copy floor."""
    bytes_stored: int = 0
    """Bytes of one call on a disk or the bus, for GB/s; no copy in memory is a floor of it."""
    operations: int = 0
    """Arithmetic operations of one call; 0 where that is not the limit. On an H200 they give the arithmetic floor."""
    prepare: Mapping[str, Callable[[], None]] = field(default_factory=dict)
    """By variant (`ours`, a rival's name): comes before each of its calls; they are timed one by one, all of them."""


@dataclass(frozen=True, kw_only=True)
class BenchCase:
    """A named number that must not get worse."""

    name: str
    """The case's file, and the function's name where it times one."""
    about: str
    """One line for `bench list`."""
    setup: Callable[..., Workload]
    """`setup(device, **size)`; import heavy packages inside it."""
    sizes: Mapping[str, Mapping[str, Any]]
    """Size name -> keyword arguments of `setup`."""
    cpu_sizes: Mapping[str, Mapping[str, Any]] | None = None
    """The same on a CPU, where `sizes` would take minutes; None: `sizes`."""
    smoke: Mapping[str, Mapping[str, Any]]
    """The same for `--smoke`: a second or so in all, on two CPU cores."""
    devices: tuple[Literal["cpu", "cuda"], ...] = ("cpu", "cuda")
    gpus: int = 1
    """GPUs that it takes on cuda; `run` says so and leaves it out where there are fewer."""
    timers: tuple[Timer, ...] | None = None
    """None: graph and calls on cuda, wall on cpu."""
    samples: int | None = None
    """Samples of a measurement where a call takes seconds; None: as many as usual."""
    launches: bool = True
    """Count what a call puts on the GPU; False where another process does the work."""
    tolerance: Mapping[str, float] = field(default_factory=lambda: {"cpu": 0.5, "cuda": 0.1})
    """Device -> relative slowdown past which `compare` fails. `compare` widens it where noise was measured larger."""

    def sizes_on(self, device: str) -> Mapping[str, Mapping[str, Any]]:
        """The sizes that `run` uses on `device`."""
        return self.cpu_sizes if device == "cpu" and self.cpu_sizes is not None else self.sizes

    def timers_on(self, device: str) -> tuple[Timer, ...]:
        """The timers that `run` uses on `device`."""
        if self.timers is not None:
            return self.timers
        return ("graph", "calls") if device == "cuda" else ("wall",)


def all_cases() -> list[BenchCase]:
    """Every case in `cases/`, by name. Raises ValueError where a file's name and its case's differ."""
    package = import_module("flowgrpo_bench.cases")
    cases = []
    for module in iter_modules(package.__path__):
        case = import_module(f"{package.__name__}.{module.name}").CASE
        if case.name != module.name:
            raise ValueError(f"cases/{module.name}.py defines the case {case.name!r}; give both one name")
        cases.append(case)
    return sorted(cases, key=lambda case: case.name)
