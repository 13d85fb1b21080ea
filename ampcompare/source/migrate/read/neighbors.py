"""What the files around a module say about it: whether training begins in one of them and goes on in another."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ampcompare.source.amp_names import CORE
from ampcompare.source.index import Index
from ampcompare.source.module import Module
from ampcompare.source.project import MAX_MODULES, Project
from ampcompare.source.syntax import dotted_name, last_name

CARRIED = "grad_scaler"  # the attribute of an optimizer in which another file finds its scaler
INDEXES: dict[frozenset[Module], Index] = {}  # of the projects that were looked at last
MAX_INDEXES = 4
NEEDED = frozenset({"scale_loss", "master_params", "state_dict", "load_state_dict"})


@dataclass(frozen=True)
class Around:
    """What other modules have to do with a module.

    Attributes:
        path: of the module; None if it is text alone.
    """

    path: Path | None = None
    _projects: dict[Module, Project] = field(default_factory=dict, compare=False, repr=False)

    def project(self, module: Module) -> Project:
        """Return the project in which a module is the file of this path."""
        return self._projects.setdefault(module, Project(self.path, module))

    def index(self, module: Module) -> Index:
        """Return the calls of a module, and of those around it."""
        project = self.project(module)
        if project.path is None:
            return Index(module)
        modules = frozenset([module, *(each for _, each in project.modules_around(project.path))])
        if modules not in INDEXES:
            if len(INDEXES) >= MAX_INDEXES:
                INDEXES.clear()
            INDEXES[modules] = Index(module, project)
        return INDEXES[modules].seen_from(module)

    def parse(self, text: str) -> Module:
        """Return the module of a text, that of the file where it is its own."""
        return Project(self.path).parse(text)

    def is_across(self, module: Module) -> bool:
        """Return whether an optimizer that a module initializes is stepped, or saved, by functions of another one.

        That is so if it imports from such a module, or if another script next to it initializes and imports from it.
        """
        if self.path is None or not initializes(module):
            return False
        project = self.project(module)
        assert project.path is not None
        if any(needs_scaler(each) for each in _modules_imported_by(project, module)):
            return True
        return needs_scaler(module) and _is_imported_by_script(project)

    def is_given(self, module: Module) -> bool:
        """Return whether a module around that imports a module, or that it imports, initializes.

        So does one that it is linked to through others, where that scales no loss itself.
        """
        if self.path is None:
            return True
        project = self.project(module)
        assert project.path is not None
        importing = (project.module(each) for each in project.importers(project.path))
        if any(map(initializes, _modules_imported_by(project, module))):
            return True
        if any(each is not None and initializes(each) for each in importing):
            return True
        return any(initializes(each) and not _scales(each) for _, each in self.modules_linked_to(module))

    def modules_linked_to(self, module: Module) -> Iterator[tuple[Path, Module]]:
        """Yield the other modules with a part of Apex's core through which the same training may go.

        One imports the other, or a third one both; where a file imports too many to look at, it may import any.
        """
        if self.path is None:
            return
        project = self.project(module)
        assert project.path is not None
        around = dict(project.modules_around(project.path))
        reached = {path: _reached_from(project, path) for path in (*around, project.path)}
        for path, other in around.items():
            if initializes(other) or needs_scaler(other):
                both = {path, project.path}
                if any(_may_reach(both, {one, *theirs}) for one, theirs in reached.items()):
                    yield path, other

    def modules_that_ask(self, module: Module) -> Iterator[tuple[Path, Module]]:
        """Yield the modules with a part of Apex's core that may ask whether Apex is there where a module does.

        They import it, if only through other files, or it imports them, as a test does.
        """
        if self.path is None:
            return
        project = self.project(module)
        assert project.path is not None
        own = _reached_from(project, project.path)
        for path, other in project.modules_around(project.path):
            if (initializes(other) or needs_scaler(other)) and (
                path in own or project.path in _reached_from(project, path)
            ):
                yield path, other

    def modules_below(self, module: Module) -> Iterator[Module]:
        """Yield the modules of the project that one imports, and in turn those that these do."""
        if self.path is not None:
            project = self.project(module)
            assert project.path is not None
            for path in sorted(_reached_from(project, project.path) - {project.path}):
                if (found := project.module(path)) is not None:
                    yield found

    def importers(self, module: Module, names: Collection[str]) -> dict[str, Path]:
        """Return which of the names of a module another one has from it, by `import *` too, with the first of these."""
        found: dict[str, Path] = {}
        if self.path is None or not names:
            return found
        project = self.project(module)
        assert project.path is not None
        for other in project.importers(project.path):
            if (theirs := project.module(other)) is not None:
                for name in _names_taken(project, other, theirs, names):
                    found.setdefault(name, other)
        return found


ALONE = Around()


def initializes(module: Module) -> bool:
    """Return whether a module initializes Apex, or makes an optimizer carry a scaler, as migrated files do."""
    for call in module.calls:
        if last_name(call.func) == "initialize" and _is_of_amp(module, call):
            return True
    return any(
        isinstance(node, ast.Attribute) and node.attr == CARRIED and isinstance(node.ctx, ast.Store)
        for node in module.nodes
    )


def needs_scaler(module: Module) -> bool:
    """Return whether a module scales a loss by Apex, saves its state, or asks an optimizer for its scaler."""
    if any(last_name(call.func) in NEEDED and _is_of_amp(module, call) for call in module.calls):
        return True
    return any(
        isinstance(node, ast.Attribute) and node.attr == CARRIED and isinstance(node.ctx, ast.Load)
        for node in module.nodes
    )


def _scales(module: Module) -> bool:
    return any(last_name(call.func) == "scale_loss" and _is_of_amp(module, call) for call in module.calls)


def _is_of_amp(module: Module, call: ast.Call) -> bool:
    full = module.resolve(call.func) or ""
    if full.startswith("apex.amp.") and full.removeprefix("apex.amp.") in CORE:
        return True
    return isinstance(call.func, ast.Attribute) and last_name(call.func.value) == "amp" and not full


def _reached_from(project: Project, path: Path) -> set[Path]:
    """Return the files that one imports, and in turn those that these do."""
    found: set[Path] = set()
    waiting = [path]
    while waiting and len(found) < MAX_MODULES:
        current = waiting.pop()
        module = project.module(current)
        for each in [] if module is None else project.imported_by(module, current):
            if each not in found:
                found.add(each)
                waiting.append(each)
    return found


def _may_reach(both: set[Path], reached: set[Path]) -> bool:
    """Return whether two files are among those that one reaches, or one of them is and the rest was not looked at."""
    return both <= reached or (len(reached) >= MAX_MODULES and not both.isdisjoint(reached))


def _modules_imported_by(project: Project, module: Module) -> Iterator[Module]:
    assert project.path is not None
    for place in project.imported_by(module, project.path):
        if (found := project.module(place)) is not None:
            yield found


def _is_imported_by_script(project: Project) -> bool:
    """Return whether a module near the one of a project initializes and imports it."""
    assert project.path is not None
    near = (project.path.parent, project.path.parent.parent)
    for other in project.importers(project.path):
        if other.parent in near and (module := project.module(other)) is not None and initializes(module):
            return True
    return False


def _names_taken(project: Project, path: Path, module: Module, names: Collection[str]) -> Iterator[str]:
    """Yield the names of the module of a project that another one imports from it, or reads from it as attributes."""
    own: set[str] = set()  # what the module is called there
    for statement, alias, full in module.imports:
        place, name = project.resolve(path, full) or (None, "")
        if place != project.path:
            continue
        if name == "*":
            used = [node for node in module.nodes if isinstance(node, ast.Name) and node.id in names]
            yield from {node.id for node in used if module.resolve(node, follow=False) is None}
        elif name in names:
            yield name
        elif not name:
            own.add(alias.asname or (full if isinstance(statement, ast.Import) else alias.name))
    for node in module.nodes if own else ():
        if isinstance(node, ast.Attribute) and node.attr in names and dotted_name(node.value) in own:
            yield node.attr


def look_around(path: Path) -> Around:
    """Return what the files around a module have to do with it."""
    return Around(path)
