"""`-- SCRIPT` of `run` and `compare`: what is refused, and with which words."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import torch
from apex import amp
torch.manual_seed({seed})
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
for step in range(6):
    loss = model(torch.randn(8, 4)).float().square().mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    print("loss", loss.item())
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    """A script for Apex."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("{seed}", "torch.initial_seed()"))
    return str(path)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--lr", "0.1"], "flag --lr: recipe.optimizer.lr is a setting of ampcompare's own training loop"),
        (["--sweep", "workers=0,1"], "--sweep is a setting of"),
        (["--metric", "top1=Acc"], "has 0 groups"),
        (["--metric", r"gap=gap ([\d.]+)"], "write gap:max where larger ones are, or gap:min"),
        (["--arm", "accelerate"], "cannot replace amp in a script"),
        (
            ["--metric", r"top1=Acc ([\d.]+)", "--margin", "0.5pp"],
            "percentage points, and differences of top1 are not",
        ),
        (["--metric", r"top1=Acc ([\d.]+)", "--margin", "0"], "the margin is 0"),
        (["--metric", r"top1=Acc ([\d.]+)", "--fail-on", "top5<1"], "nothing called top5 is measured"),
    ],
)
def test_options_that_cannot_be_are_refused(
    call: Any, tmp_path: Path, script: str, options: list[str], why: str
) -> None:
    """One line, and exit code 2, before any cell trains."""
    done = call("compare", *options, "-o", str(tmp_path / "out"), "--", script)
    assert done.code == 2
    assert why in done.err
    assert not (tmp_path / "out").exists()


def test_options_of_scripts_need_one(call: Any) -> None:
    """`--metric` without a script changes nothing, so it is an error."""
    done = call("run", "--metric", "top1:max")
    assert done.code == 2
    assert "is for a script; write: ampcompare run [OPTIONS] -- SCRIPT ARGS..." in done.err
    assert "no script after --" in call("compare", "--").err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["compare", "train.py"], "ampcompare compare -- train.py"),
        (
            ["compare", "--arm", "bf16", "-q", "train.py", "--data-path", "x"],
            "--arm bf16 -q -- train.py --data-path x",
        ),
        (["run", "-m", "pkg.train"], "ampcompare run -- -m pkg.train"),
        (["diagnose", "train.py", "--epochs", "1"], "ampcompare diagnose -- train.py --epochs 1"),
        (["exec", "--seed", "0", "train.py"], "--arm script trains"),
        (
            ["exec", "--opt-level", "O2", "--max-steps", "3", "train.py"],
            "--max-steps is for --stack or --arm ARM",
        ),
    ],
)
def test_what_was_meant_is_proposed(call: Any, words: list[str], line: str) -> None:
    """A script without its dashes, and options of an arm without one, are answered in one line."""
    done = call(*words)
    assert (done.code, len(done.lines)) == (2, 1)
    assert line in done.err


@pytest.mark.parametrize(
    "words", [["compare", "--"], ["run", "--"], ["exec"], ["diagnose", "--"]], ids=" ".join
)
def test_a_folder_is_no_script(call: Any, words: list[str], tmp_path: Path) -> None:
    """It is refused at once."""
    done = call(*words, str(tmp_path))
    assert (done.code, len(done.lines)) == (2, 1)
    assert "name the script inside it" in done.err


def test_options_of_exec_come_before_the_script(forked_python: Any, tmp_path: Path) -> None:
    """A script that does not know them refuses them, and then ampcompare says where they belong."""
    path = tmp_path / "train.py"
    path.write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    done = forked_python.run(["-m", "ampcompare", "exec", str(path), "--device", "cpu"], tmp_path, os.environ)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert "--device comes after the script" in last
    assert f"ampcompare exec --device ... {path}" in last


HELPED = """
import os, sys, torch
from parts.net import net
torch.manual_seed(torch.initial_seed())
DATABASE_PASSWORD = "of-the-source-1"
print("arguments", sys.argv[1:], "and", os.environ["MY_API_KEY"])
print(open("conf/run.yaml").read(), DATABASE_PASSWORD)
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(8, 4)).float().square().mean()
    loss.backward()
    optimizer.step()
"""


def test_secrets_stay_out_of_all_files(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are they on the screen; the script gets them, and its record names the code that it loaded."""
    monkeypatch.setenv("MY_API_KEY", "key-of-environment-1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "net.py").write_text(
        "import torch\n\ndef net():\n    return torch.nn.Linear(4, 2)\n"
    )
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "run.yaml").write_text("lr: 0.1\ntracker:\n  api_key: of-the-settings-1\n")
    (tmp_path / "train.py").write_text(HELPED)
    done = call(
        *("compare", "--arm", "fp32,bf16", "--seeds", "0", "--device", "cpu", "--mask", "pin", "-o", "out"),
        *("--", "train.py", "--token", "hunter22", "--pin=pin-9876", "https://me:pass-5432@host/"),
    )
    assert done.code == 0, done.err
    found = [path for path in Path("out").rglob("*") if path.is_file()]
    names = {"plan.json", "config.json", "record.json", "script.jsonl", "log.txt", "report.html"}
    assert names <= {path.name for path in found}
    for secret in (
        "hunter22",
        "pin-9876",
        "pass-5432",
        "key-of-environment-1",
        "of-the-settings-1",
        "of-the-source-1",
    ):
        assert not [path for path in found if secret.encode() in path.read_bytes()]
        assert secret not in done.out + done.err
    (log, _) = [path.read_text() for path in found if path.name == "log.txt"]
    assert "['--token', '$TOKEN', '--pin=$PIN', 'https://$CREDENTIALS@host/'] and $MY_API_KEY" in log
    assert "api_key: $API_KEY" in log
    record = json.loads(next(path for path in found if path.name == "record.json").read_text())
    assert list(record["code"]) == ["conf/run.yaml", "parts/net.py", "train.py"]


WITH_LBFGS = """
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
def closure():
    optimizer.zero_grad()
    loss = model(torch.ones(8, 4)).float().square().mean()
    loss.backward()
    return loss
for step in range(3):
    optimizer.step(closure)
"""


@pytest.mark.slow
def test_exit_codes_where_one_arm_fails(call: Any, tmp_path: Path) -> None:
    """0, unless it must not fail (3) or a gate is on it (1); the table is there each time. 2 where no arm can be."""
    script = tmp_path / "train.py"
    script.write_text(WITH_LBFGS)

    def code(arms: str, *options: str) -> int:
        done = call(
            *(
                "compare",
                "--arm",
                arms,
                "--seeds",
                "0",
                "--warmup-steps",
                "0",
                "-o",
                str(tmp_path / "out"),
                "--json",
            ),
            *(*options, "--", str(script)),
        )
        assert [row["failed"] for row in done.json()["arms"]] == [0, 1], done.err
        return int(done.code)

    assert code("fp32,native:fp16") == 0
    assert code("fp32,native:fp16", "--strict") == 3
    for gate in ("failed>0", "training loss>5", "time>5x", "time:better"):
        assert code("fp32,native:fp16", "--fail-on", gate) == 1
    assert code("fp32,native:fp16", "--fail-on", "diverged>0") == 0
    assert call("compare", "--arm", "native:fp16", "-o", str(tmp_path / "out"), "--", str(script)).code == 2


LATE = SCRIPT.replace("range(6)", "range(30)").replace(
    '    print("loss", loss.item())', '    if step == 24:\n        print("Acc@1 91.5")'
)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("options", "shown"),
    [((), "no number that looks like a metric in 20 steps"), (("--max-steps", "26"), "--metric 'Acc@1:max=")],
)
def test_metrics_of_a_script_are_listed(options: tuple[str, ...], shown: str, call: Any, script: str) -> None:
    """A figure that comes late is seen where the script runs longer, and else it is said how to let it."""
    Path(script).write_text(LATE.replace("{seed}", "0"), encoding="utf-8")
    done = call("compare", "--arm", "fp32", "--list-metrics", *options, "--", script)
    assert done.code == 0, done.err
    assert shown in done.out
    assert f"--max-steps {260 if options else 200}" in done.err
