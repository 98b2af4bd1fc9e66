"""Prompts as users give them: one, several, or none."""

from __future__ import annotations

from typing import Any

NO_PROMPT: Any = object()


def prompts_of(prompts: Any) -> list[Any]:
    """The prompts of a generation: those of a list, or the one that was given (token ids are)."""
    several = isinstance(prompts, list) and not all(isinstance(p, int) for p in prompts)
    return prompts if several else [prompts]
