"""Draw the calibration: the share of A/A comparisons whose p value is below p, which is p itself where nothing differs.

    python benchmarks/aa_plot.py docs/benchmarks/aa

reads OUT.json of `aa.py` and writes OUT.svg. P values: the t test of no difference on the raw pairs, no gate
of validity, no margin, no floor of the spread. Verdicts are stricter than that.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from scipy.stats import ttest_1samp

SIZE, LEFT, TOP = 360, 60, 40
COLORS = {"accuracy": "#0072b2", "step time": "#d55e00"}


def _p_values(pairs: Sequence[Sequence[float]]) -> list[float]:
    """Return the p value of each comparison; pairs that agree to the last image show no difference at all."""
    return sorted(1.0 if len(set(values)) == 1 else float(ttest_1samp(values, 0).pvalue) for values in pairs)


def _at(p: float, share: float) -> str:
    return f"{LEFT + SIZE * p:.1f},{TOP + SIZE * (1 - share):.1f}"


def _steps(values: Sequence[float]) -> str:
    points = [_at(0, 0)]
    for count, value in enumerate(values):
        points += [_at(value, count / len(values)), _at(value, (count + 1) / len(values))]
    return " ".join([*points, _at(1, 1)])


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{text}</text>'


def draw(curves: dict[str, list[float]]) -> str:
    """Return the picture as SVG: one step curve for each kind of figure, and the diagonal that calibration asks for."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE + 90} {SIZE + 100}" font-family="sans-serif" '
        'font-size="12" role="img" aria-label="distribution of p values of A/A comparisons">',
        f'<rect width="{SIZE + 90}" height="{SIZE + 100}" fill="#fff"/>',
        f'<rect x="{LEFT}" y="{TOP}" width="{SIZE}" height="{SIZE}" fill="none" stroke="#888"/>',
        f'<polyline points="{_at(0, 0)} {_at(1, 1)}" fill="none" stroke="#888" stroke-dasharray="4 4"/>',
        _text(LEFT + SIZE / 2, 22, "A/A: share of comparisons with a p value below p"),
        _text(LEFT + SIZE / 2, TOP + SIZE + 40, "p (dashed: what calibration asks for)"),
    ]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(_text(LEFT + SIZE * tick, TOP + SIZE + 18, f"{tick:g}"))
        parts.append(_text(LEFT - 8, TOP + SIZE * (1 - tick) + 4, f"{tick:g}", "end"))
    for row, (name, values) in enumerate(curves.items()):
        color = COLORS[name]
        parts.append(f'<polyline points="{_steps(values)}" fill="none" stroke="{color}" stroke-width="1.8"/>')
        below = sum(value < 0.05 for value in values)
        legend = f"{name}: {below} of {len(values)} below 0.05"
        parts.append(f'<g fill="{color}">{_text(LEFT + SIZE - 10, TOP + SIZE - 34 + 18 * row, legend, "end")}</g>')
    return "\n".join([*parts, "</svg>", ""])


def main(out: str) -> None:
    """Read OUT.json and write OUT.svg."""
    results = json.loads(Path(out + ".json").read_text(encoding="utf-8"))["results"]
    curves = {
        "accuracy": _p_values([result["points"] for result in results]),
        "step time": _p_values([result["log_ratios"] for result in results]),
    }
    Path(out + ".svg").write_text(draw(curves), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
