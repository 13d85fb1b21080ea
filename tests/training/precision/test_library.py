"""The table of what other libraries run, against what the installed ones do."""

from __future__ import annotations

import pytest

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import BackendUnavailable
from ampcompare.training.precision.base import make_precision

ASKED = [
    *("accelerate:no", "accelerate:fp16", "accelerate:bf16"),
    *("fabric:32-true", "fabric:16-mixed", "fabric:bf16-mixed", "fabric:16-true", "fabric:bf16-true"),
    *("mmengine:fp32", "mmengine:fp16", "mmengine:bf16"),
]


@pytest.mark.parametrize("text", ASKED)
def test_the_table_is_what_the_libraries_do(text: str) -> None:
    """On a CPU each installed library sets itself to what the table says, or refuses where it says so."""
    arm = Arm.parse(text)
    assert arm.spec.library is not None
    if arm.spec.library.missing():
        pytest.skip(arm.spec.library.missing())
    known = arm.effective("cpu")
    assert known is not None
    assert bool(known.reason) == (known != arm.effective("cuda"))
    if known.arm is None:
        with pytest.raises(BackendUnavailable):
            make_precision(text)
        return
    effective = make_precision(text).effective
    assert effective is not None
    assert (effective.arm, effective.as_asked) == (known.arm, not known.reason)
