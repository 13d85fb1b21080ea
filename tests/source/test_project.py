"""Which file of a project imports which: asked once for each file, whatever number of files is moved."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ampcompare.source import project
from ampcompare.source.migrate.adapter.choice import choose_rewrite_or_adapter
from ampcompare.source.module import Module
from ampcompare.source.project import ImportIndex, names_in_imports

SCRIPT = """import torch
from apex import amp
from pack.net{0} import Net
model, optimizer = amp.initialize(Net(), torch.optim.SGD(Net().parameters(), lr=0.1))
loss = model(torch.ones(2, 2)).sum()
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
optimizer.step()
"""


def _put_project(folder: Path, scripts: int) -> list[Path]:
    (folder / "README.md").touch()
    (folder / "pack").mkdir()
    for at in range(3 * scripts):
        text = "import torch\nclass Net(torch.nn.Linear):\n    pass\n"
        text = f"import pack.net{at - 1}\n{text}" if at else text
        (folder / "pack" / f"net{at}.py").write_text(text)
    (folder / "pack" / "__init__.py").touch()
    for at in range(scripts):
        (folder / f"train{at}.py").write_text(SCRIPT.format(3 * at))
    return sorted(folder.rglob("*.py"))


def test_a_run_asks_each_file_once_what_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[str, Counter[Any]] = {}

    def count(owner: Any, name: str, which: int) -> None:
        original, counted = getattr(owner, name), counts.setdefault(name, Counter())

        def counting(*args: Any, **options: Any) -> Any:
            counted[str(args[which])] += 1
            return original(*args, **options)

        monkeypatch.setattr(owner, name, counting)

    count(project, "parse_document", 0)  # of what the index parses
    count(project, "find_sources", 0)
    count(project, "_text_of_file_or_empty", 0)
    count(ImportIndex, "_resolve_imports", 2)
    paths = _put_project(tmp_path, 4)
    choice = choose_rewrite_or_adapter(paths, rewritten="ordinary", within=[tmp_path])
    assert {each.stem for each in choice.reasons} == {f"train{at}" for at in range(4)}
    assert {Path(each).name for each in counts["parse_document"]} >= {"train0.py", "net0.py", "net9.py"}
    for name, counted in counts.items():
        assert counted, name
        assert set(counted.values()) == {1}, (name, counted)


def test_another_text_of_a_file_has_an_index_of_its_own_where_it_imports_other_files(tmp_path: Path) -> None:
    paths = _put_project(tmp_path, 1)
    index, script = ImportIndex(), tmp_path / "train0.py"
    net, other = (tmp_path / "pack" / f"net{at}.py" for at in (0, 1))
    assert paths
    assert index.files_importing(net) == [other, script]
    same = index.index_with_module(script, Module("import pack.net0  # as before\n"))
    assert same is index
    changed = index.index_with_module(script, Module("import pack.net1\n"))
    assert changed.files_imported_by(script) == [other]
    assert index.files_imported_by(script) == [net]
    assert changed.other_files_of_program(script) == [net, other]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import a.b as c, d\n", ["a.b", "d"]),
        ("from a import (b,  # (of c)\n    d)\n", ["a", "a.b", "a.d"]),
        ("from .. import b\n", ["..", "..b"]),
        ("from .a import b as c\n", [".a", ".a.b"]),
        ("from .import b\n", [".", ".b"]),
        ("from a \\\n    import b\n", ["a", "a.b"]),
        ("try: import a\nexcept ImportError: pass\n", ["a"]),
        ("fromage = important\n", []),
        ("from a import*\n", ["a"]),
    ],
)
def test_names_of_imports_are_read_from_text_alone(text: str, names: list[str]) -> None:
    assert list(names_in_imports(text)) == names
