"""The table of published figures: what it shows, what it leaves out, and that its texts are harmless."""

from collections.abc import Callable
from typing import Any

from ampcompare.results.records.comparison import Comparison, Published, PublishedRow
from ampcompare.results.report.comparison import published_legend, published_table

MakeComparison = Callable[..., Comparison]


def beside(make: MakeComparison, rows: list[dict[str, Any]], **options: Any) -> Comparison:
    """A comparison of two arms with published rows."""
    published = Published(source="a post", recipe="r", rows=[PublishedRow(**row) for row in rows], **options)
    return make(["fp32", "half"]).model_copy(update={"published": published})


def test_only_what_was_published_has_columns(make_comparison: MakeComparison) -> None:
    """A column of measured values stands next to a published one, and there are no others."""
    rows = [
        {"name": "fp32", "row": "fp32", "seconds": 31352.0, "top1": 0.7579},
        {"name": "half at 4096", "row": "half", "diverged": True, "remark": "NaN"},
        {"name": "O2", "top1": 0.7559},
    ]
    table = published_table(beside(make_comparison, rows))
    assert table is not None
    headers, lines = table.heads, table.texts
    assert headers == [
        *("as published", "top-1 %, published", "top-1 %, measured", "time, published", "time, measured", "remark")
    ]
    assert lines == [
        ["fp32", "75.79", "50.00", "8h42m32s", "-", "-"],
        ["half at 4096 (half)", "NaN", "51.00", "-", "-", "NaN"],
        ["O2", "75.59", "not run", "-", "-", "-"],
    ]


def test_the_legend_says_in_what_runs_depart(make_comparison: MakeComparison) -> None:
    """A smaller scale, or up to six other settings, are named with the source and its machine."""
    row = [{"name": "fp32", "row": "fp32", "top1": 0.75}]
    small = published_legend(beside(make_comparison, row, scale="small", machine="8x V100"))
    assert small.startswith("Published: a post, on 8x V100; one run per line.")
    assert "numbers cannot" in small
    many = published_legend(beside(make_comparison, row, differs=[f"s{n} 1, not 2" for n in range(8)]))
    assert "s5 1, not 2 and 2 more" in many
    assert "s6" not in many
