"""The library behind a backend: whether it is installed, its import, and the explanation of an arm that it runs."""

import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType

from ampcompare.backends.explanation import ArmExplanation
from ampcompare.base.environment.packages import installed_version, silenced_import
from ampcompare.base.errors import BackendUnavailable


@dataclass(frozen=True)
class Library:
    """What a backend needs besides torch.

    Attributes:
        modules: names under which it is imported; the first one found is used.
        distributions: names under which it is installed, in the order of `modules`.
        install: a line for a shell.
        remark: what makes the installation difficult, if anything does.
        extra: the extra of this package that installs it; "" if there is none.
    """

    modules: tuple[str, ...]
    distributions: tuple[str, ...]
    install: str
    remark: str = ""
    extra: str = ""

    def find_module_distribution_and_version(self) -> tuple[str, str, str] | None:
        """Return module, distribution and version of what is installed, without importing it; None if nothing is."""
        for module, distribution in zip(self.modules, self.distributions, strict=True):
            if importlib.util.find_spec(module.partition(".")[0]) is not None:
                return module, distribution, installed_version(distribution) or "of unknown version"
        return None

    def why_missing(self) -> str:
        """Return why it cannot be used, with what to type; "" if it is installed."""
        if self.find_module_distribution_and_version() is not None:
            return ""
        return f"not installed: {self.install}" + (f" ({self.remark})" if self.remark else "")

    def load(self, backend: str) -> tuple[ModuleType, str, str]:
        """Import it; return the module with the name and version of its distribution.

        Args:
            backend: whose library it is, for the message.

        Raises:
            BackendUnavailable: it is not installed, or cannot be imported.
        """
        found = self.find_module_distribution_and_version()
        if found is None:
            raise BackendUnavailable(f"{backend} is {self.why_missing()}")
        name, distribution, version = found
        try:
            with silenced_import():
                return importlib.import_module(name), distribution, version
        except Exception as error:  # a library built for another torch may raise any exception
            raise BackendUnavailable(
                f"{name} {version} is installed and cannot be imported: {type(error).__name__}: {error}; {self.install}"
            ) from error


def explain_library(
    name: str, library: Library, does: tuple[tuple[str, str], ...], script: tuple[str, ...], runs: str
) -> ArmExplanation:
    """Return the explanation of an arm that a library runs, from (what, how) pairs and lines of a script with it."""
    return ArmExplanation(
        summary=f"{name}; {library.why_missing() or 'installed'}",
        does=(*does, ("asked for", f"the precision of {runs}; a library may decide otherwise for a device")),
        twin=runs,
        twin_is="ampcompare's arm of the requested precision; the ledger of a run shows what it ran in",
        differs=(),
        script=script,
    )
