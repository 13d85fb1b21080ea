"""What a backend states about one of its arms: an explanation, and the bytes that it holds per parameter."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FP32_BYTES", "HALF_BYTES", "MASTER_WEIGHT_BYTES", "ArmExplanation", "BytesPerParameter", "kept_modules"]


@dataclass(frozen=True)
class ArmExplanation:
    """The parts of an explanation, in the order in which they are read.

    Attributes:
        summary: one sentence.
        does: (what, how) pairs: weights, casts, batch norm, loss scale, ...
        twin: the arm to compare it with; None if there is none.
        twin_is: how near that arm is, in one sentence.
        differs: a sentence for each difference between the two.
        script: lines of Python that do what the arm does.
        twin_script: the same for the arm to compare it with.
    """

    summary: str
    does: tuple[tuple[str, str], ...]
    twin: str | None
    twin_is: str
    differs: tuple[str, ...]
    script: tuple[str, ...]
    twin_script: tuple[str, ...]


@dataclass(frozen=True)
class BytesPerParameter:
    """Bytes for one parameter outside batch norm, by what they hold.

    Attributes:
        cast: 16-bit copies of weights, kept from the forward pass to the end of the backward pass.
        state: one optimizer tensor of the parameter's size.
        compensation: what the rounding of a weight has cut off.
    """

    weight: int
    gradient: int
    master: int
    master_gradient: int
    cast: int
    state: int
    compensation: int = 0

    def total(self, tensors: int) -> int:
        """Return the sum, for an optimizer that keeps this many tensors per parameter."""
        held = self.weight + self.gradient + self.master + self.master_gradient + self.cast + self.compensation
        return held + tensors * self.state


def kept_modules(patterns: str, *, rounds_to: str | None) -> tuple[tuple[str, str], ...]:
    """Return what an explanation says of `keep_fp32`; nothing if no patterns are given.

    Args:
        rounds_to: the 16-bit type of the model around; None where outputs stay in fp32.
    """
    if not patterns:
        return ()
    named = ", ".join(patterns.split("|"))
    outputs = (
        "outputs stay in fp32"
        if rounds_to is None
        else f"outputs become {rounds_to} again, unless they are those of the model"
    )
    return (("kept in fp32", f"modules of name or type {named}: weights and arithmetic in fp32; {outputs}"),)


FP32_BYTES = BytesPerParameter(4, 4, 0, 0, 0, 4)
HALF_BYTES = BytesPerParameter(2, 2, 0, 0, 0, 2)
MASTER_WEIGHT_BYTES = BytesPerParameter(2, 2, 4, 4, 0, 4)
