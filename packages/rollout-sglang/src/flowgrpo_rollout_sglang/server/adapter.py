"""LoRA beside SGLang's linear layers, never merged into them: what the actor replays is base plus adapter as well.

A merge in bf16 would round most of a small adapter away. The layer keeps its class, its weight and its name; a
forward hook adds `scaling * B(A(x))` to its output, in the order and the dtype in which PEFT does it.

Where devices divide a layer, they divide its adapter alike: B where the layer's outputs are divided, A where its
inputs are, and then the r products of A are summed over the devices, as the layer's own are.

Shapes: r rank, I and O a layer's input and output width.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from flowgrpo_rollout_sglang.server.ranks import split_dim

CHILD = "flowgrpo_lora"
_A, _B = ".lora_A.weight", ".lora_B.weight"


class LoraDelta(nn.Module):
    """x -> scaling * B(A(x)). B starts at zero: until weights come, the policy is the base."""

    def __init__(self, layer: nn.Module, rank: int, alpha: float):
        super().__init__()
        out_features, in_features = layer.weight.shape
        options = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        self.scaling = alpha / rank
        self.A = nn.Parameter(torch.zeros(rank, in_features, **options), requires_grad=False)
        self.B = nn.Parameter(torch.zeros(out_features, rank, **options), requires_grad=False)
        self._sum = layer.tp_group.all_reduce if split_dim(layer) == 1 else None
        self._join = layer.tp_group.all_gather if split_dim(layer) == 0 and layer.gather_output else None

    def forward(self, x: Tensor) -> Tensor:
        low = linear(x.to(self.A.dtype), self.A)
        if self._sum is not None:
            low = self._sum(low)
        delta = linear(low, self.B) * self.scaling
        return delta if self._join is None else self._join(delta, dim=-1)


class Adapter:
    """The LoRA layers of one transformer.

    Args:
        target_modules: module-name suffixes, matched at a dot, as in PEFT.

    Raises:
        ValueError: rank or alpha outside their domain, or a suffix that no linear layer has.
    """

    def __init__(self, transformer: nn.Module, rank: int, alpha: float, target_modules: Sequence[str]):
        if rank < 1 or not alpha > 0:
            raise ValueError(f"LoRA rank {rank} and alpha {alpha}: both must be above 0")
        self.rank, self.alpha, self.target_modules = rank, alpha, tuple(target_modules)
        self._transformer = transformer
        layers = {name: m for name, m in transformer.named_modules() if _is_linear(m)}
        unused = [t for t in target_modules if not any(_matches(name, t) for name in layers)]
        if unused or not target_modules:
            raise ValueError(f"LoRA target modules {unused or list(target_modules)} name no linear layer of this model")
        self._layers = {n: m for n, m in layers.items() if any(_matches(n, t) for t in target_modules)}
        self._hooks = []
        for layer in self._layers.values():
            layer.add_module(CHILD, LoraDelta(layer, rank, alpha))
            self._hooks.append(layer.register_forward_hook(_add_delta))

    def targets(self) -> dict[str, Tensor]:
        """Wire name to the parameter that takes it."""
        found: dict[str, Tensor] = {}
        for name, layer in self._layers.items():
            delta = layer.get_submodule(CHILD)
            found[name + _A], found[name + _B] = delta.A, delta.B
        return found

    def split_dims(self) -> dict[str, int]:
        """As `ranks.split_dims`, of the adapter's tensors."""
        factor = {0: _B, 1: _A}
        dims = {name: split_dim(layer) for name, layer in self._layers.items()}
        return {name + factor[dim]: dim for name, dim in dims.items() if dim is not None}

    def remove(self) -> None:
        """The model as it was before."""
        for hook in self._hooks:
            hook.remove()
        for layer in self._layers.values():
            delattr(layer, CHILD)


def modules_and_rank(shapes: Mapping[str, Sequence[int]]) -> tuple[tuple[str, ...], int]:
    """Which layers a set of wire tensors adapts, and the rank. Raises ValueError if they are no complete adapter."""
    pairs: dict[str, set[str]] = {}
    ranks = set()
    for name, shape in shapes.items():
        suffix = next((s for s in (_A, _B) if name.endswith(s)), None)
        if suffix is None or len(shape) != 2:
            raise ValueError(f"{name} of shape {list(shape)} is no LoRA tensor: expected MODULE{_A} or MODULE{_B}")
        pairs.setdefault(name.removesuffix(suffix), set()).add(suffix)
        ranks.add(shape[0] if suffix == _A else shape[1])
    if half := [module for module, found in pairs.items() if len(found) != 2]:
        raise ValueError(f"only one half of the LoRA pair was sent for {', '.join(half)}")
    if len(ranks) != 1:
        raise ValueError(f"LoRA tensors of several ranks, {sorted(ranks)}; one adapter has one rank")
    return tuple(pairs), ranks.pop()


def base_parameters(transformer: nn.Module) -> dict[str, Tensor]:
    """Wire name to parameter of the base, without an adapter's tensors."""
    return {n: p for n, p in transformer.named_parameters() if f".{CHILD}." not in n}


def _add_delta(layer: nn.Module, arguments: tuple[Tensor, ...], output: Tensor | tuple) -> Tensor | tuple:
    delta = layer.get_submodule(CHILD)(arguments[0])
    if isinstance(output, tuple):  # SGLang's linear layers return (output, bias that the caller adds)
        return (output[0] + delta.to(output[0].dtype), *output[1:])
    return output + delta.to(output.dtype)


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)
