"""What a worker holds for tracing, on the only rank or the first one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nnsight_core.interleaver import Interleaver
from nnsight_core.node import Root
from nnsight_core.outputs import RequestOutput
from nnsight_core.policy import Policy
from nnsight_core.wire.data import Encoder
from nnsight_core.wire.errors import record_error
from nnsight_core.wire.frames import Frame
from nnsight_core.wire.messages import InstalledMessage
from nnsight_vllm_worker.blobs import Store
from nnsight_vllm_worker.channel import Sender
from nnsight_vllm_worker.installing import installed_of
from nnsight_vllm_worker.known import Known
from nnsight_vllm_worker.leader import Leader, LeaderInterleaver, LeaderSteps, LeaderTables
from nnsight_vllm_worker.loaded import Loaded
from nnsight_vllm_worker.requests import Tracing
from nnsight_vllm_worker.step import Steps
from nnsight_vllm_worker.tables import Tables


class Attached:
    """What a worker holds for tracing, on the only rank or the first one."""

    def __init__(
        self,
        loaded: Loaded,
        config: Any,
        address: str,
        pickle: bool,
        limit: float | None,
        policy: Policy,
    ) -> None:
        self.loaded = loaded
        port, rows, taps = loaded.port, loaded.rows, loaded.taps
        several = loaded.ranks is not None
        kind = LeaderInterleaver if several else Interleaver
        interleaver = kind(rows, lambda run: self.tracing.end(run))
        watch = loaded.watch(interleaver)
        self.store = Store(port.device)
        self._sender = Sender(address)
        root = _WorkerRoot(watch.places, "", config)
        home = (self._sender.send, config, pickle, limit, policy)
        self.tracing = Tracing(root, watch, rows, self.store, *home)
        self.tracing.record = self._record
        interleaver.vocabulary = config.get_vocab_size()
        self._interleaver = interleaver
        steps = LeaderSteps if several else Steps
        self.steps = loaded.steps = steps(rows, interleaver, self.tracing, taps, loaded.compiled)
        self._leader: Leader | None = None
        if loaded.ranks is not None and loaded.layers is not None:
            leader = Leader(loaded.ranks, loaded.layers, rows, watch.places, port.device)
            self._leader = self.steps.leader = interleaver.leader = leader  # type: ignore[attr-defined]
            self.tracing.tables = LeaderTables(taps, leader)
            self.tracing.blocks.apart = True
        else:
            self.tracing.tables = Tables(taps)
        port.attach(self.steps)

    def put(self, digest: str, data: bytes) -> None:
        self.store.put(digest, data)

    def drop(self, digests: list[str]) -> None:
        self.store.drop(digests)

    def install(self, edit: str, data: bytes) -> bytes:
        with self._together():
            return self._installed(edit, data).to_bytes()

    def uninstall(self, edits: list[str]) -> None:
        for edit in edits:
            self.tracing.edits.pop(edit, None)

    def finish(self, key: str, outputs: str) -> None:
        output = RequestOutput.model_validate_json(outputs)
        self.steps.deferred.run()
        with self._together():
            for (awaited, sequence, _), traced in list(self.tracing.awaited.items()):
                if awaited == key:
                    own = [o for o in output.outputs if o.index == sequence] or output.outputs
                    self.steps.finish(traced, output.model_copy(update={"outputs": own}))

    def forget(self, keys: list[str]) -> None:
        for key in keys:
            self.tracing.forget(key)

    def let_go(self, ids: list[str], why: str) -> None:
        self.tracing.keeps.drop(ids, why)

    def kept(self, now: float) -> list[tuple[str, int, float]]:
        self.tracing.keeps.tick(now)
        return self.tracing.keeps.held()

    def counts(self) -> dict[str, int]:
        tracing = self.tracing
        return {
            "live": tracing.live,
            "blob_bytes": self.store.bytes,
            "kept": tracing.kept,
            "keep_bytes": tracing.keeps.bytes,
            "entries": tracing.tables.used,
            "edits": len(tracing.edits),
            "tap_bytes": self.loaded.taps.bytes,
        }

    def close(self) -> None:
        """Close the way home."""
        self.tracing.close()
        self._sender.close()
        self.loaded.close()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Within it, blocks may need the other ranks, which wait until it is over."""
        if self._leader is None:
            yield
            return
        with self._leader.listening():
            try:
                yield
            finally:
                self._leader.go()

    def _record(self, path: str) -> None:
        if self._leader is not None:
            self._leader.ask("record", path, path)
        self.loaded.inside(self._interleaver, path)

    def _installed(self, edit: str, data: bytes) -> Frame:
        encoder = Encoder()
        try:
            return installed_of(self.tracing, Known(data, self.tracing.blocks), edit).frame()
        except BaseException as error:
            message = InstalledMessage(key=edit, error=record_error(error, encoder))
            return message.frame(encoder.buffers)


class _WorkerRoot(Root):
    """The root of the tree as blocks see it in a worker."""

    __slots__ = ("_config", "_tokenizer")

    def __init__(self, places: Any, path: str, config: Any) -> None:
        super().__init__(places, path)
        object.__setattr__(self, "_config", config)
        object.__setattr__(self, "_tokenizer", None)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(self._config.tokenizer)
            object.__setattr__(self, "_tokenizer", tokenizer)
        return self._tokenizer
