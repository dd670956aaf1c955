"""What one weight sync sends, agreed before a byte moves: names, shapes, wire dtype, and the version they make."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, Literal, NamedTuple, Self, cast, get_args

WireDtype = Literal["bf16", "fp32"]
SyncMode = Literal["full", "adapter"]

ITEM_BYTES: dict[str, int] = {"bf16": 2, "fp32": 4}
MAX_WORDS = 2**32 - 2
"""Longest tensor in 4-byte words (16 GiB): the fingerprint gives each word position a key of its own."""

# Modules that sharding, checkpointing, torch.compile and PEFT put around a module; never part of a wire name.
_WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod", "base_layer"})
_PEFT_PREFIX = ("base_model", "model")
_LORA_PARTS = frozenset({"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"})


class ManifestError(ValueError):
    """A manifest is cut short, contradicts itself, or lists something that cannot be sent."""


def strip_transport_wrappers(name: str) -> str:
    """The name a parameter has in the plain model.

    Drops `_checkpoint_wrapped_module`, `_fsdp_wrapped_module`, `_orig_mod` and PEFT's `base_model.model.`,
    `base_layer` and adapter name: `base_model.model.blocks.0._checkpoint_wrapped_module.to_q.lora_A.default.weight`
    becomes `blocks.0.to_q.lora_A.weight`.
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    if tuple(parts[:2]) == _PEFT_PREFIX:
        parts = parts[2:]
    kept: list[str] = []
    for at, part in enumerate(parts):
        is_adapter_name = at > 0 and parts[at - 1] in _LORA_PARTS and part not in ("weight", "bias")
        if not is_adapter_name:
            kept.append(part)
    return ".".join(kept)


class TensorEntry(NamedTuple):
    """One tensor on the wire."""

    name: str
    shape: tuple[int, ...]
    dtype: WireDtype

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, without padding."""
        return self.numel * ITEM_BYTES[self.dtype]


@lru_cache(maxsize=8)  # the same from sync to sync
def table_text(tensors: tuple[TensorEntry, ...]) -> str:
    """One line for each tensor, in order: `name dtype 4,6`. What a manifest carries, and what its hash is of."""
    return "".join([f"{name} {dtype} {','.join(map(str, shape))}\n" for name, shape, dtype in tensors])


def ordered_name_shape_hash(tensors: tuple[TensorEntry, ...]) -> str:
    """SHA-256 of `table_text`; 64 hex digits."""
    return hashlib.sha256(table_text(tensors).encode()).hexdigest()


class _Table(NamedTuple):
    tensors: tuple[TensorEntry, ...]
    total_bytes: int
    hash: str


@lru_cache(maxsize=8)  # the same from sync to sync
def _read_table(text: str) -> _Table:
    """Raises ManifestError, also for a shape that holds no whole numbers."""
    lines = (line.split(" ") for line in text.splitlines())
    try:
        tensors = tuple(
            TensorEntry(name, tuple(map(int, shape.split(","))) if shape else (), cast(WireDtype, dtype))
            for name, dtype, shape in lines
        )
    except ValueError as error:
        raise ManifestError(f"not a table of `name dtype shape` ({error}): {text[:80]!r}") from error
    return _Table(tensors, _checked_bytes(tensors), hashlib.sha256(text.encode()).hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class FullWeightManifest:
    """The content of one transaction. Complete: whatever the engine may take is in it, in the order of sending."""

    version: int
    """The policy version that a commit makes; above the one the engine serves."""
    mode: SyncMode
    """`full`: the transformer (also with LoRA merged into it). `adapter`: only the LoRA tensors."""
    wire_dtype: WireDtype
    tensors: tuple[TensorEntry, ...]
    base_version: int | None = None
    """The version that the engine must serve now. None: any, as after an engine's restart."""
    fingerprints: tuple[int, ...] | None = None
    """One for each tensor, unsigned 64-bit; None until the tensors are packed."""
    tensor_count: int
    total_bytes: int
    ordered_name_shape_hash: str

    @classmethod
    def build(
        cls,
        shapes: Iterable[tuple[str, Sequence[int]]],
        *,
        version: int,
        mode: SyncMode = "full",
        wire_dtype: WireDtype = "bf16",
        base_version: int | None = None,
    ) -> Self:
        """From (wire name, shape) in the order of sending. Raises ManifestError, naming every tensor at fault.

        A wire name holds no white space.
        """
        entries = tuple(TensorEntry(name, tuple(shape), wire_dtype) for name, shape in shapes)
        if strange := [entry.name for entry in entries if entry.name.split() != [entry.name]]:
            raise ManifestError(f"a wire name must hold no white space, got {strange[0]!r}")
        table = _read_table(table_text(entries))
        manifest = cls(
            version=version,
            mode=mode,
            wire_dtype=wire_dtype,
            tensors=table.tensors,
            base_version=base_version,
            tensor_count=len(table.tensors),
            total_bytes=table.total_bytes,
            ordered_name_shape_hash=table.hash,
        )
        _check(manifest, table)
        return manifest

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(t.name for t in self.tensors)

    def sealed(self, fingerprints: Sequence[int]) -> Self:
        """The same manifest with the fingerprints of what was packed."""
        if len(fingerprints) != len(self.tensors):
            raise ManifestError(f"{len(fingerprints)} fingerprints for {len(self.tensors)} tensors")
        return replace(self, fingerprints=tuple(fingerprints))

    def to_json(self) -> str:
        fields: dict[str, Any] = {name: getattr(self, name) for name in _SCALARS}
        fields["fingerprints"] = list(self.fingerprints) if self.fingerprints is not None else None
        return json.dumps(fields | {"tensors": table_text(self.tensors)})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ManifestError if the text is cut, or its count, bytes or hash are not those of its tensors."""
        try:
            f = json.loads(text)
            table = _read_table(f["tensors"])
            slots = f["fingerprints"]
            manifest = cls(
                tensors=table.tensors,
                fingerprints=tuple(_whole(value) for value in slots) if slots is not None else None,
                **{name: f[name] for name in _SCALARS},
            )
            _check(manifest, table)
        except ManifestError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ManifestError(f"not a weight manifest ({error}): {text[:80]!r}") from error
        return manifest


_SCALARS = (
    "version",
    "mode",
    "wire_dtype",
    "base_version",
    "tensor_count",
    "total_bytes",
    "ordered_name_shape_hash",
)


def _whole(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ManifestError(f"needs an integer of at least 0, got {value!r}")
    return value


def _check(manifest: FullWeightManifest, table: _Table) -> None:
    """Every rule a manifest must keep, whoever made it, beyond those of its table."""
    if _whole(manifest.version) < 1:
        raise ManifestError("version must be at least 1: 0 is what an engine starts with")
    if manifest.base_version is not None:
        _whole(manifest.base_version)
    if manifest.mode not in get_args(SyncMode):
        raise ManifestError(f"mode must be one of {get_args(SyncMode)}, got {manifest.mode!r}")
    if manifest.wire_dtype not in ITEM_BYTES:
        raise ManifestError(f"wire dtype must be one of {get_args(WireDtype)}, got {manifest.wire_dtype!r}")
    if strange := {t.dtype for t in table.tensors} - {manifest.wire_dtype}:
        raise ManifestError(
            f"tensors in {sorted(strange)} under wire dtype {manifest.wire_dtype}: a sync has one dtype"
        )
    stated = (manifest.tensor_count, manifest.total_bytes, manifest.ordered_name_shape_hash)
    actual = (len(table.tensors), table.total_bytes, table.hash)
    if stated != actual:
        raise ManifestError(f"count, bytes and hash are stated as {stated} and are {actual}: some were lost")
    if manifest.fingerprints is not None and len(manifest.fingerprints) != len(table.tensors):
        raise ManifestError(f"{len(manifest.fingerprints)} fingerprints for {len(table.tensors)} tensors")


def _checked_bytes(tensors: Sequence[TensorEntry]) -> int:
    """Bytes of all tensors, each of which must have a name of its own, a wire dtype and a shape that can be sent."""
    if not tensors:
        raise ManifestError("no tensor to send")
    names = [t.name for t in tensors]
    if len(set(names)) != len(names):
        twice = [name for name, count in Counter(names).items() if count > 1]
        raise ManifestError(f"names given more than once: {', '.join(twice)}")
    if strange := {t.dtype for t in tensors} - set(ITEM_BYTES):
        raise ManifestError(f"wire dtype must be one of {get_args(WireDtype)}, got {sorted(strange)}")
    if empty := [t.name for t in tensors if any(n < 1 for n in t.shape)]:
        raise ManifestError(f"dimensions must be at least 1: {', '.join(empty)}")
    sizes = [t.nbytes for t in tensors]
    if long := [t.name for t, nbytes in zip(tensors, sizes, strict=True) if nbytes > 4 * MAX_WORDS]:
        raise ManifestError(f"tensors above 16 GiB, which have no fingerprint: {', '.join(long)}")
    return sum(sizes)
