"""Which values of a metric are better, as far as its name tells: one table for every command that reads a name."""

import re
from typing import Literal

# What a word of a name is, in lower case; digits behind it do not matter (`acc1`, `map50`).
LOSSES = r"\w*(?:loss(?:es)?|err(?:ors?)?)"  # of something: of accuracy, Dice or a map too
LOWER = (
    r"\w*(?:perplexity|ppl|mse|rmsle|mae|mape)|wer|cer|ter|eer|fid|kid|nll|bpc|bpb|bpd|lpips|brier|ece|kld|medae"
    r"|deviance|regret"
)
HIGHER = (
    r"\w*(?:acc|accuracy|auc|auroc|auprc|iou|psnr|ssim|bleu|f1)|ap|map|mrr|ndcg|mcc|r2|dice|recall|fscore|chrf|chrfpp"
    r"|rouge[ls]?(?:um)?|meteor|cider|reward|winrate|elo"
)
# Several words that make one.
PHRASES = {
    "min": r"bits?_per_(?:byte|character|char|dim|dimension|token)|negative_log_likelihood|cross_entropy",
    "max": r"top_?\d+|average_precision|exact_match|win_rate|success_rate|r_squared",
}
# With one of these the rest of the name says little: a scale of a loss, a negated error, a drop of accuracy.
TURNING = (
    r"neg|negative|minus|inv|inverse|scale|scaler|weight|coef|gain|drop|gap|delta|diff|improvement|reduction"
)
CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z][a-z])")


def known_metric_direction(name: str) -> Literal["max", "min", ""]:
    """Return which values of a metric of this name are better; "" where the name does not tell."""
    for part in (re.split(r"[/:]", name)[-1], name):  # of `loss/acc` the last word counts
        if found := _direction_told_by_name(part):
            return found if found != "turned" else ""
    return ""


def _direction_told_by_name(name: str) -> Literal["max", "min", "turned", ""]:
    spaced = CAMEL.sub("_", name)
    words = {word for text in (spaced.lower(), name.lower()) for word in re.split(r"[^a-z0-9.]+", text)}
    words |= {re.sub(r"(?<=[a-z])\d[\d.]*k?$", "", word) for word in words}
    joined = "_".join(re.findall(r"[a-z0-9]+", spaced.lower()))
    if re.match(r"\s*1\s*-", name) or (
        _has_word_matching(words, TURNING) and "negative_log_likelihood" not in joined
    ):
        return "turned"
    if _has_word_matching(words, LOSSES):
        return "min"
    found = {
        goal
        for goal, pattern in (("min", LOWER), ("max", HIGHER))
        if _has_word_matching(words, pattern) or re.search(rf"(?:^|_)(?:{PHRASES[goal]})(?:_|$)", joined)
    }
    if len(found) > 1:
        return "turned"
    return "min" if "min" in found else "max" if "max" in found else ""


def _has_word_matching(words: set[str], pattern: str) -> bool:
    return any(re.fullmatch(pattern, word) for word in words)
