"""Pages that state facts about the program: options, settings, exit codes, error messages, the site's configuration."""

import importlib.util
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
import torch
from torch import nn

import ampcompare
from ampcompare import errors
from ampcompare.cli import COMMANDS, EPILOG
from ampcompare.cli.group import cli
from ampcompare.settings.config import RunConfig
from tests.modules import module_at

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    """The module that mkdocs calls."""
    return module_at("docs/hooks/pages.py")


def command_of(name: str) -> click.Command:
    """A command of the program, with what the group adds to it."""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return command


def test_the_page_of_commands_has_every_option(hooks: ModuleType) -> None:
    reference = hooks.command_reference()
    for name, summary in COMMANDS.items():
        section = reference.partition(f"## ampcompare {name}\n")[2].partition("\n## ")[0]
        assert summary in section
        rows = dict(re.findall(r"^\| (`.*?`) \| (.*) \|$", section, flags=re.MULTILINE))
        for option in command_of(name).params:
            if isinstance(option, click.Option) and not option.hidden:
                flag = re.compile(rf"`{max(option.opts, key=len)}\b(?!-)")
                (row,) = [row for flags, row in rows.items() if flag.search(flags.replace("[no-]", ""))]
                assert row.endswith(f"| `{option.envvar}`")
    assert "<!-- commands -->" in (DOCS / "commands.md").read_text(encoding="utf-8")


def test_the_page_of_settings_has_every_setting(hooks: ModuleType) -> None:
    """A row for each field of a run's configuration, however deep, with its default."""
    table = hooks.settings_reference()
    config: Any = RunConfig().model_dump(mode="json")
    places = [f"recipe.{name}" for name, value in config["recipe"].items() if not isinstance(value, dict)]
    places += [name for name in config if name not in ("recipe", "parallel", "saving")]
    places += [f"{group}.{name}" for group in ("parallel", "saving") for name in config[group]]
    for group in ("data", "model", "optimizer", "schedule"):
        places += [f"recipe.{group}.{name}" for name in config["recipe"][group]]
    assert sorted(re.findall(r"^\| `([\w.]+)`", table, flags=re.MULTILINE)) == sorted(places)
    assert '| `cpu_half` | `auto`, `emulated`, `native` | `"auto"` |' in table
    assert "| `recipe.optimizer.momentum` | number ≥ 0 and < 1 | `0.9` |" in table
    assert "<!-- settings -->" in (DOCS / "settings.md").read_text(encoding="utf-8")


def test_options_that_pages_name_exist() -> None:
    """Whoever copies `ampcompare COMMAND --option` from a page gets no usage error."""
    known = {}
    for name in COMMANDS:
        takes = ("config", "run", "compare") if name == "config" else (name,)
        options = [option for each in takes for option in command_of(each).params]
        known[name] = {"--help", *(flag for one in options for flag in (*one.opts, *one.secondary_opts))}
    wrong = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for name, words in re.findall(r"\bampcompare ([a-z]+)\b([^`\n#]*)", text):
            rest = words.partition(" -- ")[0]  # behind it are the words of a script
            for word in rest.split() if name in known else ():
                if name == "exec" and word.endswith((".py", "SCRIPT")):
                    break  # what follows belongs to the script
                flag = re.match(r"--[a-z][a-z0-9-]+", word)
                if flag and flag[0] not in known[name]:
                    wrong.append(f"{page.relative_to(ROOT)}: ampcompare {name}{rest}")
    assert not wrong


def test_exit_codes_are_those_of_the_program() -> None:
    """The page gives every code that `--help` gives, and every error class with its own."""
    page = (DOCS / "files.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| (\d+) \| (.*) \|$", page, flags=re.MULTILINE))
    assert list(table) == re.findall(r"\b(\d+) [a-z]", EPILOG.partition("Every\n")[0])
    classes = {
        name: int(code) for name, code in re.findall(r"^\| `(\w+)` \| (\d+) \|", page, flags=re.MULTILINE)
    }
    assert classes == {name: getattr(errors, name).exit_code for name in errors.__all__ if name[0].isupper()}


def test_the_api_page_has_every_public_name() -> None:
    """What `ampcompare.__all__` promises is documented, and what the page names exists."""
    named = re.findall(r"^::: ([\w.]+)$", (DOCS / "api.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for path in named:
        module, _, attribute = path.rpartition(".")
        assert getattr(importlib.import_module(module), attribute).__doc__
    assert set(ampcompare.__all__) - {"__version__"} <= {path.rpartition(".")[2] for path in named}


def _scaled(model: nn.Module, *, half: bool = False) -> tuple[torch.amp.GradScaler, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    x = torch.ones(1, 2, dtype=torch.float16 if half else torch.float32)
    scaler.scale(model(x).float().sum()).backward()
    return scaler, optimizer


def fp16_gradients() -> None:
    scaler, optimizer = _scaled(nn.Linear(2, 2).half(), half=True)
    scaler.step(optimizer)


def no_gradients() -> None:
    scaler, optimizer = _scaled(nn.Linear(2, 2))
    optimizer.zero_grad()
    scaler.step(optimizer)


def unscaled_twice() -> None:
    scaler, optimizer = _scaled(nn.Linear(2, 2))
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def stepped_twice() -> None:
    scaler, optimizer = _scaled(nn.Linear(2, 2))
    scaler.step(optimizer)
    scaler.step(optimizer)


def never_scaled() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    torch.amp.GradScaler("cpu").step(torch.optim.SGD(model.parameters(), lr=0.1))


def initialize(opt_level: Any = "O2", model: nn.Module | None = None, **options: Any) -> Any:
    from ampcompare.apex import amp

    model = model or nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, **options)


def unprepared_optimizer() -> None:
    from ampcompare.apex import amp

    model, _ = initialize()
    with amp.scale_loss(
        model(torch.ones(1, 2)).sum(), torch.optim.SGD(model.parameters(), lr=0.1)
    ) as scaled_loss:
        scaled_loss.backward()


def half_probabilities() -> None:
    initialize("O1")
    torch.nn.functional.binary_cross_entropy(torch.ones(2).half(), torch.ones(2))


RAISED: dict[str, Callable[[], Any]] = {
    "Attempting to unscale FP16 gradients.": fp16_gradients,
    "No inf checks were recorded for this optimizer.": no_gradients,
    "Attempted step but _scale is None": never_scaled,
    "unscale_() has already been called on this optimizer since the last update().": unscaled_twice,
    "step() has already been called since the last update().": stepped_twice,
    "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler.": (
        lambda: torch.amp.GradScaler("cpu").load_state_dict({})
    ),
    "mat1 and mat2 must have the same dtype": lambda: nn.Linear(2, 2).half()(torch.ones(1, 2)),
    "Input type (float) and bias type (c10::Half) should be the same": (
        lambda: nn.Conv2d(1, 1, 1).half()(torch.ones(1, 1, 2, 2))
    ),
    "Half without overflow": lambda: torch.zeros(2).half().masked_fill(torch.tensor([True, False]), -1e9),
    "view size is not compatible with input tensor's size and stride": lambda: torch.ones(2, 3).t().view(-1),
    "the prefix O is the letter O, not the number zero": lambda: initialize("01"),
    "Parallel wrappers should only be applied AFTER": lambda: initialize(
        model=nn.DataParallel(nn.Linear(2, 2))
    ),
    "Do not call .half() on a model before amp.initialize": lambda: initialize(model=nn.Linear(2, 2).half()),
    "keep_batchnorm_fp32=True was given with O1": lambda: initialize("O1", keep_batchnorm_fp32=True),
    "did not go through amp.initialize": unprepared_optimizer,
    "F.binary_cross_entropy and torch.nn.BCELoss need float32": half_probabilities,
    "unknown backend": lambda: ampcompare.make_precision("apx:O2"),
    "cannot be cut into": lambda: ampcompare.Recipe(batch_size=10, grad_accum_steps=3),
    "the real Apex runs on CUDA only": lambda: _refused_on_cpu(),
}


def _refused_on_cpu() -> None:
    """The message where the real Apex is there and the device is a CPU; else the one for its absence is raised."""
    from ampcompare.backends import apex_levels
    from ampcompare.base.environment.apex import ApexInstall
    from ampcompare.training.precision.apex import choose_apex_module_and_engine_info

    there = ApexInstall("full", Path("apex"), "0.1", "NVIDIA Apex 0.1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apex_levels, "find_installed_apex", lambda: there)
        choose_apex_module_and_engine_info("nvidia", "O2", "cpu")


@pytest.fixture(autouse=True)
def closed_amp_session() -> Any:
    """Take O1's patches off torch again."""
    yield
    if "ampcompare.apex.amp" in sys.modules:
        sys.modules["ampcompare.apex.amp"]._amp_state.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("message", RAISED)
def test_messages_of_the_troubleshooting_page_are_real(message: str) -> None:
    """What the page tells users to search for is what torch or this package says."""
    assert message in (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    with pytest.raises(Exception, match=re.escape(message)):
        RAISED[message]()
