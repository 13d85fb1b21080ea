"""The training loss at the end of a run."""

import math
from array import array

from ampcompare.results.records.run import loss_tail


def test_the_tail_is_the_last_fifth() -> None:
    """The mean is over the last fifth of the steps, rounded down, and over one step at least."""
    assert loss_tail(range(10)) == {"loss_tail": 8.5, "loss_tail_steps": 2}
    assert loss_tail([4.0, 2.0]) == {"loss_tail": 2.0, "loss_tail_steps": 1}
    assert loss_tail(array("d")) == {"loss_tail": None, "loss_tail_steps": 0}
    assert math.isnan(loss_tail([1.0] * 9 + [math.nan])["loss_tail"] or 0.0)
