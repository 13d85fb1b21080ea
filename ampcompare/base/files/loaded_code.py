"""What a run uses of the user's side: its modules, the files that they name, variables, and packages' versions.

At its end, a process of a cell adds to a list in the folder of the cell: each module in `sys.modules` that is not of
Python, an installed package or ampcompare; each file, and those in each folder, that such a module or the settings of
the cell name in quotes, as `"data.npy"`; each variable of the environment that a module asks for, as `$NAME`, without
its value. What was written while the process ran is no input of it. For packages their versions count.

A file has a name that does not change when its project is copied elsewhere: its path below the folder of the script,
or below the entry of the search path where it was found; else it starts with `..`, or is a full path.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ampcompare.base.environment.packages import distributions_imported_since, is_in_site_folder
from ampcompare.base.files.run_files import CellFile, RunFile
from ampcompare.base.files.snapshot import is_name_of_tool_file, mtime_and_size, user_files_below
from ampcompare.base.files.temporary import temporary_root
from ampcompare.base.python_folders import STANDARD_LIBRARY
from ampcompare.base.secrets.masking import is_secret_name, mask_secrets

CODE = (
    *(".py", ".pyw", ".pyc", ".pyx", ".so", ".pyd"),
    # extensions that torch compiles at the start
    *(".c", ".cc", ".cpp", ".cxx", ".cu", ".cuh", ".h", ".hpp"),
)
SETTINGS = (".yaml", ".yml", ".toml", ".ini", ".cfg", ".gin", ".jsonnet", ".libsonnet")
DIGITS = 16
MAX_DATA = 1000  # files that a process names
MIN_REMEMBERED_BYTES = 2**14  # a smaller file is read again faster than it is looked up
MAX_WHOLE_BYTES = 2**28  # of a larger file, blocks of it are read
BLOCK_BYTES = 2**20
BLOCKS = 64
CHANGING = "changed while it ran"  # in place of the digest of a file that may not be what was loaded
SYSTEM = (
    "/etc/",
    "/usr/",
    "/bin/",
    "/sbin/",
    "/lib",
    "/sys/",
    "/run/",
    "/var/lib/",
    "/var/cache/",
    "/dev/",
    "/proc/",
)
# Variables that say where and by whom a run is started, or that its launcher sets.
ANYWHERE = re.compile(
    r"AMPCOMPARE_\w+|(LOCAL_|GROUP_|ROLE_|NODE_)?(RANK|WORLD_SIZE)|\w*_RANK|\w*_WORLD_SIZE|MASTER_\w+|TORCHELASTIC_\w+"
    r"|(OMP|MKL|OPENBLAS|NUMEXPR|VECLIB)_\w+|(CUDA|NVIDIA|HIP|ROCR|NCCL|GLOO|UCX)_\w+|(SLURM|PBS|LSB|OMPI|PMI|RAY)_\w+"
    r"|PYTHON\w*|VIRTUAL_ENV|CONDA_\w+|PATH|HOME|USER|LOGNAME|HOST|HOSTNAME|PWD|OLDPWD|SHELL|SHLVL|TERM|COLUMNS|LINES|_"
    r"|DISPLAY|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|TEMP|TMP|XDG_\w+|SSH_\w+|CI|GITHUB_\w+|(WANDB|MLFLOW|COMET|NEPTUNE)_\w+"
)
MAX_UP = 2  # folders above that of the script which a copy of its project is taken to include
GENERATED = ("torchinductor_", f"{os.sep}.triton{os.sep}", "__pycache__", "torch_extensions")
PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep
# What code says to ask for a variable: os.environ["LR"], environ.get("LR"), os.getenv("LR"), "LR" in os.environ.
ASKED = re.compile(
    r"""(?:\benviron\s*(?:\.\s*(?:get|setdefault|pop)\s*\(|\[)|\bgetenv\s*\()\s*["'](\w+)["']"""
    r"""|["'](\w+)["']\s+(?:not\s+)?in\s+(?:os\s*\.\s*)?environ\b"""
)


QUOTED = re.compile(r"""["']([^"'\n]{1,256})["']""")


@dataclass
class LoadedFilesAndVersions:
    """What a run has loaded: the start of the SHA-256 of each file and `$VARIABLE`, and versions of distributions.

    A file that changed meanwhile has several, joined by `|`.
    """

    files: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)


def digest_of_file(path: str | Path) -> str | None:
    """Return the start of the SHA-256 of a file, of a large one over its size and blocks of it; None if unreadable."""
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            key = (os.fspath(path), found.st_mtime_ns, found.st_size, found.st_ino)
            if key in _digests:
                return _digests[key]
            if found.st_size <= MAX_WHOLE_BYTES:
                total = hashlib.file_digest(file, "sha256")
            else:
                total = hashlib.sha256(str(found.st_size).encode())
                for number in range(BLOCKS):
                    file.seek(number * (found.st_size - BLOCK_BYTES) // (BLOCKS - 1))
                    total.update(file.read(BLOCK_BYTES))
    except OSError:
        return None
    digest = total.hexdigest()[:DIGITS]
    if found.st_size >= MIN_REMEMBERED_BYTES:
        _digests[key] = digest
    return digest


_digests: dict[tuple[str, int, int, int], str] = {}  # of this process


def _digest_of_variable(value: str | None) -> str:
    return (
        "unset"
        if value is None
        else hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()[:DIGITS]
    )


class UsedInputsRecorder:
    """Records at the end of this process what code and files it has used.

    Args:
        folder: of its cell, which gets the record.
        base: the folder of the script, below which names are relative.
    """

    def __init__(self, folder: Path, base: Path) -> None:
        self._folder = folder
        own = os.path.realpath(folder)
        cells = os.path.dirname(own)
        self._own = os.path.join(cells if os.path.basename(cells) == RunFile.CELLS else own, "")
        self._names = PortableFileNames(base)
        self._here = os.getcwd()
        self._roots = (self._names.base_folder, os.path.join(self._here, ""))
        self._environment = dict(os.environ)
        self._modules = frozenset(sys.modules)
        self._start = self._time_of_disk()

    def record_used_inputs(self) -> None:
        """Add the modules that are loaded, the files and variables that they name, and the versions of packages."""
        rows: list[dict[str, str]] = []
        end = self._time_of_disk()
        config = self._folder / CellFile.CONFIG
        texts = {self._names.base_folder: config.read_text(encoding="utf-8")} if config.exists() else {}
        files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        modules = {
            os.path.normpath(os.path.join(self._here, file)) for file in files if isinstance(file, str)
        }
        for path in sorted(filter(self._is_users_file, modules)):
            if (digest := digest_of_file(path)) is not None:
                has_changed = self._start < mtime_and_size(path)[0] <= end
                rows.append(
                    {
                        "file": self._names.portable_name_of(path),
                        "sha256": CHANGING if has_changed else digest,
                    }
                )
                if path.endswith(".py"):
                    texts[path] = Path(path).read_text(encoding="utf-8", errors="replace")
        data = {
            file
            for path, text in texts.items()
            for file in self._files_named_in_text(text, os.path.dirname(path))
        }
        for path in sorted(data - modules)[:MAX_DATA]:
            if (digest := digest_of_file(path)) is not None:
                rows.append({"file": self._names.portable_name_of(path), "sha256": digest})
        rows += self._variables_named_in("\n".join(texts.values()))
        rows += [
            {"package": name, "version": version}
            for name, version in distributions_imported_since(self._modules)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        with contextlib.suppress(OSError):  # a full disk must not end the training
            # processes may end at the same time
            with (self._folder / CellFile.LOADED).open("ab", buffering=0) as file:
                file.write(text.encode())

    def _time_of_disk(self) -> int:
        """Return the time in nanoseconds by the clock of the disk, which need not be that of this machine."""
        path = self._folder / CellFile.LOADED
        path.touch()
        return mtime_and_size(str(path))[0]

    def _is_users_file(self, path: str) -> bool:
        is_temporary = bool(temporary_root(path)) and not self._root_of_path(path)
        return is_users_code(path) and not path.startswith(self._own) and not is_temporary

    def _root_of_path(self, path: str) -> str:
        """Return the folder of the script or of the run, if a path is below it."""
        return next((root for root in self._roots if path.startswith(root)), "")

    def _files_named_in_text(self, text: str, folder: str) -> Iterator[str]:
        """Yield the files that a text names, from the folder of its file, the base or the working directory.

        An option of a command line ends with the name, as in `--data=points.npy`. In a folder, code does not count.
        """
        for quoted in sorted(set(QUOTED.findall(text))):
            name = os.path.expanduser(quoted.rpartition("=")[2])
            if not name.strip("./"):
                continue
            for path in {os.path.normpath(os.path.join(root, name)) for root in (folder, *self._roots)}:
                if os.path.isfile(path):
                    yield from filter(self._is_input_file, (path,))
                elif not any(root.startswith(os.path.join(path, "")) for root in self._roots):
                    files = (file for file in user_files_below(path) if not file.endswith(CODE))
                    yield from filter(self._is_input_file, itertools.islice(files, MAX_DATA))

    def _is_input_file(self, path: str) -> bool:
        root = self._root_of_path(path)
        is_others = any(map(is_name_of_tool_file, path[len(root) :].split(os.sep))) or (
            not root and path.startswith(SYSTEM)
        )
        return self._is_users_file(path) and not is_others and mtime_and_size(path)[0] <= self._start

    def _variables_named_in(self, text: str) -> Iterator[dict[str, str]]:
        """Yield the variables that a text asks for, with the values that they had at the start."""
        for name in sorted({one or other for one, other in ASKED.findall(text)}):
            value = self._environment.get(name)
            is_known = (
                ANYWHERE.fullmatch(name)
                or is_secret_name(name)
                or (value is not None and mask_secrets(value) != value)
            )
            if not is_known:
                yield {"file": f"${name}", "sha256": _digest_of_variable(value)}


def is_users_code(path: str) -> bool:
    """Return whether a file is neither of Python, an installed package or ampcompare, nor compiled by torch."""
    if path.startswith((PACKAGE, *STANDARD_LIBRARY, "/dev/", "/proc/")):
        return False
    return not (is_in_site_folder(path) or any(part in path for part in GENERATED))


class PortableFileNames:
    """Names of files, and the way back, as the search path of this process and its environment say."""

    def __init__(self, base: Path) -> None:
        self._base = os.path.abspath(base)
        found = [self._base]
        if "PYTHONPATH" in os.environ:
            found += os.environ["PYTHONPATH"].split(os.pathsep)
        found += sys.path
        paths = [os.path.abspath(entry or os.getcwd()) for entry in found if isinstance(entry, str)]
        self._roots = [root for root in dict.fromkeys(paths) if is_users_code(os.path.join(root, ""))]

    @property
    def base_folder(self) -> str:
        """The folder of the script, with a separator at its end."""
        return os.path.join(self._base, "")

    def portable_name_of(self, path: str) -> str:
        """Return the name of a file."""
        roots = sorted((root for root in self._roots if path.startswith(os.path.join(root, ""))), key=len)
        for root in reversed(roots):
            name = os.path.relpath(path, root)
            if self.path_of_name(name) == path:
                return name.replace(os.sep, "/")
        name = os.path.relpath(path, self._base)
        is_near = (
            name.split(os.sep).count("..") <= MAX_UP and os.path.commonpath([path, self._base]) != os.sep
        )
        return name.replace(os.sep, "/") if is_near else path

    def path_of_name(self, name: str) -> str | None:
        """Return the file of a name, where an import would find it now; None if there is none."""
        roots = [self._base] if name.startswith("..") else self._roots
        for root in roots:
            path = os.path.normpath(os.path.join(root, name))
            if os.path.isfile(path):
                return path
        return None


def read_loaded_code(folder: Path) -> LoadedFilesAndVersions:
    """Return what the processes of a cell have listed; empty without a list."""
    found: dict[str, dict[str, None]] = {}
    loaded = LoadedFilesAndVersions()
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


def changed_code_files(files: Mapping[str, str], base: Path) -> dict[str, str]:
    """Return what code is not as it was recorded.

    Args:
        files: digest of each file by its recorded name; a name such as `$PYTHONPATH` is that of a variable.
        base: the folder below which names are relative.

    Returns:
        "changed" or "gone" for the name of each file that is.
    """
    names = PortableFileNames(base)
    changed = {}
    for name, digest in files.items():
        path = names.path_of_name(name)
        if name.startswith("$"):
            if _digest_of_variable(os.environ.get(name[1:])) != digest:
                changed[name] = "changed"
        elif path is None:
            changed[name] = "gone"
        elif digest_of_file(path) != digest:
            changed[name] = "changed"
    return changed


def names_of_differing_files(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the names that two runs both have, with other values: of files or packages.

    Args:
        one: digests, or versions, by name; its order is that of the result.
        other: those of the other run.
    """
    return [name for name, digest in one.items() if other.get(name, digest) != digest]
