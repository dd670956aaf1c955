"""What the weight sync sends: the wire names and shapes, and the tensors in that order, gathered block by block.

full:    every parameter of the transformer.
adapter: the LoRA tensors alone.
merge:   every parameter of the transformer, W + (lora_alpha / lora_rank) B A folded in float32.

Each tensor has the dtype in which the policy computes (or float32 where it was folded); the wire casts it.
All functions are collective, and every rank gets every tensor.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from flowgrpo_rollout_sglang.wire.manifest import strip_transport_wrappers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from flowgrpo_fsdp_actor.adapters.base import GenerativeModelAdapter
from flowgrpo_fsdp_actor.config import ActorConfig
from flowgrpo_fsdp_actor.lora import ADAPTER, is_lora


class Publisher:
    """The published form of one policy."""

    def __init__(self, config: ActorConfig, adapter: GenerativeModelAdapter, policy: nn.Module):
        self._config = config
        self._adapter = adapter
        self._policy = policy
        self._scaling = config.lora_alpha / config.lora_rank if config.is_lora else 0.0

    def entries(self) -> list[tuple[str, tuple[int, ...]]]:
        """(wire name, shape) of each tensor, in the order of `tensors`. Moves nothing."""
        return [
            (self._wire_name(name), tuple(p.shape))
            for name, p in self._policy.named_parameters()
            if self._is_sent(name)
        ]

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(wire name, whole tensor), each valid as long as it is held: the sender packs whole buckets at once."""
        if self._config.lora_adapter_mode:
            named = [(n, p) for n, p in self._policy.named_parameters() if self._is_sent(n)]
            whole = gather_together([parameter for _, parameter in named])
            yield from zip((self._wire_name(name) for name, _ in named), whole, strict=True)
            return
        for owner, parameters in self._units():
            with _gathered(owner):
                for name, _ in parameters:
                    # A unit's gathered storage goes with its reshard, and a bucket may span units: hand out copies.
                    yield self._wire_name(name), self._whole(name).clone() if owner is not None else self._whole(name)

    def _units(self) -> list[tuple[FSDPModule | None, list[tuple[str, nn.Parameter]]]]:
        """The parameters to send, in order, by the FSDP unit that gathers them."""
        owner_of: dict[str, FSDPModule] = {}
        for prefix, module in self._policy.named_modules():
            if isinstance(module, FSDPModule):  # children come after their parents and overwrite them
                owner_of |= {f"{prefix}.{n}" if prefix else n: module for n, _ in module.named_parameters()}
        units: list[tuple[FSDPModule | None, list[tuple[str, nn.Parameter]]]] = []
        for name, parameter in self._policy.named_parameters():
            if self._is_sent(name):
                owner = owner_of.get(name)
                if not units or units[-1][0] is not owner:
                    units.append((owner, []))
                units[-1][1].append((name, parameter))
        return units

    def _whole(self, name: str) -> Tensor:
        """The parameter `name` of a gathered unit, with its adapter folded in where it has one."""
        module, _, leaf = name.rpartition(".")
        weight = _full(getattr(self._policy.get_submodule(module), leaf))
        if not (self._config.is_lora and leaf == "weight" and module.endswith(".base_layer")):
            return weight
        layer = self._policy.get_submodule(module.removesuffix(".base_layer"))
        a, b = (_full(matrix[ADAPTER].weight).float() for matrix in (layer.lora_A, layer.lora_B))
        return torch.addmm(weight.float(), b, a, alpha=self._scaling)

    def _is_sent(self, name: str) -> bool:
        """Adapter mode sends the adapters and nothing else, the other modes everything else (W4)."""
        return is_lora(name) == self._config.lora_adapter_mode

    def _wire_name(self, name: str) -> str:
        return self._adapter.weight_name_map(strip_transport_wrappers(name))


def gather_together(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The whole of each parameter, all of them in one all-gather: the many small tensors of an adapter."""
    sharded = [p for p in parameters if isinstance(p, DTensor)]
    if not sharded or sharded[0].device_mesh.size() == 1:
        return [_full(p) for p in parameters]
    world = sharded[0].device_mesh.size()
    rows = [-(-p.shape[0] // world) for p in sharded]  # FSDP's shard of dimension 0; the last ones may hold fewer
    padded = [p.to_local().new_zeros((r, *p.shape[1:])) for p, r in zip(sharded, rows, strict=True)]
    for into, p in zip(padded, sharded, strict=True):
        into[: p.to_local().shape[0]] = p.to_local()
    mine = torch.cat([p.flatten() for p in padded])
    everyone = mine.new_empty(world * mine.numel())
    dist.all_gather_into_tensor(everyone, mine, group=sharded[0].device_mesh.get_group())
    parts = everyone.view(world, -1).split([p.numel() for p in padded], dim=1)
    return [
        part.reshape(world * r, *p.shape[1:])[: p.shape[0]] for part, p, r in zip(parts, sharded, rows, strict=True)
    ]


@contextmanager
def _gathered(unit: FSDPModule | None) -> Iterator[None]:
    """One all-gather for all the parameters of an FSDP unit, freed on leaving."""
    if unit is None:
        yield
        return
    unit.unshard()
    try:
        yield
    finally:
        unit.reshard()


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
