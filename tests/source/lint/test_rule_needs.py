"""What a text must have before a rule finds anything: nothing is lost by the files that are not parsed."""

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from ampcompare.source.lint.catalog import CODES, RULES
from ampcompare.source.lint.check import rules_that_may_match
from ampcompare.source.lint.read.module import Finding, LintModule, Rule
from ampcompare.source.lint.rule_needs import ALONE, PATTERNS
from ampcompare.source.syntax import SourceInvalid
from tests.source.lint import test_check, test_flags, test_forms_of_setup, test_forms_of_updates

CASES = Path(__file__).parents[1] / "migrate" / "cases"


def scripts_of_tests() -> Iterator[str]:
    """Yield the scripts in the tables of the tests of rules, those of wrong and right forms with all their lines."""
    for tests in (test_check, test_flags, test_forms_of_setup, test_forms_of_updates):
        for table in vars(tests).values():
            if isinstance(table, dict) and not isinstance(table.get("__name__"), str):
                texts = (
                    one
                    for value in table.values()
                    for one in (value if isinstance(value, tuple) else (value,))
                )
                yield from (dedent(text) for text in texts if isinstance(text, str) and "\n" in text)


def findings_in(text: str, rules: Collection[Rule] = RULES) -> dict[str, list[Finding]]:
    """Return what rules find in a text, whatever words it has; nothing in one that is no Python."""
    try:
        module = LintModule(text)
    except SourceInvalid:
        return {}
    found = ((rule.check.__name__, list(rule.check(module))) for rule in rules)
    return {name: findings for name, findings in found if findings}


def leave_out(text: str) -> Iterator[Rule]:
    """Yield the rules that are not run on a text."""
    run = rules_that_may_match(text)
    yield from (rule for rule in RULES if rule not in run)


def without(group: str, text: str) -> str:
    """Return a text with another name for each word of a group."""
    for word in group.split("|"):
        pattern = PATTERNS[word][1].pattern if word in PATTERNS else re.escape(word)
        text = re.sub(
            rf"(?<!\w){pattern}(?!\w)" if word in ALONE else pattern, lambda match: other(match[0]), text
        )
    return text


def other(word: str) -> str:
    """Return another text in the place of a word, of which the letters that a word may have are other ones."""
    return re.sub(r"[a-z]", "q", re.sub(r"[A-Z0-9]", "Q", word))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.check.__name__)
def test_a_rule_finds_nothing_without_one_of_its_words(rule: Rule) -> None:
    for code in rule.codes:
        text = CODES[code].example
        if findings_in(text, [rule]):
            assert rule in rules_that_may_match(text)
            for group in rule.needs:
                assert (group, findings_in(without(group, text), [rule])) == (group, {})


def test_no_rule_is_left_out_that_finds_something() -> None:
    """In the scripts of the tests of rules and of `migrate`, every finding is of a rule whose words are there."""
    cases = [path.read_text(encoding="utf-8").split("\n>>>> ")[0] for path in sorted(CASES.glob("*.txt"))]
    scripts = list(scripts_of_tests())
    assert min(len(cases), len(scripts)) > 80
    texts = [*cases, *scripts]
    lost = [(text, found) for text in texts if (found := findings_in(text, [*leave_out(text)]))]
    assert lost == []


@pytest.mark.parametrize(
    ("text", "is_parsed"),
    [
        ("from apex import amp", True),
        ("apexes = capex.amps.initialize()", False),
        ("from torch.cuda.amp import GradScaler", True),
        ("sample.cuda.amps.GradScaler()", False),
        ("StandardScaler().step()", True),
        ("StandardScaler()", False),
        ("add_argument('--amp', type = bool)", True),
        ("add_argument('--amp', bool)", False),
        ("scores.half().masked_fill(mask, -1e9)", True),
        ("scores.halfway().masked_fill(mask, -1e9)", False),
        ("scores.half().fill(-1e9)", False),
        ("clip_grad_norm(p)", True),
        ("clip_grad_norm_(p)", False),
        ("torch.float16", False),
        ("print 'example', campaign", False),
    ],
)
def test_a_file_is_parsed_where_a_rule_may_find_something(text: str, is_parsed: bool) -> None:
    assert bool(rules_that_may_match(text)) is is_parsed
