"""The pluggable parts of a run, found by dotted path (E8). Their signatures are checked before the run starts."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any


class HookError(ValueError):
    """A dotted path cannot be used; says which flag, which path and why."""

    def __init__(self, flag: str, path: str, why: str):
        super().__init__(flag, path, why)  # pickle, and so Ray, rebuilds from these
        self.flag, self.path, self.why = flag, path, why

    def __str__(self) -> str:
        return f"{self.flag} {self.path}: {self.why}"


def load_hook(flag: str, path: str, *call: Any, **keywords: Any) -> Callable[..., Any]:
    """The callable at `path`, once it is certain that it can be called as `f(*call, **keywords)`.

    Only the count of `call` and the names of `keywords` matter. Raises HookError.
    """
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, ValueError, AttributeError) as error:
        raise HookError(flag, path, f"cannot be imported: {error}") from error
    if not callable(found):
        raise HookError(flag, path, f"is a {type(found).__name__}, which cannot be called")
    try:
        inspect.signature(found).bind(*call, **keywords)
    except TypeError as error:
        shape = ", ".join(["..."] * len(call) + [f"{key}=..." for key in keywords])
        raise HookError(flag, path, f"cannot be called as {name}({shape}): {error}") from None
    except ValueError:
        pass  # a builtin without a signature: its first call decides
    return found
