"""Which Apex stands under the name `apex`: exactly one of nine states, each with its remedy."""

import os
from collections.abc import Sequence
from shlex import quote
from typing import Literal

from ampcompare.api.doctor.finding import Check, Verdict, ask
from ampcompare.base.environment.apex import ApexInstall, probe_apex
from ampcompare.base.processes.call import search_path

State = Literal["absent", "impostor", "no_amp", "python_only", "full", "other_build", "broken", "namespace", "shadowed"]
UNINSTALL = "pip uninstall -y apex"
INSTALL = (
    "pip install -v --no-build-isolation --no-cache-dir --config-settings '--build-option=--cpp_ext' "
    "--config-settings '--build-option=--cuda_ext' git+https://github.com/NVIDIA/apex@25.05"
)
REBUILD = (UNINSTALL, INSTALL)


def examine_apex(path: Sequence[str] | None = None, *, seconds: float = 60.0) -> Check:
    """Check which Apex `import apex` would find, and whether it works.

    `facts` has: state (one of `State`); usable, whether `apex.amp` imports; the folder, version and commit.

    Args:
        path: folders to import from, instead of the current folder and `sys.path`.
        seconds: time limit of each import that is tried.
    """
    install = probe_apex(path) if path is not None else _as_a_script_would()
    if install.kind == "absent":
        reason = "ampcompare does not need it: apex arms run on its own engine (engine=compat)"
        return _check(install, "absent", "ok", "not installed", reason)
    if install.has_amp:
        return _with_amp(install, path, seconds)
    assert install.path is not None
    aside = quote(f"{install.path}-clone")
    if install.kind == "namespace":
        is_clone = (install.path / "setup.py").is_file()
        what = "a clone of the repository" if is_clone else "a folder without __init__.py"
        commit = f" at commit {install.commit[:8]}" if install.commit else ""
        reason = (
            f"{install.path} is on the import path, so `import apex` finds it as an empty namespace package and `from "
            "apex import amp` ends with \"cannot import name 'amp' from 'apex' (unknown location)\". Start Python in "
            "another folder, rename this one, or install from it"
        )
        build = (f"git -C {aside} checkout 25.05", f"{INSTALL.rpartition(' ')[0]} {aside}") if is_clone else ()
        remedy = (f"mv {quote(str(install.path))} {aside}", *build)
        return _check(install, "namespace", "warning", f"{what}{commit}, not installed", reason, remedy)
    if install.kind == "no_amp":
        reason = (
            f"{install.path} has no amp, parallel or fp16_utils: NVIDIA removed them on 8 May 2025. Scripts end "
            "with \"cannot import name 'amp' from 'apex'\"; the last tag that has them is 25.05. Apex arms run on "
            "engine=compat, and such scripts under `ampcompare exec`"
        )
        remedy = ("ampcompare exec train.py  # instead of: python train.py", *REBUILD)
        return _check(install, "no_amp", "warning", f"{_name(install)} without apex.amp", reason, remedy)
    if install.path.suffix == ".py":
        reason = "a file called apex.py hides any installed Apex from scripts next to it"
        remedy = (f"mv {quote(str(install.path))} {quote(str(install.path.with_name('apex_script.py')))}",)
        return _check(install, "shadowed", "warning", f"the file {install.path}", reason, remedy)
    reason = (
        f'`pip install apex` installs another project of that name ({install.path}); its import ends with "Class '
        'advice impossible in Python3", or it has no amp. Uninstall it; apex arms run on engine=compat'
    )
    value = f"not NVIDIA's: the unrelated package of PyPI, version {install.version}"
    return _check(install, "impostor", "warning", value, reason, REBUILD)


def _as_a_script_would() -> ApexInstall:
    """Look in the working directory first, and last where editable installations are."""
    install = probe_apex([os.getcwd(), *search_path()])
    if install.kind in ("absent", "namespace"):
        installed = probe_apex()
        if installed.kind not in ("absent", "namespace"):
            return installed
    return install


def _name(found: ApexInstall) -> str:
    version = "of unknown version" if found.version == "unknown" else found.version
    return f"NVIDIA Apex {version}" + (f" (commit {found.commit[:8]})" if found.commit else "")


def _with_amp(found: ApexInstall, path: Sequence[str] | None, seconds: float) -> Check:
    assert found.path is not None
    folder = os.path.realpath(found.path.parent)
    if path is None and folder == os.path.realpath(".") and folder not in map(os.path.realpath, search_path()):
        reason = (
            "a folder called apex in the working directory hides any installed Apex from scripts next to it. Nothing "
            "in it was run, and arms do not use it: install it, or start in another folder"
        )
        remedy = (f"mv {quote(str(found.path))} {quote(f'{found.path}-clone')}",)
        return _check(found, "shadowed", "warning", f"the folder {found.path}, not installed", reason, remedy)
    kernels = ask("kernels", path=path, seconds=seconds) if found.kind == "full" else None
    amp = ask("apex_amp", path=path, seconds=seconds)
    if kernels is not None and not kernels.done:
        how = "ends with" if kernels.how == "raised" else "does not return:"
        reason = (
            f"import amp_C {how} {kernels.failure}. They were probably built against another torch, CUDA or Python. "
            "Rebuild Apex with this torch"
        )
        value, usable = f"{_name(found)}, whose compiled kernels do not load", amp.done
        return _check(found, "other_build", "problem", value, reason, REBUILD, usable=usable, failure=kernels.failure)
    if not amp.done or amp.value["lacks"]:
        why = amp.failure or f"it lacks {', '.join(amp.value['lacks'])}"
        value = f"{_name(found)}, and apex.amp cannot be imported"
        reason = f"importing apex.amp from {found.path}: {why}. It may be older than this torch, or partly installed"
        return _check(found, "broken", "problem", value, reason, REBUILD, failure=why)
    if kernels is not None:
        reason = f"in {found.path}. On torch 2.4 and later its O1 raises where a weight is used twice; compat does not"
        return _check(found, "full", "ok", f"{_name(found)}, with compiled kernels", reason, usable=True)
    reason = (
        f"{found.path} has no compiled kernels (amp_C): amp works, slower; FusedAdam, FusedLAMB and FusedSGD raise "
        "\"No module named 'amp_C'\" or the like. Build it with its extensions if times matter"
    )
    return _check(found, "python_only", "note", f"{_name(found)}, Python only", reason, REBUILD, usable=True)


def _check(
    found: ApexInstall,
    state: State,
    verdict: Verdict,
    value: str,
    reason: str,
    remedy: tuple[str, ...] = (),
    *,
    usable: bool = False,
    failure: str | None = None,
) -> Check:
    facts = {"state": state, "usable": usable, "path": None if found.path is None else str(found.path)}
    facts |= {"version": found.version, "commit": found.commit, "failure": failure}
    return Check("Apex", "apex", value, verdict, reason, remedy, facts)
