"""The documentation against the program: what README and pages show runs, or says why it is not run.

A comment before a block of code says what is to be done with it. Blocks of a page run in order, in one folder:

* `run`, `run in a folder with NAME`: each line is a command; NAME is there, from a block or a command before it, or
  is a path in this repository, whose file is copied.
* `run with the example backend`: the same, with the package of `examples/` on the path.
* `run as python`: a script of its own.
* `file NAME`: the content of a file.
* `not run: REASON`: needs a GPU, a network, a container engine, or too much time.
"""

import functools
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ampcompare.cli import COMMANDS, main
from ampcompare.experiment.launch.forked import ForkedLauncher
from tests.modules import EXAMPLE, ROOT, with_example

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md")), EXAMPLE / "README.md"]
BLOCK = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^( *)```(\w*)\n(.*?)^\2```$", flags=re.DOTALL | re.MULTILINE)
# Pages without a mark on every block: commands of exec.md run in tests/legacy, those of troubleshooting.md and errors/
# are parsed in tests/docs; what programs under benchmarks/ wrote names the command that it was made by.
UNMARKED = ("docs/exec.md", "docs/script.md", "docs/troubleshooting.md", "docs/errors/", "docs/benchmarks/")
AS_PROCESSES = "docs/quickstart.md"
NOT_COMMANDS = ("text", "yaml", "toml", "json")
# What a page shows does the same with fewer seeds, epochs and samples.
SMALL = "--train-size 256 --val-size 64"
FEWER = {
    "--seeds 0-5 --epochs 2 --margin 1": f"--seeds 0-1 --epochs 1 --margin 1 {SMALL}",
    "--seeds 0-2 --epochs 2": f"--seeds 0-1 --epochs 1 {SMALL}",
    "gemm:mxfp8,gemm:nvfp4,gemm:bf16,fprop=nvfp4 --seeds 0-2 --max-steps 60": "gemm:bf16,fprop=nvfp4 --seeds 0-1 "
    "--max-steps 2 --batch-size 4 --train-size 64 --val-size 16",
    "--seeds 0-2": "--seeds 0-1",
    "--opt-level O2 --epochs 1": f"--opt-level O2 --epochs 1 {SMALL}",
    "mynets:make_net --arm native:bf16 --epochs 1": f"mynets:make_net --arm native:bf16 --epochs 1 {SMALL}",
    "-- examples/apex_digits/train.py": "-- examples/apex_digits/train.py --epochs 1",
    "Recipe(epochs=2)": 'Recipe(epochs=1, model={"arch": "mlp"}, data={"train_size": 64, "val_size": 32})',
    "seeds=range(2)": "seeds=range(1)",
    '"train_size": 512, "val_size": 256': '"train_size": 64, "val_size": 32',
    "epochs=3, model": "epochs=1, model",
}
GIVEN_FILES = {
    "train.py": """
import torch
from apex import amp

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
for _ in range(3):
    loss = model(torch.randn(8, 4)).float().square().mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained")
""",
}


class Block(NamedTuple):
    """A fenced block of a page: the comment before it ("" where there is none), its language and text."""

    page: Path
    marker: str
    language: str
    text: str

    @property
    def smaller(self) -> str:
        """Its text, of which less is trained."""
        text = self.text
        for much, little in FEWER.items():
            text = text.replace(much, little)
        return text

    @property
    def commands(self) -> list[str]:
        """Its lines, joined where a backslash ends one, without remarks."""
        lines = re.sub(r"\\\n *", "", self.smaller).splitlines()
        return [line.partition("  #")[0].strip() for line in lines if line.strip()]


def blocks(page: Path) -> list[Block]:
    """Every fenced block of a page."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [Block(page, marker, language, text) for marker, _, language, text in found]


def name(page: Path) -> str:
    """A page's path, for the names of tests."""
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def launcher(forking: Any) -> Iterator[ForkedLauncher]:
    """A launcher of cells, whose server all pages share: starting it takes longer than the commands of one."""
    with ForkedLauncher() as launcher, pytest.MonkeyPatch.context() as patch:
        patch.setattr("ampcompare.base.processes.client.subprocess", forking)
        yield launcher


@pytest.fixture
def command(
    launcher: ForkedLauncher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    forked_python: Any,
    forked_children: None,
    forked_ranks: None,
    forked_runs: None,
    forked_servers: None,
) -> Callable[[list[str]], tuple[int, str, str]]:
    """Run a command in the folder of a page, in this process, and return exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    class Shared(ForkedLauncher):
        launch = launcher.launch  # type: ignore[assignment]

    def invoke(words: list[str]) -> tuple[int, str, str]:
        # `exec` changes the process, and cells in parallel need a server each.
        if words[0] == "exec" or "--jobs" in words:
            done = forked_python.run(["-m", "ampcompare", *words], Path.cwd(), dict(os.environ))
            return done.returncode, done.stdout, done.stderr
        capfd.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ampcompare.experiment.launch.forked.ForkedLauncher", Shared)
            code = main(words)
        return code, *capfd.readouterr()

    return invoke


def runs(page: Path) -> bool:
    """Whether a page has commands to run."""
    return any(re.match(r"run(?! as python)", block.marker) for block in blocks(page))


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if runs(page)], ids=name)
def test_commands_run(
    page: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    command: Callable[[list[str]], tuple[int, str, str]],
    forked_python: Any,
) -> None:
    """Each command of a page ends with exit code 0 and prints something, in the order of the page.

    Those of one page, and those with a package on the path, are processes of their own, as for a user. What the README
    has runs there alone, pasted into the root of a clone, its `cd` lines too.
    """
    if page == README:
        shutil.copytree(
            ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("runs", "__pycache__")
        )
    known = {
        line
        for block in blocks(README)
        for line in block.commands
        if page not in (README, ROOT / AS_PROCESSES)
    }
    plugin = with_example(tmp_path_factory.mktemp("plugin"))
    for block in blocks(page):
        kind, _, file = block.marker.partition(" in a folder with ")
        if block.marker.startswith("file "):
            path = tmp_path / block.marker.removeprefix("file ")
            if page != README:  # whose files lie in a clone
                path.write_text(block.text, encoding="utf-8")
        if kind not in ("run", "run with the example backend"):
            continue
        if "/" in file:
            shutil.copy(ROOT / file, tmp_path)
        elif file and not (tmp_path / file).exists():
            (tmp_path / file).write_text(GIVEN_FILES[file], encoding="utf-8")
        for line in block.commands:
            words = shlex.split(line)
            if words[0] == "cd" and page == README:
                os.chdir(words[1])
            if words[0] == "cd" or (line in known and not file):  # into the folder whose file is here
                continue
            assert words[0] == "ampcompare", line
            if name(page) == AS_PROCESSES or "backend" in kind:
                path = os.pathsep.join([*(plugin if "backend" in kind else ()), os.environ["PYTHONPATH"]])
                done = forked_python.run(
                    ["-m", *words], tmp_path, {**os.environ, "PYTHONPATH": path}, timeout=300
                )
                code, out, err = done.returncode, done.stdout, done.stderr
            else:
                code, out, err = command(words[1:])
            assert code == 0, f"{line}\n{err}"
            assert out.strip(), line


@pytest.mark.integration
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(block.smaller, id=f"{name(page)}:{number}", marks=[pytest.mark.slow] * (page != README))
        for page in PAGES
        for number, block in enumerate(blocks(page))
        if block.marker == "run as python"
    ],
)
def test_python_runs(code: str, tmp_path: Path, forked_python: Any) -> None:
    """Each Python block works as an unguarded script of its own."""
    (tmp_path / "script.py").write_text(code, encoding="utf-8")
    done = forked_python.run(["script.py"], tmp_path, dict(os.environ))
    assert done.returncode == 0, done.stderr


def test_every_block_runs_or_says_why_not() -> None:
    """No block of code escapes the tests without a reason."""
    known = (
        r"run( as python| with the example backend| in a folder with [\w./]+)?|file [\w./]+|not run: .{10,}"
    )
    wrong = []
    for page in PAGES:
        for block in blocks(page):
            if re.match("run|file|not run", block.marker):
                wrong += [] if re.fullmatch(known, block.marker) else [f"{name(page)}: {block.marker}"]
            elif block.language not in NOT_COMMANDS and not name(page).startswith(UNMARKED):
                wrong.append(f"{name(page)}: {block.text}")
    assert not wrong


def test_files_of_the_readme_are_examples() -> None:
    """A file that a command of the README needs, or that it shows, is in examples/ with the same content."""
    for block in blocks(README):
        file = block.marker.partition(" in a folder with ")[2]
        if file:
            assert (ROOT / file).is_file(), file
        elif block.marker.startswith("file "):
            assert (ROOT / block.marker[5:]).read_text(encoding="utf-8").endswith(block.text)
    for path in re.findall(r"(?<![\w/])examples/[\w/]+\.\w+", README.read_text(encoding="utf-8")):
        assert (ROOT / path).is_file(), path
    (table,) = [block.text for block in blocks(ROOT / "docs" / "judge.md") if block.marker == "file gnmt.csv"]
    assert (ROOT / "examples" / "gnmt.csv").read_text(encoding="utf-8") == table


def test_a_task_of_ones_own_is_short() -> None:
    """The README promises a whole task in forty lines; `test_commands_run` trains it."""
    (task,) = [block.text for block in blocks(README) if block.marker == "file examples/ratings.py"]
    assert len(task.splitlines()) <= 40


def test_every_command_is_in_the_readme() -> None:
    """A command that nobody can find does not exist."""
    text = README.read_text(encoding="utf-8")
    assert COMMANDS
    assert not [command for command in COMMANDS if not re.search(rf"`?ampcompare {command}\b", text)]


def test_pages_that_the_readme_links_are_not_made_by_the_site_alone() -> None:
    """In a clone, a page of options or settings, which are listed when the site is built, answers nothing."""
    made = [
        page
        for page in (ROOT / "docs").glob("*.md")
        if re.search(r"^<!-- (commands|settings) -->", page.read_text(), re.M)
    ]
    linked = re.findall(r"\]\((docs/[^)#]+)", README.read_text(encoding="utf-8"))
    assert made
    assert not {name(page) for page in made} & set(linked)


def test_links_lead_somewhere() -> None:
    """A relative link names a file or folder of this repository, and a heading where it names one."""
    wrong = []
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for path, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)]*)\)", text):
            target = (page.parent / path) if path else page
            # a page that docs/hooks/notebooks.py makes of a notebook
            if target.parent == ROOT / "docs" / "notebooks":
                target = ROOT / "examples" / "notebooks" / f"{target.stem}.ipynb"
            if not target.exists() or (anchor and anchor not in anchors(target)):
                wrong.append(f"{name(page)}: {path}#{anchor}")
    assert not wrong


@functools.cache
def anchors(page: Path) -> set[str]:
    return {
        slug(heading)
        for heading in re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    }


def slug(heading: str) -> str:
    """The anchor that a heading gets, here and on the site."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())
