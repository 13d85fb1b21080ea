"""What stands behind `torch.autocast` and `GradScaler` of a script: what every arm answers there."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import UnsupportedCombination
from ampcompare.base.location import message_with_script_line
from ampcompare.base.patches import Subscriptions
from ampcompare.script.torch_amp.amp_use import ScriptAmpUse


class TorchAmpStandIn:
    """What stands behind `torch.amp` under an arm: its answers to the script, which by default leave all as it is.

    Attributes:
        script: how the script uses `torch.amp`.
        needs_scaler: the arm scales the loss, or moves gradients to master weights.
        casts_loss: casts act on all that the script computes, as O1's do, not on modules alone.
        casts_weights: the arm acts by casting the weights of models, so not on modules whose weights no optimizer has.
        steps_copies: optimizers step other tensors than the weights of models: masters, or copies made for a step.
        copies_in_steps: those copies last for one step, so that no model has what a step writes before it ends.
        steps_again: a second step by the gradients of the last one moves these on too, without a step of a scaler.
        widens: the type of the outputs of modules that become fp32; None where the arm does that itself, or not at all.
        outputs: the type that the outputs of models get where the arm casts; None if they keep theirs.
        num_blocks: autocast blocks that were entered, of an arm with `outputs`.
    """

    needs_scaler = casts_loss = casts_weights = steps_copies = copies_in_steps = False
    steps_again = True
    widens: torch.dtype | None = None
    outputs: torch.dtype | None = None
    num_blocks = 0

    def __init__(self, calls_apex: Callable[[], bool]) -> None:
        self.script = ScriptAmpUse(calls_apex)

    def install(self, events: Subscriptions) -> None:
        """Begin."""

    def initialize(self, models: list[nn.Module], optimizers: list[Any]) -> None:
        """Prepare models and optimizers that the script names."""
        self.script.is_initialized = self.script.has_autocast = True
        self.note_arm_acts()

    def trains_through_apex(self) -> bool:
        """Return whether the script trains through `apex.amp`."""
        return self.script.calls_apex()

    def note_optimizer_made(self) -> None:
        """Note that the script has made an optimizer."""

    def casts_now(self) -> bool:
        """Return whether operations are cast at present."""
        return False

    def casts_functions_now(self) -> bool:
        """Return whether functions of torch are cast at present, in another way than by autocast."""
        return False

    def block_casting_functions(self, on: bool) -> AbstractContextManager[None]:
        """Return a block in which they are, or are not."""
        return nullcontext()

    def find_casts_off_factory(self) -> Callable[[], Any] | None:
        """Return what makes a block in which nothing is cast, for modules that stay in fp32.

        None where nothing is cast, or where the arm keeps them in fp32 by itself.
        """
        return None

    def forget_weight_casts(self) -> None:
        """Cast weights again at their next use: a backward pass has freed the graph of their casts."""

    def note_arm_acts(self) -> None:
        """Note that the arm acts on the script."""
        self.script.acts = True

    def masters(self, optimizer: Any) -> list[tuple[Tensor, Tensor]]:
        """Return the weights of models in whose place an optimizer has other tensors at present, with those."""
        return []

    def find_input_type(self, module: nn.Module) -> torch.dtype | None:
        """Return the type of the inputs of a part of a model that the script calls by itself; None for others."""
        return None

    def fitting_arguments_of_weightless_module(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of a module without weights that the script calls, in types that fit one another."""
        return args, kwargs

    def restore_model_gradients(self, optimizer: Any) -> None:
        """Let weights have the gradients of their masters as their own: a backward pass is about to add to them."""

    def forget_unscaled_gradients(self, scaler: Any, optimizer: Any) -> None:
        """Let gradients be unscaled once more before the step."""
        scaler._per_optimizer_states.pop(id(optimizer), None)

    # What `ScriptScaler` asks of an arm with a loss scale of its own.

    def note_scaler_made(self, scaler: Any, enabled: bool) -> None:
        """Note that the script has made a scaler, or that it was made on its behalf."""

    def leaves_scaler_alone(self) -> bool:
        """Return whether GradScaler is torch's own by now: the script trains through `apex.amp`."""
        return False

    def prepare_scaled_pass(self, *, unscaled: bool) -> None:
        """Prepare for the backward pass of a loss; `unscaled` gradients of an optimizer may wait for its step."""

    def check_can_unscale(self, optimizer: Any) -> None:
        """Raise if the gradients of `optimizer` cannot be those of a scaled loss under the arm."""

    def unscale_and_find_overflow(self, optimizer: Any, scaler: Any) -> bool:
        """Give what the optimizer steps true gradients, by a `LossScaler`, and return whether one overflowed."""
        raise NotImplementedError

    def step_with_true_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer whose gradients are true."""
        return optimizer.step(*args, **kwargs)

    def find_step_without_arm(self, optimizer: Any, step: Any) -> Any:
        """Return the step of an optimizer that evaluates losses by itself, without what the arm has put around it."""
        return step

    def end_update_without_step(self, optimizer: Any) -> None:
        """End an update of an optimizer without a step."""


def losses_inside_step_refusal(optimizer: Any, arm: Arm) -> UnsupportedCombination:
    """Return the refusal of a step that evaluates losses by itself under an arm that makes copies for each step."""
    return UnsupportedCombination(
        message_with_script_line(
            f"the step of {type(optimizer).__name__} evaluates losses by itself, and {arm} steps fp32 copies of the "
            "weights that it makes for each step, so that the model would not see what the step writes before it ends"
        )
    )
