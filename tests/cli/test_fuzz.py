"""Files that were damaged at random: every command that reads them ends with a code of its own and one line."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import os
import random
import shutil
import struct
import warnings
from pathlib import Path
from typing import Any

import pytest

from ampcompare.base.environment.fingerprint import fingerprint
from ampcompare.cli import main
from ampcompare.experiment.launch.base import Launcher
from ampcompare.experiment.launch.cell_files import write_config, write_record
from ampcompare.experiment.load import reload_comparison
from ampcompare.experiment.plan import make_plan
from ampcompare.experiment.run import run_plan
from ampcompare.experiment.run_directory import RunDirectory
from ampcompare.runs.records.evaluation import EpochResult
from ampcompare.runs.records.run import EngineInfo, RunRecord, RunSummary, StepRecord, Trace, dump_json
from ampcompare.runs.report.base import write_reports
from ampcompare.runs.settings.config import RunConfig

ROUNDS = 12
STEPS = 12
ARMS = ["fp32", "apex:O2", "native:fp16"]
ODD = [
    *(None, True, False, -1, 0, 3, 2**40, 2**62, -(2**62), 0.5, -0.0, 1e-320, 1e300, -1e300, 1e15, 1e18),
    *(
        "",
        "nan",
        "inf",
        "-inf",
        "NaN",
        "x",
        "x" * 5000,
        "\0",
        "\x1b[2J",
        "\ud800",
        "é",
        "fp32",
        "apex:O2",
        "-",
        "../..",
    ),
    *([], {}, [[]], [{}], {"": {}}, [None], [0] * 500, {"a": [1]}, ["fp32", "fp32"], {"schema": 1}),
]
RAW = [
    *("9" * 5000, "-" + "9" * 30, "1e999", "-1e999", "NaN", "Infinity", "[" * 200_000, '{"a":' * 50_000),
    *("[" * 300 + "]" * 300, "0" * 50, "1.", "'x'", "\x00", '"\\ud800"', '"\\u12"', "/*", "[,]", "{,}", "\ufeff"),
]
YAML = [
    *(
        "!!int abc",
        "2001-99-99",
        "2001-01-01",
        "!!timestamp x",
        "!!float x",
        "!!bool x",
        "!!null x",
        "!!binary ====",
        "=",
    ),
    *(
        "!!python/object/apply:os.system [id]",
        "!!set {a}",
        "!!omap [a: 1]",
        "!!pairs [a: 1]",
        "!x y",
        "*nope",
        "&a [*a]",
    ),
    *(
        "&a {b: *a}",
        "9" * 5000,
        "0x" + "f" * 5000,
        "1" + ":1" * 3000,
        "0b" + "1" * 99,
        "-.inf",
        ".nan",
        "1e999",
        "~",
        "|",
    ),
    *(
        "? [a]\n: b",
        "? {a: b}\n: c",
        "<<: 3",
        "<<: *x",
        "<<: [{a: 1}, {a: 2}]",
        "---\na: 1",
        "%YAML 9.9",
        "\t",
        "'",
        '"',
    ),
    *(
        "[" * 100_000,
        "{" * 2000,
        "- " * 3000,
        "{a: " * 300,
        "x" * 100_000,
        "\x07",
        "\u2028",
        "{1: 2}",
        "{null: 1}",
        "[]",
    ),
    "{a: &a [x, x, x, x, x, x, x, x, x], b: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a], c: &c [*b, *b, *b, *b], "
    "d: &d [*c, *c, *c, *c, *c, *c, *c, *c], e: &e [*d, *d, *d, *d, *d, *d, *d, *d], f: [*e, *e, *e, *e, *e, *e, *e]}",
]
SETTINGS = """
title: a file
arms: [fp32, 'apex:O2,loss_scale=128', native:bf16]
seeds: 0-2
vary: {workers: [0, 2], recipe.batch_size: [32, 64]}
device: cpu
recipe:
  epochs: 2
  model: {arch: mlp, args: {width: 16, depth: 2}}
  optimizer: {name: sgd, lr: 0.1, betas: [0.9, 0.999], groups: [{match: head.*, lr_factor: 2}]}
  schedule: {name: step, step_epochs: 1}
  data: {name: synthetic, train_size: 128, val_size: 64}
saving: {every_steps: 5, keep_last: 1}
"""
RECIPE = (
    SETTINGS.replace("vary:", "#")
    + """
reference:
  source: somebody
  machine: a machine
  figures:
    - {arm: fp32, top1: 76.1, time: 8h42m32s, memory_mib: 1000}
    - {arm: 'apex:O2,loss_scale=128', top1: 76.0, epoch_time: 7m47s, at: {recipe.epochs: 2}}
scales:
  small: {recipe: {epochs: 1}}
"""
)
TABLE = "arm,seed,accuracy,time,memory,batch,note\n" + "".join(
    f"{arm},{seed},{76 + seed / 7:.3f},{60 - seed}s,{1000 + seed},64,x\n"
    for arm in ("fp32", "O1", "O2")
    for seed in (0, 1, 2)
)  # fmt: skip


class Instant(Launcher):
    """Leaves the record of a run without training."""

    def launch(self, config: RunConfig, folder: Path, on_progress: Any = None) -> RunRecord:
        folder.mkdir(parents=True, exist_ok=True)
        write_config(config, folder)
        number = config.recipe.seed + len(config.arm)
        seconds = 0.01 + number / 1000
        losses = [1 / (step + 1 + config.recipe.seed) for step in range(STEPS)]
        epoch = EpochResult(
            epoch=0, samples=100, top1_correct=50 + number % 9, top5_correct=90, loss=1.5, train_seconds=1.0,
            eval_seconds=0.1,
        )  # fmt: skip
        summary = RunSummary(
            metric_final=epoch.value, metric_best=epoch.value, metric_last_mean=epoch.value, last_epochs=1,
            top5_final=0.9, loss_final=1.5, epochs=[epoch], num_steps=STEPS, skipped_steps=1,
            losses_sha256=hashlib.sha256(struct.pack(f"<{STEPS}d", *losses)).hexdigest(), warmup_steps=2,
            step_seconds_median=seconds, step_seconds_iqr=0.001,
            samples_per_second=config.recipe.batch_size / seconds,
            epoch_seconds=1.0, wall_seconds=3.0, peak_bytes=3 * 2**20, final_loss_scale=65536.0, start_seconds=0.2,
        )  # fmt: skip
        record = RunRecord(
            cell=config.digest(), arm=config.arm, status="completed", config=config, summary=summary,
            engine=EngineInfo(name="compat", version="25.05", reason="asked for") if "apex" in config.arm else None,
            environment={**fingerprint(), "device": "cpu", "device_name": "a CPU"}, half="fp16 native",
            trace=Trace(steps=[0, 6, STEPS - 1], losses=[losses[at] for at in (0, 6, STEPS - 1)], loss_scales=[2.0] * 3,
                        skipped=[1] * 3, step_seconds=[seconds] * 21),
        )  # fmt: skip
        write_record(record, folder)
        steps = [
            StepRecord(step, 0, loss, (2.0,), (2.0,), (step > 0,), None, seconds, 0.001)
            for step, loss in enumerate(losses)
        ]
        (folder / "steps.jsonl").write_text("".join(dump_json(step, indent=None) + "\n" for step in steps))
        return record


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory of three arms and three seeds, a settings file, a recipe and a table."""
    folder = tmp_path_factory.mktemp("pristine")
    make_run(folder)
    return folder


def make_run(folder: Path) -> None:
    """Fill a folder with every kind of file that is damaged here."""
    plan = make_plan(RunConfig(), ARMS, [0, 1, 2])
    comparison = run_plan(plan, folder / "out", Instant(), command="ampcompare compare")
    write_reports(comparison, folder / "out")
    assert len(comparison.records) == len(plan.cells)
    assert not reload_comparison(folder / "out").excluded
    (folder / "settings.yaml").write_text(SETTINGS)
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "table.csv").write_text(TABLE)


def damage_json(text: str, draw: random.Random) -> str:
    """Return JSON with one to three values replaced, removed, moved or repeated."""
    data = json.loads(text)
    raw: dict[str, str] = {}
    for number in range(draw.choice([1, 1, 2, 3])):
        places: list[tuple[Any, Any]] = []
        queue: list[Any] = [data]
        for node in queue:
            items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
            for key, value in list(items):
                places.append((node, key))
                queue.append(value)
        if not places:
            break
        node, key = draw.choice(places)
        kind = draw.randrange(7)
        if kind <= 2:
            node[key] = draw.choice(ODD)
        elif kind == 3:
            raw[f"raw{number}"] = draw.choice(RAW)
            node[key] = f"raw{number}"
        elif kind == 4:
            del node[key]
        elif kind == 5:
            other, name = draw.choice(places)
            with contextlib.suppress(IndexError, KeyError):
                node[key] = copy.deepcopy(other[name])
        elif isinstance(node, dict):
            node[draw.choice(["", "schema", "records", "x" * 100])] = node.pop(key)
        else:
            node *= draw.choice([0, 2, 30])
    done = json.dumps(data)
    for name, word in raw.items():
        done = done.replace(f'"{name}"', word)
    return done


def damage_bytes(content: bytes, draw: random.Random) -> bytes:
    """Return a file that was cut, flipped, repeated or written over somewhere."""
    place, other = sorted(draw.randrange(len(content) + 1) for _ in range(2))
    junk = bytes(draw.randrange(256) for _ in range(draw.choice([1, 2, 30])))
    return draw.choice([
        content[:place], content[place:], content[:place] + content[other:], content[:place] + junk + content[place:],
        content[:place] + junk + content[place + len(junk):], content[:other] + content[place:], b"", content * 2,
        content.decode().encode("utf-16"), b"\xef\xbb\xbf" + content, content.replace(b",", b"", 1),
    ])  # fmt: skip


def damage_words(text: str, words: list[str], draw: random.Random) -> str:
    """Return a text in which one to three words are others."""
    for _ in range(draw.choice([1, 1, 2, 3])):
        parts = text.replace(",", " , ").replace("\n", " \n ").split(" ")
        place = draw.randrange(len(parts))
        parts[place] = draw.choice(words)
        text = " ".join(parts)
    return text


def damage(path: Path, draw: random.Random) -> None:
    """Damage a file by what it holds, or put something in its place that is no file."""
    content = path.read_bytes()
    kind = draw.randrange(20)
    if kind == 0 and hasattr(os, "mkfifo"):
        path.unlink()
        os.mkfifo(path)
    elif kind == 1:
        path.unlink()
        draw.choice([path.mkdir, lambda: path.symlink_to(path), lambda: path.symlink_to("/dev/zero"), lambda: None])()
    elif kind <= 6:
        path.write_bytes(damage_bytes(content, draw))
    elif path.suffix == ".json":
        path.write_bytes(damage_json(content.decode(), draw).encode("utf-8", "surrogatepass"))
    elif path.suffix == ".jsonl":
        lines = content.decode().splitlines()
        place = draw.randrange(len(lines))
        lines[place] = damage_json(lines[place], draw)
        path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    else:
        words = (
            YAML
            if path.suffix == ".yaml"
            else ["", "nan", "inf", "1e999", "9" * 5000, "-1", '"', "x" * 200_000, ",,,", "\0", "8:26:45", "١"]
        )
        path.write_bytes(damage_words(content.decode(), words, draw).encode("utf-8", "surrogatepass"))


def commands(folder: Path, draw: random.Random) -> dict[str, list[list[str]]]:
    """Return which commands read each of the files."""
    out = str(folder / "out")
    form = draw.choice(["table", "md", "csv", "json", "html", "latex"])
    settings = str(folder / "settings.yaml")
    scale = draw.choice([[], ["--size", "small"]])
    going_on = ["compare", "-o", out, *(word for arm in ARMS for word in ("--arm", arm)), "--seeds", "0-2", "--dry-run"]
    gate = ["compare", "--baseline", f"{out}/report.json", "--fail-on", "time>2x", "--dry-run", "--device", "cpu"]
    return {
        "out/cells/*/record.json": [["report", out, "--format", form], going_on],
        "out/plan.json": [["report", out, "--format", form]],
        "out/env.json": [["report", out, "--format", form]],
        "out/report.json": [["report", f"{out}/report.json", "--format", form], gate],
        "settings.yaml": [
            ["run", "-c", settings, "--dry-run"],
            ["compare", "-c", settings, "--dry-run"],
            ["config", "show", "-c", settings, "--origin"],
        ],
        "recipe.yaml": [["compare", "--recipe", str(folder / "recipe.yaml"), *scale, "--dry-run"]],
        "table.csv": [["judge", str(folder / "table.csv"), *draw.choice([[], ["--json"]])]],
    }


def attempt(pristine: Path, scratch: Path, kind: str, seed: int) -> list[str]:
    """Damage one file of a kind in a copy, call what reads it, and return what went wrong."""
    draw = random.Random(f"{kind} {seed}")
    folder = scratch / f"{seed}"
    shutil.copytree(pristine, folder)
    try:
        path = draw.choice(sorted(folder.glob(kind)))
        damage(path, draw)
        if path.name == "record.json" and draw.random() < 0.3:
            damage(path.parent / "steps.jsonl", draw)
        faults = []
        for words in commands(folder, draw)[kind]:
            code, text = call(words)
            told = [line for line in text.splitlines() if line.startswith("ampcompare: ")]
            if code not in (0, 1, 2) or (code == 2 and len(told) != 1) or "Traceback" in text or "internal" in text:
                faults.append(f"{kind} {seed}: {words[0]} ended with {code}: {text[-600:]}")
        if path.name == "record.json":
            plan = make_plan(RunConfig(), ARMS, [0, 1, 2])
            RunDirectory(folder / "out").reusable(
                next(cell for cell in plan.cells if cell.digest() == path.parent.name)
            )
        return faults
    finally:
        shutil.rmtree(folder)


def call(words: list[str]) -> tuple[int, str]:
    """Call the command line and return its code and what it wrote to standard error."""
    out, err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = main(words)
    return code, err.getvalue()


@pytest.mark.parametrize("kind", sorted(commands(Path(), random.Random(0))))
def test_damaged_files(pristine: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged file ends a command with code 0, 1 or 2 and one line, never with a traceback or an internal error."""
    monkeypatch.chdir(tmp_path)
    faults = [fault for seed in range(ROUNDS) for fault in attempt(pristine, tmp_path, kind, seed)]
    assert not faults, "\n".join(faults)
