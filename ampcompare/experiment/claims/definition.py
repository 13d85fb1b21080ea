"""Published claims as data: the statement, the small experiment that tests it, and what its runs must show."""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ampcompare.base.errors import ConfigError
from ampcompare.runs.settings.validation import validated

__all__ = [
    "OLD_STUDIES",
    "STUDIES",
    "Accuracy",
    "Below",
    "Claim",
    "Diverges",
    "ExperimentSpec",
    "Memory",
    "Study",
    "Test",
    "Time",
    "Trains",
    "load_study",
    "study_name",
]

STUDIES = ("articles",)
OLD_STUDIES = {"seeds": "articles"}


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Diverges(_Part):
    """A row ends with non-finite weights or losses in most runs."""

    kind: Literal["diverges"]
    row: str


class Trains(_Part):
    """A row ends with finite weights and a value of the metric in most runs."""

    kind: Literal["trains"]
    row: str
    reaches: float = Field(description="as it is shown, such as percent of top-1")


class Accuracy(_Part):
    """The verdict on accuracy of a row against another is one of a given set."""

    kind: Literal["accuracy"]
    row: str
    against: str
    verdicts: list[Literal["better", "equivalent", "non-inferior", "worse"]]


class Below(_Part):
    """A row is worse than another by some points, or percent where ratios are compared."""

    kind: Literal["below"]
    row: str
    against: str
    points: float


class Time(_Part):
    """A step of a row takes at most this many times that of another."""

    kind: Literal["time"]
    row: str
    against: str
    at_most: float


class Memory(_Part):
    """The peak memory of a row is at most this many times that of another."""

    kind: Literal["memory"]
    row: str
    against: str
    at_most: float


Test = Annotated[Diverges | Trains | Accuracy | Below | Time | Memory, Field(discriminator="kind")]


class ExperimentSpec(_Part):
    """Runs that test claims: a comparison, or a program of this package that prints records."""

    seeds: str
    arms: list[str] = []
    settings: dict[str, Any] = {}
    program: str | None = None


class Claim(_Part):
    """One claim.

    Attributes:
        says: in one line, as published.
        published: the figures behind it.
        margin: equivalence margin of the metric, in the unit of shown differences.
        needs_gpu: results on a CPU would be no evidence for or against it.
        limits: how the small experiment differs from the published one; shown next to the verdict.
    """

    name: str
    says: str
    published: str
    shape: str
    tests: list[Test]
    margin: float = 0.5
    needs_gpu: bool = False
    limits: str = ""


class Study(_Part):
    """All claims of a publication."""

    source: str
    shapes: dict[str, ExperimentSpec]
    claims: list[Claim]


def study_name(name: str) -> str:
    """Return the present name of a study.

    Raises:
        ConfigError: there is no such study.
    """
    name = OLD_STUDIES.get(name, name)
    if name not in STUDIES:
        raise ConfigError(f"there is no study {name!r}; known are {', '.join(STUDIES)}")
    return name


def load_study(name: str) -> Study:
    """Read the claims of a study.

    Raises:
        ConfigError: no study has this name.
    """
    import yaml

    text = (files("ampcompare.experiment.claims") / "data" / f"{study_name(name)}.yaml").read_text(encoding="utf-8")
    return validated(Study, yaml.safe_load(text))
