"""Blocks on the wire: from an invoke to its message, and from a message to a run."""

from __future__ import annotations

from typing import Any

from nnsight_core.backend import Ended, Event, Finished, Invoke, Noted, Printed, Saved
from nnsight_core.block_tracer import BLOCK_TRACER
from nnsight_core.capture import Block
from nnsight_core.code import Code, compile_block
from nnsight_core.effects import Effects, effects_of
from nnsight_core.errors import EncodeError, ProtocolError, SaveLimitError
from nnsight_core.policy import TRUSTED, Policy
from nnsight_core.run import Run
from nnsight_core.scope import VALUE, call_block, ended, share, target_names
from nnsight_core.tree import ModelTree
from nnsight_core.wire.code import CodeDecoder, CodeEncoder
from nnsight_core.wire.data import Decoder, Encoder
from nnsight_core.wire.errors import rebuild_error, record_error
from nnsight_core.wire.frames import Frame
from nnsight_core.wire.messages import (
    BlockData,
    EndedMessage,
    FinishedMessage,
    InstalledMessage,
    Message,
    PrintedMessage,
    SavedMessage,
    WarningData,
)
from nnsight_core.wire.told import News, Told


def encode_block(invoke: Invoke, encoder: CodeEncoder) -> BlockData | None:
    """An invoke's block as data; None if it has none.

    Raises:
        EncodeError: a name that it needs holds what cannot be shipped.
    """
    call = invoke.function is not None
    block = call_block(invoke.function) if call else invoke.block
    if block is None:
        return None
    code = block.code
    names: dict[str, Any] = {}
    for name, value in block.names.items():
        try:
            names[name] = encoder.encode(value, name)
        except EncodeError as error:
            line = code.names.needs.get(name, code.line)
            place = "the function given as `fn=`" if call else f"{code.filename}:{line}"
            raise EncodeError(f"{place}: {error}") from error.__cause__
    return BlockData(
        source=code.source,
        filename=code.filename,
        line=code.line,
        function=code.function,
        names=names,
        targets=target_names(block.target),
        lazy=code.lazy,
        shared=block.shared,
        **_reach(block),
    )


def _reach(block: Block) -> dict[str, Any]:
    """What a block does to its prompt, read from its text: see `BlockData.whole` and `reads`."""
    effects = effects_of(block.code, block.names, targets=target_names(block.target))
    if effects.writes_forward or effects.reads_anywhere:
        return {"whole": True}
    return {"whole": False, "reads": effects.forward_reads()}


def check_block(invoke: Invoke, tree: ModelTree | None) -> Effects | None:
    """What an invoke's block may touch, checked against the tree if that is known.

    Raises:
        LocationError: its text surely names a location that does not exist.
    """
    if invoke.block is None:
        return None
    block = invoke.block
    effects = effects_of(block.code, block.names, tree, target_names(block.target))
    if tree is not None and not tree.provisional:
        effects.check(tree, invoke.block.code)
    return effects


def code_of(data: BlockData, policy: Policy = TRUSTED) -> Code:
    """The compiled code of a block that came over the wire."""
    place = (data.filename, data.line, data.function, data.lazy)
    return compile_block(data.source, *place, policy)


def decode_run(data: BlockData, decoder: CodeDecoder, key: Any, extra: dict[str, Any]) -> Run:
    """The run of a block that came over the wire."""
    return run_with(data, code_of(data), decode_names(data, decoder), key, extra)


def decode_names(data: BlockData, decoder: CodeDecoder) -> dict[str, Any]:
    """What the names of a block that came over the wire hold.

    Raises:
        ProtocolError: one of them cannot be made here.
    """
    names: dict[str, Any] = {}
    for name, value in data.names.items():
        try:
            names[name] = decoder.decode(value)
        except ProtocolError as error:
            raise ProtocolError(
                f"What the block uses as {name!r} cannot be made where the block runs: {error}"
            ) from error.__cause__
    decoder.forget()
    return {**names, **dict.fromkeys(data.targets, BLOCK_TRACER)}


def run_with(
    data: BlockData, code: Code, names: dict[str, Any], key: Any, extra: dict[str, Any]
) -> Run:
    """The run of a block that came over the wire, whose names hold what was decoded."""
    run = Run(code, {**extra, **names}, key)
    run.reader = not data.whole
    share(run, data.shared)
    return run


def encode_ended(
    run: Run,
    key: str,
    sequence: int,
    notes: list[WarningData],
    told: Told | None = None,
    encoder: Encoder | None = None,
    **about: Any,
) -> Frame:
    """The message that a run has ended; what cannot come home becomes the run's error.

    Args:
        told: what was told of its saves before, if they are streamed.
        encoder: takes what it saved.
        **about: the other fields of the message.

    Raises:
        EncodeError: it is more than a message may have, or cannot be said in one.
    """
    result = ended(run, 0, sequence)
    if result.value is not None:
        result.saves[VALUE] = result.value
    news = News(result.saves, {}, []) if told is None else told.rest(result.saves)
    encoder = encoder or Encoder()
    saves, more, refused = _encoded(news, encoder)
    error = result.error or refused
    message = EndedMessage(
        key=key,
        sequence=sequence,
        saves=saves,
        more=more,
        gone=news.gone,
        error=record_error(error, encoder) if error is not None else None,
        warnings=[*notes, *(_warning(n) for n in result.warnings)],
        **about,
    )
    return _sealed(message, encoder)


def encode_saved(run: Run, told: Told, encoder: Encoder | None = None, **about: Any) -> Frame:
    """The message that says what a run has saved since the last one.

    What cannot come home is left for the end of the run, whose error it is then.

    Args:
        encoder: takes what it has saved.
        **about: the other fields of the message.

    Raises:
        SaveLimitError: it is more than may come home.
    """
    news = News({}, {}, [])
    # A handle comes home once; so what is beside it comes with the end of the run, too.
    if run.keeper is None or not run.keeper.made:
        found, _ = run.saves.outcome(run.scope)
        found.pop(VALUE, None)  # what a function gives back is there when it ends
        news = told.news(found)
    encoder = encoder or Encoder()
    saves, more, refused = _encoded(news, encoder)
    if isinstance(refused, SaveLimitError):
        raise refused
    told.went(news, {**saves, **more})
    return _sealed(SavedMessage(saves=saves, more=more, gone=news.gone, **about), encoder)


def _sealed(message: Message, encoder: Encoder) -> Frame:
    """The frame of a message, which surely can be sent."""
    frame = message.frame(encoder.buffers)
    frame.seal()
    return frame


def _encoded(
    news: News, encoder: Encoder
) -> tuple[dict[str, Any], dict[str, Any], EncodeError | None]:
    """News as typed values, and an error for what is no data."""
    encoder.pack(*news.saves.values(), *news.more.values())
    error: EncodeError | None = None
    made: list[dict[str, Any]] = [{}, {}]
    for forms, values in zip(made, (news.saves, news.more), strict=True):
        for name, value in values.items():
            try:
                forms[name] = encoder.encode(value, name)
            except EncodeError as refused:
                error = error or refused
    return made[0], made[1], error


def decode_event(message: Message, frame: Frame, invoke: int, known: list[type]) -> Event:
    """What a message says happened, as the front end takes it.

    Args:
        known: exception classes that the block's names hold.
    """
    match message:
        case PrintedMessage():
            return Printed(invoke, message.text, message.edit)
        case SavedMessage():
            decoder = Decoder(frame.buffers, own=True)
            saves = {name: decoder.decode(v) for name, v in message.saves.items()}
            more = {name: decoder.decode(v) for name, v in message.more.items()}
            decoder.forget()
            place = (invoke, message.sequence, message.steps)
            return Saved(*place, saves, more, message.gone, message.edit)
        case EndedMessage():
            decoder = Decoder(frame.buffers, own=True)
            saves = {name: decoder.decode(v) for name, v in message.saves.items()}
            more = {name: decoder.decode(v) for name, v in message.more.items()}
            decoder.forget()
            error = None
            if message.error is not None:
                error = rebuild_error(message.error, frame.buffers, known)
            notes = [
                Noted(w.category(known), w.message, w.filename, w.line) for w in message.warnings
            ]
            return Ended(
                invoke,
                message.sequence,
                saves,
                more,
                message.gone,
                saves.pop(VALUE, None),
                error,
                notes,
                message.ways,
                message.edit,
                message.seconds,
            )
        case FinishedMessage():
            error = None
            if message.error is not None:
                error = rebuild_error(message.error, frame.buffers, known)
            return Finished(invoke, message.output, error)
    raise TypeError(type(message))


def refusal_of(message: InstalledMessage, frame: Frame, invoke: Invoke) -> BaseException:
    """The error for which an edit was not installed, as it was raised there."""
    assert message.error is not None
    return rebuild_error(message.error, frame.buffers, known_errors(invoke))


def known_errors(invoke: Invoke) -> list[type]:
    """The exception classes that a block's names hold."""
    values = invoke.block.names.values() if invoke.block is not None else ()
    return [v for v in values if isinstance(v, type) and issubclass(v, BaseException)]


def _warning(note: Noted) -> WarningData:
    return WarningData(
        module=note.category.__module__,
        name=note.category.__qualname__,
        message=note.message,
        filename=note.filename,
        line=note.line,
    )
