"""What `conftest.py` names exists."""

from typing import Any

import pytest


def test_what_is_no_unit_test_exists(request: pytest.FixtureRequest) -> None:
    """The rooms and files that `--unit` leaves out are there: none was renamed, and would come back unnoticed."""
    path = str(request.config.rootpath / "tests" / "conftest.py")
    conftest: Any = request.config.pluginmanager.get_plugin(path)
    rooms = [conftest.TESTS / room for room in conftest.PROCESS_ROOMS]
    assert [path for path in (*rooms, *conftest.long_files()) if not path.exists()] == []
