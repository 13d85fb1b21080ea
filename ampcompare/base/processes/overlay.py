"""Lay an overlay of the kernel over all that a process can write: what `sandbox.py` asks of a process that it starts.

In a mount namespace of its own, overlayfs (Linux 5.11 or later) lies on every file system that can be written. Each
path keeps its name, and a process reads the user's files until it changes one; what it changes lies in a *store*.

Root needs the capability SYS_ADMIN, other users need user namespaces; containers often have neither. In a user
namespace the kernel cannot copy a folder of another owner: there, writes succeed below the working directory, the home,
the folders of temporary files, and those that are named.
"""

import contextlib
import ctypes
import errno
import functools
import itertools
import json
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ampcompare.base.environment.variables import SANDBOX

NAMES = "names"  # in the store: the folders on which no overlay can lie
LAYERS = "layers.json"  # in the store: which folder has what was written below which path
# Of <linux/sched.h>, <sys/mount.h> and <linux/prctl.h>.
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_RDONLY = 1
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
PR_SET_DUMPABLE = 4
OF_THE_MACHINE = ("/proc", "/sys", "/dev", "/run")
OF_THE_KERNEL = {
    *("proc", "sysfs", "devtmpfs", "devpts", "cgroup"),
    *("cgroup2", "mqueue", "hugetlbfs", "debugfs", "tracefs"),
    *("securityfs", "configfs", "pstore", "bpf", "efivarfs", "binfmt_misc", "fusectl", "nsfs", "selinuxfs"),
}  # kinds of file systems that hold no files of a user


def enter_sandbox_if_asked() -> None:
    """Sandbox this process, which has one thread, and those that it will start, if its environment says so.

    Raises:
        OSError: the system does not allow it, or has no overlays on the file system of the store.
    """
    if (text := os.environ.pop(SANDBOX, None)) is not None:
        request = json.loads(text)
        if "folder" in request:  # a copy of the working directory
            os.chdir(request["folder"])
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # of modules that lie elsewhere
            sys.dont_write_bytecode = True
        else:
            _enter_sandbox(**request)


def _enter_sandbox(store: str, shared: Sequence[str], roots: Sequence[str]) -> None:
    here = os.getcwd()
    home, temporary = os.path.expanduser("~"), tempfile.gettempdir()
    # of this process: another one of the same cell may have had one before
    store = tempfile.mkdtemp(dir=store)
    is_privileged = _unshare_mounts_and_is_privileged()
    _mount_source_on_target(None, "/", None, MS_REC | MS_PRIVATE)
    common = (here, home, temporary, "/tmp", "/var/tmp")
    root = _NewRoot(store, None if is_privileged else (*common, *roots))
    root.cover_folder("/")
    for path in (*_socket_paths(), *shared):
        if os.path.lexists(root.path_before_root_change(path)):
            _mount_source_on_target(path, root.path_before_root_change(path), None, MS_BIND | MS_REC)
    Path(store, LAYERS).write_text(json.dumps(root.layers))
    os.chdir(root.path_before_root_change("/"))
    _call_libc("pivot_root", b".", b".")
    _call_libc("umount2", b".", MNT_DETACH)
    os.chdir(here)


class _NewRoot:
    """The root of the file systems that a process in a sandbox sees.

    `roots` are the folders where a user's namespace must be able to write; None for root, who can everywhere. `layers`
    has, by the path that it lies on, the folder with what was written there.
    """

    def __init__(self, store: str, roots: Sequence[str] | None) -> None:
        self.layers: dict[str, str] = {}
        self._store = store
        self._roots = roots
        self._stage = os.path.join(store, "stage")
        os.makedirs(self._stage)
        _mount_source_on_target("tmpfs", self._stage, "tmpfs")
        os.mkdir(self.path_before_root_change("/"))
        os.mkdir(os.path.join(self._stage, "empty"))
        self._mounts = _file_system_kinds_by_mount_point()
        self._numbers = itertools.count()

    def path_before_root_change(self, path: str) -> str:
        """Return where a path of the new root is reached from the present one."""
        return os.path.join(self._stage, "root", path.lstrip("/")).rstrip("/")

    def cover_folder(self, path: str) -> None:
        """Let a folder and all below it appear in the new root, with an overlay on each file system.

        A mount point that another process has removed meanwhile, as container engines do, is left out.
        """
        try:
            self._cover_folders_below(path)
        except FileNotFoundError:
            if os.path.lexists(path):
                raise

    def _cover_folders_below(self, path: str) -> None:
        below = [
            mount for mount in self._mounts if mount != path and mount.startswith(os.path.join(path, ""))
        ]
        is_machines = path in OF_THE_MACHINE or self._mounts.get(path) in OF_THE_KERNEL
        if is_machines or not os.path.isdir(path):
            _mount_source_on_target(path, self.path_before_root_change(path), None, MS_BIND | MS_REC)
        elif self._mount_overlay(path):
            for mount in below:  # of which none lies in another one
                if not any(mount.startswith(os.path.join(other, "")) for other in below):
                    self.cover_folder(mount)
        elif below:  # a user's namespace may not look below them
            self._cover_contents_one_by_one(path)
        elif os.access(path, os.W_OK):
            raise OSError(errno.ENOTSUP, "no overlay can lie here", path)
        else:
            _mount_source_on_target(path, self.path_before_root_change(path), None, MS_BIND | MS_REC)

    def _cover_contents_one_by_one(self, path: str) -> None:
        """Make a folder in place of one on which no overlay can lie, and cover what is in it."""
        if path == "/":
            self.layers[path] = self._make_layer_folder(NAMES)
            _mount_source_on_target(self.layers[path], self.path_before_root_change(path), None, MS_BIND)
        with os.scandir(path) as found:
            entries = list(found)
        for entry in entries:
            target = self.path_before_root_change(entry.path)
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), target)
                continue
            os.mkdir(target) if entry.is_dir() else Path(target).touch()
            self.cover_folder(entry.path)

    def _mount_overlay(self, path: str) -> bool:
        """Mount an overlay on a folder; return whether that is possible."""
        number = next(self._numbers)
        upper, work = self._make_layer_folder(f"{number}.upper"), self._make_layer_folder(f"{number}.work")
        facts = os.stat(path)
        os.chmod(upper, stat.S_IMODE(facts.st_mode))
        options = "userxattr" if self._roots is not None else "redirect_dir=on,metacopy=off"
        if self._roots is None:
            os.chown(upper, facts.st_uid, facts.st_gid)
        for root in self._roots or ():
            _make_folders_in_upper_layer(path, root, upper)
        for lower in (path, os.path.join(self._stage, f"{number}.lower")):
            # the store is below `path`, which an overlay refuses, so it gets a view of `path`
            if lower != path:
                os.mkdir(lower)
                with _folder_names_without_mount_signs(os.path.join(self._stage, "empty"), path) as (
                    empty,
                    real,
                ):
                    options_of_view = f"lowerdir={empty}:{real}" + ",userxattr" * (self._roots is not None)
                    if not _try_mount_overlay(lower, options_of_view, MS_RDONLY):
                        return False
            with _folder_names_without_mount_signs(lower, upper, work) as (below, above, aside):
                if _try_mount_overlay(
                    self.path_before_root_change(path),
                    f"lowerdir={below},upperdir={above},workdir={aside},{options}",
                ):
                    self.layers[path] = upper
                    return True
                if ctypes.get_errno() != errno.ELOOP:
                    return False
        return False

    def _make_layer_folder(self, name: str) -> str:
        path = os.path.join(self._store, name)
        os.mkdir(path)
        return path


def _make_folders_in_upper_layer(path: str, root: str, upper: str) -> None:
    """Make the folders from `path` down to `root` in an upper layer, so that the kernel need not copy them."""
    if os.path.commonpath([path, os.path.realpath(root)]) != path:
        return
    made, real = upper, path
    for name in Path(os.path.relpath(os.path.realpath(root), path)).parts:
        made, real = os.path.join(made, name), os.path.join(real, name)
        if not os.path.isdir(real):
            return
        os.makedirs(made, exist_ok=True)
        os.chmod(made, stat.S_IMODE(os.stat(real).st_mode))


def _unshare_mounts_and_is_privileged() -> bool:
    """Leave the mounts of the machine; return whether that took no user namespace."""
    with contextlib.suppress(OSError):
        _call_libc("unshare", CLONE_NEWNS)
        return True
    user, group = os.geteuid(), os.getegid()
    _call_libc("unshare", CLONE_NEWNS | CLONE_NEWUSER)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        Path("/proc/self", name).write_text(text)
    with contextlib.suppress(OSError):
        _call_libc("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # the user's tools look at this process as before
    return False


def _file_system_kinds_by_mount_point() -> dict[str, str]:
    """Return the kinds of the file systems of this process, by where they are mounted."""
    found = {}
    for line in os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).splitlines():
        words = line.split(" ")
        name = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), words[4])
        if os.path.lexists(name):
            found[name] = words[words.index("-", 6) + 1]
    return found


def _socket_paths() -> Iterator[str]:
    """Yield the sockets of this machine that have a path: one that is seen through an overlay reaches nobody."""
    for line in Path("/proc/net/unix").read_text(errors="replace").splitlines():
        path = line.split(" ")[-1]
        if path.startswith("/") and not path.startswith(OF_THE_MACHINE) and os.path.exists(path):
            yield path


def _mount_source_on_target(
    source: str | None, target: str, kind: str | None, flags: int = 0, options: str | None = None
) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind)]
    _call_libc("mount", *words, ctypes.c_ulong(flags), None if options is None else options.encode())


def _try_mount_overlay(target: str, options: str, flags: int = 0) -> bool:
    try:
        _mount_source_on_target("overlay", target, "overlay", flags, options)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _folder_names_without_mount_signs(*folders: str) -> Iterator[list[str]]:
    """Yield names of folders without the signs that have a meaning among the options of a mount."""
    with contextlib.ExitStack() as stack:
        names = []
        for folder in folders:
            descriptor = os.open(folder, os.O_PATH)
            stack.callback(os.close, descriptor)
            names.append(f"/proc/self/fd/{descriptor}")
        yield names


@functools.cache
def _load_libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _call_libc(name: str, *arguments: Any) -> None:
    """Call a function of the C library; OSError if it fails."""
    if getattr(_load_libc(), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
