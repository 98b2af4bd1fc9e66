"""A bar over the prompts of a trace."""

from __future__ import annotations

import pytest
import torch

from tests.core.nets import make


@pytest.fixture
def model():
    return make()


def test_a_trace_shows_how_far_it_is_if_it_is_asked_to(model, capsys):
    x = torch.randn(2, 4)
    with model.trace(progress=True) as tracer:
        for _ in range(3):
            with tracer.invoke(x):
                out = model.layers[0].output.save()
    assert "3/3" in capsys.readouterr().err and len(out) == 3
    model.trace(x, fn=lambda _: model.layers[0].output[0].sum(), progress=True)
    assert "1/1" in capsys.readouterr().err
    with model.trace(x):
        out = model.layers[0].output.save()
    assert capsys.readouterr().err == ""


def test_the_bar_ends_with_the_trace_whatever_becomes_of_it(model, capsys):
    with pytest.raises(ZeroDivisionError):
        with model.trace(torch.randn(2, 4), progress=True):
            out = 1 / 0
    assert "Processed prompts" in capsys.readouterr().err
