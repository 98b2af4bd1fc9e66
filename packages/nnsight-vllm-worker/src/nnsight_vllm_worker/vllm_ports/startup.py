"""Starting an engine: its version, its processes, and why it did not start.

Relies on (vLLM 0.26.0 and 0.27.1):
- the engine's process logs what kept it from starting, with the exception, at level ERROR to a
  logger below `vllm`; the parent only learns that it failed.
- workers import the extension class before they load the model.
- `LLM._preprocess_cmpl_one(prompt)` makes of a prompt what the engine takes, with its
  `prompt_token_ids`. `scheduler_config` says how many tokens a forward pass takes.
- `LLM.llm_engine` has `add_request`, `step` and `abort_request`, whose ids are those given;
  `engine_core.shutdown()` ends its processes.
- what is wrong with a request is a `ValueError` or a `vllm.exceptions.VLLMClientError`.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nnsight_core.errors import EngineError, NNsightError, WriteError
from nnsight_vllm_worker.vllm_ports import death, orphans, scheduling

CAUSES = "NNSIGHT_START_CAUSES"
"""Environment variable: the file into which a starting engine's processes write what failed."""


def engine() -> str:
    """What runs the model, for the tree: `vllm 0.27.1`."""
    import vllm

    return f"vllm {vllm.__version__}"


def report_causes() -> None:
    """In a process of a starting engine: write errors where the parent looks for them."""
    path = os.environ.get(CAUSES)
    if path is not None:
        logging.getLogger("vllm").addHandler(_Causes(Path(path)))


class _Causes(logging.Handler):
    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            with suppress(OSError):  # the engine stands, and nobody looks any more
                _write_cause(self._path, record.exc_info[1])


def _write_cause(path: Path, error: BaseException) -> None:
    line = json.dumps({"type": type(error).__name__, "message": str(error)})
    with path.open("a") as file:
        file.write(line + "\n")


def read_causes(path: Path) -> str | None:
    """The first cause that a starting engine wrote, as `Type: message`."""
    try:
        first = path.read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    cause = json.loads(first)
    return f"{cause['type']}: {cause['message']}"


@contextmanager
def root_cause() -> Iterator[None]:
    """While an engine is being built: what fails is raised with its root cause.

    Raises:
        EngineError: the engine cannot be built.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        error = EngineError(
            "The engine starts processes that import this script again, which would build the "
            'model once more. Put what builds it under `if __name__ == "__main__":`.'
        )
        if CAUSES in os.environ:
            _write_cause(Path(os.environ[CAUSES]), error)
        raise error
    with tempfile.TemporaryDirectory(prefix="nnsight-") as folder:
        path = Path(folder) / "causes"
        os.environ[CAUSES] = str(path)
        try:
            with orphans.holding():
                yield
        except NNsightError:
            raise
        except Exception as error:
            cause = read_causes(path) or f"{type(error).__name__}: {error}"
            raise EngineError(f"The engine cannot be built. {cause}") from error
        finally:
            del os.environ[CAUSES]


def build_llm(model: str, arguments: dict[str, Any]) -> Any:
    """A `vllm.LLM`."""
    from vllm import LLM

    scheduling.silence()
    llm = LLM(model, **arguments)
    death.watch(llm)
    return llm


def add_request(llm: Any, key: str, request: Any) -> None:
    """Give the sync engine a request.

    Raises:
        ValueError: vLLM refuses it (a prompt that is too long).
    """
    from vllm.sampling_params import RequestOutputKind

    request.params.output_kind = RequestOutputKind.FINAL_ONLY
    with refusals():
        rendered = llm._preprocess_cmpl_one(request.prompt)
    check_room(llm.llm_engine.vllm_config, request, rendered)
    with refusals():
        llm.llm_engine.add_request(key, rendered, request.params, lora_request=request.lora)


def check_room(config: Any, request: Any, rendered: Any) -> None:
    """Refuse a prompt that has to run in one piece and does not fit into any forward pass.

    Raises:
        WriteError: with both numbers of tokens.
    """
    settings = config.scheduler_config
    room = settings.max_num_scheduled_tokens or settings.max_num_batched_tokens
    length = len(rendered.get("prompt_token_ids") or ())
    if request.whole and length > room:
        raise WriteError(
            f"The prompt has {length} tokens, and a forward pass of this engine takes {room} "
            "(max_num_batched_tokens). A block that writes, or of which it is not known what it "
            "reads, needs its prompt in one piece: give the engine more room, shorten the prompt, "
            "or let the block only read, from modules that it names plainly."
        )


@contextmanager
def refusals() -> Iterator[None]:
    """What vLLM refuses in a request is a `ValueError`, whatever this version calls it.

    Raises:
        ValueError: with vLLM's reason.
    """
    import vllm.exceptions

    refused = getattr(vllm.exceptions, "VLLMClientError", ())
    try:
        yield
    except refused as error:
        raise ValueError(error.args[0] if error.args else str(error)) from None


def abort(llm: Any, keys: list[str]) -> None:
    """End requests of the sync engine."""
    llm.llm_engine.abort_request(keys)


def dead_errors() -> tuple[type[BaseException], ...]:
    """What vLLM raises when its engine has ended."""
    from vllm.v1.engine.exceptions import EngineDeadError as Dead

    return (Dead,)


def shut_down(llm: Any) -> None:
    """End a sync engine and its processes."""
    llm.llm_engine.engine_core.shutdown()
