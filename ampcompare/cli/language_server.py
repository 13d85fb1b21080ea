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
from ampcompare.source.lint.run import Selection, fixed_text_rest_and_num_fixes, read_selection
from ampcompare.source.migrate.adapter.choice import choose_rewrite_or_adapter
from ampcompare.source.syntax import SourceInvalid
from ampcompare.source.versions import known_versions

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
    versions = known_versions(torch_version)

    def selection_and_findings_of(document: TextDocument) -> tuple[Selection, list[Finding]]:
        path = Path(document.path)
        try:
            selection = replace(read_selection([path]), versions=versions)
            return selection, check_text(document.source, selection.reports_code, versions, path)
        except (AmpCompareError, SourceInvalid):
            # half a line is written, or the settings are: the next change tells
            return Selection(versions=versions), []

    def publish_diagnostics(uri: str) -> None:
        document = server.workspace.get_text_document(uri)
        diagnostics = [
            _diagnostic_of_finding(document, finding) for finding in selection_and_findings_of(document)[1]
        ]
        server.text_document_publish_diagnostics(
            types.PublishDiagnosticsParams(uri=uri, diagnostics=diagnostics, version=document.version)
        )

    def report_document(params: Any) -> None:
        publish_diagnostics(params.text_document.uri)

    for event in (types.TEXT_DOCUMENT_DID_OPEN, types.TEXT_DOCUMENT_DID_CHANGE, types.TEXT_DOCUMENT_DID_SAVE):
        server.feature(event)(report_document)

    @server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
    def withdraw_diagnostics(params: types.DidCloseTextDocumentParams) -> None:
        nothing = types.PublishDiagnosticsParams(uri=params.text_document.uri, diagnostics=[])
        server.text_document_publish_diagnostics(nothing)

    kinds = [types.CodeActionKind.QuickFix, FIX_ALL, MIGRATE]

    @server.feature(types.TEXT_DOCUMENT_CODE_ACTION, types.CodeActionOptions(code_action_kinds=kinds))
    def list_code_actions(params: types.CodeActionParams) -> list[types.CodeAction]:
        document = server.workspace.get_text_document(params.text_document.uri)
        selection, findings = selection_and_findings_of(document)
        first, last = params.range.start.line, params.range.end.line
        found = []
        for finding in findings:
            if finding.edits and first <= finding.line - 1 <= last:
                title = f"Fix {finding.code}: {CODES[finding.code].remedy}"
                fixed_by_it = [_diagnostic_of_finding(document, finding)]
                kind = types.CodeActionKind.QuickFix
                found.append(_code_action(document, title, kind, finding.edits, fixed_by_it))
        if any(finding.edits for finding in findings):
            text, _, fixed = fixed_text_rest_and_num_fixes(document.source, findings, selection)
            title = f"Fix {format_count(fixed, 'mistake')} of mixed precision"
            found.append(_code_action(document, title, FIX_ALL, [_whole_document_edit(document, text)]))
        if (rewritten := _rewritten_text_and_num_lines_left(document)) is not None:
            text, by_hand = rewritten
            rest = f", {by_hand} lines left by hand" if by_hand else ""
            found.append(
                _code_action(
                    document,
                    f"Rewrite Apex for torch.amp{rest}",
                    MIGRATE,
                    [_whole_document_edit(document, text)],
                )
            )
        wanted = params.context.only
        return [
            one
            for one in found
            if wanted is None or any(_is_action_of_kind(one.kind, kind) for kind in wanted)
        ]

    return server


def _rewritten_text_and_num_lines_left(document: TextDocument) -> tuple[str, int] | None:
    """Return the text for `torch.amp`, and how many lines are left by hand; None where `migrate` rewrites nothing.

    What other files of the project do with this one counts, so it is read from the disk: it must be saved.
    """
    path = Path(document.path)
    choice = choose_rewrite_or_adapter([path])
    result = choice.files[0]
    if path in choice.reasons or not result.is_changed or result.document is None or result.migration is None:
        return None
    if result.document.text != document.source:
        return None
    return result.migration.text, result.by_hand


def _is_action_of_kind(kind: object, wanted: object) -> bool:
    """Return whether a kind of action is another one or below it: `source.fixAll.ampcompare` is of `source.fixAll`."""
    one, other = (str(getattr(each, "value", each)) for each in (kind, wanted))
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
