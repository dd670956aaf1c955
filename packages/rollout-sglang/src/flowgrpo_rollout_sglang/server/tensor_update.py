"""Rules for SGLang's own `/update_weights_from_tensor`: everything is settled before a byte is written.

The patch calls `refusal` inside SGLang's updater. Our engine does not use that route (it sends a transaction, with
a version and fingerprints); the rules stand there because stock code would skip unknown names with a success.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn


def refusal(
    updater: Any, modules: list[tuple[str, nn.Module]], payloads: Mapping[str, Any], load_format: str | None
) -> str | None:
    """Why the update must not be made, or None. `updater` is SGLang's WeightsUpdater."""
    server = getattr(updater.pipeline, "flowgrpo", None)
    if server is not None and (reason := server.unversioned_update_refusal()):
        return reason
    for module_name, module in modules:
        payload = payloads[module_name]
        try:
            named = [(name, tuple(t.shape)) for name, t in updater._materialize_weights_iter(payload, load_format)]
        except Exception as error:  # SGLang's own parser: whatever it says, nothing was written
            return f"payload for {module_name} cannot be read: {type(error).__name__}: {error}"
        if reason := _wrong(module_name, module, named):
            return reason
    if server is not None:
        server.note_unversioned_update()
    return None


def _wrong(module_name: str, module: nn.Module, named: list[tuple[str, tuple[int, ...]]]) -> str | None:
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    if unknown := [name for name, _ in named if name not in shapes]:
        return f"unknown names for {module_name}: {', '.join(unknown)}; nothing was written"
    if twice := [name for name, count in Counter(name for name, _ in named).items() if count > 1]:
        return f"names given more than once for {module_name}: {', '.join(twice)}; nothing was written"
    if wrong := [f"{n} is {list(s)}, needs {list(shapes[n])}" for n, s in named if s != shapes[n]]:
        return f"wrong shapes for {module_name}: {'; '.join(wrong)}; nothing was written"
    return None
