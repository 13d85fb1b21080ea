"""Locate an event in the user's code: the innermost frame outside torch, Apex, Python and ampcompare."""

from __future__ import annotations

import functools
import os
import re
import sys
from dataclasses import dataclass
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any

from ampcompare.base.python_folders import INSTALLED_PACKAGES, STANDARD_LIBRARY

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
BACKPORTS = ("typing_extensions.py",)  # of Python; torch's deprecated classes are called through it
LIGHTNING = ("lightning.pytorch.", "pytorch_lightning.")  # how names of its modules begin
CALL_SITE_DEPTH = 3
FRAME = re.compile(r'^ *File "([^"\n]+)", line (\d+), in ', re.MULTILINE)


@dataclass(frozen=True)
class Location:
    """A line, from 1, of a file as the interpreter knows it."""

    file: str
    line: int
    # the user's own line that led there, where `file` belongs to an installed package
    caller: Location | None = None

    def __str__(self) -> str:
        text = f"{_shortened_path(self.file)}:{self.line}"
        return text if self.caller is None else f"{text} (from {self.caller})"


def _shortened_path(file: str) -> str:
    for root in (*INSTALLED_PACKAGES, os.getcwd() + os.sep):
        if file.startswith(root):
            return file[len(root) :]
    return file


@functools.cache
def _owner_kind_of_file(file: str) -> str:
    """Return "inner" for torch, Apex, Python and this package, "installed" for other packages, else "user"."""
    inner = tuple(
        module.__path__[0] + os.sep
        for name in ("torch", "apex")
        if (module := sys.modules.get(name)) is not None and getattr(module, "__path__", None)
    )
    if file.startswith((PACKAGE, *inner, "<frozen ")) or os.path.basename(file) in BACKPORTS:
        return "inner"
    if file.startswith(INSTALLED_PACKAGES):
        return "installed"
    return "inner" if file.startswith(STANDARD_LIBRARY) else "user"


def is_users_or_installed_file(file: str) -> bool:
    """Return whether a file belongs neither to torch, Apex or Python nor to ampcompare."""
    return _owner_kind_of_file(file) != "inner"


def is_installed_file(file: str) -> bool:
    """Return whether a file belongs to a package that is neither torch, Apex nor ampcompare."""
    return _owner_kind_of_file(file) == "installed"


def codes_and_lines_of_user_frames(frame: FrameType | None = None) -> list[tuple[CodeType, int]]:
    """Return code and line of the frames that are not "inner", innermost first, from the caller's or `frame` on."""
    frame = frame or sys._getframe(1)
    frames = []
    while frame is not None:
        if is_users_or_installed_file(frame.f_code.co_filename):
            frames.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return frames


def find_code_of_callable(value: Any) -> CodeType | None:
    """Return the code of a function, a method, of a `partial` or of an object that is called; None without."""
    value = getattr(value, "func", value)
    if not callable(value) or isinstance(value, type):
        return None
    function = getattr(value, "__func__", value)
    function = function if hasattr(function, "__code__") else type(value).__call__
    return getattr(function, "__code__", None)


def call_site_key() -> tuple[int, ...]:
    """Return what identifies this call in this process: code and instruction of the user's three innermost frames.

    Returns:
        For each frame, the innermost first, the `id` of its code and the offset of its instruction; empty if no frame
        is of the user.
    """
    frame: FrameType | None = sys._getframe(1)
    site: list[int] = []
    while frame is not None and len(site) < 2 * CALL_SITE_DEPTH:
        if is_users_or_installed_file(frame.f_code.co_filename):
            site += (id(frame.f_code), frame.f_lasti)  # a code's hash is that of all its instructions
        frame = frame.f_back
    return tuple(site)


def user_location(frame: FrameType | None = None) -> Location:
    """Return the line of the innermost frame that is not "inner"; of ampcompare's caller if there is none.

    Args:
        frame: at which the search begins; None for the frame that calls this.
    """
    frames = [(code.co_filename, line) for code, line in codes_and_lines_of_user_frames(frame)]
    if not frames:
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        return Location("?", 0) if frame is None else Location(frame.f_code.co_filename, frame.f_lineno)
    file, line = frames[0]
    if _owner_kind_of_file(file) == "user":
        return Location(file, line)
    caller = next((Location(*entry) for entry in frames if _owner_kind_of_file(entry[0]) == "user"), None)
    return Location(file, line, caller)


def message_with_script_line(problem: str) -> str:
    """Return a message that begins with the line of the script that is running."""
    frames = [Location(code.co_filename, line) for code, line in codes_and_lines_of_user_frames()]
    # Decorators of installed packages stand between the script and torch.
    own = [place for place in frames if "-packages" not in place.file]
    return f"{next(iter([*own, *frames]), 'the script')}: {problem}"


def location_of_error(error: BaseException) -> Location | None:
    """Return the user's innermost own line in the traceback of an error; of an installed package if it has none.

    None if it has no line of either. Where the message has the traceback of another process in it, that is the one.
    """
    frames = [(file, int(line)) for file, line in FRAME.findall(str(error))]
    frames = frames or [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    for kind in ("user", "installed"):
        for file, line in reversed(frames):
            if _owner_kind_of_file(file) == kind and not file.startswith("<"):
                return Location(file, line)
    return None


def is_called_by_lightning() -> bool:
    """Return whether a trainer of Lightning has called what runs, whose blocks of autocast and scaler are its own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(LIGHTNING):
            return True
        frame = frame.f_back
    return False
