"""Which Apex stands under the name `apex`: exactly one of nine states, each with its remedy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Literal

from ampcompare.api.doctor.ask import ask
from ampcompare.api.doctor.finding import Check
from ampcompare.base.environment.apex import ApexInstall, probe_apex
from ampcompare.base.processes.call import Answer, search_path

__all__ = ["INSTALL", "State", "examine_apex"]

State = Literal["absent", "impostor", "no_amp", "python_only", "full", "other_build", "broken", "namespace", "shadowed"]
UNINSTALL = "pip uninstall -y apex"
INSTALL = (
    "pip install -v --no-build-isolation --no-cache-dir --config-settings '--build-option=--cpp_ext' "
    "--config-settings '--build-option=--cuda_ext' git+https://github.com/NVIDIA/apex@25.05"
)
NO_NEED = "ampcompare does not need it: apex arms run on its own engine (engine=compat)"


def examine_apex(path: Sequence[str] | None = None, *, seconds: float = 60.0) -> Check:
    """Check which Apex `import apex` would find, and whether it works.

    `facts` has: state (one of `State`); usable, whether `apex.amp` imports; the folder, version, commit and era.

    Args:
        path: folders to import from, instead of the current folder and `sys.path`.
        seconds: time limit of each import that is tried.
    """
    install = probe_apex(path) if path is not None else _as_a_script_would()
    if install.has_amp and path is None and _is_beside_scripts(install):
        return _beside_scripts(install)
    if install.has_amp:
        return _with_amp(install, path, seconds)
    if install.kind == "absent":
        return _finding(install, "absent", "not installed", "ok", NO_NEED)
    if install.kind == "namespace":
        return _namespace(install)
    if install.kind == "no_amp":
        era = f"; its source was written {install.era}" if install.era else ""
        return _finding(
            install,
            "no_amp",
            f"NVIDIA Apex {_named(install)} without apex.amp",
            "warning",
            f"{install.path} has no amp, parallel or fp16_utils: NVIDIA removed them on 8 May 2025{era}. Scripts end "
            "with \"cannot import name 'amp' from 'apex'\"; the last tag that has them is 25.05. Apex arms run on "
            "engine=compat, and such scripts under `ampcompare exec`",
            ("ampcompare exec train.py  # instead of: python train.py", UNINSTALL, INSTALL),
        )
    return _impostor(install)


def _as_a_script_would() -> ApexInstall:
    """Look in the working directory first, and last where editable installations are."""
    path = [os.getcwd(), *search_path()]
    install = probe_apex(path)
    if install.kind in ("absent", "namespace"):
        installed = probe_apex()
        if installed.kind not in ("absent", "namespace"):
            return installed
    return install


def _is_beside_scripts(found: ApexInstall) -> bool:
    """Return whether only scripts in the working directory would find it, from where probes run nothing."""
    assert found.path is not None
    folder = os.path.realpath(found.path.parent)
    return folder == os.path.realpath(os.getcwd()) and folder not in map(os.path.realpath, search_path())


def _beside_scripts(found: ApexInstall) -> Check:
    assert found.path is not None
    return _finding(
        found,
        "shadowed",
        f"the folder {found.path}, not installed",
        "warning",
        "a folder called apex in the working directory hides any installed Apex from scripts next to it. Nothing in it "
        "was run, and arms do not use it: install it, or start in another folder",
        (f"mv {quote(str(found.path))} {quote(f'{found.path}-clone')}",),
    )


def _named(found: ApexInstall) -> str:
    version = "of unknown version" if found.version == "unknown" else found.version
    return f"{version} (commit {found.commit[:8]})" if found.commit else version


def _namespace(found: ApexInstall) -> Check:
    assert found.path is not None
    clone = (found.path / "setup.py").is_file()
    what = "a clone of the repository" if clone else "a folder without __init__.py"
    commit = f" at commit {found.commit[:8]}" if found.commit else ""
    aside = quote(f"{found.path}-clone")
    return _finding(
        found,
        "namespace",
        f"{what}{commit}, not installed",
        "warning",
        f"{found.path} is on the import path, so `import apex` finds it as an empty namespace package and "
        "`from apex import amp` ends with \"cannot import name 'amp' from 'apex' (unknown location)\". Start Python in "
        "another folder, rename this one, or install from it",
        (
            f"mv {quote(str(found.path))} {aside}",
            *((f"git -C {aside} checkout 25.05", f"{INSTALL.rpartition(' ')[0]} {aside}") if clone else ()),
        ),
    )


def _impostor(found: ApexInstall) -> Check:
    if found.path is not None and found.path.suffix == ".py":
        return _finding(
            found,
            "shadowed",
            f"the file {found.path}",
            "warning",
            "a file called apex.py hides any installed Apex from scripts next to it",
            (f"mv {quote(str(found.path))} {quote(str(found.path.with_name('apex_script.py')))}",),
        )
    return _finding(
        found,
        "impostor",
        f"not NVIDIA's: the unrelated package of PyPI, version {found.version}",
        "warning",
        f'`pip install apex` installs another project of that name ({found.path}); its import ends with "Class advice '
        'impossible in Python3", or it has no amp. Uninstall it; apex arms run on engine=compat',
        (UNINSTALL, INSTALL),
    )


def _with_amp(found: ApexInstall, path: Sequence[str] | None, seconds: float) -> Check:
    name = f"NVIDIA Apex {_named(found)}"
    if found.kind == "full":
        kernels = ask("kernels", path=path, seconds=seconds)
        if not kernels.done:
            return _other_build(found, name, kernels, usable=ask("apex_amp", path=path, seconds=seconds).done)
    amp = ask("apex_amp", path=path, seconds=seconds)
    if not amp.done or amp.value["lacks"]:
        why = amp.failure or f"it lacks {', '.join(amp.value['lacks'])}"
        return _finding(
            found,
            "broken",
            f"{name}, and apex.amp cannot be imported",
            "problem",
            f"importing apex.amp from {found.path}: {why}. It may be of a tag older than this torch, or only partly "
            f"installed",
            (UNINSTALL, INSTALL),
            failure=why,
        )
    if found.kind == "full":
        return _finding(
            found,
            "full",
            f"{name}, with compiled kernels",
            "ok",
            f"in {found.path}. On torch 2.4 and later its O1 raises where a weight is used twice; engine=compat does "
            "not",
            usable=True,
        )
    return _finding(
        found,
        "python_only",
        f"{name}, Python only",
        "note",
        f"{found.path} has no compiled kernels (amp_C): amp works, slower; FusedAdam, FusedLAMB and FusedSGD raise "
        "\"No module named 'amp_C'\" or the like. Build it with its extensions if times matter",
        (UNINSTALL, INSTALL),
        usable=True,
    )


def _other_build(found: ApexInstall, name: str, kernels: Answer, *, usable: bool) -> Check:
    if kernels.how == "raised":
        what = f"import amp_C ends with {kernels.failure}"
    else:
        what = f"import amp_C does not return: {kernels.failure}"
    return _finding(
        found,
        "other_build",
        f"{name}, whose compiled kernels do not load",
        "problem",
        f"{what}. {_suspect(kernels)} Rebuild it with this torch",
        (UNINSTALL, INSTALL),
        usable=usable,
        failure=kernels.failure,
    )


def _suspect(kernels: Answer) -> str:
    """Return the usual cause of such an error."""
    text = kernels.failure
    if "undefined symbol" in text or "libc10" in text or "libtorch" in text:
        return "They were built against another torch."
    if "libcuda" in text or "libcublas" in text or "libnvrtc" in text:
        return "They were built against a different CUDA version than this torch uses."
    if "GLIBC" in text or "GLIBCXX" in text:
        return "They were built on a newer system than this one."
    if "cpython" in text or "Python version" in text or "No module named" in text:
        return "They were built for another Python."
    return "They were probably built against another torch or CUDA."


def _finding(
    found: ApexInstall,
    state: State,
    value: str,
    verdict: Literal["ok", "note", "warning", "problem"],
    reason: str,
    remedy: tuple[str, ...] = (),
    *,
    usable: bool = False,
    failure: str | None = None,
) -> Check:
    facts = {
        "state": state,
        "usable": usable,
        "path": None if found.path is None else str(Path(found.path)),
        "version": found.version,
        "commit": found.commit,
        "era": found.era,
        "failure": failure,
    }
    return Check("Apex", "apex", value, verdict, reason, remedy, facts)
