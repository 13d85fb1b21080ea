"""How flags, environment, `--set`, YAML, recipe and defaults come together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ampcompare.cli.options import RECIPE_OPTIONS, parameter_of
from ampcompare.config import RunConfig
from ampcompare.errors import ConfigError
from ampcompare.recipes.catalog import load_recipe
from ampcompare.recipes.form import Matrix, SettingsFile, joined, read_settings
from ampcompare.recipes.layers import Layer, Settled, leaves, put, settle

if TYPE_CHECKING:
    from ampcompare.compare.plan import Plan
    from ampcompare.compare.rows import Row
    from ampcompare.published import Published

__all__ = ["Gathered", "gather", "plan_for", "published_for_run", "read_file", "rows_for", "seeds_text"]

FILES = (".yaml", ".yml")  # of a recipe that is not one of ours
BESIDE_OPTIONS = {"processes": "processes", "seed": "recipe.seed", "arm_text": "arm"}


@dataclass(frozen=True)
class Gathered:
    """All that was asked for.

    Attributes:
        matrix: what recipe and file say about rows, at the scale asked for.
        by_hand: places that something stronger than what describes the rows has given.
        recipe: its name.
        full: the recipe as published, and `scaled` what it says at the scale asked for, before any file.
    """

    settled: Settled
    matrix: Matrix
    by_hand: frozenset[str]
    recipe: str | None = None
    scale: str | None = None
    full: SettingsFile | None = None
    scaled: Matrix | None = None

    @property
    def config(self) -> RunConfig:
        """The settings of a run."""
        return self.settled.config


def gather(parameters: Mapping[str, Any], *, one_run: bool = False) -> Gathered:
    """Join all sources of settings of the present command.

    Args:
        parameters: of the command.
        one_run: of what a recipe names, take the first row and the first seed.

    Raises:
        ConfigError: naming what cannot be used.
    """
    name, scale, file_name = (parameters.get(key) for key in ("recipe_name", "scale", "config_file"))
    if scale is not None and name is None:
        raise ConfigError(f"--scale {scale} is for a recipe; name it with --recipe")
    full = None if name is None else read_file(name) if name.endswith(FILES) else load_recipe(name)
    matrix = full.matrix if full is not None else Matrix()
    layers = [Layer(f"recipe {name}", full.settings)] if full is not None else []
    if full is not None and scale is not None:
        smaller = full.smaller(scale, f"recipe {name}")
        matrix = joined(matrix, smaller.matrix)
        layers.append(Layer(f"recipe {name}, scale {scale}", smaller.settings))
    scaled = matrix if full is not None else None
    file = read_file(file_name) if file_name is not None else SettingsFile(Matrix())
    if file.matrix.reference is not None or file.matrix.scales:
        raise ConfigError(f"{file_name} has published figures or scales, and so is a recipe; give it with --recipe")
    by_flags = _given(parameters)
    upper = [Layer(f"file {file_name}", file.settings), *by_flags]
    matrix = joined(matrix, file.matrix)
    if one_run:
        layers += _first(matrix, upper)
    settled = settle([*layers, *upper])
    over_rows = by_flags if file.matrix.rows or file.matrix.vary else upper  # a file may vary what it gives a value
    by_hand = frozenset(place for layer in over_rows for place, _ in leaves(layer.values))
    return Gathered(settled, matrix, by_hand, name, scale, full, scaled)


def _first(matrix: Matrix, upper: list[Layer]) -> list[Layer]:
    """Return the settings of the first row that fits, and the first seed."""
    from ampcompare.compare.plan import parse_seeds
    from ampcompare.compare.rows import first_row

    arms = [layer.values["arm"] for layer in upper if isinstance(layer.values.get("arm"), str)]
    row = first_row(matrix, arms[-1] if arms else None)
    values: dict[str, Any] = {}
    if row is not None:
        values["arm"] = row.arm
        for place, value in row.varied.items():
            put(values, place, value)
    if (words := seeds_text(matrix)) not in (None, "auto"):
        put(values, "recipe.seed", parse_seeds(str(words))[0])
    return [Layer("first row of the recipe", values)] if values else []


def seeds_text(matrix: Matrix) -> str | None:
    """Return the seeds of a file as one text; a list counts as its parts."""
    seeds = matrix.seeds
    return ",".join(map(str, seeds)) if isinstance(seeds, list) else None if seeds is None else str(seeds)


def read_file(name: str) -> SettingsFile:
    """Read a YAML file of settings.

    Raises:
        ConfigError: it cannot be read, is not a mapping, or has a key that does not exist.
    """
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config file {name}: {getattr(error, 'strerror', None) or error}") from None
    values = _yaml(text, name)
    if values is None:  # nothing but comments
        return SettingsFile(Matrix())
    if not isinstance(values, dict):
        raise ConfigError(
            f"{name} holds {type(values).__name__}, not a mapping of settings such as 'recipe:' and 'device:'"
        )
    return read_settings(values, name)


def _yaml(text: str, what: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{what} is not YAML: {_fault(error)}") from None


def _fault(error: Any) -> str:
    """Return what a YAML parser found wrong, with the place in the file, in one line."""
    mark = getattr(error, "problem_mark", None)
    if mark is None or error.problem is None:
        return " ".join(str(error).split())
    begun = getattr(error, "context_mark", None)
    context = f", {error.context}" if error.context else ""
    since = (
        f" that begins in line {begun.line + 1}" if context and begun is not None and begun.line != mark.line else ""
    )
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}{context}{since}"


def _assignment(text: str, flag: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"{flag} {text!r} is not NAME=VALUE")
    return name, _yaml(value, f"{flag} {text!r}")


def _given(parameters: Mapping[str, Any]) -> list[Layer]:
    """Return what `--set`, the environment and flags say, in this order."""
    layers = []
    for text in parameters["overrides"]:
        values: dict[str, Any] = {}
        put(values, *_assignment(text, "--set"))
        layers.append(Layer(f"--set {text}", values))
    places = {parameter_of(place): place for _, place, _ in RECIPE_OPTIONS} | BESIDE_OPTIONS
    from_environment: dict[str, Any] = {}
    from_flags: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, place in places.items():
        if parameters.get(name) is None:
            continue
        variable, origins[place] = _source(name)
        put(from_environment if variable else from_flags, place, parameters[name])
    for text in parameters["model_args"]:
        name, value = _assignment(text, "--model-arg")
        put(from_flags, f"recipe.model.args.{name}", value)
        origins[f"recipe.model.args.{name}"] = "flag --model-arg"
    return [*layers, Layer("environment", from_environment, origins), Layer("flag", from_flags, origins)]


def _source(name: str) -> tuple[bool, str]:
    """Return whether a parameter of the present command came from the environment, and what to call its source."""
    context = click.get_current_context()
    option = next((param for param in context.command.params if param.name == name), None)
    source = context.get_parameter_source(name)
    if option is None or source == click.core.ParameterSource.DEFAULT:  # follows from flags of other names
        return False, {"processes": "number of processes asked for", "arm_text": "flags of the arm"}.get(name, "flag")
    if source == click.core.ParameterSource.ENVIRONMENT:
        return True, f"environment {option.envvar}"
    return False, f"flag {max(option.opts, key=len)}" if isinstance(option, click.Option) else "argument"


def rows_for(gathered: Gathered, parameters: Mapping[str, Any]) -> list[Row]:
    """Return the rows of a comparison: those of flags, else of the file, else of the recipe, else nine arms."""
    from ampcompare.compare.plan import parse_vary
    from ampcompare.compare.rows import matrix_rows

    vary = [parse_vary(text) for text in parameters["varied"]]
    return matrix_rows(gathered.matrix, arms=list(parameters["arms"]), vary=vary, by_hand=gathered.by_hand)


def plan_for(gathered: Gathered, rows: list[Row], seeds: Any) -> Plan:
    """Return the plan of a comparison, with what was published for its recipe."""
    from ampcompare.compare.plan import plan_rows

    return replace(plan_rows(gathered.config, rows, seeds), published=_published(gathered, rows))


def published_for_run(gathered: Gathered) -> Published | None:
    """Return the published figures for the one row that is run, under the name of its arm."""
    from ampcompare.compare.comparable import settings
    from ampcompare.compare.rows import Row, matrix_rows

    config = gathered.config
    values = dict(settings(config.model_dump()))
    fit = [
        row
        for row in (matrix_rows(gathered.scaled) if gathered.scaled is not None else [])
        if row.arm == config.arm and all(values.get(place) == value for place, value in row.varied.items())
    ]
    mine = max(fit, key=lambda row: len(row.varied), default=Row(config.arm))
    published = _published(gathered, [mine])
    rows = [line.model_copy(update={"row": config.arm}) for line in published.rows if line.row] if published else []
    return published.model_copy(update={"rows": rows}) if published and rows else None


def _published(gathered: Gathered, rows: list[Row]) -> Published | None:
    """Return the published figures of the recipe beside rows; None where there are none."""
    reference = gathered.full.matrix.reference if gathered.full is not None else None
    if gathered.recipe is None or gathered.full is None or reference is None:
        return None
    from ampcompare.compare.beside import Shape, published_beside
    from ampcompare.compare.rows import matrix_rows

    full, scaled = gathered.full, gathered.scaled or gathered.full.matrix
    shape = Shape(
        gathered.recipe, gathered.scale, settle([Layer("recipe", full.settings)]).config,
        matrix_rows(full.matrix), matrix_rows(scaled),
    )  # fmt: skip
    return published_beside(reference, shape, rows, gathered.config)
