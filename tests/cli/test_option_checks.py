"""Words that mean nothing are refused at once, without torch; options of settings have the types of their fields."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
import pytest

from ampcompare.base.environment.gpus import platform_versions_of_torch
from ampcompare.cli.compare_command import command
from ampcompare.cli.shared_options import RECIPE_OPTIONS, parameter_name_of_setting
from ampcompare.settings.config import RunConfig

# Calls the command line once per line of input, and tells whether torch was imported.
WITHOUT_TORCH = """
import json, sys

from ampcompare.cli import main
import contextlib, io
for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(json.loads(line))
    print(json.dumps([code, err.getvalue(), "torch" in sys.modules or "torchvision" in sys.modules]))
"""
REFUSED: list[tuple[list[str], int, str]] = [
    (["run", "--arch", "resnet19"], 2, "there is no model 'resnet19'"),
    (["run", "--arch", "deeplabv3_resnet50"], 2, "for segmentation, not for classification"),
    (["run", "--arch", "nomod:x"], 2, "there is no module 'nomod'"),
    (["run", "--data", "nomod:x"], 2, "there is no module 'nomod'"),
    (["compare", "--task", "lm", "--data", "nomod:x"], 2, "there is no module 'nomod'"),
    (["run", "--data", "nosuch"], 2, "there is no data set 'nosuch'"),
    (["run", "--device", "nosuch"], 2, "is unknown; use auto, cpu, cuda"),
    (["run", "--device", "mps", "--arm", "apex:O1"], 2, "apex:O1 does not run on mps"),
    (["run", "--arm", "horovod"], 4, "horovod is not installed"),
    (["run", "--launcher", "slurm"], 4, "needs sbatch"),
    (
        ["exec", "--resume-args", "--resume x", "train.py"],
        2,
        "--resume-args is for --verify-resume STEP; give both",
    ),
    (["exec", "--verify-resume", "2", "--twin", "train.py"], 2, "--twin is not for --verify-resume"),
    (["compare", "--arm", "fp32", "--arm", "horovod"], 4, "horovod is not installed"),
    (["compare", "--arch", "resnet19"], 2, "there is no model 'resnet19'"),
    (["compare", "--sweep", "recipe.model.arch=mlp,mpl"], 2, "there is no model 'mpl'"),
    (["compare", "--sweep", "device=cpu,nosuch"], 2, "is unknown; use auto, cpu, cuda"),
    (["compare", "-o", "x" * 300], 2, "cannot make the output folder"),
    (["explain", "O2", "--arch", "resnet19"], 2, "there is no model 'resnet19'"),
    (["diagnose", "--ahead", "--arch", "resnet19"], 2, "there is no model 'resnet19'"),
    (["run", "--save-apex-format"], 2, "--save-apex-format needs an arm of Apex"),
    (["run", "--dist-url", "tcp://a:1"], 2, "--dist-url is for processes that something else starts"),
    (["run", "--dist-url", "a:1"], 2, "--dist-url 'a:1' is none; give env://, tcp://HOST:PORT"),
    (["run", "--allow-writes", "nowhere"], 2, "nowhere: there is no such folder; make it first"),
    (["compare", "--allow-writes", "nowhere"], 2, "nowhere: there is no such folder; make it first"),
    (
        ["compare", "--config", "nowhere.yaml", "--fail-on", "accuracy"],
        2,
        "--fail-on 'accuracy' cannot be read",
    ),
    (
        ["find-batch", "--set", "recipe.global_batch_size=8"],
        2,
        "recipe.global_batch_size is not for find-batch",
    ),
]
# What devices, files and the user's code decide.
IN_THE_CELL: list[tuple[list[str], int, str]] = [
    (["--device", "xpu"], 4, "an Intel GPU), but torch sees none"),
    (["--data", "imagefolder", "--data-dir", "nowhere"], 2, "no images in nowhere/train"),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each call says, with and without --dry-run, in one process; and the folder that they were made in."""
    folder = tmp_path_factory.mktemp("here")
    calls = [
        (words, dry)
        for words, *_ in REFUSED
        for dry in (False, True)
        if not (dry and words[0] in ("explain", "find-batch", "diagnose"))
    ]
    lines = [json.dumps([*words, *(["--dry-run"] if dry else [])]) for words, dry in calls]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], input="\n".join(lines), cwd=folder, text=True, capture_output=True,
        check=True, timeout=120, env={**os.environ, "PATH": ""},  # where this machine may have sbatch
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {(*words, dry): answer for (words, dry), answer in zip(calls, found, strict=True)}, folder


@pytest.mark.parametrize("words", [words for words, *_ in REFUSED], ids=" ".join)
def test_refused_before_torch(answers: Any, words: list[str]) -> None:
    """A name or library that is not there ends the command in one line, without torch or a folder."""
    found, folder = answers
    _, code, part = next(case for case in REFUSED if case[0] == words)
    for dry in (False, True):
        if (*words, dry) not in found:
            continue
        seen, err, torch = found[(*words, dry)]
        assert (seen, len(err.splitlines()), torch) == (code, 1, False), err
        assert part in err
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("words", "code", "said"), IN_THE_CELL, ids=lambda value: str(value)[:40])
def test_refused_by_the_cell(call: Any, tmp_path: Path, words: list[str], code: int, said: str) -> None:
    """With the same exit codes: of `run` after its only cell, of `compare` before any, and once for all arms."""
    device = () if "--device" in words else ("--device", "cpu")
    for begin in (["run"], ["compare", "--arm", "fp32,bf16", "--seeds", "0-1"]):
        out = tmp_path / begin[0]
        done = call(*begin, *words, *device, "-o", str(out))
        assert (done.code, done.err.count(said)) == (code, 1), done.err
        assert len(list(out.glob("cells/*"))) == (begin == ["run"])


def test_the_build_of_torch(tmp_path: Path) -> None:
    """What `version.py` says is what torch says; without the file nothing is known."""
    import torch

    assert platform_versions_of_torch() == {
        name: getattr(torch.version, name) for name in ("cuda", "hip", "xpu")
    }
    assert platform_versions_of_torch(tmp_path) is None
    (tmp_path / "version.py").write_text("__version__ = '2.4.0'\ncuda: Optional[str] = '12.1'\nhip = None\n")
    assert platform_versions_of_torch(tmp_path) == {"cuda": "12.1", "hip": None}


OPTIONS = {param.name: param for param in command.params}


def _field(path: str) -> Any:
    model: Any = RunConfig
    *parents, name = path.split(".")
    for parent in parents:
        model = model.model_fields[parent].annotation
    return model.model_fields[name]


@pytest.mark.parametrize("path", [path for _, path, _ in RECIPE_OPTIONS])
def test_an_option_follows_its_field(path: str) -> None:
    """A field with fixed values gives a choice of exactly these, and help ends with the default unless it is none."""
    option, field = OPTIONS[parameter_name_of_setting(path)], _field(path)
    assert isinstance(option, click.Option)
    if get_origin(field.annotation) is Literal:
        assert isinstance(option.type, click.Choice)
        assert tuple(option.type.choices) == get_args(field.annotation)
    else:
        assert not isinstance(option.type, click.Choice)
    default = "on" if field.default is True else field.default
    shown = "" if default in (None, False, "none", ()) else f"  [default: {default}]"
    assert option.help == f"{field.description}{shown}"
