"""Names of models and data sets, checked by files alone."""

from __future__ import annotations

import os
import struct
import sys
import zlib
from pathlib import Path

import pytest

from ampcompare.base.environment.packages import find_module
from ampcompare.base.errors import BackendUnavailable, ConfigError
from ampcompare.runs.settings.recipe import Recipe
from ampcompare.tasks import catalog
from ampcompare.tasks.catalog import check_data, check_model, check_task, torchvision_models
from ampcompare.tasks.load import _open
from ampcompare.tasks.torchvision_loader import load_torchvision


def test_the_catalog_is_that_of_torchvision() -> None:
    """The names that are read from torchvision's source are those that torchvision itself lists."""
    models = load_torchvision().models
    found = torchvision_models()
    assert found is not None
    assert sorted(found) == models.list_models()
    for kind, module in (("classification", models), ("segmentation", models.segmentation)):
        assert sorted(name for name, other in found.items() if other == kind) == models.list_models(module=module)


def test_other_sources_of_torchvision(tmp_path: Path) -> None:
    """Names that a decorator gives, and further decorators, are read; a package without sources has no catalog."""
    (tmp_path / "models" / "detection").mkdir(parents=True)
    assert torchvision_models(tmp_path) is None
    (tmp_path / "models" / "a.py").write_text(
        '@register_model()\n@other(\n    weights=("x", 1),\n)\ndef net_a(*, weights):\n    pass\n\n\n'
        "def helper():\n    pass\n\n\n"
        '@register_model(name="b_net")\ndef net_b(\n    x,\n):\n    pass\n'
    )
    (tmp_path / "models" / "detection" / "c.py").write_text("@register_model('c')\ndef net_c():\n    pass\n")
    assert torchvision_models(tmp_path) == {"net_a": "classification", "b_net": "classification", "c": "detection"}


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("resnet19", "there is no model 'resnet19'; did you mean 'resnet18"),
        ("vit_b_17", "did you mean 'vit_b_1"),
        ("fcn_resnet50", "is a torchvision model for segmentation, not for classification"),
        ("hf:gpt2", "causal language models of Transformers, without weights, for --task lm"),
        ("timm:", "names no model; write it as timm:resnet50"),
        ("nomod:x", "there is no module 'nomod'"),
        ("no.mod:x", "there is no module 'no.mod'"),
        ("pack.none:x", "there is no module 'pack.none'"),
        ("pack.inner.none:x", "there is no module 'pack.inner.none'"),
        ("plain.none:x", "there is no module 'plain.none'"),
        ("plain:makke", "there is no 'makke' in it; did you mean 'make'?"),
        ("pack.inner.leaf:nett", "there is no 'nett' in it"),
        (":x", "does not name a factory"),
        ("plain:", "does not name a factory"),
        ("a..b:c", "there is no module 'a..b'"),
    ],
)
def test_models_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, message: str) -> None:
    """A model that cannot be is refused with the nearest name, without importing anything of the user's."""
    _modules(tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=message):
        check_model(arch)


@pytest.mark.parametrize(
    "arch",
    ["mlp", "resnet18", "plain:make", "pack.inner.leaf:Net", "pack.inner:any", "space.leaf:Net", "open:whatever",
     "wide.unknown:x", "os.path:join", "broken:make", "xml.dom.minidom:parse"],
)  # fmt: skip
def test_models_that_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """What files leave open passes: namespace packages, modules with names made at run time, code that is broken."""
    _modules(tmp_path, monkeypatch)
    before = set(sys.modules)
    check_model(arch)
    assert not {"plain", "pack", "space", "open", "wide", "broken"} & (set(sys.modules) - before)


@pytest.mark.parametrize(
    ("task", "arch", "message"),
    [
        ("lm", "gtp", "the task lm has no model 'gtp'; did you mean 'gpt'"),
        ("lm", "timm:resnet50", "image classifiers of timm, for --task classification"),
        ("segmentation", "resnet18", "for classification, not for segmentation"),
        ("segmentation", "fcn_resnet51", "did you mean 'fcn_resnet50'"),
        ("regression", "mlpp", "did you mean 'mlp'"),
    ],
)
def test_models_that_a_task_does_not_have(task: str, arch: str, message: str) -> None:
    """Each task has models of its own, and names the nearest."""
    with pytest.raises(ConfigError, match=message):
        check_model(arch, task)


def test_models_that_a_task_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision's are for the task of their kind; a library that is missing is named with its command."""
    check_model("deeplabv3_resnet50", "segmentation")
    check_model("gpt", "lm")
    monkeypatch.setattr(catalog, "find_spec", lambda name: None)
    for task, arch, package in (("classification", "timm:resnet50", "timm"), ("lm", "hf:gpt2", "transformers")):
        with pytest.raises(BackendUnavailable, match=f"pip install {package}"):
            check_model(arch, task)


@pytest.mark.parametrize(
    ("task", "name", "message"),
    [
        ("lm", "grammer", "the task lm has no data set 'grammer'; did you mean 'grammar'"),
        ("lm", "text:none.txt", "there is no file 'none.txt'"),
        ("lm", "nomod:x", "there is no module 'nomod'"),
        ("segmentation", "nomod:x", "the task segmentation has no data set 'nomod:x'"),
    ],
)
def test_data_that_a_task_does_not_have(task: str, name: str, message: str) -> None:
    """The data of a task are checked by name, files and factories too where the task takes them."""
    with pytest.raises(ConfigError, match=message):
        check_task(Recipe.model_validate({"task": task, "data": {"name": name}}))


def test_data_that_a_task_has(tmp_path: Path) -> None:
    """A file that is there passes, and one that is elsewhere where it is not looked for."""
    path = tmp_path / "text.txt"
    path.write_text("")
    check_task(Recipe.model_validate({"task": "lm", "data": {"name": f"lines:{path}"}}))
    check_task(Recipe.model_validate({"task": "lm", "data": {"name": "text:elsewhere"}}), look=False)


def _modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "plain.py": "raise SystemExit\n\n\ndef make():\n    pass\n",
        "pack/__init__.py": "raise SystemExit\n",
        "pack/inner/__init__.py": "from .leaf import *\nany = 1\n",
        "pack/inner/leaf.py": "class Net:\n    pass\n",
        "space/leaf.py": "class Net:\n    pass\n",
        "open.py": "def __getattr__(name):\n    pass\n",
        "wide/__init__.py": "__path__.append('elsewhere')\n",
        "broken.py": "def make(:\n",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(folder)


def test_modules_beside_the_user_come_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the current directory is found, and does not hide an installed one of its name."""
    (tmp_path / "json.py").write_text("")
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    found, spec = find_module("mine")
    assert found
    assert spec is not None
    assert spec.origin == str(tmp_path / "mine.py")
    assert str(tmp_path) not in str(find_module("json")[1])


@pytest.mark.parametrize(
    ("name", "folder", "message"),
    [
        ("nosuch", None, "there is no data set 'nosuch'"),
        ("digts", None, "did you mean 'digits"),
        ("cifar10", "nowhere", "cifar10 is not in nowhere"),
        ("imagefolder:nowhere", None, "there is no folder 'nowhere'"),
        ("imagefolder", None, "there is no folder ''"),
        ("nomod:data", None, "there is no module 'nomod'"),
    ],
)
def test_data_that_cannot_be(name: str, folder: str | None, message: str) -> None:
    """A data set without a name or files is refused; where a job elsewhere reads them, files are not asked for."""
    with pytest.raises(ConfigError, match=message):
        check_data(name, data_dir=folder, download=False)
    if "nowhere" in message or name == "imagefolder":
        check_data(name, data_dir=folder, download=False, look=False)


def _png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("size", [(30_000, 30_000), (9000, 9000), (2**31 - 1, 2**31 - 1)])
def test_huge_images_are_named(tmp_path: Path, size: tuple[int, int]) -> None:
    """An image of more pixels than memory should be spent on is refused by its name, before it is decoded."""
    path = tmp_path / "huge.png"
    path.write_bytes(_png(*size))
    with pytest.raises(ConfigError, match=r"huge.png cannot be read as an image .*pixels"):
        _open(str(path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_among_images(tmp_path: Path) -> None:
    """A pipe with the name of an image is refused, not waited for."""
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(ConfigError, match=r"pipe.png cannot be read as an image .*it is a pipe"):
        _open(str(tmp_path / "pipe.png"))
