"""What runs inside vLLM's worker: the extension that vLLM mixes into its own worker class.

vLLM imports this module in every worker (`worker_extension_cls`) and offers the methods below over
its own RPC, on every rank.
"""

from __future__ import annotations

import gc
import multiprocessing
from typing import Any

from nnsight_core.keeps import LIMIT, SECONDS, Keeps
from nnsight_core.policy import TRUSTED_PATH, policy_at
from nnsight_vllm_worker.attached import Attached
from nnsight_vllm_worker.following import Following
from nnsight_vllm_worker.loaded import Loaded
from nnsight_vllm_worker.settings import EXTENSION
from nnsight_vllm_worker.vllm_ports import loading, orphans, scheduling, startup

_SELDOM = 200
"""How many collections of younger objects come before one of all."""


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
        _collect_seldom()
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


def _collect_seldom() -> None:
    """Look for garbage among all objects seldom.

    Python does when there are a quarter more than the last time. vLLM freezes what is there when an
    engine starts, so that is often, where blocks hold many values: it took most of their time.
    """
    if multiprocessing.parent_process() is not None:  # else the process is the user's
        gc.set_threshold(*gc.get_threshold()[:2], _SELDOM)


def _loaded(worker: Any) -> None:
    worker._nnsight_loaded = Loaded(worker)


orphans.end_with_parent()
startup.report_causes()
scheduling.silence()
loading.when_loaded(EXTENSION, _loaded)
