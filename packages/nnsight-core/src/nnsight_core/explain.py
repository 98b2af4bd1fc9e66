"""How the steps of a trace run on an engine, and why, without running them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nnsight_core.backend import Invoke
from nnsight_core.effects import Text, effects_of, text_of
from nnsight_core.errors import NotATapError
from nnsight_core.kept import stand_in, with_handles
from nnsight_core.lowering import NotLowered
from nnsight_core.scope import call_block, scope_of, target_names
from nnsight_core.tree import ModelTree
from nnsight_core.wants import NOTHING, Want, Wants, Way, lower_at_taps, wants_of

_MEANS = {
    Way.PLAIN: "vLLM's own step; nothing of the block runs",
    Way.DEFERRED: "vLLM's own step; the block looks at copies while the next one runs",
    Way.AFTER: "vLLM's own step; the block runs on copies before anything is sampled",
    Way.INTERLEAVED: "compiled; the block runs at its taps, at which CUDA graphs break",
    Way.EAGER: "the model's plain Python, where every location is reachable",
}


_WRITES = "taps write in it, and what is left of the block looks at copies"


@dataclass(frozen=True, slots=True)
class Explanation:
    """How the steps of one invoke run.

    Attributes:
        first, later: the prefill, and each later step that the block looks at: the way, the taps
            that it uses, and why no faster way will do.
        writes: what the taps write for it, so that no Python has to.
        reasons: why its writes are not done so.

    Example:
        >>> print(model.explain(tracer))
        step 0: deferred: vLLM's own step; the block looks at copies while the next one runs
    """

    wants: Wants | None
    writes: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def first(self) -> Want:
        return self.wants.at(0) if self.wants else NOTHING

    @property
    def later(self) -> Want:
        return self.wants.at(1) if self.wants else NOTHING

    def __str__(self) -> str:
        later = self.wants is not None and self.wants.loops
        lines = [f"step 0: {_line(self.first, bool(self.writes))}"]
        lines += [f"later steps: {_line(self.later, later and bool(self.writes))}"]
        lines += [f"written by taps: {write}" for write in self.writes]
        lines += [f"not written by taps: {reason}" for reason in self.reasons]
        return "\n".join(lines)


class Read(NamedTuple):
    """A block's text, and if it writes in the forward pass what its names hold."""

    text: Text
    names: dict[str, Any] | None


def read_invoke(invoke: Invoke) -> Read | None:
    """What is known of an invoke's block, if it has one."""
    block = call_block(invoke.function) if invoke.function is not None else invoke.block
    if block is None:
        return None
    text = text_of(block.code, block.names, target_names(block.target))
    effects = text.effects()
    # What is handed to unknown code is not lowered, so it need not be held.
    if not effects.writes_forward or effects.opaque:
        return Read(text, None)
    # Handles are not held either: what they stand for would stay as long as the finished tracer.
    names = {name: with_handles(value, stand_in) for name, value in scope_of(block).items()}
    return Read(text, names)


def explain(read: Read | None, tree: ModelTree) -> Explanation:
    """How the steps of an invoke with this block run on an engine with this tree."""
    if read is None:
        return Explanation(None)
    wants = wants_of(read.text.effects(tree), tree)
    if read.names is None or not tree.taps:
        return Explanation(wants)
    code, names = read.text.code, read.names
    found = lower_at_taps(code, names, tree, None, "cpu")
    if isinstance(found, NotLowered):
        return Explanation(wants, (), tuple(str(found).splitlines()))
    wants = wants_of(effects_of(found.rest, names, tree), tree)
    return Explanation(wants, tuple(str(write) for write in found.writes))


def refuse_untapped(texts: Sequence[Read | None], tree: ModelTree) -> None:
    """Refuse what would run a step eagerly.

    Raises:
        NotATapError: with the line and the location.
    """
    for text in texts:
        found = explain(text, tree)
        for want in (found.first, found.later):
            if want.way is Way.EAGER:
                raise NotATapError(
                    f"{want.why}, so a step would run the model's plain Python, and only_taps=True "
                    f"forbids that. Taps of this engine: {', '.join(tree.taps) or 'none'}."
                )


def _line(want: Want, written: bool) -> str:
    if written and want.way is Way.DEFERRED:
        return f"tables: vLLM's own step; {_WRITES}"
    why = f" (because {want.why})" if want.why else ""
    return f"{want.way.name.lower()}: {_MEANS[want.way]}{why}"
