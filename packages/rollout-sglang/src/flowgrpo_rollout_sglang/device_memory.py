"""What an out-of-memory error of torch says: how much was asked for and how much was free. No torch here.

Used by the in-process engine and by the actor, each of which adds the phase and what to lower.
"""

import re

UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
GIB = 1 << 30


def asked_and_free(message: str) -> tuple[int | None, int | None]:
    """Bytes that an allocation asked for and that the card had free, from torch's own words; None where unsaid.

    torch raises `OutOfMemoryError` with a text alone: "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of
    139.80 GiB of which 1.12 GiB is free. ..."
    """
    return _bytes(r"Tried to allocate ([\d.]+) (\w+)", message), _bytes(r"of which ([\d.]+) (\w+) is free", message)


def shortage(asked: int | None, free: int | None) -> str:
    """The two numbers in words."""
    return f"{_gib(asked)} asked for, {_gib(free)} free on the card"


def _bytes(pattern: str, message: str) -> int | None:
    found = re.search(pattern, message)
    if found is None or found[2] not in UNITS:
        return None
    return int(float(found[1]) * UNITS[found[2]])


def _gib(count: int | None) -> str:
    return "an unknown amount" if count is None else f"{count / GIB:.2f} GiB"
