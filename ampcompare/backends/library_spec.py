"""The description of a backend that lets a library train in one of the precisions that the library offers."""

from collections.abc import Callable, Mapping

from ampcompare.backends.explanation import ArmExplanation
from ampcompare.backends.library import Library, explain_library
from ampcompare.backends.options import make_choice_parser
from ampcompare.backends.roles import Roles
from ampcompare.backends.spec import BackendSpec, CheckpointState, ContractTestArm, Options


def library_spec(
    name: str,
    library: Library,
    *,
    summary: str,
    implementation: str,
    option: str,
    arms: Mapping[str, str],
    does: tuple[tuple[str, str], ...],
    script: Callable[[str], tuple[str, ...]],
    read: Callable[[str], str] | None = None,
    roles: Callable[[Options], Roles | None] = lambda options: None,
    loop: str = "",
    contract: tuple[ContractTestArm, ...],
) -> BackendSpec:
    """Return the description; `arms` has ampcompare's own arm of each value of `option`, the default first."""

    def explain_arm(options: Options) -> ArmExplanation:
        return explain_library(name, library, does, script(options[option]), arms[options[option]])

    return BackendSpec(
        summary=summary,
        implementation=f"ampcompare.training.precision.{implementation}",
        explain=explain_arm,
        roles=roles,
        parsers={option: read or make_choice_parser(*arms)},
        positional=option,
        default=next(iter(arms)),
        library=library,
        runs=lambda options: arms[options[option]],
        loop=loop,
        checkpoint=CheckpointState(grad_scaler=lambda options: arms[options[option]] == "native:fp16"),
        contract=contract,
    )
