"""How the steps of a trace run on an engine, and why, without running them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nnsight_core.backend import Invoke
from nnsight_core.effects import Text, text_of
from nnsight_core.errors import NotATapError
from nnsight_core.scope import call_block, target_names
from nnsight_core.tree import ModelTree
from nnsight_core.wants import NOTHING, Want, Wants, Way, wants_of

_MEANS = {
    Way.PLAIN: "vLLM's own step; nothing of the block runs",
    Way.DEFERRED: "vLLM's own step; the block looks at copies while the next one runs",
    Way.AFTER: "vLLM's own step; the block runs on copies before anything is sampled",
    Way.INTERLEAVED: "compiled, without graphs; the block runs at taps",
    Way.EAGER: "the model's plain Python, where every location is reachable",
}


@dataclass(frozen=True, slots=True)
class Explanation:
    """How the steps of one invoke run.

    Attributes:
        first, later: the prefill, and each later step that the block looks at: the way, the taps
            that it uses, and why no faster way will do.

    Example:
        >>> print(model.explain(tracer))
        step 0: deferred: vLLM's own step; the block looks at copies while the next one runs
    """

    wants: Wants | None

    @property
    def first(self) -> Want:
        return self.wants.at(0) if self.wants else NOTHING

    @property
    def later(self) -> Want:
        return self.wants.at(1) if self.wants else NOTHING

    def __str__(self) -> str:
        return f"step 0: {_line(self.first)}\nlater steps: {_line(self.later)}"


def text_of_invoke(invoke: Invoke) -> Text | None:
    """The text of an invoke's block, if it has one."""
    block = call_block(invoke.function) if invoke.function is not None else invoke.block
    if block is None:
        return None
    return text_of(block.code, block.names, target_names(block.target))


def explain(text: Text | None, tree: ModelTree) -> Explanation:
    """How the steps of an invoke with this block run on an engine with this tree."""
    return Explanation(None if text is None else wants_of(text.effects(tree), tree))


def refuse_untapped(texts: Sequence[Text | None], tree: ModelTree) -> None:
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


def _line(want: Want) -> str:
    why = f" (because {want.why})" if want.why else ""
    return f"{want.way.name.lower()}: {_MEANS[want.way]}{why}"
