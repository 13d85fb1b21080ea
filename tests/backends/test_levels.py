"""What the opt levels of Apex say of themselves."""

import pytest

from ampcompare.backends.apex_levels import LEVELS, has_half_weights
from ampcompare.backends.arm import Arm


@pytest.mark.parametrize(
    ("level", "half", "static"),
    [
        ("O0", False, True),
        ("O1", False, False),
        ("O2", True, False),
        ("O3", True, True),
        ("O4", False, True),
        ("O5", True, True),
    ],
)
def test_weights_and_scale_of_a_level(level: str, half: bool, static: bool) -> None:
    assert (has_half_weights(level), LEVELS[level].is_static) == (half, static)
    roles = Arm.parse(f"apex:{level}").roles
    assert roles is not None
    assert (roles.loss_scale is None or roles.loss_scale.is_static) is static


def test_no_level_has_no_half_weights() -> None:
    assert not has_half_weights(None)
