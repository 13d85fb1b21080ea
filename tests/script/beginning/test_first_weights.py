"""First weights that an optimizer gets are kept, or taken from a file, whatever arm the script trains under."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ampcompare.base.errors import ConfigError, UnsupportedCombination
from ampcompare.base.patches import Layer, Subscriptions
from ampcompare.script.beginning.first_weights import FirstWeightsFollower


@pytest.fixture
def events() -> Iterator[Subscriptions]:
    events = Subscriptions(Layer.RECORD)
    yield events
    events.end()


def _train(model: torch.nn.Module) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1)


def test_stored_weights_are_those_of_the_script(events: Subscriptions, tmp_path: Path) -> None:
    """In their order, in the type of the script; what is added behind the first step stays."""
    stored = [torch.full((2, 3), 0.1), torch.zeros(2)]
    torch.save(stored, tmp_path / "first.pt")
    first = FirstWeightsFollower(events, tmp_path / "first.pt")
    model = torch.nn.Linear(3, 2)
    torch.nn.init.zeros_(model.bias)
    model.to(torch.bfloat16)
    _train(model)
    assert torch.equal(model.weight, stored[0].bfloat16())
    assert (first.count, first.changed) == (2, 1)
    assert first.note_step_and_is_first()
    assert not first.note_step_and_is_first()
    later = torch.nn.Linear(5, 1)
    before = later.weight.clone()
    _train(later)
    assert torch.equal(later.weight, before)


def test_parts_of_weights_are_refused(events: Subscriptions) -> None:
    """Those of one rank may have the shape of another one's, whose numbers are others."""
    FirstWeightsFollower(events)
    model = torch.nn.Linear(3, 2)
    model.bias._fsdp_flattened = True  # type: ignore[assignment]
    with pytest.raises(UnsupportedCombination, match="each rank of this script holds a part of the weights"):
        _train(model)


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ([(2, 4), (2,)], r"weight 1 has shape \(2, 3\), and one of \(2, 4\) is stored"),
        ([(2, 3)], r"weight 2 has shape \(2,\), and nothing more is stored"),
        ([(2, 3), (2,), (7,)], "1 of them are left over"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    shapes: list[tuple[int, ...]], reason: str, events: Subscriptions, tmp_path: Path
) -> None:
    torch.save([torch.zeros(shape) for shape in shapes], tmp_path / "first.pt")
    first = FirstWeightsFollower(events, tmp_path / "first.pt")

    def begin() -> None:
        _train(torch.nn.Linear(3, 2))
        first.note_step_and_is_first()

    with pytest.raises(ConfigError, match=reason):
        begin()
