"""Documents as one HTML file that opens anywhere, offline: tables for everyone, charts where scripts may run."""

from __future__ import annotations

from ampcompare.runs.report.base import Reporter
from ampcompare.runs.report.document import Document, Figure
from ampcompare.runs.report.html.assets import check_packages, looks, page_parts, template
from ampcompare.runs.report.outlines import LEAD, PAGES, Chapter

__all__ = ["Html"]


class Html(Reporter):
    """One page; it loads nothing, and its security policy forbids it to."""

    def write(self, document: Document) -> str:
        """Return the page.

        Raises:
            BackendUnavailable: jinja2 is not installed.
        """
        check_packages()
        whole = [Chapter(section.name, section.title, (section.name,)) for section in document.shown("html")]
        made = [(chapter, document.chosen(chapter.outline)) for chapter in PAGES.get(document.kind, whole)]
        chapters = [(chapter, sections) for chapter, sections in made if sections]
        blocks = [block for _, sections in chapters for section in sections for block in section.blocks]
        drawn = [block.data for block in blocks if isinstance(block, Figure)]
        charts = [chart for data in drawn for chart in getattr(data, "charts", ())]
        page: str = template("page.html.j2").render(
            document=document,
            first=document.chosen(LEAD.get(document.kind, ())),
            chapters=chapters,
            **page_parts(looks(document), charts),
        )
        return page
