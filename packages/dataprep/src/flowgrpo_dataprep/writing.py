"""Files appear whole or not at all: temporary file, fsync, rename."""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from flowgrpo_dataprep.errors import InputError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that gets its name only when the block ends without an error."""
    with written_together([path]) as (file,):
        yield file


@contextmanager
def written_together(paths: Sequence[Path]) -> Iterator[list[IO[bytes]]]:
    """Binary files that get their names only when the block has ended without an error and all are on the disk.

    A full disk is met while every file of before still has its name: a train file never goes with another run's
    evaluation file. Raises InputError for a path that is no regular file, and for two of one file; OSError.
    """
    targets = [_target(path) for path in paths]
    if len(set(targets)) < len(targets):
        raise InputError(str(paths[0].parent), 0, "two of the output files are links to one", "remove the links")
    temporaries = [target.with_name(f".{target.name}.tmp") for target in targets]
    try:
        with ExitStack() as stack:
            files = []
            for temporary in temporaries:
                temporary.parent.mkdir(parents=True, exist_ok=True)
                stack.callback(temporary.unlink, missing_ok=True)
                files.append(stack.enter_context(open(temporary, "wb", buffering=1 << 20)))
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
            for temporary, target in zip(temporaries, targets, strict=True):
                os.replace(temporary, target)
    except OSError as error:
        if error.filename is None and error.errno in _FULL:  # a write does not say where
            error.filename = str(targets[0].parent)
        raise


def _target(path: Path) -> Path:
    """Where a link points to, so that the rename replaces the file and not the link."""
    if path.exists() and not path.is_file():
        raise InputError(str(path), 0, "is there and is no regular file", "name a file, new or to be replaced")
    return Path(os.path.realpath(path))
