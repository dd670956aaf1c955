"""Whether a dotted path names something that can be called, without importing it: preflight loads no torch."""

import ast
import importlib.util
from pathlib import Path


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
        return f"Module {module} has no {name}."
    return None


def _top_level_names(tree: ast.Module) -> tuple[set[str], bool]:
    """Names that a module binds, and whether it also makes names on demand (PEP 562)."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names, "__getattr__" in names
