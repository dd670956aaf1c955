"""The weight-sync wire: one verified transaction from a trainer's rank to an engine on the same host.

    begin(manifest) -> buckets -> verify -> commit(version)

Read in this order: `manifest` (what is sent), `layout` (where it lies in the buckets), `fingerprint` (how it is
checked), `link` (how two processes share buckets), `sender`, `receiver`, `lora` (merge mode).
"""

from importlib import import_module

_HOME = {
    "Channel": "link",
    "FullWeightManifest": "manifest",
    "ManifestError": "manifest",
    "Shard": "shards",
    "SyncReport": "report",
    "TensorEntry": "manifest",
    "VerifyReport": "report",
    "WeightReceiver": "receiver",
    "WeightReceiverClient": "sender",
    "WeightSender": "sender",
    "WeightSyncError": "errors",
    "even_shard": "shards",
    "lora_merged": "lora",
    "sharded": "shards",
    "sharded_shapes": "shards",
    "strip_transport_wrappers": "manifest",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
