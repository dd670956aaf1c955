"""Publish: the actor's new weights reach every engine, or none serves them.

Two phases. Each rank sends to its own engine, up to the engine's word that what it wrote is what was sent;
only when all have said so does any engine commit. Next on the reading path: nothing; the loop starts again.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from flowgrpo_rollout_sglang.engine import EngineLostError
from flowgrpo_rollout_sglang.wire import SyncReport, WeightSyncError

from flowgrpo_trainer.errors import in_words
from flowgrpo_trainer.fleet import Fleet
from flowgrpo_trainer.workers import SyncTarget

log = logging.getLogger(__name__)
SLOW, SLOW_S = 2.0, 0.1
"""An engine whose sync took so many times as long as the first one's, and so many seconds longer, has its own line."""


@dataclass
class Publisher:
    """What publishing needs to know of the past: the version that serves, and how often it failed."""

    gpus_per_engine: int = 1
    fault_tolerance: bool = False
    version: int = 0
    """The version that every engine serves."""
    failures: int = 0
    digest: str = ""
    """Over names and fingerprints of the weights that serve, of rank 0's part; empty before the first sync."""
    _base_known: bool = field(default=True, repr=False)

    def publish(self, fleet: Fleet, version: int, *, must_change: bool) -> dict[str, float]:
        """Makes every engine serve `version`; returns the metrics of the sync.

        Called by: `loop.train`, in the actor's turn, after its update.
        Leaves:    all engines at `version`; or, after an error, all at the old version, or refusing to serve.
        Raises:    WeightSyncError naming engine, version and tensors, after the actor took its version back, or
                   EngineLostError for an engine that died before; with `--use-fault-tolerance` only if fresh
                   engines cannot be given the weights either.
        """
        try:
            reports = self._transaction(fleet, version, must_change)
        except (WeightSyncError, EngineLostError, ray.exceptions.RayActorError) as error:
            self.failures += 1
            if not self.fault_tolerance or (isinstance(error, WeightSyncError) and error.reason == "unchanged"):
                raise
            log.warning(
                "the sync of version %d failed, all engines are started afresh: %s", version, _named(error, fleet)
            )
            fleet.restart_engines()
            self._base_known = False
            reports = self._transaction(fleet, version, must_change=False)
        self.version, self._base_known = version, True
        return {
            "train/policy_version": float(version),
            "train/weight_sync_tensors": float(reports[0].tensors),
            "train/weight_sync_gb": sum(report.bytes for report in reports) / 1e9,
            "train/weight_sync_failures": float(self.failures),
            "perf/weight_sync_gb_per_s": min(report.gb_per_s for report in reports),
        }

    def publish_restored(self, fleet: Fleet, version: int) -> None:
        """Makes fresh engines serve the restored policy under its own number; version 0 is what they start with."""
        if version > 0:
            self._base_known = False
            self._transaction(fleet, version, must_change=False)
            self.version, self._base_known = version, True

    def _transaction(self, fleet: Fleet, version: int, must_change: bool) -> list[SyncReport]:
        engines = fleet.engines.workers
        expected = len(engines) * self.gpus_per_engine
        if len(fleet.actors) != expected:  # W5
            raise WeightSyncError(
                "all", version, "control", f"{len(fleet.actors)} ranks for engines with {expected} devices in all"
            )
        base = self.version if self._base_known else None
        with fleet.colocation.engines_take_weights():
            try:
                sends = [
                    actor.send_weights.remote(version, base, self._target(engines, rank), must_change)
                    for rank, actor in enumerate(fleet.actors)
                ]
                reports = ray.get(sends)
                started = time.perf_counter()
                ray.get([engine.commit.remote(version) for engine in engines])
                committing = time.perf_counter() - started
            except BaseException:
                _settle([engine.abort.remote() for engine in engines])
                _settle([actor.publish_failed.remote() for actor in fleet.actors])
                raise
        ray.get([actor.publish_succeeded.remote(version) for actor in fleet.actors])
        self.digest = reports[0].digest
        for line in sync_lines([report.committed(committing) for report in reports]):
            log.info("%s", line)
        return reports

    def _target(self, engines: list[Any], rank: int) -> SyncTarget:
        """The engine, and its rank, that holds its weights on the card of a training rank."""
        index, local = divmod(rank, self.gpus_per_engine)
        return SyncTarget(engines[index], f"engine{index}", local, self.gpus_per_engine)


def sync_lines(reports: Sequence[SyncReport]) -> list[str]:
    """The `[wsync time]` lines of one sync (W6): the first engine's, and that of each that took other things or was
    much slower."""

    def kind(report: SyncReport) -> tuple[Any, ...]:
        return report.mode, report.transport, report.tensors, report.bytes, report.buckets

    first, *others = reports
    slow_s = max(SLOW * first.total_s, first.total_s + SLOW_S)
    return [
        first.line(),
        *(report.line() for report in others if kind(report) != kind(first) or report.total_s > slow_s),
    ]


def _named(error: Exception, fleet: Fleet) -> str:
    """The error in words, which name the engine: a worker that died knows only Ray's number."""
    dead = getattr(error, "actor_id", None)
    names = [f"engine{i}" for i, engine in enumerate(fleet.engines.workers) if engine._actor_id.hex() == dead]
    return ": ".join([*names, in_words(error)])


def _settle(calls: list[Any]) -> None:
    """Waits for calls that may fail because what they address is dead: the first error is what counts."""
    for call in calls:
        try:
            ray.get(call, timeout=30.0)
        except Exception:
            continue
