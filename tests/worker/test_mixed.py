"""Alone = in mixed traffic: whatever else runs, a request is what it is alone on a roomy engine.

Mixes of requests are drawn at random: blocks that read, blocks that write, and plain requests.
Their prompts begin alike, they come and leave while others run, and the engine cuts prompts into
pieces, finds prefixes in its cache and preempts. Two things are to hold of each mix:

- Tokens, reasons to end, warnings and shapes equal those of the request alone, and saved numbers do
  as far as float32 goes (`near`: 1e-3 relative, 2e-4 absolute, on a CPU).
- A block writes rows of its own request only: what the others draw and save is, bit for bit, what
  it is in the same mix with blocks that read where these write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nnsight_core.backend import Invoke
from nnsight_core.cache import Cache
from nnsight_core.tracer import NO_PROMPT, Tracer
from nnsight_core.wire.blocks import decode_event
from nnsight_core.wire.frames import Frame
from nnsight_core.wire.messages import read_message
from nnsight_vllm_worker.engine import _Batch
from nnsight_vllm_worker.vllm_ports import startup

ROOM = 40
"""Tokens that a forward pass of the tight engine takes, and so a writer's prompt may have."""


def _random(count: int, seed: int) -> list[int]:
    made = torch.randint(20, 500, (count,), generator=torch.Generator().manual_seed(seed))
    return made.tolist()


COMMON = _random(64, 1)
TURN = torch.linalg.qr(torch.randn(96, 96, generator=torch.Generator().manual_seed(2)))[0]


@dataclass(frozen=True)
class Ask:
    """One request of a mix: its block and sampling, and when it comes and leaves.

    Attributes:
        shared: how many tokens its prompt begins with that others begin with as well.
        own: how many follow which no other prompt has.
        steps: how many steps its block looks at, if it does not look at all.
        tokens: how many it draws, at most.
        seed: of its sampling; None for greedy sampling.
        comes: the pass of the engine before which it comes.
        leaves: the pass before which it is aborted; None if it is not.
    """

    place: int
    block: str
    layer: int
    scale: float
    steps: int
    shared: int
    own: int
    tokens: int
    n: int
    seed: int | None
    comes: int
    leaves: int | None

    @property
    def prompt(self) -> list[int]:
        own = [10 + self.place, *_random(self.own, 100 + self.place)]
        return [*COMMON[: self.shared], *own[: self.own]]

    @property
    def sampling(self) -> dict[str, Any]:
        drawn = (
            {"temperature": 0.0} if self.seed is None else {"temperature": 1.0, "seed": self.seed}
        )
        return {"n": self.n, "max_tokens": self.tokens, "ignore_eos": True, **drawn}


# -- blocks ------------------------------------------------------------------------------------
# Each is given where it reads, how often, and (if it writes) by what, and whether it does write.

READERS: dict[str, Any] = {"plain": None}
WRITERS: dict[str, Any] = {}


def reader(block: Any) -> Any:
    READERS[block.__name__] = block
    return block


def writer(block: Any) -> Any:
    WRITERS[block.__name__] = block
    return block


@reader
def one_layer(model: Any, tracer: Any, invoke: Any, layer: int, **_: Any) -> None:
    with invoke:
        hidden = model.transformer.h[layer].output.save()


@reader
def every_layer(model: Any, tracer: Any, invoke: Any, **_: Any) -> None:
    with invoke:
        hidden = [].save()
        for _ in tracer.all():
            hidden.append([layer.output[-1] for layer in model.transformer.h])


@reader
def some_steps(model: Any, tracer: Any, invoke: Any, layer: int, steps: int, **_: Any) -> None:
    with invoke:
        seen = [].save()
        for step in tracer.iter[:steps]:
            seen.append((step, model.transformer.h[layer].mlp.output, model.logits))


@reader
def later_steps(model: Any, tracer: Any, invoke: Any, layer: int, steps: int, **_: Any) -> None:
    with invoke:
        seen = [].save()
        for step in tracer.iter[1::steps]:
            seen.append((step, model.transformer.h[layer].attn.output, model.samples.item()))


@reader
def inputs(model: Any, tracer: Any, invoke: Any, layer: int, steps: int, **_: Any) -> None:
    with invoke:
        seen = [].save()
        for _ in tracer.iter[:steps]:
            seen.append(model.transformer.h[layer].attn.attn.inputs[0])
            seen.append(model.transformer.h[layer].mlp.input)


@reader
def source(model: Any, tracer: Any, invoke: Any, layer: int, **_: Any) -> None:
    with invoke:
        seen = [].save()
        for _ in tracer.all():
            seen.append(model.transformer.h[layer].attn.source.self_c_attn_0.output[0])
            seen.append(model.transformer.h[layer].attn.source.attn_output_0.output)


@reader
def embeddings(model: Any, tracer: Any, invoke: Any, **_: Any) -> None:
    with invoke:
        both = (model.transformer.wte.output.save(), model.transformer.wpe.output.save())
        last = model.transformer.ln_f.output.save()


@reader
def cache(model: Any, tracer: Any, invoke: Any, layer: int, **_: Any) -> None:
    with invoke:
        kept = tracer.cache(modules=[model.transformer.h[layer]], include_inputs=True)
        rest = tracer.cache(modules=["transformer.h.3.mlp", "transformer.ln_f"])


@reader
def stop(model: Any, tracer: Any, invoke: Any, steps: int, **_: Any) -> None:
    with invoke:
        drawn = [].save()
        for step in tracer.all():
            drawn.append(model.samples.item())
            if step == steps or drawn[-1] % 7 == 0:
                tracer.stop()


@reader
def result(model: Any, tracer: Any, invoke: Any, layer: int, **_: Any) -> None:
    with invoke:
        hidden = model.transformer.h[layer].output[-1].save()
        ids = list(tracer.result.outputs[0].token_ids).save()


@writer
def in_place(
    model: Any, tracer: Any, invoke: Any, layer: int, steps: int, scale: float, write: bool
) -> None:
    with invoke:
        logits = [].save()
        for step in tracer.all():
            model.transformer.h[layer].mlp.output
            if write and step % steps == 0:
                model.transformer.h[layer].mlp.output[:] *= scale
            logits.append(model.logits)


@writer
def assigned(model: Any, tracer: Any, invoke: Any, layer: int, write: bool, **_: Any) -> None:
    with invoke:
        hidden = [].save()
        for _ in tracer.all():
            model.transformer.h[layer].output
            if write:
                model.transformer.h[layer].output = model.transformer.h[layer].output @ TURN
            hidden.append(model.transformer.ln_f.input)


@writer
def by_slice(
    model: Any, tracer: Any, invoke: Any, layer: int, steps: int, scale: float, write: bool
) -> None:
    with invoke:
        seen = [].save()
        for _ in tracer.iter[:steps]:
            model.transformer.h[layer].attn.output
            if write:
                model.transformer.h[layer].attn.output[-1, ::2] += scale
                model.transformer.h[layer].attn.output[:1, 1::2] = scale
            seen.append(model.transformer.h[layer].output)
        logits = model.logits.save()


@writer
def late(
    model: Any, tracer: Any, invoke: Any, layer: int, steps: int, scale: float, write: bool
) -> None:
    with invoke:
        seen = [].save()
        for _ in tracer.iter[steps:]:
            model.transformer.h[layer].output
            if write:
                model.transformer.h[layer].output[:] *= scale
            seen.append((model.logits, model.samples.item()))


@writer
def of_input(
    model: Any, tracer: Any, invoke: Any, layer: int, scale: float, write: bool, **_: Any
) -> None:
    with invoke:
        seen = [].save()
        for _ in tracer.all():
            model.transformer.h[layer].ln_2.input
            if write:
                model.transformer.h[layer].ln_2.input[:] += scale
            seen.append(model.transformer.h[layer].output)


@writer
def of_inputs(
    model: Any, tracer: Any, invoke: Any, layer: int, scale: float, write: bool, **_: Any
) -> None:
    with invoke:
        seen = [].save()
        for _ in tracer.all():
            (q, k, v), rest = model.transformer.h[layer].attn.attn.inputs
            if write:
                model.transformer.h[layer].attn.attn.inputs = ((q, k * scale, v + scale), rest)
            seen.append(model.transformer.h[layer].attn.output)


@writer
def of_source(
    model: Any, tracer: Any, invoke: Any, layer: int, scale: float, write: bool, **_: Any
) -> None:
    with invoke:
        seen = [].save()
        for _ in tracer.all():
            model.transformer.h[layer].attn.source.self_c_attn_0.output
            if write:
                model.transformer.h[layer].attn.source.self_c_attn_0.output[0][:, 192:] *= scale
            seen.append(model.transformer.h[layer].output)


@writer
def of_embeddings(
    model: Any, tracer: Any, invoke: Any, scale: float, write: bool, **_: Any
) -> None:
    with invoke:
        seen = [].save()
        for _ in tracer.all():
            model.transformer.wte.output
            if write:
                model.transformer.wte.output[:] *= scale
            model.transformer.wpe.output
            if write:
                model.transformer.wpe.output = model.transformer.wpe.output.flip(-1)
            seen.append(model.transformer.h[0].output)


@writer
def skip(
    model: Any, tracer: Any, invoke: Any, layer: int, scale: float, write: bool, **_: Any
) -> None:
    with invoke:
        seen = [].save()
        for _ in tracer.all():
            given = model.transformer.h[layer].mlp.input
            if write:
                model.transformer.h[layer].mlp.skip(given * scale)
            else:
                model.transformer.h[layer].mlp.output
            seen.append(model.transformer.h[layer].output)


@writer
def several(
    model: Any, tracer: Any, invoke: Any, layer: int, steps: int, scale: float, write: bool
) -> None:
    with invoke:
        seen = [].save()
        for step in tracer.all():
            for each in model.transformer.h[layer:]:
                each.mlp.output
                if write and step % 2 == 0:
                    each.mlp.output[:] *= scale
                each.output
                if write and step % 3 == 0:
                    each.output[-1, :8] = 0
            seen.append(model.logits)
            if step == steps:
                tracer.stop()


@writer
def hidden_in_a_helper(
    model: Any, tracer: Any, invoke: Any, layer: int, steps: int, write: bool, **_: Any
) -> None:
    def change(value: Tensor) -> None:
        if write:
            value.neg_()

    with invoke:
        seen = [].save()
        for _ in tracer.iter[:steps]:
            change(model.transformer.h[layer].ln_1.output)
            seen.append(model.transformer.h[layer].mlp.output)


@writer
def of_logits(
    model: Any, tracer: Any, invoke: Any, layer: int, scale: float, write: bool, **_: Any
) -> None:
    with invoke:
        seen = [].save()
        for _ in tracer.all():
            if write:
                model.logits[:, : 100 + 50 * layer] = float("-inf")
                model.logits = model.logits * (1 + abs(scale))
            seen.append((model.logits, model.samples.item()))


@writer
def of_samples(
    model: Any, tracer: Any, invoke: Any, layer: int, steps: int, write: bool, **_: Any
) -> None:
    with invoke:
        seen = [].save()
        for step in tracer.all():
            model.samples
            if write and step % steps == 0:
                model.samples[:] = 100 + step
            seen.append(model.samples.item())


@writer
def function(
    model: Any, tracer: Any, invoke: Any, layer: int, scale: float, write: bool, **_: Any
) -> Any:
    def run(tracer: Any) -> Any:
        seen = []
        for _ in tracer.all():
            if write:
                model.transformer.h[layer].mlp.output[:] *= scale
            seen.append(model.transformer.h[layer].output[-1])
        return seen

    return run


BLOCKS = READERS | WRITERS


class _Kept:
    """A backend that keeps the invokes it is given."""

    def submit(self, invokes: list[Invoke]) -> Iterator[Any]:
        self.invokes = invokes
        return iter(())


def invoke_of(model: Any, ask: Ask, write: bool = True) -> Invoke:
    """The invoke of a request; its block does not write if `write` is False."""
    kept = _Kept()
    block = BLOCKS[ask.block]
    given: dict[str, Any] = {"layer": ask.layer, "steps": ask.steps, "scale": ask.scale}
    if block in (None, function):
        run = block and block(model, None, None, **given, write=write)
        return Invoke(ask.prompt, ask.sampling, None, run)
    with Tracer(model, kept, NO_PROMPT, {}) as tracer:  # type: ignore[arg-type]
        block(model, tracer, tracer.invoke(ask.prompt, **ask.sampling), **given, write=write)
    return kept.invokes[0]


# -- traffic -----------------------------------------------------------------------------------


class _Traffic(_Batch):
    """Requests that come to the engine, and leave it, while others run."""

    def __init__(self, engine: Any, requests: Any, blobs: Any, asks: list[Ask]) -> None:
        super().__init__(engine, requests, blobs)
        self.due = list(zip(requests, asks, strict=True))
        self.passes = 0

    def _add(self) -> Iterator[Any]:
        self.pending.update(self.requests)  # what is still to come keeps the batch going
        yield from ()

    def _step(self) -> list[Any]:
        assert self.passes < 3000, "the requests never end"
        for request, ask in self.due:
            if ask.comes == self.passes:
                startup.add_request(self.engine.llm, request.key, request)
            if ask.leaves == self.passes and request.key in self.pending:
                self._drop(request.key)
                self.engine._rpc("nnsight_forget", [request.key])
        self.passes += 1
        return super()._step()


class Told(NamedTuple):
    """What came of one request: of each sequence its tokens and end, and what its block saved."""

    sequences: list[Any]
    saves: list[Any]


class Played(NamedTuple):
    """What came of a mix (None of what was aborted), and what each pass ran of which request."""

    told: list[Told | None]
    passes: list[list[tuple[int, int]]]


def play(model: Any, asks: list[Ask], met: Counter[str], write: bool = True) -> Played:
    """Run a mix; `met` counts what the engine did to it."""
    engine = model._engine
    blobs: dict[str, Any] = {}
    invokes = [invoke_of(model, ask, write) for ask in asks]
    requests = [model._backend._request(engine.tree, invoke, blobs) for invoke in invokes]
    places = {request.key: place for place, request in enumerate(requests)}
    outputs: dict[int, Any] = {}
    ended: dict[int, dict[int, Any]] = {place: {} for place in places.values()}
    assert model.llm.reset_prefix_cache()
    with pytest.MonkeyPatch.context() as patch:
        passes = _watch(model, patch, places, met)
        for key, what in _Traffic(engine, requests, blobs, asks).run():
            place = places[key]
            if isinstance(what, Frame):
                event = decode_event(read_message(what), what, place, [])
                if event.error is not None:
                    raise event.error
                notes = [(note.category, note.message, note.line) for note in event.warnings]
                ended[place][event.sequence] = (event.saves, event.value, notes)
            elif isinstance(what, BaseException):
                raise what
            else:
                outputs[place] = [
                    (o.token_ids, o.finish_reason, o.stop_reason) for o in what.outputs
                ]
    _check_empty(model)
    told = []
    for place, ask in enumerate(asks):
        if place not in outputs:
            assert ask.leaves is not None
            met["aborted"] += 1
        saves = [ended[place][sequence] for sequence in sorted(ended[place])]
        told.append(Told(outputs[place], saves) if place in outputs else None)
    return Played(told, passes)


def _watch(
    model: Any, patch: pytest.MonkeyPatch, places: dict[str, int], met: Counter[str]
) -> list[list[tuple[int, int]]]:
    """Note what each pass runs of which request, and count what the scheduler does."""
    scheduler = model.llm.llm_engine.engine_core.engine_core.scheduler
    passes: list[list[tuple[int, int]]] = []
    plain = scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = plain(*args, **kwargs)
        for new in output.scheduled_new_reqs:
            met["cached"] += new.num_computed_tokens > 0
            rest = len(new.prompt_token_ids) - new.num_computed_tokens
            met["in pieces"] += output.num_scheduled_tokens[new.req_id] < rest
        met["preempted"] += len(output.scheduled_cached_reqs.resumed_req_ids)
        # vLLM's ids begin with those given, behind the number of a sequence if there are several.
        run = output.num_scheduled_tokens.items()
        passes.append([(_place(places, request), count) for request, count in run])
        return output

    patch.setattr(scheduler, "schedule", schedule)
    return passes


def _place(places: dict[str, int], request: str) -> int:
    return next(place for key, place in places.items() if key in request)


def _check_empty(model: Any) -> None:
    """One plain step later, the worker holds nothing."""
    model.generate([[5, 6, 7]], max_tokens=1, temperature=0.0)
    counts = model._engine.counts()
    assert counts["live"] == 0 and counts["kept"] == 0


def agree(here: Any, there: Any, check: Callable[[Tensor, Tensor], None]) -> None:
    """Assert that two values are built alike and equal, tensors as `check` says."""
    assert type(here) is type(there)
    match here:
        case Tensor():
            assert here.shape == there.shape and here.dtype == there.dtype
            check(here, there)
        case list() | tuple():
            assert len(here) == len(there)
            for one, other in zip(here, there, strict=True):
                agree(one, other, check)
        case dict():
            assert here.keys() == there.keys()
            for name, value in here.items():
                agree(value, there[name], check)
        case Cache():
            agree(here.data(), there.data(), check)
        case _:
            assert here == there


def _exactly(here: Tensor, there: Tensor) -> None:
    assert torch.equal(here, there)


# -- the mixes ---------------------------------------------------------------------------------


@st.composite
def mixes(draw: Any) -> list[Ask]:
    return [draw(asks(place)) for place in range(draw(st.integers(1, 8)))]


@st.composite
def asks(draw: Any, place: int) -> Ask:
    block = draw(st.sampled_from(list(BLOCKS)))
    longest = ROOM - 1 if block in WRITERS else 120
    shared = draw(st.sampled_from([0, 16, 33] if block in WRITERS else [0, 16, 33, 64]))
    comes = draw(st.sampled_from([0, 0, 0, 1, 2, 5, 9, 20]))
    stays = draw(st.sampled_from([None, None, None, None, 0, 1, 2, 4, 11]))
    n = draw(st.sampled_from([1, 1, 1, 2, 3]))  # vLLM refuses several greedy sequences
    return Ask(
        place,
        block,
        layer=draw(st.integers(0, 11)),
        scale=draw(st.sampled_from([1.5, 0.5, 0.0, -1.0, -2.0])),
        steps=draw(st.integers(1, 6)),
        shared=shared,
        own=draw(st.integers(1, longest - shared)),
        tokens=draw(st.integers(1, 24)),
        n=n,
        seed=draw(st.integers(0, 9)) if n > 1 else draw(st.none() | st.integers(0, 9)),
        comes=comes,
        leaves=None if stays is None else comes + stays,
    )


def checked(examples: int) -> Any:
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(autouse=True)
def rewinding(tight: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let seeded requests be cut into pieces.

    vLLM takes back what it draws for a piece that is not the last by setting the offset of the
    request's generator. Those of the CPU have none, so the engine ends with a RuntimeError.
    """
    runner = tight.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    runner = runner.model_runner
    if runner.device.type != "cpu":
        return
    batch, sample, bookkeeping = runner.input_batch, runner._sample, runner._bookkeeping_sync

    def sample_and_rewind(*args: Any, **kwargs: Any) -> Any:
        rows = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        states = {row: g.get_state() for row, g in batch.generators.items() if row in rows}
        output = sample(*args, **kwargs)
        for row, state in states.items():
            batch.generators[row].set_state(state)
        return output

    def keep_books(*args: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batch, "generators", {})
            return bookkeeping(*args, **kwargs)

    monkeypatch.setattr(runner, "_sample", sample_and_rewind)
    monkeypatch.setattr(runner, "_bookkeeping_sync", keep_books)


def check_alone(tight: Any, gpt2: Any, near: Any, mix: list[Ask], met: Counter[str]) -> None:
    """Each request of a mix that is not aborted equals itself alone on the roomy engine."""
    for ask, mixed in zip(mix, play(tight, mix, met).told, strict=True):
        if mixed is not None:
            [alone] = play(gpt2, [replace(ask, comes=0, leaves=None)], Counter()).told
            agree(mixed, alone, near)


def check_own_rows(tight: Any, mix: list[Ask], met: Counter[str]) -> None:
    """Who does not write has, bit for bit, what it has where nobody writes."""
    written, read = (play(tight, mix, met, write) for write in (True, False))
    assert written.passes == read.passes
    for ask, one, other in zip(mix, written.told, read.told, strict=True):
        if ask.block in READERS:
            agree(one, other, _exactly)


def test_alone_equals_mixed(tight: Any, gpt2: Any, near: Any) -> None:
    met: Counter[str] = Counter()

    @checked(20)
    @given(mixes())
    def check(mix: list[Ask]) -> None:
        check_alone(tight, gpt2, near, mix, met)

    check()
    assert all(met[what] for what in ("cached", "in pieces", "preempted", "aborted"))


def test_writers_change_their_own_rows_only(tight: Any) -> None:
    met: Counter[str] = Counter()

    @checked(12)
    @given(mixes())
    def check(mix: list[Ask]) -> None:
        check_own_rows(tight, mix, met)

    check()
    assert all(met[what] for what in ("cached", "in pieces", "preempted", "aborted"))
