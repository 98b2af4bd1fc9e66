"""vLLM's flags of its engine and its OpenAI routes, in its spelling and read by its own parser.

Relies on (vLLM 0.26.0 and 0.27.1):
- `AsyncEngineArgs.add_cli_args` adds every flag of the engine to a `FlexibleArgumentParser`, each
  under the name of the field of `AsyncEngineArgs` that it sets; `FrontendArgs.add_cli_args` adds
  those of vLLM's own server, among them `openai.ARGUMENTS`.
- `FlexibleArgumentParser` is an `argparse.ArgumentParser` whose `parse_args` first turns vLLM's own
  forms (`--max_model_len`, `--json.key value`, `-O3`, `--config FILE`) into plain flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from typing import Any

from nnsight_core.errors import EngineError
from nnsight_vllm_worker.vllm_ports import openai


class UsageError(Exception):
    """A command line that cannot be understood; the message says what to do."""


def parse(
    arguments: list[str], ours: argparse.ArgumentParser
) -> tuple[argparse.Namespace, dict[str, Any], dict[str, Any]]:
    """Read a command line that holds vLLM's flags and ours.

    Args:
        ours: a parser of our flags, made with `add_help=False`.

    Returns:
        Our values, and of vLLM's flags those that were given: of the engine, of the OpenAI routes.

    Raises:
        UsageError: a flag that neither side knows (with the nearest one), or a wrong value.
    """
    parser = _parser(ours)
    # A flag that is not given leaves no trace, so that its default stays vLLM's own business.
    own = {action.dest for action in ours._actions}
    for action in parser._actions:
        if action.dest not in own:
            action.default = argparse.SUPPRESS
    found = vars(parser.parse_args(arguments))
    theirs = {name: found.pop(name) for name in list(found) if name not in own}
    routes = {name: theirs.pop(name) for name in list(theirs) if name in openai.ARGUMENTS}
    return argparse.Namespace(**found), theirs, routes


def engine_help(about: str | None = None) -> str:
    """vLLM's own help about its flags; `about` names a group, a flag, or `all`."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = _parser(argparse.ArgumentParser(add_help=False))
    parser.usage = argparse.SUPPRESS
    FlexibleArgumentParser._search_keyword = about
    return parser.format_help()


def _parser(ours: argparse.ArgumentParser) -> argparse.ArgumentParser:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
            found, unknown = super().parse_known_args(args, namespace)
            if unknown:
                raise UsageError(_unknown(unknown, self._option_string_actions))
            return found, unknown

        def error(self, message: str) -> Any:
            raise UsageError(f"{message[:1].upper()}{message[1:]}.")

    parser = Parser(parents=[ours], add_help=False, allow_abbrev=False)
    parser = AsyncEngineArgs.add_cli_args(parser)
    _add_routes(parser)
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)} | set(openai.ARGUMENTS)
    own = {action.dest for action in ours._actions}
    odd = [a.dest for a in parser._actions if a.dest not in known | own]
    if odd:
        raise EngineError(
            f"vLLM's parser sets {odd[0]!r}, which its engine does not take. Versions 0.26.0 and "
            "0.27.1 are known to work."
        )
    return parser


def _add_routes(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the OpenAI routes, and no others of vLLM's own server."""
    from vllm.entrypoints.openai.cli_args import FrontendArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    every = FrontendArgs.add_cli_args(FlexibleArgumentParser(add_help=False))
    actions = {action.dest: action for action in every._actions}
    missing = [name for name in openai.ARGUMENTS if name not in actions]
    if missing:
        raise EngineError(
            f"vLLM's server has no flag for {missing[0]!r}. Versions 0.26.0 and 0.27.1 are known "
            "to work."
        )
    group = parser.add_argument_group("OpenAI", "Of the routes that any OpenAI client can use.")
    for name in openai.ARGUMENTS:
        group._add_action(actions[name])


def _unknown(unknown: list[str], known: Any) -> str:
    flag = next((part for part in unknown if part.startswith("-")), None)
    if flag is None:
        return f"{unknown[0]!r} is one argument too many."
    name = flag.partition("=")[0]
    near = difflib.get_close_matches(name, known, 1, 0.4)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"Neither nnsight-serve nor vLLM knows the flag {name}.{hint}"
