"""Stands for `python`: forks itself for each request, so that a script that uses torch starts in milliseconds.

Torch, ampcompare and what they import are loaded once, and hidden: a request finds them by a normal import, through
its own `sys.path` and past the finders that it installs, but nothing is executed again; a copy of ampcompare in another
folder is another package. A request ends as an interpreter does: exit handlers run, threads are joined, an uncaught
exception is printed, files are flushed. Only its modules are not cleared, since that takes longer than most requests:
each memory page that it shares with the server would be copied.

Requests come on a socket: JSON with `words` (the command line), `folder`, `environment`, `session` (whether to begin
one) and `passed` (numbers of further files), and file descriptors: for standard input, output and error, for the files
that are passed, for the answer, which is the process id, then the exit code, and for the requests of the process
itself, which starts its ranks and the like in the same way.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import fcntl
import gc
import importlib
import importlib.util
import io
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from forked_process import fork_from

MIN_FILE = 512  # above the numbers of files that a request passes on
LEADERS = ("numpy", "torch", "torch._dynamo", "pydantic", "click", "rich.live", "yaml", "psutil", "scipy.stats")
OWN = (
    *("ampcompare.experiment.run", "ampcompare.script.prepare", "ampcompare.script.legacy.execute"),
    *("ampcompare.script.legacy.replay", "ampcompare.base.isolate.server", "ampcompare.experiment.launch.worker.cell"),
)
EXECUTED = ("ampcompare.base.environment.first_path",)  # which looks at the command line
exit_code: int | None = None  # of a request that ends


def end_quickly() -> None:
    """Flush what this process has opened, and end without clearing modules; the last exit handler."""
    if exit_code is not None:
        for file in (sys.stdout, sys.stderr, *gc.get_objects()):
            if issubclass(type(file), io.IOBase):
                with contextlib.suppress(ValueError, OSError):  # it is closed, or nobody reads it
                    file.flush()
        os._exit(exit_code)


def run(name: str, *, is_module: bool) -> None:
    """Run a module or file as the main program, and note the exit code."""
    global exit_code
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
        exit_code = 0
    except SystemExit as exit:
        exit_code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        raise
    except BaseException:
        exit_code = 1
        raise


def _others() -> dict[str, ModuleType]:
    """Return the modules of packages that come from files and are not of the standard library."""
    return {
        name: module
        for name, module in sys.modules.items()
        if (first := name.partition(".")[0]) not in sys.stdlib_module_names
        and (spec := getattr(sys.modules.get(first), "__spec__", None)) is not None
        and spec.has_location
        and spec.name == first  # no second name of a module, such as scipy gives one
    }


class Group:
    """Modules of one package that one import loaded, and the packages that it loaded before them."""

    def __init__(self, modules: dict[str, ModuleType], needs: Sequence[str]) -> None:
        self.modules = modules
        self._needs = needs

    def bring_back(self) -> None:
        """Put the modules into `sys.modules`; what they need is imported, as others may wait for that."""
        for name in self._needs:
            if name not in sys.modules:
                importlib.import_module(name)
        for name, module in self.modules.items():
            sys.modules.setdefault(name, module)


class Hidden:
    """Finds modules that are loaded but not in `sys.modules`, where `sys.path` leads to the same file."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = {name: group for group in groups for name in group.modules}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the path leads to, with a loader that brings back the module instead of executing it."""
        group = self._groups.get(fullname)
        spec = group and PathFinder.find_spec(fullname, path)
        if not group or not spec:
            return None
        module = group.modules[fullname]
        if module.__spec__ is None or module.__spec__.origin != spec.origin:
            return None
        spec.loader = Loaded(module, group)
        return spec


class Loaded(Loader):
    """A loader of a module that is loaded."""

    def __init__(self, module: ModuleType, group: Group) -> None:
        self._module, self._spec, self._group = module, module.__spec__, group

    def __getattr__(self, name: str) -> Any:
        """Read code and files of the module by its own loader, as `runpy` does."""
        return getattr(self._spec and self._spec.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Bring back the other modules of its group."""
        module.__spec__ = self._spec
        self._group.bring_back()


def own_groups() -> list[Group]:
    """Import what most commands need of ampcompare, and return a group for each module, and for each further package.

    A module of ampcompare brings back what it has imported, and no other. None has a state yet, nor changes torch.
    """
    before = set(_others())
    needs: dict[str, list[str]] = {}
    plain_import, by_name = builtins.__import__, importlib.import_module

    def noted(name: str, globals: Any = None, locals: Any = None, parts: Any = (), level: int = 0) -> ModuleType:
        module: ModuleType = plain_import(name, globals, locals, parts, level)
        full = importlib.util.resolve_name("." * level + name, globals["__package__"]) if level else name
        found = needs.setdefault((globals or {}).get("__name__", ""), [])
        found += [one for one in (full, *(f"{full}.{part}" for part in parts or ())) if one in sys.modules]
        return module

    def noted_by_name(name: str, package: str | None = None) -> ModuleType:
        needs.setdefault(sys._getframe(1).f_globals["__name__"], []).append(name)
        return by_name(name, package)

    builtins.__import__, importlib.import_module = noted, noted_by_name  # type: ignore[assignment]
    try:
        package = importlib.import_module("ampcompare.cli")
        for found in pkgutil.iter_modules(package.__path__, "ampcompare.cli."):
            importlib.import_module(found.name)
        for name in OWN:
            importlib.import_module(name)
    finally:
        builtins.__import__, importlib.import_module = plain_import, by_name
    loaded = {name: module for name, module in _others().items() if name not in before and name not in EXECUTED}
    own = [name for name in loaded if name.partition(".")[0] == "ampcompare"]
    # A request may wait for the import of a module of the engine, so what uses it is executed there.
    apart = {name for name in own if name.startswith("ampcompare.apex")}
    while more := [name for name in own if name not in apart and not apart.isdisjoint(needs.get(name, []))]:
        apart.update(more)
    modules = {name: loaded.pop(name) for name in own}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent and vars(modules[parent]).get(child) is module:
            delattr(modules[parent], child)  # as if nobody had imported it
    found = [Group({name: modules[name]}, needs.get(name, [])) for name in own if name not in apart]
    return found + by_package(loaded)


def by_package(modules: dict[str, ModuleType]) -> list[Group]:
    """Return a group for each package."""
    packages = {name.partition(".")[0] for name in modules}
    return [Group({n: m for n, m in modules.items() if n.partition(".")[0] == one}, []) for one in sorted(packages)]


def hide_torch() -> None:
    """Import what nearly every request needs, and hide it."""
    kept = set(_others())
    groups: list[Group] = []
    for leader in LEADERS:
        before = set(_others())
        importlib.import_module(leader)
        if leader == "torch._dynamo":
            torch: Any = sys.modules["torch"]
            torch.optim.SGD([torch.zeros(1)], lr=1.0)  # imports more
        loaded = {name: module for name, module in _others().items() if name not in before}
        first = leader.partition(".")[0]
        packages = {name.partition(".")[0] for name in loaded} - {first}
        needs = sorted(packages | ({"numpy"} if first == "torch" else set()))
        own = {name: loaded.pop(name) for name in list(loaded) if name.partition(".")[0] == first}
        groups += [Group(own, needs), *by_package(loaded)]
    groups += own_groups()
    for name in set(_others()) - kept:
        del sys.modules[name]
    sys.meta_path.insert(sys.meta_path.index(PathFinder), Hidden(groups))


def wait_for_request(channel: socket.socket) -> dict[str, Any]:
    """Return a request in the process that is forked for it; in the server, never return."""
    gc.collect()
    gc.freeze()
    answers: dict[int, int] = {}
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        readable, _, _ = select.select([channel, woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
        for child in list(answers):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                with contextlib.suppress(BrokenPipeError):
                    os.write(answers[child], f"{os.waitstatus_to_exitcode(status)}\n".encode())
                os.close(answers.pop(child))
        if channel not in readable:
            continue
        line, (*files, answer, requests), _, _ = receive(channel)
        child = os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            channel.close()
            for number in (woken, wakes, *answers.values()):
                os.close(number)
            request: dict[str, Any] = json.loads(line)
            # Out of the way of the numbers that the files shall have.
            answer, requests, *files = (move_up(file) for file in (answer, requests, *files))
            for number, file in zip((0, 1, 2, *request["passed"]), files, strict=True):
                os.dup2(file, number)
                os.close(file)
            if request["session"]:
                os.setsid()
            os.write(answer, f"{os.getpid()}\n".encode())
            os.close(answer)
            fork_from(socket.socket(fileno=requests))
            return request
        for file in (*files, requests):
            os.close(file)
        answers[child] = answer


def move_up(file: int) -> int:
    """Give a file a number that no request asks for."""
    moved = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, MIN_FILE)
    os.close(file)
    return moved


def receive(channel: socket.socket) -> tuple[bytes, list[int], int, Any]:
    """Return a request; end the server where the other end is closed."""
    line, files, flags, address = socket.recv_fds(channel, 1 << 20, 8)
    if not line:
        os._exit(0)
    return line, files, flags, address


def enter(request: dict[str, Any]) -> tuple[bool, str]:
    """Set the process up as the interpreter would, and return whether a module is asked for, and the name or file.

    Options of Python itself that are understood: -u and -W.
    """
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    words = list(request["words"])
    filters = [word for word in os.environ.get("PYTHONWARNINGS", "").split(",") if word]
    if words[0] == "-u" or os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    if words[0] == "-u":
        del words[0]
    while words[0] == "-W":
        filters.append(words[1])
        del words[:2]
    sys.warnoptions[:] = filters
    for text in filters:
        action, _, category = text.partition("::")
        warnings.simplefilter(action, getattr(__import__("builtins"), category or "Warning"))  # type: ignore[arg-type]
    is_module = words[0] == "-m"
    if is_module:
        del words[0]
    sys.argv[:] = words
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in named if folder and folder not in sys.path]
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(words[0]))
    return is_module, words[0]


if __name__ == "__main__":
    os.fsync = lambda descriptor: None  # type: ignore[assignment]  # as in the process of the tests
    atexit.register(end_quickly)  # before any other handler, as they run from the last to the first
    hide_torch()
    del __file__, sys.modules["forked_process"]  # no code of a request
    module_asked, asked = enter(wait_for_request(socket.socket(fileno=int(sys.argv[1]))))
    run(asked, is_module=module_asked)
