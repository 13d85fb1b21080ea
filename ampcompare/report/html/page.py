"""Documents as one HTML file that opens anywhere, offline: tables for everyone, charts where scripts may run."""

from __future__ import annotations

from dataclasses import dataclass

from ampcompare.report.base import Reporter
from ampcompare.report.document import Document, Figure, Section
from ampcompare.report.html.assets import check_packages, looks, page_parts, template
from ampcompare.report.outlines import LEAD, PAGES, Chapter

__all__ = ["Html"]


class Html(Reporter):
    """One page; it loads nothing, and its security policy forbids it to."""

    def write(self, document: Document) -> str:
        """Return the page.

        Raises:
            BackendUnavailable: jinja2 is not installed.
        """
        check_packages()
        made = ((chapter, document.chosen(chapter.outline)) for chapter in PAGES[document.kind])
        chapters = [_Chapter(chapter, sections) for chapter, sections in made if sections]
        blocks = [block for chapter in chapters for section in chapter.sections for block in section.blocks]
        drawn = [block.data for block in blocks if isinstance(block, Figure)]
        charts = [chart for data in drawn for chart in getattr(data, "charts", ())]
        page: str = template("page.html.j2").render(
            document=document,
            first=document.chosen(LEAD.get(document.kind, ())),
            chapters=chapters,
            addresses=[address for chapter in chapters for address in chapter.addresses],
            **page_parts(looks(document), charts),
        )
        return page


@dataclass(frozen=True)
class _Chapter:
    """A chapter with the sections that it has."""

    of: Chapter
    sections: list[Section]

    @property
    def name(self) -> str:
        return self.of.name

    @property
    def kind(self) -> str:
        return self.of.kind

    @property
    def heading(self) -> str:
        only = self.sections[0] if len(self.sections) == 1 and not self.sections[0].fold else None
        return "" if self.kind == "cards" else only.title if only and only.title else self.of.title

    @property
    def is_bare(self) -> bool:
        return all(section.is_bare for section in self.sections)

    @property
    def addresses(self) -> list[tuple[str, str]]:
        further = self.sections[1:] if self.kind == "open" else []
        return [(self.of.name, self.of.title), *((section.name, section.title) for section in further)]
