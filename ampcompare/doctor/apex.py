"""Which Apex stands under the name `apex`: exactly one of some states, each with its remedy."""

import os
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from ampcompare.base.environment.apex import ApexInstall, find_installed_apex
from ampcompare.base.processes.call import search_path_of_child
from ampcompare.base.shim.finder import missing_submodules
from ampcompare.base.shim.switch import ShimStatus, shim_status
from ampcompare.doctor.finding import Check, Verdict, ask

# ours: none is installed, and the shim is on; grafted: the shim adds what NVIDIA's lacks.
State = Literal[
    "absent",
    "ours",
    "impostor",
    "no_amp",
    "grafted",
    "python_only",
    "full",
    "other_build",
    "broken",
    "namespace",
    "shadowed",
]
UNINSTALL = "pip uninstall -y apex"
INSTALL = (
    "pip install -v --no-build-isolation --no-cache-dir --config-settings '--build-option=--cpp_ext' "
    "--config-settings '--build-option=--cuda_ext' git+https://github.com/NVIDIA/apex@25.05"
)
REBUILD = (UNINSTALL, INSTALL)
REBUILD_ROCM = (UNINSTALL, INSTALL.replace("NVIDIA/apex@25.05", "ROCm/apex"))
SHIM = "ampcompare shim on"


def examine_apex(
    path: Sequence[str] | None = None, *, folder: Path | None = None, seconds: float = 60.0
) -> Check:
    """Check which Apex `import apex` would find, and whether it works.

    `facts` has: state (one of `State`); usable, whether the `apex.amp` of an installed Apex imports; whether it has
    compiled kernels; its folder, version, commit and maker; and the shim: whether it is on, and libraries that it
    answers too.

    Args:
        path: folders to import from, instead of the current folder and `sys.path`.
        folder: where the files of the shim are, instead of the site-packages of this environment.
        seconds: time limit of each import that is tried.
    """
    install = find_installed_apex(path) if path is not None else _find_apex_as_script_would()
    shim = shim_status(folder)
    if install.kind == "absent" and shim.on:
        reason = "your own code that imports apex gets ampcompare's engine; libraries and find_spec find none"
        return _make_check(install, shim, "ours", "ok", "not installed; the shim is on", reason)
    if install.kind == "absent":
        reason = "ampcompare does not need it: apex arms run on its own engine (engine=compat)"
        return _make_check(install, shim, "absent", "ok", "not installed", reason)
    if install.has_amp:
        return _check_apex_with_amp(install, shim, path, seconds)
    if install.kind == "namespace":
        return _check_namespace(install, shim)
    if install.kind == "no_amp":
        return _check_apex_without_amp(install, shim)
    assert install.path is not None
    if install.path.suffix == ".py":
        reason = "a file called apex.py hides any installed Apex from scripts next to it"
        remedy = (f"mv {quote(str(install.path))} {quote(str(install.path.with_name('apex_script.py')))}",)
        return _make_check(install, shim, "shadowed", "warning", f"the file {install.path}", reason, remedy)
    reason = (
        f'`pip install apex` installs another project of that name ({install.path}); its import ends with "Class '
        'advice impossible in Python3" or "cannot import name \'UnencryptedCookieSessionFactoryConfig\'", or it has no '
        "amp. Uninstall it; apex arms run on engine=compat, and scripts under `ampcompare exec`"
    )
    value = f"not NVIDIA's: the unrelated package of PyPI, version {install.version}"
    return _make_check(install, shim, "impostor", "warning", value, reason, (UNINSTALL,))


def _check_namespace(install: ApexInstall, shim: ShimStatus) -> Check:
    """Return the finding on a folder without __init__.py, such as a clone of the repository."""
    assert install.path is not None
    aside = quote(f"{install.path}-clone")
    is_clone = (install.path / "setup.py").is_file()
    what = "a clone of the repository" if is_clone else "a folder without __init__.py"
    commit = f" at commit {install.commit[:8]}" if install.commit else ""
    reason = (
        f"{install.path} is on the import path, so `import apex` finds it as an empty namespace package and `from "
        "apex import amp` ends with \"cannot import name 'amp' from 'apex' (unknown location)\". Start Python in "
        "another folder, rename this one, or install from it"
    )
    remedy = [f"mv {quote(str(install.path))} {aside}"]
    if is_clone:
        remedy += [f"git -C {aside} checkout 25.05", f"{INSTALL.rpartition(' ')[0]} {aside}"]
    value = f"{what}{commit}, not installed"
    return _make_check(install, shim, "namespace", "warning", value, reason, tuple(remedy))


def _check_apex_without_amp(install: ApexInstall, shim: ShimStatus) -> Check:
    """Return the finding on an Apex of after May 2025, with what the shim adds to it or could."""
    assert install.path is not None
    name = _name_of_install(install)
    if shim.on:
        added = ", ".join(missing_submodules(install.path))
        reason = (
            f"the shim adds {added}, which NVIDIA removed; kernels and contrib are those in {install.path}"
        )
        return _make_check(install, shim, "grafted", "ok", f"{name}; the shim is on", reason)
    reason = (
        f"{install.path} has no amp, parallel or fp16_utils: NVIDIA removed them on 8 May 2025. Scripts end "
        "with \"cannot import name 'amp' from 'apex'\". The shim adds them and leaves the rest; `ampcompare shim "
        "off` takes that back. The last tag that has them is 25.05; apex arms run on engine=compat"
    )
    return _make_check(install, shim, "no_amp", "warning", f"{name} without apex.amp", reason, (SHIM,))


def _find_apex_as_script_would() -> ApexInstall:
    """Look in the working directory first, and last where editable installations are."""
    install = find_installed_apex([os.getcwd(), *search_path_of_child()])
    if install.kind in ("absent", "namespace"):
        installed = find_installed_apex()
        if installed.kind not in ("absent", "namespace"):
            return installed
    return install


def _name_of_install(install: ApexInstall) -> str:
    version = "of unknown version" if install.version == "unknown" else install.version
    return f"{install.maker} Apex {version}" + (f" (commit {install.commit[:8]})" if install.commit else "")


def _check_apex_with_amp(
    install: ApexInstall, shim: ShimStatus, path: Sequence[str] | None, seconds: float
) -> Check:
    """Return the finding on an Apex that has `amp`: hidden, of another build, broken, or ready."""
    assert install.path is not None
    if path is None and _is_seen_in_working_directory_alone(install.path.parent):
        reason = (
            "a folder called apex in the working directory hides any installed Apex from scripts next to it. Nothing "
            "in it was run, and arms do not use it: install it, or start in another folder"
        )
        remedy = (f"mv {quote(str(install.path))} {quote(f'{install.path}-clone')}",)
        return _make_check(
            install, shim, "shadowed", "warning", f"the folder {install.path}, not installed", reason, remedy
        )
    name = _name_of_install(install)
    rebuild = REBUILD_ROCM if install.maker == "ROCm" else REBUILD
    kernels = ask("apex_kernels", path=path, seconds=seconds) if install.kind == "full" else None
    amp = ask("apex_amp_import", path=path, seconds=seconds)
    if kernels is not None and not kernels.has_returned:
        how = "ends with" if kernels.how == "raised" else "does not return:"
        reason = (
            f"import amp_C {how} {kernels.failure}. They were probably built against another torch, CUDA or Python. "
            "Rebuild Apex with this torch"
        )
        value = f"{name}, whose compiled kernels do not load"
        return _make_check(
            install, shim, "other_build", "problem", value, reason, rebuild,
            usable=amp.has_returned, failure=kernels.failure,
        )  # fmt: skip
    if not amp.has_returned or amp.value["lacks"]:
        why = amp.failure or f"it lacks {', '.join(amp.value['lacks'])}"
        value = f"{name}, and apex.amp cannot be imported"
        reason = f"importing apex.amp from {install.path}: {why}. It may be older than this torch, or partly installed"
        return _make_check(install, shim, "broken", "problem", value, reason, rebuild, failure=why)
    if kernels is not None:
        reason = f"in {install.path}. On torch 2.4 and later its O1 raises where a weight is used twice"
        reason += "; compat does not"
        return _make_check(install, shim, "full", "ok", f"{name}, with compiled kernels", reason, usable=True)
    reason = (
        f"{install.path} has no compiled kernels (amp_C): amp works, slower; FusedAdam, FusedLAMB and FusedSGD raise "
        "\"No module named 'amp_C'\" or the like. Build it with its extensions if times matter"
    )
    value = f"{name}, Python only"
    return _make_check(install, shim, "python_only", "note", value, reason, rebuild, usable=True)


def _is_seen_in_working_directory_alone(parent: Path) -> bool:
    """Return whether a folder is the working directory, in which no child process looks for modules."""
    folder = os.path.realpath(parent)
    return folder == os.path.realpath(".") and folder not in map(os.path.realpath, search_path_of_child())


def _make_check(
    install: ApexInstall,
    shim: ShimStatus,
    state: State,
    verdict: Verdict,
    value: str,
    reason: str,
    remedy: tuple[str, ...] = (),
    *,
    usable: bool = False,
    failure: str | None = None,
) -> Check:
    facts: dict[str, Any] = {
        "state": state,
        "usable": usable,
        "path": None if install.path is None else str(install.path),
    }
    facts |= {
        "version": install.version,
        "commit": install.commit,
        "maker": install.maker,
        "failure": failure,
    }
    facts |= {"kernels": install.has_kernels, "shim": {"on": shim.on, "answered": shim.answered}}
    return Check("Apex", "apex", value, verdict, reason, remedy, facts)
