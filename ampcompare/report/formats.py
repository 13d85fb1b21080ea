"""The formats of a report, each in a module that is imported when it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ampcompare.report.base import Reporter

__all__ = ["FORMATS", "Format"]


@dataclass(frozen=True)
class Format:
    """A format.

    Attributes:
        implementation: module and class of its `Reporter`, as `module:Class`.
        file: name that it has in a run directory, where every `compare` writes it; None for formats that only
            `report --format` makes.
        packages: that it needs beyond those of a plain installation; without them no file is written.
        seconds: age below which the file is not replaced while cells are missing, for formats that take long to write.
    """

    implementation: str
    file: str | None = None
    packages: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def missing(self) -> list[str]:
        """The packages that it needs and that are not installed."""
        return [package for package in self.packages if find_spec(package) is None]

    def reporter(
        self, width: int | None = None, logs: Mapping[str, str] | None = None, columns: Sequence[str] = ()
    ) -> Reporter:
        """Return a new reporter.

        Args:
            width: as for `Reporter`.
            logs: as for `Reporter`, and so are `columns`.
        """
        module, _, name = self.implementation.partition(":")
        reporter: Reporter = getattr(import_module(module), name)(width)
        reporter.logs = logs or {}
        reporter.columns = columns
        return reporter


FORMATS: dict[str, Format] = {
    "table": Format("ampcompare.report.terminal:Terminal"),
    "md": Format("ampcompare.report.markdown:Markdown", "report.md"),
    "csv": Format("ampcompare.report.csv:Csv", "report.csv"),
    "json": Format("ampcompare.report.json:Json", "report.json"),
    "html": Format("ampcompare.report.html.page:Html", "report.html", packages=("jinja2",), seconds=10.0),
    "latex": Format("ampcompare.report.latex:Latex"),
}
"""By the name that `report --format` takes. A new line here is a new format."""
