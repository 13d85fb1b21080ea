"""Follow the adapter that `migrate` writes in the place of Apex, as a script imports it, under whatever name.

It is known by the mark in its file: it may lie next to a script, in a package, or have a name of the project's own.
Under an arm its functions are those of `apex.amp`, on which the arm acts: there is one answer to both.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ampcompare.base.patches import Subscriptions
from ampcompare.source.migrate.adapter.mark import OFFERED, has_adapter_mark, loaded_adapters

_ANSWERED = "_is_answered_by_apex"
Follower = Callable[[ModuleType], None]


class _AdapterFinder(MetaPathFinder):
    """Finds what the other finders find, and calls followers behind the code of each adapter, in their order."""

    def __init__(self) -> None:
        self.followers: list[Follower] = []
        self._searching: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the adapter alone; None leaves any other module to the other finders."""
        if fullname in self._searching:  # another finder asks all of them, as this one does
            return None
        self._searching.add(fullname)
        try:
            others = [one for one in sys.meta_path if one is not self and hasattr(one, "find_spec")]
            specs = (one.find_spec(fullname, path, target) for one in others)
            spec = next((one for one in specs if one is not None), None)
        finally:
            self._searching.discard(fullname)
        if spec is None or spec.loader is None or not spec.has_location:
            return spec
        if has_adapter_mark(str(spec.origin)):
            self._announce_adapter_once_executed(spec.loader)
        return spec

    def _announce_adapter_once_executed(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            call_adapter_followers(module)

        loader.exec_module = exec_module


_finder = _AdapterFinder()


def call_with_each_adapter(follower: Follower, events: Subscriptions) -> None:
    """Call `follower` with each module of the adapter, those imported already among them, until `events` end."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.followers.append(follower)
    events.call_at_end(lambda: _stop_following_adapters(follower))
    for module in loaded_adapters():
        follower(module)


def call_adapter_followers(adapter: ModuleType) -> None:
    """Call what follows adapters with one whose code has run."""
    for take in list(_finder.followers):
        take(adapter)


def _stop_following_adapters(follower: Follower) -> None:
    _finder.followers.remove(follower)
    if not _finder.followers and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def put_amp_functions_in_adapter(amp: ModuleType, adapter: ModuleType) -> None:
    """Let the functions of `apex.amp` be those of the adapter, which keeps its wrappers, layers and optimizers."""
    for name in OFFERED["amp"]:
        setattr(adapter, name, getattr(amp, name))
    setattr(adapter, _ANSWERED, True)


def adapter_keeps_own_functions(adapter: ModuleType) -> bool:
    """Return whether the adapter's own functions act: no arm has those of `apex.amp` in their place."""
    return not hasattr(adapter, _ANSWERED)
