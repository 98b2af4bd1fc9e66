"""Names of sampling arguments: what is unknown is refused with the name that was likely meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnsight_core.backend import Invoke


class SamplingNames:
    """The sampling arguments that a backend knows."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = sorted(names)

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Refuse an unknown argument.

        Raises:
            TypeError: with the nearest known names.
        """
        for name in arguments:
            if name not in self.names:
                near = difflib.get_close_matches(name, self.names, 1, 0.5)
                hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(self.names)}."
                raise TypeError(f"Unknown sampling argument {name!r}. {hint}")

    def check_invokes(self, invokes: Iterable[Invoke]) -> None:
        """Refuse an unknown argument of an invoke; an adapter goes beside what is sampled.

        Raises:
            TypeError: as `check`.
        """
        for invoke in invokes:
            named = normalise(invoke.sampling)
            named.pop("lora_request", None)
            self.check(named)


def normalise(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling arguments under vLLM's names (`max_new_tokens` is `max_tokens`)."""
    named = dict(arguments)
    if "max_new_tokens" in named:
        value = named.pop("max_new_tokens")
        named.setdefault("max_tokens", value)
    return named


def merge(outer: Mapping[str, Any], inner: Mapping[str, Any]) -> dict[str, Any]:
    """A trace's sampling arguments with those of an invoke, which win under either name."""
    names = set(inner)
    if names & _LENGTH:
        names |= _LENGTH
    return {**{name: value for name, value in outer.items() if name not in names}, **inner}


_LENGTH = {"max_tokens", "max_new_tokens"}
