"""Files that are either whole or absent: temporary name, fsync, atomic rename."""

import os
from collections.abc import Callable
from pathlib import Path


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a hidden file of this process beside `path`, then makes it `path` in one step.

    A process killed at any moment leaves the old file or the new one, never a half of either; a leftover
    `.<name>.<pid>.tmp` is never read. OSError (full disk, read-only folder) passes through with the path in it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a write on a full disk does not say where
        raise
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Makes a rename or a new file in `folder` itself durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
