"""The report of a run: one HTML file that needs nothing else (`write_report`), and its curves (`curves_svg`)."""

from typing import Any

_HOMES = {"write_report": "page", "curves_svg": "curves", "Series": "curves"}

__all__ = ["Series", "curves_svg", "write_report"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
