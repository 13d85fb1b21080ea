"""Runs that stop at a random step and go on from a checkpoint: the rest is that of the unbroken run to the last bit."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ampcompare.apex.amp import _amp_state
from ampcompare.base.errors import CheckpointError, EnvironmentUnfit
from ampcompare.base.tensors.tree import first_difference_text
from ampcompare.checkpoints.convert.between_arms import convert_state_to_arm
from ampcompare.checkpoints.convert.inspect import inspect_file
from ampcompare.checkpoints.store.file import write_checkpoint
from ampcompare.results.records.evaluation import EpochResult
from ampcompare.results.records.step import StepRecord
from ampcompare.settings.config import RunConfig
from ampcompare.tasks.task import make_task
from ampcompare.training.assemble import assemble_run
from ampcompare.training.checkpoint.flattened import is_flattened
from ampcompare.training.checkpoint.resume import find_checkpoint, state_to_resume_and_resumption
from ampcompare.training.checkpoint.saver import CheckpointSaver
from ampcompare.training.precision.base import make_precision, owned_params
from ampcompare.training.precision.cpu_half import choose_cpu_half_mode_and_context
from ampcompare.training.run_summary import RunMetrics
from ampcompare.training.session import TrainingSession
from ampcompare.training.stop_request import StopRequest

pytestmark = pytest.mark.integration

APART = ("seconds", "data_seconds", "train_seconds", "eval_seconds", "resumed")
CPU = torch.device("cpu")
MOVING = (
    "apex:O1,engine=compat",
    "apex:O2,engine=compat",
    "apex:O4,engine=compat,loss_scale=dynamic",
    "apex:O5,engine=compat,loss_scale=dynamic",
    "native:fp16,init_scale=16777216,growth_interval=2",
)
ARMS = [
    "fp32",
    "apex:O1,engine=compat",
    "apex:O2,engine=compat",
    "apex:O3,engine=compat",
    "apex:O4,engine=compat,loss_scale=dynamic",
    "apex:O5,engine=compat,loss_scale=dynamic",
    "apex:O2,engine=compat,loss_scale=128",
    "native:fp16,init_scale=16777216,growth_interval=2",
    "native:bf16",
    "half:loss_scale=128",
    "half:bf16,rounding=stochastic,state=fp32,reduce=fp32",
    "half:bf16,kahan,state=fp32,keep_fp32=BatchNorm2d",
    "half:bf16,masters=fp32,state=bf16,grads=fp32",
    "native:bf16,weights=bf16,masters=fp32,state=bf16,grads=fp32",
    "half:masters=fp32,dynamic,init_scale=16777216,growth_interval=2",
]


OF_FAST_SUITE = (  # each way of holding weights, and each kind of loss scale
    "apex:O1,engine=compat",
    "apex:O2,engine=compat",
    "native:fp16,init_scale=16777216,growth_interval=2",
    "half:loss_scale=128",
    "half:bf16,rounding=stochastic,state=fp32,reduce=fp32",
    "half:bf16,masters=fp32,state=bf16,grads=fp32",
)


class Small(nn.Sequential):
    """One layer of each kind that arms treat unlike."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.flat, self.head = nn.Flatten(), nn.Linear(144, num_classes)


def config(arm: str = "fp32", **options: Any) -> RunConfig:
    """A run of 8 steps with everything that has a state: accumulation, clipping, EMA, momentum, a schedule."""
    recipe: dict[str, Any] = {"data": {"train_size": 64, "val_size": 32, "image_size": 8}}
    recipe |= {"model": {"arch": f"{__name__}:Small"}, "epochs": 2, "batch_size": 16}
    recipe |= {"grad_accum_steps": 2, "clip_grad": 0.5, "ema_decay": 0.9, **options.pop("recipe", {})}
    return RunConfig.model_validate({"arm": arm, "recipe": recipe, "drain_every": 1, **options})


# Two steps of each epoch: a stop is in the middle of one, or between them.
SHORT = {"data": {"train_size": 32, "val_size": 16, "image_size": 8}}
WIDE = {**SHORT, "model": {"arch": "mlp", "args": {"width": 64}}}  # enough weights for moments in 8 bits


def noisy(model: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    """Draw from every global generator at each forward pass, as dropout and users' own models do."""
    return (args[0] + 0.1 * torch.rand(args[0].shape) * random.random() * np.random.random(),)


class Played:
    """A session played to its end, or to where it was told to stop, in files of its own."""

    def __init__(
        self, settings: RunConfig, folder: Path, *, stop: int | None = None, resume: bool = False
    ) -> None:
        state, resumption = None, None
        if resume:
            found = find_checkpoint("auto", folder)
            assert found is not None
            state, resumption = state_to_resume_and_resumption(found, settings, 1)
        precision = make_precision(settings.arm)
        task = make_task(settings.recipe)
        assembly = assemble_run(settings.recipe, task, precision, CPU, state=state)
        assembly.replicas[0].register_forward_pre_hook(noisy, prepend=True)  # type: ignore[arg-type]
        self.zeroed = [
            [param.grad is not None for param in owned_params(each)] for each in assembly.optimizers
        ]
        if precision.key == "amp":  # a scale that changes while the run goes on
            for scaler in precision._scalers:  # type: ignore[attr-defined]
                scaler._scale_seq_len = 2
                if state is None and scaler.dynamic:
                    # In fp16 it overflows, in bf16 it grows.
                    scaler._loss_scale = 2.0**8 if precision.half_dtype is torch.bfloat16 else 2.0**24
        self.notes: list[str] = []
        with CheckpointSaver(folder, settings.saving, self.notes.append) as saver:
            self.session = TrainingSession(settings, assembly, saver=saver, stop=StopRequest(stop))
            self.tally = RunMetrics(settings.warmup_steps, settings.recipe.batch_size)
            self.session.stateful["tally"] = self.tally
            if state is not None and resumption is not None:
                self.session.load_state_dict(state, resumption)
            self.steps: list[StepRecord] = []
            _, context = choose_cpu_half_mode_and_context(settings.cpu_half, precision.half_dtype, CPU)
            with context:
                for event in self.session.train_and_yield_events():
                    if isinstance(event, EpochResult):
                        self.tally.add_epoch(event)
                    else:
                        self.tally.add_steps(event)
                        self.steps += event
        self.end = self.session.state_dict()
        _amp_state.close()


def untimed(steps: list[StepRecord]) -> list[StepRecord]:
    return [step._replace(seconds=0.0, data_seconds=0.0) for step in steps]


def saving_at(settings: RunConfig, step: int) -> RunConfig:
    """Return settings of a run that saves after so many updates, and goes on."""
    saving = settings.saving.model_copy(update={"every_steps": step, "keep_last": 9})
    return settings.model_copy(update={"saving": saving})


def checkpoint_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08}.pt"


def unbroken_and_rest(settings: RunConfig, folder: Path, step: int = 3) -> tuple[Played, Played]:
    """Play a run that saves after some updates, and what comes after that checkpoint: it must be the same."""
    unbroken = Played(saving_at(settings, step), folder / "a")
    (folder / "b").mkdir()
    shutil.copy(checkpoint_of(folder / "a", step), folder / "b")
    second = Played(settings, folder / "b", resume=True)
    assert [resumption.step for resumption in second.session.resumed] == [step]
    assert len(second.steps) == len(unbroken.steps) - step > 0
    assert repr(untimed(second.steps)) == repr(untimed(unbroken.steps[step:]))
    assert first_difference_text(unbroken.end, second.end, ignored_keys=APART) == ""
    return unbroken, second


@pytest.mark.parametrize(
    "arm", [pytest.param(arm, marks=() if arm in OF_FAST_SUITE else pytest.mark.slow) for arm in ARMS]
)
def test_the_rest_of_a_resumed_run_is_bitwise_that_of_the_unbroken_one(arm: str, tmp_path: Path) -> None:
    """Losses, scales, norms, weights, optimizers, averages, generators and results agree after a stop at any step."""
    unbroken, _ = unbroken_and_rest(config(arm, recipe=SHORT), tmp_path, random.Random(arm).randrange(1, 4))
    if arm in MOVING:
        assert len({step.loss_scales for step in unbroken.steps}) > 1


@pytest.mark.parametrize("on_nan", [pytest.param("skip", marks=pytest.mark.slow), "rollback"])
def test_policies_go_on_where_they_were(on_nan: str, tmp_path: Path) -> None:
    """Dropped updates, returns to a good state and patience are those of the unbroken run, to the last bit."""
    recipe = {"early_stop": 1, "epochs": 4, "optimizer": {"lr": 1e-30}}
    options = {"on_nan": on_nan, "rollback_every": 1, "max_skipped": 3, "recipe": recipe}
    unbroken = Played(config(**options), tmp_path / "a")
    assert (len(unbroken.tally.epochs), unbroken.session.why_ended_early is not None) == (2, True)
    for stop in (5, 7):
        first = Played(config(**options), tmp_path / f"{stop}", stop=stop)
        second = Played(config(**options), tmp_path / f"{stop}", resume=True)
        assert repr(untimed(first.steps + second.steps)) == repr(untimed(unbroken.steps))
        assert second.session.why_ended_early == unbroken.session.why_ended_early
        assert first_difference_text(unbroken.end, second.end, ignored_keys=APART) == ""


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Run torchao's step without a compiler, which it waits for half a minute otherwise."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("arm", "name"),
    [
        pytest.param("fp32", "AdamFp8", marks=pytest.mark.slow),
        pytest.param("apex:O4,engine=compat,cast_model_outputs=float32", "AdamW8bit", marks=pytest.mark.slow),
        pytest.param("half:bf16", "AdamW4bit", marks=pytest.mark.slow),
        pytest.param("half:bf16,rounding=stochastic,state=fp32", "AdamW8bit", marks=pytest.mark.slow),
    ],
)
def test_optimizer_state_in_a_few_bits_resumes_to_the_last_bit(arm: str, name: str, tmp_path: Path) -> None:
    """Codes, scales and tables of torchao's moments are saved as plain tensors, and become its own class again."""
    pytest.importorskip("torchao")
    optimizer = {"name": f"torchao.optim:{name}", "lr": 1e-2, "args": {"block_size": 128}}
    settings = config(arm, recipe={**WIDE, "optimizer": optimizer}, cpu_half="native")
    unbroken, _ = unbroken_and_rest(settings, tmp_path)
    assert unbroken.end is not None
    values = [value for entry in unbroken.end["optimizer"]["state"].values() for value in entry.values()]
    assert sum(map(is_flattened, values)) >= 4


@pytest.mark.usefixtures("uncompiled")
def test_moments_in_8_bits_are_converted_with_the_weights(tmp_path: Path) -> None:
    """Another arm resumes with the same codes."""
    pytest.importorskip("torchao")
    optimizer = {"name": "torchao.optim:AdamW8bit", "lr": 1e-2}
    recipe = {**WIDE, "optimizer": optimizer}
    first = Played(config("fp32", recipe=recipe), tmp_path / "a", stop=3)
    conversion = convert_state_to_arm({"schema": 1, **(first.end or {})}, "apex:O5,engine=compat")
    write_checkpoint(checkpoint_of(tmp_path, 3), conversion.state)
    second = Played(config("apex:O5,engine=compat", recipe=recipe), tmp_path, resume=True)
    assert [step.step for step in second.steps] == [3]
    inspection = inspect_file(checkpoint_of(tmp_path, 3))
    (row,) = [row for row in inspection.rows if row["kind"] == "optimizer"]
    assert set(row["dtypes"]) == {"uint8", "float32"}


def test_gradients_that_were_zeros_are_zeros_again(tmp_path: Path) -> None:
    """Apex zeroes gradients of fp32 parameters under O2 where torch drops them; the sign of a zero hangs on it."""
    settings = config("apex:O2,engine=compat", recipe=SHORT)
    assert not any(Played(settings, tmp_path, stop=2).zeroed[0])
    (zeroed,) = Played(settings, tmp_path, stop=3, resume=True).zeroed
    assert True in zeroed
    assert False in zeroed


@pytest.mark.parametrize(
    ("arm", "other"),
    [
        ("fp32", "apex:O2,engine=compat"),
        ("apex:O2,engine=compat", "native:fp16"),
        ("native:fp16", "apex:O1,engine=compat"),
        pytest.param("half", "fp32", marks=pytest.mark.slow),
        pytest.param("apex:O3,engine=compat", "native:bf16", marks=pytest.mark.slow),
    ],
)
def test_another_arm_goes_on_where_that_is_asked_for(arm: str, other: str, tmp_path: Path) -> None:
    """The next losses are those of the arm that stopped, up to rounding, and the record says what was converted."""
    recipe = {**SHORT, "optimizer": {"name": "adamw", "lr": 1e-3, "eps": 1e-4}}
    unbroken = Played(saving_at(config(arm, recipe=recipe), 2), tmp_path / "a")
    (tmp_path / "b").mkdir()
    shutil.copy(checkpoint_of(tmp_path / "a", 2), tmp_path / "b")
    with pytest.raises(CheckpointError, match=r"resume with --arm .*, or add --convert-on-resume"):
        Played(config(other, recipe=recipe), tmp_path / "b", resume=True)
    settings = config(other, recipe=recipe, saving={"resume_into_other_arm": True})
    second = Played(settings, tmp_path / "b", resume=True)
    assert [step.step for step in second.steps] == [2, 3]
    losses, others = ([step.loss for step in steps] for steps in (second.steps, unbroken.steps[2:]))
    assert losses == pytest.approx(others, rel=2e-2)
    assert second.session.resumed[0].arm == config(arm).arm
    assert f"converted from {config(arm).arm}" in second.session.resumed[0].notes


def test_another_machine_is_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what else is not as it was; times of such a run are not compared."""
    Played(saving_at(config("fp32", recipe=SHORT), 2), tmp_path / "a")
    (tmp_path / "b").mkdir()
    shutil.copy(checkpoint_of(tmp_path / "a", 2), tmp_path / "b")
    monkeypatch.setattr("ampcompare.training.checkpoint.resume.host_name", lambda: "elsewhere")
    (resumption,) = Played(config("fp32", recipe=SHORT), tmp_path / "b", resume=True).session.resumed
    assert (
        resumption.machine
        == [note for note in resumption.notes if note.endswith("then, elsewhere now")]
        != []
    )


def test_an_arm_that_never_scales_shows_no_loss_scale(tmp_path: Path) -> None:
    """Resumed from an arm with a scale, in memory or from a converted file, a bf16 run reports none."""
    other = config("native:bf16", recipe=SHORT, saving={"resume_into_other_arm": True})
    first = Played(config("apex:O2,engine=compat", recipe=SHORT), tmp_path / "a", stop=3)
    assert first.tally.final_loss_scale is not None
    second = Played(other, tmp_path / "a", resume=True)
    assert second.tally.final_loss_scale is None
    conversion = convert_state_to_arm({"schema": 1, **(first.end or {})}, "native:bf16")
    assert conversion.state["parts"]["tally"]["final_loss_scale"] is None
    write_checkpoint(checkpoint_of(tmp_path / "b", 3), conversion.state)
    assert (
        Played(config("native:bf16", recipe=SHORT), tmp_path / "b", resume=True).tally.final_loss_scale
        is None
    )


def test_a_run_with_compensation_is_resumed_without(tmp_path: Path) -> None:
    """What Kahan's summation keeps has no place in another arm: the conversion names the loss, and the arm trains."""
    arm = "apex:O5,engine=compat"
    first = Played(config("half:bf16,kahan", recipe=SHORT), tmp_path / "a", stop=3)
    conversion = convert_state_to_arm({"schema": 1, **(first.end or {})}, arm)
    assert any("compensation of" in line for line in conversion.lost)
    write_checkpoint(checkpoint_of(tmp_path / "b", 3), conversion.state)
    assert [step.step for step in Played(config(arm, recipe=SHORT), tmp_path / "b", resume=True).steps] == [3]


class Full:
    """A disk that refuses so many writes."""

    def __init__(self, refusals: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = refusals
        monkeypatch.setattr("ampcompare.checkpoints.store.folder.write_checkpoint", self.write)

    def write(self, path: Path, state: dict[str, Any]) -> None:
        if self.left:
            self.left -= 1
            raise EnvironmentUnfit(f"cannot write {path}: No space left on device")
        write_checkpoint(path, state)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_that_fails_is_tried_again_and_the_last_one_must_succeed(
    in_background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full for a while costs one checkpoint; one that stays full ends the run with what was seen."""
    saving = {"every_steps": 2, "in_background": in_background}
    disk = Full(2, monkeypatch)  # the first save, and the second try that is made at once
    played = Played(config(recipe=SHORT, saving=saving), tmp_path / "a")
    assert disk.left == 0
    assert played.notes[-1].endswith("No space left on device; the next save tries again")
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    # Step 2 ends an epoch, and was saved after the evaluation of it.
    assert names == ["best.pt", "step-00000002.pt", "step-00000004.pt"]
    Full(100, monkeypatch)
    with pytest.raises(EnvironmentUnfit, match="No space left on device"):
        Played(config(recipe=SHORT, saving=saving), tmp_path / "b")


def test_saving_changes_no_number(tmp_path: Path) -> None:
    """A run that saves after every step, in the background too, is that which never saves."""
    plain = Played(config("apex:O2,engine=compat", recipe=SHORT), tmp_path / "a")
    for saving in ({"every_steps": 1}, {"every_steps": 1, "in_background": True}):
        saved = Played(config("apex:O2,engine=compat", recipe=SHORT, saving=saving), tmp_path / "b")
        assert repr(untimed(saved.steps)) == repr(untimed(plain.steps))
        assert first_difference_text(plain.end, saved.end, ignored_keys=APART) == ""
        found = find_checkpoint("auto", tmp_path / "b")
        assert found is not None
        assert first_difference_text(plain.end, found.state, ignored_keys=(*APART, "schema")) == ""


@pytest.mark.parametrize(
    ("arm", "name"),
    [
        ("fp32", "fused_novograd"),
        ("apex:O2,engine=compat", "fused_adam"),
        ("apex:O2,engine=compat", "fused_sgd"),
        ("half:loss_scale=128", "fused_lamb"),
        ("half:loss_scale=128", "fused_adagrad"),
    ],
)
def test_every_optimizer_resumes_to_the_last_bit(arm: str, name: str, tmp_path: Path) -> None:
    """State that lies in a group, such as NovoGrad's norms, or in fp32 next to fp16 weights, is restored as well."""
    recipe = {**SHORT, "optimizer": {"name": name, "lr": 1e-3}, "ema_decay": None}
    unbroken_and_rest(config(arm, recipe=recipe), tmp_path)
