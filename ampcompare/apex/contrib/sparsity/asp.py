"""`ASP` of `apex.contrib.sparsity`: each of its methods refuses, and names what to use."""

from __future__ import annotations

from typing import Any, NoReturn

from ampcompare.base.errors import ConfigError

__all__ = ["ASP", "SparsityAbsent"]


class SparsityAbsent(ConfigError, NotImplementedError):
    """The script uses structured sparsity, which ampcompare does not offer."""


class ASP:
    """Automatic 2:4 sparsity, which ampcompare does not offer; scripts that import it without use run.

    Source: Apex 25.05, `apex.contrib.sparsity.ASP`, for the names.
    """

    @classmethod
    def init_model_for_pruning(cls, model: Any, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `SparsityAbsent`."""
        _refuse("init_model_for_pruning")

    @classmethod
    def already_init_asp_model(cls) -> bool:
        """Return False: no model can be initialized."""
        return False

    @classmethod
    def init_optimizer_for_pruning(cls, optimizer: Any) -> NoReturn:
        """Raise `SparsityAbsent`."""
        _refuse("init_optimizer_for_pruning")

    @classmethod
    def compute_sparse_masks(cls) -> NoReturn:
        """Raise `SparsityAbsent`."""
        _refuse("compute_sparse_masks")

    @classmethod
    def restore_pruned_weights(cls) -> NoReturn:
        """Raise `SparsityAbsent`."""
        _refuse("restore_pruned_weights")

    @classmethod
    def is_sparsity_enabled(cls) -> bool:
        """Return False: no model can be pruned."""
        return False

    @classmethod
    def prune_trained_model(cls, model: Any, optimizer: Any) -> NoReturn:
        """Raise `SparsityAbsent`."""
        _refuse("prune_trained_model")

    @classmethod
    def set_permutation_saving_params(
        cls,
        allow_permutation: bool = True,
        save_permutation_graph: bool = False,
        permutation_output_dir: str = ".",
    ) -> NoReturn:
        """Raise `SparsityAbsent`."""
        _refuse("set_permutation_saving_params")


def _refuse(name: str) -> NoReturn:
    raise SparsityAbsent(
        f"apex.contrib.sparsity.ASP.{name} was called, and ampcompare prunes no models. Leave the pruning out, or use "
        "torch.ao.pruning or NVIDIA's modelopt."
    )
