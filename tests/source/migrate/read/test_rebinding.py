"""Names of Apex that a script binds to something else where no statement of the module says so."""

from pathlib import Path

import pytest

from ampcompare.source.migrate.adapter.choice import choose_rewrite_or_adapter
from ampcompare.source.migrate.adapter.imports import adapt_text
from ampcompare.source.migrate.rewrite import migrate_text

TRAIN = """\
import sys
from unittest import mock

import mine
import torch
from apex import amp
{0}

def train():
    model = torch.nn.Linear(8, 2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    for step in range(4):
        loss = model(torch.ones(4, 8, device="cuda")).float().pow(2).mean()
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()


if __name__ == "__main__":
    {1}
    train()
"""
REBINDING = {
    "global, a value": ("def off():\n    global amp\n    amp = mine.Fake()", "off()"),
    "global, a loop": ("def off():\n    global amp\n    for amp in [mine]:\n        pass", "off()"),
    "global, with": ("def off():\n    global amp\n    with mine.fake() as amp:\n        pass", "off()"),
    "global, an import": ("def off():\n    global amp\n    from mine import amp", "off()"),
    "global, a class": ("def off():\n    global amp\n    class amp:\n        pass", "off()"),
    "globals": ("", "globals()['amp'] = mine.Fake()"),
    "globals, deleted": ("", "del globals()['amp']"),
    "globals, in a function": ("def off():\n    globals()['amp'] = None", "off()"),
    "update by name": ("", "globals().update(amp=mine.Fake())"),
    "update by a dict": ("", "globals().update({'amp': mine.Fake()})"),
    "setdefault": ("", "globals().pop('amp')"),
    "vars": ("", "vars()['amp'] = mine.Fake()"),
    "locals": ("", "locals()['amp'] = mine.Fake()"),
    "setattr": ("", "setattr(sys.modules[__name__], 'amp', mine.Fake())"),
    "an attribute": ("", "sys.modules[__name__].amp = mine.Fake()"),
    "an attribute of a name": ("this = sys.modules['__main__']", "this.amp = mine.Fake()"),
    "the table of a module": ("", "sys.modules[__name__].__dict__['amp'] = mine.Fake()"),
    "vars of a module": ("", "vars(sys.modules[__name__])['amp'] = mine.Fake()"),
    "a patch": ("", "mock.patch.object(sys.modules[__name__], 'amp').start()"),
}
KEEPING = {
    "another name": ("", "globals()['seed'] = 1"),
    "a value that is read": ("", "print(globals()['amp'], vars(mine))"),
    "vars of a function": ("def off():\n    vars()['amp'] = 1", "off()"),
    "another module": ("", "setattr(mine, 'amp', 1)"),
    "a global of its own": ("def off():\n    global seed\n    seed = 1", "off()"),
    "Apex or nothing": (
        "def load():\n    global amp\n    try:\n        from apex import amp\n    except ImportError: amp = None",
        "load()",
    ),
}


def _lines(folder: Path, top: str, main: str) -> list[str]:
    (folder / "train.py").write_text(TRAIN.format(top, main))
    (folder / "mine.py").write_text("")
    choice = choose_rewrite_or_adapter([folder / "train.py"], rewritten="all")
    lines = [line for each in choice.files for line in each.lines()]
    # What keeps it from being ordinary is said by other rules.
    return [line for line in lines if "the text does not prove this right" not in line]


@pytest.mark.parametrize("case", REBINDING)
def test_a_name_that_is_bound_to_something_else_leaves_the_file(tmp_path: Path, case: str) -> None:
    (line,) = _lines(tmp_path, *REBINDING[case])
    assert "by hand: amp is bound to something else here" in line


@pytest.mark.parametrize("case", KEEPING)
def test_what_binds_no_name_of_apex_stays(tmp_path: Path, case: str) -> None:
    assert not [line for line in _lines(tmp_path, *KEEPING[case]) if "bound" in line or "binds" in line]


@pytest.mark.parametrize(
    "main",
    [
        "globals().update(vars(mine))",
        "for key in vars(mine): globals()[key] = 1",
        "globals().update({**vars(mine)})",
    ],
)
def test_names_that_are_not_seen_have_a_note(tmp_path: Path, main: str) -> None:
    (line,) = _lines(tmp_path, "", main)
    assert "note: this binds names of the module that are not seen" in line


TAKEN = {
    "sys.modules": "sys.modules['apex.amp'].initialize(mine.model)",
    "get": "getattr(sys.modules.get('apex').amp, 'initialize')(mine.model)",
    "an import": "mine.run(__import__('apex').amp)",
}


@pytest.mark.parametrize("line", TAKEN.values(), ids=TAKEN)
def test_apex_that_is_taken_by_a_text_leaves_the_file(tmp_path: Path, line: str) -> None:
    (said,) = _lines(tmp_path, "", line)
    assert "by hand: this is apex" in said
    assert "by a text" in said


ONLY_BY_TEXT = """\
import sys

import torch
from apex import amp

apex_amp = sys.modules["apex.amp"]
scale = getattr(apex_amp, "scale_loss")
model = torch.nn.Linear(8, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = apex_amp.initialize(model, optimizer, opt_level="O1")
with scale(model(torch.ones(4, 8, device="cuda")).float().pow(2).mean(), optimizer) as scaled_loss:
    scaled_loss.backward()
optimizer.step()
"""


def test_an_import_for_a_core_taken_by_a_text_stays(tmp_path: Path) -> None:
    """By hand under `--rewrite`, where another file without the import is as well; the adapter has both."""
    path = tmp_path / "train.py"
    path.write_text(ONLY_BY_TEXT)
    (of_rewrite,) = choose_rewrite_or_adapter([path], rewritten="all").files
    assert of_rewrite.num_lines_by_hand == 1
    assert migrate_text(ONLY_BY_TEXT).whole is False
    (said,) = migrate_text(ONLY_BY_TEXT.replace("from apex import amp\n", "")).left_by_hand
    assert said.line == 5
    adapted = adapt_text(ONLY_BY_TEXT).text
    assert 'sys.modules["torch_amp_adapter"]' in adapted
    assert "import torch_amp_adapter as amp" in adapted


def test_a_question_for_loaded_apex_is_no_use(tmp_path: Path) -> None:
    lines = _lines(tmp_path, "", "print('yes' if sys.modules.get('apex') is not None else 'no')")
    assert not [each for each in lines if "by a text" in each]


def test_another_module_in_the_place_of_apex_leaves_the_file(tmp_path: Path) -> None:
    (line,) = _lines(tmp_path, "", "sys.modules['apex.amp'] = mine")
    assert "by hand: this puts another module in the place of Apex" in line


@pytest.mark.parametrize("line", ["setattr(train, 'amp', None)", "mock.patch.object(train, 'amp')"])
def test_a_name_that_another_file_binds_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "run.py").write_text(f"from unittest import mock\nimport train\n{line}\ntrain.train()\n")
    (tmp_path / "pyproject.toml").write_text("")
    said = _lines(tmp_path, "", "pass")
    assert any("by hand: run.py has amp from here" in each for each in said)
