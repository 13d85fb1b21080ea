"""Which Apex is installed, with the reason. Nothing here imports it.

`find_spec("apex.amp")` would execute `apex`, which may be broken, so an installation is identified by its files.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

Kind = Literal["absent", "namespace", "impostor", "no_amp", "python_only", "full"]
REMEDY = "use --engine compat, or install NVIDIA Apex at tag 25.05"
NVIDIA_FOLDERS = ("normalization", "optimizers", "multi_tensor_apply", "contrib")


@dataclass(frozen=True)
class ApexInstall:
    """What stands under the name `apex` on the import path.

    Attributes:
        kind: absent; namespace (a folder without `__init__.py`, such as a clone); impostor (the unrelated package of
            PyPI); no_amp (NVIDIA's after May 2025); python_only (no compiled kernels); full.
        reason: one sentence, with the remedy where `apex.amp` is not there.
        commit: of the repository that it was installed from, where metadata or a clone tell it.
        maker: whose build has `apex.amp`, by the levels that it knows: O4 and O5 are ROCm's.
        has_kernels: whether a compiled `amp_C` is there.
    """

    kind: Kind
    path: Path | None
    version: str
    reason: str
    commit: str | None = None
    maker: Literal["NVIDIA", "ROCm"] = "NVIDIA"
    has_kernels: bool = False

    @property
    def has_amp(self) -> bool:
        """Whether `apex.amp` can be expected to import."""
        return self.kind in ("python_only", "full")


def find_installed_apex(path: Sequence[str] | None = None) -> ApexInstall:
    """Return what `import apex` would find in folders, by default `sys.path` and what editable installations add."""
    # `os.path` takes a folder that cannot be looked into for one that is not there, as an import does; pathlib raises.
    folders = [Path(entry or ".") for entry in (sys.path if path is None else path)]
    namespace = None
    for folder in folders:
        package = folder / "apex"
        if os.path.isfile(package / "__init__.py"):
            return _make_apex_install(package, folders)
        if os.path.isfile(folder / "apex.py"):
            reason = f"{folder / 'apex.py'} is a file named apex, not NVIDIA Apex; {REMEDY}"
            return ApexInstall("impostor", folder / "apex.py", "unknown", reason)
        if os.path.isdir(package) and namespace is None:
            namespace = package
    if path is None and (package_of := _editable_package()) is not None:
        return _make_apex_install(package_of, [*folders, package_of.parent])
    if namespace is not None:
        is_clone = os.path.isfile(namespace / "setup.py")
        hint = "a clone of the repository; install it" if is_clone else "a folder without __init__.py"
        reason = f"{namespace} is {hint}; {REMEDY}"
        return ApexInstall("namespace", namespace, "unknown", reason, _cloned_commit(namespace))
    return ApexInstall("absent", None, "unknown", f"apex is not installed; {REMEDY}")


def _editable_package() -> Path | None:
    """Return the package of an editable installation, which is on no folder of `sys.path`."""
    for finder in sys.meta_path:
        if "editable" in getattr(finder, "__module__", ""):
            # A top-level name executes nothing.
            spec = getattr(finder, "find_spec", lambda *_: None)("apex", None)
            if spec is not None and spec.origin:
                return Path(spec.origin).parent
    return None


def _make_apex_install(package: Path, folders: Sequence[Path]) -> ApexInstall:
    distribution = next(
        iter(metadata.distributions(name="apex", path=[str(folder) for folder in folders])), None
    )
    version = distribution.version if distribution else "unknown"
    commit = _installed_commit(distribution) or _cloned_commit(package.parent)
    named = f"{version} (commit {commit[:8]})" if commit else version
    kernels = _has_kernels(folders)
    if os.path.isfile(package / "amp" / "__init__.py"):
        maker = _vendor_of_apex_package(package)
        if kernels:
            reason = f"{maker} Apex {named} with compiled kernels in {package}"
            return ApexInstall("full", package, version, reason, commit, maker, kernels)
        reason = f"{maker} Apex {named} in {package}, Python only: no compiled kernels (amp_C)"
        return ApexInstall("python_only", package, version, reason, commit, maker)
    if any(os.path.isdir(package / folder) for folder in NVIDIA_FOLDERS):
        reason = f"apex {named} is installed but has no apex.amp (removed upstream in May 2025); {REMEDY}"
        return ApexInstall("no_amp", package, version, reason, commit, has_kernels=kernels)
    reason = (
        f"apex {version} in {package} is the unrelated package of PyPI: pip uninstall apex, then {REMEDY}"
    )
    return ApexInstall("impostor", package, version, reason)


def _has_kernels(folders: Sequence[Path]) -> bool:
    """Return whether a compiled `amp_C` lies in one of the folders."""
    present = (folder for folder in folders if os.path.isdir(folder))
    return any(path.suffix in (".so", ".pyd") for folder in present for path in folder.glob("amp_C*"))


def _vendor_of_apex_package(package: Path) -> Literal["NVIDIA", "ROCm"]:
    try:
        levels = (package / "amp" / "frontend.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "NVIDIA"
    return "ROCm" if "class O4" in levels else "NVIDIA"


def _installed_commit(distribution: metadata.Distribution | None) -> str | None:
    """Return the commit that pip wrote down where it installed from a repository."""
    try:
        origin = json.loads((distribution and distribution.read_text("direct_url.json")) or "{}")
        commit = origin["vcs_info"]["commit_id"]
    except (KeyError, TypeError, ValueError, OSError):
        return None
    return commit if isinstance(commit, str) else None


def _cloned_commit(folder: Path) -> str | None:
    """Return the commit that is checked out in `folder`, where that is a clone."""
    try:
        head = (folder / ".git" / "HEAD").read_text(encoding="utf-8").strip()
        if head.startswith("ref: "):
            head = (folder / ".git" / head.removeprefix("ref: ")).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return head or None
