"""What the first steps of a training tell of the rest, for each of some arms."""

from typing import Literal

from pydantic import Field

from ampcompare.results.records.document import FrozenRecord, Number

Word = Literal["will not hold", "no fault in sight", "cannot know"]


class ShareLost(FrozenRecord):
    """The share of the updates that 16-bit weights, rounded to nearest, would not take; 0 to 1."""

    now: Number = Field(description="mean over the probed steps of the prefix")
    rest: Number = Field(description="mean over the rest of the schedule")
    at: dict[int, Number] = Field({}, description="by probed step")
    curve: list[Number] = Field([], description="at points that lie evenly from the last probe to the end")


class RoundedStateDrift(FrozenRecord):
    """How far the size of a step drifts from fp32's where the state that divides it is rounded after each step.

    Means over the steps ahead; 0.1 is a tenth of the step.
    """

    steps: int = Field(
        description="steps ahead: to the end of the training, or 10,000 where that is not known"
    )
    decay: float = Field(description="what is left of the state after a step without gradients")
    steady: Number = Field(description="where gradients stay as they were")
    falling: Number = Field(description="where they fall to a tenth as the loss falls")

    @property
    def largest_error(self) -> float:
        return max(self.steady, self.falling)


class WatchedFirstSteps(FrozenRecord):
    """What a watch of the first steps has seen, in fp32."""

    steps: int
    total: int | None = Field(None, description="optimizer steps of the whole training, if known")
    total_from: str = Field("", description="who says so: --steps, the recipe, a scheduler, loops, a trainer")
    basis: str = Field("", description="where the learning rates ahead come from; empty where the rate stays")
    rates_known: bool = True
    is_floor: bool = Field(
        False,
        description="updates shrink as the loss falls, so that more is lost than `shares` say: with an optimizer that "
        "does not divide by its second moment, or at a rate that does not fall",
    )
    losses: list[Number] = Field([], description="of each backward pass")
    largest_gradient: Number | None = Field(None, description="magnitude, of any step, at a loss scale of 1")
    zero_denominators: dict[str, Number] = Field(
        {}, description="share of elements by which Adam divides by 0, by type"
    )
    state_errors: dict[str, RoundedStateDrift] = Field({}, description="by type of the optimizer's state")
    state_is_known: bool = Field(True, description="whether it is known how the optimizer moves its state")
    shares: dict[str, ShareLost] = Field({}, description="by type of the weights")
    weights: str = Field(
        "", description="16-bit type in which the script itself holds what it trains; empty for fp32"
    )


class ArmOutlook(FrozenRecord):
    """What the first steps tell of the whole training of one arm: what will be lost, where, and what helps."""

    arm: str
    word: Word
    part: Literal["", "weights", "gradients", "state", "products"] = ""
    why: str = Field("", description="the law, with its figures")
    share_now: Number | None = None
    share_rest: Number | None = None
    cure: str = Field("", description="option that removes the fault")


class Outlook(FrozenRecord):
    """The outlook of some arms on one training."""

    version: int = 1
    subject: str = ""
    prefix: WatchedFirstSteps
    twin: Number | None = Field(
        None, description="rms difference of losses from those of weights changed by 2**-9"
    )
    arms: list[ArmOutlook] = Field([])
