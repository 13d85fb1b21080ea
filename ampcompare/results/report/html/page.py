"""Documents as one HTML file that opens anywhere, offline: tables for everyone, charts where scripts may run.

A page is made of templates, a style, a script with the policy that allows only this one, and a look for each arm.
"""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from functools import cache, partial
from importlib.resources import files
from typing import Any

from ampcompare.base.errors import BackendUnavailable
from ampcompare.base.formatting import printable_line
from ampcompare.base.version import __version__
from ampcompare.results.report.base import FORMATS, MAX_LINE, Reporter
from ampcompare.results.report.document import Block, Cell, Document, Figure, Table, Tone
from ampcompare.results.report.html.charts import chart_data
from ampcompare.results.report.outlines import LEAD, PAGES, Chapter

SHOWN_AT_FIRST = 12
COLORS = 9  # in report.css
DASHES = ("solid", "dash", "dot", "dashdot")
NUMBER = re.compile(r"[-+\u2212]?[\d.,]+(e[-+]?\d+)?( ± \S+)?( [(\[].*[)\]])?(/\d+)?|-|nan|inf|-inf")
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
BADGES: dict[Tone, str] = {"good": "good", "bad": "bad"}  # classes of report.css; of others `unclear`


class Html(Reporter):
    """One page; it loads nothing, and its security policy forbids it to."""

    def document_text(self, document: Document) -> str:
        """Return the page."""
        if missing := FORMATS["html"].missing_packages:
            raise BackendUnavailable(
                f"the HTML report needs {' and '.join(missing)}, which this environment does not have; "
                'pip install "ampcompare[html]"'
            )
        whole = [
            Chapter(section.name, section.title, (section.name,))
            for section in document.sections_in_format("html")
        ]
        made = [
            (chapter, document.sections_of(chapter.outline)) for chapter in PAGES.get(document.kind, whole)
        ]
        chapters = [(chapter, sections) for chapter, sections in made if sections]
        blocks = [block for _, sections in chapters for section in sections for block in section.blocks]
        drawn = [block.data for block in blocks if isinstance(block, Figure)]
        charts = [chart for data in drawn for chart in getattr(data, "charts", ())]
        arms, script = row_appearances(document), read_packaged_text("charts.js") if charts else ""
        page: str = load_template("page.html.j2").render(
            document=document,
            first=document.sections_of(LEAD.get(document.kind, ())),
            chapters=chapters,
            arms=arms,
            version=__version__,
            css=read_packaged_text("report.css"),
            script=script,
            policy=_security_policy(script),
            data=_json_for_script_element({"arms": arms, **chart_data(charts)}),
        )
        return page


def row_appearances(document: Document) -> list[dict[str, Any]]:
    """Return how each row of a result looks everywhere on a page: color, and dashes if colors repeat."""
    return [
        {
            "name": printable_line(row, 60) or "(no name)",
            "color": index % COLORS,
            "dash": DASHES[index // COLORS % len(DASHES)],
            "on": index < SHOWN_AT_FIRST,
            "is_reference": row == document.reference,
        }
        for index, row in enumerate(document.rows)
    ]


@cache
def load_template(name: str) -> Any:
    """Return a template by its file name."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    loader = FunctionLoader(read_packaged_text)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        finalize=_text_without_control_characters,
    )  # fmt: skip
    environment.filters["numeric"] = _numeric_column_flags
    environment.filters["with_notes"] = _heads_and_cells_with_notes
    environment.filters["line"] = partial(printable_line, longest=MAX_LINE)
    environment.filters["kind"] = _kind_of_block
    environment.tests["of_kind"] = lambda block, kind: _kind_of_block(block) == kind
    environment.filters["color"] = lambda tone: BADGES.get(tone, "unclear")
    return environment.get_template(name)


def _text_without_control_characters(value: Any) -> Any:
    """Return a text without control characters, which names in a record may have."""
    return CONTROLS.sub("", value) if type(value) is str else value


def _kind_of_block(block: Block) -> str:
    return type(block).__name__.lower()


def _heads_and_cells_with_notes(table: Table) -> tuple[list[str], list[list[Cell]]]:
    """Return heads and cells of a table, with the notes of rows as its last column."""
    heads = [*table.heads, *(["notes"] if table.notes else [])]
    tones = table.states or [""] * len(table.rows)
    rows = []
    for index, (first, *others) in enumerate(table.rows):
        cells = [first if first.text else Cell("(no name)")]
        cells += [cell if cell.text else Cell() for cell in others]
        if table.notes:
            text, tone = "; ".join(table.notes[index]), tones[index]
            cells.append(Cell(text, tone, badge=tone != "") if text else Cell())
        rows.append(cells)
    return heads, rows


def _numeric_column_flags(rows: Sequence[Sequence[Cell]], count: int) -> list[bool]:
    """Return for each of `count` columns whether it holds numbers and is aligned right."""
    columns = [[row[index].text for row in rows] for index in range(count)]
    return [
        all(map(NUMBER.fullmatch, column)) and any(map(str.isdigit, "".join(column))) for column in columns
    ]


@cache
def read_packaged_text(name: str) -> str:
    """Return a template, style sheet or script by its file name."""
    return (files("ampcompare.results.report.html") / "templates" / name).read_text(encoding="utf-8")


def _security_policy(script: str) -> str:
    """Return a policy under which this script runs, by its digest, and nothing is loaded from anywhere."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rest = "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src 'sha256-{digest}'; {rest}"


def _json_for_script_element(data: Any) -> str:
    """Return JSON that can stand inside a script element: no text in it can close the element or open another."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
