"""The weight-sync wire: one verified transaction from a trainer's rank to an engine on the same host.

    begin(manifest) -> buckets -> verify -> commit(version)

Read in this order: `manifest` (what is sent), `layout` (where it lies in the buckets), `fingerprint` (how it is
checked), `link` (how two processes share buckets), `sender`, `receiver`, `lora` (merge mode).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what the names below are; at run time each comes from its module when it is asked for
    from .errors import WeightSyncError as WeightSyncError
    from .link import Channel as Channel
    from .lora import lora_merged as lora_merged
    from .manifest import FullWeightManifest as FullWeightManifest
    from .manifest import ManifestError as ManifestError
    from .manifest import TensorEntry as TensorEntry
    from .manifest import strip_transport_wrappers as strip_transport_wrappers
    from .receiver import WeightReceiver as WeightReceiver
    from .report import SyncReport as SyncReport
    from .report import VerifyReport as VerifyReport
    from .sender import WeightReceiverClient as WeightReceiverClient
    from .sender import WeightSender as WeightSender
    from .shards import Shard as Shard
    from .shards import even_shard as even_shard
    from .shards import even_shards as even_shards
    from .shards import sharded as sharded
    from .shards import sharded_shapes as sharded_shapes

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
    "even_shards": "shards",
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
