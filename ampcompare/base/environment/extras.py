"""The extras without which some commands do not work: `stats` for verdicts, `torch` for training.

The installation alone brings what reads sources. What needs more asks here first, so that a user is told what to
install before anything is done. Nothing is imported to find out.
"""

import itertools
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from traceback import walk_tb

from ampcompare.base.environment.torch_names import PACKAGE
from ampcompare.base.errors import EnvironmentUnfit, ExtraMissing
from ampcompare.base.version import OLDEST_TORCH

# The modules of each extra that every command which needs the extra imports sooner or later.
MODULES = {
    "stats": ("numpy", "scipy"),
    "torch": ("torch", "numpy", "scipy", "xxhash"),
}
# Those that only some data, models or checkpoints need.
SOME_NEED = {"torchvision": "torch", "sklearn": "torch", "safetensors": "torch"}


def require_statistics_packages() -> None:
    """Check that what verdicts are computed with is installed.

    Raises:
        ExtraMissing: it is not.
    """
    _require_modules("stats", MODULES["stats"], "verdicts need")


def require_lsp_packages() -> None:
    """Check that what speaks with editors is installed.

    Raises:
        ExtraMissing: it is not.
    """
    _require_modules("lsp", ("pygls", "lsprotocol"), "editors need")


def require_torch(*, engine_alone: bool = False) -> None:
    """Check that what trains is installed, and that torch is not too old.

    Args:
        engine_alone: for ampcompare's engine in a loop of the caller, which needs torch and nothing else.

    Raises:
        ExtraMissing: it is not installed, or too old.
    """
    version = version_of_torch_on_path()
    try:
        numbers = tuple(map(int, version.split(".")[:2]))
    except ValueError:  # what is not known is not refused
        numbers = OLDEST_TORCH
    if numbers < OLDEST_TORCH:
        oldest = "{}.{}".format(*OLDEST_TORCH)
        raise ExtraMissing(
            f"what works with tensors needs torch {oldest} or later, and {version} is installed: "
            "pip install -U torch torchvision. Or leave this environment as it is, and name it to a newer one: "
            f"--stack old={sys.executable} (lint, migrate, explain ARM, list, doctor, judge and report work as is)"
        )
    _require_modules(
        "torch", ("torch",) if engine_alone else MODULES["torch"], "what works with tensors needs"
    )


def version_of_torch_on_path() -> str:
    """Return the version of the torch that an import would find, by its files; "" if it is not known."""
    loaded = sys.modules.get("torch")
    spec = find_spec("torch") if loaded is None and "torch" not in sys.modules else None
    origin = spec.origin if spec is not None else getattr(loaded, "__file__", None)
    if origin is None:
        return ""
    lines = itertools.chain(
        _lines_of_file(os.path.join(os.path.dirname(origin), "version.py")), _lines_of_file(origin)
    )
    named = next((line for line in lines if line.startswith("__version__")), "")
    return named.replace('"', "'").partition("'")[2].partition("'")[0]


def missing_package_error(error: BaseException) -> EnvironmentUnfit | None:
    """Return what an error means if this package imported a package of an extra that is not there; else None."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    top = error.name.partition(".")[0]
    extra = SOME_NEED.get(top) or next((extra for extra, modules in MODULES.items() if top in modules), None)
    frames = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    places = [name for name in frames if not name.startswith("<frozen ")]  # of importlib
    if extra is None or _is_importable(top) or not places or not places[-1].startswith(PACKAGE):
        return None
    return ExtraMissing(f"{top} is not installed: {_command_to_install(extra)}")


def _require_modules(extra: str, modules: tuple[str, ...], purpose: str) -> None:
    missing = [name for name in modules if not _is_importable(name)]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        listed = " and ".join(filter(None, [", ".join(missing[:-1]), missing[-1]]))
        raise ExtraMissing(
            f"{purpose} the extra {extra}, of which {listed} {are} not installed: "
            f"{_command_to_install_missing(extra, missing)}"
        )


def _command_to_install_missing(extra: str, missing_packages: list[str]) -> str:
    # The extra would bring a torchvision too, which may be none for the torch that is there.
    has_torch = extra == "torch" and "torch" not in missing_packages
    return f"pip install {' '.join(missing_packages)}" if has_torch else _command_to_install(extra)


def _command_to_install(extra: str) -> str:
    return f"pip install 'ampcompare[{extra}]'"


def _is_importable(name: str) -> bool:
    """Return whether a package can be imported; a folder of its name without a file is none."""
    if name in sys.modules:
        return sys.modules[name] is not None
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


def _lines_of_file(path: str) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8") as file:
            yield from file
    except (OSError, UnicodeDecodeError):
        return
