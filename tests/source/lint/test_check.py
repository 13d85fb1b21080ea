"""Every rule, by the pair of examples of its mistake, and by code that only looks wrong."""

from textwrap import dedent

import pytest

from ampcompare.source.lint.catalog import CODES, RULES
from ampcompare.source.lint.check import check_text
from ampcompare.source.lint.run import LintSelection, fixed_text_rest_and_num_fixes
from ampcompare.source.syntax import SourceInvalid


def codes_of(text: str) -> list[str]:
    return [finding.code for finding in check_text(dedent(text))]


def test_every_code_has_a_rule() -> None:
    assert {code for rule in RULES for code in rule.codes} == set(CODES)


@pytest.mark.parametrize("code", CODES)
def test_a_mistake_its_harmless_twin_and_its_fix(code: str) -> None:
    """The mistake is reported on the marked lines alone, and code that only looks like it has no finding at all.

    Where the catalog promises a fix, it removes the finding, brings no other, and is not made twice.
    """
    mistake = CODES[code]
    selection, every = LintSelection(select=(code,)), LintSelection(select=("AMP",))
    marked = [
        number
        for number, line in enumerate(mistake.example.split("\n"), start=1)
        if line.endswith(f"# {code}")
    ]
    findings = check_text(mistake.example, selection.reports_code)
    assert [finding.line for finding in findings] == marked
    assert marked
    assert {finding.code for finding in check_text(mistake.harmless_code)} <= {"AMP301"} - {code}

    text, left, fixed = fixed_text_rest_and_num_fixes(mistake.example, findings, selection)

    assert (fixed > 0) == mistake.fixable
    assert (text != mistake.example) == mistake.fixable
    assert fixed + len(left) == len(findings)
    if fixed:
        before = {finding.code for finding in check_text(mistake.example, every.reports_code)}
        assert {finding.code for finding in check_text(text, every.reports_code)} <= before
        assert fixed_text_rest_and_num_fixes(text, left, selection)[0] == text


HARMLESS = {
    "two networks": """
        for batch in loader:
            opt_d.zero_grad()
            scaler.scale(loss_d(batch)).backward()
            scaler.unscale_(opt_d)
            torch.nn.utils.clip_grad_norm_(d.parameters(), 1.0)
            scaler.step(opt_d)
            opt_g.zero_grad()
            scaler.scale(loss_g(batch)).backward()
            scaler.unscale_(opt_g)
            torch.nn.utils.clip_grad_norm_(g.parameters(), 1.0)
            scaler.step(opt_g)
            scaler.update()
    """,
    "one of two networks without a scaler": """
        for batch in loader:
            opt_d.zero_grad()
            loss_d(batch).backward()
            opt_d.step()
            opt_g.zero_grad()
            scaler.scale(loss_g(batch)).backward()
            scaler.step(opt_g)
            scaler.update()
    """,
    "another kind of scaler": """
        from sklearn.preprocessing import StandardScaler
        scaler = StandardScaler()
        x = scaler.fit_transform(x)
        loss.backward()
        optimizer.step()
    """,
    "timm's scaler": """
        from timm.utils import NativeScaler
        loss_scaler = NativeScaler()
        loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
    """,
    "a library steps": """
        for batch in loader:
            with torch.autocast("cuda"):
                loss = model(batch)
            accelerator.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    """,
    "an optimizer with master weights": """
        model.half()
        optimizer = FusedLAMBAMP(model.parameters())
        for batch in loader:
            grad_scaler.scale(model(batch)).backward()
            grad_scaler.step(optimizer)
            grad_scaler.update()
            optimizer.zero_grad()
    """,
    "a helper that unscales": """
        scaler.scale(loss).backward()
        prepare_gradients(scaler, optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    """,
    "a limit that is scaled too": """
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0 * scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
    """,
    "a scheduler of the user": """
        from schedulers import PolyWarmUpScheduler
        lr_scheduler = PolyWarmUpScheduler(optimizer)
        for batch in loader:
            optimizer.zero_grad()
            scaler.scale(model(batch)).backward()
            lr_scheduler.step()
            scaler.step(optimizer)
            scaler.update()
    """,
    "a bare except that says something, and one around other parts of Apex": """
        try:
            from apex import amp
        except:
            logger.warning("no mixed precision: Apex cannot be imported")
        try:
            from apex.normalization import FusedLayerNorm
        except:
            FusedLayerNorm = torch.nn.LayerNorm
    """,
    "what older versions of torch have": """
        try:
            from torch.amp import autocast
        except ImportError:
            from torch.cuda.amp import autocast
        with autocast():
            loss = model(batch)
        make = torch.amp.GradScaler if TORCH_GREATER_EQUAL_2_4 else torch.cuda.amp.GradScaler
        if hasattr(torch.amp, "GradScaler"):
            scaler = torch.amp.GradScaler("cuda")
        else:
            scaler = torch.cuda.amp.GradScaler()
    """,
    "autocast that is off where the pass runs": """
        with torch.autocast("cuda", enabled=args.amp):
            loss = model(batch)
            if not args.amp:
                loss.backward()
    """,
    "one loss in every round, another in some, each with its own step": """
        class Trainer:
            def fit(self, loader):
                for step, batch in enumerate(loader):
                    self.train(self.model(batch))
                    if step % 2 == 0:
                        self.train_other(self.model(batch))
            def train(self, loss):
                self.optimizer.zero_grad()
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
            def train_other(self, loss):
                self.optimizer.zero_grad()
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
    """,
    "words in a text": '''
        """How to use apex: from apex import amp; scaler.step(optimizer)."""
        print("autocast")
    ''',
    "an option of Apex for a function of the script by another name": """
        import transformers
        def report(**options):
            print(options)
        say = report
        say(half_precision_backend="apex")
    """,
    "an option of Apex for a class of the script": """
        import dataclasses
        import transformers
        @dataclasses.dataclass
        class Options:
            half_precision_backend: str
        options = Options(half_precision_backend="apex")
    """,
}


@pytest.mark.parametrize("script", HARMLESS.values(), ids=HARMLESS)
def test_no_false_alarm(script: str) -> None:
    """Code as it is found in public repositories, which is right."""
    assert codes_of("import torch\n" + dedent(script)) == []


WRONG = {
    "AMP106: guarded import": """
        try:
            from apex import amp as mixed
        except ImportError:
            mixed = None
        with mixed.scale_loss(loss, optimizer) as scaled_loss:
            loss.backward()
    """,
    "AMP202: an alias": """
        import torch
        def train(self):
            opt = self.optimizer
            scaler = self.scaler
            scaler.scale(loss).backward()
            self.scaler.step(opt)
            self.optimizer.step()
            scaler.update()
    """,
    "AMP108: a default of an option": """
        import apex
        parser.add_argument("--opt-level", default="02")
    """,
    "AMP226: a checkpoint that is extended, saved twice, under a name that had another value": """
        import torch
        def train(optimizer):
            state = torch.load("weights")
            scaler = torch.amp.GradScaler("cuda")
            state = {"optimizer": None if final else optimizer.state_dict()}
            state["epoch"] = 1
            torch.save(state, "last")
            torch.save(state, "best")
            optimizer.step()
    """,
    "AMP226: a checkpoint through a function of the script": """
        import torch
        class Trainer:
            def fit(self):
                scaler = torch.amp.GradScaler("cuda")
                scaler.step(self.optimizer)
                save_checkpoint({"optimizer": self.optimizer.state_dict()}, "last")
    """,
    "AMP203: a backward pass by another name of its function": """
        import torch
        scaler = torch.amp.GradScaler("cuda")
        def compute(batch):
            scaler.scale(model(batch)).backward()
        go = compute
        def train(loader):
            for batch in loader:
                optimizer.zero_grad()
                go(batch)
                optimizer.step()
    """,
    "AMP203: a backward pass in a closure of another name": """
        import torch
        scaler = torch.amp.GradScaler("cuda")
        def compute():
            loss = scaler.scale(model(batch))
            loss.backward()
            return loss
        closure = compute
        def train(optimizer):
            optimizer.step(closure)
    """,
    "AMP311: an option for a class that is derived": """
        from transformers import TrainingArguments
        class Options(TrainingArguments):
            pass
        options = Options("out", half_precision_backend="apex")
    """,
    "AMP208 AMP227: a closure of an object": """
        import torch
        class Trainer:
            def closure(self):
                return self.loss
            def train(self, scaler, optimizer):
                self.loss.backward()
                scaler.step(optimizer, self.closure)
                scaler.update()
    """,
    "AMP227: a closure": """
        import torch
        def train(scaler, optimizer):
            def closure():
                loss = model()
                loss.backward()
                return loss
            scaler.step(optimizer, closure)
            scaler.update()
    """,
}


@pytest.mark.parametrize("name", WRONG)
def test_forms_of_mistakes(name: str) -> None:
    """Mistakes behind aliases, lazy imports and guards are found."""
    assert codes_of(WRONG[name]) == name.partition(": ")[0].split()


@pytest.mark.parametrize(
    ("comment", "silent"),
    [
        ("# noqa", True),
        ("# noqa: AMP108", True),
        ("# NOQA:E501,AMP108", True),
        ("# noqa: AMP1", True),
        ("# noqa: AMP109", False),
        ("# noqa: E501", False),
        ("# no qa", False),
    ],
)
def test_comments_that_silence(comment: str, silent: bool) -> None:
    """A comment silences what it names, and everything if it names nothing."""
    script = f'from apex import amp  # noqa\nm, o = amp.initialize(m, o, opt_level="01")  {comment}\n'

    assert (codes_of(script) == []) == silent


def test_comments_for_several_lines_and_for_the_file() -> None:
    """The comment may stand on the first or the last line of a call, or speak for the file."""
    call = 'from apex import amp  # noqa\nm, o = amp.initialize(\n    m,\n    o,\n    opt_level="01",\n)'

    assert codes_of(call) == ["AMP108"]
    assert codes_of(f"{call}  # noqa: AMP108") == []
    assert codes_of(f"# ampcompare: noqa: AMP108\n{call}") == []
    assert codes_of(f"# ampcompare: noqa: AMP2\n{call}") == ["AMP108"]


def test_columns_are_characters() -> None:
    """A character of several bytes in front of a finding counts as one."""
    script = 'from apex import amp\nx = "é"; m, o = amp.initialize(m, o, opt_level="01")\n'

    finding = next(finding for finding in check_text(script) if finding.code == "AMP108")

    assert script.split("\n")[1][finding.column :].startswith('"01"')


def test_texts_without_the_words_are_not_parsed() -> None:
    """What has no word of a rule is silent even if it is no Python; what has one is not."""
    assert check_text("print 'x'\n") == []
    with pytest.raises(SourceInvalid):
        check_text("from apex import amp\nprint 'x'\n")


def test_a_module_that_calls_itself() -> None:
    many = "\n".join(
        f"def f{i}(s, o):\n    f{i + 1}(s, o)\n    f{i + 1}(s, o)\n    f0(s, o)" for i in range(30)
    )

    assert (
        codes_of(f"import torch\n{many}\ndef f30(scaler, o):\n    scaler.step(o)\n    scaler.update()\n")
        == []
    )


@pytest.mark.parametrize(
    ("handler", "is_found"),
    [
        ('except ImportError:\n    raise ImportError("install apex")', True),
        ("except (ImportError, OSError) as error:\n    print(error)\n    sys.exit(1)", True),
        ("except ValueError:\n    amp = None", True),
        ("finally:\n    print()", True),
        ("except Exception:\n    print()", False),
        ("except ImportError:\n    if strict:\n        raise\n    amp = None", False),
    ],
)
def test_an_import_of_apex_is_guarded_where_the_script_goes_on(handler: str, is_found: bool) -> None:
    assert ("AMP301" in codes_of(f"try:\n    from apex import amp\n{handler}\n")) == is_found
