"""The outcome of a comparison as JUnit XML, which most CI systems show."""

from collections.abc import Sequence
from xml.etree import ElementTree

from ampcompare.base.formatting import printable_line
from ampcompare.results.analysis.gates import GateOutcome
from ampcompare.results.records.comparison import Comparison
from ampcompare.results.report.base import MAX_LINE


def junit_xml(comparison: Comparison, checks: Sequence[GateOutcome]) -> str:
    """Return one test case per arm, which fails with its runs, one per gate and arm, and the headline as output.

    Args:
        comparison: its arms; verdicts fail no test case.
        checks: those of gates, for arms of the comparison.
    """

    def add_case(arm: str, name: str) -> ElementTree.Element:
        case = {"classname": f"ampcompare.{printable_line(arm) or '(no name)'}", "name": printable_line(name)}
        return ElementTree.SubElement(suite, "testcase", case)

    failed = [row for row in comparison.arms if row.failed or not (row.has_completed or row.diverged)]
    suite = ElementTree.Element(
        "testsuite",
        name=printable_line(comparison.tag) or "ampcompare",
        tests=str(len(comparison.arms) + len(checks)),
        failures=str(len(failed) + sum(bool(check.failure) for check in checks)),
        skipped=str(sum(bool(check.skipped) for check in checks)),
        errors="0",
    )
    for row in comparison.arms:
        case = add_case(row.arm, "trains")
        if row in failed:
            ElementTree.SubElement(case, "failure", message=printable_line(row.status, 2000))
    for check in checks:
        case = add_case(check.arm, check.gate)
        if check.failure:
            ElementTree.SubElement(case, "failure", message=printable_line(check.failure, 2000))
        if check.skipped:
            ElementTree.SubElement(case, "skipped", message=printable_line(check.skipped, 2000))
    if comparison.headline:
        answer = "\n".join(printable_line(sentence, MAX_LINE) for sentence in comparison.headline)
        ElementTree.SubElement(suite, "system-out").text = answer
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=False) + "\n"
