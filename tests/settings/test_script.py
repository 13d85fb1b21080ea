"""Metrics, arguments and the file of a user's script."""

from pathlib import Path

import pytest

from ampcompare.base.errors import ConfigError
from ampcompare.settings.config import RunConfig
from ampcompare.settings.script import parse_metric, script_config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"top1:max=Acc@1 ([\d.]+)", ("top1", "max", "last", r"Acc@1 ([\d.]+)")),
        ("val/loss:min:best", ("val/loss", "min", "best", None)),
        ("f1", ("f1", "max", "last", None)),
        ("val_loss", ("val_loss", "min", "last", None)),
        ("val_loss:max", ("val_loss", "max", "last", None)),
        (r"x:first:max=a=([0-9]+)", ("x", "max", "first", "a=([0-9]+)")),
    ],
)
def test_a_metric_is_read(text: str, expected: tuple[str, ...]) -> None:
    """Name, goal, pick and pattern; the pattern may hold `=` and `:`."""
    metric = parse_metric(text)
    assert (metric.name, metric.goal, metric.pick, metric.pattern) == expected


def test_a_metric_may_be_compared_by_differences() -> None:
    """Ratios are the default; `points` may stand among the other words."""
    assert parse_metric("reward").difference == "ratio"
    metric = parse_metric(r"reward:points:max:best=reward (-?[\d.]+)")
    assert (metric.difference, metric.goal, metric.pick) == ("points", "max", "best")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("top1:points:points", "is not NAME"),
        ("top1:up", "is not NAME"),
        ("=x", "is not NAME"),
        ("top1:max=", "is not NAME"),
        ("x=a ([0-9]+)", "does not tell which values are better; write x:max .* or x:min"),
        ("top1=Acc ([", "is not a regular expression"),
        ("top1=Acc", "has 0 groups"),
        ("top1=(a)(b)", "has 2 groups"),
    ],
)
def test_a_wrong_metric_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        parse_metric(text)
    assert "\n" not in str(caught.value)


def test_arguments_are_filled_in(tmp_path: Path) -> None:
    """Braces with other words are the script's; the seed goes behind as well where it is asked for."""
    script = tmp_path / "train.py"
    script.write_text("pass")
    config = script_config([str(script), "--out={cell_dir}/x", "{arm}-{seed}", "{other}"], seed_arg="--seed")
    filled = config.arguments_for(3, "native:fp16", Path("cell"))
    assert filled == ["--out=cell/x", "native:fp16-3", "{other}", "--seed", "3"]


def test_what_is_no_script_is_refused(tmp_path: Path) -> None:
    """Nothing after the dashes, no such file, or a metric that is there twice."""
    for words, metrics, why in (
        ([], [], "no script after --"),
        (["-m"], [], "no script after --"),
        ([str(tmp_path / "absent.py")], [], "there is no script"),
        (["-m", "train"], ["f1", "f1"], "twice"),
    ):
        with pytest.raises(ConfigError, match=why):
            script_config(words, metrics=metrics)


def test_a_changed_script_is_another_cell(tmp_path: Path) -> None:
    """The digest has the content of the file; without a script it is what it always was."""
    script = tmp_path / "train.py"
    digests = set()
    for text in ("a = 1", "a = 2"):
        script.write_text(text)
        digests.add(RunConfig(script=script_config([str(script)])).digest())
    assert len(digests | {RunConfig().digest()}) == 3
