"""A language server: what `lint` finds as diagnostics, its fixes and the rewriting of `migrate` as actions.

Editors start it as `ampcompare lsp` and speak with it over its standard input and output. It needs the extra `lsp`.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lsprotocol import types
from pygls.lsp.server import LanguageServer
from pygls.workspace import TextDocument

from ampcompare.base.errors import AmpCompareError
from ampcompare.base.formatting import format_count
from ampcompare.base.version import __version__
from ampcompare.source.edits import Edit
from ampcompare.source.lint.catalog import CODES
from ampcompare.source.lint.check import check_text
from ampcompare.source.lint.read.module import Finding
from ampcompare.source.lint.report import level_of_code
from ampcompare.source.lint.run import LintSelection, fixed_text_rest_and_num_fixes, read_lint_selection
from ampcompare.source.migrate.adapter.choice import choose_rewrite_or_adapter
from ampcompare.source.syntax import SourceInvalid
from ampcompare.source.versions import Versions, installed_or_given_versions

SOURCE = "ampcompare"
FIX_ALL = f"{types.CodeActionKind.SourceFixAll.value}.{SOURCE}"
MIGRATE = f"{types.CodeActionKind.RefactorRewrite.value}.{SOURCE}"
LEVELS = {"error": types.DiagnosticSeverity.Error, "warning": types.DiagnosticSeverity.Warning}


def make_server(torch_version: str | None = None) -> LanguageServer:
    """Return a server that is not started yet.

    Args:
        torch_version: of the torch that the files are for, as of `lint`.
    """
    server = LanguageServer(SOURCE, __version__)
    answers = _EditorAnswers(server, installed_or_given_versions(torch_version))
    for event in (types.TEXT_DOCUMENT_DID_OPEN, types.TEXT_DOCUMENT_DID_CHANGE, types.TEXT_DOCUMENT_DID_SAVE):
        server.feature(event)(
            lambda params: answers.publish_diagnostics(params)
        )  # it notes names on functions
    server.feature(types.TEXT_DOCUMENT_DID_CLOSE)(lambda params: answers.withdraw_diagnostics(params))
    kinds = [types.CodeActionKind.QuickFix, FIX_ALL, MIGRATE]
    options = types.CodeActionOptions(code_action_kinds=kinds)
    server.feature(types.TEXT_DOCUMENT_CODE_ACTION, options)(lambda params: answers.list_code_actions(params))
    return server


class _EditorAnswers:
    """What the server says to what an editor does."""

    def __init__(self, server: LanguageServer, versions: Versions) -> None:
        self._server, self._versions = server, versions

    def publish_diagnostics(self, params: Any) -> None:
        """Send the findings in a document that was opened, changed or saved."""
        document = self._server.workspace.get_text_document(params.text_document.uri)
        found = [_diagnostic_of_finding(document, one) for one in self._selection_and_findings(document)[1]]
        self._server.text_document_publish_diagnostics(
            types.PublishDiagnosticsParams(uri=document.uri, diagnostics=found, version=document.version)
        )

    def withdraw_diagnostics(self, params: types.DidCloseTextDocumentParams) -> None:
        """Send no findings for a document that was closed."""
        nothing = types.PublishDiagnosticsParams(uri=params.text_document.uri, diagnostics=[])
        self._server.text_document_publish_diagnostics(nothing)

    def list_code_actions(self, params: types.CodeActionParams) -> list[types.CodeAction]:
        """Return the fixes at the chosen lines, that of all findings, and the rewrite of the file."""
        document = self._server.workspace.get_text_document(params.text_document.uri)
        selection, findings = self._selection_and_findings(document)
        lines = range(params.range.start.line + 1, params.range.end.line + 2)
        found = [
            *(_fix_of_finding(document, one) for one in findings if one.edits and one.line in lines),
            *_fix_of_all_findings(document, findings, selection),
            *_rewrite_for_torch_amp(document),
        ]
        wanted = params.context.only
        return [
            one
            for one in found
            if wanted is None or any(_is_action_of_kind(one.kind, kind) for kind in wanted)
        ]

    def _selection_and_findings(self, document: TextDocument) -> tuple[LintSelection, list[Finding]]:
        path = Path(document.path)
        try:
            selection = replace(read_lint_selection([path]), versions=self._versions)
            return selection, check_text(document.source, selection.reports_code, self._versions, path)
        except (AmpCompareError, SourceInvalid):
            # half a line is written, or the settings are: the next change tells
            return LintSelection(versions=self._versions), []


def _fix_of_finding(document: TextDocument, finding: Finding) -> types.CodeAction:
    title = f"Fix {finding.code}: {CODES[finding.code].remedy}"
    fixed_by_it = [_diagnostic_of_finding(document, finding)]
    return _code_action(document, title, types.CodeActionKind.QuickFix, finding.edits, fixed_by_it)


def _fix_of_all_findings(
    document: TextDocument, findings: list[Finding], selection: LintSelection
) -> list[types.CodeAction]:
    if not any(finding.edits for finding in findings):
        return []
    text, _, fixed = fixed_text_rest_and_num_fixes(document.source, findings, selection)
    title = f"Fix {format_count(fixed, 'mistake')} of mixed precision"
    return [_code_action(document, title, FIX_ALL, [_whole_document_edit(document, text)])]


def _rewrite_for_torch_amp(document: TextDocument) -> list[types.CodeAction]:
    rewritten = _rewritten_text_and_num_lines_left(document)
    if rewritten is None:
        return []
    text, by_hand = rewritten
    title = f"Rewrite Apex for torch.amp{f', {by_hand} lines left by hand' if by_hand else ''}"
    return [_code_action(document, title, MIGRATE, [_whole_document_edit(document, text)])]


def _rewritten_text_and_num_lines_left(document: TextDocument) -> tuple[str, int] | None:
    """Return the text for `torch.amp`, and how many lines are left by hand; None where it is not proven right.

    What other files of the project do with this one counts, so it is read from the disk: it must be saved.
    """
    path = Path(document.path)
    choice = choose_rewrite_or_adapter([path], rewritten="ordinary")
    result = choice.files[0]
    if path in choice.reasons or not result.is_changed or result.document is None or result.migration is None:
        return None
    if result.document.text != document.source:
        return None
    return result.migration.text, result.num_lines_by_hand


def _is_action_of_kind(kind: object, wanted_kind: object) -> bool:
    """Return whether a kind of action is another one or below it: `source.fixAll.ampcompare` is of `source.fixAll`."""
    one, other = (str(getattr(each, "value", each)) for each in (kind, wanted_kind))
    return one == other or one.startswith(f"{other}.")


def _diagnostic_of_finding(document: TextDocument, finding: Finding) -> types.Diagnostic:
    line = finding.line - 1
    text = document.lines[line].rstrip("\r\n") if line < len(document.lines) else ""
    start, end = (
        types.Position(line, finding.column),
        types.Position(line, max(len(text), finding.column + 1)),
    )
    return types.Diagnostic(
        range=document.position_codec.range_to_client_units(document.lines, types.Range(start, end)),
        message=f"{finding.message}; {CODES[finding.code].remedy}",
        severity=LEVELS[level_of_code(finding.code)],
        code=finding.code,
        source=SOURCE,
    )


def _code_action(
    document: TextDocument,
    title: str,
    kind: types.CodeActionKind | str,
    edits: Iterable[Edit],
    diagnostics: list[types.Diagnostic] | None = None,
) -> types.CodeAction:
    changes = [
        types.TextEdit(range=_range_of_offsets(document, edit.start, edit.end), new_text=edit.text)
        for edit in sorted(set(edits))
    ]
    return types.CodeAction(
        title=title,
        kind=kind,
        diagnostics=diagnostics,
        edit=types.WorkspaceEdit(changes={document.uri: changes}),
    )


def _whole_document_edit(document: TextDocument, text: str) -> Edit:
    return Edit(0, len(document.source), text)


def _range_of_offsets(document: TextDocument, start: int, end: int) -> types.Range:
    """Return the range of offsets in characters, in the units that the client counts in."""
    places = []
    for offset in (start, end):
        before = document.source[:offset].splitlines(keepends=True)
        inside = bool(before) and not before[-1].endswith(("\n", "\r"))
        line = len(before) - inside
        places.append(types.Position(line, len(before[-1]) if inside else 0))
    return document.position_codec.range_to_client_units(document.lines, types.Range(*places))
