"""Let `import apex`, `import amp_C` and others find this package, before other packages of these names."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from ampcompare.base.shim.alias import ENGINE, AliasLoader

HOME = ENGINE
STANDALONE = frozenset({"amp_C", "apex_C", "fused_layer_norm_cuda"})
# Every other extension that the setup.py of Apex 25.05 can build.
KERNELS = frozenset(
    (
        *("_apex_gpu_direct_storage", "_apex_nccl_allocator"),
        *("bnp", "cudnn_gbn_lib", "distributed_adam_cuda"),
        *("distributed_lamb_cuda", "fast_bottleneck", "fast_layer_norm", "fast_multihead_attn", "fmhalib"),
        *("focal_loss_cuda", "fused_adam_cuda", "fused_conv_bias_relu"),
        *("fused_dense_cuda", "fused_index_mul_2d"),
        *("fused_lamb_cuda", "fused_rotary_positional_embedding", "fused_weight_gradient_mlp_cuda"),
        *("generic_scaled_masked_softmax_cuda", "group_norm_cuda", "group_norm_v2_cuda", "mlp_cuda"),
        *("nccl_p2p_cuda", "peer_memory_cuda", "permutation_search_cuda", "scaled_masked_softmax_cuda"),
        *("scaled_softmax_cuda", "scaled_upper_triang_masked_softmax_cuda"),
        *("syncbn", "transducer_joint_cuda"),
        *("transducer_loss_cuda", "xentropy_cuda"),
    )
)


def real_module_name(alias: str) -> str | None:
    """Return the module behind `apex`, `apex.x` or one of `STANDALONE`; None for any other name."""
    if alias == "apex" or alias.startswith("apex."):
        return HOME + alias[len("apex") :]
    return f"{HOME}.{alias}" if alias in STANDALONE else None


class ApexFinder(MetaPathFinder):
    """Resolve `apex`, its submodules and `STANDALONE` to the modules of this package, and record missing names.

    Attributes:
        missing: names that were imported and do not exist, as the script spells them ("apex.contrib").
    """

    def __init__(self) -> None:
        self.missing: list[str] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec that yields the real module; None leaves the name to the other finders.

        Args:
            fullname: of the module, dotted.
            path: of the package that is searched; None for `sys.path`.
            target: a module that is loaded again; None for a new one.
        """
        if fullname.startswith(f"{HOME}."):
            # `from apex.x import y` looks for a submodule y of the package before it fails.
            spec = PathFinder.find_spec(fullname, path)
            if spec is None:
                self._record_missing_name("apex" + fullname[len(HOME) :])
            return spec
        real = real_module_name(fullname)
        if real is None:
            if fullname in KERNELS:
                self._record_missing_name(fullname)
            return None
        # A lookup must not import: scripts probe with importlib.util.find_spec.
        real_spec = importlib.util.find_spec(real)
        if real_spec is None:
            return None
        return ModuleSpec(
            fullname, AliasLoader(real), is_package=real_spec.submodule_search_locations is not None
        )

    def _record_missing_name(self, name: str) -> None:
        if name not in self.missing:
            self.missing.append(name)


def install() -> ApexFinder:
    """Resolve `apex` and `STANDALONE` to this package in this process; a second call changes nothing.

    It takes precedence over an installed Apex and over a clone next to the script; modules of another `apex` imported
    before are removed from `sys.modules`; existing references to them stay valid.
    """
    for finder in sys.meta_path:
        if isinstance(finder, ApexFinder):
            return finder
    for name in list(sys.modules):
        if real_module_name(name) is not None:
            del sys.modules[name]
    finder = ApexFinder()
    sys.meta_path.insert(0, finder)
    return finder
