"""What a finished generation is, the same in every backend (named after vLLM's own classes)."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer

from nnsight_core.current import need_run
from nnsight_core.locations import RESULT
from nnsight_core.sparse import Sparse

STOPPED = "tracer.stop"
"""The `stop_reason` of a request that a block ended."""


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid")


def _json_float(value: float) -> float | str:
    return value if math.isfinite(value) else repr(value)


Number = Annotated[float, PlainSerializer(_json_float, when_used="json")]
"""A number that may be infinite (a token that was masked), which JSON cannot say."""


class Logprob(_Data):
    """One token's log probability (natural logarithm), its rank among all, and its text."""

    logprob: Number
    rank: int | None = None
    decoded_token: str | None = None


class CompletionOutput(_Data):
    """One generated sequence.

    Attributes:
        token_ids: the sampled ids, the end token included if it was sampled.
        finish_reason: `stop`, `length`, `abort`, or None while it goes on.
        stop_reason: the stop string or token that ended it, if one did.
        logprobs: per step the candidates' log probabilities by token id, if asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: Number | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class RequestOutput(_Data, Sparse):
    """One request's prompt and its generated sequences.

    Attributes:
        ways: how many steps of all sequences ran in which way (`plain`, `tables`, `deferred`,
            `after`, `interleaved`, `eager`; the page on speed says what each is).
        saves: what blocks have saved by now, by name: those of edits in the order in which these
            were installed, and over them the trace's own. With `n > 1` each is a list of n.
        new_saves: where outputs are streamed, what has come since the one before: the value of a
            name that was saved, and of a list or dict that grew what was added.
        errors: what edits raised in this request, which went on without them.

    Example:
        >>> with model.trace("Hello", max_tokens=3) as tracer:
        ...     out = tracer.result.save()
        >>> out.outputs[0].text
    """

    later = ("ways",)

    request_id: str
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput] = Field(default_factory=list)
    finished: bool = False
    ways: dict[str, int] = Field(default_factory=dict)
    # These come beside the output, as typed values, and never in it.
    saves: dict[str, Any] = Field(default_factory=dict, exclude=True, repr=False)
    new_saves: dict[str, Any] = Field(default_factory=dict, exclude=True, repr=False)
    errors: list[Any] = Field(default_factory=list, exclude=True)

    def __eq__(self, other: object) -> bool:
        # What is saved may be tensors, which do not compare to one truth.
        return type(other) is RequestOutput and self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]


class LateResult:
    """`tracer.result` inside a block: the finished output, which does not exist yet.

    Saving it costs nothing: the saved name gets the finished output. Looking into it parks the
    block until the request has finished.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(need_run("tracer.result").read(RESULT), name)

    def __repr__(self) -> str:
        return "<tracer.result, when the request has finished>"


RESULT_LATER = LateResult()
