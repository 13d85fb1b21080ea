"""Switch the shim of an environment on and off: two files in its site-packages, and nothing else there."""

import os
import re
import site
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from ampcompare.base.environment.apex import ApexInstall, find_installed_apex
from ampcompare.base.environment.extras import require_torch
from ampcompare.base.errors import ConfigError, EnvironmentUnfit
from ampcompare.base.files.write import write_atomically
from ampcompare.base.shim.finder import missing_submodules

STARTS = "ampcompare_shim.pth"
MODULE = "_ampcompare_shim.py"
# No bytecode is written for the module, so that what `off` removes is all that `on` has added.
LINE = (
    "import sys; kept, sys.dont_write_bytecode = sys.dont_write_bytecode, True; import _ampcompare_shim; "
    "sys.dont_write_bytecode = kept\n"
)
ANSWERED = re.compile(r"^ANSWERED = \((.*)\)$", re.MULTILINE)
PYPI = "pip uninstall -y apex"


@dataclass(frozen=True)
class ShimStatus:
    """Whether the shim is on, and what it adds here.

    Attributes:
        on: whether new processes of this environment have it.
        folder: site-packages, where its two files are or would be.
        adds: names that an import by the user's own code finds because of it.
        answered: libraries that it answers too where there is no Apex.
        apex: the Apex that is installed.
    """

    on: bool
    folder: Path
    adds: tuple[str, ...]
    answered: tuple[str, ...]
    apex: ApexInstall


def site_folder() -> Path:
    """Return the site-packages of this environment: the one that holds ampcompare, where Python reads .pth files."""
    own = Path(__file__).resolve().parents[3]
    folders = [
        *(site.getsitepackages() if hasattr(site, "getsitepackages") else []),
        site.getusersitepackages(),
    ]
    if any(own == Path(folder).resolve() for folder in folders):
        return own
    return Path(sysconfig.get_path("purelib"))


def shim_status(folder: Path | None = None) -> ShimStatus:
    """Return whether the shim is on in this environment, and what it adds."""
    folder = site_folder() if folder is None else folder
    try:
        listed = ANSWERED.search((folder / MODULE).read_text(encoding="utf-8"))
    except OSError:
        listed = None
    names = tuple(re.findall(r"'([^']*)'", listed[1])) if listed else ()
    on = (folder / STARTS).is_file() and (folder / MODULE).is_file()
    apex = find_installed_apex()
    return ShimStatus(on, folder, _names_added_to_apex(apex), names, apex)


def _names_added_to_apex(apex: ApexInstall) -> tuple[str, ...]:
    if apex.kind in ("absent", "namespace"):
        return ("apex",)
    if apex.kind == "no_amp" and apex.path is not None:
        return tuple(f"apex.{name}" for name in missing_submodules(apex.path))
    return ()


def switch_shim_on(answered_libraries: Sequence[str] = (), folder: Path | None = None) -> ShimStatus:
    """Let processes of this environment that start from now on find what is missing of Apex.

    Where nothing is missing, nothing is written.

    Args:
        answered_libraries: libraries that are answered as the user's own code is where there is no Apex.
        folder: of site-packages, in which the files are written; None for that of this environment.

    Raises:
        ConfigError: a name in `answered_libraries` is none of a module.
        EnvironmentUnfit: another project stands under the name `apex`, or the files cannot be written.
        ExtraMissing: there is no torch, or one that is too old.
    """
    status = shim_status(folder)
    for name in answered_libraries:
        if not name.isidentifier():
            raise ConfigError(f"{name!r} is not a name that a library is imported by, such as mmcv")
    if status.apex.kind == "impostor":
        cure = (
            PYPI if status.apex.path is not None and status.apex.path.suffix != ".py" else "rename that file"
        )
        raise EnvironmentUnfit(
            f"{status.apex.path} stands under the name apex and is not NVIDIA's: {cure}, then ampcompare shim on"
        )
    if not status.adds:
        return status
    require_torch(engine_alone=True)
    text = files("ampcompare.base.shim").joinpath("startup.py.txt").read_text(encoding="utf-8")
    names = "".join(f"{name!r}, " for name in sorted(set(answered_libraries))).strip()
    write_atomically(status.folder / MODULE, ANSWERED.sub(f"ANSWERED = ({names})", text))
    write_atomically(status.folder / STARTS, LINE)
    return shim_status(status.folder)


def switch_shim_off(folder: Path | None = None) -> ShimStatus:
    """Remove the files that `switch_shim_on` wrote; site-packages is then what it was before, to the byte.

    Raises:
        EnvironmentUnfit: they cannot be removed.
    """
    folder = site_folder() if folder is None else folder
    _remove_files(folder / name for name in (STARTS, MODULE))  # first what names the other
    return shim_status(folder)


def _remove_files(paths: Iterable[Path]) -> None:
    for path in paths:
        try:
            os.unlink(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise EnvironmentUnfit(f"cannot remove {path}: {error.strerror or error}") from error
