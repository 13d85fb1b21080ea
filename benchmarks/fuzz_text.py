"""What mutated records, plans, settings and tables do to the commands that read them.

    python benchmarks/fuzz_text.py [--count 500] [--seed 0] [--keep DIR]

Each file is one of a run directory that a short comparison has left, a file of settings, or a table for `judge`, with
values replaced, removed or swapped, or with bytes changed. It is read by the commands that a user would call. What is a
fault is said in `fuzz.py`, whose processes are used.
"""

from __future__ import annotations

import functools
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml
from fuzz import Reader, fuzzing, places

from ampcompare.cli import main

SETTINGS = """
arm: apex:O2,loss_scale=128
device: cpu
workers: 0
recipe:
  epochs: 2
  batch_size: 16
  data: {name: synthetic, train_size: 64, val_size: 32, image_size: 8}
  model: {arch: convnet, args: {width: 4}}
  optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
"""
TABLE = """arm,seed,accuracy,time,memory,gpus
fp32,0,76.91,412.5,8123,8
fp32,1,76.87,411.9,8123,8
fp32,2,77.02,413.0,8123,8
amp,0,76.80,201.5,5210,8
amp,1,76.95,8m20s,5210,8
amp,2,nan,,,8
"""
ODD = (
    *(None, -1, 0, 2**63, -(2**200), 1e308, -0.0, 1e-320, True, "", "\0", "é" * 3000, "nan", "inf", "1e999", [], {}),
    *([[]], {"": 1}, "../../x", "/dev/zero", "x" * 100_000, "<script>", "\x1b[31m", "2001-99-99", "!!int abc", "0x1F"),
)


def _mutated_values(value: Any, chance: random.Random) -> Any:
    for _ in range(chance.choice([1, 1, 1, 2, 6])):
        entries = places(value, sys.maxsize)
        if not entries:
            break
        holder, key = chance.choice(entries)
        kind = chance.randrange(6)
        if kind <= 2:
            holder[key] = chance.choice(ODD)
        elif kind == 3:
            del holder[key]
        elif kind == 4 and isinstance(holder, dict):
            holder[chance.choice(["", "x" * 5000, "0", "schema"])] = holder.pop(key)
        else:
            other, name = chance.choice(entries)
            if other is not holder or not isinstance(holder, list):
                holder[key], other[name] = other.get(name) if isinstance(other, dict) else other[name], holder[key]
    return value


def _mutated_text(text: bytes, chance: random.Random) -> bytes:
    data = bytearray(text)
    for _ in range(chance.randint(1, 8)):
        at = chance.randrange(len(data) or 1)
        size = chance.choice([1, 3, 40, 500])
        kind = chance.randrange(6)
        if kind == 0 and data:
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del data[at : at + size]
        elif kind == 2:
            data[at:at] = bytes(data[chance.randrange(len(data) or 1) :][:size])
        elif kind == 3:
            data[at:at] = chance.choice([b"\xff\xfe", b"\0", b"[" * 5000, b'"', b",", b"\r", b"9" * 5000, b"&a [*a]"])
        elif kind == 4:
            data[at : at + size] = chance.randbytes(size)
        else:
            del data[at:]
    return bytes(data)


def _mutated(path: Path, chance: random.Random) -> bytes:
    text = path.read_bytes()
    if chance.random() < 0.4 or path.suffix == ".csv":
        return _mutated_text(text, chance)
    try:
        if path.suffix == ".yaml":
            return yaml.safe_dump(_mutated_values(yaml.safe_load(text), chance)).encode()
        if path.suffix == ".jsonl":
            lines = [json.loads(line) for line in text.splitlines()]
            return "\n".join(map(json.dumps, _mutated_values(lines, chance))).encode()
        return json.dumps(_mutated_values(json.loads(text), chance)).encode()
    except (ValueError, RecursionError, OverflowError, yaml.YAMLError):  # a circle, or what JSON cannot hold
        return _mutated_text(text, chance)


def _commands(path: Path, folder: Path) -> list[list[str]]:
    if path.suffix == ".csv":
        return [["judge", str(path)], ["judge", str(path), "--sd", "0.2"]]
    if path.suffix == ".yaml":
        return [["run", "-c", str(path), "--dry-run"], ["config", "show", "--for", "run", "-c", str(path)]]
    commands = [["report", str(folder), "--format", name] for name in ("table", "html")]
    if path.name in ("report.json", "record.json"):
        commands.append(["report", str(path), "--format", "md"])
    return commands


def read_texts(count: int, seed: int, scratch: Path, reader: Reader) -> None:
    """Read mutated records, plans, settings and tables."""
    good, folder = scratch / "good", scratch / "folder"
    compare = ["compare", "--arm", "fp32", "--arm", "apex:O2", "--seeds", "0-2", "--device", "cpu", "-o", str(good)]
    compare += ["--data", "synthetic", "--train-size", "64", "--val-size", "32", "--epochs", "2", "--arch", "mlp"]
    reader.must("the comparison", lambda: main(compare))
    (scratch / "settings.yaml").write_text(SETTINGS)
    (scratch / "table.csv").write_text(TABLE)
    paths = [path for path in sorted(good.rglob("*")) if path.suffix in (".json", ".jsonl")]
    paths += [scratch / "settings.yaml", scratch / "table.csv"] * (len(paths) // 4)
    for number in range(count):
        chance = random.Random(f"{seed} {number}")
        source = chance.choice(paths)
        data = _mutated(source, chance)
        target = scratch / f"mutated{source.suffix}"
        if good in source.parents:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(good, folder)
            target = folder / source.relative_to(good)
        target.write_bytes(data)
        for arguments in _commands(target, folder):
            reader.read(arguments[0], functools.partial(main, arguments), f"{number} {source.stem}", target)


if __name__ == "__main__":
    fuzzing(read_texts)()
