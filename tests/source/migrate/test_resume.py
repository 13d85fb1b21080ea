"""What `migrate --write` loads, with files of Apex and with those that `convert --to native` makes of them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ampcompare import convert_checkpoint
from ampcompare.source.migrate.rewrite import migrate_text

SCRIPT = """import torch
from apex import amp

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
checkpoint = torch.load(path)
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
amp.load_state_dict(checkpoint["KEY"])
saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "KEY": amp.state_dict(), "epoch": 3}
"""


@pytest.mark.integration  # a pickle is first read in a child process
@pytest.mark.parametrize("key", ["amp", "scaler", "my_state"])
def test_a_rewritten_script_resumes_from_a_file_of_apex_and_from_what_convert_makes_of_it(
    tmp_path: Path, key: str
) -> None:
    """Under the script's own key, and it saves under that key too."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 7}}
    old, new = tmp_path / "old.pt", tmp_path / "new.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), key: state, "epoch": 2}, old)
    convert_checkpoint(old, new, to="native")
    text = migrate_text(SCRIPT.replace("KEY", key)).text.replace('"cuda"', '"cpu"')
    for path in (old, new):
        names: dict[str, Any] = {"path": path}
        exec(text, names)
        assert torch.equal(names["model"].weight, model.weight)
        assert names["scaler"].get_scale() == 1024.0
        assert names["saved"][key]["_growth_tracker"] == 7
