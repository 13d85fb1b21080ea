"""A project with an `apex` of its own: what imports it stays as it is; a copy of NVIDIA's counts as NVIDIA's."""

from pathlib import Path

import pytest

from ampcompare.source.migrate.adapter.choice import choose_adapter_for_all, choose_rewrite_or_adapter
from tests.source.migrate.ordinary.test_training import BASE, NETWORK

SHIM = "def initialize(model, optimizer, **options):\n    return model, optimizer\n"
PATH = "import sys\n\nsys.path.insert(0, 'third_party')\n"


def _write_project(folder: Path, train: str, files: dict[str, str]) -> Path:
    for name, text in {"train.py": train, "network.py": NETWORK, "setup.cfg": "", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder / "train.py"


OWN = {
    "a package": (BASE, {"apex/__init__.py": "", "apex/amp.py": SHIM}, "apex/__init__.py of"),
    "a module": (BASE, {"apex.py": "class amp:\n    pass\n"}, "apex.py of"),
    "another folder": (
        PATH + BASE,
        {"third_party/apex/__init__.py": "", "third_party/apex/amp.py": SHIM},
        "third_party/apex/__init__.py of",
    ),
}


@pytest.mark.parametrize(("train", "files", "expected"), OWN.values(), ids=OWN)
def test_what_imports_an_own_apex_stays(
    tmp_path: Path, train: str, files: dict[str, str], expected: str
) -> None:
    path = _write_project(tmp_path, train, files)
    for choice in (
        choose_rewrite_or_adapter([path]),
        choose_rewrite_or_adapter([path], rewritten="all"),
        choose_adapter_for_all([path]),
    ):
        (result,) = choice.files
        assert not result.is_changed
        ((_, kind, message),) = result.rows()
        assert kind == "by hand"
        assert message.startswith(f"apex is {expected} this project here, and not NVIDIA's")


@pytest.mark.parametrize(
    "files",
    [
        {
            "apex/__init__.py": "",
            "apex/amp/__init__.py": "",
            "apex/amp/frontend.py": "from apex import other\n",
        },
        {"tools/__init__.py": "", "tools/apex.py": SHIM},
        {},
    ],
)
def test_a_copy_of_apex_and_a_part_of_another_package_are_none(tmp_path: Path, files: dict[str, str]) -> None:
    path = _write_project(tmp_path, BASE, files)
    named = [path, *(tmp_path / name for name in files if name.endswith("frontend.py"))]
    choice = choose_rewrite_or_adapter(named)
    assert [each.path for each in choice.files if each.is_changed] == [path]
