"""The traced requests of a worker: from the block that came with one to what is sent home.

A block travels on its request (`SamplingParams.extra_args`), so it is there on every rank when the
request is, and leaves with it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from nnsight_core.code import compile_block
from nnsight_core.current import current_run
from nnsight_core.effects import Effects
from nnsight_core.errors import (
    BlockError,
    BlockTimeout,
    EncodeError,
    EngineError,
    ProtocolError,
    SaveLimitError,
)
from nnsight_core.keeps import Keeper, Keeps
from nnsight_core.locations import RESULT, STEP
from nnsight_core.lowering import Lowered
from nnsight_core.node import Root
from nnsight_core.policy import TRUSTED, Policy
from nnsight_core.run import Run
from nnsight_core.traceback import users_file
from nnsight_core.wants import Way
from nnsight_core.watch import Watch
from nnsight_core.wire.blocks import encode_ended, encode_saved
from nnsight_core.wire.bounded import BoundedEncoder, Room
from nnsight_core.wire.data import Brought, Encoder, bring
from nnsight_core.wire.forms import tagged
from nnsight_core.wire.frames import Frame
from nnsight_core.wire.messages import (
    EndedMessage,
    PrintedMessage,
    WarningData,
)
from nnsight_core.wire.told import Told
from nnsight_vllm_worker.blobs import Store
from nnsight_vllm_worker.known import Blocks, Known
from nnsight_vllm_worker.rows import RowMap
from nnsight_vllm_worker.tables import Full, Table, Tables
from nnsight_vllm_worker.traced import Arrival, Traced
from nnsight_vllm_worker.vllm_ports.ending import Ending
from nnsight_vllm_worker.vllm_ports.scheduling import KEY
from nnsight_vllm_worker.written import LIMIT, Allowance, Written

_log = logging.getLogger(__name__)
EXTRA, EDITS, SEQUENCES, STREAMS = (
    "nnsight",
    "nnsight_edits",
    "nnsight_sequences",
    "nnsight_streams",
)
"""The entries of `extra_args` that hold a request's block, the ids of its edits, into how many
sequences it fans out, and whether its saves are wanted as they are made."""
SENT = "nnsight_sent"
"""The entry that says when it was sent, by the clock of the engine's holder."""
FOREIGN = "foreign-"
"""How the keys of requests begin that came to the engine past us, for whom nobody waits."""


class Tracing:
    """The traced requests of one worker.

    Attributes:
        requests: the blocks of those that take part in forward passes, by the engine's id, in the
            order in which they see a location: edits as they were installed, then its own.
        awaited: the blocks that have not said everything yet, by key, sequence and edit.
        written: what the taps write for each request.
        edits: the blocks that are installed, by id.
        foreign: the keys of requests that came to the engine past us.
        max_saves: how many bytes the saves of one request may have; None for any.
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
        limit: float | None,
        policy: Policy = TRUSTED,
    ) -> None:
        self.tables: Tables
        self.keeps: Keeps
        self.requests: dict[str, list[Traced]] = {}
        self.awaited: dict[tuple[str, int, str], Traced] = {}
        self.written: dict[str, Table] = {}
        self.edits: dict[str, Known] = {}
        self.foreign: set[str] = set()
        self.record: Callable[[str], None] = lambda path: None
        self.max_saves: int | None = None
        self._rooms: WeakValueDictionary[str, Room] = WeakValueDictionary()
        self._recorded: set[str] = set()
        self._watch = watch
        self._rows = rows
        self._store = store
        self._emit = emit
        assert watch.places.tree is not None
        self._tree = watch.places.tree
        self._config = config
        extra = {"print": _print(self.printed)}
        self.blocks = Blocks(root, self._tree, store, pickle, extra, limit, policy)
        self._allowance = Allowance()
        self._brought: Brought = {}
        self._ended: list[Traced] = []
        self._streaming: dict[Traced, None] = {}
        self._show = warnings.showwarning
        warnings.showwarning = self._warned  # type: ignore[assignment]

    @property
    def limit(self) -> float | None:
        """How many seconds a block may run before it gives control back."""
        return self.blocks.limit

    @limit.setter
    def limit(self, seconds: float | None) -> None:
        self.blocks.limit = seconds

    @property
    def live(self) -> int:
        """How many blocks are in the worker."""
        return len(self.awaited)

    @property
    def kept(self) -> int:
        """How many bytes of what blocks wrote are kept."""
        return LIMIT - self._allowance.left

    def come(self, arrival: Arrival) -> None:
        """A request has come; if blocks belong to it, their runs are made ready."""
        extra = arrival.extra
        own, edits = extra.get(EXTRA), extra.get(EDITS) or ()
        if own is None and not edits:
            return
        # vLLM names the sequences of one request by a number before the parent's id.
        several = extra.get(SEQUENCES, 1) > 1
        sequence = int(arrival.request.partition("_")[0]) if several else 0
        key, streams = extra.get(KEY, arrival.request), bool(extra.get(STREAMS))
        if key.startswith(FOREIGN):
            self.foreign.add(key)
        self.keeps.tick(extra.get(SENT, 0.0))
        ready: list[tuple[Traced, Known, Effects]] = []
        blocks = [*edits] if own is None else [*edits, ""]
        for edit in blocks:
            traced = self._traced(arrival, key, sequence, edit)
            self.awaited[key, sequence, edit] = traced
            if streams:
                traced.told = Told()
                self._streaming[traced] = None
            try:
                known = self._known(edit) if edit else self.blocks.of(own or b"")
                ready.append((traced, known, self._ready(traced, known, arrival)))
            except BaseException as error:
                # What cannot be made into a run is an error of this block alone, whatever the
                # user's code raises as it is loaded.
                if KEY in extra or not isinstance(error, ProtocolError):
                    self.fail(traced, error)
                    continue
                # Not from our front ends, and nobody waits for it: the request goes on as a plain
                # one.
                _log.warning(
                    "Request %s carries no block of this version: %s", arrival.request, error
                )
                self.awaited.pop((key, sequence, edit))
                self._streaming.pop(traced, None)
        if ready:
            self.requests[arrival.request] = [traced for traced, _, _ in ready]
            self._lower(arrival.request, ready)
            for rank, (traced, _, _) in enumerate(ready):
                traced.run.rank = rank
            for traced, _, _ in ready if arrival.cached else ():
                self.fail(traced, EngineError(_CACHED.format(arrival.cached)))

    def gone(self, request: str) -> None:
        """A request has left the engine; its blocks may still wait for the finished output."""
        for traced in self.requests.pop(request, ()):
            traced.written.release()
        table = self.written.pop(request, None)
        if table is not None:
            self.tables.release(table)

    def forget(self, key: str) -> None:
        """Drop the blocks of a request that nobody waits for any more."""
        self.foreign.discard(key)
        for place in [p for p in self.awaited if p[0] == key]:
            traced = self.awaited.pop(place)
            traced.sent = True
            self._streaming.pop(traced, None)
            self.gone(traced.request)
            self._drop(traced.run)
            # One that has not begun would, when a pass comes that waits for it.
            traced.run.dead = True
        self.keeps.drop_of(key)

    def end(self, run: Run) -> None:
        """A run has ended; what it brings home is sent when the step is over."""
        if run.error is not None or run.over or not run.recorders:
            self._ended.append(run.key)

    def over(self, traced: Traced) -> None:
        """A request makes no further step, so its caches hold all that they will."""
        self._retire(traced)
        if traced.run.dead and not traced.sent and traced not in self._ended:
            self._ended.append(traced)

    def fail(self, traced: Traced, error: BaseException) -> None:
        """A request cannot be what its block asks for."""
        self._drop(traced.run)
        traced.run.error = error
        traced.run.dead = True
        traced.sent = False
        self._retire(traced)
        self._ended.append(traced)

    def _retire(self, traced: Traced) -> None:
        """A block takes no part in its request any more."""
        left = self.requests.get(traced.request, [])
        if traced not in left:
            return
        left.remove(traced)
        traced.written.release()
        if not left:
            self.gone(traced.request)
        elif traced.lowered is not None and not traced.run.over:
            # What the taps write for the others stays.
            others = [t for t in left if t.lowered is not None]
            try:
                self._write(traced.request, others)
            except Full as error:
                for other in others:
                    other.lowered = None
                    self.fail(other, error)

    def send(self) -> None:
        """Send what has ended, what is new, and of which runs the finished output is waited for."""
        while self._ended:
            # While they are sent, others may fail.
            ended = [t for t in dict.fromkeys(self._ended) if not t.sent]
            self._ended.clear()
            if len(ended) > 1:
                self._bring(ended)
            for traced in ended:
                self._send(traced)
            self._brought = {}
            for traced in ended:
                traced.forget()
        for traced in list(self._streaming):
            self._stream(traced)
        for traced in self.awaited.values():
            if traced.run.waits_for is RESULT and not traced.waits:
                traced.waits = True
                self._emit(EndedMessage(**traced.place, waits=True).frame())

    def _bring(self, ended: list[Traced]) -> None:
        """Copy what blocks bring home from the device in one go, which is waited for once."""
        # If it fails (memory is short), each is tried alone and has its own error.
        with contextlib.suppress(RuntimeError):
            self._brought = bring(value for t in ended for value in t.run.saves.values())

    def _stream(self, traced: Traced) -> None:
        """Say what a block has saved since it was last said, and up to which step that is all."""
        run, steps = traced.run, traced.made
        if run.waits_for is STEP:
            steps = max(steps, run.awaits)
        if run.waits_for is RESULT or (traced.alone and not run.started):
            steps = -1
        if steps == traced.said:
            return
        traced.said = steps
        about = {**traced.place, "made": traced.made, "steps": steps}
        encoded = partial(encode_saved, run, traced.told, self._encoder(traced), **about)
        try:
            self._emit(self.blocks.call(encoded))
        except BaseException as error:
            self.fail(traced, _safe(error))
            self._send(traced)
            traced.forget()

    def _send(self, traced: Traced) -> None:
        run = traced.run
        keeper = run.keeper
        run.error = run.error or self._store.check(traced.blobs)
        run.error = run.error or (keeper.check() if keeper is not None else None)
        try:
            frame = self.blocks.call(self._encoded, traced)
        except BaseException as error:
            # Whatever a block saved or raised, encoding it must not take the engine along. Its own
            # code is not run a second time.
            run.error = _safe(error)
            run.saves.made.clear()
            run.saves.shared.clear()
            traced.notes.clear()
            frame = self._encoded(traced)
        if keeper is not None and keeper.made:
            keeper.settle(handles_of(frame))
        traced.sent = True
        self._streaming.pop(traced, None)
        self.awaited.pop((traced.key, traced.sequence, traced.edit), None)
        if run.error is not None or not (traced.written or traced.lowered or run.recorders):
            self._retire(traced)
        self._emit(frame)

    def _encoded(self, traced: Traced) -> Frame:
        about: dict[str, Any] = {"ways": dict(traced.ways), "seconds": traced.run.seconds}
        if traced.edit:
            about["edit"] = traced.edit
        if traced.told is not None:
            about["made"] = traced.made
        place = (traced.key, traced.sequence)
        encoder = self._encoder(traced)
        return encode_ended(traced.run, *place, traced.notes, traced.told, encoder, **about)

    def _encoder(self, traced: Traced) -> Encoder:
        encoder = Encoder() if traced.room is None else BoundedEncoder(traced.room)
        encoder.brought = self._brought
        return encoder

    def _drop(self, run: Run) -> None:
        (run.interleaver or self._watch.interleaver).drop(run)

    def printed(self, traced: Traced, text: str) -> None:
        """A block printed something."""
        self._emit(PrintedMessage(**traced.place, text=text).frame())

    def close(self) -> None:
        """Let warnings of this process go where they went before."""
        warnings.showwarning = self._show

    # -- inside ----------------------------------------------------------------------------------

    def _traced(self, arrival: Arrival, key: str, sequence: int, edit: str) -> Traced:
        bare = Run(compile_block("    pass\n", "<block>", 1, "block"), {})
        traced = Traced(arrival.request, key, sequence, edit, len(arrival.prompt), bare)
        bare.key = traced
        traced.written = Written(self._rows, self._allowance)
        if self.max_saves is not None:
            # What its sequences and edits save comes home together.
            traced.room = self._rooms.setdefault(key, Room.of(self.max_saves))
        return traced

    def _known(self, edit: str) -> Known:
        known = self.edits.get(edit)
        if known is None:
            raise EngineError(f"The edit {edit} was cleared before the request came to run.")
        return known

    def _ready(self, traced: Traced, known: Known, arrival: Arrival) -> Effects:
        """Make the run of a block for a request that has come."""
        traced.reads = known.block.reads
        traced.known = self._rows.known()
        traced.ending = Ending(arrival.request, arrival.prompt, arrival.params, self._config)
        place = f"{traced.sequence}{traced.edit}"
        keeper = Keeper(self.keeps, traced.key, place)
        traced.run = known.run(traced, traced.blobs, keeper)
        effects, traced.wants = known.reach(traced.run)
        self.look_inside(known, effects)
        return effects

    def look_inside(self, known: Known, effects: Effects) -> None:
        """Have the operations watched that a block's text names."""
        if "source" in known.code.compiled.co_names:
            for path in effects.sources():
                assert self._watch.places.prepare is not None
                self._watch.places.prepare(path)
                if ".source." in path and path not in self._recorded:
                    self._recorded.add(path)
                    self.record(path)

    def _lower(self, request: str, ready: list[tuple[Traced, Known, Effects]]) -> None:
        """Let the taps do the writes of a request's blocks, as far as their order stays the same.

        Taps write before any Python runs at them. So of several blocks, what the first ones write
        may be lowered, up to the first that writes itself, and nothing that an earlier one reads.
        Nor anything beside a block that skips a module, since what it puts there comes first.
        """
        if len(ready) > 1 and any(effects.skips for _, _, effects in ready):
            return
        read: set[str] = set()
        anywhere = False
        lowered: list[tuple[Traced, Known, Lowered]] = []
        for traced, known, effects in ready:
            wants = traced.wants
            if effects.writes_forward:
                found = self.lowered(traced, known) if self._tree.taps else None
                if found is None or any(
                    anywhere or f"{w.path}.output" in read for w in found.writes
                ):
                    break
                lowered.append((traced, known, found))
                wants = known.wants_of_rest(found, traced.run)
            read.update((*wants.first.taps, *wants.later.taps))
            anywhere |= Way.EAGER in (wants.first.way, wants.later.way)
        if not lowered:
            return
        for traced, _, found in lowered:
            traced.lowered = found
        try:
            self._write(request, [traced for traced, _, _ in lowered])
        except Full:
            for traced, _, _ in lowered:
                traced.lowered = None
            return
        for traced, known, found in lowered:
            traced.wants = known.wants_of_rest(found, traced.run)
            traced.run = known.rest(found, traced.run)
            traced.alone = found.alone

    def lowered(self, traced: Traced, known: Known) -> Lowered | None:
        """What the taps can do of a block, if they can do all that it writes."""
        found: Any = None
        if traced.edit:
            # One form for prompts of any length, if there is one.
            found = known.lowered(traced.run, None)
        if not isinstance(found, Lowered):
            found = known.lowered(traced.run, traced.prompt)
        return found if isinstance(found, Lowered) else None

    def _write(self, request: str, blocks: list[Traced]) -> None:
        """Have the taps write for these blocks of a request, and for no others.

        Raises:
            Full: there is no room.
        """
        before = self.written.pop(request, None)
        if before is not None:
            self.tables.release(before)
        if blocks:
            forms = tuple(t.lowered for t in blocks if t.lowered is not None)
            self.written[request] = self.tables.install(forms, blocks[0].prompt)

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
                filename=users_file(filename),
                line=lineno,
            )
        )


def handles_of(frame: Frame) -> list[str]:
    """The ids of the handles that a message brings home; a message without saves brings none."""
    header = frame.header
    forms = tagged(*header.get("saves", {}).values(), *header.get("more", {}).values())
    return [form["id"] for form in forms if form["$"] == "kept"]


_CACHED = "{} tokens of the prompt came from a cache, so the block cannot see it whole."


def _safe(error: BaseException) -> BaseException:
    """An error that can be encoded without running code of the user's."""
    if type(error) in (BlockTimeout, SaveLimitError):
        return error
    texts = [text for text in error.args if type(text) is str]
    if type(error) is EncodeError:
        return EncodeError(*texts)
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
