"""The pytest plugin: a mark that names arms, and the fixture `holds`, which runs a test once for each of them.

pytest imports it in every run of an environment that has ampcompare: it imports neither torch nor pydantic until a
test uses the fixture.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest

MARK = "ampcompare"
ARMS = "ampcompare_arms"
FIXTURE = "ampcompare_arm"
DEFAULT = "bf16, fp16, O2"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting of the arms."""
    parser.addini(
        ARMS, f"arms of tests that use the fixture `holds`, separated by spaces or commas ({DEFAULT})"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line(
        "markers",
        f"{MARK}(arms, **options): run the test once for each arm; options are those of ampcompare.testing.holds, for "
        "its fixture `holds`",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that uses the fixture once for each arm of its mark, or else of the setting."""
    if FIXTURE not in metafunc.fixturenames:
        return
    mark = metafunc.definition.get_closest_marker(MARK)
    arms = _marked_arms(mark) if mark is not None else None
    if arms is None:
        arms = _split_arms_of_text(str(metafunc.config.getini(ARMS)) or DEFAULT)
    metafunc.parametrize(FIXTURE, arms, ids=list(map(str, arms)))


def _marked_arms(mark: pytest.Mark) -> list[Any] | None:
    if len(mark.args) > 1:
        raise pytest.UsageError(f'arms are one list: @pytest.mark.{MARK}(["bf16", "O2"])')
    arms = mark.args[0] if mark.args else mark.kwargs.get("arms")
    if arms is None:
        return None
    return _split_arms_of_text(arms) if isinstance(arms, str) else list(arms)


def _split_arms_of_text(text: str) -> list[str]:
    """Return the arms of a text, which spaces and commas divide; a comma before an option of an arm divides none."""
    from ampcompare.backends.arm import arms_and_ambiguous_word

    return [arm for word in re.sub(r",\s+", ",", text).split() for arm in arms_and_ambiguous_word(word)[0]]


@pytest.fixture
def holds(request: pytest.FixtureRequest, ampcompare_arm: str) -> Callable[..., Any]:
    """Return `ampcompare.testing.holds` for the arm of this test and with the options of its mark.

    A test whose arm this machine cannot run is skipped.
    """
    from ampcompare.base.errors import AmpCompareError, EnvironmentUnfit
    from ampcompare.testing import holds as check

    mark = request.node.get_closest_marker(MARK)
    options = {} if mark is None else {name: value for name, value in mark.kwargs.items() if name != "arms"}

    def holds(subject: Any, **given: Any) -> Any:
        __tracebackhide__ = True
        try:
            return check(subject, ampcompare_arm, **{**options, **given})[0]
        except EnvironmentUnfit as error:
            pytest.skip(f"{ampcompare_arm}: {error}")
        except AmpCompareError as error:
            # what the caller has to change; ampcompare's frames say nothing of it
            pytest.fail(f"{ampcompare_arm}: {error}", pytrace=False)

    return holds
