"""The command line called in this process, with one process server for all cells of recipes, and one for scripts."""

import json
import os
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ampcompare.base.processes.client import ProcessServer
from ampcompare.cli import main
from ampcompare.experiment.launch.forked import ForkedLauncher
from ampcompare.experiment.launch.script import launcher as script_launcher

# A user's module: factories that fail, and a model that fails on float16 inputs only.
MODULE = """
import torch


def broken(num_classes):
    raise RuntimeError("no weights\\nat all")


class Picky(torch.nn.Module):
    def __init__(self, num_classes, sample_shape):
        super().__init__()
        self.layer = torch.nn.Linear(sample_shape[0] * sample_shape[1] * sample_shape[2], num_classes)

    def forward(self, x):
        if x.dtype == torch.float16:
            raise RuntimeError("no float16, please")
        return self.layer(x.flatten(1))
"""
TINY = [
    *("--data", "synthetic", "--train-size", "64", "--val-size", "32", "--image-size", "8"),
    *("--epochs", "1", "--batch-size", "16", "--device", "cpu"),
]


@dataclass(frozen=True)
class Done:
    """What a call of the command line left."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """Lines on stderr."""
        return self.err.splitlines()

    def json(self) -> Any:
        """The one document on stdout; anything beside it, and NaN, is an error."""
        return json.loads(self.out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


@pytest.fixture(scope="session")
def shared_launcher(
    tmp_path_factory: pytest.TempPathFactory, forking: types.SimpleNamespace
) -> Iterator[tuple[ForkedLauncher, Path]]:
    """A launcher, and the folder with a user's module in which its server was started."""
    folder, before = tmp_path_factory.mktemp("here"), Path.cwd()
    (folder / "mymod.py").write_text(MODULE)
    os.chdir(folder)
    try:
        with ForkedLauncher() as launcher:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("ampcompare.base.processes.client.subprocess", forking)
                launcher._ensure_server()
            os.chdir(before)
            yield launcher, folder
    finally:
        os.chdir(before)


@pytest.fixture(scope="session")
def script_server(forking: types.SimpleNamespace) -> Iterator[ProcessServer]:
    """A process server for cells of scripts, which forks one after the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ampcompare.base.processes.client.subprocess", forking)
        server = ProcessServer(
            script_launcher.ScriptLauncher.loaded,
            {"PYTHONHASHSEED": "0", **os.environ},
            script_launcher.OPTIONS,
        )
    yield server
    server.close()


@pytest.fixture
def here(shared_launcher: tuple[ForkedLauncher, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: a user's, with their module in it."""
    monkeypatch.chdir(shared_launcher[1])
    return shared_launcher[1]


Call = Callable[..., Done]


@pytest.fixture
def call(
    shared_launcher: tuple[ForkedLauncher, Path],
    here: Path,
    script_server: ProcessServer,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    forked_children: None,
    forked_ranks: None,
    forked_servers: None,
) -> Call:
    """Call the command line with some words, and return exit code, stdout and stderr; what it starts is forked."""

    class Shared(ForkedLauncher):
        launch = shared_launcher[0].launch  # type: ignore[assignment]

    monkeypatch.setattr("ampcompare.experiment.launch.forked.ForkedLauncher", Shared)
    monkeypatch.setattr(
        script_launcher.ScriptLauncher, "_ensure_server", lambda self, environment: script_server
    )

    def invoke(*words: str, tiny: bool = False) -> Done:
        capfd.readouterr()
        code = main([*words, *(TINY if tiny else [])])
        return Done(code, *capfd.readouterr())

    return invoke
