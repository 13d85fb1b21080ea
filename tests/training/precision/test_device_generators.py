"""Generators of roundings, apart from torch's own."""

import torch

from ampcompare.training.precision.device_generators import DeviceGenerators

CPU = torch.device("cpu")


def test_a_step_begins_with_its_seed_whenever_a_generator_was_made() -> None:
    generators = DeviceGenerators()
    first = torch.rand(3, generator=generators.generator_of(CPU, 7))
    more = torch.rand(3, generator=generators.generator_of(CPU, 7))
    assert not torch.equal(first, more)
    generators.begin_step(8)
    other = torch.rand(3, generator=generators.generator_of(CPU, 8))
    assert torch.equal(other, torch.rand(3, generator=DeviceGenerators().generator_of(CPU, 8)))
    generators.begin_step(7)
    assert torch.equal(first, torch.rand(3, generator=generators.generator_of(CPU, 7)))


def test_torchs_own_generator_is_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    torch.rand(9, generator=DeviceGenerators().generator_of(CPU, 1))
    assert torch.equal(torch.rand(2), expected)
