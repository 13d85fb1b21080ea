"""A plugin of pytest: tensors are made on CUDA where a test does not say where, as far as there is CUDA."""

import pytest
import torch

if torch.cuda.is_available():
    torch.set_default_device("cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test as one for a GPU, so that none is hidden from it."""
    if torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.requires(cuda=1))
