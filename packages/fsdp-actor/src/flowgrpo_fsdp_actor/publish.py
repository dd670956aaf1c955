"""What the weight sync sends: the wire names and shapes, and the tensors in that order, gathered as they are taken.

full:    every parameter of the transformer.
adapter: the LoRA tensors alone.
merge:   every parameter of the transformer, W + (lora_alpha / lora_rank) B A folded in float32.

Tensors travel between ranks in the dtype in which the policy computes; the wire casts what it gets (the masters of a
lone rank, the float32 of a fold). Every rank gets every tensor, for the engine of its own card.
"""

from collections.abc import Iterator
from itertools import islice

import torch
from flowgrpo_rollout_sglang.wire.manifest import strip_transport_wrappers
from torch import Tensor, nn

from flowgrpo_fsdp_actor.adapters.base import GenerativeModelAdapter
from flowgrpo_fsdp_actor.config import ActorConfig
from flowgrpo_fsdp_actor.gather import whole_tensors
from flowgrpo_fsdp_actor.lora import ADAPTER, is_lora
from flowgrpo_fsdp_actor.sharding import DTYPES, reshard


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
        """(wire name, whole tensor), each valid as long as it is held. Collective: to be taken to the end."""
        reshard(self._policy)  # so that named_parameters gives the shards
        compute = DTYPES[self._config.fsdp_param_dtype]
        sent = [(name, [p, *self._fold_of(name)]) for name, p in self._policy.named_parameters() if self._is_sent(name)]
        parts = [part for _, of_one in sent for part in of_one]
        whole = whole_tensors(parts, device=self._config.device, dtype=compute)
        for name, of_one in sent:
            weight, *fold = islice(whole, len(of_one))
            if fold:
                a, b = (factor.to(compute).float() for factor in fold)
                weight = torch.addmm(weight.float(), b, a, alpha=self._scaling)
            yield self._wire_name(name), weight

    def _fold_of(self, name: str) -> list[nn.Parameter]:
        """A and B of the adapter around a base weight that is sent merged; none elsewhere."""
        module, _, leaf = name.rpartition(".")
        if not (self._config.is_lora and leaf == "weight" and module.endswith(".base_layer")):
            return []
        layer = self._policy.get_submodule(module.removesuffix(".base_layer"))
        return [factor[ADAPTER].weight for factor in (layer.lora_A, layer.lora_B)]

    def _is_sent(self, name: str) -> bool:
        """Adapter mode sends the adapters and nothing else, the other modes everything else (W4)."""
        return is_lora(name) == self._config.lora_adapter_mode

    def _wire_name(self, name: str) -> str:
        return self._adapter.weight_name_map(strip_transport_wrappers(name))
