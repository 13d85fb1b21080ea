"""The table of `find-batch`."""

import json

from ampcompare.results.records.batch_limit import BatchLimit, BatchTry
from ampcompare.results.report.documents.batch_limits import batch_limits_document
from ampcompare.results.report.json import Json
from ampcompare.results.report.terminal import Terminal

FITS = BatchLimit("fp32", BatchTry(96, "", 3 * 2**20), BatchTry(102, "takes 2.1 GiB of 2.0"), tries=4)


def test_a_row_for_each_arm_and_no_environments_where_there_is_one() -> None:
    limits = [FITS, BatchLimit("apex:O2", stack="old", error="no torch there")]
    heads, _, *rows = Terminal().document_text(batch_limits_document(limits)).splitlines()
    assert heads.split("  ")[0] == "arm"
    assert [row.split() for row in rows] == [
        ["fp32", "96", "3.0", "102", "takes", "2.1", "GiB", "of", "2.0"],
        ["apex:O2@old", "unknown", "-", "-", "no", "torch", "there"],
    ]


def test_environments_stand_below_where_there_are_several() -> None:
    here = BatchLimit("fp32", FITS.fits, tries=1, environment={"torch": "2.6.0"})
    there = BatchLimit("fp32", FITS.fits, tries=1, stack="old", environment={"torch": "1.13.1"})
    text = Terminal().document_text(batch_limits_document([here, there]))
    assert [line.split() for line in text.splitlines() if "torch" in line] == [["torch", "2.6.0", "1.13.1"]]
    (first, second) = json.loads(Json().document_text(batch_limits_document([here, there])))
    assert (first["fits"]["batch"], second["stack"]) == (96, "old")


def test_a_narrow_terminal_folds_the_reason() -> None:
    text = Terminal(70).document_text(batch_limits_document([FITS]))
    assert max(map(len, text.splitlines())) <= 70
