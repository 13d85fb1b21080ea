"""The sources of the settings of a run or a comparison: a recipe, a file, and settings that override them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import ConfigError
from ampcompare.base.formatting import MIB, parse_duration
from ampcompare.base.option_rules import refuse_broken_rules, rule_of_need
from ampcompare.experiment.matrix import (
    MatrixRow,
    Vary,
    first_row_of_arm,
    rows_of_matrix,
    rows_with_stack_names_alone,
    setting_path_of_name,
)
from ampcompare.experiment.plan import parse_seeds
from ampcompare.results.analysis.pairing.comparability import changed_settings, iter_settings
from ampcompare.results.records.comparison import Published, PublishedRow
from ampcompare.settings.config import RunConfig
from ampcompare.settings.file import (
    Matrix,
    PublishedResult,
    SettingsFile,
    join_matrices,
    load_recipe,
    read_settings_file,
)
from ampcompare.settings.layers import Layer, ResolvedSettings, resolve_settings, set_value_at_path
from ampcompare.settings.reads import CommandReads
from ampcompare.settings.stack import StackConfig, first_weights_stack
from ampcompare.settings.validation import paths_and_values

YAML_SUFFIXES = (".yaml", ".yml")  # of a recipe that is a file
NEEDS_RECIPE = rule_of_need("--size", "size", "--recipe", "recipe")


@dataclass(frozen=True)
class SettingsRequest:
    """The requested settings."""

    recipe: str | None = None
    size: str | None = None
    file: str | None = None
    layers: tuple[Layer, ...] = ()


@dataclass(frozen=True)
class SettingsSources:
    """The settings of all sources, resolved.

    Attributes:
        matrix: what recipe and file say about rows, at the requested size.
        fixed: paths with one value from a source above those that describe the rows; the matrix does not vary them.
        published: the recipe as published.
        recipe_matrix: the rows of the recipe at the requested size, before any file.
    """

    resolved: ResolvedSettings
    matrix: Matrix
    fixed: frozenset[str]
    recipe: str | None = None
    size: str | None = None
    published: SettingsFile | None = None
    recipe_matrix: Matrix | None = None

    @property
    def config(self) -> RunConfig:
        """The settings of a run."""
        return self.resolved.config

    def with_first_weights(self, name: str, stacks: Mapping[str, StackConfig]) -> SettingsSources:
        """Return these with a script that begins with the first weights of one of some stacks.

        Args:
            name: of the stack.
            stacks: environments by their names.

        Raises:
            ConfigError: there is no such stack, or no script trains.
        """
        script = self.config.script
        stack = first_weights_stack(name, stacks, has_script=script is not None)
        assert script is not None
        config = self.config.model_copy(update={"script": script.model_copy(update={"first_weights": stack})})
        return replace(self, resolved=replace(self.resolved, config=config))


def collect_settings(
    request: SettingsRequest, reads: CommandReads, *, one_run: bool = False
) -> SettingsSources:
    """Join all sources of settings.

    Args:
        request: the recipe, the file and the layers above them.
        reads: what the command reads. A recipe or file may say more.
        one_run: of the rows that a recipe names, take the first, and its first seed.

    Raises:
        ConfigError: the command does not read a setting, or a recipe, a file or a value in it cannot be used.
    """
    reads.refuse_unread_settings(request.layers)
    name, size = request.recipe, request.size
    refuse_broken_rules((NEEDS_RECIPE,), {"size": size, "recipe": name})
    full = None
    if name is not None:
        full = read_settings_file(name) if name.endswith(YAML_SUFFIXES) else load_recipe(name)
    matrix = full.matrix if full is not None else Matrix()
    layers = [Layer(f"recipe {name}", full.settings)] if full is not None else []
    if full is not None and size is not None:
        smaller = full.settings_at_scale(size, f"recipe {name}")
        matrix = join_matrices(matrix, smaller.matrix)
        layers.append(Layer(f"recipe {name}, size {size}", smaller.settings))
    recipe_matrix = matrix if full is not None else None
    file = read_settings_file(request.file) if request.file is not None else SettingsFile(Matrix())
    if file.matrix.reference is not None or file.matrix.scales:
        raise ConfigError(
            f"{request.file} has published results or sizes, so it is a recipe; give it with --recipe"
        )
    above_recipe = [Layer(f"file {request.file}", file.settings), *request.layers]
    matrix = join_matrices(matrix, file.matrix)
    if one_run:
        layers += _layers_of_first_row_and_seed(matrix, above_recipe)
    resolved = resolve_settings([*layers, *above_recipe])
    # A file that describes rows may vary a setting that it also gives a value; an override fixes it.
    above_rows = request.layers if file.matrix.rows or file.matrix.vary else above_recipe
    fixed = frozenset(path for layer in above_rows for path, _ in paths_and_values(layer.values))
    return SettingsSources(resolved, matrix, fixed, name, size, full, recipe_matrix)


def _layers_of_first_row_and_seed(matrix: Matrix, layers: Sequence[Layer]) -> list[Layer]:
    """Return the settings of the first row with the arm that layers ask for, and the first seed."""
    arms = [layer.values["arm"] for layer in layers if isinstance(layer.values.get("arm"), str)]
    row = first_row_of_arm(matrix, arms[-1] if arms else None)
    values: dict[str, Any] = {}
    if row is not None:
        values["arm"] = row.arm
        for path, value in row.varied.items():
            set_value_at_path(values, path, value)
    if (seeds := matrix_seeds_text(matrix)) not in (None, "auto"):
        set_value_at_path(values, "recipe.seed", parse_seeds(str(seeds))[0])
    return [Layer("first row of the recipe", values)] if values else []


def matrix_seeds_text(matrix: Matrix) -> str | None:
    """Return the seeds of a file as one text such as `0,2,7`, if it has any."""
    seeds = matrix.seeds
    if isinstance(seeds, list):
        return ",".join(map(str, seeds))
    return None if seeds is None else str(seeds)


def matrix_rows(
    sources: SettingsSources,
    *,
    arms: Sequence[str] = (),
    reference: str | None = None,
    sweep: Vary = (),
    stacks: Mapping[str, StackConfig] = MappingProxyType({}),
) -> list[MatrixRow]:
    """Return the rows of a comparison: those asked for, or else of the file, of the recipe, or the default arms.

    Args:
        sources: whose matrix, of the file or the recipe, gives way to what is asked for.
        arms: texts of arms; empty if none is asked for.
        reference: an arm or the label of a row; None for that of the matrix.
        sweep: settings with the values that they take, crossed with the arms.
        stacks: other environments by the name that `script@name` calls them.

    Raises:
        ConfigError: an arm, setting or stack that does not exist.
    """
    return rows_of_matrix(
        sources.matrix, arms=arms, reference=reference, vary=sweep, by_hand=sources.fixed, stacks=stacks
    )


def published_table_matched_to_rows(
    sources: SettingsSources, measured_rows: Sequence[MatrixRow]
) -> Published | None:
    """Return the published table of the recipe, each line with the measured row that corresponds to it, if any."""
    full = sources.published
    config = sources.config
    size = sources.size
    if sources.recipe is None or full is None or full.matrix.reference is None:
        return None
    # Smaller sizes have the same rows in the same order, with other values.
    rows_here = rows_with_stack_names_alone(sources.recipe_matrix or full.matrix)
    rows_there = rows_with_stack_names_alone(full.matrix)
    twins = {row.label: twin for row, twin in zip(rows_here, rows_there, strict=False)}
    beside = [(row.label, twins.get(row.label, row)) for row in measured_rows]
    varied = {path for row in measured_rows for path in row.varied}
    as_published = resolve_settings([Layer("recipe", full.settings)]).config
    base = dict(iter_settings(config.model_dump())) if size is None else {}
    return Published(
        source=full.matrix.reference.source,
        machine=full.matrix.reference.machine,
        recipe=sources.recipe,
        scale=size,
        differs=[] if size is not None else _settings_unlike_published(as_published, config, varied),
        rows=[_match_published_row(figure, beside, base) for figure in full.matrix.reference.figures],
    )


def _match_published_row(
    figure: PublishedResult, beside: Sequence[tuple[str, MatrixRow]], base: Mapping[str, Any]
) -> PublishedRow:
    own = MatrixRow(
        str(Arm.parse(figure.arm)),
        {setting_path_of_name(name, f"at: {name}"): at for name, at in figure.at.items()},
    )
    # A row may vary more than the publication did.
    fit = [
        (label, row)
        for label, row in beside
        if row.arm == own.arm and own.varied.items() <= {**base, **row.varied}.items()
    ]
    found = min(fit, key=lambda pair: len(pair[1].varied))[0] if fit else None
    return PublishedRow(
        name=figure.name or own.label,
        row=found,
        top1=None if figure.top1 is None else figure.top1 / 100,
        top1_best=None if figure.top1_best is None else figure.top1_best / 100,
        seconds=_parse_seconds(figure.time),
        epoch_seconds=_parse_seconds(figure.epoch_time),
        peak_bytes=None if figure.memory_mib is None else round(figure.memory_mib * MIB),
        diverged=figure.diverged,
        remark=figure.remark,
    )


def _parse_seconds(text: str | None) -> float | None:
    if text is None:
        return None
    seconds = parse_duration(text)
    if not seconds:
        raise ConfigError(f"the published time {text!r} is not a time such as 8h42m32s")
    return seconds


def _settings_unlike_published(published: RunConfig, measured: RunConfig, varied: set[str]) -> list[str]:
    """Return the settings in which a comparison differs from the publication, except the location of its data."""
    there, here = dict(iter_settings(published.model_dump())), dict(iter_settings(measured.model_dump()))
    hidden = {"recipe.data.dir", "recipe.data.download", *varied}
    if varied & {"recipe.batch_size", "recipe.global_batch_size"}:
        hidden |= {"recipe.batch_size", "recipe.global_batch_size", "recipe.optimizer.lr"}
    found: list[str] = []
    for path in changed_settings(published, measured):
        is_of_training = path.startswith("recipe.") or path == "processes"
        if is_of_training and path not in hidden:
            found.append(f"{path.removeprefix('recipe.')} {here.get(path)}, not {there.get(path)}")
    return found
