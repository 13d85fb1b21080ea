"""Let an arm compute the step that a replay judges."""

from __future__ import annotations

from contextlib import AbstractContextManager

from ampcompare.script.arm_process import current_stand_in, prepare_arm_process
from ampcompare.script.behind.stand_in import ArmStandIn
from ampcompare.script.invocation.exec_settings import ExecSettings
from ampcompare.script.replay.one_step import StepPrecision
from ampcompare.training.precision.base import half_dtype_of


class StandInPrecision(StepPrecision):
    """An arm that stands behind the names that a script trains by."""

    def __init__(self, stand_in: ArmStandIn) -> None:
        self._stand_in = stand_in
        self.half = half_dtype_of(stand_in.arm)

    def why_not_judged(self) -> str:
        amp = self._stand_in.torch_amp
        if (
            amp.script.has_scaler
            or amp.script.off_scalers
            or amp.script.is_initialized
            or amp.trains_through_apex()
        ):
            return (
                "the script scales its loss by itself, by a GradScaler or apex.amp, whose state is not in the capsule; "
                "a step is repeated under an arm where the script scales no loss"
            )
        return ""

    def casts_without_autocast_now(self) -> bool:
        return self._stand_in.torch_amp.casts_functions_now()

    def block_with_casts(self, on: bool) -> AbstractContextManager[None]:
        return self._stand_in.torch_amp.block_casting_functions(on)


def prepare_process_for_replay(settings: ExecSettings) -> StepPrecision:
    """Prepare this process for the arm of some settings, and return that as a replay uses it."""
    prepare_arm_process(settings)
    return StandInPrecision(current_stand_in())
