"""A stack of linear layers in one module, with the names of `apex.mlp`."""

from ampcompare.apex.mlp.mlp import MLP, MlpFunction, mlp_function

__all__ = ["MLP", "MlpFunction", "mlp_function"]
