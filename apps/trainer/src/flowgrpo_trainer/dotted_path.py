"""Whether a dotted path names something that can be called, without importing it: preflight loads no torch."""

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

LITERALS = (ast.Constant, ast.Dict, ast.List, ast.Set, ast.JoinedStr)
"""What cannot be called."""


def dotted_path_problem(path: str) -> str | None:
    """Why `path` names nothing callable, or None. Reads the module's source; imports only its parents."""
    module, _, name = path.rpartition(".")
    if not module:
        return "It is no dotted path."
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        return f"Module {module} cannot be found: {error}."
    if spec is None:
        return f"There is no module {module}."
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None  # a compiled module: its real import at start decides
    try:
        tree = ast.parse(Path(spec.origin).read_text())
    except (OSError, SyntaxError) as error:
        return f"Module {module} cannot be read: {error}."
    names, lazy = _top_level_names(tree)
    if name not in names and not lazy:
        return f"Module {module} has nothing to call with the name {name}."
    return None


def _top_level_names(tree: ast.Module) -> tuple[set[str], bool]:
    """Names that a module binds, and whether it also makes names on demand (PEP 562)."""
    names: set[str] = set()
    for node in _statements(tree.body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif not isinstance(getattr(node, "value", None), LITERALS):
            stored = (part for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store))
            names |= {part.id for part in stored}
    return names, "__getattr__" in names


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Those that run when the module is imported: not the insides of functions and classes."""
    for node in body:
        if isinstance(node, ast.If | ast.Try | ast.With):
            handlers = [handler.body for handler in getattr(node, "handlers", [])]
            parts = [node.body, getattr(node, "orelse", []), getattr(node, "finalbody", []), *handlers]
            yield from _statements(chain.from_iterable(parts))
        else:
            yield node
