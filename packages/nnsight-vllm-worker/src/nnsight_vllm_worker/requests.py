"""The traced requests of a worker: from the block that came with one to what is sent home.

A block travels on its request (`SamplingParams.extra_args`), so it is there on every rank when the
request is, and leaves with it.
"""

from __future__ import annotations

import builtins
import hashlib
import io
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import orjson
import torch

from nnsight_core.code import compile_block
from nnsight_core.effects import effects_of
from nnsight_core.errors import BlockError, BlockTimeout, EngineError, ProtocolError
from nnsight_core.keeps import Keeper, Keeps
from nnsight_core.locations import RESULT
from nnsight_core.lowering import Lowered, NotLowered
from nnsight_core.node import Root
from nnsight_core.run import Run, current_run
from nnsight_core.wants import lower_at_taps, wants_of
from nnsight_core.watch import Watch
from nnsight_core.watchdog import WATCHDOG
from nnsight_core.wire.blocks import code_of, decode_run, encode_ended
from nnsight_core.wire.code import CodeDecoder
from nnsight_core.wire.forms import tagged
from nnsight_core.wire.frames import Frame, read_frame
from nnsight_core.wire.messages import (
    BlockMessage,
    EndedMessage,
    PrintedMessage,
    WarningData,
    expect,
)
from nnsight_vllm_worker.blobs import Store
from nnsight_vllm_worker.rows import RowMap
from nnsight_vllm_worker.tables import Full, Tables
from nnsight_vllm_worker.traced import Arrival, Traced
from nnsight_vllm_worker.vllm_ports.ending import Ending
from nnsight_vllm_worker.written import LIMIT, Allowance, Written

_log = logging.getLogger(__name__)
_MOST_KNOWN = 256
"""How many blocks are remembered as lowered or not."""
EXTRA = "nnsight"
"""The entry of `extra_args` that holds a request's block."""
SENT = "nnsight_sent"
"""The entry that says when it was sent, by the clock of the engine's holder."""


class Tracing:
    """The traced requests of one worker.

    Attributes:
        requests: those that take part in forward passes, by the engine's id.
        awaited: those whose blocks have not said everything yet, by key and sequence.
        limit: how many seconds a block may run before it gives control back.
        record: finds out about the operations of a function inside a forward, when they are first
            asked for.
    """

    def __init__(
        self,
        root: Root,
        watch: Watch,
        rows: RowMap,
        store: Store,
        emit: Callable[[Frame], None],
        config: Any,
        pickle: bool,
    ) -> None:
        self.tables: Tables
        self.keeps: Keeps
        self.requests: dict[str, Traced] = {}
        self.awaited: dict[tuple[str, int], Traced] = {}
        self.limit: float | None = None
        self.record: Callable[[str], None] = lambda path: None
        self._recorded: set[str] = set()
        self._known: dict[tuple[bytes, int], Lowered | NotLowered] = {}
        self._root = root
        self._watch = watch
        self._rows = rows
        self._store = store
        self._emit = emit
        assert watch.places.tree is not None
        self._tree = watch.places.tree
        self._config = config
        self._pickle = pickle
        self._allowance = Allowance()
        self._ended: list[Traced] = []
        self._extra = {"print": _print(self.printed), "__builtins__": builtins}
        self._show = warnings.showwarning
        warnings.showwarning = self._warned  # type: ignore[assignment]

    @property
    def live(self) -> int:
        """How many blocks are in the worker."""
        return len(self.awaited)

    @property
    def kept(self) -> int:
        """How many bytes of what blocks wrote are kept."""
        return LIMIT - self._allowance.left

    def come(self, arrival: Arrival) -> None:
        """A request has come; if it carries a block, its run is made ready."""
        request = arrival.request
        params: Any = arrival.params
        data = (params and params.extra_args or {}).get(EXTRA)
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
        bare = Run(compile_block("    pass\n", message.block.filename, 1, "block"), {})
        traced = Traced(request, message.key, sequence, len(arrival.prompt), bare)
        bare.key = traced
        self.awaited[traced.key, sequence] = traced
        self.keeps.tick(params.extra_args.get(SENT, 0.0))
        try:
            if arrival.cached:
                raise EngineError(
                    f"{arrival.cached} tokens of the prompt came from a cache, so the block cannot "
                    "see it whole."
                )
            traced.written = Written(self._rows, self._allowance)
            traced.reads = message.block.reads
            traced.known = self._rows.known()
            traced.ending = Ending(request, arrival.prompt, params, self._config)
            traced.run = self._run(message, frame, traced)
        except BaseException as error:
            # What cannot be made into a run is an error of this request alone, whatever the user's
            # code raises as it is loaded.
            self.fail(traced, error)
            self.send()
            return
        self.requests[request] = traced

    def gone(self, request: str) -> None:
        """A request has left the engine; its block may still wait for the finished output."""
        traced = self.requests.pop(request, None)
        if traced is not None:
            traced.written.release()
            if traced.table is not None:
                self.tables.release(traced.table)

    def forget(self, key: str) -> None:
        """Drop the blocks of a request that nobody waits for any more."""
        for place in [p for p in self.awaited if p[0] == key]:
            traced = self.awaited.pop(place)
            traced.sent = True
            self.gone(traced.request)
            self._drop(traced.run)
        self.keeps.drop_of(key)

    def end(self, run: Run) -> None:
        """A run has ended; what it brings home is sent when the step is over."""
        if run.error is not None or run.over or not run.recorders:
            self._ended.append(run.key)

    def over(self, traced: Traced) -> None:
        """A request makes no further step, so its caches hold all that they will."""
        self.gone(traced.request)
        if traced.run.dead and not traced.sent and traced not in self._ended:
            self._ended.append(traced)

    def fail(self, traced: Traced, error: BaseException) -> None:
        """A request cannot be what its block asks for."""
        self._drop(traced.run)
        traced.run.error = error
        traced.run.dead = True
        traced.sent = False
        self.gone(traced.request)
        self._ended.append(traced)

    def send(self) -> None:
        """Send what has ended, and say of which runs the finished output is waited for."""
        for traced in self._ended:
            if not traced.sent:
                self._send(traced)
        self._ended.clear()
        for traced in self.awaited.values():
            if traced.run.waits_for is RESULT and not traced.waits:
                traced.waits = True
                message = EndedMessage(key=traced.key, sequence=traced.sequence, waits=True)
                self._emit(message.frame())

    def _send(self, traced: Traced) -> None:
        run = traced.run
        keeper = run.keeper
        run.error = run.error or self._store.check(traced.blobs)
        run.error = run.error or (keeper.check() if keeper is not None else None)
        try:
            frame = WATCHDOG.call(self.limit, self._encoded, traced)
        except BaseException as error:
            # Whatever a block saved or raised, encoding it must not take the engine along. Its own
            # code is not run a second time.
            run.error = _safe(error)
            run.saves.made.clear()
            run.saves.shared.clear()
            frame = self._encoded(traced)
        if keeper is not None and keeper.made:
            keeper.settle(handles_of(frame))
        traced.sent = True
        self.awaited.pop((traced.key, traced.sequence), None)
        if run.error is not None or not (traced.written or traced.table or run.recorders):
            self.gone(traced.request)
        self._emit(frame)

    def _encoded(self, traced: Traced) -> Frame:
        ways = dict(traced.ways)
        return encode_ended(traced.run, traced.key, traced.sequence, traced.notes, ways)

    def _drop(self, run: Run) -> None:
        (run.interleaver or self._watch.interleaver).drop(run)

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
        keeper = Keeper(self.keeps, traced.key, traced.sequence)

        def blob(digest: str, dtype: str, shape: list[int]) -> torch.Tensor:
            traced.blobs.append(digest)
            return self._store.get(digest, dtype, shape, copy=code.snapshots)

        with torch.inference_mode(False):
            decoder = CodeDecoder(
                frame.buffers,
                self._root,
                blob=blob,
                place=lambda tensor: tensor.to(self._store.device),
                kept=lambda id, name: keeper.get(id, code.snapshots, name),
                pickle=self._pickle,
                extra=self._extra,
            )
            run = WATCHDOG.call(self.limit, decode_run, block, decoder, traced, self._extra)
            run.limit, run.keeper = self.limit, keeper
        effects = effects_of(code, run.scope, self._tree)
        traced.wants = wants_of(effects, self._tree)
        if effects.writes_forward and self._tree.taps:
            run = self._lowered(run, traced, _identity(frame)) or run
        if "source" in code.compiled.co_names:
            for path in effects.sources():
                self._watch.watch_source(path)
                if ".source." in path and path not in self._recorded:
                    self._recorded.add(path)
                    self.record(path)
        return run

    def _lowered(self, run: Run, traced: Traced, digest: bytes) -> Run | None:
        """The run of what is left of a block whose writes the taps do; None if they cannot.

        Args:
            digest: what identifies the block and all that it takes along; empty if nothing does.
        """
        device = self._store.device
        key = (digest, traced.prompt)
        found = self._known.get(key) if digest else None
        if found is None:
            asked = (run.code, run.scope, self._tree, traced.prompt, device)
            found = WATCHDOG.call(self.limit, lower_at_taps, *asked)
            if digest:  # else what the block takes along would stay, and nobody find it again
                self._known[key] = found
            while len(self._known) > _MOST_KNOWN:
                del self._known[next(iter(self._known))]
        if isinstance(found, NotLowered):
            return None
        try:
            traced.table = self.tables.install(found, traced.prompt)
        except Full:
            return None
        traced.wants = wants_of(effects_of(found.rest, run.scope, self._tree), self._tree)
        traced.alone = found.alone
        rest = Run(found.rest, run.scope, traced)
        rest.saves.shared, rest.limit, rest.reader = run.saves.shared, run.limit, True
        rest.keeper = run.keeper
        return rest

    def _warned(self, message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        run = current_run()
        if run is None or not isinstance(run.key, Traced):
            self._show(message, category, filename, lineno, *rest)
            return
        run.key.notes.append(
            WarningData(
                module=category.__module__,
                name=category.__qualname__,
                message=str(message),
                filename=filename,
                line=lineno,
            )
        )


def handles_of(frame: Frame) -> list[str]:
    """The ids of the handles that a message brings home."""
    forms = tagged(*frame.header["saves"].values())
    return [form["id"] for form in forms if form["$"] == "kept"]


_BY_CONTENT = """
    array bool bytes complex device dict dtype ellipsis float int list node operation plain range
    scalar set size slice source tensor text tracer tuple
"""
_TAGS = frozenset(_BY_CONTENT.split())
_CONSTANT = ("math", "numpy", "torch", "torch.nn.functional")


def _identity(frame: Frame) -> bytes:
    """What tells a block and its names from any other; empty if their bytes do not say it all."""
    block = frame.header["block"]
    if not all(_by_content(form) for form in block["names"].values()):
        return b""
    digest = hashlib.blake2b(orjson.dumps(block))
    for buffer in frame.buffers:
        digest.update(buffer)
    return digest.digest()


def _by_content(form: Any) -> bool:
    """Whether a typed value says all of what it is: nothing is imported or unpickled for it."""
    if isinstance(form, list):
        return all(map(_by_content, form))
    if not isinstance(form, dict):
        return True
    if form.get("$") == "pymodule":
        return form["name"] in _CONSTANT
    inner = (form.get("k", ()), form.get("v", ()))
    return form.get("$") in _TAGS and all(_by_content(list(part)) for part in inner)


def _safe(error: BaseException) -> BaseException:
    """An error that can be encoded without running code of the user's."""
    if type(error) is BlockTimeout:
        return error
    texts = [text for text in error.args if type(text) is str]
    kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    return BlockError(f"What the block saved cannot come home: {': '.join([kind, *texts])}")


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
        print(*values, sep=sep, end=end, **{**rest, "file": text})
        printed(run.key, text.getvalue())

    return block_print
