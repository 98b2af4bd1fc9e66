"""Every known way out of a restricted block is refused, for its own reason, and nothing runs."""

from __future__ import annotations

import functools
import math
import os
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn, zeros

import nnsight_core
from tests.serve.escapes import ESCAPES
from tests.serve.restricted import small_model, trace

VARIABLE = "NNSIGHT_TEST_CANARY"


def evil(thing):
    t = thing
    return t.parameters


large = functools.partial(torch.zeros)
NAMES = {
    **{"torch": torch, "math": math, "np": np, "F": F, "nn": nn, "nnsight_core": nnsight_core},
    **{"zeros": zeros, "large": large, "evil": evil},
}


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.mark.parametrize("name", ESCAPES)
def test_a_way_out_is_closed(model, tmp_path, name):
    text, says = ESCAPES[name]
    canary = tmp_path / "canary"
    environment = dict(os.environ)
    with pytest.raises(BaseException) as raised:
        trace(model, text, tmp_path, canary=str(canary), **NAMES)
    error = raised.value
    assert re.search(says, str(error)), f"{type(error).__name__}: {error}"
    assert isinstance(error, EXPECTED), type(error)
    assert not canary.exists() and dict(os.environ) == environment


EXPECTED = (
    nnsight_core.PolicyError,
    nnsight_core.BlockTimeout,
    nnsight_core.LocationError,
    RecursionError,
    TypeError,
    ZeroDivisionError,
)


def test_after_all_of_them_blocks_run_as_before(model, tmp_path):
    found = trace(model, "x = (model[0].output * 2).save()", tmp_path)
    assert torch.equal(found["x"], 2 * model._module[0](torch.ones(1, 2))) if hasattr(
        model, "_module"
    ) else found["x"].shape == (1, 2)


def test_there_are_many():
    assert len(ESCAPES) >= 100
