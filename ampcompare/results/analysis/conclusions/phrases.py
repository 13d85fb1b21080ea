"""Names of arms, numbers, differences and savings, as they stand in sentences."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ampcompare.results.analysis.effects.samples import samples_noun
from ampcompare.results.records.comparison import ArmSummary, Comparison
from ampcompare.results.records.metric import Metric

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
        text = _phrase_for_many_arms(arms, self.everyone, self.said) or names_text(arms)
        self.said.update(arms)
        return text

    def sentence_beginning(self, arms: Sequence[str], singular_verb: str, plural_verb: str) -> str:
        """Return arms with a verb in the right number, as the beginning of a sentence."""
        group = _phrase_for_many_arms(arms, self.everyone, self.said)
        subject = f"{group[0].upper()}{group[1:]}" if group else names_text(arms)
        self.said.update(arms)
        return f"{subject} {singular_verb if len(arms) == 1 else plural_verb}"


def names_text(arms: Sequence[str]) -> str:
    """Return names in a sentence: `a`, `a and b`, or `a, b, c and 4 more`."""
    if len(arms) > MAX_NAMED:
        arms = [*arms[: MAX_NAMED - 1], f"{len(arms) - MAX_NAMED + 1} more"]
    *first, last = arms
    return f"{', '.join(first)} and {last}" if first else last


def _phrase_for_many_arms(arms: Sequence[str], everyone: Sequence[str], named_arms: Collection[str]) -> str:
    """Return `all five arms`, `all but a` or `the other five arms` of many; "" where they are to be named."""
    if len(arms) > 2 and set(arms) == set(everyone):
        return f"all {number_word(len(arms))} arms"
    left = [arm for arm in everyone if arm not in arms]
    if len(arms) > MAX_NAMED and left:
        if set(left) <= set(named_arms):
            return f"the other {number_word(len(arms))} arms"
        if len(left) <= MAX_LEFT and not set(left) & set(named_arms):
            return f"all but {names_text(left)}"
    return ""


def capitalize_sentence(words: str) -> str:
    """Return words with a capital letter, unless a later letter is one, as in mAP."""
    return words if any(letter.isupper() for letter in words) else words[:1].upper() + words[1:]


def number_word(number: int) -> str:
    """Return a small number as a word."""
    return NUMBERS[number] if 0 < number < len(NUMBERS) else str(number)


def new_samples_caveat(rows: Sequence[ArmSummary], comparison: Comparison) -> str:
    """Return the caveat if a verdict on one of these rows does not extend beyond the validation samples."""
    open_ones = [row.samples for row in rows if row.samples is not None and row.samples.holds is False]
    noun = samples_noun(comparison.records)
    return f" on these {open_ones[0].samples:,} {noun}, not shown for new ones" if open_ones else ""


def difference_interval_text(row: ArmSummary, metric: Metric) -> str:
    """Return a difference with the interval of the test that decided on it, and updates that may explain it."""
    its = row.quality
    shown = f"Δ {metric.difference_text_with_unit(its.effect or 0)}"
    if its.low is not None and its.high is not None:
        shown += f", {metric.difference_text_without_unit(its.low)} to {metric.difference_text_without_unit(its.high)}"
    return "; ".join(filter(None, [shown, its.update_counts_text]))


def step_time_ratio_text(row: ArmSummary, doubt: str = "") -> str:
    """Return the relative step time of an arm with its interval and a doubt, such as `0.61x (0.58 to 0.65)`."""
    its = row.time
    if its.effect is None:
        return ""
    if its.low is None or its.high is None:
        return f"{its.effect:.2f}x"
    return f"{its.effect:.2f}x ({its.low:.2f} to {its.high:.2f}{doubt})"


def non_gpu_timing_phrase(comparison: Comparison) -> str:
    """Return where times were measured, if that is no GPU."""
    devices = {record.device_kind for record in comparison.records}
    return " on this CPU" if devices == {"cpu"} else ""


def saved_memory_share(row: ArmSummary) -> float:
    """Return the share of the reference's peak that an arm saves, below 0 where it needs more; 0 if not known."""
    more, peak = row.memory.effect, row.peak_bytes
    return 0.0 if more is None or peak is None or peak <= more else -more / (peak - more)


def memory_saving_text(row: ArmSummary) -> str:
    """Return how much less, or more, memory an arm needs."""
    saving = saved_memory_share(row)
    return f"{100 * abs(saving):.0f} % {'less' if saving > 0 else 'more'}"
