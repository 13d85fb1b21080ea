"""What each format shows of each kind of result, and in which order: the one place that decides it.

An outline is a row of names of sections. `a|b` is the first of both that there is, `a:2` has at most two blocks of it.
On a page `a+` is folded, `a*` stands open where it is short, `a!` stands open, and `a?` is left out where its figure
has only a sentence, which says why there is nothing to draw. A section is shown once.
"""

from dataclasses import dataclass

Outline = tuple[str, ...]


@dataclass(frozen=True)
class Chapter:
    """A part of a page with several sections.

    Attributes:
        name: its address on the page.
        title: in the list of chapters; it stands above them too, unless its only section has a title.
        outline: its sections.
        kind: `paper`: on a ground of its own, under its title. `cards`: without title. `open`: without a ground; its
            sections have headings like chapters, and are in the list of chapters too.
    """

    name: str
    title: str
    outline: Outline
    kind: str = "paper"


_TERMINAL = ("headline|conclusions", "overview", "published", "precisions")
_COMPARISON = {
    "table": (*_TERMINAL, "next:2"),
    "details": (
        *_TERMINAL,
        "next",
        "measurements",
        "verdicts",
        "ledger",
        "samples",
        "models",
        "conclusions",
        "stacks",
        "environment",
    ),
    "md": (
        *("headline", "overview", "next", "measurements"),
        *("verdicts", "ledger", "precisions", "samples", "models"),
        *("published", "conclusions", "stacks", "environment", "command"),
    ),
    "latex": ("headline", "overview", "measurements", "verdicts", "published"),
    "csv": ("values",),
    "notebook": ("overview", "differences?", "ratios?", "pictures!", "usage", "conclusions+", "runs+"),
}

OUTLINES: dict[str, dict[str, Outline]] = {
    "comparison": _COMPARISON,
    "diagnosis": {
        "md": ("verdict", "cure", "faults", "worst", "formats", "losses", "trials", "notes"),
        "notebook": ("map", "places", "formats", "candidates"),
    },
    "exec": {"md": ("records", "endings"), "csv": ("values",)},
    "explanation": {
        "md": ("summary", "does", "memory", "twin", "differs", "script", "twin's script", "compare"),
        "notebook": ("does", "memory", "differs", "script", "twin's script"),
    },
    "judged": {
        **_COMPARISON,
        "details": (*_TERMINAL, "next", "columns", "conclusions"),
        "notebook": ("overview", "differences?", "ratios?", "pictures!", "conclusions+", "runs+"),
    },
    "ledger": {"md": ("headline", "parts", "where")},
    "outlook": {"md": ("arms", "basis")},
    "replay": {"md": ("answer", "modules", "notes")},
    "profile": {"md": ("headline", "reasons", "tables", "notes")},
}
"""By the kind of a document, then by format. A format without an entry shows what Markdown shows."""

LEAD: dict[str, Outline] = {
    "comparison": ("answer", "next"),
    "diagnosis": ("cure", "faults"),
    "exec": ("endings",),
    "judged": ("answer", "next"),
    "outlook": ("arms",),
    "profile": ("further", "reasons", "notes"),
}
"""What stands above everything else on a page, below its title."""

_PAGE = (
    Chapter("effects", "Differences", ("differences", "ratios"), "cards"),
    Chapter(
        "summary",
        "Summary",
        ("overview", "conclusions", "ledger*", "precisions", "samples+", "models+", "published"),
    ),
    Chapter("figures", "Curves", ("curves", "costs"), "open"),
    Chapter("runs", "Runs", ("runs*", "measured+")),
    Chapter("settings", "Settings", ("differing", "stacks", "settings", "machine+")),
    Chapter("again", "Reproduce", ("again",)),
)
PAGES: dict[str, tuple[Chapter, ...]] = {
    "comparison": _PAGE,
    "diagnosis": (
        Chapter("map", "Map", ("map",)),
        Chapter("worst", "Worst places", ("places", "formats", "candidates")),
    ),
    "exec": (Chapter("records", "Figures", ("records",)),),
    "judged": _PAGE,
    "outlook": (Chapter("curve", "Share of the update lost", ("curve",)),),
    "profile": (
        Chapter("step", "One step by phase", ("step",)),
        Chapter("work", "One step by kind of work", ("work",)),
        Chapter("memory", "Peak of memory", ("memory",)),
        Chapter("figures", "Figures", ("tables",)),
    ),
}
"""The chapters of a page, by the kind of a document; those without sections are left out."""
