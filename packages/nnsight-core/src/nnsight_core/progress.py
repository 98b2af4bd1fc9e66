"""A progress bar over many prompts, as vLLM shows one."""

from __future__ import annotations

from typing import Any

from nnsight_core.backend import Event, Finished


class Bar:
    """Counts finished prompts and the tokens that they made.

    Args:
        total: how many prompts there are.
    """

    def __init__(self, total: int) -> None:
        from tqdm.auto import tqdm

        self._bar: Any = tqdm(total=total, desc="Processed prompts", dynamic_ncols=True)
        self._tokens = 0

    def take(self, event: Event) -> None:
        """Count what has finished."""
        if isinstance(event, Finished):
            output = event.output
            self._tokens += sum(len(o.token_ids) for o in output.outputs) if output else 0
            rate = self._tokens / max(self._bar.format_dict["elapsed"], 1e-9)
            self._bar.set_postfix_str(f"output: {rate:.2f} toks/s", refresh=False)
            self._bar.update()

    def close(self) -> None:
        self._bar.close()
