"""The restricted policy on an engine of one's own: it is that of a server."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from nnsight_core import EncodeError, PolicyError
from nnsight_core.policy import TRUSTED_PATH
from nnsight_vllm_worker import VLLM
from nnsight_vllm_worker.policies import find_policy

PROMPT = "The Eiffel Tower is in the city of"
ONE: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}


@dataclass
class Own:
    """A class of this file."""

    scale: float = 2.0


def read_file() -> str:
    return open("/etc/passwd").read()


def doubled(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def test_what_is_allowed_means_the_same(restricted: VLLM, gpt2: VLLM) -> None:
    found = []
    for model in (restricted, gpt2):
        with model.trace(PROMPT, **ONE):
            model.transformer.h[6].output[:] = doubled(model.transformer.h[6].output)
            logits = model.logits.save()
        found.append(logits)
    torch.testing.assert_close(*found)


def test_what_is_not_is_refused_with_its_line(restricted: VLLM) -> None:
    with pytest.raises(PolicyError, match=r"test_policy\.py:\d+: .open. is not allowed"):
        with restricted.trace(PROMPT, **ONE):
            with open("/etc/passwd") as file:
                text = file.read().save()
    with pytest.raises(PolicyError, match="open"):
        with restricted.trace(PROMPT, **ONE):
            text = read_file()
    with pytest.raises(PolicyError, match="'__class__' is not allowed"):
        with restricted.trace(PROMPT, **ONE):
            kind = restricted.logits.__class__
    with pytest.raises(PolicyError, match=r"dataclass is not allowed .*asdict\("):
        own = Own()
        with restricted.trace(PROMPT, **ONE):
            scale = own.scale
    with pytest.raises(PolicyError, match="open"):
        with restricted.edit("probe") as (tracer, edit):
            with open("/etc/passwd") as file:
                text = file.read().save()
    assert restricted.edits == []


def test_nothing_is_pickled(restricted: VLLM) -> None:
    lock = threading.Lock()
    with pytest.raises(EncodeError, match="lock"):
        with restricted.trace(PROMPT, **ONE):
            held = lock.locked()


def test_policies_are_found_before_an_engine_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="policy='strict': it is 'trusted', 'restricted'"):
        VLLM("no/model", policy="strict")
    with pytest.raises(ValueError, match="is no policy"):
        VLLM("no/model", policy="nnsight_core.policy:TRUSTED_PATH")
    with pytest.raises(ValueError, match="a server"):
        VLLM("no/model", policy="restricted", serve="http://127.0.0.1:1")
    assert find_policy("trusted")[0] == TRUSTED_PATH
    monkeypatch.setitem(sys.modules, "nnsight_serve", None)
    monkeypatch.delitem(sys.modules, "nnsight_serve.policy", raising=False)
    with pytest.raises(ImportError, match="pip install nnsight-serve"):
        VLLM("no/model", policy="restricted")
