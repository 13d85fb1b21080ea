"""An inspection of a checkpoint as lines of text."""

from __future__ import annotations

from typing import Any

from tabulate import tabulate

from ampcompare.base.formatting import format_bytes, printable
from ampcompare.checkpoint.inspect import Inspection

__all__ = ["continued_lines", "conversion_lines", "inspection_lines"]

MAX_LINES = 20
MAX_LENGTH = 500


def inspection_lines(found: Inspection) -> list[str]:
    """Return what was found in a checkpoint, for a terminal."""
    lines = [f"{found.path}: {found.format}, {format_bytes(found.size)}, checksum: {found.checksum}"]
    lines.append(f"written by: {found.writer} ({found.because})" + (f", arm {found.arm}" if found.arm else ""))
    if found.level_because:
        lines.append(f"opt level: {found.level or 'unknown'} ({found.level_because})")
    if found.rows:
        rows = [
            [row["place"], row["kind"], row["entries"], format_bytes(row["bytes"]), _dtypes(row["dtypes"])]
            for row in found.rows[:MAX_LINES]
        ]
        lines += tabulate(rows, headers=["key", "what", "entries", "size", "dtypes"], tablefmt="simple").splitlines()
    for scale in found.scales[:MAX_LINES]:
        interval = f", grows after {scale['growth_interval']}" if "growth_interval" in scale else ""
        lines.append(f"{scale['place']}: loss scale {scale['scale']}, {scale['clean_steps']} clean steps{interval}")
    if found.keys:
        lines.append(f"also: {', '.join(found.keys)}")
    lines += found.notes
    lines += [f"trap: {trap}" for trap in found.traps]
    if found.objects:
        lines.append("objects, which only unpickling with their code would make:")
        lines += [f"  {place}" for place in found.objects[:MAX_LINES]]
        if len(found.objects) > MAX_LINES:
            lines.append(f"  and {len(found.objects) - MAX_LINES} more")
    hidden = [name for name in found.calls if not any(place.endswith(f": {name}") for place in found.objects)]
    if hidden:
        lines.append(f"unpickling would also call: {', '.join(hidden[:MAX_LINES])}")
    return [printable(line, MAX_LENGTH, keep_spaces=True) for line in lines]


def conversion_lines(document: dict[str, Any]) -> list[str]:
    """Return what a conversion did, for a terminal; `document` is what `--json` prints."""
    level = f" {document['opt_level']}" if document["opt_level"] else ""
    names = {"apex": "Apex" + level, "native": "torch.amp"}
    was, becomes = names.get(document["from"], document["from"]), names[document["to"]]
    lines = [f"{document['out']}: {was} to {becomes}" + (f", arm {document['arm']}" if document["arm"] else "")]
    lines += [f"  carried: {line}" for line in document["changed"]]
    lines += [f"  not carried: {line}" for line in document["lost"]] or ["  nothing was lost"]
    return [printable(line, MAX_LENGTH, keep_spaces=True) for line in lines]


def continued_lines(found: dict[str, Any]) -> list[str]:
    """Return how training went on from both files, for a terminal; `found` is what `--json` prints."""
    one, other = found["arms"]
    rows = [
        [step, f"{first:.6g}", f"{second:.6g}", f"{difference:.1e}"]
        for step, (first, second, difference) in enumerate(
            zip(*found["losses"], found["differences"], strict=True), start=1
        )
    ]
    lines = tabulate(
        rows, headers=["step", one, other, "difference"], tablefmt="simple", disable_numparse=True
    ).splitlines()
    for arm, scales, skipped in zip(found["arms"], found["scales"], found["skipped"], strict=True):
        if scales:
            lines.append(
                f"{arm}: loss scale {scales[0]:g} at first, {scales[-1]:g} at the end, {skipped} skipped steps"
            )
    verdict = "within" if found["agrees"] else "more than"
    lines.append(f"the first losses differ by {found['differences'][0]:.1e}, {verdict} what fp16 rounding explains")
    return [printable(line, MAX_LENGTH, keep_spaces=True) for line in lines]


def _dtypes(dtypes: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in dtypes.items())
