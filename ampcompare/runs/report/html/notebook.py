"""Results as notebooks show them: text, and HTML without scripts whose style reaches nothing else on the page."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

from ampcompare.base.shown import ShownParts
from ampcompare.runs.analysis.summary import summarize
from ampcompare.runs.records.run import RunRecord
from ampcompare.runs.report.base import FORMATS, document_of
from ampcompare.runs.report.document import Code, Document, Figure, Items, Section, Table
from ampcompare.runs.report.html.assets import looks, style, template
from ampcompare.runs.report.outlines import LEAD
from ampcompare.runs.report.terminal import Terminal

__all__ = ["document_view", "parts_view", "record_view", "result_view", "scoped_style"]

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
VARIABLES = re.compile(r'^:root(?:\[data-theme="dark"\])? \{\n(.*?)^\}\n', re.DOTALL | re.MULTILINE)
SYSTEM = re.compile(r"^@media \(prefers-color-scheme: dark\) \{\n.*?^\}\n", re.DOTALL | re.MULTILINE)


@cache
def scoped_style() -> str:
    """Return the style of the page for what is inside of one element: nested rules, and colors on that element."""
    whole = style("report.css")
    light, dark = VARIABLES.findall(whole)
    rest = VARIABLES.sub("", SYSTEM.sub("", whole)).replace("\nbody {", "\n& {").replace("\nhtml", "\n.html")
    here = ".ampcompare-view"
    return "\n".join(
        [
            f"{here} {{ {light} }}",
            f"@media (prefers-color-scheme: dark) {{ {here} {{ {dark} }} }}",
            f":is({', '.join(LIGHT)}) {here} {{ {light} }}",
            f":is({', '.join(DARK)}) {here} {{ {dark} }}",
            # Twice, to win against the rules that JupyterLab has for all tables of outputs.
            f"{here}{here} {{\n{rest}\n{style('notebook.css')}\n}}",
        ]
    )


def document_view(document: Document) -> str | None:
    """Return a document as HTML for the output of a cell; None without the packages of the page."""
    if FORMATS["html"].missing:
        return None
    sections = document.shown("notebook")
    blocks = [block for section in sections for block in section.blocks]
    filled: str = template("notebook.html.j2").render(
        document=document,
        first=document.chosen(LEAD.get(document.kind, ())),
        sections=sections,
        arms=looks(document),
        figures=any(isinstance(block, Figure) for block in blocks),
        css=scoped_style(),
    )
    return filled


def result_view(result: Any) -> tuple[str, str | None]:
    """Return a result that has a document as text and as HTML."""
    document = document_of(result)
    text = Terminal().write(document).rstrip("\n")
    html = document_view(document)
    return text if html else f'{text}\n\nWith figures: pip install "ampcompare[html]"', html


def record_view(record: RunRecord) -> tuple[str, str | None]:
    """Return a single run, as a comparison of one arm."""
    return result_view(summarize([record], arms=[record.arm], reference=record.arm))


def parts_view(result: ShownParts) -> tuple[str, str | None]:
    """Return a result of parts as text, and as HTML with its tables, lists and code."""
    parts = result._parts()
    tables = [
        Section(title, [Table.of(heads, rows, caption=", ".join(heads), prose=True)], title)
        for title, heads, rows in parts.tables
        if rows
    ]
    lists = [Section(title, [Items(lines)], title) for title, lines in parts.lists]
    codes = [Section(title, [Code(text)], title) for title, text in parts.codes]
    sections = [replace(section, name=str(at)) for at, section in enumerate([*tables, *lists, *codes])]
    document = Document("", sections, title=parts.title, subtitle=parts.subtitle, warnings=parts.warnings)
    return parts.text, document_view(document)
