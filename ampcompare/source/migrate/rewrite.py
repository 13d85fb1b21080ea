"""Migrate one module: text in, text and findings out."""

import ast
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from ampcompare.source.amp_names import APEX, CORE, public_full_name
from ampcompare.source.edits import Edits, text_with_statements_on_own_lines
from ampcompare.source.index import Index
from ampcompare.source.migrate.core.casts import keep_types_of_outputs_and_products, note_differing_casts
from ampcompare.source.migrate.core.context import ApexCore
from ampcompare.source.migrate.core.core import MAY_BE_APEX, TAKEN_BY_TEXT, rewrite_core
from ampcompare.source.migrate.core.gradient_hooks import note_hooks_of_gradients
from ampcompare.source.migrate.core.internals import (
    AMP_STATE,
    INTERNALS,
    NO_EQUIVALENT,
    find_apex_internals_uses,
)
from ampcompare.source.migrate.core.model_casts import fp16_level_of_file
from ampcompare.source.migrate.core.outputs import AutocastOutputs
from ampcompare.source.migrate.read.apex_guards import (
    answer_apex_availability_with_yes,
    is_table_of_loaded_modules,
    places_taking_apex_by_string,
    simplify_constant_conditions,
)
from ampcompare.source.migrate.read.early_names import (
    BOUND_EARLY,
    BOUND_EARLY_IN,
    find_early_bindings_of_torch,
    has_early_bindings_of_torch,
)
from ampcompare.source.migrate.read.finding import (
    BY_HAND,
    MARK,
    NOTE,
    Finding,
    UnsureRewrite,
    origins_of_lines,
)
from ampcompare.source.migrate.read.library_requests import WORD as NAMED_FOR_LIBRARIES
from ampcompare.source.migrate.read.names import ModuleImports
from ampcompare.source.migrate.read.neighbors import ALONE, Neighbors
from ampcompare.source.migrate.read.replacement_table import IMPORTED, LAYERS, REMOVED
from ampcompare.source.migrate.replacements import (
    OTHER_CLASSES,
    ApexUseRewriter,
    classes_tested_by_isinstance,
)
from ampcompare.source.module import Block, Module
from ampcompare.source.object_kinds import ObjectKinds
from ampcompare.source.syntax import (
    ImportNode,
    SourceInvalid,
    argument,
    catches_missing_module,
    is_literal,
    last_name,
    root_name,
)
from ampcompare.source.versions import LATEST, Versions

WORD = re.compile(r"\bapex\b|\bamp_C\b|\bapex_C\b|\bamp\.scale_loss\(")

PROBE = (
    "the answer is yes now, whether Apex is there or not, since migrated files ask it; a file that asks it and still "
    "imports Apex fails without"
)
LAZY = "this file imports torch in its functions alone, and a scaler for all of them would need it at the top"
CROSS_ENTROPY = re.compile(r"\bbinary_cross_entropy\b|\bBCELoss\b")
CROSS_ENTROPIES = ("torch.nn.functional.binary_cross_entropy", "torch.nn.BCELoss")
UNSEEN = (
    "where this is called is not seen; under autocast CUDA refuses binary_cross_entropy (AMP230); call it under "
    'torch.autocast("cuda", enabled=False), with .float() on its inputs'
)
INSIDE = (
    "if this runs in the model, it is under autocast, where CUDA refuses binary_cross_entropy (AMP230); call it under "
    'torch.autocast("cuda", enabled=False), with .float() on its inputs'
)
OUTSIDE = (
    "binary_cross_entropy is refused under autocast (AMP230), so it is placed outside, in fp32; a sigmoid above it "
    "runs in fp16: binary_cross_entropy_with_logits on what goes into the sigmoid is more exact"
)
BANNED = (
    "`{0}` would compute binary_cross_entropy under autocast, which CUDA refuses (AMP230), and it is not sure that the "
    "whole statement can leave autocast; give the loss a line of its own, or use binary_cross_entropy_with_logits, "
    "and migrate again"
)
REBOUND = "{0} is {1} here, by a later `import *` of this project; leave out the import of Apex"
PROBE_KEPT = "{0} is left by hand and imports Apex, so this still asks whether Apex is there"
MARKS = (".scale(", ".unscale_(", ".scale_loss(", ".get_scale()", "clip_grad")
PHRASES = (
    (
        re.compile(
            r"\b(?:NVIDIA|NVidia|nvidia|Nvidia)(?:'s)? [Aa](?:pex|PEX)(?: (?:amp|AMP))?\b"
            r"(?! ?(?i:distrib|sync|parallel|fused))"
        ),
        "torch.amp",
    ),
    (re.compile(r"\b[Aa](?:pex|PEX)[ .](?:amp|AMP)\b"), "torch.amp"),
    (
        re.compile(r"https://nvidia\.github\.io/apex/amp\.html"),
        "https://docs.pytorch.org/docs/stable/amp.html",
    ),
)
LEVEL_WORDS = re.compile(r"\bO[0-3]\b|(?i:\bopt(?:imi[sz]ation)?[ _]levels?\b)")
# Since when torch has a name, and that which earlier versions have.
OLDER = (
    ((2, 3), '{torch}.amp.GradScaler("cuda", ', "{torch}.cuda.amp.GradScaler("),
    ((2, 3), '{torch}.amp.GradScaler("cuda")', "{torch}.cuda.amp.GradScaler()"),
    ((2, 4), '{torch}.amp.custom_bwd(device_type="cuda")', "{torch}.cuda.amp.custom_bwd"),
    ((2, 4), "{torch}.amp.custom_fwd(", "{torch}.cuda.amp.custom_fwd("),
    ((2, 4), ', device_type="cuda")', ")"),
    ((2, 4), '{torch}.is_autocast_enabled("cuda")', "{torch}.is_autocast_enabled()"),
)


@dataclass(frozen=True)
class Migration:
    """What `migrate` makes of the text of a module: the new text, with findings on what changes and what stays.

    Attributes:
        whole: whether the core of `apex.amp`, if the module has any, is rewritten.
        core: that core, where it is rewritten.
    """

    text: str
    findings: list[Finding]
    uses: int = 0
    left: int = 0
    whole: bool = True
    core: ApexCore | None = field(default=None, compare=False, repr=False)

    @property
    def left_by_hand(self) -> list[Finding]:
        """What stays as it is, each with its reason; the core of Apex is among it where `whole` is False."""
        return [each for each in self.findings if each.kind == BY_HAND]


def may_use_apex(text: str) -> bool:
    """Return whether a text is worth parsing."""
    return any(each.search(text) is not None for each in (WORD, INTERNALS, NAMED_FOR_LIBRARIES))


def migrate_text(
    text: str,
    around: Neighbors = ALONE,
    versions: Versions = LATEST,
    *,
    ignores_other_files: bool = False,
    refusal_reason: str = "",
) -> Migration:
    """Return the module for `torch.amp`.

    Args:
        around: what other modules have to do with this one.
        versions: of the libraries that the result is for.
        ignores_other_files: whether it does not matter that other files of its project may be left by hand.
        refusal_reason: why its core is left by hand, where that is known.

    Raises:
        SourceInvalid: it is not Python 3, or nested too deeply.
        RecursionError: an expression is nested too deeply.
    """
    if not may_use_apex(text):
        return Migration(text, [])
    module = around.module_of_text(text)
    names = ModuleImports(module)
    apart = _text_with_apex_on_own_lines(text, module, names)
    if apart != text:
        result = _migrate_split_text(text, apart, around, versions, ignores_other_files=ignores_other_files)
        return result if result.whole else _migration_with_lines_as_they_are(module, names, around, result)
    if not names.imports and not names.uses:
        return _migrate_without_apex_names(text, module, around, ignores_other_files=ignores_other_files)
    rewrite = _ModuleRewrite(module, names, around, versions, ignores_other_files=ignores_other_files)
    rewrite.rewrite_core(refusal_reason)
    rewrite.replace_uses_outside_core()
    rewrite.rewrite_imports()
    probes = _notes_on_checks_for_apex(module, names, rewrite.edits)
    if probes and not ignores_other_files and (asking := _file_by_hand_checking_apex(around, module)):
        return _unchanged_migration_of_asking_module(
            module, names, replace(probes[0], kind=BY_HAND, message=PROBE_KEPT.format(asking))
        )
    rewrite.complete_module(probes)
    if rewrite.edits.shared:
        result = _migrate_split_text(
            text,
            text_with_statements_on_own_lines(module, rewrite.edits.shared),
            around,
            versions,
            ignores_other_files=ignores_other_files,
        )
        return result if result.whole else _migration_with_lines_as_they_are(module, names, around, result)
    return _migration_of_rewrite(text, rewrite, versions, refusal_reason)


def _text_with_apex_on_own_lines(text: str, module: Module, names: ModuleImports) -> str:
    """Return a text in which each statement about Apex has lines of its own, as edits need it."""
    if not names.uses:
        return text
    kinds = ObjectKinds(module, Index(module))
    used: list[ast.AST] = [node for node, _ in names.uses]
    for call, each in module.method_calls("step", "backward"):
        if kinds.kind_of_object(each, module.scope_of[call]) != "scheduler":
            used.append(call)
    statements = map(module.statement_around, used)
    crowded = [
        each for each in statements if not module.is_alone_on_lines(each) and not isinstance(each, ast.With)
    ]
    return text_with_statements_on_own_lines(module, crowded) if crowded else text


def _migrate_without_apex_names(
    text: str, module: Module, around: Neighbors, *, ignores_other_files: bool
) -> Migration:
    """Return the migration of a module that names Apex nowhere, but may use its objects or ask whether it is there."""
    if any(full.partition(".")[0] == "ampcompare" for _, _, full in module.imports):
        return Migration(text, [])
    if around.runs_with_adapter(module):
        return Migration(text, [])  # whose functions and state these are
    edits = Edits(module)
    findings = _private_state_findings_without_core(module, around)
    # mxnet has a `scale_loss` too.
    blocks = [
        each
        for each in module.method_calls("scale_loss")
        if not (module.resolve(each[0].func) or "").startswith("mxnet.")
    ]
    owners = {ast.dump(owner) for _, owner in blocks}
    for call, owner in module.method_calls(*CORE):
        if ast.dump(owner) in owners and isinstance(call.func, ast.Attribute):
            findings.append(Finding.of_node(call, BY_HAND, MAY_BE_APEX.format(call.func.attr)))
    findings += [
        Finding.of_node(each, BY_HAND, TAKEN_BY_TEXT.format(name))
        for each, name in places_taking_apex_by_string(module)
        if is_table_of_loaded_modules(each.value if isinstance(each, ast.Subscript) else each)
    ]
    if not findings and not ignores_other_files:
        answered = Edits(module)
        answers = answer_apex_availability_with_yes(module, answered)
        # Only for a file that asks are the cores of others rewritten.
        if (answers or answered) and _are_all_cores_rewritten(around, module):
            edits, findings = answered, answers
    whole = all(each.kind == NOTE for each in findings)
    _put_comments_above_left_by_hand(module, edits, findings)
    return Migration(
        simplify_constant_conditions(edits.edited_text()) if edits else text, findings, whole=whole
    )


def _private_state_findings_without_core(module: Module, around: Neighbors) -> list[Finding]:
    """Return what a module without a core has of Apex's private state."""
    if INTERNALS.search(module.text) is None:  # before the project is looked at
        return []
    if around.runs_with_adapter(module):  # which gives them too
        return []
    internals = find_apex_internals_uses(around.index_of(module))
    return [Finding.of_node(node, BY_HAND, NO_EQUIVALENT.format(name)) for node, name in internals]


def _unchanged_migration_of_asking_module(
    module: Module, names: ModuleImports, finding: Finding
) -> Migration:
    """Return a module as it is, under the finding: it asks whether Apex is there, for a file that still needs it."""
    edits = Edits(module)
    _put_comments_above_left_by_hand(module, edits, [finding])
    return Migration(edits.edited_text(), [finding], len(names.uses), len(names.imports))


class _ModuleRewrite:
    """The passes over a module that names Apex, in the order of the methods.

    Attributes:
        edits: of the module.
        findings: about it.
        core: the core of `apex.amp` that was rewritten, if there is any; it is left by hand where not `is_whole`.
        is_whole: whether nothing of the core is left by hand.
        kept: nodes that name Apex and stay.
        torch: the name by which the module knows torch.
    """

    def __init__(
        self,
        module: Module,
        names: ModuleImports,
        around: Neighbors,
        versions: Versions,
        *,
        ignores_other_files: bool,
    ) -> None:
        self.module, self.names = module, names
        self.edits = Edits(module)
        self.findings: list[Finding] = []
        self.core: ApexCore | None = None
        self.is_whole = True
        self.kept: list[ast.AST] = []
        self.torch, self._above = torch_name_and_place(module)
        self._around, self._ignores_other_files, self._versions = around, ignores_other_files, versions
        self._twins: dict[tuple[ast.stmt, str], str] = {}  # in torch, of what is imported

    def rewrite_core(self, refusal_reason: str) -> None:
        """Rewrite the core of `apex.amp`, or leave it by hand: where `refusal_reason` says why, and where not sure."""
        try:
            if refusal_reason:
                raise UnsureRewrite(next(iter(node for node, _ in self.names.uses)), refusal_reason)
            self.core = rewrite_core(self.module, self.names, self.edits, self.torch, self._around)
            if self.core is not None:
                outputs = AutocastOutputs(self.core)  # again, as the core has more regions of autocast now
                keep_types_of_outputs_and_products(self.core, outputs)
                note_differing_casts(self.core, outputs)
                note_hooks_of_gradients(self.core)
                self.findings += self.core.findings
                if not fp16_level_of_file(self.core.sites):
                    self._note_early_bindings()
        except UnsureRewrite as error:
            self.is_whole = False
            self.edits = Edits(self.module)
            self.findings.append(Finding.of_node(error.node, BY_HAND, str(error)))
        if self.core is None and self.is_whole:
            self.findings += _private_state_findings_without_core(self.module, self._around)

    def _note_early_bindings(self) -> None:
        """Note the functions of torch that the program binds before O1 casts."""
        early = find_early_bindings_of_torch(self.module).items()
        self.findings += [Finding.of_node(node, NOTE, BOUND_EARLY.format(name)) for node, name in early]
        around = self._around
        for site in self.core.sites.initializes[:1] if self.core is not None else ():
            for path in around.other_files_of_program_that(self.module, has_early_bindings_of_torch):
                text = BOUND_EARLY_IN.format(around.relative_path_of(path))
                self.findings.append(Finding.of_node(site.call, NOTE, text))

    def replace_uses_outside_core(self) -> None:
        """Replace what lies outside of the core: layers, optimizers and the like; they stay where the core stays."""
        if not self.is_whole:
            self.kept += [node for node, _ in self.names.uses]
            return
        asked = self._classes_tested_by_isinstance()
        # A scaler of the project calls the step of a fused optimizer where it skips; who counts steps sees that.
        fused_for = None if self.core is None and self._has_own_scaler() else self._versions.torch
        replacements = ApexUseRewriter(self.module, self.names, self.edits, self.torch, asked, fused_for)
        self._twins = replacements.imports
        index = self._around.index_of(self.module)
        for node, meaning in self.names.uses:
            if not _is_name_of_core(meaning):
                try:
                    _refuse_name_rebound_by_star(index, node)
                    if not replacements.rewrite_use(node, meaning):
                        self.kept.append(node)
                except UnsureRewrite as error:
                    self.kept.append(node)
                    self.findings.append(Finding.of_node(error.node, BY_HAND, str(error)))
        self.findings += replacements.findings

    def _classes_tested_by_isinstance(self) -> dict[str, str]:
        """Return the classes of torch for which the program asks and that Apex's are none of, with places."""
        if not any(meaning.endswith(OTHER_CLASSES) for _, meaning in self.names.uses):
            return {}
        around = self._around
        others = around.other_modules_of_program(self.module)
        named = [(around.relative_path_of(path), each) for path, each in others]
        return classes_tested_by_isinstance([("this file", self.module), *named])

    def _has_own_scaler(self) -> bool:
        """Return whether the program names a GradScaler of its own, where this module has a fused optimizer."""
        if not any(meaning.startswith("apex.optimizers.") for _, meaning in self.names.uses):
            return False  # no other file need be read
        return _names_grad_scaler(self.module) or bool(
            self._around.other_files_of_program_that(self.module, _names_grad_scaler)
        )

    def rewrite_imports(self) -> None:
        """Import what the module needs now; what other modules import from it stays."""
        if not self.is_whole:
            return
        needed = {root_name(node) for node in self.kept}
        self.findings += _keep_names_for_others(self.module, self.names, self._around, needed, self._twins)
        _rewrite_imports(self.module, self.names, self.edits, needed, self._twins)

    def complete_module(self, import_notes: list[Finding]) -> None:
        """Answer what asks whether Apex is there, name torch in help texts, import modules, and mark what is left.

        Args:
            import_notes: notes on imports whose success is the answer.
        """
        self.findings += import_notes
        if not self.kept:
            self.findings += answer_apex_availability_with_yes(self.module, self.edits)
        if self.is_whole:
            _rewrite_help_texts(self.module, self.edits, self.names)
        self.findings = sorted(set(self.findings))
        of_torch = rf"(?<!from )(?<![\w.]){re.escape(self.torch)}\."
        if (
            self.edits
            and self._above is not None
            and re.search(of_torch, self.edits.inserted_text()) is not None
        ):
            self.edits.insert_above(self._above, [f"import {self.torch}"])
        if self.edits and "functools." in self.edits.inserted_text():
            _import_functools(self.module, self.edits)
        _put_comments_above_left_by_hand(self.module, self.edits, self.findings)

    def migrate_without_core(self, text: str, versions: Versions, refusal_reason: str) -> Migration:
        """Return the migration of the module with its core left by hand."""
        return migrate_text(
            text,
            self._around,
            versions,
            ignores_other_files=self._ignores_other_files,
            refusal_reason=refusal_reason,
        )


def _migration_of_rewrite(
    text: str, rewrite: _ModuleRewrite, versions: Versions, refusal_reason: str
) -> Migration:
    """Return the result of a rewrite, without equal branches, with lazy imports, and for the versions of torch."""
    new = (
        _join_equal_scaling_branches(simplify_constant_conditions(rewrite.edits.edited_text()))
        if rewrite.edits
        else text
    )
    if new != text and _imports_torch_lazily(rewrite.module):
        lazy = _import_torch_lazily(new, rewrite.torch)
        if lazy is None and not refusal_reason:
            return rewrite.migrate_without_core(text, versions, LAZY)
        new = lazy or new
    findings = rewrite.findings
    if rewrite.core is not None and CROSS_ENTROPY.search(new) is not None:
        new, notes, left = _move_bce_outside_autocast(text, new, versions)
        if left:
            return rewrite.migrate_without_core(
                text, versions, BANNED.format(text.splitlines()[left - 1].strip())
            )
        findings = sorted({*findings, *notes, *_notes_on_bce_in_forward(rewrite.core)})
    if new != text:
        new = _with_older_torch_names(new, rewrite.torch, versions)
    uses, left = len(rewrite.names.uses), len(rewrite.kept)
    return Migration(new, findings, uses, left, rewrite.is_whole, rewrite.core)


def _move_bce_outside_autocast(
    text: str, new_text: str, versions: Versions
) -> tuple[str, list[Finding], int]:
    """Put cross entropies of probabilities outside of the autocast that a rewrite has brought about.

    Returns:
        The text, the notes, and the first line of the original that cannot be changed so; 0 if there is none.
    """
    from ampcompare.source.lint.check import check_text  # not every migration needs the rules
    from ampcompare.source.lint.run import LintSelection, fixed_text_rest_and_num_fixes

    selection = LintSelection(select=("AMP230",), versions=versions)
    found = check_text(new_text, selection.reports_code, versions)
    if not found:
        return new_text, _notes_on_unseen_bce(text, new_text, versions), 0
    lines = origins_of_lines(text, new_text)
    fixed, left, _ = fixed_text_rest_and_num_fixes(new_text, found, selection)
    if left:
        return new_text, [], origins_of_lines(text, fixed)[left[0].line]
    return fixed, [Finding(lines[each.line], 0, NOTE, OUTSIDE) for each in found], 0


def _notes_on_unseen_bce(text: str, new_text: str, versions: Versions) -> list[Finding]:
    """Return a note on a cross entropy of probabilities of which no call is seen, such as in a lambda."""
    from ampcompare.source.lint.read.module import LintModule
    from ampcompare.source.lint.read.update_events import EventKind

    module = LintModule(new_text, versions)
    uses = [node for node in module.nodes if isinstance(node, (ast.Name, ast.Attribute))]
    found = [node.lineno for node in uses if module.resolve(node, follow=False) in CROSS_ENTROPIES]
    if not found or any(True for _ in module.events(EventKind.CROSS_ENTROPY)):
        return []
    return [Finding(origins_of_lines(text, new_text)[found[0]], 0, NOTE, UNSEEN)]


def _notes_on_bce_in_forward(core: ApexCore) -> list[Finding]:
    """Return notes on cross entropies of probabilities in forward passes, which a model of O2 or O3 may hold."""
    module = core.module
    found = []
    for node in module.nodes if fp16_level_of_file(core.sites) else ():
        if (
            isinstance(node, (ast.Name, ast.Attribute))
            and module.resolve(node, follow=False) in CROSS_ENTROPIES
        ):
            holder = module.class_of(module.function_around(node))
            methods = (
                [] if holder is None else [each for each in holder.body if isinstance(each, ast.FunctionDef)]
            )
            if any(each.name == "forward" for each in methods):
                found.append(Finding.of_node(node, NOTE, INSIDE))
    return found


def _migrate_split_text(
    text: str, split_text: str, around: Neighbors, versions: Versions, *, ignores_other_files: bool
) -> Migration:
    """Return the migration of a module of which some statements got lines of their own, with the lines it had."""
    lines = origins_of_lines(text, split_text)
    result = migrate_text(split_text, around, versions, ignores_other_files=ignores_other_files)
    return replace(
        result, findings=sorted({replace(each, line=lines[each.line]) for each in result.findings})
    )


def _migration_with_lines_as_they_are(
    module: Module, names: ModuleImports, around: Neighbors, migration_of_split_text: Migration
) -> Migration:
    """Return a module whose core is left by hand, as it is, under the findings of one with more lines."""
    own = _ModuleRewrite(module, names, around, LATEST, ignores_other_files=True)
    own.rewrite_core("")  # says the same at the places of this text, mostly
    findings = own.findings if not own.is_whole else migration_of_split_text.findings
    edits = Edits(module)
    _put_comments_above_left_by_hand(module, edits, findings)
    return replace(migration_of_split_text, text=edits.edited_text(), findings=sorted(set(findings)))


def _notes_on_checks_for_apex(module: Module, names: ModuleImports, edits: Edits) -> list[Finding]:
    """Return notes on a module that only says whether Apex is there, and says so always from now on."""
    if names.uses:
        return []
    found = []
    for statement in dict.fromkeys(each for each, _ in names.imports):
        around = module.parent(statement)
        if (
            isinstance(around, ast.Try)
            and _does_try_tell_availability(around)
            and edits.is_removed(statement)
        ):
            found.append(Finding.of_node(statement, NOTE, PROBE))
    return found


def _does_try_tell_availability(node: ast.Try) -> bool:
    """Return whether a `try` binds or returns something where its imports succeed, or a flag where they do not."""
    if any(isinstance(each, (ast.Assign, ast.Return)) for each in (*node.body, *node.orelse)):
        return True
    otherwise = [
        each
        for handler in node.handlers
        for each in handler.body
        if isinstance(each, (ast.Assign, ast.Return))
    ]
    return any(is_literal(each.value, False) for each in otherwise)


def _are_all_cores_rewritten(around: Neighbors, module: Module) -> bool:
    """Return whether some files around have a part of Apex's core, and all of these are rewritten."""
    others = list(around.core_modules_sharing_training(module))
    try:
        return bool(others) and all(
            _is_core_of_other_rewritten(other, theirs, around) for other, theirs in others
        )
    except (SourceInvalid, RecursionError, ValueError):
        return False


def _file_by_hand_checking_apex(around: Neighbors, module: Module) -> str:
    """Return the name of a file that is left by hand and may ask a module whether Apex is there; empty if none is."""
    for other, theirs in around.core_modules_checking_apex(module):
        try:
            if not _is_core_of_other_rewritten(other, theirs, around):
                return around.relative_path_of(other)
        except (SourceInvalid, RecursionError, ValueError):
            return around.relative_path_of(other)
    return ""


def _names_grad_scaler(module: Module) -> bool:
    return "GradScaler" in module.text


def _is_core_of_other_rewritten(path: Path, module: Module, around: Neighbors) -> bool:
    """Return whether the core of another file of a project is rewritten, or is so already."""
    return migrate_text(module.text, Neighbors(path, around.imports), ignores_other_files=True).whole


def _refuse_name_rebound_by_star(index: Index, node: ast.Name | ast.Attribute) -> None:
    """Refuse a use of a name that another file of the project binds as well, by an `import *` below that of Apex."""
    names = (
        index.possible_outside_names_of(node, index.module.scope_of[node])
        if isinstance(node, ast.Name)
        else set()
    )
    others = sorted(each for each in names if each and each.split(".")[0] not in APEX)
    if others and len(others) == len(names):
        raise UnsureRewrite(node, REBOUND.format(ast.unparse(node), others[0]))


def _is_name_of_core(meaning: str) -> bool:
    return meaning.startswith(AMP_STATE) or (
        meaning.startswith("apex.amp.") and meaning.split(".")[2] in CORE
    )


def _put_comments_above_left_by_hand(module: Module, edits: Edits, findings: list[Finding]) -> None:
    """Put a comment above each statement that is left by hand, unless it is there already."""
    done: set[ast.stmt] = set()
    for finding in findings:
        if finding.kind == NOTE:
            continue
        statement = _statement_of_finding(module, finding)
        while statement is not None and not module.begins_line(statement):
            statement = _statement_before_or_around(module, statement)
        if statement is None or statement in done:
            continue
        done.add(statement)
        line = module.first_line(statement)
        above = module.line_text(line - 1).strip() if line > 1 else ""
        if not above.startswith(MARK.strip()) and not module.is_elif(statement):
            edits.insert_above(statement, [f"{MARK}{finding.message}"])


def _statement_before_or_around(module: Module, statement: ast.stmt) -> ast.stmt:
    """Return the statement before another in its block, or else the one around it."""
    block = module.block_of(statement)
    place = block.index(statement)
    return block[place - 1] if place else module.statement_around(module.parent(statement))


def _statement_of_finding(module: Module, finding: Finding) -> ast.stmt | None:
    for node in module.nodes:
        if (
            getattr(node, "lineno", None) == finding.line
            and getattr(node, "col_offset", None) == finding.column
        ):
            return module.statement_around(node)
    return None


def _join_equal_scaling_branches(text: str) -> str:
    """Return a rewritten module without the `if` statements whose two branches scale a loss and are equal."""
    while any(mark in text for mark in MARKS):
        try:
            module = Module(text)
        except SourceInvalid:  # which is no fault of the script, and is reported as such
            break
        equal = [
            node
            for node in module.nodes
            if isinstance(node, ast.If) and _has_equal_scaling_branches(module, node)
        ]
        if not equal:
            break
        edits = Edits(module)
        for branch in equal:
            if not any(outer in equal for outer in module.ancestors(branch)):
                edits.replace_statement_by_body(branch, branch.orelse)
        text = edits.edited_text()
    return text


def _has_equal_scaling_branches(module: Module, node: ast.If) -> bool:
    if not node.orelse or any(isinstance(each, (ast.Call, ast.NamedExpr)) for each in ast.walk(node.test)):
        return False
    if module.is_elif(node) or len(node.body) != len(node.orelse):
        return False
    if isinstance(node.orelse[0], ast.If) and module.is_elif(node.orelse[0]):
        return False
    if not any(mark in module.source(node.body[0]) for mark in MARKS):
        return False
    return [ast.dump(each) for each in node.body] == [ast.dump(each) for each in node.orelse]


def _rewrite_help_texts(module: Module, edits: Edits, names: ModuleImports) -> None:
    """Name torch.amp instead of Apex in the help of `add_argument` and of click options."""
    if not any(meaning.startswith("apex.amp") for _, meaning in names.uses):
        return
    for call in module.calls:
        words = (
            argument(call, "help") if last_name(call.func) in ("add_argument", "option", "argument") else None
        )
        if words is not None:
            old = new = module.source(words)
            for pattern, text in () if LEVEL_WORDS.search(old) else PHRASES:  # torch.amp has no levels
                new = pattern.sub(text, new)
            if new != old:
                edits.replace(words, new)


def torch_name_and_place(module: Module) -> tuple[str, ast.stmt | None]:
    """Return the name by which a module knows torch, and the statement above which to import it, if any."""
    for node in module.tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "torch" or (alias.name.startswith("torch.") and alias.asname is None):
                    return alias.asname or "torch", None
    body = [each for each in module.tree.body if not _is_prologue(each)]
    return "torch", body[0] if body and not _imports_torch_lazily(module) else None


def _imports_torch_lazily(module: Module) -> bool:
    """Return whether a module imports torch in its functions alone, so that it works without it."""
    found = [node for node, alias, full in module.imports if full.partition(".")[0] == "torch"]
    return bool(found) and all(module.function_around(each) is not None for each in found)


def _with_older_torch_names(text: str, torch: str, versions: Versions) -> str:
    """Return a text with the names that torch had before 2.3 and 2.4, where it is for such a version."""
    for since, new, old in OLDER:
        if versions.torch < since:
            text = text.replace(new.format(torch=torch), old.format(torch=torch))
    return text


def _import_torch_lazily(text: str, torch: str) -> str | None:
    """Return a text in which each function that needs torch imports it; None where the module itself needs it."""
    module = Module(text)
    edits, done = Edits(module), set[ast.stmt]()
    for node in module.nodes:
        if isinstance(node, ast.Name) and node.id == torch and module.resolve(node, follow=False) is None:
            functions = list(module.functions_around(node))
            if not functions:
                return None
            body = functions[-1].body
            is_text = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
            first = body[1] if is_text and len(body) > 1 else body[0]
            if first not in done:
                done.add(first)
                edits.insert_above(first, [f"import {torch}"])
    return edits.edited_text() if edits else text


def _import_functools(module: Module, edits: Edits) -> None:
    """Import functools at the top of a module that has not."""
    body = [each for each in module.tree.body if not _is_prologue(each)]
    imported = {
        alias.asname or alias.name for each in body if isinstance(each, ast.Import) for alias in each.names
    }
    if "functools" not in imported:
        edits.insert_above(body[0], ["import functools"])


def _is_prologue(statement: ast.stmt) -> bool:
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_text or (isinstance(statement, ast.ImportFrom) and statement.module == "__future__")


def _keep_names_for_others(
    module: Module,
    names: ModuleImports,
    around: Neighbors,
    needed_names: set[str],
    twins: dict[tuple[ast.stmt, str], str],
) -> list[Finding]:
    """Keep the names that other modules import from this one; layers of torch with the same arguments take their place.

    Args:
        needed_names: names of Apex that remain, which gets more.
        twins: full names in torch of what is imported, by statement and name in Apex's module, which gets more.
    """
    own = {
        alias.asname or alias.name: (statement, alias)
        for statement, alias in names.imports
        if module.scope_of[statement] is module.top and alias.name != "*"
    }
    waiting = {
        name
        for name, (statement, alias) in own.items()
        if name not in needed_names and (statement, alias.name) not in twins
    }
    lists = (each for each in module.top.values.get("__all__", []) if isinstance(each, (ast.List, ast.Tuple)))
    listed = {one.value for each in lists for one in each.elts if isinstance(one, ast.Constant)}
    found = {
        **{name: Path("__all__") for name in waiting & listed},
        **around.importers_of_names(module, waiting),
    }
    findings = []
    for name, other in found.items():
        statement, alias = own[name]
        full = (
            alias.name
            if isinstance(statement, ast.Import)
            else public_full_name(f"{statement.module}.{alias.name}")
        )
        if full in LAYERS:
            twins[(statement, alias.name)] = IMPORTED[full]
            continue
        needed_names.add(name)
        if full.startswith(REMOVED):
            message = f"{around.relative_path_of(other)} has {name} from here; migrate it, then remove this"
            findings.append(Finding.of_node(statement, BY_HAND, message))
        else:
            findings.append(
                Finding.of_node(
                    statement,
                    NOTE,
                    f"{full} stays: {around.relative_path_of(other)} has it from here, as {name}",
                )
            )
    return findings


def _rewrite_imports(
    module: Module,
    names: ModuleImports,
    edits: Edits,
    needed_names: set[str],
    twins: dict[tuple[ast.stmt, str], str],
) -> None:
    """Rewrite the imports."""
    stars = any(alias.name == "*" for _, alias in names.imports) and bool(needed_names)
    gone: set[ast.stmt] = set()
    for statement in dict.fromkeys(statement for statement, _ in names.imports):
        lines, complete = _new_imports_and_is_apex_gone(statement, needed_names, twins, stars)
        if complete and not lines:
            gone.add(statement)
            edits.remove(statement)
        elif lines is not None:
            edits.replace_statement(statement, lines)
            if complete:
                gone.add(statement)
    for node in module.nodes:
        if isinstance(node, ast.Try):
            remove_try_of_imports(edits, node, gone)


def _new_imports_and_is_apex_gone(
    statement: ImportNode,
    needed_names: set[str],
    twins: dict[tuple[ast.stmt, str], str],
    stars: bool,
) -> tuple[list[str] | None, bool]:
    """Return the statements instead of an import (None: as it is), and whether Apex is gone from it."""
    kept: list[ast.alias] = []
    lines: list[str] = []
    for alias in statement.names:
        local = alias.asname or alias.name.split(".")[0]
        twin = twins.get((statement, alias.name))
        if isinstance(statement, ast.Import) and alias.name.split(".")[0] not in APEX:
            kept.append(alias)
        elif twin is not None:
            package, _, name = twin.rpartition(".")
            lines.append(f"from {package} import {name}" + (f" as {local}" if local != name else ""))
        elif (alias.name == "*" and stars) or local in needed_names:
            kept.append(alias)
    foreign = isinstance(statement, ast.Import) and all(each.name.split(".")[0] not in APEX for each in kept)
    complete = not kept or foreign
    if len(kept) == len(statement.names):
        return None, False
    if kept:
        text = ", ".join(each.name + (f" as {each.asname}" if each.asname else "") for each in kept)
        if isinstance(statement, ast.Import):
            lines.append(f"import {text}")
        else:
            lines.append(f"from {'.' * statement.level}{statement.module or ''} import {text}")
    return lines, complete


def remove_try_of_imports(edits: Edits, node: ast.Try, gone: set[ast.stmt]) -> bool:
    """Remove a `try` that guarded only imports of Apex; what else its body does stays.

    Args:
        gone: imports that are replaced or removed.

    Returns:
        Whether it guarded nothing else.
    """
    if not any(each in gone for each in node.body) or node.finalbody or node.orelse:
        return False
    if not all(catches_missing_module(handler) for handler in node.handlers):
        return False
    if not all(each in gone or _is_flag_or_pass(each) for each in node.body):
        if all(edits.is_removed(each) for each in node.body):
            edits.remove(node)
        return False
    body: Block = [each for each in node.body if not edits.is_removed(each)]
    if body:
        edits.replace_statement_by_body(node, node.body)
    else:
        edits.remove(node)
    return True


def _is_flag_or_pass(statement: ast.stmt) -> bool:
    """Return whether a statement is a flag such as `has_apex = True`."""
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Assign) and isinstance(statement.value, (ast.Constant, ast.Name))
    )
