"""Migrate files and folders; a file that cannot be read or parsed is reported and leaves the others alone."""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import unified_diff
from pathlib import Path
from typing import ClassVar, TypeAlias

from ampcompare.base.files.read import FileFault
from ampcompare.base.notebook_display import ShownInNotebook
from ampcompare.source.amp_names import ADAPTER
from ampcompare.source.document import SourceDocument, parse_document, read_source_bytes, write_document
from ampcompare.source.migrate.core.state_dict import FROM_APEX
from ampcompare.source.migrate.read.apex_guards import (
    findings_of_texts_naming_apex,
    library_apex_availability_findings,
)
from ampcompare.source.migrate.read.finding import BY_HAND, MARK, NOTE, Finding, origins_of_lines
from ampcompare.source.migrate.read.library_requests import findings_of_library_requests
from ampcompare.source.migrate.read.names import ModuleImports
from ampcompare.source.migrate.read.neighbors import Neighbors
from ampcompare.source.migrate.read.own_apex import find_import_of_own_apex, is_in_copy_of_apex
from ampcompare.source.migrate.rewrite import Migration, may_use_apex, migrate_text
from ampcompare.source.module import Module
from ampcompare.source.project import ImportIndex
from ampcompare.source.syntax import SourceInvalid, parse_tree
from ampcompare.source.versions import Versions, installed_or_given_versions

# Without one of these a file is not parsed; a null byte means text in UTF-16, or no text.
SIGNS = (
    b"apex", b"Apex", b"APEX", b"opt_level", b"amp_C", b"amp.scale_loss(", b"_amp_", b"_master_", b"\0",
    b"cuda.amp", b"cpu.amp", b"allow_tf32", b"float32_matmul_precision", b"torch_dtype",
)  # fmt: skip
# Returns the mistakes of a module: line, from 1, code of lint, and message.
Examine: TypeAlias = Callable[[str], list[tuple[int, str, str]]]
# Codes of lint whose fixes renew deprecated names, and a quick look for these.
RENEWED = ("AMP302", "AMP303", "AMP313", "AMP314")
OLD_NAMES = re.compile(r"\b(?:cuda|cpu)\.amp\b|allow_tf32|float32_matmul_precision|torch_dtype")
# Mistakes with the fp16 copies of O2, of which there are none in the result.
WITHOUT_EFFECT = {"AMP104", "AMP117"}
# What a script does wrong by itself, whether its loss is scaled by Apex or by torch.
OWN_MISTAKES = {"AMP211", "AMP213", "AMP214", "AMP215", "AMP217", "AMP226", "AMP230", "AMP231", "AMP236"}


@dataclass(frozen=True)
class FileMigration(ShownInNotebook):
    """What `migrate` makes of one file: its rewritten text with findings, or why it was not read.

    Attributes:
        path: of the file.
        document: None if it was not read, or cannot use Apex.
        migration: None if it was not parsed.
        fault: why it was not read or parsed, with the line; None if it was.
        reason: why it takes the adapter, with the line; "" where it does not, or was asked to.
    """

    path: Path
    document: SourceDocument | None = None
    migration: Migration | None = None
    fault: str | None = None
    reason: str = ""

    @property
    def is_changed(self) -> bool:
        """Whether the text is another one."""
        return (
            self.document is not None
            and self.migration is not None
            and self.migration.text != self.document.text
        )

    @property
    def takes_adapter(self) -> bool:
        """Whether the text becomes one that names the adapter."""
        return self.is_changed and self.migration is not None and ADAPTER in self.migration.text

    @property
    def has_only_comments_added(self) -> bool:
        """Whether nothing of the text changes but comments on the lines that are left by hand."""
        if not self.is_changed or self.document is None or self.migration is None:
            return False
        lines = [each for each in self.migration.text.splitlines() if not each.lstrip().startswith(MARK)]
        return lines == self.document.text.splitlines()

    @property
    def loads_apex_scaler_state(self) -> bool:
        """Whether the rewritten text loads the state of a scaler from files of Apex too."""
        return self.migration is not None and FROM_APEX in self.migration.text

    @property
    def imports_apex(self) -> bool:
        """Whether the text that it becomes still imports something of Apex, or may, by a star import."""
        module = Module("" if self.migration is None else self.migration.text)
        return bool(ModuleImports(module).imports) or any(alias.name == "*" for _, alias, _ in module.imports)

    @property
    def num_lines_by_hand(self) -> int:
        """How many lines are left by hand."""
        found = [] if self.migration is None else self.migration.findings
        return sum(each.kind == BY_HAND for each in found)

    _view: ClassVar[str] = "ampcompare.results.report.html.notebook:migration_text_and_html"

    def summary(self) -> str:
        """Return what becomes of the file, in one line."""
        if self.fault is not None:
            return f"{self.path}: not migrated: {self.fault}"
        done = "to be rewritten for torch.amp" if self.is_changed else "nothing to rewrite"
        if self.reason:
            done = f"takes the adapter, since {self.reason}"
        return f"{self.path}: {done}, {self.num_lines_by_hand} lines left by hand"

    def rows(self) -> list[tuple[str, str, str]]:
        """Return the place, kind and message of each finding."""
        if self.fault is not None or self.document is None or self.migration is None:
            return []
        return [
            (str(self.document.position_for_user(one.line, one.column)), one.kind, one.message)
            for one in self.migration.findings
        ]

    def diff(self) -> str:
        """Return the change as a patch that `git apply` and `patch -p1` take."""
        if self.document is None or self.migration is None:
            return ""
        name = self.path.as_posix().removeprefix("./").lstrip("/")
        old, new = (text.splitlines(keepends=True) for text in (self.document.text, self.migration.text))
        lines = []
        for line in unified_diff(old, new, f"a/{name}", f"b/{name}"):
            lines.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
        return "".join(lines)

    def lines(self) -> list[str]:
        """Return the findings, one per line: place, kind, message."""
        if self.fault is not None:
            return [self.summary()]
        return [f"{self.path}:{place}: {kind}: {message}" for place, kind, message in self.rows()]

    def write(self) -> None:
        """Replace the file in one move; it keeps its mode.

        Raises:
            FileFault: it may not be written.
        """
        if self.document is not None and self.migration is not None and self.is_changed:
            write_document(self.document, self.migration.text)


def migrate_file(
    path: Path,
    *,
    must_parse: bool = False,
    examine: Examine = lambda text: [],
    versions: Versions | None = None,
    imports: ImportIndex | None = None,
) -> FileMigration:
    """Return what becomes of a file; nothing is written.

    Args:
        path: of a script, module or notebook.
        must_parse: whether it must be Python even if it does not use Apex.
        examine: returns the mistakes of a module, each with line, code and message; it sees the text and its result.
        versions: of the libraries that the result is for; by default those that are installed.
        imports: which file of the project imports which, as one run asks it; None to ask for this file alone.
    """
    try:
        content = read_source_bytes(path)
        if not must_parse and not any(sign in content for sign in SIGNS):
            return FileMigration(path)
        document = parse_document(path, content)
    except FileFault as fault:
        return FileMigration(path, fault=str(fault))
    try:
        imports = ImportIndex() if imports is None else imports
        migration, around = None, Neighbors(path, imports)
        if is_in_copy_of_apex(path):
            return FileMigration(path)
        if (own := find_import_of_own_apex(path, document.text, imports)) is not None:
            return FileMigration(path, document, Migration(document.text, [own]))
        if may_use_apex(document.text):
            migration = migrate_text(document.text, around, versions or installed_or_given_versions())
            module = around.module_of_text(document.text)
            named = findings_of_texts_naming_apex(module) + findings_of_library_requests(module)
            migration = replace(migration, findings=sorted({*migration.findings, *named}))
            migration = _migration_with_mistakes(document.text, migration, examine)
            migration = migration_with_library_availability_findings(path, document.text, migration, imports)
        elif must_parse:
            parse_tree(document.text)
        if OLD_NAMES.search(document.text) and not around.runs_with_adapter(
            around.module_of_text(document.text)
        ):  # which leaves all but imports as they are
            migration = _renew_deprecated_names(
                document.text, migration, versions or installed_or_given_versions()
            )
        return FileMigration(path, None if migration is None else document, migration)
    except SourceInvalid as error:
        where = f"line {document.position_for_user(error.line).line}: {error.kind}: " if error.line else ""
        return FileMigration(path, document, fault=f"{where}{error}")
    except RecursionError:
        return FileMigration(path, document, fault="nested too deeply")
    except ValueError as error:
        return FileMigration(path, document, fault=str(error))


def migration_with_library_availability_findings(
    path: Path, old_text: str, migration: Migration, imports: ImportIndex
) -> Migration:
    """Return a migration that changes a file with what the file asks other packages of Apex.

    Args:
        path: of the file.
        old_text: its text, as it is now.
        migration: of the file.
        imports: of the project.
    """
    if migration.text == old_text:
        return migration
    asking = library_apex_availability_findings(path, old_text, imports)
    return replace(migration, findings=sorted({*migration.findings, *asking}))


def _renew_deprecated_names(
    old_text: str, migration: Migration | None, versions: Versions
) -> Migration | None:
    """Return a migration whose result has new names of torch and transformers in the place of deprecated ones.

    None where there was none, and nothing is to be done.
    """
    text = old_text if migration is None else migration.text
    if OLD_NAMES.search(text) is None:
        return migration
    from ampcompare.source.lint.check import check_text
    from ampcompare.source.lint.run import LintSelection, fixed_text_rest_and_num_fixes

    selection = LintSelection(select=RENEWED, versions=versions)
    new, _, _ = fixed_text_rest_and_num_fixes(
        text, check_text(text, selection.reports_code, versions), selection
    )
    if new == text:
        return migration
    return replace(migration or Migration(old_text, []), text=new)


def _migration_with_mistakes(old_text: str, migration: Migration, examine: Examine) -> Migration:
    """Return a migration with the mistakes of its result."""
    if migration.text == old_text:
        return migration
    fault = _find_syntax_fault(migration.text)
    if fault is not None and _find_syntax_fault(old_text) is None:
        raise ValueError(f"{fault} of its rewritten form; it stays as it is; please report it")
    mistakes = [] if fault is not None else examine(migration.text)
    earlier = examine(old_text)
    own = OWN_MISTAKES | {code for _, code, _ in earlier}
    lines = origins_of_lines(old_text, migration.text)
    remarks = []
    for line, code, message in mistakes:
        kind = NOTE if code in own else BY_HAND
        remarks.append(Finding(lines[line], 0, kind, f"line {line} of the result: {code}: {message}"))
    gone = WITHOUT_EFFECT - {code for _, code, _ in mistakes}
    for line, code, message in earlier:
        if code in gone:
            text = f"{code}: {message}, so this had no effect; in the result it has, and training differs"
            remarks.append(Finding(line, 0, NOTE, text))
    return replace(migration, findings=sorted({*migration.findings, *remarks}))


def _find_syntax_fault(text: str) -> str | None:
    """Return what Python has against a module, with the line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes such as "\d"
            compile(text, "<script>", "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"{error.msg} in line {error.lineno}"
    return None


def find_numerical_lint_mistakes(text: str) -> list[tuple[int, str, str]]:
    """Return line, code and message of the mistakes in numbers that lint finds in a module."""
    # Imported here: not every migration asks for them, and all rules are imported with them.
    from ampcompare.source.lint.check import check_text
    from ampcompare.source.lint.report import level_of_code

    found = check_text(text, lambda code: level_of_code(code) == "error")
    return [(each.line, each.code, each.message) for each in found]
