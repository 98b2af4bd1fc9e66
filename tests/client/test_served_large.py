"""Large answers: passed on in pieces by the server, and whole where they arrive."""

from __future__ import annotations

import asyncio

import pytest
import torch

from nnsight_client import VLLM, http_backend
from nnsight_core.wire.frames import FrameReader

PROMPT = "The Eiffel Tower is in the city of"
ONE = {"temperature": 0.0, "max_tokens": 1}
MIB = 1 << 20


@pytest.fixture(params=[True, False], ids=["plain", "packed"])
def near(request, monkeypatch):
    """Whether the client takes the server for one of this machine."""
    monkeypatch.setattr(http_backend, "near", lambda _: request.param)
    return request.param


def test_large_saves_are_the_ones_that_were_made(server_url, gpt2_path, near):
    with VLLM(gpt2_path, serve=server_url) as model:
        for _ in range(2):
            with model.trace(**ONE) as tracer:
                with tracer.invoke(PROMPT):
                    odd = torch.arange(3 * MIB + 5, dtype=torch.int32).to(torch.uint8).save()
                    small = torch.arange(7).save()
                    noise = torch.randn(2 * MIB, generator=torch.Generator().manual_seed(1)).save()
                with tracer.invoke(PROMPT):
                    other = torch.arange(MIB).save()
            assert torch.equal(odd, torch.arange(3 * MIB + 5, dtype=torch.int32).to(torch.uint8))
            same = torch.randn(2 * MIB, generator=torch.Generator().manual_seed(1))
            assert torch.equal(noise, same) and torch.equal(small, torch.arange(7))
            assert torch.equal(other, torch.arange(MIB))
            other += 1


def test_large_saves_arrive_on_an_event_loop(server_url, gpt2_path):
    async def ask() -> list[torch.Tensor]:
        model = VLLM(gpt2_path, serve=server_url, mode="async")
        tracers = []
        for number in range(3):
            with model.trace(PROMPT, **ONE) as tracer:
                large = (torch.arange(2 * MIB) + number).save()
            tracers.append(tracer)
        await asyncio.gather(*[tracer.backend for tracer in tracers])
        await model.aclose()
        return [tracer.saves["large"] for tracer in tracers]

    for number, large in enumerate(asyncio.run(ask())):
        assert torch.equal(large, torch.arange(2 * MIB) + number)


def test_who_leaves_within_a_large_answer_leaves_nothing(server, gpt2_path, monkeypatch):
    class Leaving(FrameReader):
        def filled(self, count: int) -> None:
            raise KeyboardInterrupt

    with VLLM(gpt2_path, serve=server.url) as model:
        with monkeypatch.context() as patch:
            patch.setattr(http_backend, "FrameReader", Leaving)
            with pytest.raises(KeyboardInterrupt):
                with model.trace(PROMPT, **ONE):
                    large = torch.ones(32 * MIB).save()
        assert server.empty()
        with model.trace(PROMPT, **ONE):
            large = torch.ones(2 * MIB).save()
        assert torch.equal(large, torch.ones(2 * MIB))
