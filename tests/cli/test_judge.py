"""`ampcompare judge` as it is called."""

import json
from pathlib import Path

import pytest

from ampcompare.cli import main


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    """The published table is judged, and what is firm and what is not is said."""
    assert main(["judge", "--example"]) == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "inconclusive" in lines["apex:O1"]
    assert "diverged 1/1" in lines["apex:O3"]
    assert "reference" in lines["native:fp16"]
    assert "published sd 0.18 pp" in out.replace("\n  ", " ")


def test_json_is_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` holds the rows with their verdicts, and no number that JSON lacks."""
    path = tmp_path / "runs.csv"
    path.write_text("arm,seed,accuracy\nfp32,0,75\nhalf,0,NaN\n", encoding="utf-8-sig")
    assert main(["judge", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(word))
    assert [row["quality"]["kind"] for row in document["arms"]] == ["", "diverged"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "judge needs one table; name a CSV or Markdown file, or give --example"),
        (["missing.csv"], "cannot read missing.csv"),
        (
            ["missing.csv", "--example"],
            "judge needs one table; name a CSV or Markdown file, or give --example",
        ),
        (["--example", "--margin", "0"], "margin is 0"),
        (["--example", "--sd", "-1"], "spread over seeds is -1"),
        (["--example", "--reference", "\x1b[31m"], "there is no arm"),
    ],
)
def test_bad_calls_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be judged is said in one line, with exit code 2."""
    assert main(["judge", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert "\x1b" not in error


def test_log_probabilities_answer_by_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("-1\n-2\n")
    other.write_text("-1\n-3\n")
    assert main(["judge", "--logprobs", str(one), str(one)]) == 0
    assert json.loads(capsys.readouterr().out)["answer"] == "identical"
    assert main(["judge", "--logprobs", str(one), str(other)]) == 2
    assert main(["judge", "--logprobs", str(one), "missing"]) == 64
    assert main(["judge", "--example", "--logprobs", str(one), str(other)]) == 64
    assert main(["judge", "--example", "--twin", str(one)]) == 2
    assert "--twin is for --logprobs" in capsys.readouterr().err
