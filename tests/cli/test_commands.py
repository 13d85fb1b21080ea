"""What the commands print, where, and with which exit code; where settings come from."""

import csv
import io
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import pytest

from ampcompare.cli import COMMANDS
from ampcompare.cli.group import cli
from ampcompare.cli.help import OLD_NAMES, environment_variable_of_option
from ampcompare.cli.list_command import row_of_run
from ampcompare.experiment.run_directory import RunBrief
from ampcompare.settings.config import RunConfig

Call = Callable[..., Any]
MLP = ["--arch", "mlp"]


def test_run_json_is_the_record(call: Call, tmp_path: Path) -> None:
    """With `--json` stdout is exactly the record, non-finite numbers as words; a diverged run ends with 0."""
    words = ["run", *MLP, "--lr", "1e30", "--schedule", "constant"]
    done = call(*words, "--json", "-o", str(tmp_path), tiny=True)
    assert done.code == 0
    data = done.json()
    assert (data["status"], data["arm"]) == ("diverged", "fp32")
    (path,) = tmp_path.glob("cells/*/record.json")
    assert {name: value for name, value in json.loads(path.read_text()).items() if name != "checksum"} == data
    assert (path.parent / "steps.jsonl").read_text().count('"nan"') > 0


def test_run_names_an_option_without_effect(call: Call, tmp_path: Path) -> None:
    """An optimizer that keeps no state has none to hold in bf16."""
    words = ["run", *MLP, "--arm", "native:bf16,state=bf16", "--optimizer", "sgd", "-o", str(tmp_path)]
    sentence = "state=bf16 has no effect on this training: the optimizer keeps none"
    assert sentence in " ".join(call(*words, "--momentum", "0", tiny=True).err.split())
    assert sentence not in " ".join(call(*words, "--momentum", "0.9", tiny=True).err.split())


def test_run_again_takes_the_record(call: Call, tmp_path: Path) -> None:
    """The same command again does not train, and says so; `--force` does; `--quiet` says nothing."""
    words = ["run", *MLP, "-o", str(tmp_path)]
    first = call(*words, tiny=True)
    again = call(*words, tiny=True)
    assert again.lines[1] == f"{first.lines[1]} (cached)"
    assert again.out == first.out
    forced = call(*words, "--force", tiny=True)
    assert "(cached)" not in forced.err
    assert call(*words, "--quiet", tiny=True).err == ""


def test_a_failed_run_has_a_json_record_too(call: Call, tmp_path: Path) -> None:
    """With `--json` a failed run still prints its record, its error on stderr, and ends with 3."""
    done = call("run", "--arch", "mymod:Picky", "--arm", "half", "--json", "-o", str(tmp_path), tiny=True)
    assert done.code == 3
    assert done.json()["status"] == "failed"
    assert "no float16, please" in done.lines[-1]


def test_compare_prints_the_table(call: Call, tmp_path: Path) -> None:
    """`compare` prints a row per arm and the reading, and `report` prints the same again in any format."""
    out = str(tmp_path / "out")
    done = call("compare", *MLP, "--arm", "fp32", "--arm", "half", "--seeds", "0-1", "-o", out, tiny=True)
    assert done.code == 0
    table = done.out.split("\n\n")[1].splitlines()
    assert [line.split()[0] for line in table[2:]] == ["fp32", "half"]
    assert "nothing was tested" in done.out
    assert "fp16 is emulated on this CPU" in " ".join(done.out.split())
    cells, (report, page) = done.lines[1:-2], done.lines[-2:]
    assert cells[0].startswith("preflight, ")
    assert [line.partition(" ")[0] for line in cells if line[0] == "["] == [
        "[1/4]",
        "[2/4]",
        "[3/4]",
        "[4/4]",
    ]
    assert report == f"report: {out}/report.md"
    assert page == f"page: {out}/report.html" or "ampcompare[html]" in page
    assert call("report", out).out == done.out
    details = call("report", out, "--details").out
    assert details.startswith(done.out)
    assert "final loss scale" in details.removeprefix(done.out)
    assert call("report", f"{out}/report.json").out == done.out
    assert call("report", out, "--format", "md").out == (tmp_path / "out" / "report.md").read_text()
    assert len(list(csv.reader(io.StringIO(call("report", out, "--format", "csv").out)))) == 5
    assert call("report", out, "--format", "json").json()["reference"] == "fp32"


@pytest.mark.parametrize("command", ["run", "compare"])
def test_dry_run_touches_nothing(call: Call, tmp_path: Path, command: str) -> None:
    """`--dry-run` shows what would run, as one document with `--json`, and writes nothing."""
    words = (command, *MLP, "--dry-run", *(["--no-preflight"] if command == "compare" else []))
    done = call(*words, "-o", str(tmp_path / "out"), tiny=True)
    assert done.code == 0
    assert done.err == ""
    assert done.out
    assert isinstance(call(*words, "--json").json(), dict)
    assert not (tmp_path / "out").exists()


def _config(done: Any) -> RunConfig:
    return RunConfig.model_validate(done.json())


def test_flag_over_environment_over_file_over_default(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("recipe: {epochs: 7, batch_size: 32, optimizer: {lr: 0.5}}\narm: half\n")
    words = ["run", "--dry-run", "--config", str(file)]
    assert _config(call("run", "--dry-run")).recipe.epochs == RunConfig().recipe.epochs
    config = _config(call(*words))
    assert (config.recipe.epochs, config.recipe.batch_size, config.arm) == (7, 32, "half")
    monkeypatch.setenv("AMPCOMPARE_RUN_EPOCHS", "8")
    monkeypatch.setenv("AMPCOMPARE_RUN_BACKEND", "native")
    config = _config(call(*words))
    assert (config.recipe.epochs, config.recipe.batch_size, config.arm) == (8, 32, "native:fp16")
    config = _config(call(*words, "--epochs", "9", "--set", "recipe.optimizer.lr=0.25"))
    assert (config.recipe.epochs, config.recipe.optimizer.lr) == (9, 0.25)


def test_a_variable_that_sets_nothing_is_named(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistyped variable is a note with the right name; those of other commands and of the engine are none."""
    for name in (
        "AMPCOMPARE_RUN_EPOCH",
        "AMPCOMPARE_LR",
        "AMPCOMPARE_COMPARE_EPOCHS",
        "AMPCOMPARE_APEX_STRICT",
    ):
        monkeypatch.setenv(name, "1")
    assert call("run", "--dry-run").lines == [
        "note: AMPCOMPARE_LR is not a setting of run; did you mean AMPCOMPARE_RUN_LR?",
        "note: AMPCOMPARE_RUN_EPOCH is not a setting of run; did you mean AMPCOMPARE_RUN_EPOCHS?",
    ]


def test_an_empty_file_sets_nothing(call: Call, tmp_path: Path) -> None:
    """A file of comments alone is a file without settings."""
    (tmp_path / "c.yaml").write_text("# recipe:\n#   epochs: 3\n")
    assert _config(call("run", "--dry-run", "-c", str(tmp_path / "c.yaml"))) == RunConfig()


@pytest.mark.parametrize(
    ("words", "arm"),
    [
        (["--backend", "apex", "--opt_level", "O2"], "apex:O2"),
        (["--backend", "apex", "--opt-level", "O2", "--loss_scale", "128.0"], "apex:O2,loss_scale=128"),
        (["--backend=apex", "--keep_batchnorm_fp32=True", "--opt_level=O3"], "apex:O3,keep_batchnorm_fp32"),
        (["--backend", "half", "--bn_fp32"], "half:bn_fp32"),
        (["--backend", "native", "--dtype", "bfloat16"], "native:bf16"),
        (["--arm", "apex"], "apex:O1"),
        ([], "fp32"),
    ],
)
def test_flags_name_an_arm(call: Call, words: list[str], arm: str) -> None:
    """The flags that Apex users know, with hyphens or underscores, name an arm."""
    assert _config(call("run", "--dry-run", *words)).arm == arm


CHANGED = datetime(2024, 5, 6, 7, 8, tzinfo=UTC)


def test_a_row_of_a_run_directory() -> None:
    """A row has folder, date, tag, the first arms, seeds as ranges, the cells done of those planned, the headline."""
    arms = ("fp32", "half", "native:fp16", "apex:O1", "apex:O2")
    run = RunBrief(Path("runs/a"), CHANGED, "night", arms, (0, 1, 7), (3, 4), "Use half.")
    shown = "fp32, half, native:fp16, apex:O1 and 1 more"
    assert row_of_run(run) == ["runs/a", "2024-05-06 07:08", "night", shown, "0-1,7", "3/4", "Use half."]


VALUES = {
    "--fail-below-loss-scale": "2", "--layerwise-lr": "larc", "--log-interval": "3", "--max-consecutive-skips": "4",
    "--objective": "memory", "--progress-interval": "5s", "--size": "small", "--sweep": "workers=0,1", "--target": "97",
}  # fmt: skip
GROUP = click.Context(cli, **cli.context_settings)


def _command(name: str) -> click.Command:
    command = cli.get_command(GROUP, name)
    assert command is not None
    return command


def _parse(name: str, *words: str) -> dict[str, Any]:
    """Return the parameters that a command reads from words."""
    required = [
        param for param in _command(name).params if isinstance(param, click.Argument) and param.required
    ]
    return _command(name).make_context(name, [*words, *("x" for _ in required)], parent=GROUP).params


# Each flag with the first command that has it: all of them make their options in the same way.
FLAGS = {
    flag: name
    for name in reversed(COMMANDS)
    for param in _command(name).params
    if isinstance(param, click.Option)
    for flag in (*param.opts, *param.secondary_opts)
    if flag in OLD_NAMES
}


@pytest.mark.parametrize("flag", OLD_NAMES)
def test_an_old_name_sets_the_same_option(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old flag or variable gives what the new one gives, and the new variable wins."""
    name, old, value = FLAGS[flag], OLD_NAMES[flag], [VALUES[flag]] if flag in VALUES else []
    expected = _parse(name, flag, *value)
    assert _parse(name, old, *value) == expected != _parse(name)
    if flag.startswith("--no-"):
        return
    monkeypatch.setenv(environment_variable_of_option(name, old), *value or ["1"])
    assert _parse(name) == expected
    if value == ["2"]:
        monkeypatch.setenv(environment_variable_of_option(name, flag), "7")
        assert 7.0 in _parse(name).values()
