"""Each kind of verdict with its words, and the words of older reports as verdicts."""

from typing import Any, get_args

import pytest

from ampcompare.results.records.comparison import ArmSummary
from ampcompare.results.records.verdict import KEPT, OPEN, UNJUDGED, Kind, Verdict, verdict_fields_from_words

# (fields, words, what a narrow column shows)
TABLE: list[tuple[dict[str, Any], str, str]] = [
    ({"kind": ""}, "", ""),
    ({"kind": "identical"}, "identical", "identical"),
    ({"kind": "equivalent", "why": "±0.5"}, "equivalent (±0.5)", "equivalent"),
    ({"kind": "non-inferior", "why": "margin 2 %"}, "non-inferior (margin 2 %)", "non-inferior"),
    ({"kind": "better"}, "better", "better"),
    ({"kind": "worse"}, "worse", "worse"),
    ({"kind": "inconclusive"}, "inconclusive", "inconclusive"),
    ({"kind": "inconclusive", "more_seeds": 24}, "inconclusive (≤24 more seeds)", "inconclusive"),
    ({"kind": "inconclusive", "more_seeds": 1}, "inconclusive (≤1 more seed)", "inconclusive"),
    ({"kind": "inconclusive", "why": "rounded"}, "inconclusive (rounded)", "inconclusive"),
    ({"kind": "few seeds", "why": "fewer than 3 seeds"}, "inconclusive (fewer than 3 seeds)", "inconclusive"),
    ({"kind": "not tested", "why": "not tested"}, "inconclusive (not tested)", "inconclusive"),
    ({"kind": "diverged", "share": (2, 3)}, "diverged 2/3", "diverged 2/3"),
    ({"kind": "learned nothing", "why": "10 %, as chance"}, "learned nothing (10 %, as chance)", "learned nothing"),
    ({"kind": "learned nothing", "share": (1, 3), "why": "nan (a)"}, "learned nothing in 1 of 3 pairs (nan (a))",
     "learned nothing in 1 of 3 pairs"),
    ({"kind": "no verdict", "why": "the reference failed"}, "no verdict (the reference failed)", "no verdict"),
    ({"kind": "not comparable", "why": "lr 1, not 2"}, "not comparable (lr 1, not 2)", "not comparable"),
    ({"kind": "emulated", "why": "fp16"}, "not comparable (fp16 computed in fp32)", "not comparable"),
    ({"kind": "not as declared", "why": "state is fp32"}, "not as declared (state is fp32)", "not as declared"),
    ({"kind": "invalid", "why": "load 9 on 2"}, "invalid measurement (load 9 on 2)", "invalid measurement"),
    ({"kind": "conditional", "among": "equivalent", "why": "±0.5", "survivors": (3, 8)},
     "conditional on 3 of 8 seeds (equivalent (±0.5))", "conditional"),
    ({"kind": "conditional", "among": "inconclusive", "more_seeds": 4, "survivors": (3, 8)},
     "conditional on 3 of 8 seeds (inconclusive (≤4 more seeds))", "conditional"),
    ({"kind": "conditional", "among": "learned nothing", "share": (1, 2), "why": "nan", "survivors": (2, 3)},
     "conditional on 2 of 3 seeds (learned nothing in 1 of 2 pairs (nan))", "conditional"),
]  # fmt: skip


def test_the_table_has_every_kind() -> None:
    assert {fields["kind"] for fields, *_ in TABLE} == set(get_args(Kind))
    assert {*KEPT, *OPEN, *UNJUDGED} <= set(get_args(Kind))


@pytest.mark.parametrize("fields, words, word", TABLE, ids=[words or "none" for _, words, _ in TABLE])
def test_words(fields: dict[str, Any], words: str, word: str) -> None:
    """A verdict gives its words, and the words of an older report give the verdict."""
    verdict = Verdict(**fields)
    assert (str(verdict), verdict.word, bool(verdict)) == (words, word, bool(words))
    assert Verdict(**verdict_fields_from_words(words)) == verdict


def test_unknown_words_are_kept_as_a_reason() -> None:
    assert str(Verdict(**verdict_fields_from_words("as good as new"))) == "no verdict (as good as new)"


def test_what_rests_on_no_seed_is_not_conditional() -> None:
    """A verdict on fewer seeds than both ran is conditional; one that is about all of them stays."""
    assert Verdict(kind="better").with_survivors((3, 8)) == Verdict(
        kind="conditional", among="better", survivors=(3, 8)
    )
    for verdict in (
        Verdict(),
        Verdict(kind="diverged", share=(1, 8)),
        Verdict(kind="not comparable", why="lr"),
    ):
        assert verdict.with_survivors((3, 8)) is verdict
    assert Verdict(kind="better").with_survivors(None) == Verdict(kind="better")
    assert Verdict(kind="learned nothing").with_survivors((0, 1)) == Verdict(kind="learned nothing")


def test_the_fields_of_older_rows_are_read() -> None:
    row = ArmSummary(
        **{
            "arm": "half",
            "engine": None,
            "half": None,
            "lr": 0.1,
            "seeds": [0],
            "completed": 1,
            "diverged": 0,
        },
        **{
            "failed": 0,
            "accuracy_verdict": "worse",
            "metric_difference": -0.1,
            "metric_difference_low": -0.2,
        },
    )
    assert row.quality == Verdict(kind="worse", effect=-0.1, low=-0.2)
