"""What a worker holds for tracing, on any rank but the first: nothing of any block."""

from __future__ import annotations

from nnsight_vllm_worker.follower import Follower, FollowerInterleaver, FollowerSteps
from nnsight_vllm_worker.loaded import Loaded
from nnsight_vllm_worker.tables import Tables


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
