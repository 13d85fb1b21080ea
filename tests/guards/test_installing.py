"""The guards come and go without a trace and speak once for each line; hooks on imports wait for a module."""

import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import ampcompare.guards
from ampcompare.apex import amp
from ampcompare.apex.amp._engine import device_skip
from ampcompare.base.import_hook import ImportHook
from ampcompare.base.location import Location, user_location
from ampcompare.guards import GuardWarning
from ampcompare.guards.checks.checkpoint import AmpStateUnsaved

WATCHED = [
    (torch, "save"),
    (torch.autograd, "backward"),
    (torch.optim.SGD, "step"),
    (torch.optim.Optimizer, "_patch_step_function"),
    (torch.amp.GradScaler, "scale"),
    (torch.amp.GradScaler, "step"),
    (torch.nn.utils, "clip_grad_norm_"),
    (torch.nn.utils.clip_grad, "clip_grad_norm_"),
    (nn.Module, "half"),
    (nn.DataParallel, "__init__"),
    (amp, "scale_loss"),
    (sys.modules["ampcompare.apex.amp.frontend"], "_initialize"),
]

TWICE = """
for x, y in batches:
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.step()  # here
"""


def test_everything_is_put_back() -> None:
    """Functions and methods are the same objects after the guards have gone, those of later optimizers too."""
    torch.optim.SGD(nn.Linear(1, 1).parameters())
    before = [vars(owner)[name] for owner, name in WATCHED]
    finders = list(sys.meta_path)
    with ampcompare.guards.install():
        assert all(vars(owner)[name] is not old for (owner, name), old in zip(WATCHED, before, strict=True))

        class Later(torch.optim.SGD):
            def step(self, closure=None):
                return super().step(closure)

        Later(nn.Linear(1, 1).parameters())
        assert Later.step.__wrapped__.hooked
    assert [vars(owner)[name] for owner, name in WATCHED] == before
    assert sys.meta_path == finders
    assert Later.step.__module__ == __name__


def test_what_was_wrapped_meanwhile_stays_and_is_silent(script, monkeypatch) -> None:
    """A function that somebody put over ours keeps working when the guards have gone, and reports nothing."""
    found: list[object] = []
    guards = ampcompare.guards.install(say=found.append)
    ours = torch.amp.GradScaler.step
    monkeypatch.setattr(torch.amp.GradScaler, "step", lambda *args: ours(*args))
    guards.remove()
    namespace: dict[str, object] = {}
    exec(compile(script(TWICE).read_text(), "train.py", "exec"), namespace)
    assert found == []


def test_by_default_a_warning_at_the_line(script, marked) -> None:
    """Without a receiver, Python's own warnings carry the finding, with the script's file and line."""
    path = script(TWICE)
    with ampcompare.guards.install(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile(path.read_text(), str(path), "exec"), {})
    (warning,) = caught
    assert (warning.category, warning.filename, warning.lineno) == (GuardWarning, str(path), marked(path))
    assert str(warning.message).startswith("step-twice: optimizer.step() again after scaler.step(optimizer)")


def test_other_ranks_are_silent(script, guarded, monkeypatch) -> None:
    """Of several processes that make the same mistake only the first one says so."""
    monkeypatch.setenv("RANK", "1")
    assert guarded(script(TWICE)) == []


def test_lines_of_installed_packages_name_their_caller(tmp_path: Path, monkeypatch) -> None:
    """A mistake inside an installed package is shown with the line of the user's code that called it."""
    library, script = tmp_path / "site" / "trainer.py", tmp_path / "train.py"
    monkeypatch.setattr("ampcompare.base.location.INSTALLED_PACKAGES", (str(tmp_path / "site") + "/",))
    namespace = {"user_location": user_location}
    exec(compile("def fit():\n    return user_location()\n", str(library), "exec"), namespace)
    exec(compile("\n\nlocation = fit()\n", str(script), "exec"), namespace)
    monkeypatch.chdir(tmp_path)
    location = namespace["location"]
    assert location == Location(str(library), 2, Location(str(script), 3))
    assert str(location) == "trainer.py:2 (from train.py:3)"


def test_torch_may_come_later(script, marked, forked_python, tmp_path: Path) -> None:
    """Installing imports no torch; the guards begin when the script imports it."""
    path = script(TWICE)
    install = "import sys, ampcompare.guards; ampcompare.guards.install(); assert 'torch' not in sys.modules"
    main = tmp_path / "main.py"
    main.write_text(f"{install}\nimport runpy; runpy.run_path({str(path)!r})", encoding="utf-8")
    done = forked_python.run([str(main)], tmp_path, os.environ)
    assert done.returncode == 0, done.stderr
    assert f"train.py:{marked(path)}: GuardWarning: step-twice" in done.stderr


def test_a_guard_that_fails_is_switched_off(script, monkeypatch) -> None:
    """An error inside a guard leaves the training alone, is said once, and silences that guard only."""
    monkeypatch.setattr(AmpStateUnsaved, "at_step_attempt", lambda *args: 1 / 0)
    path = script(TWICE)
    with ampcompare.guards.install(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile(path.read_text(), str(path), "exec"), {})
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 2
    assert (
        messages[0] == "the guard amp-state-unsaved failed and is off: ZeroDivisionError('division by zero')"
    )
    assert messages[1].startswith("step-twice")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_engine_still_leaves_overflows_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guards are no reason for our engine to wait for the device at every step."""
    monkeypatch.setattr(device_skip, "_DEVICE_TYPES", frozenset({"cpu"}))
    with ampcompare.guards.install():
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        assert device_skip.find_flag_device(model(torch.ones(1, 2)).sum(), [optimizer]) == torch.device("cpu")


def test_two_hooks_await_one_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "awaited_twice.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    called: list[str] = []

    def note(name: str) -> None:
        called.append(f"{name} {sys.modules['awaited_twice'].value}")

    hooks = [ImportHook({"awaited_twice": lambda name=name: note(name)}) for name in ("a", "b")]  # type: ignore[misc]
    try:
        for hook in hooks:
            hook.begin()
        __import__("awaited_twice")
    finally:
        for hook in hooks:
            hook.end()
        sys.modules.pop("awaited_twice", None)
    assert sorted(called) == ["a 1", "b 1"]
