"""What runs inside vLLM's worker: the extension that vLLM mixes into its own worker class.

vLLM imports this module in every worker (`worker_extension_cls`) and offers the methods below over
its own RPC, on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
from nnsight_vllm_worker.follower import Follower, FollowerInterleaver, FollowerSteps
from nnsight_vllm_worker.installing import installed_of
from nnsight_vllm_worker.known import Known
from nnsight_vllm_worker.leader import Leader, LeaderInterleaver, LeaderSteps, LeaderTables
from nnsight_vllm_worker.record import Record, record
from nnsight_vllm_worker.requests import Tracing
from nnsight_vllm_worker.rows import RowMap
from nnsight_vllm_worker.settings import EXTENSION
from nnsight_vllm_worker.shards import Shards
from nnsight_vllm_worker.step import Steps
from nnsight_vllm_worker.tables import Tables
from nnsight_vllm_worker.taps import Taps
from nnsight_vllm_worker.vllm_ports import forward, loading, orphans, parallel, scheduling, startup
from nnsight_vllm_worker.vllm_ports.runner_v1 import RunnerV1
from nnsight_vllm_worker.vllm_ports.runner_v2 import RunnerV2


class WorkerExtension:
    """The RPC methods of a worker. `self` is vLLM's worker."""

    _nnsight: Attached | Following

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
        loaded: Loaded = self._nnsight_loaded  # type: ignore[attr-defined]
        config = self.vllm_config.model_config  # type: ignore[attr-defined]
        if loaded.rank:
            self._nnsight = Following(loaded)
        else:
            attached = Attached(loaded, config, address, pickle, limit, policy_at(policy))
            attached.tracing.keeps = Keeps(attached.store.device, keep_bytes, keep_seconds)
            attached.tracing.max_saves = max_saves
            self._nnsight = attached
        return loaded.tree.model_dump_json()

    def nnsight_detach(self) -> None:
        """Close the way home, before the engine ends."""
        self._nnsight.close()

    def nnsight_put(self, digest: str, data: bytes) -> None:
        """Keep an outside tensor's bytes on the device."""
        self._nnsight.put(digest, data)

    def nnsight_drop(self, digests: list[str]) -> None:
        """Let outside tensors go."""
        self._nnsight.drop(digests)

    def nnsight_install(self, edit: str, data: bytes) -> bytes:
        """Install a block as an edit; gives what is known of it, or its error, as a frame."""
        return self._nnsight.install(edit, data)

    def nnsight_uninstall(self, edits: list[str]) -> None:
        """Let edits go that no request needs any more."""
        self._nnsight.uninstall(edits)

    def nnsight_finish(self, key: str, outputs: str) -> None:
        """Tell the blocks of a request that it has finished, and with what output."""
        self._nnsight.finish(key, outputs)

    def nnsight_forget(self, keys: list[str]) -> None:
        """Drop the blocks of requests that nobody waits for any more."""
        self._nnsight.forget(keys)

    def nnsight_let_go(self, ids: list[str], why: str) -> None:
        """Let kept values go."""
        self._nnsight.let_go(ids, why)

    def nnsight_kept(self, now: float) -> list[tuple[str, int, float]]:
        """The id, bytes and age of each kept value."""
        return self._nnsight.kept(now)

    def nnsight_counts(self) -> dict[str, int]:
        """What the worker holds: blocks, table entries, bytes of what it has for blocks."""
        return self._nnsight.counts()


class Loaded:
    """A model that has been loaded, before anything of it is compiled: its locations are recorded.

    Attributes:
        tree: the model's tree, with what two runs for nobody showed, operations inside forwards
            included.
        ranks: how the ranks of the engine reach one another, if there are several; `rank` is which
            of them this one is.
    """

    def __init__(self, worker: Any) -> None:
        kind = RunnerV2 if getattr(worker, "use_v2_model_runner", False) else RunnerV1
        self.port = kind(worker.model_runner)
        self.rows = RowMap()
        self.steps: Steps | FollowerSteps | None = None
        self._recording = False
        config = worker.vllm_config
        self.ranks = parallel.Ranks() if parallel.ranks_of(config) > 1 else None
        self.rank = self.ranks.rank if self.ranks is not None else 0
        self.dummy = config.load_config.load_format == "dummy"
        self.modules = dict(self.port.model.named_modules(remove_duplicate=False))
        self.layers = parallel.Layers(self.modules) if self.ranks is not None else None
        forward.plain_when(self.port.model, self._plain)
        named = config.model_config
        bare = bare_tree(self.port.model, named.served_model_name or named.model, startup.engine())
        watch = Watch(self.port.model, Interleaver(self.rows, lambda run: None), bare)
        for path, info in bare.modules.items():
            if info.same_as is None and info.operations:
                watch.watch_source(path)
        self.seen = self.record(watch.interleaver)
        tree = self.seen.tree(bare, watch)
        watch.remove()
        patterns = forward.taps_of(config)
        rows = config.scheduler_config.max_num_batched_tokens
        names = resolve(tree, patterns)
        self.taps = Taps(self.seen, names, patterns, rows, self.port.device)
        self.taps.ranks = self.ranks
        self.compiled = forward.compiles(config)
        self.tree = tree.model_copy(
            update={"compiled": self.compiled, "taps": tuple(map(str, self.taps.taps))}
        )
        # What is compiled now is the model as vLLM wrote it, with its taps.
        self.taps.install(self.modules)

    def record(self, interleaver: Interleaver) -> Record:
        """What every location holds that two runs for nobody reach; called on all ranks."""
        self._recording = True
        try:
            if self.ranks is None or self.layers is None:
                return record(interleaver, self.port.run_once)
            shards = Shards(self.layers, self.ranks.rank)
            with self.ranks.watched(shards.whole):
                found = record(interleaver, self.port.run_once, see=shards.see)
            found.layouts = shards.layouts(self.ranks.agree, self.dummy)
            found.rank, found.ranks = self.ranks.rank, self.ranks.size
            return found
        finally:
            self._recording = False

    def inside(self, interleaver: Interleaver, path: str) -> None:
        """Record the operations inside the function that an operation calls; on all ranks.

        Raises:
            LocationError: it has none.
        """
        seen = self.record(interleaver)
        inside = [at for at in seen.seen if at.path.startswith(f"{path}.source.")]
        if not inside:
            raise LocationError(
                f"{path} calls no Python function whose source can be had (a module, a kernel, or "
                "nothing), so it has no operations. Of a module that it calls, ask for that "
                "module's own `.source`."
            )
        assert interleaver.places is not None
        seen.teach(self.rows, interleaver.places, inside)

    def watch(self, interleaver: Interleaver) -> Watch:
        """Watch the model that vLLM has compiled, for good."""
        self.taps.remove(self.modules)
        watch = Watch(self.port.model, interleaver, self.tree, self.taps.around)
        self.seen.teach(self.rows, watch.places)
        self.taps.bind(watch.places)
        return watch

    def close(self) -> None:
        """Send the other ranks nothing any more."""
        if self.ranks is not None:
            self.ranks.close()

    def _plain(self) -> bool:
        return self._recording or (self.steps is not None and self.steps.plain)


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


class Following:
    """What a worker holds for tracing, on any rank but the first: nothing of any block."""

    def __init__(self, loaded: Loaded) -> None:
        assert loaded.ranks is not None and loaded.layers is not None
        self.loaded = loaded
        port, rows, taps = loaded.port, loaded.rows, loaded.taps
        interleaver = FollowerInterleaver(rows, lambda run: None)
        watch = loaded.watch(interleaver)
        follower = interleaver.follower = Follower(
            loaded.ranks,
            loaded.layers,
            rows,
            watch.places,
            Tables(taps),
            taps,
            lambda path: loaded.inside(interleaver, path),
        )
        self._follower = follower
        steps = loaded.steps = FollowerSteps(rows, interleaver, follower, taps)
        port.attach(steps)

    def put(self, digest: str, data: bytes) -> None:
        """Outside tensors are where blocks are."""

    def drop(self, digests: list[str]) -> None:
        """None are held."""

    def install(self, edit: str, data: bytes) -> bytes:
        self._follower.follow()
        return b""

    def uninstall(self, edits: list[str]) -> None:
        """None are held."""

    def finish(self, key: str, outputs: str) -> None:
        self._follower.follow()

    def forget(self, keys: list[str]) -> None:
        """No blocks are held."""

    def let_go(self, ids: list[str], why: str) -> None:
        """No values are kept."""

    def kept(self, now: float) -> list[tuple[str, int, float]]:
        return []

    def counts(self) -> dict[str, int]:
        names = ("live", "blob_bytes", "kept", "keep_bytes", "entries", "edits")
        return {**dict.fromkeys(names, 0), "tap_bytes": self.loaded.taps.bytes}

    def close(self) -> None:
        self.loaded.close()


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
