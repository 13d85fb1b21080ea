"""Match published results to measured rows: the same row of the recipe, at any of its sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ampcompare.analysis.runs.comparability import changed_settings, settings
from ampcompare.backends.arm import Arm
from ampcompare.base.errors import ConfigError
from ampcompare.experiment.matrix import Row, find_setting
from ampcompare.records.published import Published, PublishedRow
from ampcompare.settings.config import RunConfig
from ampcompare.settings.durations import parse_duration
from ampcompare.settings.file import PublishedResult, Reference

__all__ = ["RecipeAtSize", "published_beside"]

MIB = 2**20


@dataclass(frozen=True)
class RecipeAtSize:
    """A recipe as published, and at the size that is run.

    Attributes:
        full_rows: as published.
        rows: the same rows in the same order, with the values of the size.
    """

    recipe: str
    scale: str | None
    config: RunConfig
    full_rows: Sequence[Row]
    rows: Sequence[Row]


def published_beside(
    reference: Reference, shape: RecipeAtSize, measured: Sequence[Row], config: RunConfig
) -> Published:
    """Return a published table, each line with the measured row that corresponds to it.

    Args:
        measured: rows of the comparison.
        config: settings of the comparison, except arm, seed and what varies.

    Raises:
        ConfigError: a published figure names a setting that does not exist, or an invalid time.
    """
    twins = dict(zip(map(_key, shape.rows), shape.full_rows, strict=False))
    here = [(row.label, twins.get(_key(row), row)) for row in measured]
    varied = {path for row in measured for path in row.varied}
    base = dict(settings(config.model_dump())) if shape.scale is None else {}
    return Published(
        source=reference.source,
        machine=reference.machine,
        recipe=shape.recipe,
        scale=shape.scale,
        differs=[] if shape.scale is not None else _departures(shape.config, config, varied),
        rows=[_row(figure, here, base) for figure in reference.figures],
    )


def _key(row: Row) -> tuple[str, str]:
    return row.arm, repr(sorted(row.varied.items()))


def _row(figure: PublishedResult, here: Sequence[tuple[str, Row]], base: Mapping[str, Any]) -> PublishedRow:
    arm = str(Arm.parse(figure.arm))
    at = {find_setting(name, f"at: {name}"): value for name, value in figure.at.items()}
    own = Row(arm, at)
    fit = [(label, row) for label, row in here if row.arm == arm and _covers({**base, **row.varied}, at)]
    found = min(fit, key=lambda pair: len(pair[1].varied))[0] if fit else None
    return PublishedRow(
        name=figure.name or own.label,
        row=found,
        top1=None if figure.top1 is None else figure.top1 / 100,
        top1_best=None if figure.top1_best is None else figure.top1_best / 100,
        seconds=_seconds(figure.time),
        epoch_seconds=_seconds(figure.epoch_time),
        peak_bytes=None if figure.memory_mib is None else round(figure.memory_mib * MIB),
        diverged=figure.diverged,
        remark=figure.remark,
    )


def _covers(values: Mapping[str, Any], at: Mapping[str, Any]) -> bool:
    """Return whether a result was published for this row; a row may vary more than the publication did."""
    return all(path in values and values[path] == value for path, value in at.items())


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    seconds = parse_duration(text)
    if not seconds:
        raise ConfigError(f"the published time {text!r} is not a time such as 8h42m32s")
    return seconds


def _departures(published: RunConfig, measured: RunConfig, varied: set[str]) -> list[str]:
    """Return the settings in which a comparison differs from the publication, except the location of its data."""
    there, here = dict(settings(published.model_dump())), dict(settings(measured.model_dump()))
    paths = [
        path for path in changed_settings(published, measured) if path.startswith("recipe.") or path == "processes"
    ]
    hidden = {"recipe.data.dir", "recipe.data.download", *varied}
    if varied & {"recipe.batch_size", "recipe.global_batch_size"}:
        hidden |= {"recipe.batch_size", "recipe.global_batch_size", "recipe.optimizer.lr"}
    return [
        f"{path.removeprefix('recipe.')} {here.get(path)}, not {there.get(path)}"
        for path in paths
        if path not in hidden
    ]
