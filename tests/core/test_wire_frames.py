"""Frames and messages: bytes that stay, and bytes that are refused."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nnsight_core import (
    CompletionOutput,
    EncodeError,
    Logprob,
    ProtocolError,
    RequestOutput,
    SaveLimitError,
)
from nnsight_core.wire import frames
from nnsight_core.wire.data import Decoder, Encoder
from nnsight_core.wire.errors import ErrorRecord, FrameRecord
from nnsight_core.wire.frames import VERSION, Frame, FrameReader, FrameTooLarge, join, read_frame
from nnsight_core.wire.messages import (
    BlockData,
    BlockMessage,
    DoneMessage,
    EndedMessage,
    FinishedMessage,
    InvokeData,
    Message,
    PrintedMessage,
    TraceMessage,
    WarningData,
    expect,
    read_message,
)


def messages() -> dict[str, tuple[Message, list[Any]]]:
    """Messages of each kind, with their buffers."""
    encoder = Encoder()
    names = {"vector": encoder.encode(torch.tensor([1.0, -2.0, 0.5])), "k": 3}
    block = BlockData(
        source="    x = vector * k\n",
        filename="user.py",
        line=7,
        function="f",
        names=names,
        targets=["tracer"],
    )
    results = Encoder()
    error = ErrorRecord(
        module="builtins",
        name="ValueError",
        args=["bad"],
        message="bad",
        notes=("a note",),
        frames=(FrameRecord(filename="user.py", line=7, function="f", text="x = 1"),),
    )
    held = Encoder()
    inner = ErrorRecord(module="user", name="Low", message="low")
    group = ErrorRecord(
        module="user",
        name="Batch",
        args=["two"],
        message="two (2 sub-exceptions)",
        attributes={"code": 7, "hidden": held.encode(torch.tensor([0.5]))},
        members=(error, error.model_copy(update={"context": inner})),
        cause=inner,
    )
    note = WarningData(module="builtins", name="UserWarning", message="m", filename="f", line=1)
    saves = {"x": results.encode((torch.ones(1, 2, dtype=torch.bfloat16), None, [1.5, "é"]))}
    output = RequestOutput(
        request_id="1",
        prompt="Hi",
        prompt_token_ids=[1],
        outputs=[
            CompletionOutput(
                index=0,
                text="x",
                token_ids=[5],
                cumulative_logprob=-0.5,
                logprobs=[{5: Logprob(logprob=-0.5, rank=1, decoded_token="x")}],
                finish_reason="length",
            )
        ],
        finished=True,
    )
    invoke = InvokeData(prompt="Hi", sampling={"max_tokens": 1}, block=0)
    trace = TraceMessage(invokes=[invoke, InvokeData(prompt="Ho")], blocks=[block])
    ended = EndedMessage(key="0", saves=saves, error=error, warnings=[note])
    return {
        "trace": (trace, encoder.buffers),
        "block": (BlockMessage(key="0", sequences=2, block=block), encoder.buffers),
        "printed": (PrintedMessage(key="0", text="hello\n"), []),
        "ended": (ended, results.buffers),
        "raised": (EndedMessage(key="0", error=group), held.buffers),
        "finished": (FinishedMessage(key="0", output=output), []),
        "done": (DoneMessage(), []),
    }


# What release 0.1 writes. These bytes may only change together with VERSION.
GOLDEN: dict[str, str] = {
    "trace": """
4e4e5346010000006501000010000000000000007b226b696e64223a227472616365222c22696e766f6b6573223a5b7b
2270726f6d7074223a224869222c2273616d706c696e67223a7b226d61785f746f6b656e73223a317d2c22626c6f636b
223a307d2c7b2270726f6d7074223a22486f222c2273616d706c696e67223a7b7d2c22626c6f636b223a6e756c6c7d5d
2c22626c6f636b73223a5b7b22736f75726365223a222020202078203d20766563746f72202a206b5c6e222c2266696c
656e616d65223a22757365722e7079222c226c696e65223a372c2266756e6374696f6e223a2266222c226e616d657322
3a7b22766563746f72223a7b2224223a2274656e736f72222c226474797065223a22666c6f61743332222c2273686170
65223a5b335d2c2262223a302c2223223a307d2c226b223a337d2c2274617267657473223a5b22747261636572225d2c
226c617a79223a66616c73657d5d2c22626c6f6273223a7b7d2c2262756666657273223a5b31325d7d0000803f000000
c00000003f00000000
""",
    "block": """
4e4e5346010000000201000010000000000000007b226b696e64223a22626c6f636b222c226b6579223a2230222c2273
657175656e636573223a322c22626c6f636b223a7b22736f75726365223a222020202078203d20766563746f72202a20
6b5c6e222c2266696c656e616d65223a22757365722e7079222c226c696e65223a372c2266756e6374696f6e223a2266
222c226e616d6573223a7b22766563746f72223a7b2224223a2274656e736f72222c226474797065223a22666c6f6174
3332222c227368617065223a5b335d2c2262223a302c2223223a307d2c226b223a337d2c2274617267657473223a5b22
747261636572225d2c226c617a79223a66616c73657d2c2262756666657273223a5b31325d7d0000803f000000c00000
003f00000000
""",
    "printed": """
4e4e5346010000004700000000000000000000007b226b696e64223a227072696e746564222c226b6579223a2230222c
2273657175656e6365223a302c2274657874223a2268656c6c6f5c6e222c2262756666657273223a5b5d7d
""",
    "ended": """
4e4e534601000000d901000008000000000000007b226b696e64223a22656e646564222c226b6579223a2230222c2273
657175656e6365223a302c227361766573223a7b2278223a7b2224223a227475706c65222c2276223a5b7b2224223a22
74656e736f72222c226474797065223a2262666c6f61743136222c227368617065223a5b312c325d2c2262223a302c22
23223a317d2c6e756c6c2c7b2224223a226c697374222c2276223a5b312e352c22c3a9225d2c2223223a327d5d2c2223
223a307d7d2c226572726f72223a7b226d6f64756c65223a226275696c74696e73222c226e616d65223a2256616c7565
4572726f72222c2261726773223a5b22626164225d2c226d657373616765223a22626164222c226e6f746573223a5b22
61206e6f7465225d2c226672616d6573223a5b7b2266696c656e616d65223a22757365722e7079222c226c696e65223a
372c2266756e6374696f6e223a2266222c2274657874223a2278203d2031227d5d7d2c227761726e696e6773223a5b7b
226d6f64756c65223a226275696c74696e73222c226e616d65223a22557365725761726e696e67222c226d6573736167
65223a226d222c2266696c656e616d65223a2266222c226c696e65223a317d5d2c227761697473223a66616c73652c22
62756666657273223a5b345d7d803f803f00000000
""",
    "raised": """
4e4e5346010000003403000008000000000000007b226b696e64223a22656e646564222c226b6579223a2230222c2273
657175656e6365223a302c227361766573223a7b7d2c226572726f72223a7b226d6f64756c65223a2275736572222c22
6e616d65223a224261746368222c2261726773223a5b2274776f225d2c226d657373616765223a2274776f2028322073
75622d657863657074696f6e7329222c226e6f746573223a5b5d2c226672616d6573223a5b5d2c226174747269627574
6573223a7b22636f6465223a372c2268696464656e223a7b2224223a2274656e736f72222c226474797065223a22666c
6f61743332222c227368617065223a5b315d2c2262223a302c2223223a307d7d2c226d656d62657273223a5b7b226d6f
64756c65223a226275696c74696e73222c226e616d65223a2256616c75654572726f72222c2261726773223a5b226261
64225d2c226d657373616765223a22626164222c226e6f746573223a5b2261206e6f7465225d2c226672616d6573223a
5b7b2266696c656e616d65223a22757365722e7079222c226c696e65223a372c2266756e6374696f6e223a2266222c22
74657874223a2278203d2031227d5d7d2c7b226d6f64756c65223a226275696c74696e73222c226e616d65223a225661
6c75654572726f72222c2261726773223a5b22626164225d2c226d657373616765223a22626164222c226e6f74657322
3a5b2261206e6f7465225d2c226672616d6573223a5b7b2266696c656e616d65223a22757365722e7079222c226c696e
65223a372c2266756e6374696f6e223a2266222c2274657874223a2278203d2031227d5d2c22636f6e74657874223a7b
226d6f64756c65223a2275736572222c226e616d65223a224c6f77222c2261726773223a6e756c6c2c226d6573736167
65223a226c6f77222c226e6f746573223a5b5d2c226672616d6573223a5b5d7d7d5d2c226361757365223a7b226d6f64
756c65223a2275736572222c226e616d65223a224c6f77222c2261726773223a6e756c6c2c226d657373616765223a22
6c6f77222c226e6f746573223a5b5d2c226672616d6573223a5b5d7d7d2c227761726e696e6773223a5b5d2c22776169
7473223a66616c73652c2262756666657273223a5b345d7d0000003f00000000
""",
    "finished": """
4e4e5346010000005901000000000000000000007b226b696e64223a2266696e6973686564222c226b6579223a223022
2c226f7574707574223a7b22726571756573745f6964223a2231222c2270726f6d7074223a224869222c2270726f6d70
745f746f6b656e5f696473223a5b315d2c2270726f6d70745f6c6f6770726f6273223a6e756c6c2c226f757470757473
223a5b7b22696e646578223a302c2274657874223a2278222c22746f6b656e5f696473223a5b355d2c2263756d756c61
746976655f6c6f6770726f62223a2d302e352c226c6f6770726f6273223a5b7b2235223a7b226c6f6770726f62223a2d
302e352c2272616e6b223a312c226465636f6465645f746f6b656e223a2278227d7d5d2c2266696e6973685f72656173
6f6e223a226c656e677468222c2273746f705f726561736f6e223a6e756c6c7d5d2c2266696e6973686564223a747275
657d2c226572726f72223a6e756c6c2c2262756666657273223a5b5d7d
""",
    "done": """
4e4e5346010000001c00000000000000000000007b226b696e64223a22646f6e65222c2262756666657273223a5b5d7d
""",
}


@pytest.mark.parametrize("kind", list(messages()))
def test_the_bytes_of_each_message_are_what_they_were(kind: str) -> None:
    message, buffers = messages()[kind]
    assert message.frame(buffers).to_bytes().hex() == GOLDEN[kind].replace("\n", "")


@pytest.mark.parametrize("kind", list(messages()))
def test_bytes_of_the_first_release_are_read(kind: str) -> None:
    frame = read_frame(bytes.fromhex(GOLDEN[kind].replace("\n", "")))
    message, buffers = messages()[kind]
    assert read_message(frame) == message
    assert [bytes(b) for b in frame.buffers] == [bytes(b) for b in buffers]


def test_values_in_golden_bytes_are_read() -> None:
    frame = read_frame(bytes.fromhex(GOLDEN["ended"].replace("\n", "")))
    x = Decoder(frame.buffers).decode(expect(frame, EndedMessage).saves["x"])
    assert torch.equal(x[0], torch.ones(1, 2, dtype=torch.bfloat16)) and x[1:] == (None, [1.5, "é"])


# -- framing ---------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.text(max_size=3), st.integers(-5, 5) | st.text(max_size=5)),
            st.lists(st.binary(max_size=30), max_size=3),
        ),
        max_size=4,
    ),
    st.lists(st.integers(1, 40), min_size=1, max_size=9),
)  # fmt: skip
@settings(deadline=None, max_examples=100)
def test_a_stream_cut_anywhere_gives_the_same_frames(contents: Any, cuts: list[int]) -> None:
    frames = [Frame({k: v for k, v in h.items() if k != "buffers"}, list(b)) for h, b in contents]
    data = join(frames)
    reader, found, at = FrameReader(), [], 0
    while at < len(data):
        size = cuts[at % len(cuts)]
        found += list(reader.feed(data[at : at + size]))
        at += size
    reader.end()
    assert [f.header for f in found] == [f.header for f in frames]
    assert [[bytes(b) for b in f.buffers] for f in found] == [f.buffers for f in frames]


def test_a_frame_broken_off_at_any_byte_is_refused() -> None:
    message, buffers = messages()["ended"]
    data = message.frame(buffers).to_bytes()
    for size in range(1, len(data)):
        reader = FrameReader()
        assert list(reader.feed(data[:size])) == []
        with pytest.raises(ProtocolError, match=f"broke off inside a frame, after {size} bytes"):
            reader.end()
    with pytest.raises(ProtocolError, match="0 frames came"):
        read_frame(b"")
    with pytest.raises(ProtocolError, match="2 frames came"):
        read_frame(data * 2)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 500 Internal Server Error\r\n",
        b"{}",
        b"NNSG" + bytes(40),
        b"NNSF\x01\x02" + bytes(40),
        b"NNSF\x01\x00\x01" + bytes(40),
        b"NNSF\x01\x00\x00\x00\xff\xff\xff\xff" + bytes(40),
        b"<html>",
    ],
)
def test_garbage_is_refused_with_its_beginning(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="no frame of the nnsight protocol"):
        list(FrameReader().feed(data))


def prefix(header: bytes, size: int, flags: int = 0, version: int = VERSION) -> bytes:
    return struct.pack("<4sBBHIQ", b"NNSF", version, flags, 0, len(header), size) + header


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (prefix(b"{", 0), "not JSON"),
        (prefix(b"[]", 0), "does not list its buffers"),
        (prefix(b"{}", 0), "does not list its buffers"),
        (prefix(b'{"buffers":3}', 0), "does not list its buffers"),
        (prefix(b'{"buffers":[-1]}', 0), "does not list its buffers"),
        (prefix(b'{"buffers":[true]}', 0), "does not list its buffers"),
        (prefix(b'{"buffers":[9]}', 0), "0 bytes where its header says 16"),
        (prefix(b'{"buffers":[]}', 8) + bytes(8), "8 bytes where its header says 0"),
        (prefix(b'{"buffers":[8]}', 8, 1) + bytes(8), "packed body"),
        (prefix(b'{"buffers":[4611686018427387904]}', 8, 1) + bytes(8), "packed body"),
    ],
)
def test_a_frame_that_is_not_well_formed_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        list(FrameReader().feed(data))


@given(st.binary(max_size=60), st.binary(max_size=60))
@settings(deadline=None, max_examples=200)
def test_any_bytes_are_frames_or_a_protocol_error(header: bytes, body: bytes) -> None:
    for data in (header, prefix(header, len(body)) + body, prefix(header, len(body), 1) + body):
        try:
            reader = FrameReader()
            list(reader.feed(data))
            reader.end()
        except ProtocolError:
            pass


def test_another_version_is_refused_with_both() -> None:
    for version in (0, VERSION + 1, 255):
        with pytest.raises(ProtocolError, match=rf"version {version} .*knows {VERSION}\. Install"):
            list(FrameReader().feed(prefix(b"whatever it is", 0, version=version)))


def test_an_oversized_frame_is_refused_before_it_is_there() -> None:
    reader = FrameReader(limit=1000)
    with pytest.raises(FrameTooLarge, match="beyond the limit of 1000"):
        list(reader.feed(prefix(b"", 10**15)[:24]))
    small = Frame({}, [bytes(100)]).to_bytes()
    assert len(list(FrameReader(limit=1000).feed(small))) == 1


def test_a_packed_body_is_unpacked_within_the_limit() -> None:
    frame = Frame({"a": 1}, [bytes(1 << 20), b"x" * 5])
    packed, raw = frame.to_bytes(compress=True), frame.to_bytes()
    assert packed[5] == 1 and raw[5] == 0 and len(packed) < len(raw) / 50
    back = read_frame(packed)
    assert back.header == {"a": 1} and [bytes(b) for b in back.buffers] == frame.buffers
    with pytest.raises(FrameTooLarge, match="1048584 bytes"):
        list(FrameReader(limit=100_000).feed(packed))


def test_a_body_that_is_small_or_does_not_shrink_is_not_packed() -> None:
    noise = b"".join(zlib.crc32(i.to_bytes(4, "big")).to_bytes(4, "big") for i in range(1 << 15))
    for buffer in (bytes(1000), noise):
        assert Frame({}, [buffer]).to_bytes(compress=True)[5] == 0


@pytest.mark.parametrize("damage", ["cut", "changed", "other size"])
def test_a_packed_body_that_was_damaged_is_refused(damage: str) -> None:
    packed = Frame({}, [b"abcdefgh" * 40000]).parts(compress=True)[1]
    body, count = bytearray(packed), 320000
    if damage == "cut":
        del body[-3:]
    elif damage == "changed":
        body[4:12] = bytes(8)
    else:
        count = 320008
    header = f'{{"buffers":[{count}]}}'.encode()
    with pytest.raises(ProtocolError, match="packed body"):
        list(FrameReader().feed(prefix(header, len(body), 1) + body))


# -- messages --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({}, "kind 'None' is unknown"),
        ({"kind": "zzz"}, "kind 'zzz' is unknown"),
        ({"kind": []}, "is unknown"),
        ({"kind": "printed"}, "PrintedMessage is not well formed: key: Field required"),
        ({"kind": "printed", "key": 3, "text": ""}, "key: Input should be a valid string"),
        ({"kind": "done", "more": 1}, "more: Extra inputs"),
        ({"kind": "ended", "key": "0", "error": {}}, "error.module: Field required"),
    ],
)
def test_a_message_that_is_not_well_formed_is_refused(header: Any, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        read_message(Frame(header))


def test_a_message_of_another_kind_is_refused() -> None:
    with pytest.raises(ProtocolError, match="A DoneMessage came where a TraceMessage belongs"):
        expect(DoneMessage().frame(), TraceMessage)


def test_infinite_log_probabilities_come_through() -> None:
    masked = Logprob(logprob=float("-inf"))
    made = CompletionOutput(index=0, text="", token_ids=[], logprobs=[{3: masked}])
    made.cumulative_logprob = float("-inf")
    message = FinishedMessage(key="0", output=RequestOutput(request_id="1", outputs=[made]))
    assert read_message(read_frame(message.frame().to_bytes())) == message


def test_who_counts_memory_is_asked_before_a_body_is_unpacked():
    large = Frame({"kind": "printed"}, [bytes(1 << 20)])
    told: list[int] = []
    reader = FrameReader(unpacks=told.append)
    for packed in (False, True):
        [frame] = reader.feed(large.to_bytes(packed))
        assert bytes(frame.buffers[0]) == bytes(1 << 20)
    assert told == [1 << 20]

    def refuse(size: int) -> None:
        raise MemoryError(size)

    with pytest.raises(MemoryError):
        list(FrameReader(unpacks=refuse).feed(large.to_bytes(True)))


def test_a_text_that_is_no_unicode_comes_through_in_part() -> None:
    frame = PrintedMessage(key="0", text="file \udcff ünd").frame()
    assert expect(read_frame(frame.to_bytes()), PrintedMessage).text == "file ? ünd"


def test_a_header_that_no_reader_takes_is_refused_by_its_sender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "_MAX_HEADER", 1000)
    Frame({"v": [1] * 400}).seal()
    with pytest.raises(SaveLimitError, match="more than a message may have.* tensor"):
        Frame({"v": [1] * 500}).seal()
    with pytest.raises(EncodeError, match="more than a message may have"):
        Frame({"v": [1] * 500}).to_bytes()


def test_a_header_that_json_cannot_say_is_refused() -> None:
    for value in (2**70, object()):
        with pytest.raises(EncodeError, match="cannot be written as JSON"):
            Frame({"v": value}).seal()
    assert Frame({"v": "\ud800"}).seal() == b'{"v":"?"}'
