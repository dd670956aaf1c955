"""A forward as CUDA graphs: recorded once for each set of shapes, launched as one at every later step.

A forward of few candidates is bound by the host, which launches dozens of kernels a layer one by one. A graph holds
those launches with every address in them. So it stays right while weights are written in place, and is of no use once
a tensor of the model has other memory: then it is dropped, with its own memory, and recorded anew.

The first call with a set of shapes runs as it is, compiles what is compiled at first use, and is a result like any
other. The second records and launches, while the GPU may still be busy with the first.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

CAPACITY = 16
"""Sets of shapes kept. Prompts differ in length, so a run meets many; each costs one recording when it comes back."""

Forward = Callable[..., Tensor]
Inputs = Mapping[str, Tensor | None]


class GraphCaptureError(RuntimeError):
    """The forward could not be recorded. Nothing was drawn with these shapes; the engine still serves others."""

    def __init__(self, shapes: str, reason: str):
        super().__init__(shapes, reason)
        self.shapes, self.reason = shapes, reason

    def __str__(self) -> str:
        return (
            f"the forward cannot be recorded as a CUDA graph for {self.shapes}: {self.reason}; "
            "start the engine with cuda_graphs = False (trainer: --no-rollout-cuda-graphs) to go without"
        )


@dataclass(frozen=True)
class _Recorded:
    """One graph, the tensors that it reads and the one that it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    output: Tensor


class ForwardGraphs:
    """Calls `forward(layout, **inputs)` through graphs, on one stream of one device.

    Args:
        forward: gives one tensor; must not wait for the GPU, nor look at values of its inputs.
        weights: all tensors that `forward` reads beside its inputs; asked for again after each `drop`.
        capacity: sets of shapes to keep; past it, the one that was not used for longest goes.
    """

    def __init__(self, forward: Forward, weights: Callable[[], Iterable[Tensor]], capacity: int = CAPACITY):
        self._forward, self._weights, self._capacity = forward, weights, capacity
        self._kept: OrderedDict[Hashable, _Recorded | None] = OrderedDict()  # None: has run once, not recorded
        self._held: list[Tensor] = []
        self._addresses: list[int] = []
        self._stream: torch.cuda.Stream | None = None
        self._pool: tuple[int, int] | None = None

    @property
    def recorded(self) -> int:
        """How many graphs are held."""
        return sum(kept is not None for kept in self._kept.values())

    def __call__(self, layout: Hashable, inputs: Inputs) -> Tensor:
        """`forward(layout, **inputs)`, in the same bits. The next call with the same shapes overwrites the result.

        `layout` is all that decides the forward beside the inputs' shapes and types. Raises GraphCaptureError.
        """
        key = (layout, *((name, None if t is None else (t.shape, t.dtype)) for name, t in inputs.items()))
        if key not in self._kept:
            output = self._forward(layout, **inputs)
            self._keep(key, None)
            return output
        recorded = self._kept[key]
        if recorded is None:
            recorded = self._record(layout, inputs)
        self._keep(key, recorded)
        for name, static in recorded.inputs.items():
            static.copy_(inputs[name])
        recorded.graph.replay()
        return recorded.output

    def check_weights(self) -> None:
        """Drops all graphs if a tensor of the model lies elsewhere than when they were recorded. A millisecond."""
        if self._held and [t.data_ptr() for t in self._held] != self._addresses:
            self.drop()

    def drop(self) -> None:
        """Forgets all graphs and gives their memory back. Needed when the model gets or loses modules or hooks."""
        self._held, self._addresses = [], []
        if not self._kept:
            return
        torch.cuda.synchronize()  # one of them may still run
        # A record must have no name here: its tensors, and with them the pool, would outlive `empty_cache`.
        for graph in [kept.graph for kept in self._kept.values() if kept is not None]:
            graph.reset()
        self._kept.clear()
        self._pool = None
        # cuBLAS's workspace of the recording stream lies in the graphs' pool and would keep it alive.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def _keep(self, key: Hashable, recorded: _Recorded | None) -> None:
        self._kept[key] = recorded
        self._kept.move_to_end(key)
        while len(self._kept) > self._capacity:
            self._kept.popitem(last=False)

    def _record(self, layout: Hashable, inputs: Inputs) -> _Recorded:
        """Not by `torch.cuda.graph`, which would first wait for the GPU and empty the allocator's cache."""
        if not self._held:
            self._held = list(self._weights())
            self._addresses = [t.data_ptr() for t in self._held]
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        static = {name: torch.empty_like(t) for name, t in inputs.items() if t is not None}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Other threads of this process (the weight link's) may use CUDA meanwhile.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                output = self._forward(layout, **{name: static.get(name) for name in inputs})
            except BaseException as error:
                with contextlib.suppress(RuntimeError):  # says only that the capture was broken off
                    self._end(graph)
                if isinstance(error, Exception):
                    raise GraphCaptureError(_shapes(inputs), f"{type(error).__name__}: {error}") from error
                raise
            try:
                self._end(graph)
            except RuntimeError as error:
                raise GraphCaptureError(_shapes(inputs), str(error)) from error
        return _Recorded(graph, static, output)

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a recording. One that was broken off leaves torch's allocator recording into the pool: no graph could
        use it any more, so that it is closed here, and the next recording opens another."""
        try:
            graph.capture_end()
        except RuntimeError:
            pool, self._pool = self._pool, None
            torch._C._cuda_endAllocateToPool(self._stream.device_index, pool)
            torch._C._cuda_releasePool(self._stream.device_index, pool)
            raise


def _shapes(inputs: Inputs) -> str:
    return ", ".join(f"{name} {list(t.shape)}" for name, t in inputs.items() if t is not None)
