"""Input checks shared by the formulas: one clear error each, naming the value, the rule and the remedy."""

import torch
from torch import Tensor


def require_floating(**tensors: Tensor) -> None:
    """Raises TypeError for the first of `tensors` that is no floating-point tensor."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if not tensor.dtype.is_floating_point:
            raise TypeError(f"{name} has dtype {tensor.dtype}; it must be floating point: convert it with .float()")


def require_same_shape_and_device(**tensors: Tensor) -> None:
    """Raises ValueError unless all `tensors` have the first one's shape and lie on its device."""
    (first_name, first), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != first.shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} and {first_name} {list(first.shape)}; they must be equal"
            )
        if tensor.device != first.device:
            raise ValueError(
                f"{name} is on {tensor.device} and {first_name} on {first.device}; move them to one device"
            )


def require_finite(name: str, tensor: Tensor, check: bool | None, remedy: str) -> None:
    """Raises ValueError, with the first bad index, if `tensor` holds NaN or infinity.

    `check` None looks at CPU tensors only: on a GPU the look would wait for all queued work. True always
    looks, False never. Under `torch.compile` nothing is checked.
    """
    if check is None:
        check = tensor.device.type == "cpu"
    if not check or torch.compiler.is_compiling():
        return
    bad = ~torch.isfinite(tensor.detach())
    if bool(bad.any()):
        index = bad.nonzero()[0].tolist()
        raise ValueError(f"{name}{index} is {tensor.detach()[tuple(index)].item()}; {remedy}")
