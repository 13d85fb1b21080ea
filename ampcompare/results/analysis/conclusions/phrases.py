"""Names of arms and numbers, as written in sentences."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

MAX_NAMED = 4
MAX_LEFT = 2
NUMBERS = (
    "no",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)


@dataclass
class ArmNaming:
    """The arms besides the reference, and those that a sentence has named: `all but a` would deny it of these."""

    everyone: Sequence[str]
    said: set[str] = field(default_factory=set)

    def names_in_sentence(self, arms: Sequence[str]) -> str:
        """Return arms as they stand within a sentence."""
        text = _words_for_many_arms(arms, self.everyone, self.said) or names_text(arms)
        self.said.update(arms)
        return text

    def begin_sentence(self, arms: Sequence[str], one: str, several: str) -> str:
        """Return arms with a verb in the right number, as the beginning of a sentence."""
        group = _words_for_many_arms(arms, self.everyone, self.said)
        subject = f"{group[0].upper()}{group[1:]}" if group else names_text(arms)
        self.said.update(arms)
        return f"{subject} {one if len(arms) == 1 else several}"


def names_text(arms: Sequence[str]) -> str:
    """Return names in a sentence: `a`, `a and b`, or `a, b, c and 4 more`."""
    if len(arms) > MAX_NAMED:
        arms = [*arms[: MAX_NAMED - 1], f"{len(arms) - MAX_NAMED + 1} more"]
    *first, last = arms
    return f"{', '.join(first)} and {last}" if first else last


def _words_for_many_arms(arms: Sequence[str], everyone: Sequence[str], said: Collection[str]) -> str:
    """Return `all five arms`, `all but a` or `the other five arms` of many; "" where they are to be named."""
    if len(arms) > 2 and set(arms) == set(everyone):
        return f"all {number_word(len(arms))} arms"
    left = [arm for arm in everyone if arm not in arms]
    if len(arms) > MAX_NAMED and left:
        if set(left) <= set(said):
            return f"the other {number_word(len(arms))} arms"
        if len(left) <= MAX_LEFT and not set(left) & set(said):
            return f"all but {names_text(left)}"
    return ""


def capitalize_sentence(words: str) -> str:
    """Return words with a capital letter, unless a later letter is one, as in mAP."""
    return words if any(letter.isupper() for letter in words) else words[:1].upper() + words[1:]


def number_word(number: int) -> str:
    """Return a small number as a word."""
    return NUMBERS[number] if 0 < number < len(NUMBERS) else str(number)
