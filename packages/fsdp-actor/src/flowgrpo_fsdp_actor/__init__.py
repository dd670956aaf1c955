"""The FSDP2 actor of FlowGRPO: model adapters, LoRA, replay, clipped updates, checkpoints.

Importing this package imports no torch: settings (`config`) are read by preflight. Read in this order:
`config`, `plan`, `replay`, `update`, `actor`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowgrpo_fsdp_actor.actor import FsdpActor as FsdpActor
    from flowgrpo_fsdp_actor.actor import UpdateReport as UpdateReport
    from flowgrpo_fsdp_actor.adapters import load_adapter as load_adapter
    from flowgrpo_fsdp_actor.config import ActorConfig as ActorConfig
    from flowgrpo_fsdp_actor.distributed import init_process_group as init_process_group

_HOME = {
    "ActorConfig": "config",
    "FsdpActor": "actor",
    "UpdateReport": "actor",
    "init_process_group": "distributed",
    "load_adapter": "adapters",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(name)
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
