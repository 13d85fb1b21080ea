"""`--recipe`, `--size`, `config` and `list recipes` on the command line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ampcompare.settings.config import RunConfig

Call = Callable[..., Any]
APEX = ("--recipe", "articles/r50-imagenet-apex", "--size", "small")
PLAN = ("--dry-run", "--json", "--no-preflight")


def test_one_arm_of_a_recipe(call: Call, tmp_path: Path) -> None:
    """`run` takes the first row of a recipe, or that of its arm."""
    for split in ("train", "val"):
        (tmp_path / "images" / split / "healthy").mkdir(parents=True)
    leaves = ["run", "--recipe", "articles/r18-leaves", "--data-dir", str(tmp_path / "images"), "--dry-run"]
    first = call(*leaves).json()
    assert (first["arm"], first["recipe"]["optimizer"]["lr"]) == ("fp32", 0.1)
    third = call(*leaves, "--arm", "native:fp16", "--lr", "0.3").json()
    assert (third["arm"], third["recipe"]["optimizer"]["lr"]) == ("native:fp16", 0.3)


def test_what_is_given_by_hand_is_not_varied(call: Call) -> None:
    """Flags win over a recipe: a value given by hand takes the place of those that it varies, arms of its arms."""

    def labels(*words: str) -> list[str]:
        recipe = ("compare", "--recipe", "articles/r50-imagenet-fp16bn", "--size", "small", *PLAN)
        return sorted(cell["arm"] for cell in call(*recipe, *words).json()["cells"])

    assert len(labels()) == 5
    assert labels("--batch-size", "32") == ["half:bn_fp32"]
    assert labels("--sweep", "global_batch_size=8,16", "--arm", "half") == [
        *("half global_batch_size=16", "half global_batch_size=8")
    ]
    assert len(labels("--seeds", "0-1")) == 10


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            ("--recipe", "articles/r50-imagenet-apx"),
            ["no recipe 'articles/r50-imagenet-apx'", "articles/r50-imagenet-apex"],
        ),
        (("--recipe", "digits", "--size", "small"), ["recipe digits has no size 'small'"]),
        (("--recipe", "cifar10-r18", "--size", "smal"), ["did you mean 'small'?"]),
        (("--size", "small"), ["--size needs --recipe; give both"]),
    ],
)
@pytest.mark.parametrize("command", ["run", "compare"])
def test_a_mistyped_recipe_is_one_line(
    call: Call, command: str, words: tuple[str, ...], parts: list[str]
) -> None:
    """What does not exist is told in one line with what was meant, and ends with 2."""
    done = call(command, *words, "--dry-run")
    assert done.code == 2
    assert len(done.lines) == 1
    assert all(part in done.err for part in parts)


def test_a_file_may_name_rows_and_what_is_varied(call: Call, tmp_path: Path) -> None:
    """A file of the user's holds arms, seeds and values to cross, and its mistakes name it."""
    path = tmp_path / "mine.yaml"
    path.write_text("arms: [fp32, half]\nvary: {lr: [0.1, 0.2]}\nseeds: [3, 5]\nrecipe: {epochs: 2}\n")
    cells = call("compare", "-c", str(path), *PLAN).json()["cells"]
    assert len(cells) == 8
    assert {cell["arm"] for cell in cells} == {"fp32 lr=0.1", "fp32 lr=0.2", "half lr=0.1", "half lr=0.2"}
    path.write_text("vari: {lr: [1]}\n")
    done = call("compare", "-c", str(path), "--dry-run")
    assert (done.code, len(done.lines)) == (2, 1)
    assert f"{path}: there is no setting 'vari' (did you mean 'vary'?)" in done.err


def test_a_recipe_of_ones_own(call: Call, tmp_path: Path) -> None:
    """A file with figures and scales is a recipe by its path, and no file for `--config`."""
    path = tmp_path / "ours.yaml"
    path.write_text(
        "recipe: {epochs: 9, data: {name: digits, train_size: 256, val_size: 64}, model: {arch: mlp}}\n"
        "arms: [fp32]\nreference: {source: our spring, figures: [{arm: fp32, top1: 97.2, memory_mib: 40}]}\n"
        "scales: {small: {recipe: {epochs: 1}}}\n"
    )
    words = ("--size", "small", "--device", "cpu", "--seeds", "0", "-o", str(tmp_path / "out"))
    done = call("compare", "--recipe", str(path), *words)
    assert done.code == 0
    assert "Published: our spring; one run per line." in done.out
    row = next(line for line in done.out.partition("as published")[2].splitlines() if line.startswith("fp32"))
    assert (row.split()[1], row.split()[3]) == ("97.20", "40")
    refused = call("compare", "--config", str(path), "--dry-run")
    assert (refused.code, len(refused.lines)) == (2, 1)
    assert "give it with --recipe" in refused.err
    assert "cannot read" in call("compare", "--recipe", str(tmp_path / "none.yaml"), "--dry-run").err


def test_origins_of_settings(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value says which flag, variable, --set, file or recipe it came from, the strongest of them."""
    path = tmp_path / "mine.yaml"
    path.write_text("recipe: {epochs: 7, label_smoothing: 0.1, clip_grad: 2.0, optimizer: {momentum: 0.1}}\n")
    monkeypatch.setenv("AMPCOMPARE_COMPARE_LABEL_SMOOTHING", "0.2")
    monkeypatch.setenv("AMPCOMPARE_COMPARE_LR", "0.4")
    words = (
        "--recipe",
        "cifar10-r18",
        "-c",
        str(path),
        "--set",
        "recipe.clip_grad=3",
        "--lr",
        "0.5",
        "--workers",
        "1",
    )
    found = call(
        "config", "show", "--origin", "--json", *words, "--model_arg", "zero_init_residual=true"
    ).json()
    origin = {
        place: found["origin"][f"recipe.{place}"] for place in ("epochs", "label_smoothing", "clip_grad")
    }
    assert origin == {
        "epochs": f"file {path}",
        "label_smoothing": "environment AMPCOMPARE_COMPARE_LABEL_SMOOTHING",
        "clip_grad": "--set recipe.clip_grad=3",
    }
    assert found["origin"]["recipe.optimizer.lr"] == "flag --lr"
    assert found["origin"]["recipe.data.name"] == "recipe cifar10-r18"
    assert found["origin"]["recipe.model.args.zero_init_residual"] == "flag --model-arg"
    assert found["origin"]["recipe.seed"] == "default"
    assert found["settings"]["recipe"]["clip_grad"] == 3
    assert found["seeds"] == "0-2"


def test_a_wrong_option_of_shown_settings_is_one_of_config(call: Call) -> None:
    """Its usage error names the command that was called, whose options those are, and where the schema is."""
    done = call("config", "show", "--schema")
    assert done.code == 2
    assert "Usage: ampcompare config" in done.err
    assert (
        "What follows show are options of compare; the schema of files: ampcompare config schema" in done.err
    )


def test_shown_settings_can_be_read_again(call: Call, tmp_path: Path) -> None:
    """What `config show` prints is YAML that gives the same settings, rows and seeds as a file."""

    def cells(*words: str) -> list[dict[str, object]]:  # their order is drawn for each plan
        return sorted(call("compare", *words, *PLAN).json()["cells"], key=lambda cell: cell["cell"])

    words = ("--recipe", "articles/r18-leaves", "--size", "small", "--label-smoothing", "0.1")
    shown = call("config", "show", "--origin", *words)
    assert shown.code == 0
    assert 'name: "digits"  # recipe articles/r18-leaves, size small' in shown.out
    path = tmp_path / "again.yaml"
    path.write_text(shown.out)
    assert yaml.safe_load(shown.out)["recipe"]["label_smoothing"] == 0.1
    assert cells("-c", str(path)) == cells(*words)


def test_settings_of_a_run(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--for run` takes the options and variables of `run`, its arm included."""
    monkeypatch.setenv("AMPCOMPARE_RUN_SEED", "4")
    monkeypatch.setenv("AMPCOMPARE_COMPARE_EPOCHS", "9")
    words = ("--for", "run", "--origin", "--json", "--backend", "apex", "--opt-level", "O2")
    found = call("config", "show", *words).json()
    assert found["settings"]["arm"] == "apex:O2"
    assert found["origin"]["arm"] == "flags of the arm"
    assert found["origin"]["recipe.seed"] == "environment AMPCOMPARE_RUN_SEED"
    assert found["origin"]["recipe.epochs"] == "default"


def test_the_schema_is_printed(call: Call) -> None:
    """`config schema` prints the JSON Schema of a file of settings, and takes no options."""
    assert set(RunConfig.model_fields) < set(json.loads(call("config", "schema").out)["properties"])
    done = call("config", "schema", "--lr", "1")
    assert (done.code, len(done.lines)) == (2, 1)


def test_rows_in_another_environment(call: Call, tmp_path: Path) -> None:
    """Rows of a file name stacks, which `config show` prints as it reads them; `run` trains none of them here."""
    path = tmp_path / "rows.yaml"
    path.write_text("rows: [{arm: fp32@old}, {arm: fp32, lr: 0.05}]\n", encoding="utf-8")
    shown = call("config", "show", "-c", str(path), "--stack", "old=python3").out
    rows = yaml.safe_load(shown)["rows"]
    assert rows == [{"arm": "fp32@old"}, {"arm": "fp32", "recipe.optimizer.lr": 0.05}]
    refused = call("run", "-c", str(path), "--dry-run")
    assert refused.code == 2
    assert "the first row, fp32@old, trains in another environment" in refused.err
    unknown = call("compare", "-c", str(path), *PLAN)
    assert unknown.code == 2
    assert "@old names a stack that is not given: add --stack old=COMMAND" in unknown.err
