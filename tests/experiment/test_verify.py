"""`migrate --verify`: comparisons of invented runs, and real runs of small scripts."""

import dataclasses
import functools
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from ampcompare.base.errors import ConfigError, LaunchError
from ampcompare.base.processes.sandbox import can_sandbox
from ampcompare.experiment import script_process, verify
from ampcompare.experiment.rewrite_comparison import (
    DIFFERENT,
    EQUAL,
    WITHIN,
    compare_runs,
    differences_beyond_twin,
)
from ampcompare.experiment.script_process import trace_script_in_child
from ampcompare.experiment.script_run import ScriptRun
from ampcompare.experiment.verify import verify_rewritten_script
from ampcompare.source.migrate.project import migrate_file

RUN = ScriptRun([1.0, 0.5], [65536.0, 65536.0], [(0, True), (0, True)], {"0": [["a", "b"], ["c", "d"]]})
SCRIPT = """
import sys
import torch
from apex import amp

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level=sys.argv[1])
for step in range(12):
    x, y = torch.randn(4, 8).cuda(), torch.randint(2, (4,)).cuda()
    if step == 3:
        x = x * float(sys.argv[2])
    loss = torch.nn.functional.cross_entropy(model(x).float(), y)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_equal_runs_are_equal_to_the_last_bit() -> None:
    assert compare_runs(RUN, RUN)[0] == EQUAL
    strange = dataclasses.replace(RUN, losses=[1.0, float("nan")])
    assert compare_runs(strange, strange)[0] == EQUAL
    # Apex leaves a plain backward pass next to a block alone, which is scaled in the result.
    more = dataclasses.replace(RUN, losses=[1.0, 9.0, 0.5, 9.0], scales=[65536.0] * 4)
    assert compare_runs(RUN, more)[0] == EQUAL
    assert compare_runs(RUN, dataclasses.replace(more, passes=[{}]))[0] == DIFFERENT


def test_a_small_difference_is_within_rounding_and_named() -> None:
    """The first step and tensor are said."""
    other = dataclasses.replace(RUN, losses=[1.0, 0.501], digests={"0": [["a", "b"], ["c", "e"]]})
    verdict, lines = compare_runs(RUN, other)
    assert verdict == WITHIN
    assert "first at backward pass 2" in lines[0]
    assert "first at step 2 in parameter 2" in lines[3]


@pytest.mark.parametrize(
    ("bias", "weight", "verdict"),
    [
        ([0.0102, -0.019], [1.0, 0.5], WITHIN),  # rounding, large against a few updates
        ([0.0, 0.0], [1.0, 0.5], DIFFERENT),  # never stepped
        ([float("nan"), 0.0], [1.0, 0.5], DIFFERENT),
        ([0.01, -0.02], [1.0, 0.3], DIFFERENT),
    ],
)
def test_weights_are_compared_by_length(bias: list[float], weight: list[float], verdict: str) -> None:
    """A few updates of a bias differ by more than a hundredth."""
    weights = {"0.0": np.array([1.0, 0.5]), "0.1": np.array([0.01, -0.02])}
    changed = {"0.0": np.array(weight), "0.1": np.array(bias)}
    other = dataclasses.replace(RUN, weights=changed, digests={"0": [["a", "b"], ["c", "e"]]})
    assert compare_runs(dataclasses.replace(RUN, weights=weights), other)[0] == verdict


@pytest.mark.parametrize(
    "change",
    [
        {"losses": [1.0, 0.6]},
        {"losses": [1.0, float("nan")]},
        {"applied": [(0, True), (0, False)]},
        {"applied": [(0, True)]},
    ],
)
def test_another_loss_or_skipped_step_is_different(change: dict[str, object]) -> None:
    assert compare_runs(RUN, dataclasses.replace(RUN, **change))[0] == DIFFERENT  # type: ignore[arg-type]


FULL = dataclasses.replace(
    RUN, norms={"0": [1.0, 1.0]}, halves=("float16",), policy=(2.0, 0.5, 2000.0), clears=(True, True)
)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"halves": ("bfloat16",)}, "losses are computed in bfloat16, not in float16"),
        ({"policy": (2.0, 0.25, 2000.0)}, "the factors are 2 and 0.25 every 2000 steps, not 2 and 0.5"),
        ({"clears": (True, False)}, "nothing clears them before step 2"),
        ({"norms": {"0": [1.02, 1.0]}}, "first at step 1 of optimizer 1: norm 1 against 1.02"),
    ],
)
def test_what_few_steps_need_not_show_is_different(change: dict[str, Any], says: str) -> None:
    """Another 16-bit type or policy of the scale, kept gradients, and other gradients of equal losses at first."""
    verdict, lines = compare_runs(FULL, dataclasses.replace(FULL, **change))
    assert verdict == DIFFERENT
    assert any(says in line for line in lines)
    assert compare_runs(FULL, FULL)[0] == EQUAL


def test_losses_that_are_scaled_where_none_was_are_different() -> None:
    """Also where all are equal: such a rewrite skips steps that the original takes. One of several is left alone."""
    passes = [{}, {}]
    scaled = dataclasses.replace(RUN, passes=passes)
    plain = dataclasses.replace(scaled, losses=[], scales=[])
    verdict, lines = compare_runs(plain, scaled)
    assert verdict == DIFFERENT
    assert f"losses: {DIFFERENT}; 0 against 2 were scaled" in lines
    one = dataclasses.replace(scaled, losses=[1.0], scales=[65536.0])
    assert "losses: not compared, since 1 against 2 were scaled" in compare_runs(one, scaled)[1]


def test_settings_that_a_run_does_not_have_are_not_compared() -> None:
    """A static scale has no policy, a script may clear by `grad = None`, and later gradients part by roundings."""
    other = dataclasses.replace(FULL, policy=(), clears=(True, True), norms={"0": [1.001, 1.3]})
    assert compare_runs(dataclasses.replace(FULL, policy=(), clears=(False, False)), other)[0] == EQUAL


def _return(run: ScriptRun, **_: Any) -> ScriptRun:
    return run


def test_weights_that_roundings_take_as_far_are_within_rounding() -> None:
    """A bias in front of a batch norm has gradients that are roundings of nothing; a twin says how far they lead."""
    weights = {"0.0": np.array([1.0, 0.5]), "0.1": np.array([0.2, -0.3])}
    original = dataclasses.replace(RUN, weights=weights)
    apart = {**weights, "0.1": np.array([0.1, -0.3])}
    rewritten = dataclasses.replace(RUN, weights=apart, digests={"0": [["a", "b"], ["c", "e"]]})
    assert compare_runs(original, rewritten)[0] == DIFFERENT
    for bias, verdict in (([0.25, -0.3], WITHIN), ([0.2001, -0.3], DIFFERENT)):
        twin = dataclasses.replace(original, weights={**weights, "0.1": np.array(bias)})
        runs = verify._Verification(
            "train.py", [], functools.partial(_return, twin), print, how="", stack=None
        )
        assert runs._compare_with_twin_if_different(original, rewritten)[0] == verdict


def grown(factor: float, *, bias: float = 0.0) -> ScriptRun:
    """A run whose losses drift from those of `grown(0)` by a factor that doubles, and a bias that was 0."""
    losses = [1.0, *(1.0 + factor * 2.0**step for step in range(4))]
    weights = {"0.0": np.array([1.0, 0.5 + factor]), "0.1": np.array([0.01 + bias, -0.02])}
    last = "d" if factor == bias == 0 else "e"
    return ScriptRun(losses, [None] * 5, [(0, True)] * 5, {"0": [["a", "b"], ["c", last]]}, weights)


@pytest.mark.parametrize(
    ("run", "verdict"),
    [
        (grown(0.003), WITHIN),  # 0.3 % at the second pass, 1.2 % at the fourth
        (grown(0.02), DIFFERENT),
        (grown(float("nan")), DIFFERENT),
        (dataclasses.replace(grown(0.003), scales=[1024.0] * 5), DIFFERENT),
        (grown(0.003, bias=0.1), DIFFERENT),  # far from what the first losses say
    ],
)
def test_losses_that_part_behind_the_first_steps_are_of_a_training_that_amplifies_roundings(
    run: ScriptRun, verdict: str
) -> None:
    found, lines = compare_runs(grown(0), run)
    assert found == verdict
    assert verdict == DIFFERENT or "rounding up to backward pass 3; first at backward pass 2" in lines[0]


@pytest.mark.slow
def test_a_rewrite_that_trains_as_o1_is_right_where_o2_trains_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third run is at O1."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    at_o2 = dataclasses.replace(grown(0.04), levels=("O2",))
    for at_o1, expected, code in (
        (grown(0), "equal to the last bit of O1; O2 has no equivalent in torch.amp; you can go on if", 0),
        (grown(0.002), "within rounding of O1; O2 has no equivalent in torch.amp; you can go on if", 0),
        (grown(0.02), DIFFERENT, 1),
        (dataclasses.replace(grown(0), applied=[(0, False)] * 5), DIFFERENT, 1),
    ):
        runs = iter([at_o2, grown(0), at_o1])
        asked: list[dict[str, object]] = []

        def run(*_: object, asked: Any = asked, runs: Any = runs, **how: object) -> ScriptRun:
            if how.get("twin"):
                return grown(0.001)
            asked.append(how)
            result: ScriptRun = next(runs)
            return result

        monkeypatch.setattr(verify, "trace_script_in_child", run)
        said: list[str] = []
        assert verify_rewritten_script(str(script), [], steps=5, say=said.append, how="rewrite") == code
        assert next(line for line in said if line.startswith(f"verdict: {expected}"))
        assert [how.get("opt_level") for how in asked] == [None, None, "O1"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"norms": {"0": [1.0, 3.0]}}, "gradients: different; first at step 2"),
        ({"norms": {"0": [1.0, float("nan")]}}, "gradients: different; first at step 2"),
        ({"passes": [{"AddmmBackward0": (0, 2), "NllLossBackward0": (0, 1)}]}, "outside of autocast"),
        (
            {"passes": [{"AddmmBackward0": (2, 0), "NllLossBackward0": (1, 0)}]},
            "is a loss outside of autocast",
        ),
        (
            {"passes": [{"AddmmBackward0": (3, -1), "NllLossBackward0": (0, 1)}]},
            "autocast that had its casts off",
        ),
        ({"scales": [1024.0, 1024.0]}, "different from the start: 65536 against 1024"),
    ],
)
def test_what_is_more_than_roundings_is_different_however_near_losses_are(
    change: dict[str, object], words: str
) -> None:
    """Adam hides gradients that are not unscaled, and a pass in fp32 is a rounding from one in fp16."""
    passes = [{"AddmmBackward0": (2, 0), "NllLossBackward0": (0, 1)}]
    run = dataclasses.replace(RUN, norms={"0": [1.0, 1.0]}, passes=passes)
    near = dataclasses.replace(run, losses=[1.0, 0.501], norms={"0": [1.0, 1.2]})
    assert compare_runs(run, near)[0] == WITHIN
    verdict, lines = compare_runs(run, dataclasses.replace(near, **change))  # type: ignore[arg-type]
    assert verdict == DIFFERENT
    assert any(words in line for line in lines)


def test_more_work_in_16_bits_is_said() -> None:
    """A verdict stays that of the numbers; that a part of them has fewer bits than before is no secret."""
    passes = [{"AddmmBackward0": (2, 0), "GeluBackward0": (0, 2), "TBackward0": (0, 2)}]
    run = dataclasses.replace(RUN, passes=passes)
    more = [{"AddmmBackward0": (2, 0), "GeluBackward0": (2, 0), "TBackward0": (2, 0), "BmmBackward0": (1, 0)}]
    verdict, lines = compare_runs(run, dataclasses.replace(run, passes=more))
    assert verdict == EQUAL
    said = [line for line in lines if "more often" in line]
    assert [line.partition("pass 1: ")[2] for line in said] == ["Bmm 1, not 0; Gelu 2, not 0"]
    assert not any("more often" in line for line in compare_runs(run, run)[1])
    less = dataclasses.replace(run, passes=[{"AddmmBackward0": (2, 0), "GeluBackward0": (0, 1)}])
    assert not any("more often" in line for line in compare_runs(run, less)[1])


PARTS = """
import torch
from apex import amp

body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU()).cuda()
head = torch.nn.Linear(8, 2).cuda()
first = torch.optim.Adam(body.parameters(), lr=0.02)
second = torch.optim.Adam(head.parameters(), lr=0.02)
[body, head], [first, second] = amp.initialize([body, head], [first, second], opt_level="O2", keep_batchnorm_fp32=True)
for step in range(8):
    x, y = torch.randn(4, 4).cuda(), torch.randint(2, (4,)).cuda()
    loss = torch.nn.functional.cross_entropy(head(body(x)), y)
    first.zero_grad()
    second.zero_grad()
    with amp.scale_loss(loss, [first, second]) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(first), 0.5)
    torch.nn.utils.clip_grad_norm_(amp.master_params(second), 0.5)
    first.step()
    second.step()
"""
# What wrong migrations make of lines of the right one.
WRONG = {
    "no unscale before clipping": ("    scaler.unscale_(first)\n", ""),
    "no autocast": ("dtype=torch.float16)", "dtype=torch.float16, enabled=False)"),
    "models return fp16": ("return to_fp32(forward(", "return (forward("),
    "the loss is not scaled": ("scaler.scale(loss)", "loss"),
    "the scale is never updated": ("    scaler.update()\n", ""),
    "a step without the scaler": ("scaler.step(first)", "first.step()"),
    "bfloat16": ("dtype=torch.float16", "dtype=torch.bfloat16"),
    "another policy of the scale": ('GradScaler("cuda"', 'GradScaler("cuda", backoff_factor=0.25'),
}
# Those of them that torch itself refuses in the run.
REFUSED = ("the loss is not scaled", "the scale is never updated")


TWO = """
import torch
from apex import amp

nets = [torch.nn.Linear(4, size).cuda() for size in (2, 3)]
optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
first, second = optimizers
nets, optimizers = amp.initialize(nets, [first, second], opt_level="O1")
for _ in range(3):
    x = torch.randn(4, 4).cuda()
    loss = nets[1](x).float().pow(2).mean()
    second.zero_grad()
    with amp.scale_loss(loss, second) as scaled_loss:
        scaled_loss.backward()
    second.step()
    loss = nets[0](x).float().pow(2).mean()
    first.zero_grad()
    with amp.scale_loss(loss, first) as scaled_loss:
        scaled_loss.backward()
    first.step()
"""


@pytest.mark.usefixtures("forked_runs")
@pytest.mark.integration
@pytest.mark.slow
def test_optimizers_that_step_in_another_order_than_they_were_initialized(tmp_path: Path) -> None:
    """As in most GANs; Apex sees both at once, a scaler each at its first step."""
    script = tmp_path / "train.py"
    script.write_text(TWO, encoding="utf-8")
    said: list[str] = []
    assert verify_rewritten_script(str(script), [], steps=3, say=said.append, how="rewrite") == 0
    assert f"verdict: {EQUAL}; you can go on with the rewritten files:" in said


@pytest.mark.usefixtures("forked_runs")
@pytest.mark.integration
@pytest.mark.slow
def test_wrong_migrations_of_o2_are_different(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The right one is not, whether or not roundings hide the fault: batch norm of four samples amplifies them."""
    script, other = tmp_path / "train.py", tmp_path / "rewritten.py"
    script.write_text(PARTS, encoding="utf-8")
    migration = migrate_file(script).migration
    assert migration is not None
    known: dict[str, ScriptRun] = {}

    def run(path: Path, arguments: list[str], *, rewrite: str | None = None, **how: Any) -> ScriptRun:
        if rewrite:
            return trace_script_in_child(other, arguments, rewrite=rewrite, **how)
        if str(how) not in known:
            known[str(how)] = trace_script_in_child(path, arguments, **how)
        return known[str(how)]

    monkeypatch.setattr(verify, "trace_script_in_child", run)
    for fault, (right, wrong) in {"none": ("", ""), **WRONG}.items():
        assert right in migration.text
        other.write_text(migration.text.replace(right, wrong) if right else migration.text, encoding="utf-8")
        said: list[str] = []
        if fault in REFUSED:
            with pytest.raises(LaunchError, match="the rewritten script ended"):
                verify_rewritten_script(str(script), [], steps=3, say=said.append, how="rewrite")
            continue
        code = verify_rewritten_script(str(script), [], steps=3, say=said.append, how="rewrite")
        assert code == (0 if fault == "none" else 1), (fault, said)


@pytest.mark.usefixtures("forked_runs")
@pytest.mark.integration
@pytest.mark.parametrize(
    ("level", "factor", "verdict", "skipped"),
    [("O1", "1e4", EQUAL, 1), pytest.param("O2", "1", WITHIN, 0, marks=pytest.mark.slow)],
)
def test_a_rewritten_script_trains_the_same(
    tmp_path: Path, level: str, factor: str, verdict: str, skipped: int
) -> None:
    """With a skipped step as well; O2 becomes autocast, which rounds otherwise."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    said: list[str] = []
    assert verify_rewritten_script(str(script), [level, factor], steps=6, say=said.append, how="rewrite") == 0
    compares = verdict == WITHIN  # with O2, which torch.amp does not have
    assert said[-2 - compares].startswith(
        f"verdict: {verdict}; you can go on {'if' if compares else 'with'} "
    )
    assert compares == said[-2].startswith("  ampcompare compare --reference O2 --arm fp16 ")
    assert said[-1].split() == ["ampcompare", "migrate", "--rewrite", "--write", str(script)]
    assert f"6 steps, {skipped} skipped" in said[0]
    assert f"6 steps, {skipped} skipped" in said[1]
    assert script.read_text(encoding="utf-8") == SCRIPT


@pytest.mark.usefixtures("forked_runs")
@pytest.mark.integration
@pytest.mark.slow
def test_clipping_in_every_micro_batch_trains_the_same(tmp_path: Path) -> None:
    """But for roundings: the norm is of scaled gradients; an overflow skips the same step."""
    script = tmp_path / "train.py"
    step = "    optimizer.step()\n    optimizer.zero_grad()\n"
    apart = "    if step % 2 == 1:\n        optimizer.step()\n        optimizer.zero_grad()\n"
    script.write_text(SCRIPT.replace(step, apart).replace(", 1.0)", ", 0.1)"), encoding="utf-8")
    said: list[str] = []
    assert verify_rewritten_script(str(script), ["O1", "1e4"], steps=4, say=said.append, how="rewrite") == 0
    assert said[-2].startswith(f"verdict: {WITHIN}; you can go on")
    assert all("4 steps, 1 skipped" in line for line in said[:2])


HELPED = """
import torch
import values
from apex import amp

model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
for step in range(2 * values.VALUE + 1):
    loss = model(torch.randn(8, 4).cuda()).float().square().mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    if step % 2:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.usefixtures("forked_runs")
@pytest.mark.integration
@pytest.mark.slow
def test_calls_of_apex_in_another_file_and_a_folder_of_PYTHONPATH_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last command names the file with the calls; of a script that ends by itself all passes are counted."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "values.py").write_text("VALUE = 3\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    script, loop = tmp_path / "train.py", tmp_path / "loop.py"
    script.write_text("import loop\n", encoding="utf-8")
    loop.write_text(HELPED, encoding="utf-8")
    said: list[str] = []
    assert (
        verify_rewritten_script(str(script), ["--epochs", "1"], steps=6, say=said.append, how="rewrite") == 0
    )
    assert said[1] == "rewritten, on torch: 3 steps, 0 skipped, 7 backward passes"
    assert said[-1].endswith(f"migrate --rewrite --write {script} {loop}")


@pytest.mark.usefixtures("forked_runs")
@pytest.mark.integration
def test_a_script_that_fails_is_said_in_one_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from apex import amp\nraise RuntimeError('no data')\n", encoding="utf-8")
    with pytest.raises(LaunchError, match="RuntimeError: no data"):
        verify_rewritten_script(str(script), [], steps=2, say=lambda line: None, how="rewrite")


PROBABILITIES = """
import torch
from torch import nn
from apex import amp

model = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.BCELoss()
level = str("O2")
model, optimizer = amp.initialize(model, optimizer, opt_level=level)
for step in range(3):
    x = torch.randn(4, 4).cuda()
    loss = criterion(model(x), (x[:, :1] > 0).float())
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.usefixtures("forked_runs")
@pytest.mark.integration
@pytest.mark.slow
def test_a_cross_entropy_of_probabilities_trains_the_same_outside_of_autocast(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROBABILITIES, encoding="utf-8")
    said: list[str] = []
    assert verify_rewritten_script(str(script), [], steps=3, say=said.append, how="rewrite") == 0
    assert "skipped steps: equal" in said
    assert any(line.startswith("known difference") and "AMP230" in line for line in said)


@pytest.mark.usefixtures("forked_runs")
@pytest.mark.integration
def test_a_cross_entropy_that_autocast_refuses_is_said_with_its_line(tmp_path: Path) -> None:
    """The line is that of the result."""
    script = tmp_path / "train.py"
    unseen = "lambda p, y: nn.functional.binary_cross_entropy(p, y)"
    script.write_text(PROBABILITIES.replace("nn.BCELoss()", unseen), encoding="utf-8")
    with pytest.raises(
        LaunchError, match=r"the rewritten script ended .*train\.py:7: AMP230: .* are unsafe to autocast: "
    ):
        verify_rewritten_script(str(script), [], steps=3, say=lambda line: None, how="rewrite")


def test_a_refused_cross_entropy_of_the_original_or_of_the_result_is_known(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    refused = 'with torch.autocast("cuda"):\n    loss = torch.nn.functional.binary_cross_entropy(p, y)\n'
    script.write_text(f"import torch\n{refused}", encoding="utf-8")
    found = verify._mistakes_few_steps_hide([migrate_file(script, must_parse=True)])
    assert found == []  # without Apex it is not read
    script.write_text(f"import torch\nfrom apex.optimizers import FusedAdam\n{refused}", encoding="utf-8")
    found = verify._mistakes_few_steps_hide([migrate_file(script)])
    assert found == [f"{script}:4: AMP230: the autocast block begins in line 3"]


@pytest.mark.integration
def test_a_run_ends_with_its_time_and_with_what_the_script_leaves_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A child holds the output of the script open."""
    left = (
        "import subprocess, sys; print(subprocess.Popen(['sleep', '300']).pid, file=sys.stderr); sys.exit(5)"
    )
    code, said = script_process.run_command_with_time_limit([sys.executable, "-c", left], dict(os.environ))
    assert code == 5
    assert (
        psutil.wait_procs([psutil.Process(int(said))] if psutil.pid_exists(int(said)) else [], timeout=20)[1]
        == []
    )
    monkeypatch.setattr(script_process, "TIME_LIMIT", 0.1)
    assert script_process.run_command_with_time_limit(["sleep", "300"], dict(os.environ)) == (None, "")


@pytest.mark.integration
def test_a_run_is_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one, which finds a torch that says so; the others are forked."""
    (tmp_path / "torch.py").write_text("raise RuntimeError('this process has no torch')\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "train.py").touch()
    with pytest.raises(
        LaunchError, match="unchanged script ended with exit code 1: RuntimeError: this process has no"
    ):
        trace_script_in_child(tmp_path / "train.py", [], steps=2)


def test_what_is_left_by_hand_cannot_be_verified(tmp_path: Path) -> None:
    """A script that still needs Apex would run on nothing."""
    script = tmp_path / "train.py"
    script.write_text(
        "from apex.fp16_utils import FP16_Optimizer\noptimizer = FP16_Optimizer(optimizer)\n",
        encoding="utf-8",
    )
    with pytest.raises(ConfigError, match="by hand"):
        verify_rewritten_script(str(script), [], steps=2, say=lambda line: None, how="rewrite")
    with pytest.raises(ConfigError, match="no script"):
        verify_rewritten_script(str(tmp_path / "other.py"), [], steps=2, say=lambda line: None, how="rewrite")
    with pytest.raises(ConfigError, match="is a folder"):
        verify_rewritten_script(str(tmp_path), [], steps=2, say=lambda line: None, how="rewrite")


def test_what_the_script_writes_is_said_and_reaches_no_file_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_runs: None
) -> None:
    if not can_sandbox(str(tmp_path)):
        pytest.skip("this machine allows no overlays")
    monkeypatch.chdir(tmp_path)
    saving = SCRIPT + "torch.save(model.state_dict(), 'checkpoint.pt')\nopen(sys.argv[3], 'w').write('x')\n"
    Path("train.py").write_text(saving)
    Path("checkpoint.pt").write_text("the user's")
    Path("logs").mkdir()
    said: list[str] = []
    words = ["O1", "1", str(tmp_path / "logs/log.txt")]
    assert verify_rewritten_script("train.py", words, steps=20, say=said.append, how="rewrite") == 0
    assert any(line.startswith("the script writes checkpoint.pt, logs/log.txt: ") for line in said)
    assert Path("checkpoint.pt").read_text() == "the user's"
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        *("checkpoint.pt", "logs", "train.py")
    ]


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (("float32", "float16"), ("float32", "float16"), EQUAL),
        (("float32", "float32"), ("float32", "float16"), DIFFERENT),
        (("float32", "float16"), ("float32", "float32"), WITHIN),
    ],
)
@pytest.mark.parametrize("what", ["reads", "evaluations"])
def test_an_evaluation_in_fewer_bits_is_different(
    what: str, before: tuple[str, ...], after: tuple[str, ...], verdict: str
) -> None:
    runs = (dataclasses.replace(RUN, **{what: types}) for types in (before, after))  # type: ignore[arg-type]
    assert compare_runs(*runs)[0] == verdict


@pytest.mark.parametrize(
    ("norms", "losses", "verdict"),
    [
        ((5.0, 10.05), (1.0, 0.5), EQUAL),
        ((5.0, 5.0), (1.0, 0.5), DIFFERENT),
        ((5.0, float("nan")), (1.0, 0.5), DIFFERENT),
        ((5.0, 5.0), (1.0, 0.4), DIFFERENT),  # by its losses
    ],
)
def test_an_evaluation_of_other_values_is_different(
    norms: tuple[float, ...], losses: tuple[float, ...], verdict: str
) -> None:
    """As one with the weights of an earlier checkpoint, of which losses tell nothing."""
    before = dataclasses.replace(RUN, evaluation_norms=(5.0, 10.0))
    found, lines = compare_runs(
        before, dataclasses.replace(before, evaluation_norms=norms, losses=list(losses))
    )
    assert found == verdict
    is_named = any("model returns without gradients" in line for line in lines)
    assert is_named == (verdict == DIFFERENT and losses == (1.0, 0.5))


def test_a_step_past_its_scaler_is_different_though_no_number_is() -> None:
    """Gradients that are unscaled and finite make the same step; those of an overflow would not."""
    found, lines = compare_runs(RUN, dataclasses.replace(RUN, unchecked_steps=2))
    assert found == DIFFERENT
    assert "steps: different; an optimizer steps by itself" in lines[2]


def test_another_scale_is_different_where_each_step_has_one_pass() -> None:
    """Apex moves a scale at each pass of a step, a GradScaler once."""
    other = dataclasses.replace(RUN, scales=[65536.0, 32768.0])
    assert compare_runs(RUN, other)[0] == DIFFERENT
    more = [
        dataclasses.replace(each, applied=[(0, True)], digests={"0": [["a", "b"]]}) for each in (RUN, other)
    ]
    assert compare_runs(*more)[0] == WITHIN


@pytest.mark.parametrize(
    ("change", "beyond"),
    [
        ({"losses": [1.0, 0.5015]}, ""),
        ({"losses": [1.0, 0.504]}, "losses: different; at backward pass 2 by 0.0079"),
        ({"norms": {"0": [1.0, 1.08]}}, ""),
        ({"norms": {"0": [1.0, 1.3]}}, "gradients: different; their norm at step 2"),
    ],
)
def test_what_is_more_than_a_twin_shows_is_different(change: dict[str, Any], beyond: str) -> None:
    run = dataclasses.replace(RUN, norms={"0": [1.0, 1.0]})
    twin = dataclasses.replace(run, losses=[1.0, 0.5002], norms={"0": [1.0, 1.001]})
    lines = differences_beyond_twin(run, dataclasses.replace(run, **change), twin)
    assert [line.startswith(beyond) for line in lines] == [True] * bool(beyond)
    calm = dataclasses.replace(run, losses=[1.0, 0.6], norms={"0": [1.0, 1.5]})
    assert not differences_beyond_twin(run, dataclasses.replace(run, **change), calm)


LOOP = """
for step in range(4):
    x, y = torch.randn(4, 8).cuda(), torch.randint(2, (4,)).cuda()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    if fp16:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    else:
        loss.backward()
    optimizer.step()
"""
INSTALLED = "import pkgutil\nfrom importlib import metadata\nsys.path.append('site')\n"  # with an Apex
GUARDS = {
    "sys.modules": "fp16 = 'apex' in sys.modules",
    "find_spec": "fp16 = importlib.util.find_spec('apex') is not None",
    "iter_modules": f"{INSTALLED}fp16 = any(each.name == 'apex' for each in pkgutil.iter_modules())",
    "distributions": f"{INSTALLED}fp16 = 'apex' in [each.name for each in metadata.distributions()]",
    "except": "fp16 = True\ntry:\n    importlib.import_module('apex')\nexcept ModuleNotFoundError:\n    fp16 = False",
}


@pytest.mark.usefixtures("forked_runs")
@pytest.mark.integration
@pytest.mark.parametrize(
    "guard",
    [
        pytest.param(guard, id=name, marks=[pytest.mark.slow] * (name != "except"))
        for name, guard in GUARDS.items()
    ],
)
def test_a_switch_that_asks_for_apex_finds_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guard: str
) -> None:
    """A result that is left with such a switch trains in fp32, without an error."""
    build = "model = torch.nn.Linear(8, 2).cuda()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    head = f"import importlib.util\nimport sys\nimport torch\nfrom apex import amp\n{guard}\n{build}"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site" / "apex").mkdir(parents=True)
    (tmp_path / "site" / "apex" / "__init__.py").touch()
    (tmp_path / "site" / "apex-0.1.dist-info").mkdir()
    (tmp_path / "site" / "apex-0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\n")
    script, other = tmp_path / "train.py", tmp_path / "rewritten.py"
    start = "if fp16:\n    model, optimizer = amp.initialize(model, optimizer)"
    script.write_text(head + start + LOOP, encoding="utf-8")
    fields = {"from apex import amp\n": "", start: "scaler = torch.amp.GradScaler('cuda', enabled=fp16)"}
    loop = LOOP.replace(
        "with amp.scale_loss(loss, optimizer) as scaled_loss:\n            scaled_loss.backward()", "pass"
    )
    text = head + start + loop
    for old, new in fields.items():
        text = text.replace(old, new)
    other.write_text(text, encoding="utf-8")

    def run(path: Path, arguments: list[str], *, rewrite: str | None = None, **how: Any) -> ScriptRun:
        return trace_script_in_child(other if rewrite else path, arguments, rewrite=rewrite, **how)

    monkeypatch.setattr(verify, "trace_script_in_child", run)
    moved = verify.MigratedFiles([], False, [], [tmp_path / "torch_amp_adapter.py"])  # a file that changes
    monkeypatch.setattr(verify, "migrate_whole_files", lambda paths, how: moved)
    said: list[str] = []
    assert verify_rewritten_script(str(script), [], steps=4, say=said.append, how="rewrite") == 1
    assert "scaled no loss in 4 steps and 4 backward passes: its switch for fp16 did not act" in said[-2]


@pytest.mark.usefixtures("forked_runs")
@pytest.mark.integration
def test_the_adapter_is_verified_as_a_rewrite(tmp_path: Path) -> None:
    """At O2 too, which it has; with a skipped step, and several files."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("from apex import amp", "from steps import amp"), encoding="utf-8")
    (tmp_path / "steps.py").write_text("from apex import amp\n", encoding="utf-8")
    for level in ("O1", "O2"):
        said: list[str] = []
        assert (
            verify_rewritten_script(str(script), [level, "1e4"], steps=6, say=said.append, how="adapter") == 0
        )
        assert said[1] == "with the adapter, on torch: 6 steps, 1 skipped, 6 backward passes"
        assert said[-2] == f"verdict: {EQUAL}; you can go on with the adapter:"
        files = [str(script), str(tmp_path / "steps.py")]
        assert said[-1].split() == ["ampcompare", "migrate", "--adapter", "--write", *files]


@pytest.mark.usefixtures("forked_runs")
@pytest.mark.integration
@pytest.mark.parametrize(
    ("start", "words"),
    [
        ("fp16 = False", "made 4 steps and 4 backward passes and ended, .* It never called amp.initialize"),
        (
            "fp16 = False\nmodel, optimizer = amp.initialize(model, optimizer, enabled=False)",
            "It called amp.initialize with enabled=False",
        ),
    ],
)
def test_nothing_to_compare_says_what_the_script_did(tmp_path: Path, start: str, words: str) -> None:
    script = tmp_path / "train.py"
    build = "model = torch.nn.Linear(8, 2).cuda()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    script.write_text(f"import torch\nfrom apex import amp\n{build}{start}{LOOP}", encoding="utf-8")
    said: list[str] = []
    try:
        verify_rewritten_script(str(script), [], steps=4, say=said.append, how="adapter")
    except LaunchError as error:
        said.append(str(error))
    assert re.search(words, "\n".join(said))


MOVED = """
import torch

model = torch.nn.Linear(8, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
for step in range(4):
    with torch.autocast("cuda"):
        loss = model(torch.ones(4, 8, device="cuda")).float().pow(2).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of scaled gradients: wrong, and equal to itself
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.usefixtures("forked_runs")
@pytest.mark.integration
@pytest.mark.parametrize("how", ["", "rewrite", "adapter"])
def test_a_script_that_nothing_changes_is_not_compared_with_itself(tmp_path: Path, how: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(MOVED, encoding="utf-8")
    with pytest.raises(
        LaunchError, match="nothing to compare: migrate changes neither the script nor a file"
    ):
        verify_rewritten_script(str(script), [], steps=4, say=print, how=how)


@pytest.mark.usefixtures("forked_runs")
@pytest.mark.integration
def test_no_scaled_loss_is_not_equal_to_none(tmp_path: Path) -> None:
    """The casts of O1 are on, and a step is taken; no loss is there to compare."""
    script = tmp_path / "train.py"
    build = "model = torch.nn.Linear(8, 2).cuda()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    begin = 'fp16 = False\nmodel, optimizer = amp.initialize(model, optimizer, opt_level="O1")'
    script.write_text(f"import torch\nfrom apex import amp\n{build}{begin}{LOOP}", encoding="utf-8")
    with pytest.raises(LaunchError, match="nothing to compare: neither the script nor its migrated form"):
        verify_rewritten_script(str(script), [], steps=4, say=print, how="adapter")
