"""What really ran: in which type each part of a training step was held or computed, and who set it."""

from pydantic import Field

from ampcompare.results.records.document import Count, FrozenRecord, Number, Share

Types = dict[str, Share]
"""Types, such as "bf16", each with its share of elements or of multiply-adds; empty where nothing was seen."""


class GroupTypes(FrozenRecord):
    """The types of one parameter group of an optimizer."""

    name: str = Field(description="such as `SGD 0`: the optimizer, and the number of its group")
    parameters: Count = Field(0, description="elements that it trains")
    weights: Types = Field({}, description="of the model between steps")
    masters: Types = Field(
        {}, description="of copies that the optimizer steps; empty if it steps the weights"
    )
    gradients: Types = Field({}, description="that the optimizer got")
    state: Types = Field({}, description="of the optimizer between steps; empty if it keeps none")
    eps: Number | None = Field(None, description="that the optimizer adds to a second moment it divides by")
    zero_eps: bool = Field(False, description="whether that is zero in the type of the second moment")


class LinearFormat(FrozenRecord):
    """What products of linear layers multiplied in one format, and what rounding did to their operands."""

    role: str = Field(description="fprop, dgrad or wgrad")
    format: str = Field(description="such as `nvfp4, scale te, sr`, or bf16")
    share: Share = Field(description="of the multiply-adds of this role in linear layers")
    layers: list[str] = Field([], description="names of those in bf16")
    cut_off: Share | None = Field(
        None, description="elements beyond the range of the format, which saturated"
    )
    zeroed: Share | None = Field(None, description="elements that became 0 and were not")
    scales_at_end: Share | None = Field(None, description="scales at an end of their range, or beyond it")
    error: Number | None = Field(None, description="of the operands: norm of the error over their norm")


class Ledger(FrozenRecord):
    """In which types a training ran, seen in a few of its steps."""

    steps: list[Count] = Field([], description="updates that were looked at, counted from 0")
    skipped: Count = Field(
        0, description="of these updates, those that updated nothing, as after an overflow"
    )
    groups: list[GroupTypes] = Field([])
    frozen: Types = Field({}, description="of weights that no optimizer trains")
    accumulated: Types = Field({}, description="gradients of earlier micro-batches; empty if there is one")
    forward: Types = Field({}, description="multiply-adds of the forward pass, by the type of their operands")
    forward_steps: dict[str, list[Count]] = Field(
        {}, description="steps whose forward pass had products of a type"
    )
    backward: Types = Field({}, description="multiply-adds of the backward pass")
    elsewhere: dict[str, list[str]] = Field(
        {}, description="products of the forward pass in another than its main type, by type"
    )
    linear: list[LinearFormat] = Field([], description="products of linear layers in formats of their own")
    linear_in_bf16: list[str] = Field([], description="of these layers, those that multiplied in bf16 only")
    lost_gradients: list[str] = Field(
        [], description="such as `head wgrad`: gradients that were all 0 where bf16 operands give others"
    )
    reduced: Types = Field({}, description="elements that ranks reduced")
    update: str = Field("", description="how updated weights were rounded: nearest, stochastic or kahan")
    loss_scale: Number | None = Field(None, description="of the last step; None if the loss was not scaled")
    lost: Share | None = Field(
        None, description="share of elements with a gradient that an update left as they were"
    )
    largest_gradient: Number | None = Field(
        None, description="magnitude that an optimizer got, without the loss scale"
    )
    zero_denominators: Share | None = Field(
        None,
        description="share of elements for which eps and the second moment are zero in the type of the state",
    )
    unseen: str = Field("", description="what hid its products: a program that torch.compile has compiled")
    emulated: str = Field("", description="type that the device lacks, whose products ran in a wider one")
    by: dict[str, str] = Field({}, description="who set a part: a line of the script, a library or the arm")

    def types_of_groups(self, part: str) -> Types:
        """Return the types of `weights`, `masters`, `gradients` or `state` over all groups, by share of elements."""
        held: dict[str, float] = {}
        for group in self.groups:
            for name, share in getattr(group, part).items():
                held[name] = held.get(name, 0.0) + share * max(group.parameters, 1)
        total = sum(held.values())
        return {name: value / total for name, value in sorted(held.items(), key=lambda item: -item[1])}
