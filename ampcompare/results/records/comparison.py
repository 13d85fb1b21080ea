"""A comparison of cells: its records, a row for each arm, looks and published figures, to and from strict JSON.

Reading needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from ampcompare.base.notebook_display import ShownInNotebook
from ampcompare.results.records.document import ArmLabel, FrozenRecord, Number, read_validated_json
from ampcompare.results.records.evaluation import PrecisionRow
from ampcompare.results.records.metric import MAX_NAME, TOP1, Metric
from ampcompare.results.records.run import RunRecord
from ampcompare.results.records.verdict import UNJUDGED, Verdict, verdict_fields_from_words

# 2: verdicts were words, with their effects in fields of the row; 1: of image classification only
REPORT_SCHEMA = 3
# Names of fields in reports of schema 1.
OLDER_FIELDS = {
    f"top1_{of}": f"metric_{of}"
    for of in (
        *("mean", "sd", "best", "correlation"),
        *("difference", "difference_low", "difference_high", "difference_confidence"),
    )
}

# Names of fields up to schema 2: the verdict that has the value now, and its field there, if it is not the words.
OLDER_VERDICTS = {
    **{
        f"{name}{end}": (quantity, field)
        for name, quantity in (
            *(("metric_difference", "quality"), ("time_ratio", "time")),
            *(("loss_difference", "loss"), ("memory_difference", "memory")),
        )
        for end, field in (("", "effect"), ("_low", "low"), ("_high", "high"), ("_confidence", "confidence"))
    },
    **{f"{name}_verdict": (name, "") for name in ("time", "loss", "memory")},
    "accuracy_verdict": ("quality", ""),
}
LOSS_MARGIN = 0.01
SEEDS_ITSELF = "the script seeds itself, so pass the seed on with --seed-arg, or as {seed}"


class Look(FrozenRecord):
    """What was tested, on which runs, under which terms, and at which error rate."""

    number: int = Field(ge=0, description="among the looks that tested something; 0 for one that could not")
    error_rate: float = Field(ge=0, lt=1, description="that it spent, of each claim over all arms")
    written: str = Field("", description="date and time")
    reference: ArmLabel
    arms: list[ArmLabel]
    seeds: list[int]
    pairs: dict[ArmLabel, int] = Field({}, description="of each arm with the reference")
    cells: dict[ArmLabel, str] = Field(description="a hash of each record, under LABEL@SEED")
    lost: list[ArmLabel] = Field([], description="cells that failed, as LABEL@SEED")
    margin: float | str = Field(description="of the metric, as it was asked for: a number, or a rule")
    margin_unit: str = Field("pp", description="of a margin that is a number")
    time_margin: float
    loss_margin: float = LOSS_MARGIN
    planned: int | None = Field(
        None, description="number of looks that was planned; None if it was left open"
    )
    pilot: list[int] = Field(
        [], description="seeds whose spread has set the number of seeds; empty if it was given"
    )
    changes: list[str] = Field(
        [], description="in older files: in what its terms differ from those of earlier looks"
    )


class PublishedRow(BaseModel):
    """One line of a published table. Shares are 0 to 1, times in seconds, sizes in bytes; None was not published."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str = Field(description="the arm and what is varied, as published")
    row: ArmLabel | None = Field(None, description="the measured row that belongs to it, if any")
    top1: float | None = Field(None, description="of the last epoch")
    top1_best: float | None = None
    seconds: float | None = Field(None, description="of the whole run")
    epoch_seconds: float | None = None
    peak_bytes: int | None = None
    diverged: bool = False
    remark: str = ""


class Published(BaseModel):
    """A published table, and how far the measurements here are comparable with it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    source: str
    machine: str = ""
    recipe: str
    scale: str | None = Field(
        None, description="smaller shape that was measured; None is the recipe as published"
    )
    differs: list[str] = Field([], description="settings in which what was measured departs from the recipe")
    rows: list[PublishedRow]


class _ResultRow(FrozenRecord):
    """A row of results; those of older reports are read."""

    @model_validator(mode="before")
    @classmethod
    def _convert_older_row(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or not {"images", *OLDER_FIELDS, *OLDER_VERDICTS} & values.keys():
            return values
        new = {OLDER_FIELDS.get(name, name): value for name, value in values.items() if name != "images"}
        if isinstance(images := values.get("images"), Mapping):
            new["samples"] = {
                "samples" if name == "images" else name: value for name, value in images.items()
            }
        for name in OLDER_VERDICTS.keys() & new.keys():
            quantity, field = OLDER_VERDICTS[name]
            value = new.pop(name)
            new[quantity] = {
                **new.get(quantity, {}),
                **({field: value} if field else verdict_fields_from_words(value)),
            }
        return new


class ModelPair(FrozenRecord):
    """Two single models on the same samples, right or wrong on each: an arm's and the reference's of one seed."""

    seed: int
    arm_only: int = Field(description="samples that only the arm's model has right")
    reference_only: int = Field(description="samples that only the reference's model has right")
    p: float = Field(
        description="McNemar's exact test, two-sided: about these two models, not about the arms"
    )


class SampleComparison(FrozenRecord):
    """What single validation samples say about an arm and the reference."""

    samples: int = Field(description="in the validation set")
    unusable: str = Field("", description="why the runs cannot be compared sample by sample")
    models: list[ModelPair] = Field(
        [], description="one for each pair of runs; none where no sample is right or wrong"
    )
    low: float | None = Field(
        None,
        description="of the interval of the difference for new samples, at the confidence of the verdict's own",
    )
    high: float | None = None
    holds: bool | None = Field(
        None, description="whether that interval shows what the verdict says of these samples"
    )
    needed: int | None = Field(
        None,
        description="about how many samples would bring that interval inside the margin, if the arms do not differ",
    )


Quantity = Literal["quality", "time", "loss", "memory"]


class ArmSummary(_ResultRow):
    """One row of the table: an arm over its seeds. Means and standard deviations are over completed runs.

    Times are means over the runs whose times are valid; if `invalid_time` is not empty, over all of them, for programs
    only: no table and no figure shows them. Values of the metric are as records store them, differences as
    `Metric.difference_from_reference` gives them.
    """

    arm: ArmLabel
    engine: str | None = None
    half: str | None = None
    lr: float
    seeds: list[int]
    completed: int | None = Field(description="runs; None for published means of an unknown number of runs")
    diverged: int
    failed: int = 0
    metric_mean: float | None = None
    metric_sd: float | None = None
    metric_best: float | None = None
    epoch_seconds: float | None = None
    epoch_seconds_sd: float | None = None
    step_seconds_median: float | None = None
    samples_per_second: float | None = None
    start_seconds: float | None = None
    loader_start_seconds: float | None = None
    allreduce_share: float | None = None
    peak_bytes: int | None = None
    quality: Verdict = Field(
        Verdict(), description="on the metric; its effect is the mean difference over pairs"
    )
    time: Verdict = Field(
        Verdict(), description="on the step time; its effect is the geometric mean over pairs of its ratio"
    )
    loss: Verdict = Field(
        Verdict(),
        description="on `loss_tail`; its effect is the ratio - 1, a geometric mean over pairs. Empty where runs keep "
        "no such loss",
    )
    memory: Verdict = Field(
        Verdict(),
        description="why the peaks cannot be compared, if they cannot; its effect is the bytes of the largest peak "
        "over the reference's",
    )
    loss_contradicts: bool = Field(
        False,
        description="whether the arm is shown to be better in one of metric and training loss at the end, and worse in "
        "the other, by more than what does not matter in one of them",
    )
    equal_numbers: list[str] = Field(
        [],
        description="places where an evaluation of the arm compares 16-bit numbers of which many are equal: a "
        "difference in quality may be that of the ranking",
    )
    metric_correlation: float | None = Field(
        None, description="over pairs, of this arm's values and the reference's"
    )
    pairs: int = Field(0, description="seeds that both this arm and the reference completed")
    invalid_time: str = Field(
        "",
        description="why its times are no measurement, by themselves or paired with the reference's; empty if they are",
    )
    samples: SampleComparison | None = Field(
        None, description="None where no run keeps results of single samples"
    )
    loss_tail: Number | None = Field(
        None, description="mean over runs of the training loss of their last fifth"
    )
    diverged_low: float | None = Field(None, description="Wilson's 95 % interval of the rate of divergence")
    diverged_high: float | None = None
    final_loss_scale: Number | None = Field(None, description="the middle one of its runs")
    skipped_steps: int | None = None
    num_steps: int | None = None
    status: str = ""

    @model_validator(mode="after")
    def _invalidate_time_of_invalid_verdict(self) -> ArmSummary:
        """Call a time invalid if its verdict does, so that nothing shows it; older reports lack that."""
        if not self.invalid_time and self.time.kind == "invalid":
            object.__setattr__(self, "invalid_time", self.time.why)
        return self

    def verdict(self, quantity: Quantity) -> Verdict:
        """Return the verdict on a quantity, with its effect."""
        return {"quality": self.quality, "time": self.time, "loss": self.loss, "memory": self.memory}[
            quantity
        ]

    @property
    def has_completed(self) -> bool:
        """Whether a run was completed."""
        return self.completed is None or self.completed > 0

    @property
    def valid_time_ratio(self) -> float | None:
        """The ratio of step times; None where it is invalid or not comparable."""
        return None if self.time.kind in UNJUDGED else self.time.effect


# Only in older reports.
class LibraryTwin(_ResultRow):
    """An arm that another library ran, and ampcompare's arm of the precision that it really ran in."""

    arm: ArmLabel
    twin: ArmLabel
    library: str = Field(description="name and version")
    pairs: int = Field(0, description="seeds that both completed; 0 where the twin is not in the matrix")
    quality: Verdict = Field(Verdict(), description="on the metric, against the twin")
    time: Verdict = Field(Verdict(), description="on the step time, against the twin's")
    same_bits: bool = Field(False, description="whether every loss of every seed is the same to the last bit")


class JudgedTable(FrozenRecord):
    """What a table of external results contains; its figures replace those of a comparison's own runs."""

    references: list[str] = Field(description="rows that others are compared with, one for each block")
    sd: float | None = Field(
        None, description="over seeds, given by the caller, in the unit of the table; None: unused"
    )
    within: list[str] = Field([], description="settings of which each value is a block")
    independent: list[str] = Field(
        [],
        description="rows whose metric was compared as two independent samples, not by pairs of equal seeds",
    )


class NextStep(FrozenRecord):
    """A suggested next step after a comparison, as a command to paste."""

    command: str
    why: str = Field(description="what it answers, and what it costs where that is known; one line")


class Comparison(ShownInNotebook, FrozenRecord):
    """The matrix that was run: its records, one summary per arm, and its conclusions."""

    _view: ClassVar[str] = "ampcompare.results.report.html.notebook:result_text_and_html"

    schema_number: Annotated[int, AfterValidator(lambda read: REPORT_SCHEMA)] = Field(
        REPORT_SCHEMA, alias="schema"
    )
    command: str
    reference: ArmLabel
    seeds: list[int]
    order: list[ArmLabel] = Field([], description="cells in the order in which they ran, as ARM@SEED")
    environment: dict[str, Any] = Field({}, description="what the machine offers")
    tag: str = ""
    metric: Metric = Field(TOP1, description="that verdicts on accuracy are about")
    margin: float = Field(
        0.5, description="equivalence margin of the metric, in the unit of shown differences"
    )
    margin_rule: str = Field(
        "", description="as it was given: a number, 10%, 2sd or auto; empty in older reports"
    )
    margin_reason: str = Field("", description="where the number of the rule comes from")
    time_margin: float = Field(0.02, description="share of the step time that does not matter")
    loss_margin: float = Field(
        LOSS_MARGIN, description="share of the training loss at the end that does not matter"
    )
    error_rate: float = Field(
        0.05, description="of each claim over all arms, at which these verdicts were tested"
    )
    look: int | None = Field(
        None, description="number of this look at the run directory; None if not counted"
    )
    looks: list[Look] = Field([], description="all looks at the run directory, this one included")
    prefer: str = "time"
    arms: list[ArmSummary]
    headline: list[str] = Field(
        [], description="the answer, one sentence each, the most important first; plain text"
    )
    next_steps: list[NextStep] = Field([], description="what to do next, the most useful first")
    reading: list[str] = Field(description="the details under the tables, which do not repeat the headline")
    precisions: list[PrecisionRow] = Field(
        [], description="trained weights in other precisions, if asked for"
    )
    twins: list[LibraryTwin] = Field([], description="one for each arm that another library ran")
    records: list[RunRecord]
    excluded: list[str] = Field([], description="records that are not used, and why")
    only_copies: bool = Field(
        False, description="whether all of these are, since the script seeds itself, one run again"
    )
    published: Published | None = Field(None, description="what others published for these rows")
    judged: JudgedTable | None = Field(None, description="for a table of others: what its figures are")

    @model_validator(mode="before")
    @classmethod
    def _convert_older_report(cls, values: Any) -> Any:
        """Read a report whose judged table says itself what its figures are, and one that says of copies in words."""
        if not isinstance(values, Mapping):
            return values
        if "only_copies" not in values and (excluded := values.get("excluded")):
            values = {**values, "only_copies": all(str(text).endswith(SEEDS_ITSELF) for text in excluded)}
        table = values.get("judged")
        if not isinstance(table, Mapping) or "metric" in values or not isinstance(table.get("metric"), str):
            return values
        return {**values, "metric": _metric_of_older_table(table)}

    @model_serializer(mode="wrap")
    def _leave_out_needless_fields(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = dump(self)
        return (
            values if self.only_copies else {name: it for name, it in values.items() if name != "only_copies"}
        )

    def by_arm(self) -> dict[str, list[RunRecord]]:
        """Return the records of each row; none of a row that no run belongs to."""
        found: dict[str, list[RunRecord]] = {row.arm: [] for row in self.arms}
        for record in self.records:
            found.setdefault(record.arm, []).append(record)
        return found

    @property
    def missing_cells(self) -> list[str]:
        """The cells of the plan, as ARM@SEED, that have no run which ended by itself."""
        ended = {f"{run.arm}@{run.config.recipe.seed}" for run in self.records if run.status != "interrupted"}
        return [cell for cell in self.order if cell not in ended]

    def __str__(self) -> str:
        """Return the headline, a line for each arm, and the details; `ampcompare report` has the tables."""
        rows = (_row_as_text(row, self.reference, self.metric) for row in self.arms)
        return "\n".join([*self.headline, *rows, *self.reading])

    def __repr__(self) -> str:
        arms = ", ".join(row.arm for row in self.arms)
        return f"<Comparison of {arms}: {len(self.records)} records, seeds {', '.join(map(str, self.seeds))}>"


def _metric_of_older_table(table: Mapping[str, Any]) -> dict[str, Any]:
    name = table["metric"]
    return {
        "name": name.removesuffix(" %")[:MAX_NAME],
        "unit": "%" if name.endswith(" %") else "",
        "better": table.get("better", "higher"),
        "factor": table.get("factor", 100.0),
        "decimals": table.get("decimals", 2),
    }


def _row_as_text(row: ArmSummary, reference: str, metric: Metric) -> str:
    facts = [row.status]
    if row.metric_mean is not None:
        facts.append(f"{metric.name} {metric.value_text(row.metric_mean)}")
    if row.arm == reference:
        facts.append("the reference")
    else:
        facts += [f"{metric.quality_noun} {row.quality}"] if row.quality else []
        facts += [f"{row.valid_time_ratio:.2f}x its step time"] if row.valid_time_ratio is not None else []
        facts += [f"time {row.time}"] if row.time else []
    return f"{row.arm}: {', '.join(fact for fact in facts if fact)}"


def read_comparison(path: Path) -> Comparison:
    """Read a `report.json`; errors are those of `read_validated_json`."""
    return read_validated_json(path, Comparison, "comparison")
