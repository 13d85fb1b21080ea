"""How a script uses `torch.amp`, whatever arm stands behind it, and what is done there on its behalf."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import UnsupportedCombination
from ampcompare.base.location import message_with_script_line


class ScriptAmpUse:
    """What a script has made of `torch.amp` so far.

    Attributes:
        calls_apex: returns whether the script has called the `amp.initialize` of an Apex, behind which no arm stands.
        acts: the script, or what drives it, has entered an autocast block or made a GradScaler, so that the arm acts.
        has_autocast: the script itself has made an enabled autocast block.
        has_scaler: the script itself has made a GradScaler that is on.
        off_scalers: GradScalers that the script itself has made and switched off.
        is_initialized: the script has called `amp.initialize`, which this arm stands behind.
        steps_on_behalf: the steps of the script are made and recorded on its behalf; what they lack is no fault of it.
        has_gradient_graph: a backward pass of the script has made gradients with a graph (`create_graph`).
        why_off: why the arm has no effect, if the script made something that is off before anything that is on.
        in_step: the optimizer whose step evaluates losses by itself at present, with gradients scaled for it.
    """

    def __init__(self, calls_apex: Callable[[], bool]) -> None:
        self.calls_apex = calls_apex
        self.acts = self.has_autocast = self.has_scaler = self.is_initialized = False
        self.steps_on_behalf = self.has_gradient_graph = False
        self._makers: set[int] = set()  # threads that make objects of `torch.amp` on behalf of the script
        self.off_scalers: list[Any] = []
        self.in_step: Any = None
        self.why_off: str | None = None

    def note_autocast_made(self, arm: Arm | str, enabled: bool) -> None:
        """Note that an autocast block is made, by the script or on its behalf.

        Args:
            arm: named in the refusal of a script that has its mixed precision off.
            enabled: whether its casts are on.
        """
        self.has_autocast = self.has_autocast or (enabled and not self._is_making_on_behalf())
        self._note_if_switched_off(arm, enabled)

    def note_scaler_made(self, arm: Arm | str, enabled: bool, scaler: Any) -> None:
        """Note that a GradScaler is made, by the script or on its behalf; arguments as of `note_autocast_made`."""
        if not self._is_making_on_behalf():
            self.has_scaler = self.has_scaler or enabled
            if not enabled:
                self.off_scalers.append(scaler)
        self._note_if_switched_off(arm, enabled)

    def _note_if_switched_off(self, arm: Arm | str, enabled: bool) -> None:
        if not enabled and not self.acts and self.why_off is None:
            self.why_off = _switched_off_message(arm)

    def refuse_step_switched_off(self) -> None:
        """Refuse a step of a script that has switched its mixed precision off.

        Raises:
            UnsupportedCombination: it has made a block or a scaler that is off, and none that is on.
        """
        if self.why_off is not None and not self.acts and not self.calls_apex():
            raise UnsupportedCombination(self.why_off)

    @contextmanager
    def making_amp_objects_for_script(self) -> Iterator[None]:
        """Run a block that makes objects of `torch.amp` for the script."""
        self._makers.add(get_ident())
        try:
            yield
        finally:
            self._makers.discard(get_ident())

    def _is_making_on_behalf(self) -> bool:
        return get_ident() in self._makers


def _switched_off_message(arm: Arm | str) -> str:
    """Return the message for a script that trains with `torch.amp` switched off."""
    return message_with_script_line(
        f"the script makes autocast or GradScaler with enabled=False, so {arm} has no effect; run it with its own "
        "option for mixed precision, such as --amp"
    )
