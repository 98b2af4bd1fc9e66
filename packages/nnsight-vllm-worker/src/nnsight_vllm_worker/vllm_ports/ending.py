"""When a request ends: known in the worker as soon as the token is drawn that ends it.

The scheduler finds that out later (with async scheduling, when the next step is already running),
and stop strings are looked for in yet another process. A block has to know at once, so that its
loops see the steps that count and no others.

Relies on (vLLM 0.26.0 and 0.27.1):
- `vllm.v1.request.Request` counts tokens, and `vllm.v1.core.sched.utils.check_stop` judges it: end
  tokens, stop tokens, lengths, repetitions.
- `vllm.v1.engine.detokenizer.IncrementalDetokenizer.from_new_request` reads `request_id`,
  `prompt_token_ids`, `prompt_embeds` and `sampling_params`; `update(ids, stopped)` gives the stop
  string that was met. `vllm.tokenizers.cached_tokenizer_from_config` gives the tokenizer.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from nnsight_core.errors import EngineError

EMBEDDED = -1
"""Stands for the token of each row of a prompt that came as embeddings."""
_CHANGED = "vLLM's rules for the end of a request are not those that nnsight was written for"


class Ending:
    """Judges one request after each of its tokens, as the engine will.

    Attributes:
        blind: whether the request ends by its length alone, whatever tokens are drawn.
    """

    def __init__(self, request: str, prompt: list[int], params: Any, config: Any) -> None:
        from vllm.tokenizers import cached_tokenizer_from_config
        from vllm.v1.core.sched.utils import check_stop
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer
        from vllm.v1.request import Request

        self._check = check_stop
        self._longest = config.max_model_len
        # Without its grammar, which would be compiled once more here and has no part in this.
        plain = params
        if params.structured_outputs is not None:
            plain = params.clone()
            plain.structured_outputs = None
        self._request = Request(request, prompt, plain, None)
        self._text: Any = None
        if params.stop and params.detokenize:
            self._text = IncrementalDetokenizer.from_new_request(
                cached_tokenizer_from_config(config),
                SimpleNamespace(  # type: ignore[arg-type]
                    request_id=request,
                    prompt_token_ids=None if prompt[:1] == [EMBEDDED] else prompt,
                    prompt_embeds=prompt,
                    sampling_params=params,
                ),
            )
        ends = (params.eos_token_id is not None, params.stop_token_ids, self._text is not None)
        repeated = getattr(params, "repetition_detection", None)
        self.blind = not any(ends) and repeated is None

    @property
    def most(self) -> int:
        """How many steps the request makes at most."""
        return min(self._request.max_tokens, self._longest - self._request.num_prompt_tokens)

    def last(self, step: int) -> bool:
        """Whether the request ends with this step, whatever it draws."""
        return step + 1 >= self.most

    def over(self, step: int, token: int) -> bool:
        """Whether the request ends with this step's token, which one that is `blind` disregards.

        Of any other, it has to be told every token.
        """
        if self.blind:
            return self.last(step)
        self._request.append_output_token_ids(token)
        stopped = self._check(self._request, self._longest)
        if self._text is None:
            return stopped
        by_token = stopped and self._request.get_finished_reason().name == "STOP"  # type: ignore[union-attr]
        return self._text.update([token], by_token) is not None or stopped


def check() -> None:
    """Refuse a vLLM that lacks what this port relies on.

    Raises:
        EngineError: with the name of what it lacks.
    """
    try:
        from vllm import SamplingParams

        config = SimpleNamespace(max_model_len=8)
        params = SamplingParams(max_tokens=2, stop_token_ids=[7])
        ending = Ending("0", [0], params, config)
        found = [ending.over(0, 1), ending.over(1, 2)]
    except Exception as error:
        raise EngineError(
            f"vLLM's rules for the end of a request have changed: {error!r}"
        ) from None
    if found != [False, True]:
        raise EngineError("vLLM's rules for the end of a request have changed.")
