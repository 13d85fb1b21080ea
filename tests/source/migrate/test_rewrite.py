"""Scripts before and after, by the files of `cases`, and what `migrate --write` loads of either kind of file."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ampcompare import convert_checkpoint
from ampcompare.source.find import find_sources
from ampcompare.source.migrate.project import migrate_file
from ampcompare.source.migrate.read.apex_guards import NO, YES, simplify_constant_conditions
from ampcompare.source.migrate.read.finding import BY_HAND, MARK
from ampcompare.source.migrate.rewrite import migrate_text

CASES = sorted((Path(__file__).parent / "cases").glob("*.txt"))
REPOSITORY = Path(__file__).resolve().parents[3]
CORE = re.compile(r"amp\.(initialize|scale_loss|master_params)\b")


TRAINING = """import torch
from apex import amp

model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
for x in data:
    optimizer.zero_grad()
    loss = model(x)
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
"""

migrated = cache(migrate_text)  # of whole scripts, by several tests


def _parts(path: Path) -> tuple[str, str, str]:
    before, _, rest = path.read_text(encoding="utf-8").partition(">>>> after\n")
    after, _, findings = rest.partition(">>>> findings\n")
    return before, after, findings


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_script_becomes_what_its_case_says(path: Path) -> None:
    before, after, findings = _parts(path)
    migration = migrated(before)
    assert migration.text == after
    assert "".join(f"{each.line}: {each.kind}: {each.message}\n" for each in migration.findings) == findings


@pytest.mark.parametrize("path", CASES, ids=[path.stem for path in CASES])
def test_a_result_parses_is_final_and_has_a_core_as_a_whole_or_not_at_all(path: Path) -> None:
    """A second run changes nothing; half of a core would not run, so what is left has a comment and a finding."""
    before = _parts(path)[0]
    migration = migrated(before)
    ast.parse(migration.text)
    assert migrate_text(migration.text).text == migration.text
    code = "".join(line for line in migration.text.splitlines(keepends=True) if MARK not in line)
    kept, had = len(CORE.findall(code)), len(CORE.findall(before))
    assert kept in (0, had)
    by_hand = [each for each in migration.findings if each.kind == BY_HAND]
    assert bool(kept) <= bool(by_hand)
    assert migration.text.count(MARK) == len({each.line for each in by_hand})


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_newlines_of_the_file_are_kept(newline: str) -> None:
    """New lines end as the others do."""
    before = _parts(Path(__file__).parent / "cases" / "plain_loop.txt")[0]
    after = migrate_text(before.replace("\n", newline)).text
    assert after == migrate_text(before).text.replace("\n", newline)


BRANCHES = """import torch
from apex import amp

model, optimizer = amp.initialize(model, optimizer)
for x in data:
    loss = model(x).mean()
    optimizer.zero_grad()
    if fp16:
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.mark.parametrize("test", ["if not fp16:", "if fp16 is None:", "if not (fp16 and loss):"])
def test_a_test_that_is_asked_the_other_way_round_counts_as_else(test: str) -> None:
    """Whether two branches can both run is a matter of what they say, unless one of them says less."""
    migration = migrate_text(BRANCHES.replace("else:", test))
    excludes = "loss" not in test
    assert bool(migration.findings) is not excludes
    if excludes:
        assert migration.text == migrate_text(BRANCHES).text.replace("else:", test)


def test_characters_outside_of_ascii_do_not_shift_the_edits() -> None:
    """`ast` counts columns in bytes."""
    before = (
        'from apex import amp\nimport torch\n"""ß"""; x = "…", amp.initialize(models=m, opt_level="O1")\n'
    )
    assert '"…", ' in migrate_text(before).text
    ast.parse(migrate_text(before).text)


def test_the_files_of_this_package_are_the_same_to_the_byte() -> None:
    # which leaves out the engine, a copy of Apex
    for path in list(find_sources([REPOSITORY / "ampcompare"]))[::7]:
        text = path.read_bytes().decode("utf-8")
        assert migrate_text(text).text == text, path


SCRIPT = """import torch
from apex import amp

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2")


def train(x):
    loss = model(x).mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()


checkpoint = torch.load(path)
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
amp.load_state_dict(checkpoint["KEY"])
saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "KEY": amp.state_dict(), "epoch": 3}
"""


@pytest.mark.integration  # a pickle is first read in a child process
@pytest.mark.parametrize("key", ["amp", "scaler", "my_state"])
def test_a_rewritten_script_resumes_from_a_file_of_apex_and_from_what_convert_makes_of_it(
    tmp_path: Path, key: str
) -> None:
    """Under the script's own key, and it saves under that key too."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 7}}
    old, new = tmp_path / "old.pt", tmp_path / "new.pt"
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), key: state, "epoch": 2}, old
    )
    convert_checkpoint(old, new, to="native")
    text = migrate_text(SCRIPT.replace("KEY", key)).text.replace('"cuda"', '"cpu"')
    for path in (old, new):
        names: dict[str, Any] = {"path": path}
        exec(text, names)
        assert torch.equal(names["model"].weight, model.weight)
        assert names["scaler"].get_scale() == 1024.0
        assert names["saved"][key]["_growth_tracker"] == 7


@pytest.mark.parametrize("saved", ["fp16", "fp32"])
@pytest.mark.parametrize("loaded", ["fp16", "fp32"])
def test_what_a_run_with_or_without_fp16_saves_loads_in_either(saved: str, loaded: str) -> None:
    """The state of a scaler that is switched off is empty, which one that is on refuses."""
    text = migrate_text(SCRIPT.replace("KEY", "amp").replace('"O2"', '"O1", enabled=fp16')).text.replace(
        '"cuda"', '"cpu"'
    )
    begin, end = text.index("checkpoint = "), text.index("saved = ")
    first: dict[str, Any] = {"fp16": saved == "fp16"}
    exec(text[:begin] + text[end:], first)
    names: dict[str, Any] = {"fp16": loaded == "fp16", "path": first["saved"]}
    exec(text.replace("torch.load(path)", "path"), names)
    assert names["scaler"].is_enabled() == (loaded == "fp16")
    assert names["saved"]["amp"] == (names["scaler"].state_dict() if loaded == "fp16" else {})


ANSWERED = {
    "x = a and YES": "x = bool(a)",
    "x = a > 1 and YES": "x = a > 1",
    "x = YES": "x = True",
    "x = f(a, flag=NO)": "x = f(a, flag=False)",
    "x = 1 if not YES else (a, b)": "x = (a, b)",
    "x = not (b and (a or YES))": "x = not (b)",
    "while NO or a:\n    pass": "while a:\n    pass",
    "assert (a and\n        YES), 1": "assert (a), 1",
    "if f() or YES:\n    pass": "if f() or True:\n    pass",
    "if (a or b) and YES and c:\n    f()": "if (a or b) and c:\n    f()",
    "if NO:\n    f()\nelif a:\n    g()": "if a:\n    g()",
    "if a:\n    f()\nelif NO:\n    g()": "if a:\n    f()\nelif False:\n    g()",
    "if a:\n    f()\nelif (YES):\n    g()\nelse:\n    h()\nk()": "if a:\n    f()\nelse:\n    g()\nk()",
    "if NO:\n    f()\nk()": "k()",
    "if YES: f()": "if True: f()",
}


@pytest.mark.parametrize("text", ANSWERED)
def test_an_answer_leaves_no_condition_that_always_holds(text: str) -> None:
    asked = text.replace("YES", YES).replace("NO", NO)
    assert simplify_constant_conditions(f"{asked}\n").strip() == ANSWERED[text]


@pytest.mark.parametrize(
    ("wrapper", "notes"),
    [
        ("DDP(model)", 1),
        ("DDP(model, delay_allreduce=False)", 1),
        ("DDP(model, delay_allreduce=args.late)", 1),
        ("functools.partial(DDP)", 1),
        ("DDP(model, delay_allreduce=True)", 0),
    ],
)
def test_parameters_without_gradient_are_an_error_of_the_wrapper_of_torch(wrapper: str, notes: int) -> None:
    script = (
        f"import functools\nfrom apex.parallel import DistributedDataParallel as DDP\nmodel = {wrapper}\n"
    )
    found = migrate_text(script).findings
    assert [each.line for each in found if "never get a gradient" in each.message] == [3] * notes


def test_a_plain_backward_pass_for_an_optimizer_that_a_dict_holds_is_the_other_branch() -> None:
    script = (
        "import torch\nfrom apex import amp\n\nmodel, steps['a'] = amp.initialize(model, steps['a'])\nfor x in data:\n"
        "    steps['a'].zero_grad()\n    loss = model(x)\n    if half:\n"
        "        with amp.scale_loss(loss, steps['a']) as scaled:\n            scaled.backward()\n"
        "    else:\n        loss.backward()\n    steps['a'].step()\n"
    )
    migration = migrate_text(script)
    assert not [each for each in migration.findings if each.kind == BY_HAND]
    assert (
        "    scaler.scale(loss).backward()\n    scaler.step(steps['a'])\n    scaler.update()\n"
        in migration.text
    )


@pytest.mark.parametrize(("otherwise", "is_known"), [("O0", True), ("O2", False)])
def test_a_choice_of_two_known_levels_is_no_unknown_level(otherwise: str, is_known: bool) -> None:
    text = TRAINING.replace('"O1"', f'"O1" if half else "{otherwise}"')
    migration = migrate_text(text)
    assert f'enabled=("O1" if half else "{otherwise}") != "O0"' in migration.text
    assert any("which opt level this is" in each.message for each in migration.findings) is not is_known


def test_what_flattens_tensors_has_a_twin_in_torch() -> None:
    (finding,) = migrate_text("from apex_C import flatten\nflat = flatten(tensors)\n").findings
    assert "apex_C.flatten stays: torch._utils._flatten_dense_tensors does the same" in finding.message


@pytest.mark.parametrize(
    ("imports", "is_left"),
    [
        ("from apex.fp16_utils import *\nfrom own import *\n", True),
        ("from own import *\nfrom apex.fp16_utils import *\n", False),
        ("from apex.fp16_utils import to_python_float\nfrom own import *\n", False),
    ],
)
def test_a_name_that_a_later_star_import_may_bind_is_left(imports: str, is_left: bool) -> None:
    result = migrate_text(f"{imports}def show(loss):\n    print(to_python_float(loss))\n")
    assert ("loss.item()" in result.text) is not is_left
    assert (
        any(" is of `import *` of Apex, and a later `import *`" in each.message for each in result.findings)
        is is_left
    )


def test_a_name_that_a_star_import_of_the_project_binds_below_is_that_of_the_project(tmp_path: Path) -> None:
    text = (
        "from apex.optimizers import FusedAdam\nfrom helpers import *\n\n\n"
        "def optimizer(net):\n    return FusedAdam(net.parameters())\n"
    )
    path, helper = tmp_path / "train.py", tmp_path / "helpers.py"
    path.write_text(text)
    helper.write_text("from torch.optim import Adam as FusedAdam\n")
    migration = migrate_file(path).migration
    assert migration is not None
    assert "return FusedAdam(net.parameters())" in migration.text
    reason = "FusedAdam is torch.optim.Adam here, by a later `import *` of this project"
    assert [each.line for each in migration.findings if reason in each.message] == [6]
    helper.write_text("from torch.optim import Adam\n")
    migration = migrate_file(path).migration
    assert migration is not None
    assert "AdamW" in migration.text
