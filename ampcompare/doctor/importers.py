"""Who imports Apex here: installed libraries and scripts, what each of them gets, and the one cure.

Sources are read, and nothing is imported.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from ampcompare.base.environment.packages import SITE_FOLDERS, installed_version
from ampcompare.base.processes.call import search_path_of_child
from ampcompare.base.shim.importer import PROBING
from ampcompare.doctor.apex import INSTALL, UNINSTALL
from ampcompare.doctor.finding import Check, Verdict
from ampcompare.source.apex_imports import ApexImport, find_apex_imports
from ampcompare.source.find import find_sources

# What becomes of an import: it finds what it asks for; it ends the import of its file; it ends the call in which it is;
# its error is caught, or the question before it is answered with no, so that something else is done.
Outcome = Literal["finds", "fails", "fails when called", "does without"]
GRAVITY: tuple[Outcome, ...] = ("finds", "does without", "fails when called", "fails")
# Large, and without a word of Apex.
UNREAD = frozenset({
    "apex", "ampcompare", "cv2", "google", "jax", "jaxlib", "matplotlib", "mypy", "networkx", "numpy", "nvidia",
    "pandas", "pip", "pyarrow", "ray", "scipy", "setuptools", "sklearn", "sympy", "tensorflow", "torch", "torchvision",
    "triton", "wandb",
})  # fmt: skip
DISTRIBUTIONS = {"megatron": "megatron-core", "nemo": "nemo-toolkit"}
MAX_SCRIPTS = 20
ON, EXEC = "ampcompare shim on", "ampcompare exec"


@dataclass(frozen=True)
class Importer:
    """A library or a script that imports Apex.

    Attributes:
        name: by which a library is imported, or the path of a script.
        imports: with the file of each.
    """

    name: str
    is_script: bool
    imports: tuple[tuple[str, ApexImport], ...]


@dataclass(frozen=True)
class ImportedApex:
    """What an import of Apex finds here.

    Attributes:
        state: of the finding `apex`.
        package: its folder; None where there is none that can be imported.
        has_kernels: whether compiled modules are there.
        shim: whether the shim is on, and libraries that it answers too.
    """

    state: str
    package: Path | None
    has_kernels: bool
    shim: bool
    answered: tuple[str, ...] = ()

    @classmethod
    def from_check(cls, apex: Check) -> "ImportedApex":
        """Return what the finding `apex` says."""
        facts = apex.facts
        importable = facts["state"] in (
            "no_amp",
            "grafted",
            "python_only",
            "full",
            "impostor",
            "other_build",
            "broken",
        )
        package = Path(facts["path"]) if importable and facts["path"] else None
        shim = facts["shim"]
        return cls(
            facts["state"],
            package,
            facts["state"] == "full" or facts["kernels"],
            shim["on"],
            shim["answered"],
        )

    def can_import_module(self, module: str, importer: Importer) -> bool:
        """Return whether an import of a module succeeds."""
        if self.package is None:
            return (
                self.shim
                and (importer.is_script or importer.name in self.answered)
                and engine_has_module(module)
            )
        if self.state in ("impostor", "broken"):
            return False
        top, _, rest = module.partition(".")
        if top != "apex":
            return self.has_kernels or (self.shim and importer.is_script)
        first = rest.partition(".")[0]
        if not first or _is_module_in_package(self.package, first):
            return not rest or _is_module_in_package(self.package, *rest.split("."))
        return self.state == "grafted" and engine_has_module(module)

    @property
    def is_findable(self) -> bool:
        """Whether `find_spec("apex")` finds anything."""
        return self.package is not None


def engine_has_module(module: str) -> bool:
    """Return whether ampcompare's engine has a module of Apex."""
    folder = Path(__file__).resolve().parents[1] / "apex"
    top, _, rest = module.partition(".")
    parts = rest.split(".") if top == "apex" else [top]
    return parts == [""] or _is_module_in_package(folder, *parts)


def _is_module_in_package(package: Path, *parts: str) -> bool:
    """Return whether a module is in a package; a name of a module that has no file counts, as a class of it may."""
    path = package.joinpath(*parts)
    if path.with_suffix(".py").is_file() or path.is_dir():
        return True
    return len(parts) > 1 and package.joinpath(*parts[:-1]).with_suffix(".py").is_file()


def outcome_of_import(apex_import: ApexImport, importer: Importer, imported_apex: ImportedApex) -> Outcome:
    """Return what becomes of an import."""
    if apex_import.reach == "question":
        return "finds" if imported_apex.is_findable else "does without"
    if apex_import.reach == "asked" and not imported_apex.is_findable:
        return "does without"
    if imported_apex.can_import_module(apex_import.module, importer):
        return "finds"
    return {"tried": "does without", "called": "fails when called"}.get(apex_import.reach, "fails")  # type: ignore[return-value]


def importers_and_is_all_read(
    scripts: Sequence[Path] = (), path: Sequence[str] | None = None, *, seconds: float = 20.0
) -> tuple[list[Importer], bool]:
    """Return who imports Apex, and whether all was read within the time.

    Args:
        scripts: files and folders of the user; by default the Python files in the current folder.
        path: folders with libraries, instead of those of `sys.path`.
        seconds: after which no further library is read.
    """
    files = list(find_sources(scripts)) if scripts else sorted(Path().glob("*.py"))[: 10 * MAX_SCRIPTS]
    found = [
        Importer(str(file), True, its) for file in files if (its := _apex_imports_of_file(file, file.name))
    ]
    ends = time.monotonic() + seconds
    for name, place in _packages_on_path(search_path_of_child() if path is None else path):
        if time.monotonic() > ends:
            return found, False
        of_library = [
            one
            for file in _source_files(place)
            for one in _apex_imports_of_file(file, os.path.relpath(file, place.parent))
        ]
        if of_library:
            found.append(Importer(name, False, tuple(of_library)))
    return found, True


def _packages_on_path(path: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Yield the packages of an import path by name; of folders that are no site-packages those that are known."""
    seen = set()
    for folder in path:
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            continue
        installs = os.path.basename(folder) in SITE_FOLDERS
        for entry in entries:
            name = entry.name.removesuffix(".py")
            known = name in PROBING or (installs and name not in UNREAD and name.isidentifier())
            if known and name not in seen and (entry.is_dir() or entry.name.endswith(".py")):
                seen.add(name)
                yield name, Path(entry.path)


def _source_files(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield place
        return
    for top, folders, files in os.walk(place):
        folders[:] = sorted(name for name in folders if name not in ("__pycache__", "tests", "test"))
        yield from (Path(top, name) for name in sorted(files) if name.endswith(".py"))


def _apex_imports_of_file(file: Path, name: str) -> tuple[tuple[str, ApexImport], ...]:
    try:
        data = file.read_bytes()
    except OSError:
        return ()
    return tuple((name, one) for one in find_apex_imports(data))


def examine_importers(
    apex: Check, scripts: Sequence[Path] = (), path: Sequence[str] | None = None, *, seconds: float = 20.0
) -> list[Check]:
    """Return a finding for each library and script that imports Apex, with what it gets and the one cure."""
    importers, whole = importers_and_is_all_read(scripts, path, seconds=seconds)
    supply = ImportedApex.from_check(apex)
    found = [one for one in importers if one.is_script]
    libraries = [one for one in importers if not one.is_script]
    checks = [_check_importer(importer, supply) for importer in (*found[:MAX_SCRIPTS], *libraries)]
    if not whole:
        reason = f"reading them took more than {seconds:g} s; those that were read are above"
        checks.append(Check("Apex", "importers", "not all installed packages were read", "note", reason))
    return checks


def _check_importer(importer: Importer, imported_apex: ImportedApex) -> Check:
    judged = [(file, one, outcome_of_import(one, importer, imported_apex)) for file, one in importer.imports]
    # A question alone is of interest where nothing else is.
    wanted = [entry for entry in judged if entry[1].reach != "question"] or judged
    file, one, outcome = max(wanted, key=lambda entry: GRAVITY.index(entry[2]))
    version = (
        None if importer.is_script else installed_version(DISTRIBUTIONS.get(importer.name, importer.name))
    )
    word = "asks for" if one.reach == "question" else "imports"
    value = (
        f"{version + ': ' if version else ''}{word} {one.module} at {file}:{one.line}, "
        f"{_outcome_text(outcome, one)}"
    )
    reason, remedy = _reason_and_remedy_of_import(importer, imported_apex, one, outcome)
    verdict = _verdict_of_outcome(importer, outcome)
    if (
        imported_apex.state == "impostor"
        and not importer.is_script
        and any(entry.reach == "question" for _, entry in importer.imports)
    ):
        verdict = max(verdict, "warning", key=("ok", "note", "warning", "problem").index)
    imports = [{"file": name, **asdict(entry), "outcome": end} for name, entry, end in judged]
    facts: dict[str, Any] = {"script": importer.is_script, "outcome": outcome, "imports": imports}
    return Check("Apex", importer.name, value, verdict, reason, remedy, facts)


def _outcome_text(outcome: Outcome, apex_import: ApexImport) -> str:
    if outcome == "fails when called":
        return "which fails when that function is called"
    if outcome == "does without":
        return "and does without" if apex_import.reach != "question" else "and is answered with no"
    return {"finds": "which is there", "fails": "which ends the import of that file"}[outcome]


def _verdict_of_outcome(importer: Importer, outcome: Outcome) -> Verdict:
    if outcome == "fails":
        return "problem"
    if outcome == "finds" or (outcome == "does without" and not importer.is_script):
        return "ok"
    # a script that does without trains in fp32, and says nothing
    return "warning" if importer.is_script else "note"


def _reason_and_remedy_of_import(
    importer: Importer, imported_apex: ImportedApex, apex_import: ApexImport, outcome: Outcome
) -> tuple[str, tuple[str, ...]]:
    """Return why, and the one line that helps."""
    name = quote(importer.name)
    if outcome == "finds":
        return "", ()
    if imported_apex.state == "impostor":
        return "what is installed as apex is another project of PyPI", (UNINSTALL,)
    if importer.is_script:
        if imported_apex.state == "no_amp" and engine_has_module(apex_import.module):
            return "NVIDIA removed it in May 2025; the shim adds it, and the rest of Apex stays", (ON,)
        if not engine_has_module(apex_import.module):
            return f"ampcompare's engine has no {apex_import.module} either; Apex 25.05 may have it", (
                INSTALL,
            )
        if outcome == "does without":
            return "without it the script goes on, in fp32 as a rule, and says nothing", (f"{EXEC} {name}",)
        return "ampcompare's engine has it", (f"{EXEC} {name}",)
    if outcome == "does without":
        return "no Apex is needed for it", ()
    if imported_apex.package is None:
        if apex_import.reach == "called":
            return (
                "it is called on request only, as with fp16_backend apex: ask for the fp16 of torch instead",
                (),
            )
        return "it cannot do without Apex", (f"{ON} --for {name}",) if engine_has_module(
            apex_import.module
        ) else (INSTALL,)
    if (
        imported_apex.state == "no_amp"
        and engine_has_module(apex_import.module)
        and apex_import.module.startswith("apex")
    ):
        return "NVIDIA removed it in May 2025; the shim adds it, and the rest of Apex stays", (ON,)
    if not apex_import.module.startswith("apex"):
        return "the installed Apex has no compiled kernels", (INSTALL,)
    return "the installed Apex lacks it; Apex 25.05 may have it", (INSTALL,)
