"""Each state that `import apex` can be in is named rightly, with what to do."""

import json
from typing import Any

import pytest

from ampcompare.doctor.apex import INSTALL, UNINSTALL, examine_apex

AMP = "initialize = scale_loss = master_params = state_dict = load_state_dict = None"


def _with_amp(site: Any, amp_c: str | None) -> None:
    site.write("apex/__init__.py")
    site.write("apex/amp/__init__.py", AMP)
    site.distribution("apex", "0.1")
    if amp_c is not None:
        site.write("amp_C.cpython-0.so", "")
        site.write("amp_C.py", amp_c)


ORIGIN = json.dumps({"url": "there", "vcs_info": {"vcs": "git", "commit_id": "0123456789abcdef"}})
BUILT = {"apex/__init__.py": "", "apex/amp/__init__.py": AMP}
# The files on the import path, the metadata of a distribution, what is found, what is said of it, and what helps.
STATES: dict[str, tuple[dict[str, str], dict[str, str], str, str, str, tuple[str, ...]]] = {
    "absent": ({}, {}, "ok", "not installed", "engine=compat", ()),
    "impostor": (
        {"apex/__init__.py": "raise TypeError('Class advice impossible in Python3')", "apex/models.py": ""},
        {"version": "0.9.10.dev0"}, "warning", "not NVIDIA's: the unrelated package of PyPI, version 0.9.10.dev0",
        "Class advice impossible in Python3", (UNINSTALL,),
    ),
    "no_amp": (
        {"apex/__init__.py": "raise SystemError('must not be imported')", "apex/normalization/__init__.py": ""},
        {"version": "0.1", "direct_url_json": ORIGIN}, "warning",
        "NVIDIA Apex 0.1 (commit 01234567) without apex.amp", "cannot import name 'amp' from 'apex'",
        ("ampcompare shim on",),
    ),
    "python_only": (
        BUILT, {"version": "0.1"}, "note", "NVIDIA Apex 0.1, Python only", "amp_C", (UNINSTALL, INSTALL),
    ),
    "full": (
        {**BUILT, "amp_C.cpython-0.so": "", "amp_C.py": ""}, {"version": "0.1"}, "ok",
        "NVIDIA Apex 0.1, with compiled kernels", "O1 raises", (),
    ),
    "namespace": (
        {"apex/setup.py": "", "apex/apex/__init__.py": "", "apex/.git/HEAD": "ref: refs/heads/master\n",
         "apex/.git/refs/heads/master": "fedcba9876543210\n"},
        {}, "warning", "a clone of the repository at commit fedcba98, not installed", "unknown location",
        ("mv ", "git -C ", "pip install "),
    ),
    "shadowed": ({"apex.py": ""}, {}, "warning", "the file ", "hides any installed Apex", ("mv ",)),
}  # fmt: skip


@pytest.mark.parametrize("state", STATES)
def test_each_state_is_named_with_what_helps(site: Any, state: str) -> None:
    """From the files and metadata that are there; a build that may work is tried."""
    files, metadata, verdict, value, reason, remedy = STATES[state]
    for file, text in files.items():
        site.write(file, text)
    if metadata:
        site.distribution("apex", **metadata)
    finding = examine_apex(site.path)
    assert (finding.facts["state"], finding.verdict) == (state, verdict)
    assert finding.facts["usable"] == (state in ("python_only", "full"))
    assert finding.value.startswith(value)
    assert reason in finding.reason
    assert len(finding.remedy) == len(remedy)
    assert all(line.startswith(begin) for line, begin in zip(finding.remedy, remedy, strict=True))


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


def test_the_current_folder_counts(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in the current folder is found as a script there would find it."""
    site.write("apex/setup.py")
    monkeypatch.chdir(site.folder)
    assert examine_apex().facts["path"] == str(site.folder / "apex")
