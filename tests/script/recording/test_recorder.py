"""`--record` and `--opt-level`: what a script's own eyes see is what the record says."""

import json
from pathlib import Path
from typing import Any

import pytest

from ampcompare.script.recording.recorder import Recorder

GAN = """
    import json, math, sys
    import torch
    from apex import amp

    torch.manual_seed(0)
    critic, maker = torch.nn.Linear(4, 1), torch.nn.Linear(3, 4)
    slow = torch.optim.SGD(critic.parameters(), 0.01, momentum=0.9)
    fast = torch.optim.Adam(maker.parameters(), 0.01)
    [critic, maker], [slow, fast] = amp.initialize(
        [critic, maker], [slow, fast], opt_level=sys.argv[1], num_losses=3, loss_scale="dynamic", verbosity=0
    )
    schedule = torch.optim.lr_scheduler.StepLR(fast, 2)
    amp._amp_state.loss_scalers[2]._scale_seq_len = 2
    seen = []

    def backward(loss, optimizer, loss_id):
        scaler = amp._amp_state.loss_scalers[loss_id]
        before = scaler.loss_scale()
        with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
            scaled.backward()
        seen.append(["backward", loss_id, loss.item(), before, scaler.loss_scale()])

    def step(optimizer, number):
        weight = next(amp.master_params(optimizer))
        old = weight.detach().clone()
        optimizer.step()
        seen.append(["step", number, not torch.equal(old, next(amp.master_params(optimizer)))])

    for number in range(6):
        real, noise = torch.randn(5, 4), torch.randn(5, 3)
        critic.zero_grad()
        bad = [1e30 if number == 1 else 1.0, math.inf if number in (1, 3) else 1.0, math.nan if number == 2 else 1.0]
        backward(critic(real).float().pow(2).mean() * bad[0], slow, 0)
        backward(critic(maker(noise).detach()).float().pow(2).mean() * bad[1], slow, 1)
        step(slow, 0)
        maker.zero_grad()
        backward((critic(maker(noise)).float() - 1).pow(2).mean() * bad[2], fast, 2)
        step(fast, 1)
        schedule.step()
    json.dump(seen, open("seen.json", "w"))
"""


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


HANDLE = """
    import math
    import torch
    from apex import amp

    torch.manual_seed(0)
    handle = amp.init()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for number in range(3):
        loss = model(torch.ones(2, 4)).float().mean() * (math.inf if number == 0 else 1)
        optimizer.zero_grad()
        with handle.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        print(loss.item())
"""


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_two_optimizers_and_three_losses(level: str, write, legacy, forked, tmp_path: Path) -> None:
    """Each loss has the scale that its scaler showed, each optimizer the steps and skips that its weights show."""
    write("gan.py", GAN)
    done = legacy("--record", "steps.jsonl", "gan.py", level)
    assert done.returncode == 0, done.stderr
    seen = json.loads((tmp_path / "seen.json").read_text())
    first, initialize, *rows, last = rows_of(tmp_path / "steps.jsonl")
    assert first["format"] == "ampcompare-exec"
    assert (first["script"], first["arguments"], first["engine"]) == ("gan.py", [level], "compat")
    assert initialize["optimizers"] == {"0": "SGD", "1": "Adam"}
    assert initialize["loss_scales"] == [65536.0] * 3
    assert (last["kind"], last["exit_code"]) == ("end", 0)
    assert len(rows) == len(seen)
    for row, (kind, number, *values) in zip(rows, seen, strict=True):
        assert row["kind"] == kind
        if kind == "step":
            assert (row["optimizer"], row["applied"]) == (number, values[0])
            continue
        loss, before, after = values
        assert (row["loss_id"], row["scale_before"], row["scale_after"]) == (number, before, after)
        assert row["loss"] == (loss if abs(loss) < float("inf") else str(loss))
        assert row["overflow"] is (after < before)
        assert row["optimizers"] == [number // 2]
        assert row["skips"] == ([number // 2] if row["overflow"] else [])
    skipped = [
        [row["applied"] for row in rows if row.get("optimizer") == number].count(False)
        for number in (0, 1, 2)
    ]
    assert skipped == [seen.count(["step", number, False]) for number in (0, 1, 2)]
    assert 2 <= skipped[0] < 6
    assert 1 <= skipped[1] < 6
    assert all(row["seconds"] > 0 for row in rows if row["kind"] == "step" and row["step"] > 0)

    report = forked("-m", "ampcompare", "report", "--format", "json", "steps.jsonl")
    summary = json.loads(report.stdout)
    assert [(one["name"], one["steps"], one["skipped"]) for one in summary["optimizers"]] == [
        ("SGD", 6, skipped[0]),
        ("Adam", 6, skipped[1]),
    ]
    finals = {value[1]: value[4] for value in seen if value[0] == "backward"}
    assert {one["loss_id"]: one["scale_final"] for one in summary["losses"]} == finals
    assert len(set(finals.values())) == 3


ACCUMULATE = """
    import sys
    import torch
    from apex import amp

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", keep_batchnorm_fp32=True, verbosity=0)
    print(amp._amp_state.opt_properties.opt_level, next(model.parameters()).dtype)
    x = torch.randn(6, 4)
    for step in range(2):
        for part, chunk in enumerate(x.chunk(3)):
            with amp.scale_loss(model(chunk).float().mean() / 3, optimizer, delay_unscale=part < 2) as scaled:
                scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save({"amp": amp.state_dict()}, "last.pt")
    sys.exit(5)
"""


def test_the_file_with_the_calls_of_apex_is_named(write, legacy) -> None:
    """It is not the one that was started, and only that one can be verified."""
    write("train.py", "import loop, other\n")
    write(
        "loop.py",
        "from apex import amp\namp.initialize(__import__('torch').nn.Linear(2, 2), opt_level='O0', verbosity=0)\n",
    )
    write("other.py", "'No apex here.'\n")
    done = legacy("--device", "cpu", "train.py", "--epochs", "a b")
    assert done.stderr.splitlines()[-1] == (
        "ampcompare: to move loop.py to torch.amp, and check that it trains the same: "
        "ampcompare migrate --verify train.py -- --epochs 'a b'"
    )
    assert "migrate" not in legacy("--record", "steps.jsonl", "other.py").stderr


def test_accumulation_and_override(write, legacy, tmp_path: Path) -> None:
    """A delayed unscale has no overflow verdict; an overridden level drops what it does not take and says so."""
    write("train.py", ACCUMULATE)
    done = legacy("--opt-level", "O1", "--record", "steps.jsonl", "train.py")
    assert (done.returncode, done.stdout) == (5, "O1 torch.float32\n")
    assert done.stderr.splitlines() == [
        "ampcompare: --opt-level O1 instead of the script's O2, without the script's keep_batchnorm_fp32",
        "ampcompare: 2 steps, 0 skipped, loss scale 65536; for more: ampcompare report steps.jsonl",
    ]
    rows = rows_of(tmp_path / "steps.jsonl")
    assert rows[0]["opt_level"] == rows[1]["opt_level"] == "O1"
    assert [row["overflow"] for row in rows[2:] if row["kind"] == "backward"] == [None, None, False] * 2
    assert [row["kind"] for row in rows[2:]] == ["backward", "backward", "backward", "step"] * 2 + ["end"]
    assert rows[-1]["exit_code"] == 5
    assert (tmp_path / "last.pt").exists()


def test_the_warning_points_at_the_script(write, forked) -> None:
    """With a level of ours too, the line of the deprecation is that of the script's `amp.initialize`."""
    write("train.py", ACCUMULATE)
    done = forked("-m", "ampcompare", "exec", "--opt-level", "O1", "train.py")
    (line,) = (line for line in done.stderr.splitlines() if "DeprecatedFeatureWarning" in line)
    assert "train.py:" in line
    assert "ampcompare/" not in line.partition(": ")[0]


def test_level_and_record_change_no_bits(write, legacy) -> None:
    """Watching a run does not change it, and overriding by the level that the script asks for anyway neither."""
    source = ACCUMULATE.replace("sys.exit(5)", "print(model.weight.tolist(), amp.state_dict())")
    write("train.py", source)
    plain = legacy("train.py")
    watched = legacy("--opt-level", "O2", "--record", "steps.jsonl", "train.py")
    assert plain.returncode == watched.returncode == 0, watched.stderr
    assert plain.stdout == watched.stdout


def test_a_kill_loses_no_step_that_has_ended(write, legacy, forked, tmp_path: Path) -> None:
    """Each is in the record after a SIGKILL, and the report says that the end is lacking."""
    source = ACCUMULATE.replace("range(2)", "range(10**9)").replace(
        "        optimizer.zero_grad()\n",
        "        optimizer.zero_grad()\n        step < 16 or os.kill(os.getpid(), signal.SIGKILL)\n",
    )
    write("train.py", "    import os, signal\n" + source)
    done = legacy("--record", "steps.jsonl", "train.py")
    assert done.returncode == -9
    rows = rows_of(tmp_path / "steps.jsonl")
    assert [row["kind"] for row in rows[2:]] == ["backward", "backward", "backward", "step"] * 17
    assert all(isinstance(row["loss"], float) for row in rows[2:] if row["kind"] == "backward")
    report = forked("-m", "ampcompare", "report", "steps.jsonl")
    assert "the record has no end" in report.stdout


SCALERS = """
    import json, math, os
    import torch
    from torch.cuda.amp import GradScaler
    from apex.fp16_utils import FP16_Optimizer, network_to_half

    torch.manual_seed(0)
    seen = []
    critic, maker = torch.nn.Linear(4, 1), torch.nn.Linear(3, 4)
    slow, fast = torch.optim.SGD(critic.parameters(), 0.01), torch.optim.Adam(maker.parameters(), 0.01)
    scaler = GradScaler(init_scale=1024.0, growth_interval=2)

    def step(optimizer, number, weight):
        old = weight.detach().clone()
        scaler.step(optimizer)
        return ["step", number, not torch.equal(old, weight)]

    for turn in range(5):
        slow.zero_grad(), fast.zero_grad()
        before, steps, losses = scaler.get_scale(), [], []
        for part in range(2):
            loss = critic(torch.randn(5, 4)).pow(2).mean() / 2 * (math.inf if turn == 1 else 1.0)
            scaler.scale(loss).backward()
            losses.append(loss.item())
        steps.append(step(slow, 0, critic.weight))
        loss = maker(torch.randn(5, 3)).pow(2).mean() * (math.nan if turn == 3 else 1.0)
        scaler.scale(loss).backward()
        losses.append(loss.item())
        steps.append(step(fast, 1, maker.weight))
        scaler.update()
        after = scaler.get_scale()
        seen += [["backward", 0, value, before, before if value is not losses[-1] else after] for value in losses]
        seen += steps

    model = network_to_half(torch.nn.Linear(4, 1))
    inner = torch.optim.SGD(model.parameters(), 0.01)
    old_style = FP16_Optimizer(inner, dynamic_loss_scale=True, verbose=False)
    for turn in range(4):
        old_style.zero_grad()
        for part in range(2):
            loss = model(torch.ones(2, 4)).float().mean() * (math.inf if turn == 1 else 1.0)
            before = old_style.loss_scaler.loss_scale()
            old_style.backward(loss, update_master_grads=part == 1)
            seen.append(["backward", 1, loss.item(), before, old_style.loss_scaler.loss_scale()])
        master = inner.param_groups[0]["params"][0]
        weight = master.detach().clone()
        old_style.step()
        seen.append(["step", 2, not torch.equal(weight, master)])

    import apex.optimizers
    from apex.contrib.optimizers import FusedAdam
    model = torch.nn.Linear(4, 1).half()
    inner = FusedAdam(model.parameters(), lr=0.01)
    of_2018 = apex.optimizers.FP16_Optimizer(inner, dynamic_loss_scale=True, verbose=False)
    for turn in range(4):
        of_2018.zero_grad()
        before, weight = of_2018.loss_scale, of_2018.fp32_groups[0][0].clone()
        loss = model(torch.ones(2, 4).half()).float().mean() * (math.inf if turn == 2 else 1.0)
        of_2018.backward(loss)
        of_2018.step()
        seen.append(["backward", 2, loss.item(), before, of_2018.loss_scale])
        seen.append(["step", 3, not torch.equal(weight, of_2018.fp32_groups[0][0])])
    json.dump(seen, open("seen.json", "w"))

    off = GradScaler(enabled=False)
    loss = critic(torch.ones(2, 4)).mean()
    off.scale(loss).backward()
    off.step(slow)
    os.mkdir("elsewhere")
    os.chdir("elsewhere")
"""


def test_grad_scaler_and_fp16_optimizer(write, legacy, forked, tmp_path: Path) -> None:
    """Losses, scales, steps and skips of a GradScaler and both FP16_Optimizers are recorded, and counted at the end."""
    write("train.py", SCALERS)
    done = legacy("--device", "cpu", "--record", "steps.jsonl", "train.py", PYTHONWARNINGS="ignore")
    assert done.returncode == 0, done.stderr
    seen = json.loads((tmp_path / "seen.json").read_text())
    _, *rows, last = rows_of(tmp_path / "steps.jsonl")
    named = [(row["opt_level"], row["optimizers"]) for row in rows if row["kind"] == "initialize"]
    assert named == [
        ("GradScaler", {"0": "SGD", "1": "Adam"}),
        ("FP16_Optimizer", {"2": "SGD"}),
        ("FP16_Optimizer", {"3": "FusedAdam"}),
        ("GradScaler", {"0": "SGD"}),
    ]
    rows = [row for row in rows if row["kind"] != "initialize"]
    *rows, unscaled, plain = rows
    for row, (kind, number, *values) in zip(rows, seen, strict=True):
        assert row["kind"] == kind
        if kind == "step":
            assert (row["optimizer"], row["applied"]) == (number, values[0])
            continue
        loss, before, after = values
        assert (row["loss_id"], row["scale_before"], row["scale_after"]) == (number, before, after)
        assert row["loss"] == loss or (row["loss"] == str(loss))
        assert (row["overflow"] or False) is (after < before)
        assert bool(row["skips"]) is (row["overflow"] or False)
    skipped = sum(one[0] == "step" and not one[2] for one in seen)
    assert skipped >= 4
    assert (unscaled["scale_before"], unscaled["scale_after"], unscaled["overflow"]) == (None, None, None)
    assert (plain["optimizer"], plain["applied"]) == (0, True)
    assert last["kind"] == "end"

    steps = sum(one[0] == "step" for one in seen) + 1
    finals = [
        next(one[4] for one in reversed(seen) if one[:2] == ["backward", number]) for number in (0, 1, 2)
    ]
    assert done.stderr.count("ampcompare migrate --verify train.py") == 1
    assert done.stderr.splitlines()[-2] == (
        f"ampcompare: {steps} steps, {skipped} skipped, loss scales {', '.join(f'{scale:g}' for scale in finals)}; "
        "for more: ampcompare report steps.jsonl"
    )
    report = forked("-m", "ampcompare", "report", "steps.jsonl")
    assert "amp GradScaler, FP16_Optimizer; it ended with exit code 0" in report.stdout, report.stderr


def test_a_record_without_steps_says_so(write, legacy) -> None:
    """A script that trains without amp leaves a record without steps, and the last line says why."""
    write("train.py", "import torch\nprint(torch.ones(1).item())")
    done = legacy("--record", "steps.jsonl", "train.py")
    assert done.stderr.startswith("ampcompare: the record has no step: none went through apex.amp")


@pytest.mark.parametrize("arm", [[], ["--arm", "script"]])
def test_the_api_before_initialize(arm: list[str], write, legacy, tmp_path: Path) -> None:
    """The losses are those of the script, not the scaled ones, and a skipped step is one."""
    write("train.py", HANDLE)
    done = legacy(*arm, "--record", "steps.jsonl", "train.py")
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "steps.jsonl")[1:]
    backwards = [row for row in rows if row["kind"] == "backward"]
    losses = [float(line) for line in done.stdout.splitlines() if "overflow" not in line]
    assert [float(row["loss"]) for row in backwards] == losses
    assert [row["applied"] for row in rows if row["kind"] == "step"] == [False, True, True]
    assert [row["scale_after"] for row in backwards] == [2.0**15] * 3
    assert "3 steps, 1 skipped, loss scale 32768" in done.stderr


def test_a_secret_in_the_name_of_a_metric_is_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_TOKEN", "Xq7vT2mPz9Lk4WdR")
    recorder = Recorder(str(tmp_path / "steps.jsonl"), {"format": "x"})
    recorder.add_row({"kind": "metric", "name": "loss/Xq7vT2mPz9Lk4WdR", "value": 0.5, "source": "wandb.log"})
    recorder.add_row({"kind": "step", "optimizer": 0, "step": 0, "applied": True, "seconds": None})
    assert rows_of(tmp_path / "steps.jsonl")[1]["name"] == "loss/$SERVICE_TOKEN"
