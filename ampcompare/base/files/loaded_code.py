"""What a run loads from the user's side: files of code and data with their contents, variables, packages' versions.

A process that runs such code appends a line for each file to a list in the folder of its cell, at the moment when it
opens it, so that processes that it has started, forked or not, add theirs, and none is lost where one is killed. At its
end it adds the modules that it has. Files of Python, of installed packages, of the system, of caches and of ampcompare
do not count; for packages their versions do. So do variables of the environment that a file of the user names where it
asks for them, as `$NAME`, without their values.

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
import stat
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from ampcompare.base.environment.packages import installed_version
from ampcompare.base.files.run_files import CellFile, RunFile
from ampcompare.base.secrets import is_secret_name, mask

__all__ = [
    "DIGITS",
    "CodeWatch",
    "LoadedCode",
    "Names",
    "changed_code",
    "differing_files",
    "digest_of",
    "distributions_of",
    "end_watch",
    "read_loaded",
    "watch_code",
]

CODE = (
    *(".py", ".pyw", ".pyc", ".pyx", ".so", ".pyd"),
    *(".c", ".cc", ".cpp", ".cxx", ".cu", ".cuh", ".h", ".hpp"),  # extensions that torch compiles at the start
)
SETTINGS = (".yaml", ".yml", ".toml", ".ini", ".cfg", ".gin", ".jsonnet", ".libsonnet")
DIGITS = 16
MAX_DATA = 1000  # files of data that a process notes
MIN_REMEMBERED_BYTES = 2**14  # a smaller file is read again faster than it is looked up
MAX_WHOLE_BYTES = 2**28  # of a larger file, blocks of it are read
BLOCK_BYTES = 2**20
BLOCKS = 64
SYSTEM = ("/etc/", "/usr/", "/bin/", "/sbin/", "/lib", "/sys/", "/run/", "/var/lib/", "/var/cache/", "/dev/", "/proc/")
TRACKERS = ("mlruns", "wandb")  # folders of experiment trackers
METADATA = (".dist-info", ".egg-info")  # folders that any look for plugins reads
# Variables that say where and by whom a run is started, or that its launcher sets.
ANYWHERE = re.compile(
    r"AMPCOMPARE_\w+|(LOCAL_|GROUP_|ROLE_|NODE_)?(RANK|WORLD_SIZE)|\w*_RANK|\w*_WORLD_SIZE|MASTER_\w+|TORCHELASTIC_\w+"
    r"|(OMP|MKL|OPENBLAS|NUMEXPR|VECLIB)_\w+|(CUDA|NVIDIA|HIP|ROCR|NCCL|GLOO|UCX)_\w+|(SLURM|PBS|LSB|OMPI|PMI|RAY)_\w+"
    r"|PYTHON\w*|VIRTUAL_ENV|CONDA_\w+|PATH|HOME|USER|LOGNAME|HOST|HOSTNAME|PWD|OLDPWD|SHELL|SHLVL|TERM|COLUMNS|LINES|_"
    r"|DISPLAY|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|TEMP|TMP|XDG_\w+|SSH_\w+|CI|GITHUB_\w+|(WANDB|MLFLOW|COMET|NEPTUNE)_\w+"
)
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
# What code says to ask for a variable: os.environ["LR"], environ.get("LR"), os.getenv("LR"), "LR" in os.environ.
ASKED = re.compile(
    r"""(?:\benviron\s*(?:\.\s*(?:get|setdefault|pop)\s*\(|\[)|\bgetenv\s*\()\s*["'](\w+)["']"""
    r"""|["'](\w+)["']\s+(?:not\s+)?in\s+(?:os\s*\.\s*)?environ\b"""
)


@dataclass
class LoadedCode:
    """What a run has loaded.

    Attributes:
        files: the start of the SHA-256 of each file, by its name; several, joined by `|`, where it changed meanwhile.
            Variables of the environment stand among them as `$NAME`.
        packages: versions of the installed packages that it imported, by distribution.
    """

    files: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)


def digest_of(path: str | Path) -> str | None:
    """Return the start of the SHA-256 of a file, of a large one over its size and blocks of it; None if unreadable."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        found = os.fstat(descriptor)
        key = (os.fspath(path), found.st_mtime_ns, found.st_size, found.st_ino)
        if key in _digests:
            return _digests[key]
        total = hashlib.sha256()
        if found.st_size <= MAX_WHOLE_BYTES:
            while block := os.read(descriptor, BLOCK_BYTES):
                total.update(block)
        else:
            total.update(str(found.st_size).encode())
            for number in range(BLOCKS):
                start = number * (found.st_size - BLOCK_BYTES) // (BLOCKS - 1)
                total.update(os.pread(descriptor, BLOCK_BYTES, start))
    except OSError:
        return None
    finally:
        os.close(descriptor)
    digest = total.hexdigest()[:DIGITS]
    if found.st_size >= MIN_REMEMBERED_BYTES:
        _digests[key] = digest
    return digest


_digests: dict[tuple[str, int, int, int], str] = {}  # of this process


def _digest_of_variable(value: str | None) -> str:
    return "unset" if value is None else hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()[:DIGITS]


class CodeWatch:
    """Notes what this process, and those that it forks, load from now on.

    Args:
        folder: of the cell, which gets the list.
        base: the folder of the script, or the one where it runs.
    """

    def __init__(self, folder: Path, base: Path) -> None:
        self._list = str(folder / CellFile.LOADED)
        own = os.path.realpath(folder)
        cells = os.path.dirname(own)
        self._own = os.path.join(cells if os.path.basename(cells) == RunFile.CELLS else own, "")
        self._names = Names(base)
        self._here = os.path.join(os.getcwd(), "")
        self._environment = dict(os.environ)
        self._variables: set[str] = set()
        self._data = 0
        self._seen: set[str] = set()
        self._busy: set[int] = set()  # threads inside of the hook: what it opens itself does not count
        self._at_start = {name.partition(".")[0] for name in list(sys.modules)} - set(LATE_PACKAGES)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note the file of code, settings or data that is read, and of scripts that are started."""
        if event == "open":
            path, mode, flags = arguments
            writes = (isinstance(flags, int) and flags & WRITING) or (isinstance(mode, str) and set(mode) & set("wax+"))
            if isinstance(path, str | bytes | os.PathLike) and not writes:
                self._note(os.fsdecode(path))
        elif event == "subprocess.Popen":
            words = arguments[1]
            for word in words if isinstance(words, list | tuple) else ():
                if isinstance(word, str) and word.endswith(".py"):
                    self._note(word)

    def end(self) -> None:
        """Add the modules that are loaded, the variables that code asks for, and the versions of packages."""
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and (".." in file or is_users_code(file)):
                self._note(file)
        thread = threading.get_ident()
        self._busy.add(thread)
        try:
            for path in self._seen:
                if path.endswith(".py"):
                    self._add_variables(Path(path).read_text(encoding="utf-8", errors="replace"))
            for name, version in self._packages():
                self._add({"package": name, "version": version})
        finally:
            self._busy.discard(thread)

    def _note(self, file: str) -> None:
        path = os.path.abspath(file)
        folder, name = os.path.split(path)
        if os.path.basename(folder) == "__pycache__":  # an import reads the compiled form
            path = os.path.join(os.path.dirname(folder), f"{name.partition('.')[0]}.py")
        thread = threading.get_ident()
        if path in self._seen or thread in self._busy or not self._counts(path):
            return
        self._seen.add(path)
        self._data += not path.endswith(CODE)
        self._busy.add(thread)
        try:
            digest = digest_of(path)
            if digest is None:  # it may be made later
                self._seen.discard(path)
            else:
                self._add({"file": self._names.of(path), "sha256": digest})
        finally:
            self._busy.discard(thread)

    def _add_variables(self, text: str) -> None:
        """Add the variables that a file of the user asks for, with the values that they had at the start."""
        for name in sorted({one or other for one, other in ASKED.findall(text)} - self._variables):
            self._variables.add(name)
            value = self._environment.get(name)
            is_known = ANYWHERE.fullmatch(name) or is_secret_name(name) or (value is not None and mask(value) != value)
            if not is_known:
                self._add({"file": f"${name}", "sha256": _digest_of_variable(value)})

    def _counts(self, path: str) -> bool:
        if not is_users_code(path) or path.startswith(self._own):
            return False
        base = self._names.base
        here = next((root for root in (base, self._here) if path.startswith(root)), "")
        if not here and path.startswith(_temporary()):
            return False
        if path.endswith(CODE):
            return True
        if not here and path.startswith(SYSTEM):
            return False
        folders = path[len(here) :].split(os.sep)
        if any(name.startswith(".") or name.endswith(METADATA) or name in TRACKERS for name in folders):
            return False
        if self._data >= MAX_DATA:
            return False
        try:
            return stat.S_ISREG(os.stat(path).st_mode)
        except OSError:
            return False

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
            if top in self._at_start or top in tops:
                continue
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and any(part in file for part in INSTALLED):
                tops.add(top)
        late = tops.intersection(LATE_PACKAGES)  # whose distributions have their names
        for name in sorted(late):
            if (version := installed_version(name)) is not None:
                tops.discard(name)
                yield name, version
        if not tops:
            return
        others = _needed_anyway() | late
        for distribution in sorted(distributions_of(tops)):
            if _plain(distribution) not in others and (version := installed_version(distribution)) is not None:
                yield distribution, version


def distributions_of(tops: Iterable[str]) -> set[str]:
    """Return the names of the distributions that installed a module or package of one of these names.

    `metadata.packages_distributions` says the same of all names, and makes a path of each installed file for it: 0.6 s
    with 70 distributions, at the end of each cell.
    """
    wanted, found = set(tops), set()
    names = "|".join(map(re.escape, sorted(wanted)))
    listed = re.compile(rf'^"?(?:{names})(?:/[^\n]*|\.[\w-]+)?\.(?:py|so|pyd)"?,', re.MULTILINE)
    for distribution in metadata.distributions():
        declared = distribution.read_text("top_level.txt")
        if declared:
            brings = not wanted.isdisjoint(declared.split())
        elif record := distribution.read_text("RECORD"):
            brings = listed.search(record) is not None
        else:  # no wheel
            files = distribution.files or ()
            brings = any(file.suffix == ".py" and file.with_suffix("").parts[0] in wanted for file in files)
        if brings:
            found.add(distribution.metadata["Name"])
    return found


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
    global _is_installed, _watch
    _temporary()  # found now: a hook that looks for it would wait for the lock of the one who does
    _watch = watch = CodeWatch(folder, base)
    if not _is_installed:
        _is_installed = True
        sys.addaudithook(_hook)
    return watch


def end_watch() -> None:
    """Note no longer what this process loads."""
    global _watch
    _watch = None


_watch: CodeWatch | None = None
_is_installed = False  # Python cannot remove a hook


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    # It runs inside of what it listens to, in any thread, so it may neither take a lock nor raise.
    if (event == "open" or event == "subprocess.Popen") and (watch := _watch) is not None:
        watch.audit(event, arguments)


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

    @property
    def base(self) -> str:
        """The folder of the script, with a separator at its end."""
        return os.path.join(self._base, "")

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
    loaded = LoadedCode()
    try:
        lines = (folder / CellFile.LOADED).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return loaded
    for line in lines:
        try:
            row = json.loads(line)
            if "file" in row:
                found.setdefault(row["file"], {})[row["sha256"]] = None
            else:
                loaded.packages[row["package"]] = row["version"]
        except (ValueError, KeyError, TypeError):  # cut off
            continue
    loaded.files = {name: "|".join(found[name]) for name in sorted(found)}
    return loaded


def changed_code(files: Mapping[str, str], base: Path) -> dict[str, str]:
    """Return the files that are not as they were recorded, each with what happened to it: "changed" or "gone"."""
    names = Names(base)
    changed = {}
    for name, digest in files.items():
        path = names.path(name)
        if name.startswith("$"):
            if _digest_of_variable(os.environ.get(name[1:])) != digest:
                changed[name] = "changed"
        elif path is None:
            changed[name] = "gone"
        elif digest_of(path) != digest:
            changed[name] = "changed"
    return changed


def differing_files(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the files that two runs both loaded, with other contents."""
    return [name for name, digest in one.items() if other.get(name, digest) != digest]
