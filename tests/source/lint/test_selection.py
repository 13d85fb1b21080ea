"""Which codes are reported."""

from pathlib import Path

import pytest

from ampcompare.base.errors import ConfigError
from ampcompare.source.lint.catalog import CODES
from ampcompare.source.lint.run import Selection, read_selection


@pytest.mark.parametrize(
    ("select", "ignore", "reported", "silent"),
    [
        ((), (), list(CODES), []),
        (("AMP4",), (), ["AMP401", "AMP404"], ["AMP201"]),
        (("AMP2",), ("AMP201",), ["AMP202"], ["AMP201", "AMP302"]),
        (("AMP201",), ("AMP2",), ["AMP201"], ["AMP202"]),
        ((), ("AMP3",), ["AMP201"], ["AMP302"]),
    ],
)
def test_prefixes(select: tuple[str, ...], ignore: tuple[str, ...], reported: list[str], silent: list[str]) -> None:
    """The longer prefix decides."""
    selection = Selection(select, ignore)

    assert all(map(selection.reports, reported))
    assert not any(map(selection.reports, silent))


def write(folder: Path, text: str) -> None:
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")


def test_pyproject(tmp_path: Path) -> None:
    """The nearest file above the first path that has the table counts."""
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    write(tmp_path, '[tool.ampcompare.lint]\nselect = ["amp2"]\nignore = ["AMP201"]\nexclude = ["old"]\n')
    write(inner, "[tool.other]\n")

    assert read_selection([inner]) == Selection(("AMP2",), ("AMP201",), ("old",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[tool.ampcompare]\nlint = "x"\n', "is not a table"),
        ('[tool.ampcompare.lint]\nselekt = ["AMP2"]\n', "has no key 'selekt'; it has select, ignore, exclude"),
        ('[tool.ampcompare.lint]\nselect = "AMP2"\n', "must be a list of strings"),
        ('[tool.ampcompare.lint]\nselect = ["E501"]\n', "no lint code begins with 'E501'"),
        ("[tool.ampcompare.lint\n", "pyproject.toml: "),
    ],
)
def test_pyproject_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    """Each fault is one line with the name of the file."""
    write(tmp_path, text)

    with pytest.raises(ConfigError, match=message):
        read_selection([tmp_path])
