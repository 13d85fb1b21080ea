"""The verdict on an arm in one quantity, as data. Its words are made here; only `verdict_fields_from_words`
takes them apart, for reports of older schemas, which hold nothing else.
"""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

from pydantic import Field

from ampcompare.results.records.document import FrozenRecord, Number

Kind = Literal[
    "", "identical", "equivalent", "non-inferior", "better", "worse", "inconclusive", "few seeds", "not tested",
    "conditional", "diverged", "learned nothing", "no verdict", "not comparable", "emulated", "not as declared",
    "invalid",
]  # fmt: skip
KEPT: tuple[Kind, ...] = ("identical", "equivalent", "non-inferior", "better")
LOST: tuple[Kind, ...] = ("worse", "diverged", "learned nothing")
OPEN: tuple[Kind, ...] = ("inconclusive", "few seeds", "not tested")
# a time has no ratio then
UNJUDGED: tuple[Kind, ...] = ("not comparable", "emulated", "not as declared", "invalid")
# What kinds are called that are special cases of others, or have more words.
WORDS: dict[Kind, str] = {
    "few seeds": "inconclusive",
    "not tested": "inconclusive",
    "emulated": "not comparable",
    "invalid": "invalid measurement",
}
EMULATED = " computed in fp32"
OLDER = re.compile(
    r"(?P<word>[^(]*?)(?: in)?(?: (?P<some>\d+)(?:/| of )(?P<all>\d+)(?: pairs)?)?"
    r"(?: \((?:≤(?P<more>\d+) more seeds?|(?P<why>.*))\))?"
)
CONDITIONAL = re.compile(r"conditional on (?P<some>\d+) of (?P<all>\d+) seeds \((?P<inner>.*)\)")


class Verdict(FrozenRecord):
    """What is said of an arm against the reference in one quantity, with the interval of the test that decided it.

    `equivalent` lies inside the margin, `non-inferior` above its lower end, `better` and `worse` leave "no difference"
    out and do not lie inside the margin, and `inconclusive` does none of these. `str()` gives the words.
    """

    kind: Kind = Field("", description="empty where there is no verdict")
    why: str = Field(
        "", description="one clause, for readers: the margin, or why nothing was tested or shown"
    )
    more_seeds: int | None = Field(None, description="that settle an inconclusive one, at most")
    share: tuple[int, int] | None = Field(
        None, description="of the runs that diverged, or of the pairs in which nothing was learned"
    )
    survivors: tuple[int, int] | None = Field(
        None, description="of a conditional one: seeds that both arms completed, of those that both ran"
    )
    updates: tuple[float, float] | None = Field(
        None,
        description="of one that updates may explain: the mean number that a run of the arm and one of the reference "
        "made, without skipped steps",
    )
    among: Kind = Field("", description="of a conditional one: its kind on those seeds alone")
    effect: Number | None = Field(
        None,
        description="over pairs: the difference of the metric, the ratio of step times, the relative difference of "
        "the loss, or bytes",
    )
    low: Number | None = Field(
        None, description="of the interval of the test that decided, in the unit of the effect"
    )
    high: Number | None = None
    confidence: float | None = Field(
        None,
        description="two-sided, of that interval, at the level of Holm's step: 1 - 2 alpha for the one-sided tests of "
        "equivalent and non-inferior, 1 - alpha for the others, or more where those lie inside the margin",
    )

    @classmethod
    def because(cls, kind: Kind, why: str) -> Verdict:
        """Return a verdict for a reason; an empty one without any."""
        return cls(kind=kind, why=why) if why else cls()

    def __bool__(self) -> bool:
        """Return whether anything is said."""
        return self.kind != ""

    def __str__(self) -> str:
        """Return the verdict in words, such as `equivalent (±0.5)`; "" where there is none."""
        if self.survivors is not None:
            return f"conditional on {self.survivors[0]} of {self.survivors[1]} seeds ({self.on_survivors})"
        return f"{self.word} ({self.detail})" if self.detail else self.word

    @property
    def word(self) -> str:
        """The words before the reason, for a column that is narrow."""
        if self.share is None or self.survivors is not None:
            return WORDS.get(self.kind, self.kind)
        some, total = self.share
        return (
            f"diverged {some}/{total}"
            if self.kind == "diverged"
            else f"{self.kind} in {some} of {total} pairs"
        )

    @property
    def detail(self) -> str:
        """The words that `word` leaves out: the reason, the margin or the seeds; "" where there are none."""
        if self.survivors is not None:
            return f"{self.on_survivors} on {self.survivors[0]} of {self.survivors[1]} seeds"
        if self.more_seeds is not None:
            return f"≤{self.more_seeds} more seed{'s' if self.more_seeds != 1 else ''}"
        return "; ".join(
            filter(
                None,
                [f"{self.why}{EMULATED}" if self.kind == "emulated" else self.why, self.update_counts_text],
            )
        )

    @property
    def update_counts_text(self) -> str:
        """How many updates were made where that may explain a difference, such as `13 updates, not 15`; else ""."""
        return "{:.4g} updates, not {:.4g}".format(*self.updates) if self.updates else ""

    @property
    def on_survivors(self) -> Verdict:
        """What a conditional verdict says of the seeds that survived."""
        return self.model_copy(update={"kind": self.among, "among": "", "survivors": None})

    def with_updates(self, updates: tuple[float, float] | None, margin: str) -> Verdict:
        """Return the verdict of runs that made other numbers of updates; itself where they did not.

        Fewer updates are no merit: an arm that is ahead with fewer is not worse, and of one that is behind with more
        nothing is said. One that is behind with fewer, or ahead with more, is worse or better after so many.

        Args:
            updates: of the arm and of the reference.
            margin: the difference that does not matter, in words.
        """
        if updates is None or self.kind not in ("better", "worse"):
            return self
        has_fewer = updates[0] < updates[1]
        if self.kind == "better" and has_fewer:
            return self.model_copy(
                update={"kind": "non-inferior", "why": f"margin {margin}", "updates": updates}
            )
        if self.kind == "worse" and not has_fewer:
            return Verdict(kind="not comparable", updates=updates, effect=self.effect)
        return self.model_copy(update={"updates": updates})

    def with_survivors(self, survivors: tuple[int, int] | None) -> Verdict:
        """Return the verdict as conditional on the seeds that survived; itself where it does not rest on them."""
        rests_on_none = survivors is not None and not survivors[0]  # such as that an arm learned nothing
        if not self or survivors is None or rests_on_none or self.kind in ("diverged", *UNJUDGED):
            return self
        return self.model_copy(update={"kind": "conditional", "among": self.kind, "survivors": survivors})


def verdict_fields_from_words(text: str) -> dict[str, Any]:
    """Return the fields of a verdict of which an older report holds the words alone."""
    if match := CONDITIONAL.fullmatch(text):
        inner = verdict_fields_from_words(match["inner"])
        survivors = int(match["some"]), int(match["all"])
        return {**inner, "kind": "conditional", "among": inner["kind"], "survivors": survivors}
    match = OLDER.fullmatch(text)
    kinds = {WORDS.get(kind, kind): kind for kind in reversed(get_args(Kind))}
    if match is None or match["word"] not in kinds:
        return {"kind": "no verdict", "why": text}
    kind, why = kinds[match["word"]], match["why"] or ""
    if kind == "inconclusive" and why == "not tested":
        kind = "not tested"
    elif kind == "inconclusive" and why.startswith("fewer than"):
        kind = "few seeds"
    elif kind == "not comparable" and why.endswith(EMULATED):
        kind, why = "emulated", why.removesuffix(EMULATED)
    return {
        "kind": kind,
        "why": why,
        "more_seeds": match["more"] and int(match["more"]),
        "share": match["some"] and (int(match["some"]), int(match["all"])),
    }
