"""Plan the move of a project's files to the adapter: which files change, and where the adapter lies."""

import ast
import os
import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import unified_diff
from functools import partial
from itertools import islice
from pathlib import Path

from ampcompare.base.files.read import FileFault
from ampcompare.source.amp_names import ADAPTER, public_full_name
from ampcompare.source.document import parse_document, read_source_bytes
from ampcompare.source.find import absolute_path
from ampcompare.source.migrate.adapter.imports import adapt_text, adapter_text
from ampcompare.source.migrate.adapter.places import (
    ImportRoots,
    apex_import_above_sys_path_change,
    is_script,
    is_test_or_example,
)
from ampcompare.source.migrate.core.gradient_hooks import (
    HOOK_UNDER_ADAPTER,
    has_hooks_without_casts_under_adapter,
    hooks_without_casts_under_adapter,
)
from ampcompare.source.migrate.project import FileMigration, migration_with_library_availability_findings
from ampcompare.source.migrate.read.apex_callers import (
    find_apex_callers_of_file,
    find_own_autocast,
    may_call_apex_through_package,
    opens_own_autocast,
    outside_calls_with_model_and_optimizer,
)
from ampcompare.source.migrate.read.early_names import (
    BOUND_EARLY,
    BOUND_EARLY_IN,
    find_early_bindings_of_torch,
    has_early_bindings_of_torch,
)
from ampcompare.source.migrate.read.finding import BY_HAND, NOTE, Finding
from ampcompare.source.migrate.read.fp64 import BY_ADAPTER, find_fp64, makes_fp64
from ampcompare.source.migrate.read.names import ModuleImports
from ampcompare.source.migrate.read.own_apex import find_import_of_own_apex, is_in_copy_of_apex
from ampcompare.source.migrate.rewrite import PROBE_KEPT, Migration
from ampcompare.source.module import Module
from ampcompare.source.project import ImportIndex
from ampcompare.source.syntax import ImportNode, SourceInvalid, argument, last_part

CORE_STAYS = (
    "{} calls apex.amp and stays on Apex, so this stays too: one of them would scale what "
    "the other initialized"
)
UNUSED_STAYS = (
    "{} calls apex.amp and stays on Apex, so this import stays too, and nothing in this file uses it; remove it if no "
    "other file has its name from here"
)
NEVER_SCALED = (
    "no scale_loss is seen in this program: O1 of Apex computes with the weights of the first pass then, since a block "
    "of scale_loss is what ends its casts of weights; the adapter casts them again after each step"
)
LATE = "this stands above the line that lets `sys.path` lead to {}, where the adapter of all files lies; move it below"
WITHOUT_PACKAGE = (
    "this file imports from {0} only here, under a condition; where it runs without that package, {1} is not found, "
    "also if the import of Apex was optional: put a copy of the adapter next to it, and import that there"
)
NOT_INITIALIZED = (
    "no file that is named here calls amp.initialize{}: what calls this must call that of {}, "
    "not that of Apex"
)
EXCEPT_EXAMPLES = ", except tests and examples"
TWO_WAYS = (
    "this file imports {0} as a script does and as a module of its package, and the adapter as {1} alone; import that "
    "in both ways too"
)
OTHER_ROOT = (
    "another file imports this one from the folder {0}, where {1} is not found; import the adapter in both ways, or "
    "let that file import as the others do"
)
CALLED_ELSEWHERE = (
    "{} calls a package that scales losses, or steps, by the installed Apex, which the adapter is not"
)
OWN_AUTOCAST = (
    "{} switches torch.autocast on; where that runs under Apex's O1, both cast; with the adapter, what autocast alone "
    "casts (such as softmax of a tensor, log1p, einsum) has no casts there"
)
EARLY_HOOKS = (
    "{} registers hooks of tensors: products in those that are registered before this import have no casts with the "
    "adapter; import it at the top of the file that starts"
)
RECEIVED = (
    "{} of {} gets model and optimizer: if it scales losses, or saves their state, by the installed Apex, the adapter "
    "is not that one"
)
SETUPS = ("setup.py", "setup.cfg", "pyproject.toml")
SIGNS = (b"apex", b"Apex", b"APEX", b"opt_level")  # without one of these a file is not parsed
INITIALIZES = re.compile(r"\binitialize\b")
NOT_INSTALLED = (
    "{0} is no module of a package: where this project is installed, its setup must name it, as py_modules = "
    "['torch_amp_adapter']"
)
KEPT_FILE = "{} exists and is another text than this version writes; it stays as it is"


@dataclass(frozen=True)
class AdapterFile:
    """The file that is written next to a project.

    Attributes:
        path: where.
        name: full name of its module.
        present: its text, None if there is none yet.
    """

    path: Path
    name: str
    present: str | None

    @property
    def is_new(self) -> bool:
        """Whether it is to be written."""
        return self.present is None

    @property
    def is_edited(self) -> bool:
        """Whether there is a file with another text."""
        return self.present is not None and self.present != adapter_text()

    def diff(self) -> str:
        """Return the file as a patch that `git apply` and `patch -p1` take; "" if there is one."""
        if not self.is_new:
            return ""
        name = self.path.as_posix().removeprefix("./").lstrip("/")
        return "".join(unified_diff([], adapter_text().splitlines(keepends=True), "/dev/null", f"b/{name}"))

    def write(self) -> None:
        """Write the file; an OSError says why it cannot be."""
        self.path.write_text(adapter_text(), encoding="utf-8")


@dataclass(frozen=True)
class AdapterPlan:
    """What becomes of the files of one project, all of which share one adapter."""

    adapter: AdapterFile
    files: list[FileMigration] = field(default_factory=list)

    @property
    def is_left_out_of_installation(self) -> bool:
        """Whether an installation of the packages of a project has the files without the adapter."""
        place = absolute_path(self.adapter.path).parent
        has_setup = any((each / name).is_file() for each in (place, place.parent) for name in SETUPS)
        in_packages = any(
            absolute_path(each.path).parent != place for each in self.files if each.takes_adapter
        )
        return has_setup and in_packages and not (place / "__init__.py").is_file()


def adapter_plans_and_unread_files(
    paths: Iterable[Path], other_paths: Iterable[Path] = (), imports: ImportIndex | None = None
) -> tuple[list[AdapterPlan], list[FileMigration]]:
    """Return what becomes of files, by the folder from which they import, and those that cannot be read or parsed.

    Args:
        paths: files that take the adapter.
        other_paths: further files of the project, whose imports of these say where the adapter is found.
        imports: which file of the project imports which, as one run asks it; None to ask again.
    """
    faults: list[FileMigration] = []
    groups: dict[Path, list[Path]] = {}
    # scripts that import Apex before `sys.path` leads elsewhere, with the import
    early: dict[Path, ast.stmt] = {}
    paths, other_paths = list(paths), list(other_paths)
    imports = ImportIndex() if imports is None else imports
    places = ImportRoots(dict.fromkeys([*paths, *other_paths]), imports)
    for path in paths:
        try:
            content = read_source_bytes(path)
            document = parse_document(path, content)
            text = document.text if any(each in content for each in SIGNS) else ""
            if is_in_copy_of_apex(path):
                continue
            if (own := find_import_of_own_apex(path, text, imports)) is not None:
                faults.append(FileMigration(path, document, Migration(document.text, [own])))
                continue
            migration = adapt_text(text)
            if migration.text != text or migration.findings:
                root = places.import_root_of(path, text)
                groups.setdefault(root, []).append(path)
                statement = apex_import_above_sys_path_change(path, text)
                if statement is not None and not places.has_importer_directly_in(root, path):
                    early[path] = statement
        except (FileFault, SourceInvalid, RecursionError) as fault:
            faults.append(FileMigration(path, fault=str(fault) or "nested too deeply"))
    _share_adapter_with_importers(groups, places)
    _give_early_scripts_own_adapter(groups, early)
    _share_adapter_of_folder_around(groups, places)
    plans = [
        _adapter_plan_of_project(root, places, files, early, imports)
        for root, files in sorted(groups.items())
    ]
    plans = _plans_with_cores_on_apex(plans)
    initializing = [each for each in dict.fromkeys([*paths, *other_paths]) if _may_file_initialize_apex(each)]
    plans = [_plan_noting_initialize_elsewhere(each, initializing) for each in plans]
    return [_plan_with_notes_on_program(each, imports) for each in plans], faults


def _may_file_initialize_apex(path: Path) -> bool:
    """Return whether a file names `amp.initialize`: of Apex, or of an `amp` that is passed to it."""
    try:
        content = read_source_bytes(path)
    except FileFault:
        return False
    return (
        re.search(rb"\binitialize\b" if b"apex" in content else rb"\bamp\.initialize\b", content) is not None
    )


def files_needing_apex_despite_adapter(
    paths: Iterable[Path], imports: ImportIndex | None = None
) -> list[Path]:
    """Return the files that need Apex even with the adapter, or cannot be read."""
    plans, faults = adapter_plans_and_unread_files(paths, imports=imports)
    files = [file for plan in plans for file in plan.files]
    return [each.path for each in (*files, *faults) if each.num_lines_by_hand or each.fault]


def files_taken_off_apex(paths: Iterable[Path]) -> list[Path]:
    """Return the files that the adapter takes off Apex whole; one that imports nothing of Apex is none of them."""
    plans, _ = adapter_plans_and_unread_files(paths)
    return [
        each.path for plan in plans for each in plan.files if each.is_changed and not each.num_lines_by_hand
    ]


def _adapter_plan_of_project(
    root: Path,
    places: ImportRoots,
    paths: list[Path],
    early: Mapping[Path, ast.stmt],
    imports: ImportIndex,
) -> AdapterPlan:
    package = places.package_for_adapter(root, paths)
    name = f"{package}.{ADAPTER}" if package else ADAPTER
    place = root / package / f"{ADAPTER}.py"
    present = place.read_text(encoding="utf-8", errors="replace") if place.is_file() else None
    files = []
    for path in sorted(paths):
        document = parse_document(path, read_source_bytes(path))
        is_inside = package and path.is_relative_to(place.parent)
        depth = len(path.parent.relative_to(place.parent).parts) if is_inside else None
        # a script finds what lies next to it before it changes `sys.path`
        is_beside = path in early and path.parent == place.parent
        own = ADAPTER if is_beside else name
        place_of = partial(imports.find_file_and_name_of_definition, absolute_path(path))
        migration = adapt_text(
            document.text,
            own,
            depth=depth,
            exports=path.name == "__init__.py",
            is_imported=bool(imports.files_importing(absolute_path(path))),
            is_of_project=place_of,
        )
        migration = migration_with_library_availability_findings(path, document.text, migration, imports)
        is_found = path.parent in (root, place.parent) or places.has_importer_directly_in(place.parent, path)
        if path in early and not is_found:
            late = Finding.of_node(early[path], BY_HAND, LATE.format(root.as_posix()))
            migration = _migration_with_findings(migration, [late])
        if own != ADAPTER and ADAPTER in migration.text:
            both = _neighbor_imported_bare_and_packaged(path, document.text, imports)
            start = [Finding(1, 0, BY_HAND, TWO_WAYS.format(both, own))] if both else []
            start += _notes_on_runs_without_package(document.text, own)
            migration = _migration_with_findings(migration, start)
        if re.search(rf"^\s*(?:from|import) {re.escape(own)}\b", migration.text, re.MULTILINE):
            others = places.roots_resolving_module_elsewhere(path, own, place)[:1]
            shown = [os.path.relpath(each, absolute_path(path).parent) for each in others]
            notes = [Finding(1, 0, NOTE, OTHER_ROOT.format(each, own)) for each in shown]
            migration = _migration_with_findings(migration, notes)
        files.append(FileMigration(path, document, migration))
    left = next((each.path.name for each in files if each.num_lines_by_hand and not each.is_changed), None)
    if left is not None:
        files = [_migration_still_asking_for_apex(each, left) for each in files]
    return AdapterPlan(AdapterFile(place, name, present), files)


def _migration_with_findings(migration: Migration, findings: Iterable[Finding]) -> Migration:
    """Return a migration with further findings, all in their order and each once."""
    return replace(migration, findings=sorted({*migration.findings, *findings}))


def _neighbor_imported_bare_and_packaged(path: Path, text: str, imports: ImportIndex) -> str:
    """Return a module next to a file that it imports in a `try` as a script does, else as of its package, or reversed.

    "" for none.
    """
    folder = absolute_path(path).parent
    for node in ast.walk(ast.parse(text)) if "try" in text else ():
        if not isinstance(node, ast.Try):
            continue
        first, second = (
            {
                (each.level, (each.module or "").partition(".")[0])
                for each in block
                if isinstance(each, ast.ImportFrom) and each.level < 2
            }
            for block in (node.body, [each for handler in node.handlers for each in handler.body])
        )
        for level, name in first:
            if name and (1 - level, name) in second and imports.file_of_module_below(folder, name):
                return name
    return ""


def _notes_on_runs_without_package(text: str, adapter_name: str) -> list[Finding]:
    """Return a note for a file that may run outside of its package: it imports all of that under a condition.

    Args:
        adapter_name: the name by which the file imports the adapter, as of a package.
    """
    package, _, _ = adapter_name.rpartition(".")
    tree = ast.parse(text) if package else ast.Module([], [])
    optional = {
        each
        for outer in tree.body
        if isinstance(outer, (ast.If, ast.Try))
        for each in ast.walk(outer)
        if isinstance(each, ImportNode)
    }
    of_package = [each for each in ast.walk(tree) if _is_import_of_package(each, package)]
    if not of_package or any(each not in optional for each in of_package):
        return []
    return [Finding.of_node(of_package[0], NOTE, WITHOUT_PACKAGE.format(package, adapter_name))]


def _is_import_of_package(node: ast.AST, package: str) -> bool:
    """Return whether a node imports from a package, by its name or relatively."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom):
        names = [package] if node.level else [node.module or ""]
    return any(f"{each}.".startswith(f"{package.partition('.')[0]}.") for each in names)


def _plan_noting_initialize_elsewhere(plan: AdapterPlan, initializing: Collection[Path]) -> AdapterPlan:
    """Return a plan with a note on each file whose losses are scaled for optimizers that others initialize.

    What tests and examples of a library do, all of its other callers must do.

    Args:
        initializing: files that may call `amp.initialize`.
    """
    shown = [each for each in initializing if is_test_or_example(each)]
    files = []
    for each in plan.files:
        if len(shown) < len(initializing) or (shown and is_test_or_example(each.path)):
            files.append(each)
            continue
        scaling = [
            node for node, name in _core_uses_with_names(each) if name in ("scale_loss", "master_params")
        ]
        if scaling and each.is_changed and each.migration is not None:
            note = Finding.of_node(
                scaling[0], NOTE, NOT_INITIALIZED.format(EXCEPT_EXAMPLES * bool(shown), plan.adapter.name)
            )
            each = replace(each, migration=_migration_with_findings(each.migration, [note]))
        files.append(each)
    return replace(plan, files=files)


def _plan_with_notes_on_program(plan: AdapterPlan, imports: ImportIndex) -> AdapterPlan:
    """Return a plan with notes, on each `amp.initialize`, on what the program does with it that Apex alone does."""
    files = []
    for each in plan.files:
        calls = [node for node, name in _core_uses_with_names(each) if name == "initialize"]
        if calls and each.is_changed and each.document is not None and each.migration is not None:
            planned = {absolute_path(one.path) for one in plan.files}
            notes = _notes_on_rest_of_program(each, planned, imports)
            each = replace(each, migration=_migration_with_findings(each.migration, notes))
        files.append(each)
    return replace(plan, files=files)


def _notes_on_rest_of_program(
    file: FileMigration, noted_paths: Container[Path], imports: ImportIndex
) -> Iterator[Finding]:
    """Yield notes on what else casts, or calls Apex, where a file that initializes runs.

    Args:
        noted_paths: files of which something is said already.
    """
    assert file.document is not None
    own, module = absolute_path(file.path), Module(file.document.text)
    names = ModuleImports(module)
    uses = [node for node, full in names.uses if public_full_name(full) == "apex.amp.initialize"]
    initialize = next((each for each in map(module.parent, uses) if isinstance(each, ast.Call)), uses[0])
    program = imports.other_files_of_program(own)
    for path in program:
        if path in noted_paths or not imports.is_question_true_of_module(path, may_call_apex_through_package):
            continue
        other = imports.module_of_file(path)
        if other is not None and find_apex_callers_of_file(path, other, imports):
            shown = os.path.relpath(path, own.parent)
            yield Finding.of_node(initialize, NOTE, CALLED_ELSEWHERE.format(shown))
    level = argument(initialize, "opt_level", 3) if isinstance(initialize, ast.Call) else None
    if not isinstance(level, ast.Constant) or level.value == "O1":

        def others_that(holds: Callable[[Module], bool]) -> list[str]:
            found = (path for path in program if imports.is_question_true_of_module(path, holds))
            return [os.path.relpath(path, own.parent) for path in found]

        yield from _notes_on_o1_only_casts(names, initialize, others_that)
    for call, full in outside_calls_with_model_and_optimizer(names):
        if imports.find_file_and_name_of_definition(own, full) is None:
            yield Finding.of_node(call, NOTE, RECEIVED.format(last_part(full), full.partition(".")[0]))


def _notes_on_o1_only_casts(
    names: ModuleImports, initialize: ast.AST, others_that: Callable[[Callable[[Module], bool]], list[str]]
) -> Iterator[Finding]:
    """Yield notes on what O1 casts otherwise than the adapter, in a file or the others that run with it.

    Args:
        names: of the file.
        initialize: its use of `amp.initialize`.
        others_that: returns the other files that hold something, as they are shown.
    """
    module = names.module
    block = find_own_autocast(module)
    places = others_that(opens_own_autocast) if block is None else [f"line {getattr(block, 'lineno', 1)}"]
    for place in places[:1]:
        yield Finding.of_node(initialize, NOTE, OWN_AUTOCAST.format(place))
    for node, name in find_early_bindings_of_torch(module).items():
        yield Finding.of_node(node, NOTE, BOUND_EARLY.format(name))
    for shown in others_that(has_early_bindings_of_torch):
        yield Finding.of_node(initialize, NOTE, BOUND_EARLY_IN.format(shown))
    trains = any(True for _ in module.method_calls("backward"))
    if trains and not _names_scale_loss(module) and not others_that(_names_scale_loss):
        yield Finding.of_node(initialize, NOTE, NEVER_SCALED)
    for node in islice(find_fp64(module), 1):
        yield Finding.of_node(node, NOTE, BY_ADAPTER.format("this line"))
    for shown in others_that(makes_fp64):
        yield Finding.of_node(initialize, NOTE, BY_ADAPTER.format(shown))
    for call, computed in hooks_without_casts_under_adapter(module):
        yield Finding.of_node(call, NOTE, HOOK_UNDER_ADAPTER.format(computed, "here"))
    for shown in others_that(has_hooks_without_casts_under_adapter):
        yield Finding.of_node(initialize, NOTE, HOOK_UNDER_ADAPTER.format("what O1 casts", f"in {shown}"))
    statements = [each for each, _ in names.imports]
    if statements and all(_may_run_after_models_are_made(module, each) for each in statements):
        for place in [
            *["this file"] * _registers_tensor_hooks(module),
            *others_that(_registers_tensor_hooks),
        ][:1]:
            yield Finding.of_node(statements[0], NOTE, EARLY_HOOKS.format(place))


def _names_scale_loss(module: Module) -> bool:
    """Return whether a module names `scale_loss`."""
    return "scale_loss" in module.text


def _may_run_after_models_are_made(module: Module, statement: ast.stmt) -> bool:
    """Return whether models may be there when a statement runs: in a function, or below a call that is assigned."""
    if module.function_around(statement) is not None:
        return True
    above = (each for each in module.tree.body if (each.end_lineno or 0) < statement.lineno)
    return any(isinstance(each, ast.Assign) and isinstance(each.value, ast.Call) for each in above)


def _registers_tensor_hooks(module: Module) -> bool:
    """Return whether a module registers hooks of tensors."""
    return any(True for _ in module.method_calls("register_hook"))


def _migration_still_asking_for_apex(file: FileMigration, name_staying_on_apex: str) -> FileMigration:
    """Return what becomes of a file if another one stays on Apex: one that only asks for Apex goes on doing so."""
    if file.document is None or file.migration is None or file.migration.uses or not file.is_changed:
        return file
    module = Module(file.document.text)
    asking = [each for each, _ in ModuleImports(module).imports if isinstance(module.parent(each), ast.Try)]
    if not asking:
        return file
    kept = Migration(
        file.document.text, [Finding.of_node(asking[0], BY_HAND, PROBE_KEPT.format(name_staying_on_apex))]
    )
    return replace(file, migration=kept)


def _core_uses_with_names(file: FileMigration) -> list[tuple[ast.AST, str]]:
    """Return where a file, as it is before, names functions of `apex.amp`, and which."""
    if file.document is None:
        return []
    names = ModuleImports(Module(file.document.text))
    found = [(node, public_full_name(full)) for node, full in names.uses]
    return [(node, full.removeprefix("apex.amp.")) for node, full in found if full.startswith("apex.amp.")]


def _first_core_staying_on_apex(files: Iterable[FileMigration]) -> str | None:
    """Return the name of the first file that calls `apex.amp` and stays on Apex; None without one."""
    staying = (each for each in files if each.num_lines_by_hand and not each.is_changed)
    return next((each.path.name for each in staying if _core_uses_with_names(each)), None)


def _does_plan_initialize_apex(plan: AdapterPlan) -> bool:
    documents = [each.document for each in plan.files if each.document is not None]
    return any(INITIALIZES.search(each.text) for each in documents)


def _plans_with_cores_on_apex(plans: list[AdapterPlan]) -> list[AdapterPlan]:
    """Return what becomes of plans where a file that calls `apex.amp` stays on Apex.

    So do all that share its adapter, and those of another one that leave `initialize` to others.
    """
    staying = [_first_core_staying_on_apex(plan.files) for plan in plans]
    of_any = next(filter(None, staying), None)
    result = []
    for plan, own in zip(plans, staying, strict=True):
        left = own if _does_plan_initialize_apex(plan) else own or of_any
        files = (
            plan.files if left is None else [_migration_with_core_on_apex(each, left) for each in plan.files]
        )
        result.append(replace(plan, files=files))
    return result


def _migration_with_core_on_apex(file: FileMigration, name_staying_on_apex: str) -> FileMigration:
    """Return what becomes of a file if the core of another one stays on Apex: its own stays too.

    So does an import of `apex.amp` that the file does not use.
    """
    if not file.is_changed or file.document is None:
        return file
    if uses := _core_uses_with_names(file):
        reason = Finding.of_node(uses[0][0], BY_HAND, CORE_STAYS.format(name_staying_on_apex))
        return replace(file, migration=Migration(file.document.text, [reason]))
    names = ModuleImports(Module(file.document.text))
    if names.uses or not all(_imports_only_amp_or_apex(statement) for statement, _ in names.imports):
        return file
    unused = [
        Finding.of_node(each, BY_HAND, UNUSED_STAYS.format(name_staying_on_apex))
        for each, _ in names.imports[:1]
    ]
    return replace(file, migration=Migration(file.document.text, unused))


def _imports_only_amp_or_apex(statement: ImportNode) -> bool:
    """Return whether an import has nothing of Apex but `amp`, or Apex as a whole."""
    package = statement.module if isinstance(statement, ast.ImportFrom) else None
    return all(
        f"{package}.{each.name}" == "apex.amp" or each.name in ("apex", "apex.amp")
        for each in statement.names
    )


def _share_adapter_with_importers(groups: dict[Path, list[Path]], places: ImportRoots) -> None:
    """Let files that import modules of a folder which only `sys.path` leads to share the adapter that lies there."""
    for root in sorted(groups, key=lambda each: len(groups[each]), reverse=True):
        for other in [each for each in groups if each != root and root in groups]:
            joining = [path for path in groups[other] if places.imports_module_only_below(path, root)]
            groups[root] += joining
            groups[other] = [path for path in groups[other] if path not in joining]
            if not groups[other]:
                del groups[other]


def _give_early_scripts_own_adapter(groups: dict[Path, list[Path]], early_scripts: Collection[Path]) -> None:
    """Give scripts that import Apex before `sys.path` leads elsewhere an adapter next to them, if no other file does.

    Args:
        early_scripts: these scripts.
    """
    for root, files in list(groups.items()):
        if {path.parent for path in files} != {root} and all(path in early_scripts for path in files):
            del groups[root]
            for path in files:
                groups.setdefault(path.parent, []).append(path)


def _share_adapter_of_folder_around(groups: dict[Path, list[Path]], places: ImportRoots) -> None:
    """Let a folder that no script starts in, nor any import leads to, share the adapter of a folder above it."""
    for root in sorted(groups, key=lambda each: len(each.parts), reverse=True):
        above = next((each for each in root.parents if each in groups), None)
        if above is None or any(is_script(path) for path in groups[root]):
            continue
        if not any(places.is_file_or_sibling_imported_from(root, path) for path in groups[root]):
            groups[above] += groups.pop(root)
