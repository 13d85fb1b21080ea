"""What a diagnosis leaves behind: ranges, errors and faults by module and operation, and cures that were tested."""

from typing import ClassVar, Literal

from pydantic import Field

from ampcompare.base.notebook_display import ShownInNotebook
from ampcompare.results.records.document import FrozenRecord, Number

Phase = Literal["forward", "backward", "weight", "gradient"]
FaultKind = Literal[
    "overflow",
    "gradient overflow",
    "underflow",
    "rounding",
    "lost updates",
    "update",
    "format",
    "error",
    "not precision",
]


class MagnitudeRange(FrozenRecord):
    """The magnitudes of the elements of one or more tensors.

    Of fp16, "below" is below 2**-25 and rounds to zero, "top" is from 2**15 to 65536.
    """

    elements: int = 0
    zeros: int = 0
    below: int = Field(0, description="not zero and below 2**-25")
    lost: int = Field(0, description="zero here, and not in the same tensor in fp32")
    top: int = Field(0, description="within a factor of two of the largest fp16 number")
    above: int = Field(0, description="finite, and 65536 or more")
    nonfinite: int = 0
    smallest: float | None = Field(None, description="magnitude that is not zero")
    largest: float | None = Field(None, description="finite magnitude")
    exponents: dict[int, int] = Field(default_factory=dict, description="elements in [2**e, 2**(e+1)), by e")

    def share_of_count(self, count: int) -> float:
        """Return a count as a share of all elements."""
        return count / self.elements if self.elements else 0.0


class OperationPlace(FrozenRecord):
    """An operation of a module, in one direction."""

    module: str = Field("", description='dotted name; "" in the whole model itself, or outside of any')
    operation: str = Field("", description="as torch dispatches it, such as addmm")
    phase: Phase = "forward"
    where: str = Field("", description="file:line of the call that made it")

    @property
    def name(self) -> str:
        """The place in a few words."""
        module = self.module.rstrip(":")
        if not module and self.phase != "weight":
            return f"{self.operation} outside of submodules"
        return " ".join(part for part in (module or "weights", self.operation) if part)


class PlaceReport(FrozenRecord):
    """What was seen at a place, over all observed steps.

    `error` is the norm of the difference to the same tensor in fp32, relative to that tensor; `made` is the part of
    this operation alone, against its own inputs in fp32, at its first two calls. Both are the largest of any step.
    """

    place: OperationPlace
    calls: int = 0
    dtypes: list[str] = Field(default_factory=list)
    range: MagnitudeRange = MagnitudeRange()
    error: Number | None = None
    made: Number | None = None


class ModuleResultsAtStep(FrozenRecord):
    """The forward results of a module at one step: a cell of the map."""

    module: str
    step: int
    range: MagnitudeRange


class LossScaleHeadroom(FrozenRecord):
    """What a loss scale does to the gradients of a run."""

    exponents: dict[int, int] = Field({}, description="of the gradients in fp32 at scale 1")
    largest_scale: Number | None = Field(None, description="power of two below which no gradient overflows")
    own_scale: Number = 1.0
    lost: dict[str, float] = Field(
        {}, description="share of the gradients that fp16 rounds to zero, by loss scale"
    )


class LostUpdates(FrozenRecord):
    """Elements of a weight whose gradient is not zero, and how many of them the optimizer step did not change."""

    parameter: str
    dtype: str
    moved: int
    lost: int
    nonfinite: int = 0
    nonfinite_gradient: int = Field(
        0, description="elements of the gradient that were not finite when the optimizer got it"
    )
    eps: Number | None = Field(None, description="of the optimizer, if it is zero in the type of the weight")


class Fault(FrozenRecord):
    """One fault: what happened, where it began, and what led from there to the loss."""

    kind: FaultKind
    place: OperationPlace
    step: int
    text: str
    severity: Number = 1.0
    inputs: list[str] = Field(default_factory=list, description="ranges of what went into it")
    chain: list[str] = Field(default_factory=list, description="places that the values reached, in order")
    near: list[tuple[str, str]] = Field(default_factory=list, description="module and file:line of neighbors")
    reason: str = Field(
        "", description="why, if it is known: a number that fp16 lacks, or inputs that became zero"
    )


class FormatError(FrozenRecord):
    """What one product of one linear layer in its format does to the whole gradient of a batch, all else in bf16."""

    layer: str
    role: str = Field(description="fprop, dgrad or wgrad")
    error: Number = Field(description="norm of the difference to the gradient in bf16, relative to that")


class CandidateTrial(FrozenRecord):
    """A candidate that was trained for some steps."""

    name: str
    cures: bool
    left: str = Field("", description="what remains")


class Cure(FrozenRecord):
    """The smallest tested change that removes the faults."""

    keeps: list[str] = Field([], description="modules, or file:line of calls, in fp32")
    option: str = ""
    arm: str | None = Field(None, description="that does it, for `compare`; None if only code does")
    code: str = Field("", description="to paste")


class Diagnosis(ShownInNotebook, FrozenRecord):
    """All that a diagnosis found."""

    _view: ClassVar[str] = "ampcompare.results.report.html.notebook:result_text_and_html"

    version: int = 1
    arm: str
    subject: str = Field("", description="what was trained")
    script: list[str] = Field(default_factory=list, description="the words after --, of a user's own script")
    verdict: str
    failure: str = Field("", description="why a script ended before its steps were made")
    steps: int
    skipped: int = 0
    observed: list[int] = Field(default_factory=list)
    reference: Literal["float32", "float64"] | None = Field(
        None, description="the type of the run alongside, if any"
    )
    modules: list[str] = Field(default_factory=list, description="in the order of their first results")
    places: list[PlaceReport] = Field(default_factory=list)
    weights: list[PlaceReport] = Field(default_factory=list)
    gradients: list[PlaceReport] = Field(default_factory=list)
    map: list[ModuleResultsAtStep] = Field(default_factory=list)
    headroom: LossScaleHeadroom | None = None
    updates: list[LostUpdates] = Field(default_factory=list)
    formats: list[FormatError] = Field([], description="of an arm with formats of products, in the last step")
    faults: list[Fault] = Field(default_factory=list)
    trials: list[CandidateTrial] = Field(default_factory=list)
    cure: Cure | None = None
    notes: list[str] = Field(default_factory=list)
