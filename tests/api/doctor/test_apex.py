"""Each state that `import apex` can be in is named rightly, with what to do."""

import json
from typing import Any

import pytest

from ampcompare.api.doctor.apex import INSTALL, UNINSTALL, examine_apex

AMP = "initialize = scale_loss = master_params = state_dict = load_state_dict = None"


def _with_amp(site: Any, amp_c: str | None) -> None:
    site.write("apex/__init__.py")
    site.write("apex/amp/__init__.py", AMP)
    site.distribution("apex", "0.1")
    if amp_c is not None:
        site.write("amp_C.cpython-0.so", "")
        site.write("amp_C.py", amp_c)


def test_no_apex(site: Any) -> None:
    """Without Apex all is well: our own engine needs none."""
    finding = examine_apex(site.path)
    assert (finding.facts["state"], finding.verdict, finding.remedy) == ("absent", "ok", ())
    assert "engine=compat" in finding.reason


def test_the_impostor_of_pypi(site: Any) -> None:
    """The unrelated package is called that, and is to be uninstalled before the real one is built."""
    site.write("apex/__init__.py", "raise TypeError('Class advice impossible in Python3')")
    site.write("apex/models.py")
    site.distribution("apex", "0.9.10.dev0")
    finding = examine_apex(site.path)
    assert (finding.facts["state"], finding.verdict) == ("impostor", "warning")
    assert "unrelated package of PyPI, version 0.9.10.dev0" in finding.value
    assert "Class advice impossible in Python3" in finding.reason
    assert finding.remedy == (UNINSTALL, INSTALL)


def test_apex_without_amp(site: Any) -> None:
    """An Apex after the removal is told with its commit."""
    site.write("apex/__init__.py", "raise SystemError('must not be imported')")
    site.write("apex/normalization/__init__.py")
    origin = {"url": "there", "vcs_info": {"vcs": "git", "commit_id": "0123456789abcdef"}}
    site.distribution("apex", "0.1", direct_url_json=json.dumps(origin))
    finding = examine_apex(site.path)
    assert (finding.facts["state"], finding.verdict) == ("no_amp", "warning")
    assert finding.value == "NVIDIA Apex 0.1 (commit 01234567) without apex.amp"
    assert "cannot import name 'amp' from 'apex'" in finding.reason
    assert finding.remedy[0].startswith("ampcompare exec")
    assert "apex@25.05" in finding.remedy[-1]


def test_python_only(site: Any) -> None:
    """An Apex without kernels works, which was tried, and what it lacks is said."""
    _with_amp(site, None)
    finding = examine_apex(site.path)
    assert (finding.facts["state"], finding.facts["usable"], finding.verdict) == ("python_only", True, "note")
    assert "Python only" in finding.value
    assert "amp_C" in finding.reason
    assert finding.remedy[-1] == INSTALL


def test_full_build(site: Any) -> None:
    """An Apex whose kernels load is fine, though its O1 has a limit on new versions of torch."""
    _with_amp(site, "")
    finding = examine_apex(site.path)
    assert (finding.facts["state"], finding.facts["usable"], finding.verdict) == ("full", True, "ok")
    assert "O1 raises" in finding.reason


def test_kernels_of_another_build(site: Any) -> None:
    """Kernels that raise when loaded are found by loading them."""
    error = "amp_C.so: undefined symbol: _ZN3c105ErrorC2E"
    _with_amp(site, f"raise ImportError({error!r})")
    finding = examine_apex(site.path)
    assert (finding.facts["state"], finding.verdict) == ("other_build", "problem")
    assert error in finding.reason
    assert finding.facts["usable"]
    assert finding.remedy == (UNINSTALL, INSTALL)


@pytest.mark.parametrize("amp", ["import torch._six", "raise SystemExit(3)", "initialize = None"])
def test_apex_that_does_not_import(site: Any, amp: str) -> None:
    """An Apex too old for this torch, one that exits, and one with half of its functions are broken."""
    _with_amp(site, None)
    site.write("apex/amp/__init__.py", amp)
    finding = examine_apex(site.path)
    assert (finding.facts["state"], finding.facts["usable"], finding.verdict) == ("broken", False, "problem")
    assert finding.facts["failure"] in finding.reason
    assert finding.remedy


def test_clone_as_namespace_package(site: Any) -> None:
    """A clone beside the script is a namespace package; its commit is read, and it is to be moved or installed."""
    site.write("apex/setup.py")
    site.write("apex/apex/__init__.py")
    site.write("apex/.git/HEAD", "ref: refs/heads/master\n")
    site.write("apex/.git/refs/heads/master", "fedcba9876543210\n")
    finding = examine_apex(site.path)
    assert (finding.facts["state"], finding.verdict) == ("namespace", "warning")
    assert finding.value == "a clone of the repository at commit fedcba98, not installed"
    assert "unknown location" in finding.reason
    assert finding.remedy[0].startswith(f"mv {site.folder / 'apex'} ")
    assert "checkout 25.05" in finding.remedy[1]


def test_a_file_of_the_name(site: Any) -> None:
    """A script called apex.py hides the real one."""
    site.write("apex.py")
    finding = examine_apex(site.path)
    assert finding.facts["state"] == "shadowed"
    assert "mv " in finding.remedy[0]


def test_the_current_folder_counts(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in the current folder is found as a script there would find it."""
    site.write("apex/setup.py")
    monkeypatch.chdir(site.folder)
    assert examine_apex().facts["path"] == str(site.folder / "apex")
