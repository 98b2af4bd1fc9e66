"""Every known way out of a restricted block is refused, for its own reason, and nothing runs."""

from __future__ import annotations

import os
import re

import pytest

from nnsight_core.backend import Invoke
from nnsight_core.block_tracer import BLOCK_TRACER
from nnsight_core.errors import BlockTimeout, LocationError, PolicyError
from tests.serve.escapes import ESCAPES, NAMES, TIME
from tests.serve.restricted import (
    RESTRICTED,
    TRUSTED,
    X,
    forged,
    run_forged,
    run_of,
    small_model,
)

EXPECTED = (PolicyError, BlockTimeout, LocationError, RecursionError, TypeError, ZeroDivisionError)


@pytest.fixture(scope="module")
def model():
    return small_model()


def attempt(model, text, canary, limit=60.0):
    """Run a block; raises what it ended with."""
    names = {**NAMES, "layer": model[0], "other": model[2], "canary": str(canary)}
    run = run_forged(model, text, limit, **names)
    if run.error is not None:
        raise run.error


@pytest.mark.parametrize("name", ESCAPES)
def test_a_way_out_is_closed(model, tmp_path, name):
    text, says = ESCAPES[name]
    canary, environment = tmp_path / "canary", dict(os.environ)
    with pytest.raises(EXPECTED, match=says) as raised:
        attempt(model, text, canary, 0.3 if says == TIME else 60.0)
    assert type(raised.value) in EXPECTED
    assert not canary.exists() and dict(os.environ) == environment
    attempt(model, "x = (layer.output * 2).sum()", canary)


def test_without_the_policy_there_are_ways_out(tmp_path):
    canary = tmp_path / "canary"
    text = "import os\nx = ().__class__.__base__\nopen(canary, 'w').close()"
    data, _ = forged(text, canary=str(canary))
    model = small_model(TRUSTED)
    run = run_of(data, model, TRUSTED)
    model._backend._run(Invoke(X, {}), run)
    assert run.error is None and canary.exists()


@pytest.mark.parametrize("name", [n for n, (_, says) in ESCAPES.items() if "private" in says])
def test_what_the_text_shows_is_refused_before_anything_runs(name):
    data, _ = forged(ESCAPES[name][0], tracer=BLOCK_TRACER)
    with pytest.raises(PolicyError, match=r"^forged\.py:\d+: "):
        RESTRICTED.check(data)


def test_there_are_many():
    assert len(ESCAPES) >= 100 and all(re.compile(says) for _, says in ESCAPES.values())
