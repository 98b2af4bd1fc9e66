"""The sync engine: vLLM's `LLM`, driven step by step, with the frames of its workers.

What it gives back are the frames and outputs themselves; whoever asks (the local model, a server)
makes of them what it needs.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from nnsight_core.backend import EditInfo, EditSpec
from nnsight_core.errors import EngineDeadError
from nnsight_core.garbage import uncollected
from nnsight_core.keeps import LIMIT, SECONDS
from nnsight_core.kept import KeptValues
from nnsight_core.outputs import RequestOutput
from nnsight_core.policy import TRUSTED_PATH
from nnsight_core.tree import ModelTree
from nnsight_core.wire.frames import Buffer, Frame
from nnsight_vllm_worker.blobs import Ledger
from nnsight_vllm_worker.channel import Receiver
from nnsight_vllm_worker.convert import output_of
from nnsight_vllm_worker.edits import Edits
from nnsight_vllm_worker.progress import Progress
from nnsight_vllm_worker.requests import handles_of
from nnsight_vllm_worker.settings import apply
from nnsight_vllm_worker.submission import Carried, Request
from nnsight_vllm_worker.vllm_ports import incoming, startup

Output = RequestOutput | BaseException


BLOCK_TIMEOUT = 60.0
"""Seconds that a block may run before it gives control back to the engine."""


class SyncEngine:
    """One `vllm.LLM` with blocks in it.

    Attributes:
        llm: vLLM's own object.
        tree: the model's tree, as its workers recorded it.
        kept: what blocks left on it.
        edits: what is installed on it.

    Raises:
        EngineError: the engine cannot be built, with the root cause.
        ValueError: a setting that cannot be had.
    """

    def __init__(
        self,
        model: str,
        arguments: dict[str, Any],
        pickle: bool = True,
        block_timeout: float | None = BLOCK_TIMEOUT,
        keep_bytes: int = LIMIT,
        keep_seconds: float = SECONDS,
        policy: str = TRUSTED_PATH,
    ) -> None:
        chosen = apply(arguments)
        self._receiver = Receiver()
        weakref.finalize(self, self._receiver.close)
        self._ledger = Ledger()
        self.kept = KeptValues(self)
        self._lock = threading.Lock()
        self._closed = False
        try:
            with startup.root_cause():
                self.llm = startup.build_llm(model, chosen)
                attaching = (
                    self._receiver.address,
                    pickle,
                    block_timeout,
                    keep_bytes,
                    keep_seconds,
                    None,
                    policy,
                )
                trees = self._rpc("nnsight_attach", *attaching)
        except BaseException:
            self._receiver.close()
            if hasattr(self, "llm"):
                startup.shut_down(self.llm)
            raise
        self.tree = ModelTree.model_validate_json(trees[0])
        self.edits = Edits(incoming.under_way(self.llm.llm_engine))
        incoming.mark_requests(self.llm.llm_engine, self.edits.marks)

    def run(
        self, requests: list[Request], blobs: dict[str, Buffer]
    ) -> Iterator[tuple[str, Frame | Output]]:
        """Run requests together; frames and outputs come with the key of their request.

        Each traced request gives one frame `ended` per sequence, and each request one output (or
        the error for which there is none).

        Raises:
            EngineDeadError: the engine ended meanwhile.
        """
        self.kept.flush()
        with self._lock:
            self._sweep()
            yield from _Batch(self, requests, blobs).run()

    def generate(self, prompts: list[Any], params: Any, **how: Any) -> list[Any]:
        """Generate as vLLM does, with nothing of ours; gives its own outputs."""
        with self._lock, startup.refusals():
            return self.llm.generate(prompts, params, **how)

    def install(
        self, spec: EditSpec, carried: Carried, blobs: dict[str, Buffer], owner: str = ""
    ) -> EditInfo:
        """Install an edit.

        Raises:
            NotInstalled: a worker refused it.
        """
        with self._lock:
            edit = self.edits.new(spec, carried, blobs, owner)
            self._put(carried.blobs, blobs)
            try:
                # Of several ranks, the first one runs the blocks.
                self.edits.add(edit, self._rpc("nnsight_install", edit.id, carried.data)[0])
            except BaseException:
                self._rpc("nnsight_uninstall", [edit.id])
                self._release(carried.blobs)
                raise
            return edit.info

    def clear(self, ids: list[str] | None) -> None:
        """Clear edits, or all of them; requests that have them end with them."""
        with self._lock:
            self.edits.clear(ids)
            self._sweep()

    def _sweep(self) -> None:
        """Let go of the cleared edits that no request needs any more."""
        idle = self.edits.idle()
        if idle:
            self._rpc("nnsight_uninstall", [edit.id for edit in idle])
            self._release([digest for edit in idle for digest in edit.carried.blobs])

    def _put(self, digests: Iterable[str], blobs: dict[str, Buffer]) -> None:
        """Bring outside tensors to the workers, to stay until they are released."""
        for digest in self._ledger.missing(dict.fromkeys(digests)):
            data = blobs[digest]
            self._rpc("nnsight_put", digest, bytes(data))
            self._ledger.put(digest, memoryview(data).nbytes)
        self._ledger.use(digests)

    def _release(self, digests: Iterable[str], doubtful: Iterable[str] = ()) -> None:
        leaving = self._ledger.release(digests, doubtful)
        if leaving:
            self._rpc("nnsight_drop", leaving)

    def counts(self) -> dict[str, int]:
        """What the worker holds: blocks, bytes of outside tensors, bytes that blocks wrote."""
        with self._lock:
            return self._rpc("nnsight_counts")[0]

    def let_go(self, ids: list[str], why: str) -> None:
        """Let kept values go."""
        with self._lock:
            self._rpc("nnsight_let_go", ids, why)

    def list_kept(self) -> list[tuple[str, int, float]]:
        """The id, bytes and age of each kept value."""
        with self._lock:
            return self._rpc("nnsight_kept", time.monotonic())[0]

    def close(self) -> None:
        """End the engine and its processes."""
        self.kept.close()
        if not self._closed:
            with contextlib.suppress(EngineDeadError):
                self._rpc("nnsight_detach")
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
    "The engine ended while it was needed; its own log says why. `model.restart()` builds it anew "
    "(a server has to be started again)."
)
NEVER_ANSWERED = "The engine finished a request whose block never answered. " + DEAD
PATIENCE = 60.0
"""Seconds in which the block of a request that has finished must have answered."""


class _Batch:
    """The requests of one trace in the engine."""

    def __init__(
        self,
        engine: SyncEngine,
        requests: list[Request],
        blobs: dict[str, Buffer],
    ) -> None:
        self.engine = engine
        self.requests = {r.key: r for r in requests}
        self.blobs = blobs
        self.progress: dict[str, Progress] = {}
        self.pending: set[str] = set()
        self.used: list[str] = []

    def run(self) -> Iterator[tuple[str, Frame | Output]]:
        try:
            digests = [d for r in self.requests.values() for d in r.blobs]
            self.engine._put(digests, self.blobs)
            self.used = digests
            with uncollected():
                refused = self._add()
            yield from refused
            while self.pending:
                outputs = self._step()
                yield from self._frames(0.0)
                for output in outputs:
                    if output.finished and output.request_id in self.pending:
                        self.pending.discard(output.request_id)
                        yield from self._finish(output_of(output))
        finally:
            self._clean()

    def _add(self) -> list[tuple[str, Output]]:
        """Hand the requests over; gives the errors of those that are refused."""
        refused: list[tuple[str, Output]] = []
        for key, request in self.requests.items():
            try:
                self._begin(request)
                startup.add_request(self.engine.llm, key, request)
            except (ValueError, TypeError) as error:
                self.progress.pop(key, None)
                refused.append((key, error))
            else:
                self.pending.add(key)
        return refused

    def _begin(self, request: Request) -> None:
        self.engine.edits.begin(request)
        self.progress[request.key] = Progress(request)

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
            self.engine.edits.note(frame)
            progress = self.progress.get(frame.header["key"])
            if progress is not None:
                said = progress.take(frame)
                if progress.failed and progress.key in self.pending:
                    self._drop(progress.key)
                if said:
                    yield progress.key, frame
            elif frame.header["kind"] == "ended":
                self.engine.kept.disown(handles_of(frame))
            frame = receiver.take()

    def _drop(self, key: str) -> None:
        """A block of a request has failed: nothing of it goes on."""
        self.pending.discard(key)
        startup.abort(self.engine.llm, [key])
        if not self.progress[key].ended:
            # Its edits, and blocks of its other sequences, may wait for what will not come.
            self.engine._rpc("nnsight_forget", [key])

    def _finish(self, output: RequestOutput) -> Iterator[tuple[str, Frame | Output]]:
        """A request has finished; what its blocks still have to say comes first."""
        key = output.request_id
        progress = self.progress[key]
        if not progress.answered:
            # What its last step said may be on the way; asking for it is not much slower.
            yield from self._frames(0.002)
        if not progress.ended:
            self.engine._rpc("nnsight_finish", key, output.model_dump_json())
        patience = time.monotonic() + PATIENCE
        while not progress.ended:
            yield from self._frames(0.05)
            if time.monotonic() > patience:
                raise EngineDeadError(NEVER_ANSWERED)
        yield key, output

    def _clean(self) -> None:
        engine = self.engine
        for request in self.requests.values():
            engine.edits.end(request)
        if engine._closed:
            return
        try:
            if self.pending:
                startup.abort(engine.llm, list(self.pending))
            unheard = [key for key, p in self.progress.items() if not p.ended]
            if self.pending or unheard:
                engine._rpc("nnsight_forget", [*{*self.pending, *unheard}])
            failed = [key for key, p in self.progress.items() if p.failed]
            doubtful = [digest for key in failed for digest in self.requests[key].blobs]
            engine._release(self.used, doubtful)
        except EngineDeadError:
            # Nothing is left to clean up in an engine that has ended.
            return
