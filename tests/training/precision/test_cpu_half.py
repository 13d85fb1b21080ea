"""The emulation of 16-bit types on a CPU leaves what torch notes of tensors."""

import torch

from ampcompare.training.precision.cpu_half import EmulatedHalf


def test_writes_into_lists_of_tensors_are_noted() -> None:
    """As without the emulation, so that what an optimizer writes is seen; also where no version is kept."""
    one, two = torch.zeros(3, requires_grad=True), torch.zeros(2, requires_grad=True)
    with EmulatedHalf(), torch.no_grad():
        torch._foreach_add_([one, two], 1.0)
        torch._foreach_lerp_((one,), (torch.zeros(3),), weight=0.5)
        assert (one._version, two._version) == (2, 1)
        torch._foreach_add([one, two], 1.0)
        assert (one._version, two._version) == (2, 1)
        assert one.tolist() == [0.5] * 3
    with EmulatedHalf(), torch.inference_mode():
        kept = torch.zeros(3)
        torch._foreach_add_([kept], 1.0)
        assert kept.tolist() == [1.0] * 3


def test_the_compiler_passes_over_the_emulation() -> None:
    """What a compiled function leaves to Python is computed, and the frames around each operation are not compiled."""

    def call(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        torch._dynamo.graph_break()
        return (y @ x).half()

    torch._dynamo.utils.counters.clear()
    x = torch.rand(3, 3).half()
    with EmulatedHalf():
        assert torch.equal(torch.compile(call, backend="eager")(x), call(x))
    assert not torch._dynamo.utils.counters["stats"]
