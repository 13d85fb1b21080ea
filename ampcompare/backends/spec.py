"""The description of a backend: everything the package knows of it without importing torch.

Every command reads it: the arm grammar, `list`, `explain`, `doctor`, `convert`, the reports and the contract tests. The
class that trains, a `Precision`, is named by `implementation` and imported when it is needed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ampcompare.backends.explanation import ArmExplanation
from ampcompare.backends.library import Library
from ampcompare.backends.roles import Roles

Options = Mapping[str, Any]
"""Parsed options of an arm; those at their default may be missing."""


@dataclass(frozen=True)
class ContractTestArm:
    """An arm on which the contract tests run.

    Attributes:
        skips_steps: its loss scale is dynamic, so an overflow skips the step.
        shares_steps: several optimizers may share an update.
    """

    text: str
    skips_steps: bool = False
    shares_steps: bool = True


@dataclass(frozen=True)
class CheckpointState:
    """What the arms of a backend keep in a checkpoint: the state of a GradScaler, or `amp.state_dict` of an opt level.

    Attributes:
        grad_scaler: options -> whether the arm has a `torch.amp.GradScaler`; None if no arm of the backend does.
        opt_level: options -> the opt level whose `amp.state_dict` the arm has, such as "O2"; "" if it has none.
    """

    grad_scaler: Callable[[Options], bool] | None = None
    opt_level: Callable[[Options], str] = lambda options: ""


@dataclass(frozen=True)
class InScript:
    """How an arm trains a user's script, in the place of `apex.amp` and `torch.amp`. What it casts, its roles say.

    Attributes:
        behind: `module:function` that returns what stands behind `torch.amp`, called with the arm and a
            `ScriptProcessContext`. The default is autocast, or weights in 16 bits, as the roles have it.
        is_as_written: nothing is replaced; the script trains as it is written.
        keeps_apex: the calls of `apex.amp` in the script stay Apex's own, whose steps are recorded there; else they are
            calls of the arm.
        acts_if_off: it trains a script whose own mixed precision is switched off, since that changes nothing.
    """

    behind: str = "ampcompare.script.behind.own_arm:prepare_torch_amp_stand_in"
    is_as_written: bool = False
    keeps_apex: bool = False
    acts_if_off: bool = False


@dataclass(frozen=True)
class BackendSpec:
    """A backend as data.

    Attributes:
        summary: one line for `ampcompare list`.
        implementation: `module:attribute` of its `Precision`, called as `factory(device=..., **options)`.
        explain: options -> explanation of the arm.
        roles: options -> in which type each part of a step is held or computed; None if that is not known.
        wraps: options, roles of the arm that this one runs on -> its own.
        stands_for: options as they are written -> text of the arm that this one is a name of; "" for an arm of its own.
        parsers: option name -> function that reads its text and raises `ValueError` with what was expected; None if the
            options are not known here.
        positional: the option that may be written without its name, such as the opt level in `apex:O2`.
        default: text of the positional option if none is written.
        aliases: words in lower case that stand for an option with its value.
        spellings: option with its value, as `Arm.digest_text` has it -> the word that people write for it, an alias. It
            is what every table, remedy and file shows.
        shorthands: words in lower case that stand for an arm by themselves, or for the backend; read of the backends of
            this package only.
        written: options that the text names even at these values, their defaults.
        implied: defaults that the text leaves out.
        check: parsed options -> what is wrong with their combination, or "".
        library: what it needs besides torch; None if nothing.
        runs: options -> text of the arm of ampcompare's own that has the precision which a library is asked for.
        inner: options -> text of the arm that this one runs on; "" if there is none.
        unsharded: options -> why the arm does not run on weights that are sharded over ranks; "" if it does.
        elsewhere: options -> why the arm does not run on an accelerator besides CUDA, such as mps; "" if it may.
        parallel: the kind of parallelism that the backend consists in; "" if it goes with several.
        loop: the library whose own training loop a model is set up for, so that no other loop trains it; "" if none.
        calls_apex: it trains by calls of `apex.amp`: the real Apex, or ampcompare's own engine.
        checkpoint: what it keeps in a checkpoint.
        in_script: how it trains a user's script; None if it cannot, since it replaces the loop or parts of the model.
        contract: arms for the contract tests.
    """

    summary: str
    implementation: str
    explain: Callable[[Options], ArmExplanation]
    roles: Callable[[Options], Roles | None] = lambda options: None
    wraps: Callable[[Options, Roles], Roles] = lambda options, inner: inner
    stands_for: Callable[[Mapping[str, str]], str] = lambda options: ""
    parsers: Mapping[str, Callable[[str], Any]] | None = field(default_factory=dict)
    positional: str | None = None
    default: str | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    spellings: Mapping[str, str] = field(default_factory=dict)
    shorthands: Mapping[str, str] = field(default_factory=dict)
    written: Options = field(default_factory=dict)
    implied: Options = field(default_factory=dict)
    check: Callable[[Options], str] = lambda options: ""
    library: Library | None = None
    runs: Callable[[Options], str] = lambda options: ""
    inner: Callable[[Options], str] = lambda options: ""
    unsharded: Callable[[Options], str] = lambda options: "its backend does not support sharded weights"
    elsewhere: Callable[[Options], str] = lambda options: "its backend supports CPUs and CUDA GPUs only"
    parallel: str = ""
    loop: str = ""
    calls_apex: bool = False
    checkpoint: CheckpointState = CheckpointState()
    in_script: InScript | None = None
    contract: tuple[ContractTestArm, ...] = ()
