"""What the files around a module say about it: whether training begins in one of them and goes on in another."""

from __future__ import annotations

import ast
import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ampcompare.source.amp_names import ADAPTER, APEX, CORE, is_of_adapter
from ampcompare.source.index import Index
from ampcompare.source.module import Module
from ampcompare.source.project import MAX_MODULES, Project
from ampcompare.source.syntax import dotted_name, last_name

# the attribute of an optimizer by which files that an earlier version migrated share a scaler
CARRIED = "grad_scaler"
INDEXES: dict[frozenset[Module], Index] = {}  # of the projects that were looked at last
MAX_INDEXES = 4
NEEDED = frozenset({"scale_loss", "master_params", "state_dict", "load_state_dict"})


@dataclass(frozen=True)
class Neighbors:
    """What other modules have to do with a module.

    Attributes:
        path: of the module; None if it is text alone.
        within: folders and files that were named together, as those of one project.
    """

    path: Path | None = None
    within: tuple[Path, ...] = ()
    _projects: dict[Module, Project] = field(default_factory=dict, compare=False, repr=False)

    def project_of(self, module: Module) -> Project:
        """Return the project in which a module is the file of this path."""
        return self._projects.setdefault(module, Project(self.path, module, self.within))

    def index_of(self, module: Module) -> Index:
        """Return the calls of a module, and of those around it."""
        project = self.project_of(module)
        if project.path is None:
            return Index(module)
        modules = frozenset([module, *(each for _, each in project.modules_around(project.path))])
        if modules not in INDEXES:
            if len(INDEXES) >= MAX_INDEXES:
                INDEXES.clear()
            INDEXES[modules] = Index(module, project)
        return INDEXES[modules].index_seen_from(module)

    def relative_path_of(self, path: Path) -> str:
        """Return how another file is called from the folder of the module."""
        return path.name if self.path is None else os.path.relpath(path, self.path.parent)

    def module_of_text(self, text: str) -> Module:
        """Return the module of a text, that of the file where it is its own."""
        return Project(self.path).module_of_text(text)

    def modules_linked_to(self, module: Module) -> Iterator[tuple[Path, Module]]:
        """Yield the other modules with a part of Apex's core through which the same training may go.

        One imports the other, or a third one both; where a file imports too many to look at, it may import any.
        """
        if self.path is None:
            return
        project = self.project_of(module)
        assert project.path is not None
        around = dict(project.modules_around(project.path))
        reached = {path: _files_imported_directly_or_not(project, path) for path in (*around, project.path)}
        for path, other in around.items():
            if initializes_apex(other) or needs_scaler(other):
                both = {path, project.path}
                if any(_may_reach_both(both, {one, *theirs}) for one, theirs in reached.items()):
                    yield path, other

    def paths_sharing_training(self, module: Module, *, everywhere: bool) -> Iterator[Path]:
        """Yield the other files that may have a part of the same training.

        Two that initialize and scale a loss each have one of their own, unless one of them leads to the other.

        Args:
            everywhere: whether all of the project may, as where a registry or a string leads to them.
        """
        if self.path is None:
            return
        project = self.project_of(module)
        assert project.path is not None
        for path, other in self.modules_linked_to(module):
            apart = project.path not in _files_imported_directly_or_not(
                project, path
            ) and path not in _files_imported_directly_or_not(project, project.path)
            if not (apart and _trains_alone(module) and _trains_alone(other)):
                yield path
        for path, other in project.modules_with(project.path, frozenset(APEX)) if everywhere else ():
            if path != project.path and needs_scaler(other):
                yield path

    def modules_checking_apex(self, module: Module) -> Iterator[tuple[Path, Module]]:
        """Yield the modules with a part of Apex's core that may ask whether Apex is there where a module does.

        They import it, if only through other files, or it imports them, as a test does.
        """
        if self.path is None:
            return
        project = self.project_of(module)
        assert project.path is not None
        own = _files_imported_directly_or_not(project, project.path)
        for path, other in project.modules_around(project.path):
            if (initializes_apex(other) or needs_scaler(other)) and (
                path in own or project.path in _files_imported_directly_or_not(project, path)
            ):
                yield path, other

    def modules_above(self, module: Module) -> Iterator[tuple[Path, Module]]:
        """Yield the modules of the project that import one, and in turn those that import these."""
        if self.path is None:
            return
        project = self.project_of(module)
        assert project.path is not None
        seen, waiting = {project.path}, [project.path]
        while waiting and len(seen) < MAX_MODULES:
            for other in project.files_importing(waiting.pop()):
                if other not in seen and (found := project.module_of_file(other)) is not None:
                    seen.add(other)
                    waiting.append(other)
                    yield other, found

    def modules_below(self, module: Module) -> Iterator[Module]:
        """Yield the modules of the project that one imports, and in turn those that these do."""
        if self.path is not None:
            project = self.project_of(module)
            assert project.path is not None
            for path in sorted(_files_imported_directly_or_not(project, project.path) - {project.path}):
                if (found := project.module_of_file(path)) is not None:
                    yield found

    def modules_of_program(self, module: Module) -> Iterator[tuple[Path, Module]]:
        """Yield the other files that run where a module does: what it imports, what imports it, and all of theirs."""
        if self.path is not None:
            project = self.project_of(module)
            assert project.path is not None
            found = _files_imported_directly_or_not(project, project.path)
            for path, _ in self.modules_above(module):
                found |= {path} | _files_imported_directly_or_not(project, path)
            for path in sorted(found - {project.path}):
                if (other := project.module_of_file(path)) is not None:
                    yield path, other

    def runs_with_adapter(self, module: Module) -> bool:
        """Return whether a module, or another file that runs with it, imports the adapter."""
        if any(is_of_adapter(full) for _, _, full in module.imports):
            return True
        project = self.project_of(module)
        if project.path is None or not any(project.modules_with(project.path, frozenset({ADAPTER}))):
            return False  # before all of the program is looked at
        program = (each for _, each in self.modules_of_program(module))
        return any(is_of_adapter(full) for each in program for _, _, full in each.imports)

    def importers_of_names(self, module: Module, names: Collection[str]) -> dict[str, Path]:
        """Return which of the names of a module another one has from it, by `import *` too, with the first of these."""
        found: dict[str, Path] = {}
        if self.path is None or not names:
            return found
        project = self.project_of(module)
        assert project.path is not None
        for other in project.files_importing(project.path):
            if (theirs := project.module_of_file(other)) is not None:
                for name in _names_imported_or_read_from(project, other, theirs, names):
                    found.setdefault(name, other)
        return found


ALONE = Neighbors()


def initializes_apex(module: Module) -> bool:
    """Return whether a module initializes Apex, or makes an optimizer carry a scaler, as migrated files do."""
    for call in module.calls:
        if last_name(call.func) == "initialize" and _is_call_of_amp(module, call):
            return True
    return any(
        isinstance(node, ast.Attribute) and node.attr == CARRIED and isinstance(node.ctx, ast.Store)
        for node in module.nodes
    )


def needs_scaler(module: Module) -> bool:
    """Return whether a module scales a loss by Apex, saves its state, or asks an optimizer for its scaler."""
    if any(last_name(call.func) in NEEDED and _is_call_of_amp(module, call) for call in module.calls):
        return True
    return any(
        isinstance(node, ast.Attribute) and node.attr == CARRIED and isinstance(node.ctx, ast.Load)
        for node in module.nodes
    )


def _trains_alone(module: Module) -> bool:
    """Return whether a module initializes and scales a loss, so that it may train without another one."""
    scales = any(
        last_name(call.func) == "scale_loss" and _is_call_of_amp(module, call) for call in module.calls
    )
    return scales and initializes_apex(module)


def _is_call_of_amp(module: Module, call: ast.Call) -> bool:
    full = module.resolve(call.func) or ""
    if full.startswith("apex.amp.") and full.removeprefix("apex.amp.") in CORE:
        return True
    return isinstance(call.func, ast.Attribute) and last_name(call.func.value) == "amp" and not full


def _files_imported_directly_or_not(project: Project, path: Path) -> set[Path]:
    """Return the files that one imports, and in turn those that these do."""
    found: set[Path] = set()
    waiting = [path]
    while waiting and len(found) < MAX_MODULES:
        current = waiting.pop()
        module = project.module_of_file(current)
        for each in [] if module is None else project.files_imported_by(module, current):
            if each not in found:
                found.add(each)
                waiting.append(each)
    return found


def _may_reach_both(both: set[Path], reached: set[Path]) -> bool:
    """Return whether two files are among those that one reaches, or one of them is and the rest was not looked at."""
    return both <= reached or (len(reached) >= MAX_MODULES and not both.isdisjoint(reached))


def _names_imported_or_read_from(
    project: Project, path: Path, module: Module, names: Collection[str]
) -> Iterator[str]:
    """Yield the names of the module of a project that another one imports from it, or reads from it as attributes."""
    own: set[str] = set()  # what the module is called there
    for statement, alias, full in module.imports:
        place, name = project.find_file_and_name_of_definition(path, full) or (None, "")
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


def neighbors_of_file(path: Path, within: Iterable[str | Path] = ()) -> Neighbors:
    """Return what the files around a module have to do with it.

    Args:
        within: folders and files that were named together, as those of one project.
    """
    return Neighbors(path, tuple(map(Path, within)))
