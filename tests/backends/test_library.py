"""What is known of other libraries before they are imported: whether they are there, and what they will run."""

import os
from pathlib import Path
from typing import Any

import pytest

from ampcompare.backends.arm import Arm
from ampcompare.backends.library import Library
from ampcompare.base.errors import BackendUnavailable

ABSENT = Library(("no_such_library",), ("no-such-library",), "pip install no-such-library", "it is not there")


def test_mmengine_scales_the_loss_in_bf16_too() -> None:
    roles = Arm.parse("mmengine:bf16").roles
    assert roles is not None
    assert (roles.products, roles.loss_scale is None) == ("bf16", False)


def test_a_library_that_is_not_there() -> None:
    """One line names the library, what to type and what stands in the way."""
    assert ABSENT.why_missing() == "not installed: pip install no-such-library (it is not there)"
    with pytest.raises(
        BackendUnavailable, match="accelerate is not installed: pip install no-such-library"
    ) as caught:
        ABSENT.load("accelerate")
    assert caught.value.exit_code == 4


def test_a_library_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever its import raises is one line with its version."""
    (tmp_path / "broken_library.py").write_text("raise OSError('libtorch.so: undefined symbol')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendUnavailable, match=r"broken_library of unknown version .* OSError: libtorch"):
        Library(("broken_library",), ("broken-library",), "pip install it").load("fabric")


@pytest.mark.integration
def test_nothing_is_imported_before_it_is_chosen(forked_python: Any, tmp_path: Path) -> None:
    """`list`, `explain` of such an arm, and another arm's backend import none of the libraries."""
    (tmp_path / "code.py").write_text(
        "import sys\n"
        "from ampcompare.cli import main\n"
        "main(['list', 'arms']); main(['explain', 'accelerate:bf16'])\n"
        "early = set(sys.modules)\n"
        "from ampcompare.training.precision.base import make_precision\n"
        "make_precision('native:bf16')\n"
        "names = {'accelerate', 'lightning_fabric', 'lightning', 'mmengine', 'horovod'}\n"
        "assert 'torch' in sys.modules\n"
        "print('loaded:', *sorted((names & set(sys.modules)) | ({'torch', 'numpy'} & early)))\n"
    )
    done = forked_python.run([str(tmp_path / "code.py")], tmp_path, os.environ)
    assert done.stdout.splitlines()[-1:] == ["loaded:"], done.stderr
