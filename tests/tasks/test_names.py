"""Names of models and data sets, checked by files alone."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import pytest

from ampcompare.base.environment.packages import find_module
from ampcompare.base.errors import ConfigError
from ampcompare.settings.recipe import Recipe
from ampcompare.tasks.catalog import check_model, check_task, torchvision_models
from ampcompare.tasks.load import _open_image
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
    ("task", "arch", "message"),
    [
        ("classification", "resnet19", "there is no model 'resnet19'; did you mean 'resnet18"),
        ("classification", "convnett", "did you mean 'convnet"),
        ("classification", "fcn_resnet50", "is a torchvision model for segmentation, not for classification"),
        ("classification", "hf:gpt2", "causal language models of Transformers, without weights, for --task lm"),
        ("classification", "timm:", "names no model; write it as timm:resnet50"),
        ("lm", "gtp", "the task lm has no model 'gtp'; did you mean 'gpt'"),
        ("segmentation", "fcn_resnet51", "did you mean 'fcn_resnet50'"),
    ],
)
def test_models_that_a_task_does_not_have(task: str, arch: str, message: str) -> None:
    """A model that cannot be is refused with the nearest name."""
    with pytest.raises(ConfigError, match=message):
        check_model(arch, task)


@pytest.mark.parametrize(
    ("task", "name", "message"),
    [
        ("lm", "grammer", "the task lm has no data set 'grammer'; did you mean 'grammar'"),
        ("segmentation", "nomod:x", "the task segmentation has no data set 'nomod:x'"),
        ("classification", "nosuch", "there is no data set 'nosuch'"),
        ("classification", "digts", "did you mean 'digits"),
    ],
)
def test_data_that_a_task_does_not_have(task: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_task(Recipe.model_validate({"task": task, "data": {"name": name}}))


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("lm", "text:elsewhere"),
        ("lm", "nomod:x"),
        ("classification", "imagefolder"),
        ("classification", "imagefolder:a"),
    ],
)
def test_data_that_a_task_can_have(task: str, name: str) -> None:
    """Files and modules are looked for where they are used."""
    check_task(Recipe.model_validate({"task": task, "data": {"name": name}}))


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


def _png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("size", [(9000, 9000)])
def test_huge_images_are_named(tmp_path: Path, size: tuple[int, int]) -> None:
    """An image of more pixels than memory should be spent on is refused by its name, before it is decoded."""
    path = tmp_path / "huge.png"
    path.write_bytes(_png(*size))
    with pytest.raises(ConfigError, match=r"huge.png cannot be read as an image .*pixels"):
        _open_image(str(path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_among_images(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(ConfigError, match=r"pipe.png cannot be read as an image .*it is a pipe"):
        _open_image(str(tmp_path / "pipe.png"))
