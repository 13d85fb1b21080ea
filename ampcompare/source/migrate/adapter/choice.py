"""Choose between a rewrite and the adapter, which trainings take by default, with all that runs with them."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ampcompare.source.amp_names import public_full_name
from ampcompare.source.find import absolute_path
from ampcompare.source.migrate.adapter.project import (
    AdapterFile,
    AdapterPlan,
    adapter_plans_and_unread_files,
    files_needing_apex_despite_adapter,
)
from ampcompare.source.migrate.ordinary.training import find_what_is_not_ordinary, what_is_not_proven
from ampcompare.source.migrate.project import FileMigration, find_numerical_lint_mistakes, migrate_file
from ampcompare.source.migrate.read.finding import BY_HAND, NOTE, Finding, without_advice
from ampcompare.source.migrate.read.names import ModuleImports
from ampcompare.source.migrate.read.neighbors import Neighbors, has_part_of_apex_core
from ampcompare.source.migrate.rewrite import Migration
from ampcompare.source.module import Module
from ampcompare.source.project import ImportIndex
from ampcompare.source.versions import Versions

RewrittenTrainings = Literal["none", "ordinary", "all"]
TAKES = "{0} takes the adapter: {1}"
ORDINARY = "nothing in its text speaks against a rewrite for torch.amp, which --rewrite makes"
NOT_PROVEN = "the text does not prove this right: {0}"
FOLLOWS = "it runs with {0}, which is not rewritten"
LEFT_BY_HAND = "a rewrite would leave this by hand: {0}"
STAYS_WITH = "{0} stays on Apex, whose casts both run with, so this file stays too"
STAYS_BESIDE = "{0} stays on Apex, and whether this runs with its casts is not seen, so this file stays too"
FOLLOWS_UNSEEN = "{0} next to it {1}, and whether they run together is not seen"
HAS_ADAPTER = "it runs with {0}, which has the adapter"


@dataclass(frozen=True)
class MigrationChoice:
    """Which files are rewritten for torch.amp, and which take the adapter, with the reasons.

    Attributes:
        rewritten: files that are rewritten for torch.amp, or in which nothing is to be done.
        plans: of the files that take the adapter.
        reasons: why a file takes the adapter, by its path, with the line.
    """

    rewritten: list[FileMigration] = field(default_factory=list)
    plans: list[AdapterPlan] = field(default_factory=list)
    reasons: dict[Path, str] = field(default_factory=dict)

    @property
    def adapters(self) -> list[AdapterFile]:
        """The files of the adapter that are needed."""
        return [plan.adapter for plan in self.plans if any(each.takes_adapter for each in plan.files)]

    @property
    def files(self) -> list[FileMigration]:
        """What becomes of each file."""
        return [*self.rewritten, *(each for plan in self.plans for each in plan.files)]

    @property
    def imports_apex(self) -> bool:
        """Whether a file still imports something of Apex by its name."""
        texts = [each.migration.text for each in self.files if each.migration is not None]
        return any(ModuleImports(Module(each)).imports for each in texts)

    def paths_staying_on_apex(self) -> list[Path]:
        """Return the files that wait for a hand and import Apex, without those that run with the adapter."""
        on_adapter = [each for plan in self.plans for each in plan.files]
        runs = {each.path for each in on_adapter if each.migration is not None and not each.migration.left}
        return [
            each.path
            for each in self.files
            if each.num_lines_by_hand and each.path not in runs and each.imports_apex
        ]

    def reason_lines(self) -> list[str]:
        """Return for each file that takes the adapter why it does."""
        return [TAKES.format(path, reason) for path, reason in self.reasons.items()]


def choose_rewrite_or_adapter(
    paths: Iterable[Path],
    *,
    rewritten: RewrittenTrainings = "none",
    must_parse: Callable[[Path], bool] = lambda path: False,
    versions: Versions | None = None,
    within: Iterable[str | Path] = (),
) -> MigrationChoice:
    """Return what becomes of files: a rewrite or the adapter, each for all that runs with a training.

    Args:
        paths: of scripts, modules and notebooks.
        rewritten: which trainings are: "none", "ordinary" ones, which their text proves right, or "all" that nothing
            speaks against. Others take the adapter. What runs with no training is rewritten in any case.
        must_parse: whether a file must be Python even if it does not use Apex.
        versions: of the libraries that the result is for; by default those that are installed.
        within: folders and files that were named together, as those of one project.
    """
    imports = ImportIndex(within)
    results = [
        migrate_file(
            path,
            must_parse=must_parse(path),
            examine=find_numerical_lint_mistakes,
            versions=versions,
            imports=imports,
        )
        for path in paths
    ]
    if rewritten == "all":
        staying = _results_with_cast_requests_on_apex(results, imports)
        return MigrationChoice([_with_what_is_not_proven(each) for each in staying])
    known = {absolute_path(each.path): each for each in results}
    exceptions: dict[Path, str] = {}

    def why(path: Path) -> str:
        if path not in exceptions:
            result = known.get(path) or migrate_file(
                path, examine=find_numerical_lint_mistakes, versions=versions, imports=imports
            )
            exceptions[path] = _text_on_what_is_not_ordinary(result, imports)
            if rewritten == "none" and result.migration is not None and result.migration.core is not None:
                exceptions[path] = exceptions[path] or ORDINARY
        return exceptions[path]

    reasons: dict[Path, str] = {}
    for result in results:
        if result.fault is None and result.migration is not None:
            reason = why(absolute_path(result.path)) or _why_adapter_follows_others(result, imports, why)
            if reason:
                reasons[result.path] = reason
    return _choice_with_neighbors_on_adapter(results, reasons, imports)


def _choice_with_neighbors_on_adapter(
    results: list[FileMigration], reasons: dict[Path, str], imports: ImportIndex
) -> MigrationChoice:
    """Return the choice where some files take the adapter, with those next to them that may run with them.

    Args:
        results: of a rewrite of all.
        reasons: why some of them take the adapter instead.
    """
    others = _paths_apart_from_trainings(results, reasons, imports)
    plans, faults = adapter_plans_and_unread_files(
        [*reasons, *others], [each.path for each in results], imports
    )
    plans = [
        plan
        for plan in plans
        if plan.adapter.present is not None or any(each.path in reasons for each in plan.files)
    ]
    for plan in plans:
        first, words = _training_and_what_it_does(plan, reasons)
        for each in plan.files:
            beside = os.path.relpath(first, each.path.parent)
            reasons.setdefault(each.path, FOLLOWS_UNSEEN.format(beside, words))
    files = [each for plan in plans for each in plan.files]
    rest = [each for each in results if each.path not in {file.path for file in files}]
    # a file that has Apex's functions through another one has them from the adapter then
    if plans or _does_any_import_adapter(results, imports):
        rest = [FileMigration(each.path) if each.path in reasons else each for each in rest]
    rest = _results_with_cast_requests_on_apex(rest, imports, files)
    changed = {each.path for each in files if each.takes_adapter}
    return MigrationChoice(
        [*faults, *rest], plans, {path: reason for path, reason in reasons.items() if path in changed}
    )


def _training_and_what_it_does(plan: AdapterPlan, reasons: Container[Path]) -> tuple[Path, str]:
    """Return the file of a plan that the others follow, which has a reason of its own, and what it does."""
    of_training = [each for each in plan.files if each.path in reasons]
    moving = [each.path for each in of_training if each.takes_adapter]
    words = "does" if moving else "is not rewritten" if of_training else "is there"
    return [*moving, *(each.path for each in of_training), plan.adapter.path][0], words


def _paths_apart_from_trainings(
    results: list[FileMigration], reasons: Container[Path], imports: ImportIndex
) -> list[Path]:
    """Return files that no training is seen to run with, and that may be reached in another way.

    None where nothing takes the adapter, nor has it.

    Args:
        reasons: of files that take it.
    """
    if not _does_any_import_adapter(results, imports) and not any(each.path in reasons for each in results):
        return []
    return [
        each.path for each in results if each.path not in reasons and _is_apart_from_trainings(each, imports)
    ]


def _does_any_import_adapter(results: list[FileMigration], imports: ImportIndex) -> bool:
    """Return whether one of some files imports the adapter, as an earlier run left it."""
    return any(imports.imports_adapter(absolute_path(each.path)) for each in results)


def choose_adapter_for_all(paths: Iterable[Path]) -> MigrationChoice:
    """Return what becomes of files that all take the adapter."""
    plans, faults = adapter_plans_and_unread_files(paths)
    return MigrationChoice(faults, plans)


def _text_on_what_is_not_ordinary(result: FileMigration, imports: ImportIndex) -> str:
    """Return why the training of a file takes the adapter; "" for an ordinary one, and for a file without."""
    migration, document = result.migration, result.document
    if migration is None or document is None:
        return ""
    found: Finding | None = None
    if result.num_lines_by_hand and (
        not migration.whole
        or migration.core is not None
        or not files_needing_apex_despite_adapter([result.path], imports)
    ):
        found = migration.left_by_hand[0]
        # What a message advises is for a rewrite; of a file without a core, it may be that of other files.
        reason = without_advice(found.message)
        is_without_core = migration.whole and migration.core is None
        found = replace(found, message=LEFT_BY_HAND.format(reason) if is_without_core else reason)
    elif migration.core is not None:
        found = find_what_is_not_ordinary(migration.core, migration, document.text)
    return (
        ""
        if found is None
        else f"line {document.position_for_user(found.line, found.column).line}: {found.message}"
    )


def _with_what_is_not_proven(result: FileMigration) -> FileMigration:
    """Return what becomes of a file that is rewritten, with a note on each thing that keeps it from being ordinary."""
    migration, document = result.migration, result.document
    if migration is None or document is None or migration.core is None or not result.is_changed:
        return result
    notes = [
        replace(each, kind=NOTE, message=NOT_PROVEN.format(each.message))
        for each in what_is_not_proven(migration.core, document.text)
    ]
    return replace(result, migration=replace(migration, findings=sorted({*migration.findings, *notes})))


def _why_adapter_follows_others(
    result: FileMigration, imports: ImportIndex, why: Callable[[Path], str]
) -> str:
    """Return why a file takes the adapter as a training does that runs with it; "" if none does."""
    for path in _files_with_core_around(result, imports):
        if why(path):
            return FOLLOWS.format(os.path.relpath(path, absolute_path(result.path).parent))
    around, module = _neighbors_and_module(result, imports)
    # as an earlier run left it
    if (user := around.user_of_adapter(module)) is not None:
        return HAS_ADAPTER.format(around.relative_path_of(user))
    return ""


def _results_with_cast_requests_on_apex(
    results: list[FileMigration], imports: ImportIndex, others: Iterable[FileMigration] = ()
) -> list[FileMigration]:
    """Return results in which functions stay decorated for Apex where a program that may run them stays on it.

    Other trainings that run such functions stay too.

    Args:
        results: of files that do not take the adapter.
        imports: of the project.
        others: of files that take the adapter, or stay since others do.
    """
    staying = {absolute_path(each.path) for each in (*results, *others) if _lets_apex_still_cast(each)}
    if not staying:
        return results
    results = [
        _unchanged_if_others_stay(each, staying, imports) if _find_cast_request(each) is not None else each
        for each in results
    ]
    kept = {absolute_path(each.path) for each in results if not each.is_changed and _find_cast_request(each)}
    return [
        _unchanged_if_others_stay(each, kept, imports)
        if each.migration is not None and each.migration.core is not None
        else each
        for each in results
    ]


def _lets_apex_still_cast(result: FileMigration) -> bool:
    """Return whether the result for a file still lets Apex cast."""
    if result.migration is None or not result.num_lines_by_hand:
        return False
    uses = ModuleImports(Module(result.migration.text)).uses
    return any(public_full_name(full) in ("apex.amp.init", "apex.amp.initialize") for _, full in uses)


def _find_cast_request(result: FileMigration) -> ast.AST | None:
    """Return the first place at which a file asks Apex to cast what a function gets; None without one."""
    if result.document is None or result.migration is None or "_function" not in result.document.text:
        return None
    uses = ModuleImports(Module(result.document.text)).uses
    return next(
        (node for node, full in uses if full.startswith("apex.amp.") and full.endswith("_function")), None
    )


def _unchanged_if_others_stay(
    result: FileMigration, staying: set[Path], imports: ImportIndex
) -> FileMigration:
    """Return what becomes of a file that stays as it is if one of some others, which stay, may run with it."""
    if not staying or not result.is_changed or result.document is None:
        return result
    around, module = _neighbors_and_module(result, imports)
    left = next((path for path in around.other_files_of_program(module) if path in staying), None)
    reason = STAYS_WITH
    if left is None and _is_apart_from_trainings(result, imports):
        left, reason = min(staying), STAYS_BESIDE
    if left is None:
        return result
    place = _find_cast_request(result) or next(node for node, _ in ModuleImports(module).uses)
    finding = Finding.of_node(place, BY_HAND, reason.format(around.relative_path_of(left)))
    return replace(result, migration=Migration(result.document.text, [finding]))


def _files_with_core_around(result: FileMigration, imports: ImportIndex) -> list[Path]:
    """Return the other files with a part of Apex's core that run where a file does."""
    around, module = _neighbors_and_module(result, imports)
    return around.other_files_of_program_that(module, has_part_of_apex_core)


def _neighbors_and_module(result: FileMigration, imports: ImportIndex) -> tuple[Neighbors, Module]:
    """Return what is around a file that was read, and its module."""
    assert result.document is not None
    around = Neighbors(result.path, imports)
    return around, around.module_of_text(result.document.text)


def _is_apart_from_trainings(result: FileMigration, imports: ImportIndex) -> bool:
    """Return whether a file has something of Apex, but no core, and no training is seen to run with it."""
    migration = result.migration
    if migration is None or result.fault is not None or not result.is_changed:
        return False
    return migration.core is None and not _files_with_core_around(result, imports)
