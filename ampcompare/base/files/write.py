"""Write files in one move, so that a reader or a crash never meets half of one."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from ampcompare.base.errors import EnvironmentUnfit
from ampcompare.base.secrets.masking import mask_secrets


def write_file(
    path: Path,
    write: Callable[[IO[bytes]], Any],
    *,
    verify: Callable[[Path], None] | None = None,
    unfinished: str | None = None,
) -> None:
    """Replace `path` by what `write` puts into a file, in one move that survives a power cut.

    The folder is created if needed. After an error `path` is as it was, and nothing else is left in its folder. A full
    disk is an `EnvironmentUnfit`, here and in the functions below.

    Args:
        write: gets the open file.
        verify: gets the path of the complete file before it takes its name; what it raises is raised here.
        unfinished: stem of the temporary file's name, if programs that watch the folder must not see that of `path`.
    """
    # Not from `tempfile`, whose files only their owner may read. The process number tells whose leftover it is.
    temporary = path.with_name(f".{unfinished or path.name}.{os.getpid()}.tmp")
    with _convert_write_errors(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            if verify is not None:
                verify(temporary)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
    _sync_folder(path.parent)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file in one move, so that a reader finds the old content or the new one.

    Args:
        path: of the file; folders above it are made.
        content: text, which is written in UTF-8 and without the secrets that are known, or bytes, written as they are.

    Raises:
        EnvironmentUnfit: the file cannot be written, or the disk is full.
    """
    data = mask_secrets(content).encode("utf-8") if isinstance(content, str) else content
    write_file(path, lambda file: file.write(data))


def append_line(path: Path, line: str) -> None:
    """Write a line behind what a file holds; it is on the disk when this returns.

    Args:
        path: of the file, which is made if there is none.
        line: without its end; it is written in UTF-8 and without the secrets that are known.

    Raises:
        EnvironmentUnfit: the file cannot be written.
    """
    with _convert_write_errors(f"cannot write {path}"), path.open("ab") as file:
        file.write(f"{mask_secrets(line)}\n".encode())
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(path.parent)


def flush_to_disk(path: Path) -> None:
    """Make a file that something else has written, and its name, survive a power cut."""
    with _convert_write_errors(f"cannot put {path} on the disk"), path.open("rb") as file:
        os.fsync(file.fileno())
    _sync_folder(path.parent)


@contextlib.contextmanager
def _convert_write_errors(failure: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentUnfit(
            f"{failure}: {error.strerror or error}; free some space or choose another folder"
        ) from error


def _sync_folder(folder: Path) -> None:
    """Put the new name on the disk; some file systems cannot, and do not need it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
