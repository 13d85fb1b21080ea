"""The result itself as one strict JSON document, which `report` reads again."""

from ampcompare.results.records.document import dump_json
from ampcompare.results.report.base import Reporter
from ampcompare.results.report.document import Document


class Json(Reporter):
    """Everything; non-finite numbers are strings."""

    def document_text(self, document: Document) -> str:
        return dump_json(document.data) + "\n"
