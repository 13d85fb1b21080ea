"""The forms that an ordinary training has; where one differs, the reason names the form."""

import ast
from enum import StrEnum

from ampcompare.source.migrate.read.finding import UnsureRewrite

OTHER_FORM = "an ordinary training has another form here: {0}"


class OrdinaryForm(StrEnum):
    """What stands in an ordinary training where another one has something else, in the words of its reason."""

    INITIALIZE = "model, optimizer = amp.initialize(model, optimizer, ...)"
    FORWARD_PLACE = "the forward pass stands right above its backward pass"
    FORWARD_STATEMENTS = "assignments alone in the forward pass"
    FORWARD_TARGETS = "the forward pass sets variables alone"
    LOSS_ABOVE = "the loss is a variable that the lines above compute"
    LOSS_NAME = "the loss is a variable, which may be divided"
    BLOCK = "with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()"
    NO_TRY = "no `try` around the backward pass"
    STEP_PLACE = "a step for each backward pass, in the same block"
    STEP_BELOW = "the step stands below its backward pass"
    ONLY_CLIPS = "clips alone between the backward pass and the step"
    CLIPS_OF_TORCH = "clips of torch between the backward pass and the step"
    CLEARED_BY_STEP = "zero_grad stands in the block of the step, without a test of its own"
    CLEARED_APART = "gradients are cleared behind the step, or above the forward pass"

    def refusal_of(self, node: ast.AST) -> UnsureRewrite:
        """Return the error for a node that has another form."""
        return UnsureRewrite(node, OTHER_FORM.format(self.value))
