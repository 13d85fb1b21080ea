"""Answers of child processes: done, raised, died, hung."""

from typing import Any

import pytest

from ampcompare.api.doctor.finding import ask


@pytest.mark.parametrize(
    ("body", "how", "failure"),
    [
        ("", "done", ""),
        ("raise OSError('first line\\nsecond')", "raised", "OSError: first line second"),
        ("raise KeyboardInterrupt", "raised", "KeyboardInterrupt"),
        ("import sys; print('x' * 100_000, flush=True); sys.exit(2)", "raised", "SystemExit: 2"),
        ("import os; os.abort()", "died", "the process was killed by SIGABRT"),
        ("import os; os.write(2, b'cannot go on\\n'); os._exit(7)", "died", "exit code 7 and no answer (cannot go on)"),
        ("import time; time.sleep(60)", "hung", "it had not ended after 1 s and was killed"),
    ],
)
def test_each_way_to_end(site: Any, body: str, how: str, failure: str) -> None:
    """However an import ends, the question has an answer, and the sentence says how."""
    site.write("amp_C.py", body)
    answer = ask("kernels", path=site.path, seconds=1 if how == "hung" else 30)
    assert answer.how == how
    assert answer.done == (how == "done")
    assert answer.failure.endswith(failure)


def test_warnings_come_with_the_answer(site: Any) -> None:
    """What is warned of on the way, as by an old driver, is kept."""
    site.write("amp_C.py", "import warnings; warnings.warn('the driver is too old')")
    answer = ask("kernels", path=site.path)
    assert answer.warnings == ["the driver is too old"]
    assert answer.value["file"] == str(site.folder / "amp_C.py")
