"""Another way to run SGLang's Qwen-Image transformer, to be timed beside the one that the server uses."""

from collections.abc import Iterator
from contextlib import contextmanager

from flowgrpo_rollout_sglang.server.fused import ATTENTION, GELU
from torch import nn


@contextmanager
def sglangs_own(transformer: nn.Module) -> Iterator[None]:
    """Within it, attention and the MLP's GELU are SGLang's own, without what the server puts in their place."""
    changed = [m for m in transformer.modules() if type(m).__name__ in (ATTENTION, GELU) and "forward" in vars(m)]
    replaced = {module: vars(module).pop("forward") for module in changed}
    try:
        yield
    finally:
        for module, forward in replaced.items():
            module.forward = forward
