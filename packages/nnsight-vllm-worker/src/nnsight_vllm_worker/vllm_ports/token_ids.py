"""Token ids in requests: those that the model does not have end the engine's process.

Relies on (vLLM 0.26.0 and 0.27.1): of a prompt's ids vLLM checks the largest alone, against the
larger one of tokenizer and model, and only with a tokenizer; of sampling arguments it checks
`logit_bias` and `logprob_token_ids` against the model, `allowed_token_ids` against the tokenizer,
and neither `all_stop_token_ids`, which are looked up while `min_tokens` holds them back, nor
`bad_words_token_ids`. `model_config.get_vocab_size()` is how many the model has. Placeholders of
other inputs than text (`mm_features`) may lie beyond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from nnsight_vllm_worker.vllm_ports.checks import check_attributes, check_methods


def checker(engine: Any) -> Callable[[Any], None]:
    """What refuses a request (`EngineCoreRequest`) with ids that an engine's model does not have.

    Args:
        engine: `LLM.llm_engine`, or an `AsyncLLM`.

    Raises:
        EngineError: this vLLM lacks what the port relies on.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    check_methods(engine.model_config, {"get_vocab_size": ()})
    check_attributes(SamplingParams(), ("all_stop_token_ids", "bad_words_token_ids"))
    size = engine.model_config.get_vocab_size()

    def within(what: str, ids: Iterable[int]) -> None:
        for id in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= id < size:
                raise VLLMValidationError(
                    f"{what} {id}: there is no such token; the ids of this model are 0 to "
                    f"{size - 1}."
                )

    def check(request: Any) -> None:
        if not request.mm_features:
            within("Token id", request.prompt_token_ids or ())
        params = request.sampling_params
        if params is None:
            return
        if params.min_tokens:
            within("stop_token_ids with", params.all_stop_token_ids)
        if params.allowed_token_ids:
            within("allowed_token_ids with", params.allowed_token_ids)
        if params.bad_words_token_ids:
            within("bad_words with the token id", [*chain(*params.bad_words_token_ids)])

    return check
