"""The explanation of an arm: what it does, the arm to compare it with, what differs, and what a step of it shows."""

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from ampcompare.backends.arm import Arm
from ampcompare.backends.explanation import ArmExplanation
from ampcompare.backends.roles import BytesPerParameter, Roles
from ampcompare.base.notebook_display import ShownInNotebook
from ampcompare.base.processes.call import call_in_child
from ampcompare.results.report.document import Block, Code, Document, Facts, Items, Section, Text
from ampcompare.settings.config import RunConfig
from ampcompare.settings.examination import examine_in_child, result_of_answer

# Tensors of the size of the parameter that an optimizer keeps.
OPTIMIZER_TENSORS = {"sgd with momentum": 1, "adam": 2}
# Options that take more than the few lines of a script.
NOT_IN_SCRIPTS = ("keep_fp32", "weights", "masters", "state", "grads", "reduce", "rounding", "kahan")
BYTES = "Bytes per parameter, without activations"
MAX_SAMPLES = 8
PROGRAM = Path(__file__).resolve().parent / "explain_step.py"
CASTS = PROGRAM.with_name("explain_casts.py")
TIME_LIMIT = 300.0  # seconds
MAX_ROWS = 40
UNITS = {"KiB": 2**10, "MiB": 2**20}
NAMES = {
    "parameters": "weights",
    "buffers": "buffers",
    "gradients": "gradients",
    "master_weights": "master weights",
    "master_gradients": "their gradients",
    "optimizer_state": "optimizer state",
}
HEADERS = ("module", "type", "parameters", "weights", "inputs", "outputs")


@dataclass(frozen=True)
class Explanation(ShownInNotebook):
    """All that is known of an arm without running it; None for what its backend does not state."""

    arm: str
    parts: ArmExplanation  # what its backend states
    roles: Roles | None  # in which type each part of a step is held or computed
    memory: BytesPerParameter | None

    _view: ClassVar[str] = "ampcompare.results.report.html.notebook:result_text_and_html"

    def _document(self) -> Document:
        return explanation_document(self)

    def data(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        held: Mapping[str, Any] | None = None
        if self.memory is not None:
            totals = {name: self.memory.total(tensors) for name, tensors in OPTIMIZER_TENSORS.items()}
            held = {**asdict(self.memory), "total": totals}
        roles = None if self.roles is None else asdict(self.roles)
        return {"arm": self.arm, **asdict(self.parts), "roles": roles, "bytes_per_parameter": held}


def explain_arm(arm: Arm) -> Explanation:
    """Explain `arm` from its backend's description; torch is not needed."""
    parts = arm.spec.explain(arm.options)
    if parts.twin is not None:
        twin = Arm.parse(parts.twin)
        parts = replace(parts, twin=str(twin), twin_script=twin.spec.explain(twin.options).script)
    missing = [name for name in NOT_IN_SCRIPTS if name in arm.options]
    if missing and parts.script:
        note = f'# all but {", ".join(missing)}, which ampcompare.make_precision("{arm}") does'
        parts = replace(parts, script=(note, *parts.script))
    return Explanation(str(arm), parts, arm.roles, bytes_per_parameter(arm))


def bytes_per_parameter(arm: Arm) -> BytesPerParameter | None:
    """Return what `arm` holds per parameter on a GPU; None if its backend does not state it."""
    if arm.inner is not None:  # what it changes does not outlive an operation, or is an activation
        return bytes_per_parameter(arm.inner)
    return None if arm.roles is None else arm.roles.bytes_per_parameter


def explanation_document(explanation: Explanation) -> Document:
    """Return the report, before it has a format; lines of a script are never wrapped."""
    arm, parts = explanation.arm, explanation.parts
    differs = f"What differs (here {arm}, there {parts.twin})"
    sections = [
        Section("summary", [Text([f"{arm}: {parts.summary}"])]),
        Section("does", [Facts([("", parts.does)], "What it does")] if parts.does else []),
        Section(
            "memory",
            [Items([_memory_text(explanation.memory)], BYTES)] if explanation.memory is not None else [],
        ),
        Section("twin", [Items([parts.twin_is], f"Native equivalent: {parts.twin or 'none'}")]),
        Section("differs", [Items(parts.differs, differs)] if parts.differs else []),
        Section("script", _code_blocks_of_lines("In a script", parts.script)),
        Section("twin's script", _code_blocks_of_lines(f"The same as {parts.twin}", parts.twin_script)),
        Section("compare", _code_blocks_of_lines("Compare them", _comparison_commands(arm, parts.twin))),
    ]
    subtitle = [f"Native equivalent: {parts.twin or 'none'}", parts.twin_is]
    return Document("explanation", sections, explanation.data(), arm, f"{arm}: {parts.summary}", subtitle)


def _code_blocks_of_lines(title: str, lines: Sequence[str]) -> list[Block]:
    return [Code("\n".join(lines), title)] if lines else []


def _comparison_commands(arm: str, equivalent_arm: str | None) -> list[str]:
    """Return commands that compare an arm with its twin, on the bundled digits and in a script of the user."""
    compared = [arm, *([equivalent_arm] if equivalent_arm else [])]
    if "fp32" not in compared:
        compared.insert(0, "fp32")
    words = " ".join(f"--arm {shlex.quote(one)}" for one in compared)
    own = (
        []
        if equivalent_arm is None
        else [f"ampcompare compare --reference {shlex.quote(arm)} --arm {equivalent_arm} -- YOUR_SCRIPT ARGS"]
    )
    return [f"ampcompare compare {words} --seeds 0-2", *own]


def _memory_text(held: BytesPerParameter) -> str:
    named = [
        ("weight", held.weight),
        ("gradient", held.gradient),
        ("master weight", held.master),
        ("its gradient", held.master_gradient),
        ("kept cast", held.cast),
        ("compensation", held.compensation),
    ]
    parts = " + ".join(f"{count} {name}" for name, count in named if count)
    totals = [
        f"{name} adds {tensors * held.state}, {held.total(tensors)} in all"
        for name, tensors in OPTIMIZER_TENSORS.items()
    ]
    return "; ".join([parts, *totals])


def read_autocast_lists_in_child() -> dict[str, Any] | None:
    """Return what autocast of the installed torch casts on a GPU, asked in a separate process; None without torch."""
    answer = call_in_child(CASTS, seconds=TIME_LIMIT, options={})
    return result_of_answer(answer, "") if answer.has_returned else None


def casts_text(autocast_lists: dict[str, Any], dtype: str, *, width: int) -> str:
    """Return what autocast in a 16-bit type casts on a GPU, in lines.

    Args:
        autocast_lists: as `read_autocast_lists_in_child` returns it.
        dtype: the 16-bit type, such as "fp16".
        width: of a line, in characters.
    """
    lines = [
        f"What torch {autocast_lists['torch']} casts on CUDA under autocast, as its dispatcher says; "
        "the rest is not cast"
    ]
    for how, names in autocast_lists["casts"].items():
        head = f"{how.replace('the 16-bit type', dtype)}: "
        lines += textwrap.wrap(head + ", ".join(names), width, initial_indent="  ", subsequent_indent="    ")
    changes = "; ".join(autocast_lists["changes"]) or "nothing"
    lines += textwrap.wrap(
        f"changed since torch 2.6: {changes}", width, initial_indent="  ", subsequent_indent="    "
    )
    return "\n".join(lines) + "\n"


def observe_small_step_in_child(config: RunConfig) -> dict[str, Any]:
    """Prepare the model of `config` in a separate process, and return what one step of at most `MAX_SAMPLES` shows."""
    recipe = config.recipe
    changes = {"batch_size": min(recipe.batch_size, MAX_SAMPLES), "grad_accum_steps": 1}
    small = config.model_copy(update={"recipe": recipe.model_copy(update=changes)})
    return examine_in_child(PROGRAM, small, f"{config.arm} cannot be observed on {recipe.model.arch}", {})


def observation_text(observation: dict[str, Any], *, width: int) -> str:
    """Return tables of modules and bytes; modules of like types share a row where there are many.

    Args:
        observation: as `observe_small_step_in_child` returns it.
        width: of the text around the tables, in characters.
    """
    from tabulate import tabulate

    rows = observation["modules"]
    if len(rows) > MAX_ROWS:
        headers, table = ["module", "type", "modules", *HEADERS[2:]], _rows_by_module_type(rows)
    else:
        headers, table = (
            [*HEADERS],
            [[row["module"], row["type"], *_cells_of_module_row(row)] for row in rows],
        )
    unit = "KiB" if observation["bytes"]["total"] < 10 * UNITS["MiB"] else "MiB"
    aligned = ["right" if header in ("parameters", "modules") else "left" for header in headers]
    parts = [
        "\n".join(textwrap.wrap(_observation_heading_line(observation), width)),
        tabulate(table, headers=headers, tablefmt="simple", colalign=aligned, disable_numparse=True),
        tabulate(
            _rows_of_bytes(observation, unit),
            headers=["memory per step", "dtype", "tensors", "elements", unit],
            tablefmt="simple",
            colalign=["left", "left", "right", "right", "right"],
            disable_numparse=True,
        ),
        "\n".join(textwrap.wrap(_total_bytes_text(observation, unit), width)),
        *("\n".join(textwrap.wrap(f"{note}.", width)) for note in observation["notes"]),
    ]
    return "\n\n".join(parts) + "\n"


def _observation_heading_line(observation: dict[str, Any]) -> str:
    shape = "x".join(map(str, observation["batch_shape"]))
    how = f", {observation['half']}" if observation["half"] else ""
    engine = f", engine {observation['engine']}" if observation["engine"] else ""
    kept = f"; kept in fp32: {', '.join(observation['kept_fp32'])}" if observation["kept_fp32"] else ""
    return (
        f"Seen in one step of {observation['arch']} on {observation['data']} (batch {shape}, {observation['device']}"
        f"{how}{engine}){kept}"
    )


def _cells_of_module_row(row: dict[str, Any]) -> list[str]:
    if not row["ran"]:
        return [f"{row['parameters']:,}", _types_text(row["weights"]), "not called", ""]
    return [f"{row['parameters']:,}", *(_types_text(row[name]) for name in ("weights", "inputs", "outputs"))]


def _types_text(names: list[str]) -> str:
    return ", ".join(names) or "-"


def _rows_by_module_type(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return a row for all modules of one type with equal dtypes, named by the first of them."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["type"], *_cells_of_module_row(row)[1:]), []).append(row)
    table = []
    for (kind, *types), members in groups.items():
        name = members[0]["module"] + (", ..." if len(members) > 1 else "")
        parameters = sum(row["parameters"] for row in members)
        table.append([name, kind, str(len(members)), f"{parameters:,}", *types])
    return table


def _rows_of_bytes(observation: dict[str, Any], unit: str) -> list[list[str]]:
    return [
        [name, dtype, f"{part['tensors']}", f"{part['elements']:,}", f"{part['bytes'] / UNITS[unit]:,.1f}"]
        for key, name in NAMES.items()
        for dtype, part in observation["counts"][key].items()
    ]


def _total_bytes_text(observation: dict[str, Any], unit: str) -> str:
    scale = observation["loss_scale"]
    each = observation["bytes_per_parameter"]
    per_parameter = "" if each is None else f", {each:.1f} bytes per parameter"
    total = f"In all {observation['bytes']['total'] / UNITS[unit]:,.1f} {unit}{per_parameter}"
    loss = observation["loss"]
    text = (
        f"{total} with {observation['optimizer']}, without activations and kept casts. Loss {loss['value']:.4g} in "
        f"{loss['dtype']}"
    )
    if scale["before"]:
        skipped = f", {scale['skipped_steps']} skipped first" if scale["skipped_steps"] else ""
        text += f", loss scale {scale['before'][0]:.0f} before and {scale['after'][0]:.0f} after the step{skipped}"
    return f"{text}."
