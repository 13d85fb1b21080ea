"""Run a command of ampcompare in this process, its children included, and print which settings it reads, as JSON.

    python observed_reads.py WORDS...

What a setting's own validation reads does not count.
"""

import contextlib
import importlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ampcompare.base.processes.call import ChildAnswer
from ampcompare.cli.group import run_command_line
from ampcompare.settings import examination
from ampcompare.settings.config import RunConfig

PACKAGE = Path(examination.__file__).resolve().parents[1]


def noting_reads(model: type[BaseModel], above: str, noted: set[str], quiet: list[int]) -> None:
    """Let each read of a field of a group of settings, and of groups in it, note the path of the field."""
    plain = model.__getattribute__
    leaves = {}
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            noting_reads(field.annotation, f"{above}{name}.", noted, quiet)
        else:
            leaves[name] = f"{above}{name}"

    def read(self: BaseModel, name: str) -> Any:
        if name in leaves and not quiet[0]:
            noted.add(leaves[name])
        return plain(self, name)

    model.__getattribute__ = read  # type: ignore[method-assign]


@contextlib.contextmanager
def without_notes(quiet: list[int]) -> Iterator[None]:
    """Note nothing within the block."""
    quiet[0] += 1
    try:
        yield
    finally:
        quiet[0] -= 1


def call_here(
    program: Path, function: str = "", *, options: dict[str, Any] | None = None, **_: Any
) -> ChildAnswer:
    """Do in this process what `call_in_child` does in another."""
    name = ".".join(("ampcompare", *program.relative_to(PACKAGE).with_suffix("").parts))
    return ChildAnswer(
        getattr(importlib.import_module(name), function or program.stem)(**options or {}), "done"
    )


def observe(words: list[str]) -> tuple[int, set[str], str]:
    """Run a command, and return its exit code, the settings it reads, and what it wrote."""
    noted: set[str] = set()
    quiet = [0]
    noting_reads(RunConfig, "", noted, quiet)
    validate, make = RunConfig.model_validate, RunConfig.__init__

    def validate_quietly(*values: Any, **options: Any) -> RunConfig:
        with without_notes(quiet):
            return validate(*values, **options)

    def make_quietly(self: RunConfig, **values: Any) -> None:
        with without_notes(quiet):
            make(self, **values)

    RunConfig.model_validate = validate_quietly  # type: ignore[method-assign, assignment]
    RunConfig.__init__ = make_quietly  # type: ignore[method-assign]
    examination.call_in_child = call_here  # type: ignore[assignment]
    written = io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
        try:
            code = run_command_line(words)
        except SystemExit as ended:
            code = ended.code  # type: ignore[assignment]
    return code or 0, noted, written.getvalue()


if __name__ == "__main__":
    code, paths, text = observe(sys.argv[1:])
    print(json.dumps({"code": code, "reads": sorted(paths), "text": text[-2000:]}))
