"""What torch certainly lacks."""

import pytest

from ampcompare.base.environment import gpus
from ampcompare.base.environment.gpus import why_no_accelerator


def test_what_the_machine_or_the_build_rules_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metal needs a Mac, XPU a build for it; of another machine nothing is known."""
    assert why_no_accelerator("mps", platform="linux") == "this is not a Mac"
    assert why_no_accelerator("mps", platform="darwin") == ""
    assert why_no_accelerator("mps", platform="linux", here=False) == ""
    for build, why in (
        ({"cuda": None, "xpu": None}, "this torch is built without XPU"),
        ({"xpu": "2025"}, ""),
        (None, ""),
    ):
        monkeypatch.setattr(gpus, "torch_build", lambda build=build: build)
        assert why_no_accelerator("xpu") == why
