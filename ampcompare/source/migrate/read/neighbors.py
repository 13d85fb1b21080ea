"""What the files around a module say about it: whether training begins in one of them and goes on in another."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ampcompare.source.amp_names import ADAPTER, APEX, CORE
from ampcompare.source.index import Index
from ampcompare.source.migrate.read.rebinding import OF_ATTRIBUTES
from ampcompare.source.module import Module
from ampcompare.source.project import MAX_MODULES, ImportIndex, Project, is_module_importing_adapter
from ampcompare.source.syntax import argument, dotted_name, is_literal, last_name

# the attribute of an optimizer by which files that an earlier version migrated share a scaler
CARRIED = "grad_scaler"
INDEXES: dict[frozenset[Module], Index] = {}  # of the projects that were looked at last
MAX_INDEXES = 4
NEEDED = frozenset({"scale_loss", "master_params", "state_dict", "load_state_dict"})


@dataclass(frozen=True)
class Neighbors:
    """The other modules of the project that import a module, are imported by it, or share a training with it.

    Attributes:
        path: of the module; None if it is text alone.
        imports: which file of the project imports which, as one run asks it.
    """

    path: Path | None = None
    imports: ImportIndex = field(default_factory=ImportIndex, compare=False, repr=False)
    _projects: dict[Module, Project] = field(default_factory=dict, compare=False, repr=False)

    def project_of(self, module: Module) -> Project:
        """Return the project in which a module is the file of this path."""
        if self.path is None:
            return Project(module=module)
        return self._projects.setdefault(module, Project(self.path, module, self.imports))

    def _imports_and_path(self, module: Module) -> tuple[ImportIndex, Path] | None:
        """Return which file imports which where a module has this path, and the path; None for text alone."""
        project = self.project_of(module)
        return None if project.path is None else (project.imports, project.path)

    def index_of(self, module: Module) -> Index:
        """Return the calls of a module, and of those around it."""
        project = self.project_of(module)
        if project.path is None:
            return Index(module)
        modules = frozenset([module, *(each for _, each in project.modules_connected_by_imports())])
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
        return Project(self.path, imports=self.imports).module_of_text(text)

    def core_modules_sharing_training(self, module: Module) -> Iterator[tuple[Path, Module]]:
        """Yield the other modules with a part of Apex's core through which the same training may go.

        One imports the other, or a third one both; where a file imports too many to look at, it may import any.
        """
        if (place := self._imports_and_path(module)) is None:
            return
        imports, own = place
        around = imports.files_connected_by_imports(own)
        reached = [{path, *imports.files_imported_transitively(path)} for path in (*around, own)]
        for path in around:
            if imports.is_question_true_of_module(path, has_part_of_apex_core):
                both = {path, own}
                if any(_may_reach_both(both, theirs) for theirs in reached):
                    yield from self.project_of(module).modules_of_files([path])

    def paths_sharing_training(self, module: Module, *, everywhere: bool) -> Iterator[Path]:
        """Yield the other files that may have a part of the same training.

        Two that initialize and scale a loss each have one of their own, unless one of them leads to the other.

        Args:
            everywhere: whether all of the project may, as where a registry or a string leads to them.
        """
        if (place := self._imports_and_path(module)) is None:
            return
        imports, own = place
        for path, _ in self.core_modules_sharing_training(module):
            apart = own not in imports.files_imported_transitively(
                path
            ) and path not in imports.files_imported_transitively(own)
            if not (
                apart
                and _initializes_and_scales_loss(module)
                and imports.is_question_true_of_module(path, _initializes_and_scales_loss)
            ):
                yield path
        for path in imports.project_files_importing_words(own, frozenset(APEX)) if everywhere else ():
            if path != own and imports.is_question_true_of_module(path, needs_scaler):
                yield path

    def core_modules_checking_apex(self, module: Module) -> Iterator[tuple[Path, Module]]:
        """Yield the modules with a part of Apex's core that may ask whether Apex is there where a module does.

        They import it, if only through other files, or it imports them, as a test does.
        """
        if (place := self._imports_and_path(module)) is None:
            return
        imports, own = place
        checking = [
            path
            for path in imports.files_connected_by_imports(own)
            if imports.is_question_true_of_module(path, has_part_of_apex_core)
            and (
                path in imports.files_imported_transitively(own)
                or own in imports.files_imported_transitively(path)
            )
        ]
        yield from self.project_of(module).modules_of_files(checking)

    def modules_importing_transitively(self, module: Module) -> Iterator[tuple[Path, Module]]:
        """Yield the modules of the project that import one, and in turn those that import these."""
        if place := self._imports_and_path(module):
            imports, own = place
            yield from self.project_of(module).modules_of_files(imports.files_importing_transitively(own))

    def modules_imported_transitively(self, module: Module) -> Iterator[Module]:
        """Yield the modules of the project that one imports, and in turn those that these do."""
        if place := self._imports_and_path(module):
            imports, own = place
            files = sorted(imports.files_imported_transitively(own) - {own})
            yield from (each for _, each in self.project_of(module).modules_of_files(files))

    def other_files_of_program(self, module: Module) -> list[Path]:
        """Return the other files that run where a module does, as `ImportIndex` finds them."""
        place = self._imports_and_path(module)
        return [] if place is None else place[0].other_files_of_program(place[1])

    def other_modules_of_program(self, module: Module) -> Iterator[tuple[Path, Module]]:
        """Yield the modules of the other files that run where a module does."""
        yield from self.project_of(module).modules_of_files(self.other_files_of_program(module))

    def other_files_of_program_that(self, module: Module, question: Callable[[Module], bool]) -> list[Path]:
        """Return the other files that run where a module does and of whose modules a question is true."""
        program = self.other_files_of_program(module)
        return [path for path in program if self.imports.is_question_true_of_module(path, question)]

    def runs_with_adapter(self, module: Module) -> bool:
        """Return whether a module, or another file that runs with it, imports the adapter."""
        return self.user_of_adapter(module) is not None

    def user_of_adapter(self, module: Module) -> Path | None:
        """Return the first file that imports the adapter: that of a module, or another one that runs with it."""
        if is_module_importing_adapter(module):
            return self.path or Path()
        place = self._imports_and_path(module)
        if place is None or not place[0].project_files_importing_words(place[1], frozenset({ADAPTER})):
            return None  # before all of the program is looked at
        return next(filter(place[0].imports_adapter, self.other_files_of_program(module)), None)

    def importers_of_names(self, module: Module, names: Collection[str]) -> dict[str, Path]:
        """Return which of the names of a module another one has from it, by `import *` too, with the first of these."""
        found: dict[str, Path] = {}
        if not names or (place := self._imports_and_path(module)) is None:
            return found
        imports, own = place
        project = self.project_of(module)
        for other, theirs in project.modules_of_files(imports.files_importing(own)):
            for name in _names_imported_or_read_from(project, other, theirs, names):
                found.setdefault(name, other)
        return found


ALONE = Neighbors()


def initializes_apex_or_scaler(module: Module) -> bool:
    """Return whether a module initializes Apex, or makes an optimizer carry a scaler, as migrated files do."""
    for call in module.calls:
        if last_name(call.func) == "initialize" and _may_be_call_of_amp(module, call):
            return True
    return any(
        isinstance(node, ast.Attribute) and node.attr == CARRIED and isinstance(node.ctx, ast.Store)
        for node in module.nodes
    )


def needs_scaler(module: Module) -> bool:
    """Return whether a module scales a loss by Apex, saves its state, or asks an optimizer for its scaler."""
    if any(last_name(call.func) in NEEDED and _may_be_call_of_amp(module, call) for call in module.calls):
        return True
    return any(
        isinstance(node, ast.Attribute) and node.attr == CARRIED and isinstance(node.ctx, ast.Load)
        for node in module.nodes
    )


def has_part_of_apex_core(module: Module) -> bool:
    """Return whether a module initializes Apex, or needs what one that does has made."""
    return initializes_apex_or_scaler(module) or needs_scaler(module)


def _initializes_and_scales_loss(module: Module) -> bool:
    """Return whether a module initializes and scales a loss, so that it may train without another one."""
    scales = any(
        last_name(call.func) == "scale_loss" and _may_be_call_of_amp(module, call) for call in module.calls
    )
    return scales and initializes_apex_or_scaler(module)


def _may_be_call_of_amp(module: Module, call: ast.Call) -> bool:
    full = module.resolve(call.func) or ""
    if full.startswith("apex.amp.") and full.removeprefix("apex.amp.") in CORE:
        return True
    return isinstance(call.func, ast.Attribute) and last_name(call.func.value) == "amp" and not full


def _may_reach_both(two_files: set[Path], reached_files: set[Path]) -> bool:
    """Return whether two files are among those that one reaches, or one of them is and the rest was not looked at."""
    return two_files <= reached_files or (
        len(reached_files) >= MAX_MODULES and not two_files.isdisjoint(reached_files)
    )


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
        elif isinstance(node, ast.Call) and node.args and dotted_name(node.args[0]) in own:
            given = argument(node, "name", 1) if last_name(node.func) in OF_ATTRIBUTES else None
            yield from [each for each in names if is_literal(given, each)]
