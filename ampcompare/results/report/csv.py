"""The values of a document's table, for spreadsheets and other programs."""

import csv
import io
from contextlib import suppress

from ampcompare.base.formatting import printable_line
from ampcompare.results.report.base import Reporter
from ampcompare.results.report.document import Document, Table

FORMULA = ("=", "+", "-", "@")


class Csv(Reporter):
    """One table, a line per row: numbers in full precision, and texts that no spreadsheet takes for a formula."""

    def document_text(self, document: Document) -> str:
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        blocks = (block for section in document.sections_in_format("csv") for block in section.blocks)
        for table in (block for block in blocks if isinstance(block, Table)):
            writer.writerow(map(_cell_without_formula, table.heads))
            rows = ([cell.text if cell.value is None else cell.value for cell in row] for row in table.rows)
            writer.writerows(map(_cell_without_formula, row) for row in rows)
        return out.getvalue()


def _cell_without_formula(value: object) -> object:
    if not isinstance(value, str):
        return value
    line = printable_line(value, 2000)
    with suppress(ValueError):
        float(line)
        return line
    return f"'{line}" if line.startswith(FORMULA) else line
