"""The Python interface: each function does what its command does, with the same options."""

import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

import ampcompare
from ampcompare.base.environment.fingerprint import environment_fingerprint
from ampcompare.base.errors import ConfigError, GateFailed, RecordError
from ampcompare.cli.compare_command import command, compare_options_from_parameters
from ampcompare.experiment.launch.cell_files import write_record
from ampcompare.experiment.launch.contract import Launcher
from ampcompare.experiment.run_options import CompareOptions, LaunchOptions, RunOptions
from ampcompare.experiment.single_run import RunOutcome
from ampcompare.results.records.evaluation import EpochResult
from ampcompare.results.records.run import RunRecord, RunSummary
from ampcompare.settings.config import RunConfig
from ampcompare.settings.recipe import OptimizerConfig, Recipe

TINY: dict[str, Any] = {
    "recipe": Recipe.model_validate(
        {
            "data": {"name": "synthetic", "train_size": 64, "val_size": 32, "image_size": 8},
            "model": {"arch": "mlp"},
            "epochs": 1,
            "batch_size": 16,
        }
    ),
    "device": "cpu",
}


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[CompareOptions]:
    """The options that `compare` passes on, with nothing run."""
    calls: list[CompareOptions] = []

    class Nothing:
        comparison = None

        def write_junit(self) -> None:
            pass

        def raise_if_gate_failed(self) -> None:
            pass

    def take(options: CompareOptions, observer: object = None) -> Nothing:
        calls.append(options)
        return Nothing()

    monkeypatch.setattr("ampcompare.api.comparison.run_comparison", take)
    return calls


def test_python_and_the_command_ask_for_the_same(compared: list[CompareOptions], tmp_path: Path) -> None:
    """Every option of the command has an argument, and both give equal `CompareOptions`, apart from origins."""
    words = [
        *("--arm", "fp32", "--arm", "half", "--seeds", "auto"),
        *("--margin", "1", "--time-margin", "3", "--tag", "a"),
        *("--loss-margin", "2"),
        *("--objective", "memory", "--budget", "90s", "--jobs", "2", "--sweep", "workers=0,1", "--force"),
        *("--gpus", "0,2"),
        *("--fail-on", "time>2x", "--baseline", "b.json", "--tensorboard", "tb", "--junit", "j.xml"),
        *("--recipe", "digits", "--lr", "0.1", "--slurm-option", "partition=gpu", "-o", "out"),
        *("--config", "c.yaml", "--timing-rounds", "4", "--looks", "2", "--reference", "half"),
        *("--twin", "--no-preflight", "--stack", "old=python3", "--first-weights", "old"),
    ]
    with command.make_context("compare", words) as context:
        by_command = compare_options_from_parameters(context.params)
    ampcompare.compare(
        ["fp32", "half"], seeds="auto", margin=1, time_margin=3, loss_margin=2, tag="a", objective="memory",
        budget="90s", jobs=2, gpus="0,2", sweep={"workers": [0, 1]}, force=True, fail_on="time>2x", baseline="b.json",
        tensorboard="tb", junit="j.xml", recipe="digits", slurm_options={"partition": "gpu"},
        output_dir="out", config_file="c.yaml", timing_rounds=4, looks=2, reference="half",
        twin=True, preflight=False, stacks={"old": "python3"}, first_weights="old",
        **{"recipe.optimizer.lr": 0.1},
    )  # fmt: skip
    (by_python,) = compared
    different = {name for name, value in vars(by_python).items() if vars(by_command)[name] != value}
    assert different <= {"settings"}
    assert (by_python.settings.recipe, by_python.settings.file) == ("digits", "c.yaml")
    unset = {name for name, value in vars(CompareOptions()).items() if vars(by_python)[name] == value}
    assert unset == {"observer"}


def test_options_stay_as_they_are_built() -> None:
    """What the command adds to options makes others of them."""
    built = CompareOptions(["fp32", "bf16"])
    changed = built.with_attributes(strict=True, command="ampcompare compare")
    assert (built.strict, built.command, changed.strict) == (False, "", True)
    assert (changed.arms, changed.command) == (built.arms, "ampcompare compare")
    with pytest.raises(FrozenInstanceError):
        built.arms = ()  # type: ignore[misc]


@pytest.mark.parametrize("kind", [CompareOptions, RunOptions])
def test_options_have_the_fields_that_they_declare(kind: type[CompareOptions | RunOptions]) -> None:
    """Each field is set, whatever is given, or has a default of its class; nothing else is."""
    declared = {field.name for field in fields(kind)}
    assert set(vars(kind())) == declared - {"strict", "command"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"arms": ["fp23"]}, "fp23"),
        ({"timing_rounds": -1}, "timing rounds are -1"),
        ({"seeds": "0-"}, "seeds '0-' cannot be read"),
        ({"jobs": 0}, "jobs is 0"),
        ({"sweep": {"colour": [1]}}, "'colour' is not a setting"),
        ({"objective": "beauty"}, "'beauty'"),
        ({"recipe": "digit"}, "did you mean 'digits'"),
        ({"recipe": Recipe(), "size": "small"}, "size 'small' is for a named recipe"),
        ({"epochs": 3}, "there is no setting 'epochs'"),
        ({"arm": "fp32"}, "a comparison needs a list of arms"),
        ({"launch": LaunchOptions(), "slurm_options": {"a": "b"}}, "give only one of them"),
        ({"slurm_options": {"partition": "gpu"}}, "needs --launcher slurm"),
    ],
)
def test_options_that_cannot_be_used(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    """A bad argument is a ConfigError that names it, before anything is written."""
    with pytest.raises(ConfigError, match=message):
        ampcompare.compare(**{"output_dir": tmp_path / "out", **arguments})
    assert not (tmp_path / "out").exists()


class Instant(Launcher):
    """Returns a completed record for each cell without training."""

    def launch(self, config: RunConfig, folder: Path, on_progress: object = None) -> RunRecord:
        epoch = EpochResult(
            epoch=0, samples=10, top1_correct=5, top5_correct=9, loss=1.0, train_seconds=1.0, eval_seconds=0.1
        )
        summary = RunSummary(metric_final=0.5, epochs=[epoch], num_steps=4, step_seconds_median=0.01)
        record = RunRecord(
            cell=config.digest(), arm=config.arm, status="completed", config=config,
            environment=environment_fingerprint(), summary=summary,
        )  # fmt: skip
        write_record(record, folder)
        return record


def test_a_comparison_writes_its_reports_and_checks_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`compare` leaves the files of the command, and raises with the results when an arm exceeds a limit."""
    monkeypatch.setattr(
        "ampcompare.experiment.launch.dispatch.dispatch.make_launcher", lambda config, **options: Instant()
    )
    folder = tmp_path / "out"
    comparison = ampcompare.compare(
        "fp32", seeds=[1], sweep={"workers": [0]}, output_dir=folder, tag="t", **TINY
    )
    assert comparison.seeds == [1]
    assert comparison.arms[0].arm == "fp32 workers=0"
    assert {"report.md", "report.csv", "report.json", "plan.json"} <= {path.name for path in folder.iterdir()}

    again: dict[str, Any] = {
        "seeds": [1],
        "sweep": {"workers": [0]},
        "output_dir": folder,
        "tag": "t",
        **TINY,
    }
    with pytest.raises(GateFailed, match="fp32 workers=0: diverged 0, and diverged<1 fails") as caught:
        ampcompare.compare("fp32", fail_on="diverged<1", junit=tmp_path / "j.xml", **again)
    assert caught.value.exit_code == 1
    assert caught.value.comparison == comparison
    assert 'failures="1"' in (tmp_path / "j.xml").read_text()


def test_run_takes_a_config_or_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A complete configuration, a recipe with settings, and a named recipe give what the command would train."""
    configs: list[RunConfig] = []

    def take(options: RunOptions, observer: object = None) -> RunOutcome:
        configs.append(options.config)
        record = RunRecord(cell="x", arm="fp32", status="failed", config=options.config)
        return RunOutcome(record, options.folder)

    monkeypatch.setattr("ampcompare.api.comparison.run_single", take)
    recipe = Recipe(optimizer=OptimizerConfig(lr_base=0.4), global_batch_size=128)
    ampcompare.run(RunConfig(recipe=recipe, arm="apex:O2"))
    ampcompare.run(recipe=recipe, arm="apex:O2")
    assert configs[0] == configs[1]
    assert configs[0].recipe.optimizer.lr == pytest.approx(0.2)
    ampcompare.run(recipe="articles/r18-leaves", size="small", device="cpu")
    assert (configs[2].arm, configs[2].device) == ("fp32", "cpu")
    with pytest.raises(ConfigError, match="both were given"):
        ampcompare.run(RunConfig(), arm="half")


def test_the_functions_are_not_shadowed_by_rooms() -> None:
    """Importing any submodule leaves every public function what it is, and the interface loads no torch."""
    code = (
        "import sys, ampcompare, ampcompare.diagnosis.explain, ampcompare.doctor.examine\n"
        "names = set(ampcompare.__all__) - {'__version__', 'Precision', 'StepOutcome', 'make_precision'}\n"
        "print(all(callable(getattr(ampcompare, name)) for name in names), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_diagnose_passes_a_script_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its words and ranks are those that the command line would pass."""
    script = tmp_path / "train.py"
    script.write_text("from apex import amp\namp.initialize\n")
    seen: list[Any] = []
    place = "ampcompare.experiment.diagnose.diagnose"
    monkeypatch.setattr(place, lambda options, loop, output_dir: seen.append(options))
    ampcompare.diagnose(
        script=[str(script), "--epochs", "{seed}"], processes=2, device="cpu", preflight=False
    )
    (options,) = seen
    assert options.config.script.command == [str(script), "--epochs", "{seed}"]
    assert options.config.processes == 2


def test_find_batch_searches_as_the_command_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arms, sizes and limits reach the search; a CPU without a limit is refused before anything runs."""
    calls: list[tuple[Any, ...]] = []
    place = "ampcompare.experiment.find_batch.find_largest_batches_on_free_gpu"
    with monkeypatch.context() as patch:
        patch.setattr(place, lambda search, gpus: calls.append((search, gpus)))
        ampcompare.find_batch(
            "O2,fp32", memory_limit=2, margin=10, gpus="2", device="cpu", **{"recipe.batch_size": 8}
        )
    ((search, gpus),) = calls
    assert [config.arm for config in search.configs] == ["apex:O2", "fp32"]
    assert {config.recipe.batch_size for config in search.configs} == {8}
    assert (search.memory_gib, search.margin, gpus) == (2, 0.1, "2")
    with pytest.raises(ConfigError, match="--memory-limit 4"):
        ampcompare.find_batch(["fp32"], device="cpu")


def test_export_a_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Event files lie in a folder of the run directory; what is no run directory, or no tracker, is refused."""
    monkeypatch.setattr(
        "ampcompare.experiment.launch.dispatch.dispatch.make_launcher", lambda config, **options: Instant()
    )
    folder = tmp_path / "out"
    ampcompare.compare("fp32", seeds=[1], output_dir=folder, **TINY)
    notes: list[str] = []
    assert ampcompare.export(folder, "tensorboard", note=notes.append) == str(folder / "tensorboard")
    assert (folder / "tensorboard").is_dir()
    with pytest.raises(RecordError, match="is not a run directory"):
        ampcompare.export(tmp_path / "none", "tensorboard")
    with pytest.raises(
        ConfigError, match="there is no tracker 'board'; give one of tensorboard, wandb, mlflow"
    ):
        ampcompare.export(folder, "board")  # type: ignore[arg-type]


def test_exec_a_script(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The script runs in a process of its own with ampcompare's engine as apex, and its exit code is returned."""
    script = tmp_path / "train.py"
    script.write_text("import apex, sys\nprint(apex.__name__, sys.argv[1:])\nsys.exit(7)\n")
    assert ampcompare.exec_script([str(script), "--epochs", "1"], guards="off") == 7
    assert "apex ['--epochs', '1']" in capfd.readouterr().out
    with pytest.raises(ConfigError, match="fp23"):
        ampcompare.exec_script([str(script)], arm="fp23")
    with pytest.raises(ConfigError, match="give a list"):
        ampcompare.exec_script("train.py")
    with pytest.raises(ConfigError, match="guards is 'on'; choose one of warn, strict, off"):
        ampcompare.exec_script([str(script)], guards="on")  # type: ignore[arg-type]


def test_resolve_a_configuration() -> None:
    """Settings have the values that `run` would use, and each that is no default its origin."""
    config, origins = ampcompare.resolve_config(arm="O2", recipe="digits", **{"recipe.optimizer.lr": 0.3})
    assert (config.arm, config.recipe.optimizer.lr) == ("apex:O2", 0.3)
    assert origins["recipe.optimizer.lr"] == "argument"
