"""The traced requests of a worker: from the block that came with one to what is sent home.

A block travels on its request (`SamplingParams.extra_args`), so it is there on every rank when the
request is, and leaves with it.
"""

from __future__ import annotations

import builtins
import io
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from nnsight_core.code import compile_block
from nnsight_core.effects import effects_of
from nnsight_core.errors import ProtocolError
from nnsight_core.node import Root
from nnsight_core.run import Run, current_run
from nnsight_core.watch import Watch
from nnsight_core.wire.blocks import code_of, decode_run, encode_ended
from nnsight_core.wire.code import CodeDecoder
from nnsight_core.wire.frames import Frame, read_frame
from nnsight_core.wire.messages import (
    BlockMessage,
    EndedMessage,
    PrintedMessage,
    WarningData,
    expect,
)
from nnsight_vllm_worker.blobs import Store

_log = logging.getLogger(__name__)
EXTRA = "nnsight"
"""The entry of `extra_args` that holds a request's block."""


class Traced:
    """One traced request: its run, and what it has to say besides its saves."""

    def __init__(self, request: str, key: str, sequence: int, prompt: int, cached: int) -> None:
        self.request = request
        self.key = key
        self.sequence = sequence
        self.prompt = prompt
        self.cached = cached
        self.started = False
        self.waits = False
        self.notes: list[WarningData] = []
        self.blobs: list[str] = []
        self.run: Run


class Tracing:
    """The traced requests of one worker.

    Attributes:
        requests: by the engine's request id.
        waiting: those whose blocks wait for the finished output, by key and sequence.
    """

    def __init__(
        self,
        root: Root,
        watch: Watch,
        store: Store,
        emit: Callable[[Frame], None],
        pickle: bool,
    ) -> None:
        self.requests: dict[str, Traced] = {}
        self.waiting: dict[tuple[str, int], Traced] = {}
        self._root = root
        self._watch = watch
        self._store = store
        self._emit = emit
        self._pickle = pickle
        self._ended: list[Traced] = []
        self._extra = {"print": _print(self.printed), "__builtins__": builtins}
        self._show = warnings.showwarning
        warnings.showwarning = self._warned  # type: ignore[assignment]

    @property
    def live(self) -> int:
        """How many blocks are in the worker."""
        return len(self.requests) + len(self.waiting)

    def come(self, request: str, extra: Any, prompt: int, cached: int) -> None:
        """A request has come; if it carries a block, its run is made ready."""
        data = (extra or {}).get(EXTRA)
        if data is None:
            return
        try:
            frame = read_frame(data)
            message = expect(frame, BlockMessage)
        except ProtocolError as error:
            # Not from our front ends, which never send one: the request goes on as a plain one.
            _log.warning("Request %s carries no block of this version: %s", request, error)
            return
        # vLLM names the sequences of one request by a number before the parent's id.
        sequence = int(request.partition("_")[0]) if message.sequences > 1 else 0
        traced = Traced(request, message.key, sequence, prompt, cached)
        try:
            traced.run = self._run(message, frame, traced)
        except Exception as error:
            # What cannot be made into a run is an error of this request alone.
            traced.run = Run(compile_block("    pass\n", message.block.filename, 1, "block"), {})
            traced.run.key = traced
            traced.run.error = error
            traced.started = True
            self.end(traced.run)
            self.send()
            return
        self.requests[request] = traced

    def gone(self, request: str) -> None:
        """A request has finished or was aborted."""
        traced = self.requests.pop(request, None)
        if traced is not None:
            self._watch.interleaver.drop(traced.run)

    def forget(self, key: str) -> None:
        """Drop what still waits for a finished output that will not come."""
        for place in [p for p in self.waiting if p[0] == key]:
            traced = self.waiting.pop(place)
            self._watch.interleaver.drop(traced.run)

    def end(self, run: Run) -> None:
        """A run has ended; what it brings home is sent when the step is over."""
        self._ended.append(run.key)

    def send(self) -> None:
        """Send what has ended, and say of which runs the finished output is waited for."""
        for traced in self._ended:
            run = traced.run
            run.error = run.error or self._store.check(traced.blobs)
            try:
                frame = encode_ended(run, traced.key, traced.sequence, traced.notes)
            except Exception as error:
                # Whatever a block saved, encoding it must not take the engine along.
                run.error = error
                run.saved.clear()
                frame = encode_ended(run, traced.key, traced.sequence, traced.notes)
            self._emit(frame)
            self.requests.pop(traced.request, None)
            self.waiting.pop((traced.key, traced.sequence), None)
        self._ended.clear()
        for traced in [t for t in self.requests.values() if t.started and not t.waits]:
            # The step of a block without a loop is over, so only the output is left to wait for.
            traced.waits = True
            del self.requests[traced.request]
            self.waiting[traced.key, traced.sequence] = traced
            self._emit(EndedMessage(key=traced.key, sequence=traced.sequence, waits=True).frame())

    def printed(self, traced: Traced, text: str) -> None:
        """A block printed something."""
        message = PrintedMessage(key=traced.key, sequence=traced.sequence, text=text)
        self._emit(message.frame())

    def close(self) -> None:
        """Let warnings of this process go where they went before."""
        warnings.showwarning = self._show

    # -- inside ----------------------------------------------------------------------------------

    def _run(self, message: BlockMessage, frame: Frame, traced: Traced) -> Run:
        block = message.block
        code = code_of(block)

        def blob(digest: str, dtype: str, shape: list[int]) -> torch.Tensor:
            traced.blobs.append(digest)
            return self._store.get(digest, dtype, shape, copy=code.snapshots)

        with torch.inference_mode(False):
            decoder = CodeDecoder(
                frame.buffers,
                self._root,
                blob=blob,
                place=lambda tensor: tensor.to(self._store.device),
                pickle=self._pickle,
                extra=self._extra,
            )
            run = decode_run(block, decoder, traced, self._extra)
        if "source" in code.compiled.co_names:
            effects = effects_of(code, run.scope, self._watch.places.tree)
            for path in effects.sources():
                self._watch.watch_source(path)
        return run

    def _warned(self, message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        run = current_run()
        if run is None or not isinstance(run.key, Traced):
            self._show(message, category, filename, lineno, *rest)
            return
        run.key.notes.append(
            WarningData(
                module=category.__module__,
                name=category.__name__,
                message=str(message),
                filename=filename,
                line=lineno,
            )
        )


def _print(printed: Callable[[Traced, str], None]) -> Callable[..., None]:
    def block_print(
        *values: Any, sep: str | None = None, end: str | None = None, **rest: Any
    ) -> None:
        run = current_run()
        file = rest.get("file")
        if run is None or file not in (None, sys.stdout):
            print(*values, sep=sep, end=end, **rest)
            return
        text = io.StringIO()
        print(*values, sep=sep, end=end, file=text)
        printed(run.key, text.getvalue())

    return block_print
