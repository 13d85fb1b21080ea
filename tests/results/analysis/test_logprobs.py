"""Two files of log-probabilities, judged by the distance of the first one to its twin."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from ampcompare.base.errors import UnusableInput
from ampcompare.results.analysis.logprobs import distance_of_logprobs, judge_logprobs, read_logprobs

NUMBER = 2000


def _write(path: Path, values: list[float]) -> Path:
    path.write_text("".join(f"{value!r}\n" for value in values))
    return path


@pytest.fixture
def files(tmp_path: Path) -> Any:
    """Return a function that writes a file next to the first, whose numbers have this much noise."""
    drawn = random.Random(0)
    first = [-drawn.expovariate(0.5) - 0.5 for _ in range(NUMBER)]

    def make(name: str, noise: float, seed: int = 1) -> Path:
        other = random.Random(seed)
        return _write(tmp_path / name, [min(0.0, value + other.gauss(0, noise)) for value in first])

    return make


@pytest.mark.parametrize(
    ("noise", "answer", "code"),
    [
        (0.05, "within the floor", 0),
        (0.02, "within the floor", 0),
        (0.0, "identical", 0),
        (0.1, "outside of the floor", 1),
    ],
)
def test_the_twin_is_the_measure(noise: float, answer: str, code: int, files: Any) -> None:
    found = judge_logprobs(files("a", 0.0), files("b", noise, 2), files("twin", 0.05, 3))
    assert (found.answer, found.exit_code) == (answer, code)


@pytest.mark.slow
def test_harmless_changes_are_not_flagged(files: Any) -> None:
    """Of forty twins of equal noise at most two may be called different by chance."""
    first, twin = files("a", 0.0), files("twin", 0.05, 99)
    answers = [judge_logprobs(first, files("b", 0.05, seed), twin).answer for seed in range(40)]
    assert answers.count("outside of the floor") <= 2


def test_without_a_twin_nothing_is_told(files: Any) -> None:
    first, other = files("a", 0.0), files("b", 0.05)
    assert judge_logprobs(first, other).exit_code == 2
    assert judge_logprobs(first, other, first).exit_code == 2  # a twin that is equal measures nothing


def test_distances_are_those_of_the_definition() -> None:
    found = distance_of_logprobs([-1.0, -1.0], [-1.0, -1.0 + math.log(2)])
    assert found.outside == 0.5
    assert found.mean_kl == pytest.approx((2 - 1 - math.log(2)) / 2)
    assert found.largest == pytest.approx(math.log(2))


def test_forms_of_a_file(tmp_path: Path) -> None:
    texts = [
        "-1\n-2.5\n",
        "[-1, -2.5]",
        '{"logprobs": [-1]}\n{"logprobs": [-2.5]}\n',
        '{"logprob": -1}\n{"logprob": -2.5}',
    ]
    for number, text in enumerate(texts):
        path = tmp_path / str(number)
        path.write_text(text)
        assert read_logprobs(path) == [-1.0, -2.5]


@pytest.mark.parametrize(
    "text", ["", "0.5\n", "nan\n", '{"loss": 1}\n', '"a"\n', "true\n", json.dumps([-1, math.inf])]
)
def test_a_file_that_cannot_be_used(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad"
    path.write_text(text)
    with pytest.raises(UnusableInput, match="bad"):
        judge_logprobs(path, path)


def test_files_of_other_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match=r"has 1 tokens and .* has 2"):
        judge_logprobs(_write(tmp_path / "a", [-1.0]), _write(tmp_path / "b", [-1.0, -2.0]))
