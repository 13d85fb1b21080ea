"""Numbers as tables print them: with a standard deviation, a unit, a percent sign, in bold.

Everything returns None for text that it cannot read, and the caller says where the text stands.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from ampcompare.base.formatting import parse_duration
from ampcompare.runs.records.metric import TOP1, Metric

__all__ = [
    "ACCURACY",
    "UNITS",
    "Better",
    "Quantity",
    "bytes_of",
    "in_shares",
    "is_measurement",
    "is_percentage",
    "is_quantity",
    "known_metric",
    "parse_bytes",
    "parse_number",
    "parse_rate",
    "parse_seconds",
    "seconds_of",
]

MAX_NUMBER, MIN_NUMBER = 1e15, 1e-100
NUMBER = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]{1,3})?"
VALUE = re.compile(
    rf"(?P<mean>{NUMBER})\s*(?P<percent>%?)"
    rf"(?:\s*(?:±|\+/-|\+-)\s*(?P<sd>{NUMBER})|\s*\((?P<digits>[0-9]+)\)|\s*\((?P<brackets>{NUMBER})\))?"
    r"\s*(?P<unit>%|[^\W\d_][^\d]*)?",
    re.IGNORECASE,
)
SECONDS = {
    1e-9: ("ns",),
    1e-6: ("us", "µs", "μs"),  # the micro sign, and the Greek letter
    1e-3: ("ms", "msec", "millisecond", "milliseconds"),
    1.0: ("s", "sec", "secs", "second", "seconds"),
    60.0: ("m", "min", "mins", "minute", "minutes"),
    3600.0: ("h", "hr", "hrs", "hour", "hours"),
    86400.0: ("d", "day", "days"),
}
BYTES = {
    1: ("b", "byte", "bytes"),
    1000: ("kb",),
    1000**2: ("mb",),
    1000**3: ("gb",),
    1000**4: ("tb",),
    1024: ("k", "kib"),
    1024**2: ("m", "mib"),  # as nvidia-smi and most tools write it
    1024**3: ("g", "gib"),
    1024**4: ("t", "tib"),
}
UNITS = {name for names in (*SECONDS.values(), *BYTES.values()) for name in names}
THOUSANDS = {"k": 1e3, "m": 1e6}
PER_SECOND = re.compile(r"(?P<scale>[km])?\s*(?:[a-z]+\s*(?:/|per)\s*s(?:ec(?:ond)?)?|fps|ips|it/s)?", re.IGNORECASE)
ACCURACY = TOP1
OTHERS = ("top5", "top-5", "top 5", "top5 acc", "top-5 acc", "speedup", "params", "flops", "macs")


@dataclass(frozen=True)
class Quantity:
    """A number and how well the table says that it is known.

    Attributes:
        mean: as printed, in the unit that the reader asked for.
        step: of its last printed digit.
        sd: standard deviation over runs that is printed with it, None if there is none.
        sd_step: of the last digit of `sd`.
        percent: whether it has a percent sign.
    """

    mean: float
    step: float
    sd: float | None = None
    sd_step: float = 0.0
    percent: bool = False

    def times(self, factor: float) -> Quantity:
        """Return the same quantity in another unit."""
        sd = None if self.sd is None else factor * self.sd
        return Quantity(factor * self.mean, factor * self.step, sd, factor * self.sd_step, self.percent)


def is_quantity(text: str) -> bool:
    """Return whether text is a number, with any unit."""
    return _parsed(text) is not None or parse_duration(_plain(text)) is not None


def parse_number(text: str) -> Quantity | None:
    """Return a plain number, `76.1%`, `77.01 ± 0.16`, `77.01 +/- 0.16`, `77.01(16)` or `77.01 (0.16)`."""
    parsed = _parsed(text)
    return parsed[0] if parsed and parsed[1] in ("", "%") else None


def parse_seconds(text: str, unit: float = 1.0) -> Quantity | None:
    """Return a time in seconds: `12.1h`, `824.4m`, `214 ms`, `~5 hours`, `8h26m45s`, `8:26:45`, with or without an sd.

    Args:
        unit: seconds of a number without a unit.
    """
    parsed = _parsed(text)
    if parsed:
        number, name = parsed
        scale = seconds_of(name) if name else unit
        return number.times(scale) if scale and not number.percent else None
    seconds = parse_duration(_plain(text))
    return None if seconds is None else Quantity(seconds, 1.0)


def seconds_of(name: str) -> float | None:
    """Return the seconds of a unit of time, None for any other word."""
    return next((scale for scale, names in SECONDS.items() if name.lower().rstrip(".") in names), None)


def parse_rate(text: str) -> Quantity | None:
    """Return a throughput in whatever it counts per second: `2470 img/s`, `494k`, `66050`."""
    parsed = _parsed(text)
    if not parsed or parsed[0].percent:
        return None
    number, name = parsed
    unit = PER_SECOND.fullmatch(name)
    return number.times(THOUSANDS.get((unit["scale"] or "").lower(), 1.0)) if unit else None


def parse_bytes(text: str, unit: int = 2**20) -> Quantity | None:
    """Return a size in bytes: `3.5 GB` (10^9), `1.9 GiB` or `1.9G` (2^30), `2300 MiB`, `824.4m`.

    Args:
        unit: bytes of a number without a unit.
    """
    parsed = _parsed(text)
    if not parsed or parsed[0].percent:
        return None
    number, name = parsed
    scale = bytes_of(name) if name else unit
    return None if scale is None else number.times(scale)


def bytes_of(name: str) -> int | None:
    """Return the bytes of a unit of memory, None for any other word."""
    return next((size for size, names in BYTES.items() if name.lower() in names), None)


def _plain(text: str) -> str:
    """Return text without the marks of Markdown and of a rough number, and with the minus of a keyboard."""
    return text.strip().strip("*_`").lstrip("~≈").replace("−", "-").strip()


def _parsed(text: str) -> tuple[Quantity, str] | None:
    """Return the number, and its unit or ""."""
    match = VALUE.fullmatch(_plain(text))
    if not match:
        return None
    mean, step = _number(match["mean"])
    spread = match["sd"] or match["brackets"]
    sd, sd_step = _number(spread) if spread else (None, 0.0)
    if match["digits"]:
        # Metrology's short form: 77.01(16) is 77.01 with an uncertainty of 16 units of its last digit.
        sd, sd_step = int(match["digits"][:18]) * step, step
    if abs(mean) > MAX_NUMBER or 0 < abs(mean) < MIN_NUMBER or (sd is not None and not 0 <= sd <= MAX_NUMBER):
        return None
    unit = (match["unit"] or "").strip()
    percent = bool(match["percent"]) or unit == "%"
    return Quantity(mean, step, sd, sd_step, percent), "" if unit == "%" else unit


def _number(text: str) -> tuple[float, float]:
    """Return a number and the step of its last digit; the text matches `NUMBER`."""
    digits, _, exponent = text.lower().partition("e")
    value = float(text)
    power = int(exponent or 0) - len(digits.partition(".")[2])
    return (value, 10.0**power) if math.isfinite(value) and power < 15 else (math.inf, 1.0)


Better = Literal["higher", "lower"]


def _percentage(name: str, better: Better = "higher", *, margin: float, highest: float | None = 1.0) -> Metric:
    return Metric(name=name, better=better, factor=100.0, margin=margin, highest=highest)


def _plain_number(name: str, better: Better = "lower") -> Metric:
    return Metric(name=name, better=better)


# Margins of others: what reports in their field call equal. WER and BLEU move by 0.1 to 0.2 points between seeds (GNMT
# v2 in NVIDIA's DeepLearningExamples: sd 0.16 over 50 seeds); for AUC of click rates 0.001 is a result.
METRICS = {
    ("accuracy", "acc", "top1", "top-1", "top 1", "top1 acc", "top-1 acc", "top-1 accuracy", "top1 accuracy"): ACCURACY,
    ("bleu", "sacrebleu"): _percentage("BLEU", margin=0.5),
    ("auc", "roc auc", "auroc", "accuracy (auc)"): _percentage("AUC", margin=0.1),
    ("f1", "f1 score"): _percentage("F1", margin=0.5),
    ("em", "exact match"): _percentage("EM", margin=0.5),
    ("map", "box ap", "bbox map"): _percentage("mAP", margin=0.5),
    ("mask ap", "segm map"): _percentage("mask AP", margin=0.5),
    ("miou", "iou"): _percentage("mIoU", margin=0.5),
    ("dice",): _percentage("Dice", margin=0.5),
    ("rouge", "rouge-l"): _percentage("ROUGE", margin=0.5),
    ("wer",): _percentage("WER", "lower", margin=0.5, highest=None),
    ("cer",): _percentage("CER", "lower", margin=0.5, highest=None),
    ("error", "error rate", "top1 error", "top-1 error", "top1 err", "top-1 err"): _percentage(
        "error", "lower", margin=0.5
    ),
    ("loss", "val loss", "validation loss", "test loss", "train loss", "training loss"): _plain_number("loss"),
    ("perplexity", "ppl"): _plain_number("perplexity"),
    ("rmse",): _plain_number("RMSE"),
    ("mae",): _plain_number("MAE"),
    ("mse",): _plain_number("MSE"),
    ("fid",): _plain_number("FID"),
    ("psnr",): _plain_number("PSNR", "higher"),
}


def known_metric(name: str) -> Metric | None:
    """Return the metric of a column, by its name in lower case; None if it is none that is known."""
    name = re.sub(r"[\s_]+", " ", name)
    return next((metric for names, metric in METRICS.items() if name in names), None)


def is_percentage(metric: Metric) -> bool:
    """Return whether tables write a metric as a percentage, or as a share of 1."""
    return metric.factor == 100


def in_shares(metric: Metric) -> Metric:
    """Return a percentage as a table that writes shares of 1 shows it. Accuracies are shown in percent."""
    if metric == ACCURACY or metric.margin is None:
        return metric
    return metric.model_copy(update={"factor": 1.0, "margin": metric.margin / 100})


def is_measurement(name: str) -> bool:
    """Return whether a column certainly holds results, and can be no setting."""
    return known_metric(name) is not None or name in OTHERS
