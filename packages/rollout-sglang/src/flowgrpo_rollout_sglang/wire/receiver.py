"""The receiving end: writes buckets into an engine's parameters, and decides whether the engine may serve.

    serving --begin--> open --all written, all fingerprints equal--> verified --commit--> serving, new version
                         |  failure or abort                            |  abort
                         v                                              v
            serving, if no byte was written                    failed: refuses to serve until a later commit

There is no second copy of the weights to go back to, so a transaction that wrote something and failed leaves an engine
that says so. It still reports its old version number, and any later complete transaction makes it serve again.
"""

import struct
import threading
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flowgrpo_rollout_sglang.wire import native
from flowgrpo_rollout_sglang.wire.errors import DeviceMismatchError, Reason, WeightSyncError
from flowgrpo_rollout_sglang.wire.fingerprint import digest
from flowgrpo_rollout_sglang.wire.host import EXACT_TARGETS, HostReceiverSlots
from flowgrpo_rollout_sglang.wire.layout import Bucket, bucket_layout
from flowgrpo_rollout_sglang.wire.link import Channel, Link, PeerLostError, PeerSilentError, connect
from flowgrpo_rollout_sglang.wire.manifest import FullWeightManifest, ManifestError, SyncMode
from flowgrpo_rollout_sglang.wire.report import VerifyReport

if TYPE_CHECKING:
    from flowgrpo_rollout_sglang.wire.cuda import CudaReceiverSlots

Targets = Mapping[str, Tensor]


@dataclass
class _Transaction:
    manifest: FullWeightManifest
    targets: list[Tensor]
    buckets: tuple[Bucket, ...]
    written: int = 0
    """Buckets that were begun to be written."""
    fingerprints: tuple[int, ...] = ()
    aborted: bool = False
    error: WeightSyncError | None = None
    report: VerifyReport | None = None
    """Set once everything is written and equal."""
    thread: threading.Thread = field(default_factory=threading.Thread)


class WeightReceiver:
    """An engine's receiving end. All methods may be called from any thread.

    Args:
        targets: wire name to the tensor that takes it: all of them, in each transaction. A value may be a view, such as
            the rows of a fused parameter that belong to `to_q`, or the slice that a tensor-parallel rank holds. A
            function is asked at each `begin`: use one where parameters get new storage, as they do over sleep and wake.
        engine: names this engine in errors.
        mode: the only mode this engine takes. None: that of the first commit, from then on.
        version: of the weights that the engine starts with.
    """

    def __init__(
        self,
        targets: Targets | Callable[[], Targets],
        engine: str,
        *,
        mode: SyncMode | None = None,
        version: int = 0,
    ):
        self.name, self.version = engine, version
        self._targets, self._mode = targets, mode
        self._lock = threading.RLock()
        self._open: _Transaction | None = None
        self._ended: WeightSyncError | None = None  # how the last transaction failed, for its verify
        self._failed: WeightSyncError | None = None  # set while the parameters are half new
        self._committed: tuple[int, ...] | None = None  # fingerprints of the version that is served
        self._generating = 0
        self._link: Link | None = None
        self._link_id = ""
        self._slots: HostReceiverSlots | CudaReceiverSlots | None = None

    def ensure_serving(self) -> None:
        """Returns if the engine holds all of one committed version; raises WeightSyncError otherwise."""
        with self._lock:
            if self._failed is not None:
                raise _again(self._failed)
            if self._open is not None:
                raise self._error(self._open.manifest.version, "busy", "a weight transaction is open")

    @contextmanager
    def serving(self) -> Generator[int]:
        """Around a generation: yields the version it is made with; `begin` is refused meanwhile."""
        with self._lock:
            self.ensure_serving()
            self._generating += 1
        try:
            yield self.version
        finally:
            with self._lock:
                self._generating -= 1

    def begin(self, manifest: str, channel: str) -> None:
        """Opens a transaction: checks the manifest against the targets, connects, and starts to take buckets.

        Args:
            manifest, channel: JSON of a FullWeightManifest and a Channel.

        Leaves: the transaction open, buckets being written in a thread of its own; or, after an error, all as it was.
        Raises: WeightSyncError: `manifest`, `names`, `shape`, `dtype`, `version`, `busy`, `peer_lost`.
        """
        try:
            wanted = FullWeightManifest.from_json(manifest)
        except ManifestError as error:
            raise self._error(0, "manifest", str(error)) from error
        try:
            to = Channel.from_json(channel)
        except ValueError as error:
            raise self._error(wanted.version, "manifest", str(error)) from error
        self._drop_orphan()
        with self._lock:
            self._check_state(wanted)
            targets = self._resolved(wanted)
            try:
                _prepare(to)
                buckets = bucket_layout(wanted.tensors, to.slot_bytes)
                self._connect(to)
            except (PeerLostError, ValueError) as error:
                raise self._error(wanted.version, "peer_lost", f"the sender {error}") from error
            transaction = _Transaction(wanted, targets, buckets)
            transaction.thread = threading.Thread(
                target=self._take, args=(transaction, self._link, to), name=f"weights-{wanted.version}", daemon=True
            )
            self._open, self._ended = transaction, None
            transaction.thread.start()

    def verify(self) -> VerifyReport:
        """Waits until every bucket is written; returns if what the parameters hold is what was sent.

        Raises: WeightSyncError: `fingerprint` (naming the tensors), `peer_lost`, `timeout`, `aborted`, `unverified`.
        """
        with self._lock:
            transaction = self._open
            if transaction is None:
                raise _again(self._ended) if self._ended else self._error(0, "unverified", "no transaction is open")
        transaction.thread.join()  # it waits for the sender at most `timeout_s` at a time
        if transaction.report is None:
            raise _again(transaction.error)
        return transaction.report

    def commit(self, version: int) -> None:
        """Makes the verified weights serve as `version`. Raises WeightSyncError: `unverified`, `version`."""
        with self._lock:
            transaction = self._verified(version)
            self.version, self._committed = version, transaction.fingerprints
            self._mode = transaction.manifest.mode
            self._open = self._failed = self._ended = None

    def ensure_verified(self, version: int) -> None:
        """Returns if `commit(version)` would succeed; raises what that would raise."""
        with self._lock:
            self._verified(version)

    def abort(self) -> None:
        """Ends an open transaction, also a verified one; without one it does nothing."""
        with self._lock:
            transaction = self._open
            if transaction is None:
                return
            transaction.aborted = True
            if self._link is not None:
                self._link.interrupt()  # it is closed when the slots are let go
        transaction.thread.join()
        with self._lock:
            if self._open is transaction:  # verified, so its thread had ended well
                self._end(transaction, self._error(transaction.manifest.version, "aborted", "the sync was aborted"))

    def close(self) -> None:
        """Aborts what is open and lets the sender's slots go."""
        self.abort()
        with self._lock:
            self._disconnect()

    def _verified(self, version: int) -> _Transaction:
        transaction = self._open
        if transaction is None or transaction.report is None:
            what = "commit of a transaction that was not verified" if transaction else "commit without a transaction"
            raise self._error(version, "unverified", what, hint="call verify first, on every engine")
        if version != transaction.manifest.version or version <= self.version:
            what = f"commit of {version}; verified is {transaction.manifest.version}, served {self.version}"
            raise self._error(version, "version", what)
        return transaction

    def _check_state(self, manifest: FullWeightManifest) -> None:
        version = manifest.version
        if self._open is not None:
            what = f"version {self._open.manifest.version} is being received; two syncs at once"
            raise self._error(version, "busy", what, hint="let it end, or abort it")
        if self._generating:
            raise self._error(version, "busy", "a generation is running")
        if version <= self.version:
            raise self._error(version, "version", f"not newer than {self.version}, which is served")
        if manifest.base_version is not None and manifest.base_version != self.version:
            raise self._error(
                version,
                "version",
                f"the sender takes the engine to serve {manifest.base_version}, it serves {self.version}",
                hint="send the whole state with base_version=None after an engine's restart",
            )
        if self._mode is not None and manifest.mode != self._mode:
            what = f"a sync of mode {manifest.mode}; this engine takes {self._mode} and the two are never mixed"
            raise self._error(version, "manifest", what)

    def _resolved(self, manifest: FullWeightManifest) -> list[Tensor]:
        """The target of each tensor, in order, or an error that names all tensors at fault."""
        version = manifest.version
        targets = self._targets if isinstance(self._targets, Mapping) else self._targets()
        if unknown := tuple(name for name in manifest.names if name not in targets):
            hint = "the engine's names come from its targets, the sender's through strip_transport_wrappers"
            raise self._error(version, "names", "the engine does not know them", unknown, hint)
        if missing := tuple(targets.keys() - set(manifest.names)):
            raise self._error(version, "names", "the engine needs them and the sender has none", tuple(sorted(missing)))
        pairs = [(entry, targets[entry.name]) for entry in manifest.tensors]
        if wrong := tuple(e.name for e, t in pairs if t.shape != e.shape):
            first = manifest.tensors[manifest.names.index(wrong[0])]
            what = f"{wrong[0]} is {first.shape} at the sender and {tuple(targets[wrong[0]].shape)} in the engine"
            raise self._error(version, "shape", what, wrong)
        if wrong := tuple(e.name for e, t in pairs if t.dtype not in EXACT_TARGETS[e.dtype]):
            what = f"{targets[wrong[0]].dtype} parameters do not hold every {manifest.wire_dtype} value"
            raise self._error(version, "dtype", what, wrong, "send in the wire dtype of the engine's parameters")
        if twice := _overlapping([(e.name, t) for e, t in pairs]):
            raise self._error(version, "names", "the engine gives both the same memory", twice)
        return [target for _, target in pairs]

    def _take(self, transaction: _Transaction, link: Link, channel: Channel) -> None:
        """The thread of one transaction: writes every bucket, then compares fingerprints."""
        try:
            with torch.no_grad():
                self._take_buckets(transaction, link, channel)
        except Exception as error:  # whatever it is, the engine must know that it may be half new
            failure = self._explained(transaction, error)
            with suppress(PeerLostError, PeerSilentError, WeightSyncError):
                link.send(b"FAIL", 0, failure.to_json().encode())
            with self._lock:
                self._end(transaction, failure)

    def _take_buckets(self, transaction: _Transaction, link: Link, channel: Channel) -> None:
        manifest, entries = transaction.manifest, transaction.manifest.tensors
        if self._slots is None:
            self._slots = _open_slots(link, channel)
        slots = self._slots
        slots.begin(entries, transaction.targets, transaction.buckets)
        for sequence, bucket in enumerate(transaction.buckets):
            link.receive(b"FILL", sequence)
            transaction.written += 1
            slots.scatter(sequence, bucket)
            link.send(b"DRAN", sequence)
        sealed = link.receive(b"SEAL", len(transaction.buckets))
        sent = struct.unpack(f"<{len(entries)}Q", sealed)
        held = tuple(slots.fingerprints())
        if wrong := tuple(e.name for e, a, b in zip(entries, sent, held, strict=True) if a != b):
            raise self._error(manifest.version, "fingerprint", "what was written is not what was sent", wrong)
        transaction.fingerprints = held
        transaction.report = VerifyReport(
            engine=self.name,
            version=manifest.version,
            tensors=len(entries),
            bytes=manifest.total_bytes,
            buckets=len(transaction.buckets),
            digest=digest(manifest.ordered_name_shape_hash, held),
            changed=None if self._committed is None else held != self._committed,
            scatter_s=slots.seconds(),
        )

    def _explained(self, transaction: _Transaction, error: Exception) -> WeightSyncError:
        version = transaction.manifest.version
        if transaction.aborted:
            return self._error(version, "aborted", "the sync was aborted")
        if isinstance(error, WeightSyncError):
            return error
        if isinstance(error, PeerLostError):
            return self._error(version, "peer_lost", f"the sender {error}", hint="send the version again")
        if isinstance(error, PeerSilentError):
            return self._error(version, "timeout", f"the sender {error}", hint="send the version again")
        if isinstance(error, DeviceMismatchError):
            return self._error(version, "device", str(error), hint="pair each rank with the engine of its own GPU")
        return self._error(version, "internal", f"{type(error).__name__}: {error}")

    def _end(self, transaction: _Transaction, failure: WeightSyncError) -> None:
        """After a failure: the link is of no use any more, and the parameters may be half new."""
        if transaction.written:
            failure = WeightSyncError(
                *failure.args[:6], hint=failure.hint or "the engine serves nothing until a later sync commits"
            )
            self._failed = failure
        transaction.error = transaction.error or failure
        transaction.report = None
        self._ended, self._open = failure, None
        self._disconnect()

    def _drop_orphan(self) -> None:
        """Ends a transaction whose sender has gone, so that it does not stand in the next one's way."""
        with self._lock:
            transaction, link = self._open, self._link
        if transaction is None or (link is not None and link.is_open()):
            return
        transaction.thread.join()  # it meets the end of the link, unless it had verified before
        with self._lock:
            if self._open is transaction:
                what = "the sender ended before the commit"
                self._end(transaction, self._error(transaction.manifest.version, "peer_lost", what))

    def _connect(self, channel: Channel) -> None:
        if self._link is not None and self._link_id == channel.link and self._link.is_open():
            return
        self._disconnect()
        self._link, self._link_id = connect(channel), channel.link
        link, myself = self._link, weakref.ref(self)  # a watch must not keep an engine's weights alive

        def hung_up() -> None:
            if receiver := myself():
                receiver._let_go(link)
            else:
                link.close()

        link.watch(hung_up)

    def _let_go(self, link: Link) -> None:
        """The sender hung up. Between transactions nobody else would notice, and it waits to free its slots."""
        with self._lock:
            busy = self._open is not None and self._open.report is None  # then its thread notices
            if self._link is link and not busy:
                self._disconnect()

    def _disconnect(self) -> None:
        """Lets the slots go before the link: its end is what tells the sender that they are free."""
        if self._slots is not None:
            self._slots.close()
        if self._link is not None:
            self._link.close()
        self._link, self._slots, self._link_id = None, None, ""

    def _error(
        self, version: int, reason: Reason, what: str, tensors: tuple[str, ...] = (), hint: str = ""
    ) -> WeightSyncError:
        sent = 0
        if self._open is not None and reason != "busy":
            started = self._open.buckets[: self._open.written]
            sent = len({piece.tensor for bucket in started for piece in bucket.pieces})
        return WeightSyncError(self.name, version, reason, what, tensors, sent, hint)


def _prepare(channel: Channel) -> None:
    """What may take long at the first use, before the sender's clock runs."""
    if channel.transport == "cuda_ipc":
        native.load()


def _open_slots(link: Link, channel: Channel) -> "HostReceiverSlots | CudaReceiverSlots":
    if channel.transport == "shm":
        return HostReceiverSlots(link, channel)
    from flowgrpo_rollout_sglang.wire.cuda import CudaReceiverSlots  # only where there is a GPU

    return CudaReceiverSlots(link, channel)


def _overlapping(pairs: Sequence[tuple[str, Tensor]]) -> tuple[str, ...]:
    """Two names that would write the same memory, if there are any. Interleaved rows, which may share a span, pass."""
    spans = sorted((t.data_ptr(), t.numel() * t.element_size(), name) for name, t in pairs if t.is_contiguous())
    for (start, nbytes, name), (next_start, _, next_name) in pairwise(spans):
        if start + nbytes > next_start:
            return name, next_name
    return ()


def _again(error: WeightSyncError | None) -> WeightSyncError:
    """A fresh copy to raise: the stored one would collect the traceback of every caller."""
    assert error is not None
    return WeightSyncError(*error.args)
