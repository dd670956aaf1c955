"""What a sync reports: the receiver's side of it after `verify`, and the whole of it for one engine."""

import json
from dataclasses import asdict, dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """An engine holds, in its parameters, exactly what was sent; it waits for commit."""

    engine: str
    version: int
    tensors: int
    bytes: int
    buckets: int
    digest: str
    """Over all names and fingerprints, recomputed from what was written."""
    changed: bool | None
    """False: the same bits as the last committed sync, so the optimizer step did nothing. None: the first sync."""
    scatter_s: float
    """Seconds spent writing parameters, fingerprints included."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """One sync to one engine, verified and not yet committed. Times in seconds; they overlap, so they do not add up."""

    engine: str
    version: int
    mode: str
    transport: str
    tensors: int
    bytes: int
    buckets: int
    digest: str
    changed: bool | None
    begin_s: float
    """Names resolved, link opened."""
    gather_s: float
    """Waiting for tensors: for the sender's iterator, and until what it gave can be packed."""
    pack_s: float
    """Cast, copy into the bucket, fingerprint."""
    transport_s: float
    """Waiting for a free bucket."""
    scatter_s: float
    """Bucket into parameters, fingerprint recomputed; on the engine's side."""
    verify_s: float
    """From the last bucket sent to the engine's word that everything is there."""
    total_s: float
    """From begin to verified, and to committed once `committed` was called."""
    commit_s: float | None = None

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes per second over `total_s`."""
        return self.bytes / 1e9 / self.total_s

    def committed(self, seconds: float) -> Self:
        """The same report with the time that the commit took."""
        return replace(self, commit_s=seconds, total_s=self.total_s + seconds)

    def line(self) -> str:
        """The `[wsync time]` line of one sync."""
        commit = "-" if self.commit_s is None else f"{self.commit_s:.4f}"
        return (
            f"[wsync time] engine={self.engine} version={self.version} mode={self.mode} transport={self.transport} "
            f"begin={self.begin_s:.4f}s gather={self.gather_s:.4f}s pack={self.pack_s:.4f}s "
            f"transport={self.transport_s:.4f}s scatter={self.scatter_s:.4f}s verify={self.verify_s:.4f}s "
            f"commit={commit}s total={self.total_s:.4f}s tensors={self.tensors} buckets={self.buckets} "
            f"{self.bytes / 1e9:.3f} GB {self.gb_per_s:.2f} GB/s"
        )

    def metrics(self) -> dict[str, float]:
        """For a tracker, under `perf/`-like names of the caller's choice."""
        names = ("begin_s", "gather_s", "pack_s", "transport_s", "scatter_s", "verify_s", "total_s")
        values: dict[str, float] = {name: getattr(self, name) for name in names}
        values |= {"commit_s": self.commit_s or 0.0, "gb": self.bytes / 1e9, "gb_per_s": self.gb_per_s}
        return values | {"tensors": float(self.tensors)}
