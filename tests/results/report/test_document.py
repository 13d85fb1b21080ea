"""Documents: what an outline chooses of them, and that every format renders every block."""

import re
from itertools import chain
from pathlib import Path

import pytest

import ampcompare
from ampcompare.results.report.base import FORMATS
from ampcompare.results.report.document import (
    Cell,
    Code,
    Column,
    Document,
    Facts,
    Figure,
    Items,
    Section,
    Step,
    Table,
    Text,
)
from ampcompare.results.report.outlines import LEAD, OUTLINES, PAGES
from ampcompare.results.report.terminal import Terminal

PACKAGE = Path(ampcompare.__file__).parent
DOCUMENT = Document(
    "",
    [
        Section("said", [Text(["One sentence.", "Another."])]),
        Section("listed", [Items([("first", ["because"]), "second"], "A list")], "Points"),
        Section(
            "shown", [Table([Column("arm"), Column("n", numeric=True)], [[Cell("fp32"), Cell("7", value=7.5)]], "T")]
        ),
        Section("code", [Code("a = 1\n    b = 2", "Lines")]),
        Section("next", [Step("do this", "ampcompare list")]),
        Section("facts", [Facts([("", [("torch", "2.4"), ("lr", [("0.1", "fp32"), ("0.2", "half")])])], "Known")]),
        Section(
            "drawn",
            lambda: [
                Figure(
                    "bars", lambda: {"title": "", "bars": [{"name": "fp32@0", "text": "", "segments": []}], "key": []}
                )
            ],
        ),
        Section("empty", []),
    ],
    {"key": 7},
    "All blocks",
    "A title",
)


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_renders_every_block(form: str) -> None:
    """A document that is no comparison has all of its words in each format that shows them."""
    if FORMATS[form].missing:
        pytest.skip("the page needs the extra html")
    text = FORMATS[form].reporter().write(DOCUMENT)
    wanted = {
        "latex": ["% One sentence.", "fp32 & 7"],
        "csv": ["arm,n\nfp32,7.5\n"],
        "json": ['"key": 7'],
        "html": ["<h1>A title</h1>", "<li>first<ul>", "<dt>torch</dt>", "fp32@0", "do this", "<h3>Lines</h3>"],
        "md": ["# All blocks", "## Points", "- first\n  - because", "    b = 2", "- lr: 0.1 (fp32); 0.2 (half)"],
        "table": ["One sentence.\nAnother.", "  - first\n      because", "  lr     0.1 (fp32); 0.2 (half)"],
    }
    assert all(part in text for part in wanted[form]), text


def test_an_outline_chooses_sections() -> None:
    """The first of two names that has blocks is taken, so many of its blocks, once, and folded where it says."""
    chosen = DOCUMENT.sections_of(["empty|listed", "listed", "no such", "said:1", "shown+", "code!", "next*", "drawn"])
    assert [section.name for section in chosen] == ["listed", "said", "shown", "code", "next", "drawn"]
    assert [section.fold for section in chosen] == ["", "", "closed", "open", "open", ""]
    assert (chosen[2].title, chosen[5].is_bare) == ("T", False)  # a folded table gives its title to the fold


def test_what_no_format_shows_is_not_made() -> None:
    """A section that takes time, such as a figure, is made once, and only for formats that show it."""
    made = []
    document = Document("exec", [Section("records", [Text(["said"])]), Section("other", lambda: made.append(1) or [])])
    assert "said" in Terminal().write(document)
    assert made == []


def test_every_name_of_an_outline_is_a_section_that_is_made() -> None:
    """A name that was misspelt, or whose section is gone, would be left out in silence."""
    sources = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    made = {*re.findall(r'Section\(\s*"([^"]+)"', sources)}
    pages = (chapter.outline for chapters in PAGES.values() for chapter in chapters)
    outlines = chain(LEAD.values(), pages, *(of_kind.values() for of_kind in OUTLINES.values()))
    names = {name for entry in chain(*outlines) for name in entry.rstrip("+*!?").partition(":")[0].split("|")}
    assert names - made == set()
