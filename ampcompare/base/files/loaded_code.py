"""The code that a run loads from the user's side: which files, with which contents, and which packages' versions.

A process that runs such code appends a line for each file to a list in the folder of its cell, at the moment when it
loads it, so that processes that it has started, forked or not, add theirs, and none is lost where one is killed. Files
of Python, of installed packages and of ampcompare do not count; for packages their versions do.

A file has a name that does not change when its project is copied elsewhere: its path below the folder of the script,
or below the entry of the search path where it was found; else it starts with `..`, or is a full path.

Python calls a hook for every audited event, such as `id(x)`, and cannot remove it. So a process has one hook for all
functions, however many come and go, whose first statement ends it at other events: 0.25 us for a call of `id`, which
takes 0.03 without; a second hook, which looked at its own state first, took 0.8 more (Python 3.11, a busy machine).
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import CodeType
from typing import Any, TypeAlias

from ampcompare.base.environment.versions import installed_version

__all__ = [
    "DIGITS",
    "LOADED",
    "CodeWatch",
    "LoadedCode",
    "Names",
    "changed_code",
    "differing",
    "digest_of",
    "end_watch",
    "on_file_events",
    "read_loaded",
    "watch_code",
]

LOADED = "loaded.jsonl"
CODE = (
    *(".py", ".pyw", ".pyc", ".pyx", ".so", ".pyd"),
    *(".c", ".cc", ".cpp", ".cxx", ".cu", ".cuh", ".h", ".hpp"),  # extensions that torch compiles at the start
)
# Settings of a script count if they lie where it does, or where it runs.
SETTINGS = (".yaml", ".yml", ".json", ".toml", ".ini", ".cfg", ".gin", ".jsonnet", ".libsonnet")
MAX_SETTINGS_BYTES = 2**20
WATCHED = (*CODE, *SETTINGS)
DIGITS = 16
WRITING = os.O_WRONLY | os.O_RDWR
MAX_UP = 2  # folders above that of the script which a copy of its project is taken to include
GENERATED = ("torchinductor_", f"{os.sep}.triton{os.sep}", "__pycache__", "torch_extensions")
PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep
PYTHON = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")}
    | {os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")}
)
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
LATE_PACKAGES = ("numpy", "torchvision")  # torch or ampcompare may have loaded them before a script does


@dataclass
class LoadedCode:
    """What a run has loaded.

    Attributes:
        files: the start of the SHA-256 of each file, by its name; several, joined by `|`, where it changed meanwhile.
        packages: versions of the installed packages that it imported, by distribution.
    """

    files: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)


def digest_of(path: str | Path) -> str | None:
    """Return the start of the SHA-256 of a file; None if it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    total = hashlib.sha256()
    try:
        while block := os.read(descriptor, 2**20):
            total.update(block)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return total.hexdigest()[:DIGITS]


class CodeWatch:
    """Notes what this process, and those that it forks, load from now on.

    Args:
        folder: of the cell, which gets the list.
        base: the folder of the script, or the one where it runs.
    """

    def __init__(self, folder: Path, base: Path) -> None:
        self._list = str(folder / LOADED)
        self._own = os.path.join(os.path.realpath(folder), "")
        self._names = Names(base)
        self._seen: set[str] = set()
        self._made: set[str] = set()
        self._busy: set[int] = set()  # threads inside of the hook: what it opens itself does not count
        self._at_start = {name.partition(".")[0] for name in list(sys.modules)} - set(LATE_PACKAGES)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note the file of code that is run or read, of settings that are read, and of scripts that are started."""
        if event == "exec":
            code = arguments[0]
            if isinstance(code, CodeType) and not code.co_filename.startswith("<"):
                self._note(code.co_filename)
        elif event == "open":
            path, mode, flags = arguments
            if not isinstance(path, str | bytes | os.PathLike):
                return
            file = os.fsdecode(path)
            if file.endswith(WATCHED):
                writes = (isinstance(flags, int) and flags & WRITING) or (
                    isinstance(mode, str) and set(mode) & set("wax+")
                )
                self._generated(file) if writes else self._note(file)
        elif event == "os.rename":
            file = os.fsdecode(arguments[1])
            if file.endswith(WATCHED):
                self._generated(file)
        elif event == "subprocess.Popen":
            words = arguments[1]
            for word in words if isinstance(words, list | tuple) else ():
                if isinstance(word, str) and word.endswith(".py"):
                    self._note(word)

    def end(self) -> None:
        """Add the modules that are loaded, some by ways that no hook sees, and the versions of packages."""
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str):
                self._note(file)
        for name, version in self._packages():
            self._add({"package": name, "version": version})

    def _note(self, file: str) -> None:
        path = os.path.abspath(file)
        thread = threading.get_ident()
        if path in self._seen or thread in self._busy or not self._counts(path):
            return
        self._seen.add(path)
        self._busy.add(thread)
        try:
            digest = digest_of(path)
            if digest is None:  # it may be made later
                self._seen.discard(path)
            else:
                self._add({"file": self._names.of(path), "sha256": digest})
        finally:
            self._busy.discard(thread)

    def _generated(self, file: str) -> None:
        """Leave out a file that the run writes itself."""
        path = os.path.abspath(file)
        thread = threading.get_ident()
        if path in self._made or thread in self._busy or not self._counts(path, exists=False):
            return
        self._made.add(path)
        self._busy.add(thread)
        try:
            self._add({"generated": self._names.of(path)})
        finally:
            self._busy.discard(thread)

    def _counts(self, path: str, *, exists: bool = True) -> bool:
        if not is_users_code(path) or path.startswith(self._own):
            return False
        here = self._names.is_below_base(path)
        if not here and path.startswith(_temporary()):
            return False
        if path.endswith(SETTINGS):
            if not here and not path.startswith(os.path.join(os.getcwd(), "")):
                return False
            try:
                return not exists or os.stat(path).st_size <= MAX_SETTINGS_BYTES
            except OSError:
                return False
        return True

    def _add(self, line: dict[str, str]) -> None:
        data = json.dumps(line).encode() + b"\n"
        try:
            descriptor = os.open(self._list, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError:  # a full disk must not end the training
            return
        try:
            os.write(descriptor, data)
        except OSError:
            pass
        finally:
            os.close(descriptor)

    def _packages(self) -> Iterable[tuple[str, str]]:
        tops: set[str] = set()
        for name, module in list(sys.modules.items()):
            top = name.partition(".")[0]
            file = getattr(module, "__file__", None)
            if top not in self._at_start and isinstance(file, str) and any(part in file for part in INSTALLED):
                tops.add(top)
        if not tops:
            return
        known = metadata.packages_distributions()
        others = _needed_anyway()
        for distribution in sorted({one for top in tops for one in known.get(top, ())}):
            if _plain(distribution) not in others and (version := installed_version(distribution)) is not None:
                yield distribution, version


def _needed_anyway() -> set[str]:
    """Return the distributions that torch and ampcompare load for themselves, by their plain names."""
    needed: set[str] = set()
    for name in ("torch", "ampcompare"):
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        always = [text for text in requirements if "extra ==" not in text]
        needed |= {_plain(found[0]) for text in always if (found := re.match(r"[\w.-]+", text))}
    return needed - set(LATE_PACKAGES)


def _plain(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def watch_code(folder: Path, base: Path) -> CodeWatch:
    """Note from now on what this process loads for a cell, and no longer for an earlier one."""
    _temporary()  # found now: a hook that looks for it would wait for the lock of the one who does
    watch = CodeWatch(folder, base)
    end_watch()
    _ends.append(on_file_events(watch.audit))
    return watch


def end_watch() -> None:
    """Note no longer what this process loads."""
    while _ends:
        _ends.pop()()


_ends: list[Callable[[], None]] = []


@functools.cache
def _temporary() -> str:
    return os.path.join(tempfile.gettempdir(), "tmp")


def is_users_code(path: str) -> bool:
    """Return whether a file is neither of Python, an installed package or ampcompare, nor compiled by torch."""
    if path.startswith((PACKAGE, *PYTHON, "/dev/", "/proc/")):
        return False
    return not any(part in path for part in (*INSTALLED, *GENERATED))


class Names:
    """Names of files, and the way back, as the search path of this process and its environment say.

    Args:
        base: the folder of the script, or the one where it runs.
    """

    def __init__(self, base: Path) -> None:
        self._base = os.path.abspath(base)
        found = [self._base]
        if "PYTHONPATH" in os.environ:
            found += os.environ["PYTHONPATH"].split(os.pathsep)
        found += sys.path
        paths = [os.path.abspath(entry or os.getcwd()) for entry in found if isinstance(entry, str)]
        self._roots = [root for root in dict.fromkeys(paths) if is_users_code(os.path.join(root, ""))]

    def is_below_base(self, path: str) -> bool:
        """Return whether a file lies in the folder of the script or below."""
        return path.startswith(os.path.join(self._base, ""))

    def of(self, path: str) -> str:
        """Return the name of a file."""
        roots = sorted((root for root in self._roots if path.startswith(os.path.join(root, ""))), key=len)
        for root in reversed(roots):
            name = os.path.relpath(path, root)
            if self.path(name) == path:
                return name.replace(os.sep, "/")
        name = os.path.relpath(path, self._base)
        is_near = name.split(os.sep).count("..") <= MAX_UP and os.path.commonpath([path, self._base]) != os.sep
        return name.replace(os.sep, "/") if is_near else path

    def path(self, name: str) -> str | None:
        """Return the file of a name, where an import would find it now; None if there is none."""
        roots = [self._base] if name.startswith("..") else self._roots
        for root in roots:
            path = os.path.normpath(os.path.join(root, name))
            if os.path.isfile(path):
                return path
        return None


def read_loaded(folder: Path) -> LoadedCode:
    """Return what the processes of a cell have listed; empty without a list."""
    found: dict[str, dict[str, None]] = {}
    loaded, generated = LoadedCode(), set()
    try:
        lines = (folder / LOADED).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return loaded
    for line in lines:
        try:
            row = json.loads(line)
            if "file" in row:
                found.setdefault(row["file"], {})[row["sha256"]] = None
            elif "generated" in row:
                generated.add(row["generated"])
            else:
                loaded.packages[row["package"]] = row["version"]
        except (ValueError, KeyError, TypeError):  # cut off
            continue
    loaded.files = {name: "|".join(found[name]) for name in sorted(found) if name not in generated}
    return loaded


def changed_code(files: Mapping[str, str], base: Path) -> dict[str, str]:
    """Return the files that are not as they were recorded, each with what happened to it: "changed" or "gone"."""
    names = Names(base)
    changed = {}
    for name, digest in files.items():
        path = names.path(name)
        if path is None:
            changed[name] = "gone"
        elif digest_of(path) != digest:
            changed[name] = "changed"
    return changed


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the files that two runs both loaded, with other contents."""
    return [name for name, digest in one.items() if other.get(name, digest) != digest]


Listener: TypeAlias = Callable[[str, tuple[Any, ...]], None]

EVENTS = frozenset({"exec", "open", "os.rename", "subprocess.Popen"})
_listeners: tuple[Listener, ...] = ()
_is_installed = False


def on_file_events(listener: Listener) -> Callable[[], None]:
    """Call `listener(event, arguments)` at each event of `EVENTS` from now on; return a function that ends this.

    It runs inside of what it listens to, in any thread, so it may neither take a lock nor raise.
    """
    global _is_installed, _listeners
    _listeners = (*_listeners, listener)
    if not _is_installed:
        _is_installed = True
        sys.addaudithook(_hook)

    def end() -> None:
        global _listeners
        _listeners = tuple(one for one in _listeners if one is not listener)

    return end


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event in EVENTS:
        for listener in _listeners:
            listener(event, arguments)
