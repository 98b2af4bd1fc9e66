"""A model that a worker has loaded: its locations, how its ranks hold them, and its taps."""

from __future__ import annotations

from typing import Any, Protocol

from nnsight_core.errors import LocationError
from nnsight_core.interleaver import Interleaver
from nnsight_core.taps import resolve
from nnsight_core.watch import Watch, bare_tree
from nnsight_vllm_worker.record import Record, record
from nnsight_vllm_worker.rows import RowMap
from nnsight_vllm_worker.shards import Shards
from nnsight_vllm_worker.taps import Taps
from nnsight_vllm_worker.vllm_ports import forward, parallel, startup
from nnsight_vllm_worker.vllm_ports.runner_v1 import RunnerV1
from nnsight_vllm_worker.vllm_ports.runner_v2 import RunnerV2


class Plain(Protocol):
    """Says whether the pass that runs is to run as plain Python."""

    @property
    def plain(self) -> bool: ...


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
        self.steps: Plain | None = None
        self._recording = False
        config = worker.vllm_config
        self.ranks = parallel.Ranks() if parallel.ranks_of(config) > 1 else None
        self.rank = self.ranks.rank if self.ranks is not None else 0
        self.dummy = config.load_config.load_format == "dummy"
        self.modules = dict(self.port.model.named_modules(remove_duplicate=False))
        self.layers = parallel.Layers(self.modules) if self.ranks is not None else None
        if self.ranks is not None and self.layers is not None:
            parallel.check(config)
            self.layers.compare(self.ranks.agree, self.dummy)
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
            self.layers.meeting |= shards.meeting
            self.layers.recorded |= found.layouts
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
