"""What a file of settings may hold: the settings of a run, the rows of a comparison, and figures that were published.

The recipes that ship with this package and files for `--config` have one form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ampcompare.base.errors import ConfigError, close_matches
from ampcompare.base.files.read import FileFault, parse_yaml, read_text
from ampcompare.settings.config import RunConfig
from ampcompare.settings.validation import build_validated_model, setting_paths, suggestion_text

OLD_FOLDERS = {"seeds/": "articles/"}
RECIPES = Path(__file__).resolve().parent / "recipes"


class _FilePart(BaseModel):
    """A part of a settings file: frozen, and refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PublishedResult(_FilePart):
    """One line of a published table."""

    arm: str
    at: dict[str, Any] = Field({}, description="values of the settings that vary, by their paths")
    name: str | None = Field(None, description="as published, if that is not the arm with its settings")
    top1: float | None = Field(None, ge=0, le=100, description="percent after the last epoch")
    top1_best: float | None = Field(None, ge=0, le=100, description="highest percent of any epoch")
    time: str | None = Field(None, description="of the whole run, such as 8h42m32s")
    epoch_time: str | None = Field(None, description="of one epoch, such as 7m47s")
    memory_mib: float | None = Field(None, gt=0)
    diverged: bool = False
    remark: str = ""


class PublishedReference(_FilePart):
    """A published table and where it comes from."""

    source: str
    machine: str = ""
    figures: list[PublishedResult]


class Matrix(_FilePart):
    """The parts of a file that describe several runs rather than the settings of one."""

    title: str = Field("", description="one line for `ampcompare list`")
    arms: list[str] | None = Field(None, description="arms of a comparison, such as [fp32, bf16, 'apex:O2']")
    seeds: int | str | list[int] | None = Field(None, description="such as 0-4, [0, 2, 7] or auto")
    margin: float | str | None = Field(
        None, description="equivalence margin of top-1: 0.5 (points), 10%, 2sd or auto"
    )
    vary: dict[str, list[Any]] | None = Field(
        None, description="settings with the values that are crossed with arms"
    )
    rows: list[dict[str, Any]] | None = Field(
        None, description="rows one by one, each an arm with settings of its own, in place of arms and vary"
    )
    reference: PublishedReference | None = Field(None, description="published figures")
    scales: dict[str, dict[str, Any]] = Field(
        {}, description="smaller shapes by name: what differs there, rows and values in the same order"
    )

    @field_validator("arms", mode="before")
    @classmethod
    def _single_arm_as_list(cls, arms: Any) -> Any:
        return [arms] if isinstance(arms, str) else arms

    @field_validator("rows")
    @classmethod
    def _require_arm_in_rows(cls, rows: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        if rows is not None and not all(isinstance(row.get("arm"), str) for row in rows):
            raise ValueError("every row names an arm, as in {arm: native:fp16, recipe.optimizer.lr: 0.1}")
        return rows


@dataclass(frozen=True)
class SettingsFile:
    """A file, taken apart: the settings, as nested mappings, are checked once they are merged with all others."""

    matrix: Matrix
    settings: dict[str, Any] = field(default_factory=dict)

    def settings_at_scale(self, scale: str, name: str) -> SettingsFile:
        """Return what differs at one of the smaller shapes of the file.

        Args:
            scale: the name of a shape.
            name: of the file, for the message.

        Raises:
            ConfigError: the file has no such shape.
        """
        scales = self.matrix.scales
        if scale not in scales:
            close = close_matches(scale, scales)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(scales) or 'none'}"
            raise ConfigError(f"{name} has no size {scale!r}; {hint}")
        return settings_file_from_values(scales[scale], f"size {scale} of {name}")


def join_matrices(below: Matrix, above: Matrix) -> Matrix:
    """Return a matrix in which the values of one replace those of another; given arms or crossed values replace rows.

    Args:
        below: such as that of a recipe.
        above: such as that of a file; only what was set there counts.
    """
    given = {name: getattr(above, name) for name in above.model_fields_set}
    if given.keys() & {"arms", "vary"} and "rows" not in given:
        given["rows"] = None
    return below.model_copy(update=given)


def settings_file_from_values(values: Mapping[str, Any], name: str) -> SettingsFile:
    """Split the content of a file into its parts; `name` is what to call it in messages."""
    about_many = set(Matrix.model_fields)
    known = [*Matrix.model_fields, *RunConfig.model_fields]
    for key in values:
        if key not in known:
            hint = suggestion_text(str(key), [*Matrix.model_fields, *setting_paths(RunConfig)])
            raise ConfigError(f"{name}: there is no setting {key!r} ({hint})")
    try:
        matrix = build_validated_model(
            Matrix, {key: value for key, value in values.items() if key in about_many}
        )
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    return SettingsFile(matrix, {key: value for key, value in values.items() if key not in about_many})


def read_settings_file(name: str) -> SettingsFile:
    """Read a YAML file of settings.

    Raises:
        ConfigError: the file cannot be read, is no YAML, or holds something else than settings.
    """
    try:
        text = read_text(Path(name))
    except FileFault as fault:
        raise ConfigError(f"cannot read the config file {name}: {fault}") from None
    try:
        values = parse_yaml(text)
    except FileFault as fault:
        raise ConfigError(f"{name}: {fault}") from None
    if values is None:  # nothing but comments
        return SettingsFile(Matrix())
    if not isinstance(values, dict):
        raise ConfigError(
            f"{name} holds {type(values).__name__}, not a mapping of settings such as 'recipe:' and 'device:'"
        )
    return settings_file_from_values(values, name)


def settings_file_schema() -> dict[str, Any]:
    """Return the JSON Schema of such a file, for editors."""
    of_run, of_many = RunConfig.model_json_schema(), Matrix.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ampcompare settings",
        "description": "A file for --config: the settings of a run, and the rows of a comparison.",
        "type": "object",
        "additionalProperties": False,
        "properties": {**of_run["properties"], **of_many["properties"]},
        "$defs": {**of_run["$defs"], **of_many["$defs"]},
    }


@cache
def _recipe_files() -> dict[str, Path]:
    """Return the file of each recipe, those of the top folder first."""
    named = {path.relative_to(RECIPES).with_suffix("").as_posix(): path for path in RECIPES.rglob("*.yaml")}
    return dict(sorted(named.items(), key=lambda item: (item[0].count("/"), item[0])))


def load_recipe(name: str) -> SettingsFile:
    """Read a recipe by its name, such as `articles/r50-imagenet-apex`; its old name is read too.

    Raises:
        ConfigError: there is no recipe of this name.
    """
    import yaml

    known = _recipe_files()
    for old, new in OLD_FOLDERS.items():
        if name.startswith(old):
            name = new + name.removeprefix(old)
    if name not in known:
        last = {full.rpartition("/")[2]: full for full in known}
        close = close_matches(name, [*known, *last])
        hint = f"did you mean {last.get(close[0], close[0])!r}?" if close else f"known are {', '.join(known)}"
        raise ConfigError(f"there is no recipe {name!r}; {hint}")
    values: dict[str, Any] = yaml.safe_load(known[name].read_text(encoding="utf-8"))
    return settings_file_from_values(values, f"recipe {name}")


def list_recipes() -> list[tuple[str, bool, str]]:
    """Return (name, available, title) of each recipe."""
    return [(name, True, load_recipe(name).matrix.title) for name in _recipe_files()]
