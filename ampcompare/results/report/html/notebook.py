"""Results as notebooks show them: text, and HTML without scripts whose style reaches nothing else on the page."""

import re
from functools import cache
from typing import Any

from ampcompare.base.formatting import printable_line
from ampcompare.results.analysis.summary import summarize
from ampcompare.results.records.run import RunRecord
from ampcompare.results.report.base import FORMATS, document_of
from ampcompare.results.report.document import Code, Document, Figure, Section, Table
from ampcompare.results.report.html.page import load_template, read_packaged_text, row_appearances
from ampcompare.results.report.outlines import LEAD
from ampcompare.results.report.terminal import Terminal

# What says in which colors a page is shown, before what the reader's system says: JupyterLab and nbconvert, VS Code,
# sites of mkdocs-material, Colab.
DARK = (
    '[data-jp-theme-light="false"]',
    ".vscode-dark",
    '[data-md-color-scheme="slate"]',
    'html[theme="dark"]',
    '[data-theme="dark"]',
)
LIGHT = (
    '[data-jp-theme-light="true"]',
    ".vscode-light",
    '[data-md-color-scheme="default"]',
    'html[theme="light"]',
    '[data-theme="light"]',
)
VARIABLES = re.compile(
    r"^:root \{\n(.*?)\n\}\n@media \(prefers-color-scheme: dark\) \{\n  :root \{\n(.*?)\n  \}\n\}\n",
    re.DOTALL,
)


@cache
def scoped_page_style() -> str:
    """Return the style of the page for what is inside of one element: nested rules, and colors on that element."""
    (_, light, dark, rest) = VARIABLES.split(read_packaged_text("report.css"))
    rest = rest.replace("\nbody {", "\n& {").replace("\nhtml", "\n.html")
    here = ".ampcompare-view"
    return "\n".join(
        [
            f"{here} {{ {light} }}",
            f"@media (prefers-color-scheme: dark) {{ {here} {{ {dark} }} }}",
            f":is({', '.join(LIGHT)}) {here} {{ {light} }}",
            f":is({', '.join(DARK)}) {here} {{ {dark} }}",
            # Twice, to win against the rules that JupyterLab has for all tables of outputs.
            f"{here}{here} {{\n{rest}\n{read_packaged_text('notebook.css')}\n}}",
        ]
    )


def document_html_or_none(document: Document) -> str | None:
    """Return a document as HTML for the output of a cell; None without the packages of the page."""
    if FORMATS["html"].missing_packages:
        return None
    sections = document.sections_in_format("notebook")
    blocks = [block for section in sections for block in section.blocks]
    filled: str = load_template("notebook.html.j2").render(
        document=document,
        first=document.sections_of(LEAD.get(document.kind, ())),
        sections=sections,
        arms=row_appearances(document),
        figures=any(isinstance(block, Figure) for block in blocks),
        css=scoped_page_style(),
    )
    return filled


def result_text_and_html(result: Any) -> tuple[str, str | None]:
    """Return a result that has a document as text and as HTML."""
    document = document_of(result)
    text = Terminal().document_text(document).rstrip("\n")
    html = document_html_or_none(document)
    return text if html else f'{text}\n\nWith figures: pip install "ampcompare[html]"', html


def record_text_and_html(record: RunRecord) -> tuple[str, str | None]:
    """Return a single run, as a comparison of one arm."""
    return result_text_and_html(summarize([record], arms=[record.arm], reference=record.arm))


def lint_text_and_html(report: Any) -> tuple[str, str | None]:
    """Return what lint found, a `Report` of it."""
    rows = report.rows()
    unread = list(map(str, report.unread))
    title = report.summary()
    lines = [f"{place}: {code} {printable_line(message, 500)}" for place, code, _, message, _ in rows]
    table = Table.from_rows(
        ("place", "code", "level", "found", "remedy"),
        rows,
        caption="place, code, level, found, remedy",
        prose=True,
    )
    document = Document("", [Section("found", [table] if rows else [])], title=title, warnings=unread)
    return "\n".join([*lines, *unread, title]), document_html_or_none(document)


def migration_text_and_html(migrated: Any) -> tuple[str, str | None]:
    """Return what migrate makes of a file, a `FileMigration`, with the patch."""
    rows = migrated.rows()
    patch = migrated.diff()
    title = migrated.summary()
    table = Table.from_rows(("place", "kind", "message"), rows, caption="place, kind, message", prose=True)
    sections = [
        Section("found", [table] if rows else []),
        Section("patch", [Code(patch)] if patch else [], "Patch"),
    ]
    text = "\n".join([title, "", patch, *migrated.lines()]).rstrip("\n")
    return text, document_html_or_none(Document("", sections, title=title))
