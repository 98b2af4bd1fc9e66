"""From a client's frame to requests for the engine."""

from __future__ import annotations

import pytest

from nnsight_core.errors import ProtocolError
from nnsight_core.wire.code import digest_of
from nnsight_core.wire.frames import read_frame
from nnsight_core.wire.messages import BlockData, BlockMessage, InvokeData, TraceMessage, expect
from nnsight_serve.incoming import trace_of
from nnsight_serve.limits import Limits
from nnsight_serve.refusals import Refused
from nnsight_serve.uploads import Missing, Uploads
from nnsight_vllm_worker.prompts import prompt_of
from nnsight_vllm_worker.requests import EXTRA

CONTENT = b"the content of a large tensor"


def block(**names: object) -> BlockData:
    return BlockData(source="    x\n", filename="f", line=1, function="f", names=names)


def tensor(**where: object) -> dict[str, object]:
    return {"$": "tensor", "dtype": "uint8", "shape": [3], **where}


def carried(request) -> tuple[BlockMessage, list[bytes]]:
    frame = read_frame(request.params.extra_args[EXTRA])
    return expect(frame, BlockMessage), [bytes(buffer) for buffer in frame.buffers]


def test_a_block_takes_its_own_buffers_along_and_no_others():
    message = TraceMessage(
        invokes=[InvokeData(prompt="a", block=0), InvokeData(prompt="b", block=1)],
        blocks=[
            block(x=tensor(b=0)),
            block(x={"$": "list", "v": [tensor(b=2, at=1), tensor(b=2)]}),
        ],
    )
    trace = trace_of(message.frame([b"one", b"two", b"six"]))
    first, second = (carried(request) for request in trace.requests)
    assert first == (BlockMessage(block=message.blocks[0]), [b"one"])
    # What they are called by are their places among its own.
    shown = {"$": "list", "v": [tensor(b=0, at=1), tensor(b=0)]}
    assert second == (BlockMessage(block=block(x=shown)), [b"six"])
    assert [trace.index_of[request.key] for request in trace.requests] == [0, 1]


def test_contents_go_apart_from_the_blocks_that_name_them():
    digest = digest_of(CONTENT)
    message = TraceMessage(
        invokes=[InvokeData(prompt="a", block=0), InvokeData(prompt="b")],
        blocks=[block(x=tensor(h=digest), y=tensor(h=digest))],
        blobs={digest: 0},
    )
    trace = trace_of(message.frame([CONTENT]))
    assert {name: bytes(data) for name, data in trace.blobs.items()} == {digest: CONTENT}
    assert [request.blobs for request in trace.requests] == [(digest,), ()]
    assert [request.traced for request in trace.requests] == [True, False]
    assert carried(trace.requests[0])[1] == []


def test_many_blocks_beside_many_buffers_cost_what_they_are():
    count = 4000
    invokes = [InvokeData(prompt="a", block=index) for index in range(count)]
    message = TraceMessage(invokes=invokes, blocks=[block()] * count)
    trace = trace_of(read_frame(message.frame([b""] * count).to_bytes()))
    assert sum(len(request.params.extra_args[EXTRA]) for request in trace.requests) < 400 * count


def test_a_buffer_belongs_to_one_block_or_value():
    forms = [{"x": tensor(b=0)}, {"y": tensor(b=0)}]
    message = TraceMessage(
        invokes=[InvokeData(prompt="a", block=0), InvokeData(prompt="b", block=1)],
        blocks=[block(**names) for names in forms],
    )
    with pytest.raises(ProtocolError, match="Buffer 0 is named by two"):
        trace_of(message.frame([b"one"]))
    prompts = TraceMessage(invokes=[InvokeData(prompt=form["x"]) for form in forms[:1] * 2])
    with pytest.raises(ProtocolError, match="Buffer 0 is named by two"):
        trace_of(read_frame(prompts.frame([b"one"]).to_bytes()))


def test_what_could_never_be_taken_is_refused_before_it_is_looked_at():
    broken = block(x=tensor(b=99))
    asked = [InvokeData(prompt="a", block=0)]
    with pytest.raises(ProtocolError, match="2 blocks for 1 invokes"):
        trace_of(TraceMessage(invokes=asked, blocks=[broken] * 2).frame())
    with pytest.raises(Refused) as refused:
        trace_of(TraceMessage(invokes=asked * 3, blocks=[broken]).frame(), fit=Limits(2, 9).fit)
    assert refused.value.status == 413


def test_a_kept_value_of_another_is_one_that_is_not_there():
    names = {"mine": {"$": "kept", "id": "1", "name": "a"}, "its": {"$": "kept", "id": "2"}}
    message = TraceMessage(invokes=[InvokeData(prompt="a", block=0)], blocks=[block(**names)])
    sent, _ = carried(trace_of(message.frame(), owns={"1"}.__contains__).requests[0])
    assert sent.block.names["mine"] == {"$": "kept", "id": "1", "name": "a"}
    assert sent.block.names["its"] == {"$": "kept", "id": "", "name": "2"}
    message.blocks = [block(x={"$": "kept", "id": []})]
    with pytest.raises(ProtocolError, match="kept value is named by a text"):
        trace_of(message.frame())


@pytest.mark.parametrize(
    ("blobs", "names", "says"),
    [
        ({"0" * 40: 0}, {}, "is not the content"),
        ({digest_of(b"another"): 0}, {}, "is not the content"),
        ({digest_of(CONTENT): 1}, {}, "no index"),
        ({}, {"x": tensor(h=[])}, "named by a text"),
        ({}, {"x": tensor(b=1)}, "no index"),
        ({}, {"x": tensor(b=-1)}, "no index"),
        ({}, {"x": tensor(b=True)}, "no index"),
    ],
)
def test_what_a_block_names_must_have_come(blobs, names, says):
    message = TraceMessage(
        invokes=[InvokeData(prompt="a", block=0)], blocks=[block(**names)], blobs=blobs
    )
    with pytest.raises(ProtocolError, match=says):
        trace_of(message.frame([CONTENT]))


def test_what_is_wrong_with_one_invoke_is_left_to_it():
    message = TraceMessage(
        invokes=[
            InvokeData(prompt=""),
            InvokeData(prompt="b"),
            InvokeData(prompt="c", sampling={"n": 0}),
        ]
    )
    trace = trace_of(message.frame())
    assert {index: type(e) for index, e in trace.refused.items()} == {0: ValueError, 2: ValueError}
    assert list(trace.index_of.values()) == [1]


def test_a_client_cannot_slip_in_a_block_of_its_own_making():
    sampling = {"extra_args": {"$": "dict", "k": [EXTRA], "v": ["x"]}}
    message = TraceMessage(invokes=[InvokeData(prompt="a", sampling=sampling)])
    refused = trace_of(message.frame()).refused[0]
    assert type(refused) is ValueError and repr(EXTRA) in str(refused)


def test_contents_that_neither_came_nor_are_here_are_asked_for():
    digest, other = digest_of(CONTENT), digest_of(b"other")
    names = {"x": tensor(h=digest), "y": tensor(h=other)}
    message = TraceMessage(
        invokes=[InvokeData(prompt="a", block=0)], blocks=[block(**names)], blobs={digest: 0}
    )
    asked = trace_of(message.frame([CONTENT]))
    uploads = Uploads(len(CONTENT))
    with pytest.raises(Missing) as raised:
        uploads.take(asked.needs, asked.blobs)
    assert raised.value.digests == [other] and uploads.bytes == 0
    assert uploads.take([digest], asked.blobs) == uploads.take([digest], {}) == {digest: CONTENT}
    # Only so much stays: the other one takes its place.
    uploads.take([other], {other: b"other"})
    with pytest.raises(Missing):
        uploads.take([digest], {})
    assert uploads.bytes == 5
    # What is larger than all that may stay passes through.
    large = bytes(len(CONTENT) + 1)
    assert uploads.take(["large"], {"large": large}) == {"large": large} and uploads.bytes == 5


@pytest.mark.parametrize(
    "form",
    [
        {"$": "range", "v": [0, 10**10, 1]},
        {"$": "dict", "k": ["input_ids"], "v": [{"$": "range", "v": [0, 10**10, 1]}]},
        {"$": "list", "#": 0, "v": [1, {"$": "ref", "#": 0}]},
    ],
)
def test_a_few_bytes_do_not_stand_for_much(form):
    for invoke in (InvokeData(prompt=form), InvokeData(prompt="a", sampling={"stop": form})):
        with pytest.raises(ProtocolError, match="range, or one list twice"):
            trace_of(TraceMessage(invokes=[invoke]).frame())


def test_rows_are_counted_before_they_are_looked_at():
    nested = [1]
    for _ in range(40):
        nested = [nested, nested]
    with pytest.raises(ValueError, match="not 2 rows"):
        prompt_of({"input_ids": nested})
    with pytest.raises(ValueError, match="attention mask of 3"):
        prompt_of({"input_ids": [1, 2], "attention_mask": [1, 1, 0]})
    assert prompt_of({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]]}) == {
        "prompt_token_ids": [1, 3]
    }
