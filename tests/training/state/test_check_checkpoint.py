"""Checkpoints with a right checksum and wrong contents: refused by name, or resumed as what they say."""

from __future__ import annotations

import copy
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ampcompare.apex.amp import _amp_state
from ampcompare.base.errors import AmpCompareError, CheckpointError
from ampcompare.base.tensors.tree import first_difference
from ampcompare.runs.records.evaluation import EpochResult
from ampcompare.runs.settings.config import RunConfig
from ampcompare.tasks.task import make_task
from ampcompare.training.assemble import assemble_single
from ampcompare.training.checkpoint.convert.convert import convert_file
from ampcompare.training.checkpoint.convert.load import load_ours
from ampcompare.training.checkpoint.inspect import inspect_file, inspection_lines
from ampcompare.training.checkpoint.store.file import write_checkpoint
from ampcompare.training.precision.base import make_precision
from ampcompare.training.precision.cpu_half import cpu_half
from ampcompare.training.run_summary import RunMetrics
from ampcompare.training.session import Session
from ampcompare.training.state.resume import find_checkpoint, validate_resume
from ampcompare.training.state.saver import Saver
from ampcompare.training.stop_request import StopRequest

MUTATIONS = int(os.environ.get("MUTATIONS", "30"))
"""For each arm; a longer hunt sets another number."""
APART = ("seconds", "data_seconds", "train_seconds", "eval_seconds", "resumed", "versions", "notes")
CPU = torch.device("cpu")
ARMS = {
    "apex:O2,engine=compat": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
    "native:fp16,init_scale=1024,growth_interval=3": {"name": "adamw", "lr": 1e-3},
    "half:master_weights=true,loss_scale=dynamic,init_scale=1024,growth_interval=3": {"name": "adam", "lr": 1e-3},
    "apex:O3,engine=compat,loss_scale=128": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
    "native:bf16": {"name": "torchao.optim:AdamW8bit", "lr": 1e-3, "args": {"block_size": 8}},
}
FEW_BITS = "native:bf16"
"""Its model is wide enough for moments in 8 bits."""


def config(arm: str, **options: Any) -> RunConfig:
    """A run of 8 steps with all that has a state."""
    recipe: dict[str, Any] = {"data": {"train_size": 64, "val_size": 32, "image_size": 8}}
    model = {"arch": "mlp", "args": {"width": 64}} if arm == FEW_BITS else {"arch": "convnet", "args": {"width": 4}}
    recipe |= {"model": model, "epochs": 2, "batch_size": 16}
    recipe |= {"grad_accum_steps": 2, "ema_decay": 0.9, "optimizer": ARMS.get(arm, {}), "early_stop": 3}
    recipe |= options.pop("recipe", {})
    return RunConfig.model_validate({"arm": arm, "recipe": recipe, "drain_every": 1, **options})


def play(settings: RunConfig, folder: Path, *, path: Path | None = None, stop: int | None = None) -> dict[str, Any]:
    """Train from the start or from a checkpoint, to the end or to a stop; return the state at the end."""
    state, resumption = None, None
    if path is not None:
        found = find_checkpoint(str(path), folder)
        assert found is not None
        state, resumption = validate_resume(found, settings, 1)
    precision = make_precision(settings.arm)
    try:
        task = make_task(settings.recipe)
        assembly = assemble_single(settings.recipe, task, precision, CPU, state=state)
        if state is None and precision.key == "amp":
            for scaler in precision._scalers:  # type: ignore[attr-defined]
                scaler._loss_scale = min(scaler._loss_scale, 1024.0)
        with Saver(folder, settings.saving, lambda text: None) as saver:
            session = Session(settings, assembly, saver=saver, stop=StopRequest(stop))
            tally = RunMetrics(settings.warmup_steps, settings.recipe.batch_size)
            session.stateful["tally"] = tally
            if state is not None and resumption is not None:
                session.load_state_dict(state, resumption)
            _, context = cpu_half(settings.cpu_half, precision.half_dtype, CPU)
            with context:
                for event in session.events():
                    if isinstance(event, EpochResult):
                        tally.add_epoch(event)
                    else:
                        tally.add_steps(event)
        end = session.state_dict()
    finally:
        if precision.key == "amp":
            _amp_state.close()
    assert end is not None
    return end


def leaves(value: Any, holders: list[Any]) -> Iterator[tuple[list[Any], Any, Any]]:
    """Yield every entry of a state: the keys that lead to it, what holds it, and its key there."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(items):
        yield [*holders, key], value, key
        if isinstance(item, dict | list | tuple) and len(item) < 100:
            yield from leaves(item, [*holders, key])


def other(value: Any, chance: random.Random) -> Any:
    """Something else in place of a value: of another type, shape or size."""
    anything: list[Any] = [None, True, -1, 0, 3, 10**30, 1.5, math.nan, math.inf, -math.inf, "abc", "", b"x"]
    anything += [[], {}, (), [1, 2], {"a": 1}, {0: None}, torch.zeros(3), torch.ones(2, 2, dtype=torch.int64)]
    if not isinstance(value, torch.Tensor):
        more = [value + 1, value * 2, -value, float(value)] if type(value) in (int, float) else []
        return chance.choice(anything + 2 * more)
    changed = [value.double(), value.half(), value.to(torch.int32), value.reshape(-1)[:-1], value[None]]
    changed += [torch.full_like(value, 7)[..., None], torch.zeros(0), value.to(torch.complex64)]
    if value.is_floating_point():
        changed += [torch.full_like(value, math.nan), torch.full_like(value, math.inf), -value.abs() - 1]
    return chance.choice(changed if chance.random() < 0.8 else anything)


def mutate(state: dict[str, Any], chance: random.Random) -> str:
    """Change one entry anywhere in a state; return what was done."""
    found = [leaf for leaf in leaves(state, []) if isinstance(leaf[1], dict | list)]
    # a few entries are many leaves; each top-level entry has the same chance
    top = chance.choice(sorted({leaf[0][0] for leaf in found}))
    place, holder, key = chance.choice([leaf for leaf in found if leaf[0][0] == top])
    kind = chance.choice(["replace", "replace", "replace", "delete", "add", "swap", "alias"])
    name = ".".join(map(str, place))
    if kind == "delete":
        del holder[key]
    elif kind == "add" and isinstance(holder, dict):
        holder[chance.choice(["extra", 99, (1, 2), None])] = other(holder[key], chance)
    elif kind == "add":
        holder.append(other(holder[key], chance))
    elif kind in ("swap", "alias") and len(holder) > 1:
        with_it = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        old = holder[key]
        holder[key] = holder[with_it]
        if kind == "swap":
            holder[with_it] = old
        name += f" with {with_it}"
    else:
        kind = "replace"
        holder[key] = other(holder[key], chance)
        name += f" by {str(holder[key])[:40]!r}"
    return f"{kind} {name}"


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """Run torchao's step without a compiler."""
    with torch.compiler.set_stance("force_eager"):
        yield


def saved(arm: str, folder: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Stop a run after five steps; return its checkpoint, what that holds, and the end of the run resumed from it."""
    settings = config(arm)
    play(settings, folder / "a", stop=5)
    path = folder / "a" / "step-00000005.pt"
    found = find_checkpoint(str(path), folder)
    assert found is not None
    state = copy.deepcopy(found.state)
    return path, state, play(settings, folder / "b", path=path)


def attempt(done: str, what: Callable[[], Any]) -> Any:
    """Return what comes of a mutated checkpoint; None where it is refused as bad input, in one line."""
    error = None
    try:
        return what()
    except AmpCompareError as refusal:
        error = refusal
    except Exception as fault:
        raise AssertionError(f"{done}: {type(fault).__name__}: {fault}") from fault
    assert error.exit_code == 2, (done, error)
    assert 0 < len(str(error)) < 2500, done
    assert "\n" not in str(error), done
    return None


@pytest.mark.parametrize(
    "change, fault",
    [
        (lambda group: group.pop("dampening"), "param_groups.0.dampening of the checkpoint is missing"),
        (lambda group: group.update(fused=torch.zeros(0)), "param_groups.0.fused is a tensor"),
    ],
)
def test_settings_of_an_optimizer_that_are_missing_or_tensors_are_refused(
    change: Callable[[dict[str, Any]], Any], fault: str, tmp_path: Path
) -> None:
    """A checkpoint of this torch whose optimizer lacks a setting, or has a tensor for one, is refused by its name."""
    arm = "apex:O3,engine=compat,loss_scale=128"
    settings = config(arm)
    play(settings, tmp_path / "a", stop=5)
    path = tmp_path / "a" / "step-00000005.pt"
    found = find_checkpoint(str(path), tmp_path)
    assert found is not None
    state = {key: value for key, value in found.state.items() if key != "schema"}
    change(state["optimizer"]["param_groups"][0])
    write_checkpoint(path, state)
    with pytest.raises(CheckpointError, match=fault):
        play(settings, tmp_path / "b", path=path)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ARMS)
def test_a_mutated_checkpoint_is_refused_or_resumed_as_it_was(arm: str, tmp_path: Path) -> None:
    """No entry that is deleted, retyped, reshaped, swapped or shared is an internal error, or loaded unseen."""
    if arm == FEW_BITS:
        pytest.importorskip("torchao")
    settings = config(arm)
    _, state, right = saved(arm, tmp_path)
    ends: Counter[str] = Counter()
    unlike = []
    for number in range(MUTATIONS):
        chance = random.Random(f"{arm} {number}")
        mutated = copy.deepcopy(state)
        done = mutate(mutated, chance)
        path = tmp_path / "mutated.pt"
        try:
            write_checkpoint(path, {key: value for key, value in mutated.items() if key != "schema"})
        except CheckpointError:
            ends["not written"] += 1
            continue
        end = attempt(done, lambda path=path: play(settings, tmp_path / "c", path=path))
        ends["refused"] += end is None
        if end is not None:
            difference = first_difference(right, end, apart=APART)
            ends["changed" if difference else "the same"] += 1
            unlike += [f"{done}: {difference}"] if difference else []
    print(dict(ends), *unlike, sep="\n")
    assert ends["refused"] > MUTATIONS // 3
    # what no other entry tells of is what it says: an order, a value inside of a tensor or of a generator
    assert set(ends) <= {"refused", "the same", "changed", "not written"}
    assert ends["changed"] <= MUTATIONS // 6, unlike


@pytest.mark.slow
def test_a_mutated_checkpoint_is_converted_or_refused(tmp_path: Path) -> None:
    """Inspecting, converting, and going on with another arm end in one line, whatever an entry was changed to."""
    arm, path, out, ends = "apex:O2,engine=compat", tmp_path / "mutated.pt", tmp_path / "out.pt", Counter[bool]()
    _, state, _ = saved(arm, tmp_path)
    into = config("native:fp16", saving={"resume_into_other_arm": True}, recipe=config(arm).recipe.model_dump())
    for number in range(2 * MUTATIONS):
        chance = random.Random(f"convert {number}")
        mutated = copy.deepcopy(state)
        done = mutate(mutated, chance)
        try:
            write_checkpoint(path, {key: value for key, value in mutated.items() if key != "schema"})
        except CheckpointError:
            continue
        attempts: list[Callable[[], Any]] = [
            lambda: inspection_lines(inspect_file(path)),
            lambda: convert_file(path, out, "native"),
            lambda: convert_file(path, out, "apex", legacy_layout=True),
            lambda: load_ours(path),
        ]
        if number % 4 == 0:
            attempts.append(lambda: play(into, tmp_path / "c", path=path))
        for what in attempts:
            ends[attempt(done, what) is None] += 1
    assert min(ends[True], ends[False]) > MUTATIONS // 2
