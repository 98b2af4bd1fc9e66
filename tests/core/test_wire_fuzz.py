"""What is not well formed is refused: nothing runs, nothing breaks, nothing grows."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import threading
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest
import torch

from nnsight_core import Kept, NNsightError
from nnsight_core.outputs import CompletionOutput, RequestOutput
from nnsight_core.wire.blocks import decode_event
from nnsight_core.wire.data import Decoder, Encoder
from nnsight_core.wire.errors import record_error
from nnsight_core.wire.frames import Frame, FrameReader, read_frame
from nnsight_core.wire.messages import (
    AliveMessage,
    DoneMessage,
    EndedMessage,
    FinishedMessage,
    PartData,
    PrintedMessage,
    SavedMessage,
    WentMessage,
    read_message,
)
from nnsight_core.wire.went import WentReader

COUNT = 100_000
FORBIDDEN = ("compile", "exec", "import", "open", "os.", "subprocess.", "socket.", "pickle.")


def seeds() -> list[Frame]:
    """Frames of every kind that a client reads."""
    encoder = Encoder()
    values = {
        "h": torch.randn(3, 4).bfloat16(),
        "many": [torch.ones(2), (1, 2.5, None, "text"), {"k": b"bytes", 3: {1, 2}}],
        "kept": Kept("id", "float32 [2]", 8, torch.Size([2]), torch.float32),
        "n": torch.arange(6).numpy(),
    }
    encoder.pack(*values.values())
    forms = {name: encoder.encode(value) for name, value in values.items()}
    try:
        raise KeyError("gone", torch.ones(2))
    except KeyError as error:
        record = record_error(error, encoder)
    # Tracebacks are made of code that raises on the lines in question (tests/core/test_home.py).
    record = record.model_copy(update={"frames": ()})
    output = OUTPUT
    part = PartData(index=0, start=1, text="c", token_ids=[3])
    return [
        EndedMessage(key="0", saves=forms, error=record).frame(encoder.buffers),
        SavedMessage(key="0", saves=forms, more={"many": forms["many"]}).frame(encoder.buffers),
        PrintedMessage(key="0", text="hello").frame(),
        FinishedMessage(key="0", output=output).frame(),
        WentMessage(key="0", output=output).frame(),
        WentMessage(key="0", parts=[part]).frame(),
        AliveMessage().frame(),
        DoneMessage().frame(),
    ]


OUTPUT = RequestOutput(
    request_id="r", outputs=[CompletionOutput(index=0, text="ab", token_ids=[1, 2])]
)
STRANGE: list[Any] = [None, True, -1, 0, 1 << 70, 1e308, "", "\x00", "$", [], {}, [[]]]
STRANGE += [
    {"$": kind} for kind in ("dict", "pickle", "path", "function", "nn", "ref", "tensor", "list")
]
STRANGE += [
    {"$": "path", "module": "os", "name": "system"},
    {"$": "pickle", "b": 0},
    {"$": "ref", "i": 0},
    {"$": "tensor", "dtype": "float32", "shape": [1 << 40], "b": 0},
    {"$": "tensors", "as": "list", "n": 1 << 40, "dtype": "int8", "shape": [1], "at": 0, "b": 0},
    {"$": "range", "v": [0, 1 << 60, 1]},
]


def mutated(value: Any, draw: random.Random) -> Any:
    """A JSON value with something in it that is something else."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        changed = dict(value)
        kind = draw.random()
        if kind < 0.1:
            del changed[key]
        elif kind < 0.2:
            changed[str(draw.choice(STRANGE))] = draw.choice(STRANGE)
        else:
            changed[key] = mutated(value[key], draw)
        return changed
    if isinstance(value, list) and value and draw.random() < 0.9:
        index = draw.randrange(len(value))
        return [*value[:index], mutated(value[index], draw), *value[index + 1 :]]
    return draw.choice(STRANGE)


def broken(frame: Frame, draw: random.Random) -> bytes:
    """A frame with something wrong in its header, or anywhere in its bytes."""
    if draw.random() < 0.7:
        header = frame.header
        for _ in range(draw.choice((1, 1, 1, 2, 5))):
            header = mutated(header, draw)
        try:
            header = orjson.loads(orjson.dumps(header, option=orjson.OPT_NON_STR_KEYS))
        except TypeError:
            return b""
        if isinstance(header, dict):
            return Frame(header, frame.buffers).to_bytes()
        return orjson.dumps(header)
    data = bytearray(frame.to_bytes(compress=draw.random() < 0.2))
    for _ in range(draw.choice((1, 2, 8))):
        kind = draw.random()
        place = draw.randrange(len(data) + 1)
        if kind < 0.6 and place < len(data):
            data[place] = draw.randrange(256)
        elif kind < 0.8:
            del data[place : place + draw.randrange(1, 40)]
        else:
            data[place:place] = draw.randbytes(draw.randrange(1, 20))
        if not data:
            break
    return bytes(data)


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """What Python is asked to do that decoding never should, by the thread that decodes."""
    seen: list[str] = []
    active = True
    thread = threading.get_ident()

    def hook(event: str, args: Any) -> None:
        nonlocal active
        if active and event.startswith(FORBIDDEN) and threading.get_ident() == thread:
            active = False  # to say where opens the files of the stack
            where = "".join(traceback.format_stack(limit=12))
            seen.append(f"{event} {str(args)[:200]}\n{where}")
            active = True

    # What other tests have left is not let go of here: how Python speaks of an error in a finalizer
    # would be taken for what decoding does.
    gc.collect()
    gc.freeze()
    sys.addaudithook(hook)
    try:
        yield seen
    finally:
        active = False
        gc.unfreeze()


def read(data: bytes) -> None:
    """What a client does with bytes that a server sent."""
    frame = read_frame(data, 1 << 20)
    message = read_message(frame)
    if isinstance(message, WentMessage):
        reader = WentReader()
        reader.output(WentMessage(key="0", output=OUTPUT))
        reader.output(message)
    elif not isinstance(message, AliveMessage | DoneMessage):
        with contextlib.suppress(TypeError):
            decode_event(message, frame, 0, [KeyError])


def fuzz(
    read: Callable[[bytes], None],
    frames: list[Frame],
    refused: type[Exception] | tuple[type[Exception], ...],
    count: int,
    seed: int,
) -> dict[str, int]:
    """What became of malformed messages, by the name of the error; "taken" of those that are fine.

    None of them may make Python run anything, or leave anything in memory.
    """
    draw = random.Random(seed)
    for frame in frames:
        read(frame.to_bytes(compress=True))
    outcomes: Counter[str] = Counter()
    with watched() as seen:
        for number in range(count):
            if number == count // 5:
                gc.collect()
                tracemalloc.start()
                before = tracemalloc.get_traced_memory()[0]
            data = broken(draw.choice(frames), draw)
            try:
                read(data)
                outcomes["taken"] += 1
            except refused as error:
                outcomes[type(error).__name__] += 1
                error.__traceback__ = None
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
    assert not seen, seen[0]
    assert sum(outcomes.values()) == count
    assert outcomes["ProtocolError"] > count // 2 and outcomes["taken"] > 100
    assert grown < 1 << 20
    return dict(outcomes)


def test_a_hundred_thousand_malformed_messages() -> None:
    outcomes = fuzz(read, seeds(), NNsightError, COUNT, seed=0)
    assert set(outcomes) == {"taken", "ProtocolError", "FrameTooLarge"}, outcomes


@pytest.mark.parametrize("size", [1, 3, 17])
def test_garbage_is_refused_at_any_cut(size: int) -> None:
    draw = random.Random(size)
    for _ in range(2000):
        data = draw.randbytes(draw.randrange(0, 200))
        reader = FrameReader(1 << 16)
        with contextlib.suppress(NNsightError):
            for start in range(0, len(data), size):
                list(reader.feed(data[start : start + size]))
            reader.end()
            assert not data


def test_what_only_a_worker_decodes_is_refused() -> None:
    for form in STRANGE:
        if isinstance(form, dict) and form.get("$") in ("pickle", "path", "function", "nn"):
            with pytest.raises(NNsightError):
                Decoder([b"cos\nsystem\n(S'true'\ntR."]).decode(form)
