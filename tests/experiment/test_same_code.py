"""A comparison ends where its code changes."""

from pathlib import Path
from typing import Any

import pytest

from ampcompare.base.environment.fingerprint import fingerprint
from ampcompare.base.errors import ConfigError
from ampcompare.base.files.loaded_code import digest_of
from ampcompare.experiment.launch.contract import Launcher
from ampcompare.experiment.run_directory import RunDirectory
from ampcompare.experiment.run_plan import run_plan
from ampcompare.results.records.document import sealed_json
from ampcompare.results.records.run import RunRecord
from ampcompare.settings.config import RunConfig
from ampcompare.settings.script import script_config
from tests.experiment.pretend import make_plan


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Cells of a script with a helper."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "helper.py"):
        (tmp_path / name).write_text("1\n")
    return RunConfig(script=script_config(["train.py"]))


class _Editor(Launcher):
    """Completes a cell, and changes `helper.py` while the second one runs."""

    cells = 0

    def launch(self, config: RunConfig, folder: Path, on_progress: Any = None) -> RunRecord:
        _Editor.cells += 1
        code = {"helper.py": str(digest_of("helper.py"))}
        if _Editor.cells == 2:
            Path("helper.py").write_text("2\n")
        facts = {"environment": fingerprint(), "status": "completed", "config": config, "code": code}
        record = RunRecord(cell=config.digest(), arm=config.arm, **facts)
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(sealed_json(record))
        return record


def test_a_matrix_whose_code_changes_ends(config: RunConfig, tmp_path: Path) -> None:
    """No third cell starts; the next call trains those of the earlier code again, and says why."""
    plan = make_plan(config, ["fp32", "native:bf16"], [0, 1])
    with pytest.raises(ConfigError, match=r"helper\.py is changed since an earlier cell loaded it"):
        run_plan(plan, tmp_path / "run", _Editor())
    assert _Editor.cells == 2
    reasons = [RunDirectory(tmp_path / "run").reusable(cell).reason for cell in plan.cells]
    assert sorted(reasons) == ["", "", *["helper.py changed since"] * 2]
