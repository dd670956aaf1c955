"""Actor and engines take turns on the same devices (S2).

What sleeps is decided where it is wired: without `--offload-train` or `--offload-rollout` the respective list
is empty and a turn costs nothing. A failed sleep or wake is fatal (E6): swallowing it would end as an
out-of-memory error many steps later, with no trace of its cause.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray


class Colocation:
    """Whose turn it is. Between turns everything that can sleep does; a turn that fails stays as it is."""

    def __init__(self, *, sleeping_actors: Sequence[Any], sleeping_engines: Sequence[Any]):
        self._actors, self._engines = sleeping_actors, sleeping_engines
        ray.get([actor.sleep.remote() for actor in self._actors])
        ray.get([engine.sleep.remote(None) for engine in self._engines])

    @contextmanager
    def engines_hold_gpus(self) -> Iterator[None]:
        """Engines are awake whole: they generate, and a colocated scorer may score."""
        ray.get([engine.wake.remote(None) for engine in self._engines])
        yield
        ray.get([engine.sleep.remote(None) for engine in self._engines])

    @contextmanager
    def actor_holds_gpus(self) -> Iterator[None]:
        """The actor is awake: it trains and publishes."""
        ray.get([actor.wake.remote() for actor in self._actors])
        yield
        ray.get([actor.sleep.remote() for actor in self._actors])

    @contextmanager
    def engines_take_weights(self) -> Iterator[None]:
        """Within the actor's turn: only the engines' transformer is awake, for a weight sync."""
        ray.get([engine.wake.remote(["weights"]) for engine in self._engines])
        yield
        ray.get([engine.sleep.remote(None) for engine in self._engines])
