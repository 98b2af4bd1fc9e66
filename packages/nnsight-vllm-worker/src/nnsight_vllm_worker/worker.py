"""What runs inside vLLM's worker: the extension that vLLM mixes into its own worker class.

vLLM imports this module in every worker (`worker_extension_cls`) and offers the methods below over
its own RPC, on every rank.
"""

from __future__ import annotations

from typing import Any

from nnsight_core.errors import LocationError
from nnsight_core.interleaver import Interleaver
from nnsight_core.keeps import LIMIT, SECONDS, Keeps
from nnsight_core.node import Root
from nnsight_core.outputs import RequestOutput
from nnsight_core.policy import TRUSTED_PATH, Policy, policy_at
from nnsight_core.taps import resolve
from nnsight_core.watch import Watch, bare_tree
from nnsight_core.wire.data import Encoder
from nnsight_core.wire.errors import record_error
from nnsight_core.wire.frames import Frame
from nnsight_core.wire.messages import InstalledMessage
from nnsight_vllm_worker.blobs import Store
from nnsight_vllm_worker.channel import Sender
from nnsight_vllm_worker.installing import installed_of
from nnsight_vllm_worker.known import Known
from nnsight_vllm_worker.record import Record, record
from nnsight_vllm_worker.requests import Tracing
from nnsight_vllm_worker.rows import RowMap
from nnsight_vllm_worker.settings import EXTENSION
from nnsight_vllm_worker.step import Steps
from nnsight_vllm_worker.tables import Tables
from nnsight_vllm_worker.taps import Taps
from nnsight_vllm_worker.vllm_ports import forward, loading, orphans, scheduling, startup
from nnsight_vllm_worker.vllm_ports.runner_v1 import RunnerV1
from nnsight_vllm_worker.vllm_ports.runner_v2 import RunnerV2


class WorkerExtension:
    """The RPC methods of a worker. `self` is vLLM's worker."""

    def nnsight_attach(
        self,
        address: str,
        pickle: bool,
        limit: float | None,
        keep_bytes: int = LIMIT,
        keep_seconds: float = SECONDS,
        max_saves: int | None = None,
        policy: str = TRUSTED_PATH,
    ) -> str:
        """Record the model's locations and begin to trace; gives the tree as JSON."""
        orphans.ignore_interrupts()
        attached = Attached(self, address, pickle, limit, policy_at(policy))
        self._nnsight = attached  # type: ignore[attr-defined]
        keeps = Keeps(self._nnsight.store.device, keep_bytes, keep_seconds)
        self._nnsight.tracing.keeps = keeps
        self._nnsight.tracing.max_saves = max_saves
        return self._nnsight.tree.model_dump_json()

    def nnsight_detach(self) -> None:
        """Close the way home, before the engine ends."""
        self._nnsight.close()

    def nnsight_put(self, digest: str, data: bytes) -> None:
        """Keep an outside tensor's bytes on the device."""
        self._nnsight.store.put(digest, data)

    def nnsight_drop(self, digests: list[str]) -> None:
        """Let outside tensors go."""
        self._nnsight.store.drop(digests)

    def nnsight_install(self, edit: str, data: bytes) -> bytes:
        """Install a block as an edit; gives what is known of it, or its error, as a frame."""
        return self._nnsight.install(edit, data)

    def nnsight_uninstall(self, edits: list[str]) -> None:
        """Let edits go that no request needs any more."""
        for edit in edits:
            self._nnsight.tracing.edits.pop(edit, None)

    def nnsight_finish(self, key: str, outputs: str) -> None:
        """Tell the blocks of a request that it has finished, and with what output."""
        self._nnsight.finish(key, outputs)

    def nnsight_forget(self, keys: list[str]) -> None:
        """Drop the blocks of requests that nobody waits for any more."""
        for key in keys:
            self._nnsight.tracing.forget(key)

    def nnsight_let_go(self, ids: list[str], why: str) -> None:
        """Let kept values go."""
        self._nnsight.tracing.keeps.drop(ids, why)

    def nnsight_kept(self, now: float) -> list[tuple[str, int, float]]:
        """The id, bytes and age of each kept value."""
        keeps = self._nnsight.tracing.keeps
        keeps.tick(now)
        return keeps.held()

    def nnsight_counts(self) -> dict[str, int]:
        """What the worker holds: blocks, table entries, bytes of what it has for blocks."""
        attached = self._nnsight
        tracing = attached.tracing
        return {
            "live": tracing.live,
            "blob_bytes": attached.store.bytes,
            "kept": tracing.kept,
            "keep_bytes": tracing.keeps.bytes,
            "entries": tracing.tables.used,
            "edits": len(tracing.edits),
            "tap_bytes": attached.loaded.taps.bytes,
        }


class Loaded:
    """A model that has been loaded, before anything of it is compiled: its locations are recorded.

    Attributes:
        tree: the model's tree, with what two runs for nobody showed, operations inside forwards
            included.
    """

    def __init__(self, worker: Any) -> None:
        kind = RunnerV2 if getattr(worker, "use_v2_model_runner", False) else RunnerV1
        self.port = kind(worker.model_runner)
        self.rows = RowMap()
        self.steps: Steps | None = None
        self._recording = False
        forward.plain_when(self.port.model, self._plain)
        config = worker.vllm_config.model_config
        bare = bare_tree(
            self.port.model, config.served_model_name or config.model, startup.engine()
        )
        watch = Watch(self.port.model, Interleaver(self.rows, lambda run: None), bare)
        for path, info in bare.modules.items():
            if info.same_as is None and info.operations:
                watch.watch_source(path)
        self.seen = self.record(watch.interleaver)
        tree = self.seen.tree(bare, watch)
        watch.remove()
        self.modules = dict(self.port.model.named_modules(remove_duplicate=False))
        patterns = forward.taps_of(worker.vllm_config)
        rows = worker.vllm_config.scheduler_config.max_num_batched_tokens
        names = resolve(tree, patterns)
        self.taps = Taps(self.seen, names, patterns, rows, self.port.device)
        self.compiled = forward.compiles(worker.vllm_config)
        self.tree = tree.model_copy(
            update={"compiled": self.compiled, "taps": tuple(map(str, self.taps.taps))}
        )
        # What is compiled now is the model as vLLM wrote it, with its taps.
        self.taps.install(self.modules)

    def record(self, interleaver: Interleaver) -> Record:
        """What every location holds that two runs for nobody reach."""
        self._recording = True
        try:
            return record(interleaver, self.port.run_once)
        finally:
            self._recording = False

    def _plain(self) -> bool:
        return self._recording or (self.steps is not None and self.steps.plain)


class Attached:
    """What one worker holds for tracing."""

    def __init__(
        self, worker: Any, address: str, pickle: bool, limit: float | None, policy: Policy
    ) -> None:
        self.loaded: Loaded = worker._nnsight_loaded
        self.tree = self.loaded.tree
        port, rows = self.loaded.port, self.loaded.rows
        interleaver = Interleaver(rows, lambda run: self.tracing.end(run))
        self.loaded.taps.remove(self.loaded.modules)
        watch = Watch(port.model, interleaver, self.tree, self.loaded.taps.around)
        self.loaded.seen.teach(rows, watch.places)
        self.loaded.taps.bind(watch.places)
        self.store = Store(port.device)
        self._sender = Sender(address) if worker.rank == 0 else None
        config = worker.vllm_config.model_config
        root = _WorkerRoot(watch.places, "", config)
        home = (self._send, config, pickle, limit, policy)
        self.tracing = Tracing(root, watch, rows, self.store, *home)
        self.tracing.tables = Tables(self.loaded.taps)
        self.tracing.record = self._record_inner
        self._interleaver = interleaver
        interleaver.vocabulary = config.get_vocab_size()
        taps, compiled = self.loaded.taps, self.loaded.compiled
        self.steps = self.loaded.steps = Steps(rows, interleaver, self.tracing, taps, compiled)
        port.attach(self.steps)

    def _record_inner(self, path: str) -> None:
        """Record the operations inside the function that an operation calls."""
        seen = self.loaded.record(self._interleaver)
        inside = [at for at in seen.seen if at.path.startswith(f"{path}.source.")]
        if not inside:
            raise LocationError(
                f"{path} calls no Python function whose source can be had (a module, a kernel, or "
                "nothing), so it has no operations. Of a module that it calls, ask for that "
                "module's own `.source`."
            )
        assert self._interleaver.places is not None
        seen.teach(self.loaded.rows, self._interleaver.places, inside)

    def install(self, edit: str, data: bytes) -> bytes:
        encoder = Encoder()
        try:
            installed = installed_of(self.tracing, Known(data, self.tracing.blocks), edit)
        except BaseException as error:
            message = InstalledMessage(key=edit, error=record_error(error, encoder))
            return message.frame(encoder.buffers).to_bytes()
        return installed.frame().to_bytes()

    def close(self) -> None:
        """Close the way home."""
        self.tracing.close()
        if self._sender is not None:
            self._sender.close()

    def _send(self, frame: Frame) -> None:
        # Every rank runs the blocks; what they save is the same, so one rank sends it.
        if self._sender is not None:
            self._sender.send(frame)

    def finish(self, key: str, outputs: str) -> None:
        output = RequestOutput.model_validate_json(outputs)
        self.steps.deferred.run()
        for (awaited, sequence, _), traced in list(self.tracing.awaited.items()):
            if awaited == key:
                own = [o for o in output.outputs if o.index == sequence] or output.outputs
                self.steps.finish(traced, output.model_copy(update={"outputs": own}))


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


def _loaded(worker: Any) -> None:
    worker._nnsight_loaded = Loaded(worker)


orphans.end_with_parent()
startup.report_causes()
scheduling.silence()
loading.when_loaded(EXTENSION, _loaded)
