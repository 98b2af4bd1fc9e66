"""vLLM's OpenAI routes on an engine of ours: its own handlers, with `edits` in their requests.

Relies on (vLLM 0.26.0 and 0.27.1):
- `vllm.entrypoints.openai.api_server.init_app_state(llm, state, args, tasks)` puts the handlers
  into an app's state; the routers of the `api_router` modules below look for them there.
  `make_arg_parser` gives all of `args`, with defaults; `validate_parsed_serve_args` and
  `validate_api_server_args` judge them.
- A handler's `create_completion(request, raw_request)` or `create_chat_completion` gives an error,
  a response, or an async generator of the lines of a stream, whose last one is `data: [DONE]`.
- A request's `vllm_xargs` become entries of the `extra_args` of its sampling parameters, unless
  it asks for beam search. What vLLM does not know of its body is in `model_extra`, and what is put
  on a response besides is answered with it.
- `exception_handler` and the others of `server_utils` answer with errors as OpenAI has them, and
  read `args.log_error_stack` from the app's state.
"""

from __future__ import annotations

import argparse
import difflib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from nnsight_vllm_worker.asked import ASKED, Asked
from nnsight_vllm_worker.vllm_ports.checks import check_attributes, check_methods

ARGUMENTS = (
    "chat_template",
    "chat_template_content_format",
    "default_chat_template_kwargs",
    "enable_auto_tool_choice",
    "enable_force_include_usage",
    "enable_per_request_metrics",
    "enable_prompt_tokens_details",
    "exclude_tools_when_tool_choice_none",
    "fingerprint_mode",
    "fingerprint_value",
    "log_error_stack",
    "lora_modules",
    "response_role",
    "return_tokens_as_token_ids",
    "tool_call_parser",
    "tool_parser_plugin",
    "trust_request_chat_template",
)
"""The arguments of vLLM's own server that belong to these routes."""
OURS = "nnsight"
"""How our entries of `extra_args` begin, and what is said of edits in an answer is called."""
PATIENCE = 2.0
"""Seconds in which the edits of a request that has finished must have ended, to be told of."""

_HANDLERS = {
    "openai_serving_completion": "create_completion",
    "openai_serving_chat": "create_chat_completion",
}


def arguments_of(model: str, engine: dict[str, Any], given: dict[str, Any]) -> argparse.Namespace:
    """The arguments of vLLM's routes, as vLLM's own server has them.

    Args:
        engine: those of the engine, `taps` among them.
        given: those of `ARGUMENTS` that are not left to vLLM.

    Raises:
        ValueError: an argument that is none of the routes', or that vLLM refuses.
    """
    from vllm.entrypoints.openai import cli_args
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for name in given:
        if name not in ARGUMENTS:
            near = difflib.get_close_matches(name, ARGUMENTS, 1, 0.4)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ValueError(f"The OpenAI routes have no argument {name!r}.{hint}")
    found: Any = cli_args.make_arg_parser(FlexibleArgumentParser()).parse_args([])
    vars(found).update({**engine, **given, "model": model})
    if isinstance(found.served_model_name, str):
        found.served_model_name = [found.served_model_name]
    try:
        if found.tool_parser_plugin:
            ToolParserManager.import_tool_parser(found.tool_parser_plugin)
        if found.reasoning_parser_plugin:
            ReasoningParserManager.import_reasoning_parser(found.reasoning_parser_plugin)
        cli_args.validate_parsed_serve_args(found)
        _api_server().validate_api_server_args(found)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"vLLM refuses its arguments: {error.args[0]}") from None
    return found


def routers() -> list[Any]:
    """vLLM's routers; more than these routes is in them."""
    from vllm.entrypoints.openai.chat_completion.api_router import router as chat
    from vllm.entrypoints.openai.completion.api_router import router as completion
    from vllm.entrypoints.openai.models.api_router import router as models

    return [completion, chat, models]


def error_handlers() -> dict[type[Exception], Any]:
    """What answers to errors, as an app takes it; that a request is invalid is among them."""
    from vllm.entrypoints.serve.utils import server_utils as utils

    of_web = {
        "HTTPException": "http_exception_handler",
        "RequestValidationError": "validation_exception_handler",
    }
    check_attributes(utils, (*of_web, *of_web.values(), "exception_handler"))
    plain = (ValueError, TypeError, OverflowError, NotImplementedError, Exception)
    return {
        # The one that vLLM has for an engine that has ended would end the server, too.
        **dict.fromkeys((*_errors(), *plain), utils.exception_handler),
        **{getattr(utils, kind): getattr(utils, handler) for kind, handler in of_web.items()},
    }


async def start(
    state: Any, llm: Any, arguments: argparse.Namespace, ask: Callable[[list[str] | None], Asked]
) -> None:
    """Put what the routes need into an app's state.

    Args:
        llm: an `AsyncLLM`.
        ask: chooses the edits of a request, and raises a ValueError if there are none of that name.

    Raises:
        EngineError: this vLLM lacks what the port relies on.
    """
    api_server = _api_server()
    needed = ("engine_client", "state", "args", "supported_tasks")
    check_methods(api_server, {"init_app_state": needed})
    # With the parser of reasoning, which the engine's own arguments have put there.
    arguments.structured_outputs_config = llm.vllm_config.structured_outputs_config
    await api_server.init_app_state(llm, state, arguments, ("generate",))
    check_attributes(state, (*_HANDLERS, "openai_serving_models", "args"))
    for name, method in _HANDLERS.items():
        handler = getattr(state, name)
        check_methods(handler, {method: ("request", "raw_request"), "create_error_response": ()})
        setattr(handler, method, _with_edits(handler, getattr(handler, method), ask))


def _api_server() -> Any:
    """vLLM's server; what it imports would quieten everybody's log."""
    levels = [(each, each.level) for each in (logging.root, *logging.root.handlers)]
    from vllm.entrypoints.openai import api_server

    for each, level in levels:
        each.setLevel(level)
    return api_server


def _with_edits(
    handler: Any, create: Callable[..., Any], ask: Callable[[list[str] | None], Asked]
) -> Callable[..., Any]:
    """A handler's method, for requests that may choose their edits and are told of them."""

    async def with_edits(request: Any, raw_request: Any = None) -> Any:
        param = "vllm_xargs"
        try:
            given = _own_arguments(request)
            param = "edits"
            asked = ask(_names(request))
        except ValueError as error:
            return handler.create_error_response(str(error), param=param)
        request.vllm_xargs = {**given, ASKED: asked.token}
        made = await create(request, raw_request)
        if isinstance(made, AsyncIterator):
            return _told_at_the_end(made, asked, "edits" in request.model_extra)
        if hasattr(made, "choices"):
            await asked.answered(PATIENCE)
            if (told := asked.told()) is not None:
                setattr(made, OURS, told)
        return made

    return with_edits


def _own_arguments(request: Any) -> dict[str, Any]:
    """The request's own entries of `extra_args`.

    Raises:
        ValueError: one is called as ours are.
    """
    given = request.vllm_xargs or {}
    for name in given:
        if name.startswith(OURS):
            said = f"vllm_xargs[{name!r}]: what begins with {OURS!r} is the server's own."
            raise ValueError(said)
    return given


def _names(request: Any) -> list[str] | None:
    """The names of the edits that the request asks for; None for all.

    Raises:
        ValueError: they are no names, or cannot be chosen here.
    """
    names = request.model_extra.get("edits")
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"edits takes a list of names of edits, not {str(names)[:80]!r}.")
    if request.use_beam_search:
        raise ValueError("edits cannot be chosen for a beam search, which has all of them.")
    return names


async def _told_at_the_end(lines: Any, asked: Asked, wanted: bool) -> AsyncGenerator[str, None]:
    """A stream, with what is to be said of its edits at its end, to those who have named edits.

    Others get what OpenAI's streams hold and no more.
    """
    about: dict[str, Any] = {}
    async with aclosing(lines):
        async for line in lines:
            if wanted and not about:
                about = _about(line)
            if wanted and line.startswith("data: [DONE]"):
                await asked.answered(PATIENCE)
                told = asked.told()
                if told is not None:
                    yield f"data: {json.dumps({**about, 'choices': [], OURS: told})}\n\n"
            yield line


def _about(line: str) -> dict[str, Any]:
    """What each line of a stream says of the whole."""
    said = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
    return {name: said[name] for name in ("id", "object", "created", "model") if name in said}


def _errors() -> list[type[Exception]]:
    """vLLM's own errors, of this version."""
    import vllm.exceptions
    from vllm.entrypoints.openai.engine.protocol import GenerationError
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    # The first is what all others derive from since 0.27.
    names = ("VLLMError", "VLLMNotFoundError")
    there = [getattr(vllm.exceptions, name) for name in names if hasattr(vllm.exceptions, name)]
    return [*there, GenerationError, EngineDeadError, EngineGenerateError]
