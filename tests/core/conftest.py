"""What tests of the core share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nnsight_core import TorchModel

from . import nets


@pytest.fixture
def model() -> Iterator[TorchModel]:
    """A small model, of whose traces nothing may be left behind."""
    model = nets.make()
    with torch.no_grad():
        yield model
    nets.check_idle(model)
