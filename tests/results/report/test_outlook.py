"""The outlook of some arms, in a terminal and on a page."""

from pathlib import Path

from ampcompare.results.records.outlook import ArmOutlook, Outlook, Prefix, ShareLost
from ampcompare.results.report.base import write_result
from ampcompare.results.report.outlook import outlook_document, outlook_text


def _outlook(*, rates_known: bool = True) -> Outlook:
    share = ShareLost(now=0.2, rest=0.6, at={50: 0.18, 99: 0.22}, curve=[0.22, 0.6, 1.0])
    prefix = Prefix(
        steps=100,
        total=2000,
        basis="its scheduler, to step 2000" if rates_known else "a plateau of a metric decides them",
        rates_known=rates_known,
        shares={"bf16": share},
    )
    arm = ArmOutlook(arm="half:bf16", word="will not hold", part="weights", why="60 % are lost", cure="kahan")
    return Outlook(subject="train.py", prefix=prefix, twin=0.002, arms=[arm, ArmOutlook(arm="O2", word="cannot know")])


def test_a_line_for_each_arm() -> None:
    lines = outlook_text(_outlook(), 100).splitlines()
    assert lines[2].split("  ") == ["half:bf16", "will not hold", "weights", "60 % are lost -> kahan"]
    assert lines[3].split() == ["O2", "cannot", "know", "-", "-"]
    assert lines[5].startswith("100 steps in fp32; learning rates ahead: its scheduler, to step 2000; a twin")


def test_a_page_draws_the_share_lost(tmp_path: Path) -> None:
    """Measured at the probes of the prefix, and from the last one computed to the end of the schedule."""
    figure = next(section for section in outlook_document(_outlook()).sections if section.name == "curve").blocks[0]
    computed = "4.95,78.00 52.48,40.00 100.00,0.00"
    assert figure.data["lines"] == [(1, "2.50,82.00 4.95,78.00", False), (1, computed, True)]  # type: ignore[union-attr]
    paths = write_result(_outlook(), tmp_path, ("json", "html"))
    assert [path.name for path in paths] == ["outlook.json", "outlook.html"]
    assert computed in paths[1].read_text(encoding="utf-8")
