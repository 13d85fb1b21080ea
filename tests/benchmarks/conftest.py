"""The check of a GPU, called in this process; its cells share the process server of one launcher."""

import importlib
import json
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkContext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ampcompare.experiment.launch.forked import ForkedLauncher
from benchmarks.gpu.__main__ import main


@dataclass(frozen=True)
class Checked:
    """What a call of the check left: exit code, standard output, and the JSON of the part by name."""

    code: int
    out: str
    parts: dict[str, Any]


class Forks(ForkContext):
    """Forks children from this process, which has torch loaded, instead of a server."""

    def set_forkserver_preload(self, module_names: list[str]) -> None:
        """Load here what the server would, for all children."""
        for name in module_names:
            importlib.import_module(name)


@pytest.fixture(scope="module")
def shared_launcher(forking: types.SimpleNamespace) -> Iterator[ForkedLauncher]:
    with ForkedLauncher() as launcher, pytest.MonkeyPatch.context() as patch:
        patch.setattr("ampcompare.base.processes.client.subprocess", forking)
        launcher._ensure_server()
        yield launcher


@pytest.fixture
def rehearse(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shared_launcher: ForkedLauncher,
    forked_children: None,
    forked_ranks: None,
    forked_servers: None,
) -> Callable[..., Checked]:
    """Rehearse a part with further words for the command line."""

    class Shared(ForkedLauncher):
        launch = shared_launcher.launch  # type: ignore[assignment]

    monkeypatch.setattr("ampcompare.experiment.launch.forked.ForkedLauncher", Shared)
    if request.node.get_closest_marker("extended") is None:  # a server of its own imports torch once more
        forks = types.SimpleNamespace(get_context=lambda method: Forks())
        monkeypatch.setattr("benchmarks.gpu.context.multiprocessing", forks)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def call(part: str, *words: str) -> Checked:
        done = CliRunner().invoke(main, ["--rehearse", "--part", part, "--out", str(tmp_path), *words])
        found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
        return Checked(done.exit_code, done.stdout, found)

    return call
