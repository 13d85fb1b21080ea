"""The backend `horovod`: Horovod's DistributedOptimizer."""

from ampcompare.backends.explanation import PLAIN_STEP, ArmExplanation
from ampcompare.backends.library import Library, explain_library
from ampcompare.backends.options import make_choice_parser, parse_count
from ampcompare.backends.roles import Roles
from ampcompare.backends.spec import BackendSpec, Options

LIBRARY = Library(
    ("horovod.torch",),
    ("horovod",),
    "HOROVOD_WITH_PYTORCH=1 pip install --no-build-isolation horovod",
    "it is built on your machine; its last release, 0.28.1, compiles as C++14, and torch 2.13 needs C++17",
)


def _explain_arm(options: Options) -> ArmExplanation:
    return explain_library(
        "Horovod's DistributedOptimizer",
        LIBRARY,
        (
            ("casts", "none; with compression=fp16 gradients are exchanged in fp16"),
            ("loss scale", "none"),
            ("processes", "needs horovodrun and your own training loop; one process exchanges nothing"),
            ("accumulation", "passes=N: Horovod must know beforehand"),
        ),
        (
            "import horovod.torch as hvd",
            "hvd.init()",
            "hvd.broadcast_parameters(model.state_dict(), root_rank=0)",
            "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), "
            f"compression=hvd.Compression.{options.get('compression', 'none')})",
            PLAIN_STEP[0],
            PLAIN_STEP[1],
            PLAIN_STEP[3],
        ),
        "fp32",
    )


SPEC = BackendSpec(
    summary="Horovod's DistributedOptimizer: fp32, gradients exchanged in fp32 or fp16",
    implementation="ampcompare.training.precision.horovod:Horovod",
    explain=_explain_arm,
    parsers={"compression": make_choice_parser("none", "fp16"), "passes": parse_count},
    implied={"compression": "none", "passes": 1},
    roles=lambda options: Roles(reduction="fp16" if options.get("compression") == "fp16" else "fp32"),
    library=LIBRARY,
    runs=lambda options: "fp32",
    # No contract arms: it cannot be built for this torch; tests/training/precision/test_horovod.py uses a stub.
)
