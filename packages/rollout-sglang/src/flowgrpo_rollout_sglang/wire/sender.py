"""The sending end: packs tensors into buckets and has the engine verify them. It does not commit.

Several engines must never serve different policies, so the driver commits on all of them only when each has verified:

    reports = [sender.send(tensors(), manifest, client) for sender, client in pairs]
    for client in clients:
        client.commit(manifest.version)
"""

import logging
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, TypeVar, get_args

from torch import Tensor

from flowgrpo_rollout_sglang.wire.errors import Reason, WeightSyncError
from flowgrpo_rollout_sglang.wire.fingerprint import digest
from flowgrpo_rollout_sglang.wire.host import HostSenderSlots
from flowgrpo_rollout_sglang.wire.layout import Bucket, bucket_layout, slot_bytes_for
from flowgrpo_rollout_sglang.wire.link import Channel, Link, Listener, PeerLostError, PeerSilentError, Transport
from flowgrpo_rollout_sglang.wire.manifest import FullWeightManifest, SyncMode, TensorEntry, WireDtype
from flowgrpo_rollout_sglang.wire.report import SyncReport, VerifyReport

if TYPE_CHECKING:
    from flowgrpo_rollout_sglang.wire.cuda import CudaSenderSlots

log = logging.getLogger(__name__)
T = TypeVar("T")

SLOTS = 2
"""One is packed while the other one is written into the parameters."""


class WeightReceiverClient(Protocol):
    """How the sender reaches a `WeightReceiver`: the receiver itself, a Ray actor's handle wrapped, an HTTP client.

    Each call returns when the receiver's method of the same name has, and raises what that raises (WeightSyncError).
    """

    name: str
    """Names the engine in errors and reports."""

    def begin(self, manifest: str, channel: str) -> None: ...

    def verify(self) -> VerifyReport: ...

    def commit(self, version: int) -> None: ...

    def abort(self) -> None: ...


class WeightSender:
    """One trainer rank's sending end. Keeps one link to each engine it sent to, and re-opens it when the engine ended.

    Args:
        transport: `shm` (any device, copies over the host) or `cuda_ipc` (sender and engine on the same GPU).
        bucket_size_mb: MiB of one of the two slots of a link; smaller where all tensors fit into less.
        wire_dtype: what tensors are cast to. `bf16` rounds fp32 masters; `fp32` needs fp32 parameters in the engine.
        timeout_s: how long either end may keep the other one waiting within a transaction.
    """

    def __init__(
        self,
        transport: Transport = "shm",
        *,
        bucket_size_mb: int = 512,
        wire_dtype: WireDtype = "bf16",
        timeout_s: float = 30.0,
    ):
        if bucket_size_mb < 1:
            raise ValueError(f"bucket_size_mb must be at least 1, got {bucket_size_mb}")
        if transport not in get_args(Transport):
            raise ValueError(f"transport must be one of {get_args(Transport)}, got {transport!r}")
        self.transport: Transport = transport
        self.bucket_size_mb, self.wire_dtype, self.timeout_s = bucket_size_mb, wire_dtype, timeout_s
        self._bridges: dict[str, _Bridge] = {}

    def manifest(
        self,
        shapes: Iterable[tuple[str, Sequence[int]]],
        *,
        version: int,
        mode: SyncMode = "full",
        base_version: int | None = None,
    ) -> FullWeightManifest:
        """The manifest of (wire name, shape) in the order of sending, in this sender's wire dtype."""
        return FullWeightManifest.build(
            shapes, version=version, mode=mode, wire_dtype=self.wire_dtype, base_version=base_version
        )

    def send(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        manifest: FullWeightManifest,
        receiver: WeightReceiverClient,
        *,
        must_change: bool = False,
    ) -> SyncReport:
        """Sends `tensors` and returns when the engine has verified them; commit with `receiver.commit(version)`.

        Args:
            tensors: (wire name, tensor) in the manifest's order, any float dtype. Taken lazily: a generator may gather
                each tensor from its shards when it is asked for, and only one bucket's tensors are alive at a time.
            must_change: an error (`unchanged`) if they are, bit for bit, what the last committed sync sent, as after
                an optimizer step that did nothing.

        Raises:
            WeightSyncError: the transaction was aborted; the engine serves its old version if no byte was written, and
                nothing until a later sync commits otherwise. The same version may be sent again.
        """
        sync = _Sync(self, manifest, receiver, must_change)
        try:
            return sync.run(iter(tensors))
        except BaseException as error:
            bridge = self._bridges.pop(receiver.name, None)
            if bridge is not None:
                bridge.hang_up()
            if sync.begun:
                with suppress(Exception):  # it may be dead; what happened first is what the caller must read
                    receiver.abort()
            if bridge is not None:
                bridge.close()  # after the abort: nobody writes from these slots any more
            if isinstance(error, WeightSyncError) or not isinstance(error, Exception):
                raise
            raise sync.explained(error) from error

    def close(self) -> None:
        """Closes all links and gives their slots back, each when its engine has let it go."""
        for bridge in self._bridges.values():
            bridge.close()
        self._bridges.clear()

    def _bridge(self, engine: str, entries: tuple[TensorEntry, ...]) -> "_Bridge":
        needed = slot_bytes_for(entries, self.bucket_size_mb)
        bridge = self._bridges.get(engine)
        if bridge is not None and (bridge.channel.slot_bytes < needed or not bridge.is_open()):
            self._bridges.pop(engine).close()
            bridge = None
        if bridge is None:
            bridge = self._bridges[engine] = _Bridge(self.transport, needed, self.timeout_s)
        return bridge


class _Bridge:
    """Slots, and the link to the one receiver that sees them."""

    def __init__(self, transport: Transport, slot_bytes: int, timeout_s: float):
        self.slots = _new_slots(transport, slot_bytes)
        self._listener = Listener()
        self._link: Link | None = None
        self.channel = Channel(
            transport=transport,
            link=self._listener.token[:8] + f"-{time.monotonic_ns():x}",
            address=self._listener.address,
            token=self._listener.token,
            slots=SLOTS,
            slot_bytes=slot_bytes,
            timeout_s=timeout_s,
            **self.slots.describe(),
        )

    def is_open(self) -> bool:
        return self._link is None or self._link.is_open()

    def link(self) -> Link:
        """The link; waits for the receiver to connect the first time."""
        if self._link is None:
            self._link = self._listener.accept(self.channel.timeout_s, self.slots.fds())
            self._listener.close()
        return self._link

    def hang_up(self) -> None:
        """Sends nothing more, which the receiver sees at once."""
        self._listener.close()
        if self._link is not None:
            self._link.hang_up()

    def close(self) -> None:
        """Frees the slots once the receiver has let them go; keeps them for ever if it does not."""
        self.hang_up()
        if self._link is not None:
            let_go = self._link.wait_closed(self.channel.timeout_s)
            self._link.close()
            if not let_go:
                log.warning(
                    "an engine did not let the weight slots go within %g s: their %d MiB stay until this process ends",
                    self.channel.timeout_s,
                    self.channel.slots * self.channel.slot_bytes >> 20,
                )
                self.slots.abandon()
                return
        self.slots.close()


def _new_slots(transport: Transport, slot_bytes: int) -> "HostSenderSlots | CudaSenderSlots":
    if transport == "shm":
        return HostSenderSlots(SLOTS, slot_bytes)
    from flowgrpo_rollout_sglang.wire.cuda import CudaSenderSlots  # only where there is a GPU

    return CudaSenderSlots(SLOTS, slot_bytes)


class _Sync:
    """One transaction, seen from the sender."""

    def __init__(
        self, sender: WeightSender, manifest: FullWeightManifest, receiver: WeightReceiverClient, must_change: bool
    ):
        self._sender, self._manifest, self._receiver, self._must_change = sender, manifest, receiver, must_change
        self._seconds = dict.fromkeys(("begin", "gather", "pack", "transport", "verify"), 0.0)
        self.begun = False
        self._packing = 0.0
        self._sent = 0  # tensors taken from the caller

    def run(self, tensors: Iterator[tuple[str, Tensor]]) -> SyncReport:
        manifest, receiver = self._manifest, self._receiver
        if manifest.wire_dtype != self._sender.wire_dtype:
            raise self._error("dtype", f"manifest in {manifest.wire_dtype}, sender in {self._sender.wire_dtype}")
        started = time.perf_counter()
        bridge = self._sender._bridge(receiver.name, manifest.tensors)
        buckets = bucket_layout(manifest.tensors, bridge.channel.slot_bytes)
        bridge.slots.begin(manifest.tensors, buckets)
        self._timed("begin", lambda: receiver.begin(manifest.to_json(), bridge.channel.to_json()))
        self.begun = True
        link = bridge.link()
        self._send_buckets(bridge, link, buckets, tensors)
        fingerprints = self._timed("transport", bridge.slots.fingerprints)
        self._seconds["pack"] = bridge.slots.seconds()
        # A tensor may be on its way when it is handed over: packing then waits for it.
        self._seconds["gather"] += max(0.0, self._packing - self._seconds["pack"])
        link.send(b"SEAL", len(buckets), struct.pack(f"<{len(fingerprints)}Q", *fingerprints))
        expected = digest(manifest.ordered_name_shape_hash, fingerprints)  # while the engine does the same
        verified = self._timed("verify", receiver.verify)
        for sequence in range(max(0, len(buckets) - SLOTS), len(buckets)):
            link.receive(b"DRAN", sequence)
        self._check(verified, expected)
        return self._report(verified, time.perf_counter() - started)

    def _send_buckets(
        self, bridge: _Bridge, link: Link, buckets: Sequence[Bucket], tensors: Iterator[tuple[str, Tensor]]
    ) -> None:
        index, tensor = -1, None
        for sequence, bucket in enumerate(buckets):
            if sequence >= SLOTS:
                self._timed("transport", lambda n=sequence - SLOTS: link.receive(b"DRAN", n))
            sources: list[Tensor] = []
            for piece in bucket.pieces:
                if piece.tensor != index:
                    index, tensor = piece.tensor, self._timed("gather", lambda: self._next(tensors))
                assert tensor is not None
                sources.append(tensor)
            started = time.perf_counter()
            bridge.slots.pack(sequence % SLOTS, bucket, sources)
            self._packing += time.perf_counter() - started
            link.send(b"FILL", sequence)
        if (more := next(tensors, None)) is not None:
            raise self._error("stream", "the sender has more tensors than its manifest", (more[0],))

    def _next(self, tensors: Iterator[tuple[str, Tensor]]) -> Tensor:
        """The next tensor, which must be the manifest's next."""
        entry = self._manifest.tensors[self._sent]
        name, tensor = next(tensors, ("", None))
        if tensor is None:
            missing = self._manifest.names[self._sent :]
            raise self._error("stream", "the sender has fewer tensors than its manifest", missing)
        if name != entry.name:
            raise self._error("stream", f"the sender gave {name} where its manifest has {entry.name}", (entry.name,))
        if tensor.shape != entry.shape:
            raise self._error("stream", f"{tuple(tensor.shape)} given, {entry.shape} in the manifest", (name,))
        if not tensor.is_floating_point():
            raise self._error("dtype", f"a weight must be of a float dtype, got {tensor.dtype}", (name,))
        self._sent += 1
        return tensor

    def _check(self, verified: VerifyReport, expected: str) -> None:
        """The receiver's own words against what was sent: it may be an engine that only says yes."""
        manifest = self._manifest
        got = (verified.version, verified.tensors, verified.bytes, verified.digest)
        if got != (manifest.version, manifest.tensor_count, manifest.total_bytes, expected):
            raise self._error(
                "fingerprint", f"verified {got}, expected version, count, bytes and digest of the manifest"
            )
        if self._must_change and verified.changed is False:
            raise self._error(
                "unchanged", "bit for bit the weights of the last committed sync; did the optimizer step?"
            )

    def _report(self, verified: VerifyReport, total_s: float) -> SyncReport:
        return SyncReport(
            engine=self._receiver.name,
            version=self._manifest.version,
            mode=self._manifest.mode,
            transport=self._sender.transport,
            tensors=verified.tensors,
            bytes=verified.bytes,
            buckets=verified.buckets,
            digest=verified.digest,
            changed=verified.changed,
            scatter_s=verified.scatter_s,
            total_s=total_s,
            **{f"{phase}_s": seconds for phase, seconds in self._seconds.items()},
        )

    def explained(self, error: Exception) -> WeightSyncError:
        """`error` as the one error of a sync."""
        if isinstance(error, PeerLostError):
            return self._error("peer_lost", f"the engine {error}", hint="restart it, then send the version again")
        if isinstance(error, (EOFError, ConnectionError)):  # the control path's way of saying so
            return self._error("peer_lost", f"the engine does not answer ({type(error).__name__})")
        if isinstance(error, PeerSilentError):
            return self._error("timeout", f"the engine {error}", hint="see its log; then send the version again")
        return self._error("internal" if self.begun else "control", f"{type(error).__name__}: {error}")

    def _error(self, reason: Reason, what: str, tensors: Sequence[str] = (), hint: str = "") -> WeightSyncError:
        return WeightSyncError(
            self._receiver.name, self._manifest.version, reason, what, tuple(tensors), self._sent, hint
        )

    def _timed(self, phase: str, call: Callable[[], T]) -> T:
        started = time.perf_counter()
        try:
            return call()
        finally:
            self._seconds[phase] += time.perf_counter() - started
