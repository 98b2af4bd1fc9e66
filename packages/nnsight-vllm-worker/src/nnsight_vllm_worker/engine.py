"""The sync engine: vLLM's `LLM`, driven step by step, with the frames of its workers.

What it gives back are the frames and outputs themselves; whoever asks (the local model, a server)
makes of them what it needs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from nnsight_core.errors import EngineDeadError
from nnsight_core.outputs import RequestOutput
from nnsight_core.tree import ModelTree
from nnsight_core.wire.frames import Buffer, Frame
from nnsight_vllm_worker.blobs import Ledger
from nnsight_vllm_worker.channel import Receiver
from nnsight_vllm_worker.convert import output_of
from nnsight_vllm_worker.settings import apply
from nnsight_vllm_worker.submission import Request
from nnsight_vllm_worker.vllm_ports import startup

Output = RequestOutput | BaseException


class SyncEngine:
    """One `vllm.LLM` with blocks in it.

    Attributes:
        llm: vLLM's own object.
        tree: the model's tree, as its workers recorded it.

    Raises:
        EngineError: the engine cannot be built, with the root cause.
        ValueError: a setting that cannot be had.
    """

    def __init__(self, model: str, arguments: dict[str, Any], pickle: bool = True) -> None:
        self._receiver = Receiver()
        self._ledger = Ledger()
        self._lock = threading.Lock()
        self._closed = False
        try:
            with startup.root_cause():
                self.llm = startup.build_llm(model, apply(arguments))
                trees = self._rpc("nnsight_attach", self._receiver.address, pickle)
        except BaseException:
            self._receiver.close()
            raise
        self.tree = ModelTree.model_validate_json(trees[0])

    def run(
        self, requests: list[Request], blobs: dict[str, tuple[Buffer, str, list[int]]]
    ) -> Iterator[tuple[str, Frame | Output]]:
        """Run requests together; frames and outputs come with the key of their request.

        Each traced request gives one frame `ended` per sequence, and each request one output (or
        the error for which there is none).

        Raises:
            EngineDeadError: the engine ended meanwhile.
        """
        with self._lock:
            yield from _Batch(self, requests, blobs).run()

    def counts(self) -> dict[str, int]:
        """How many blocks and bytes of outside tensors the worker holds."""
        return self._rpc("nnsight_counts")[0]

    def close(self) -> None:
        """End the engine and its processes."""
        if not self._closed:
            self._closed = True
            startup.shut_down(self.llm)
            self._receiver.close()

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        if self._closed:
            raise EngineDeadError("The engine was closed.")
        try:
            return self.llm.collective_rpc(method, args=args)
        except startup.dead_errors() as error:
            raise EngineDeadError(DEAD) from error


DEAD = (
    "The engine ended while it was needed. Its own log says why; build the model anew to go on "
    "(`VLLM(..., dispatch=True)`)."
)


class _Batch:
    """The requests of one trace in the engine."""

    def __init__(
        self,
        engine: SyncEngine,
        requests: list[Request],
        blobs: dict[str, tuple[Buffer, str, list[int]]],
    ) -> None:
        self.engine = engine
        self.requests = {r.key: r for r in requests}
        self.blobs = blobs
        self.pending: dict[str, str] = {}
        self.awaited = {r.key: set(range(r.sequences)) for r in requests if r.traced}
        self.waiting: set[str] = set()
        self.early: list[tuple[str, Frame]] = []

    def run(self) -> Iterator[tuple[str, Frame | Output]]:
        engine = self.engine
        digests = [d for r in self.requests.values() for d in r.blobs]
        try:
            self._put(digests)
            yield from self._add()
            while self.pending:
                outputs = self._step()
                yield from self._frames(0.0)
                for output in outputs:
                    key = self.pending.pop(output.request_id, None) if output.finished else None
                    if key is not None:
                        yield from self._finish(key, output_of(output))
        finally:
            self._clean(digests)
            del engine

    def _put(self, digests: list[str]) -> None:
        ledger = self.engine._ledger
        for digest in ledger.missing(dict.fromkeys(digests)):
            data, dtype, shape = self.blobs[digest]
            self.engine._rpc("nnsight_put", digest, bytes(data), dtype, shape)
            ledger.put(digest, memoryview(data).nbytes)
        ledger.use(digests)

    def _add(self) -> Iterator[tuple[str, Frame | Output]]:
        for key, request in self.requests.items():
            try:
                startup.add_request(self.engine.llm, key, request)
            except (ValueError, TypeError) as error:
                self.awaited.pop(key, None)
                yield key, error
            else:
                self.pending[key] = key

    def _step(self) -> list[Any]:
        try:
            return self.engine.llm.llm_engine.step()
        except startup.dead_errors() as error:
            raise EngineDeadError(DEAD) from error

    def _frames(self, wait: float) -> Iterator[tuple[str, Frame | Output]]:
        """The frames that have come; an error ends its request at once."""
        receiver = self.engine._receiver
        frame = receiver.take(wait)
        while frame is not None:
            key = frame.header["key"]
            if key in self.requests:
                yield from self._frame(key, frame)
            frame = receiver.take()

    def _frame(self, key: str, frame: Frame) -> Iterator[tuple[str, Frame | Output]]:
        if frame.header.get("waits"):
            self.waiting.add(key)
            return
        yield key, frame
        if frame.header["kind"] == "ended":
            self.awaited[key].discard(frame.header["sequence"])
            if frame.header["error"] is not None and key in self.pending:
                startup.abort(self.engine.llm, [key])
                del self.pending[key]
                self.awaited[key].clear()

    def _finish(self, key: str, output: RequestOutput) -> Iterator[tuple[str, Frame | Output]]:
        """A request has finished; what its blocks still have to say comes first."""
        patience = time.monotonic() + 60
        while self.awaited.get(key) and key not in self.waiting:
            yield from self._frames(0.05)
            if time.monotonic() > patience:
                raise EngineDeadError(
                    "The engine finished a request whose block never answered. " + DEAD
                )
        if key in self.waiting:
            self.waiting.discard(key)
            self.engine._rpc("nnsight_result", key, output.model_dump_json())
            while self.awaited[key]:
                yield from self._frames(1.0)
        yield key, output

    def _clean(self, digests: Iterable[str]) -> None:
        engine = self.engine
        if engine._closed:
            return
        try:
            if self.pending:
                startup.abort(engine.llm, list(self.pending))
            if self.pending or self.waiting:
                engine._rpc("nnsight_forget", [*self.pending, *self.waiting])
            leaving = engine._ledger.release([d for d in digests if d in engine._ledger._held])
            if leaving:
                engine._rpc("nnsight_drop", leaving)
        except EngineDeadError:
            # Nothing is left to clean up in an engine that has ended.
            return


