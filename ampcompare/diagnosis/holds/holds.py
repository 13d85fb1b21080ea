"""The assertion `holds`. Imports torch only when it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ampcompare.diagnosis.holds.result import Held

if TYPE_CHECKING:
    from ampcompare.backends.arm import Arm

__all__ = ["DEFAULT_ARMS", "holds"]

DEFAULT_ARMS = ("bf16", "fp16", "O2")


def holds(
    subject: Callable[..., Any],
    arms: Sequence[Arm | str] | Arm | str = DEFAULT_ARMS,
    *,
    inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    loss: Callable[[Any], Any] | None = None,
    rtol: float | Literal["auto"] = "auto",
    steps: int = 1,
    seed: int = 0,
    device: str = "cpu",
    strict_types: bool = False,
    cures: bool = True,
) -> list[Held]:
    """Assert that a module, a loss or a training step gives under each arm what it gives in fp32.

    Compared are outputs, loss and gradients of the first update that is applied. Every operation of all steps is
    watched for overflow, underflow and lost updates, as `ampcompare.diagnose` does.

    Args:
        subject: with `inputs`, a module, of which a copy is trained, or a function of tensors such as a loss. Without,
            a training loop as for `ampcompare.diagnose`: it gets a precision, calls `prepare` once, and then
            `backward` and `step`, which ends the loop after the last step. It is called several times, and must begin
            from the same weights and batches each time; torch is seeded before.
        arms: texts such as "bf16", "fp16", "O2" or "apex:O1,loss_scale=128", or `Arm` objects.
        inputs: positional arguments of the subject, or a mapping of keyword arguments. The floating inputs of a
            function reach it in the 16-bit type of the arm, as the results of a layer do, and get gradients.
        loss: makes the loss of the output of a module or function; by default a fixed random weighting of it.
        rtol: relative error that each figure may have; "auto": what rounding explains, see docs/testing.md.
        steps: updates that are watched for faults.
        seed: of torch before each run.
        device: such as "cpu" or "cuda"; 16-bit products are emulated on a CPU, as tensor cores compute them.
        strict_types: also fail where an operation runs in another type than the arm promises.
        cures: search what removes a fault, by up to 12 further runs, and name it in the message.

    Returns:
        What was measured, for each arm.

    Raises:
        DoesNotHold: under an arm it raises, overflows, loses gradients or is further from fp32 than the tolerance.
        ConfigError: an arm that does not exist, a loop that makes no update or differs from run to run, or that is not
            finite in fp32.
        EnvironmentUnfit: this machine lacks something that an arm needs.
    """
    __tracebackhide__ = True
    from ampcompare.diagnosis.holds.check import Check

    named = [arms] if isinstance(arms, str) or not isinstance(arms, Sequence) else list(arms)
    check = Check(
        subject,
        inputs=inputs,
        loss=loss,
        rtol=rtol,
        steps=steps,
        seed=seed,
        device=device,
        strict_types=strict_types,
        cures=cures,
    )
    held = []
    for arm in named:  # a comprehension would be one more frame in tracebacks
        held.append(check.arm(arm))
    return held
