"""What is said where packages of an extra are missing, or torch is too old; nothing is imported to find out."""

import importlib.util
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import setuptools

from ampcompare.base.environment import extras
from ampcompare.base.environment.extras import (
    MODULES,
    SOME_NEED,
    missing_package_error,
    require_statistics_packages,
    require_torch,
)
from ampcompare.base.errors import AmpCompareError, ExtraMissing
from ampcompare.base.version import OLDEST_TORCH

ROOT = Path(__file__).resolve().parents[3]
MESSAGE = r"needs torch {}\.{} or later, and 2\.5\.1\+cu124 is installed: pip install -U torch"


@pytest.fixture
def torch_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A torch that is found before the real one; its file `version.py` is still to be written."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return tmp_path / "torch" / "version.py"


@pytest.mark.parametrize(
    "text",
    ["__version__ = '2.5.1+cu124'\n", 'from typing import Optional\n\n__version__: str = "2.5.1+cu124"\n'],
)
@pytest.mark.parametrize("file", ["version.py", "__init__.py"])
@pytest.mark.parametrize("engine_alone", [False, True])
def test_an_old_torch(torch_of: Path, text: str, file: str, engine_alone: bool) -> None:
    """It is refused by its version, as an error of this package and as an ImportError."""
    torch_of.with_name(file).write_text(text)
    with pytest.raises(ExtraMissing, match=MESSAGE.format(*OLDEST_TORCH)) as caught:
        require_torch(engine_alone=engine_alone)
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, AmpCompareError)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("version", ["{}.{}.0", "2.10.0a0+git0", "10.0", "", "nightly"])
def test_a_torch_that_will_do(torch_of: Path, version: str) -> None:
    """From the oldest on, and where the file names no numbers: what is not known is not refused."""
    torch_of.write_text(f"__version__ = '{version.format(*OLDEST_TORCH)}'\n")
    require_torch()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each package, the extra that brings it, and the command that installs it."""
    absent = {"torch", "scipy"}
    monkeypatch.setattr(extras, "_is_importable", lambda name: name not in absent)
    monkeypatch.setattr(extras, "version_of_torch_on_path", str)
    with pytest.raises(
        ExtraMissing, match=r"extra torch, of which torch and scipy are not installed: "
    ) as caught:
        require_torch()
    assert str(caught.value).endswith("pip install 'ampcompare[torch]'")
    with pytest.raises(ExtraMissing, match=r"extra torch, of which torch is not installed"):
        require_torch(engine_alone=True)
    with pytest.raises(
        ExtraMissing, match=r"extra stats, of which scipy is not installed: pip install 'ampcompare\[s"
    ):
        require_statistics_packages()
    absent.remove("torch")
    with pytest.raises(ExtraMissing, match=r"of which scipy is not installed: pip install scipy$"):
        require_torch()  # the extra would bring torchvision beside a torch that is there
    absent.clear()
    require_torch()
    require_statistics_packages()


def test_a_folder_without_a_package_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_such_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("no_such_package") is not None
    assert not extras._is_importable("no_such_package")


def test_only_an_import_of_this_package_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script of a user that lacks a package keeps its own error; so does a package that is there, and broken."""

    def error_of(name: str, file: str) -> ModuleNotFoundError:
        try:
            exec(compile(f"raise ModuleNotFoundError('no', name={name!r})", file, "exec"))
        except ModuleNotFoundError as error:
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this function
            return error
        raise AssertionError

    monkeypatch.setattr(extras, "_is_importable", lambda name: name == "sklearn")
    own, users = f"{extras.PACKAGE}tasks/image_data.py", "/home/train.py"
    assert (
        str(missing_package_error(error_of("scipy.stats", own)))
        == "scipy is not installed: pip install 'ampcompare[stats]'"
    )
    assert (
        str(missing_package_error(error_of("torch", own)))
        == "torch is not installed: pip install 'ampcompare[torch]'"
    )
    assert missing_package_error(error_of("torch", users)) is None
    assert missing_package_error(error_of("sklearn.missing", own)) is None
    assert missing_package_error(error_of("another", own)) is None
    assert missing_package_error(ImportError("no", name="torch")) is None


def test_each_package_is_in_the_extra_that_setup_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", asked.update)
    runpy.run_path(str(ROOT / "setup.py"))
    names = {
        extra: {re.split(r"[<>=\[]", text)[0].replace("scikit-learn", "sklearn") for text in texts}
        for extra, texts in asked["extras_require"].items()
    }
    assert names["stats"] == set(MODULES["stats"])
    assert names["stats"] < names["torch"]
    assert names["torch"] == {*MODULES["torch"], *SOME_NEED}
    core = {re.split("[<>=]", text)[0] for text in asked["install_requires"]}
    assert core.isdisjoint(names["torch"])
