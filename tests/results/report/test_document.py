"""Documents: what outlines choose, how tables fit a terminal, and that every format renders every block."""

import io
import re
from itertools import chain
from pathlib import Path

import pytest

import ampcompare
from ampcompare.results.records.outlook import ArmOutlook, Outlook, ShareLost, WatchedFirstSteps
from ampcompare.results.report.base import FORMATS, write_result_in_formats
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
from ampcompare.results.report.documents.outlook import outlook_document
from ampcompare.results.report.outlines import LEAD, OUTLINES, PAGES
from ampcompare.results.report.tables import grid_text, listing_text, terminal_width
from ampcompare.results.report.terminal import Terminal

PACKAGE = Path(ampcompare.__file__).parent
DOCUMENT = Document(
    "",
    [
        Section("said", [Text(["One sentence.", "Another."])]),
        Section("listed", [Items([("first", ["because"]), "second"], "A list")], "Points"),
        Section(
            "shown",
            [Table([Column("arm"), Column("n", numeric=True)], [[Cell("fp32"), Cell("7", value=7.5)]], "T")],
        ),
        Section("code", [Code("a = 1\n    b = 2", "Lines")]),
        Section("next", [Step("do this", "ampcompare list")]),
        Section(
            "facts", [Facts([("", [("torch", "2.4"), ("lr", [("0.1", "fp32"), ("0.2", "half")])])], "Known")]
        ),
        Section(
            "drawn",
            lambda: [
                Figure(
                    "bars",
                    lambda: {
                        "title": "",
                        "bars": [{"name": "fp32@0", "text": "", "segments": []}],
                        "key": [],
                    },
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
    if FORMATS[form].missing_packages:
        pytest.skip("the page needs the extra html")
    text = FORMATS[form].make_reporter().document_text(DOCUMENT)
    wanted = {
        "latex": ["% One sentence.", "fp32 & 7"],
        "csv": ["arm,n\nfp32,7.5\n"],
        "json": ['"key": 7'],
        "html": [
            "<h1>A title</h1>",
            "<li>first<ul>",
            "<dt>torch</dt>",
            "fp32@0",
            "do this",
            "<h3>Lines</h3>",
        ],
        "md": [
            "# All blocks",
            "## Points",
            "- first\n  - because",
            "    b = 2",
            "- lr: 0.1 (fp32); 0.2 (half)",
        ],
        "table": ["One sentence.\nAnother.", "  - first\n      because", "  lr     0.1 (fp32); 0.2 (half)"],
    }
    assert all(part in text for part in wanted[form]), text


def test_an_outline_chooses_sections() -> None:
    """The first of two names that has blocks is taken, so many of its blocks, once, and folded where it says."""
    chosen = DOCUMENT.sections_of(
        ["empty|listed", "listed", "no such", "said:1", "shown+", "code!", "next*", "drawn"]
    )
    assert [section.name for section in chosen] == ["listed", "said", "shown", "code", "next", "drawn"]
    assert [section.fold for section in chosen] == ["", "", "closed", "open", "open", ""]
    assert (chosen[2].title, chosen[5].is_empty_without_figures) == (
        "T",
        False,
    )  # a folded table gives its title to the fold


def test_what_no_format_shows_is_not_made() -> None:
    """A section that takes time, such as a figure, is made once, and only for formats that show it."""
    made = []
    document = Document(
        "exec", [Section("records", [Text(["said"])]), Section("other", lambda: made.append(1) or [])]
    )
    assert "said" in Terminal().document_text(document)
    assert made == []


def test_every_name_of_an_outline_is_a_section_that_is_made() -> None:
    """A name that was misspelt, or whose section is gone, would be left out in silence."""
    sources = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    made = {*re.findall(r'Section\(\s*"([^"]+)"', sources)}
    pages = (chapter.outline for chapters in PAGES.values() for chapter in chapters)
    outlines = chain(LEAD.values(), pages, *(of_kind.values() for of_kind in OUTLINES.values()))
    names = {name for entry in chain(*outlines) for name in entry.rstrip("+*!?").partition(":")[0].split("|")}
    assert names - made == set()


ROWS = [["fp32", "1.25", "a" * 12], ["apex:O2", "-", "b"]]
HEADERS = ["arm", "top-1 %", "engine"]


def test_a_wide_table_is_folded() -> None:
    """Columns that do not fit go on below, each part with the first column; every cell is there once more."""
    whole = grid_text(ROWS, HEADERS)
    assert len(whole.splitlines()) == 4
    assert grid_text(ROWS, HEADERS, 80) == whole
    first, second = grid_text(ROWS, HEADERS, 24).split("\n\n")
    assert first.splitlines()[0].split() == ["arm", "top-1", "%"]
    assert second.splitlines()[0].split() == ["arm", "engine"]
    assert [line.split()[0] for line in second.splitlines()[2:]] == ["fp32", "apex:O2"]
    assert max(map(len, [*first.splitlines(), *second.splitlines()])) <= 24


def test_a_listing_without_room_for_its_text_has_a_paragraph_for_each_row() -> None:
    """Where the columns alone fill the terminal, their heads stand before the values that there are."""
    rows = [["runs/one", "2026-01-02 03:04", "-", "script, native:bf16", "0-2", " ".join(["word"] * 20)]]
    heads = ["folder", "changed", "tag", "arms", "seeds", "headline"]
    for width in (60, 80):
        first, *rest = listing_text(rows * 2, heads, width).splitlines()
        assert first == "runs/one"
        assert rest.count("runs/one") == 1
        assert max(map(len, rest)) <= width
        said = " ".join(" ".join(rest[: rest.index("runs/one")]).split())
        assert said == f"changed 2026-01-02 03:04; arms script, native:bf16; seeds 0-2 {rows[0][-1]}"


def test_only_a_terminal_has_a_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe or a file gets whole lines, whatever COLUMNS says."""
    monkeypatch.setenv("COLUMNS", "72")
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert terminal_width() is None
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert terminal_width() == 72


def _outlook(*, rates_known: bool = True) -> Outlook:
    share = ShareLost(now=0.2, rest=0.6, at={50: 0.18, 99: 0.22}, curve=[0.22, 0.6, 1.0])
    prefix = WatchedFirstSteps(
        steps=100,
        total=2000,
        basis="its scheduler, to step 2000" if rates_known else "a plateau of a metric decides them",
        rates_known=rates_known,
        shares={"bf16": share},
    )
    arm = ArmOutlook(arm="half:bf16", word="will not hold", part="weights", why="60 % are lost", cure="kahan")
    return Outlook(
        subject="train.py", prefix=prefix, twin=0.002, arms=[arm, ArmOutlook(arm="O2", word="cannot know")]
    )


def test_a_line_for_each_arm() -> None:
    lines = Terminal(100).document_text(outlook_document(_outlook())).splitlines()
    assert lines[2].split("  ") == ["half:bf16", "will not hold", "weights", "60 % are lost -> kahan"]
    assert lines[3].split() == ["O2", "cannot", "know", "-", "-"]
    assert lines[5].startswith("100 steps in fp32; learning rates ahead: its scheduler, to step 2000; a twin")


def test_a_page_draws_the_share_lost(tmp_path: Path) -> None:
    """Measured at the probes of the prefix, and from the last one computed to the end of the schedule."""
    figure = next(
        section for section in outlook_document(_outlook()).sections if section.name == "curve"
    ).blocks[0]
    computed = "4.95,78.00 52.48,40.00 100.00,0.00"
    assert figure.data["lines"] == [(1, "2.50,82.00 4.95,78.00", False), (1, computed, True)]  # type: ignore[union-attr]
    paths = write_result_in_formats(_outlook(), tmp_path, ("json", "html"))
    assert [path.name for path in paths] == ["outlook.json", "outlook.html"]
    assert computed in paths[1].read_text(encoding="utf-8")
