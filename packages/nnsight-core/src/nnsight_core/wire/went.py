"""Outputs of requests that go on: told whole once, and then by what is new.

A long generation is told in as many bytes as it has, and not in their square.
"""

from __future__ import annotations

from nnsight_core.errors import ProtocolError
from nnsight_core.outputs import CompletionOutput, RequestOutput
from nnsight_core.wire.messages import PartData, WentMessage


class WentSender:
    """Makes the messages that say how far one request has come.

    Example:
        >>> sender = WentSender("0")
        >>> frame = sender.message(output).frame()
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._about: RequestOutput | None = None
        self._parts: dict[int, CompletionOutput] = {}

    def message(self, output: RequestOutput) -> WentMessage:
        """What is new with this output; it and the one before are not to change any more."""
        about = output.model_copy(update={"outputs": []})
        known = self._about is not None and about == self._about
        known = known and [part.index for part in output.outputs] == list(self._parts)
        before, self._parts = self._parts, {part.index: part for part in output.outputs}
        self._about = about
        if not known:
            return WentMessage(key=self._key, output=output)
        parts = [_new(before[index], part) for index, part in self._parts.items()]
        return WentMessage(key=self._key, parts=[part for part in parts if part is not None])


class WentReader:
    """Puts the outputs of one request together again."""

    def __init__(self) -> None:
        self._output: RequestOutput | None = None

    def output(self, message: WentMessage) -> RequestOutput:
        """The output that a message tells.

        Raises:
            ProtocolError: it tells what is new of something that was never told.
        """
        if message.output is not None:
            self._output = message.output
            return message.output
        if self._output is None:
            raise ProtocolError("An output came in parts before it came whole.")
        parts = {part.index: part for part in self._output.outputs}
        for new in message.parts:
            before = parts.get(new.index)
            if before is None or new.start > len(before.text):
                raise ProtocolError(f"A part of sequence {new.index} follows nothing.")
            parts[new.index] = _put(before, new)
        self._output = self._output.model_copy(update={"outputs": list(parts.values())})
        return self._output


def _new(before: CompletionOutput, part: CompletionOutput) -> PartData | None:
    if part == before:
        return None
    steps = len(before.token_ids)
    start = len(before.text) if part.text.startswith(before.text) else 0
    return PartData(
        index=part.index,
        start=start,
        text=part.text[start:],
        token_ids=part.token_ids[steps:],
        logprobs=None if part.logprobs is None else part.logprobs[steps:],
        cumulative_logprob=part.cumulative_logprob,
        finish_reason=part.finish_reason,
        stop_reason=part.stop_reason,
    )


def _put(before: CompletionOutput, new: PartData) -> CompletionOutput:
    logprobs = None if new.logprobs is None else [*(before.logprobs or []), *new.logprobs]
    return CompletionOutput(
        index=new.index,
        text=before.text[: new.start] + new.text,
        token_ids=[*before.token_ids, *new.token_ids],
        cumulative_logprob=new.cumulative_logprob,
        logprobs=logprobs,
        finish_reason=new.finish_reason,
        stop_reason=new.stop_reason,
    )
