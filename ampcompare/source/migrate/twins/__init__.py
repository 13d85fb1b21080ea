"""Rewrite what stands around the core by its twin in torch: optimizers, wrappers, layers, decorators, contexts."""
