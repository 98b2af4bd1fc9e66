"""What a trace costs on a plain PyTorch module, next to nnsight 0.8.1.

The model is as small as a model can be, so that nearly all the time is the tracing itself. The same
blocks run in both engines.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.table import Table, typical_difference, typical_ratio
from bench.turns import Engine, Measured, Turn, take_turns

BOTH = OURS, RIVAL = "nnsight-core", "nnsight 0.8.1"
ROUNDS = 80
INVOKES = 10


class Layers(nn.Module):
    """Twelve small linear layers, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def cases(wrap: Callable[[nn.Module], Any], save: Callable[[Any], Any]) -> dict[str, Any]:
    """What an engine is asked to run; `wrap` makes of a module what can be traced."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    plain, model = Layers(), wrap(Layers())
    x, rows = torch.ones(1, 16), torch.ones(INVOKES, 16)

    def empty() -> None:
        with model.trace(x):
            pass

    def one_read() -> Tensor:
        with model.trace(x):
            hidden = model.layers[5].output.save()
        return hidden

    def twelve_reads() -> list[Tensor]:
        with model.trace(x):
            hidden = save([layer.output for layer in model.layers])
        return hidden

    def one_write() -> None:
        with model.trace(x):
            model.layers[5].output[:] = 0

    def ten_invokes() -> Any:
        with model.trace() as tracer:
            for _ in range(INVOKES):
                with tracer.invoke(x):
                    hidden = model.layers[5].output.save()
        return hidden

    def ten_on_one_prompt() -> Any:
        """What the rival's plain wrapper offers: the invokes after the first bring no prompt."""
        with model.trace() as tracer:
            with tracer.invoke(x):
                hidden = model.layers[5].output.save()
            for _ in range(INVOKES - 1):
                with tracer.invoke():
                    hidden = model.layers[5].output.save()
        return hidden

    def ten_traces() -> Tensor:
        for _ in range(INVOKES):
            with model.trace(x):
                hidden = model.layers[5].output.save()
        return hidden

    def ten_forwards() -> None:
        for _ in range(INVOKES):
            plain(x)

    return {
        "forward": lambda: plain(x),
        "ten forwards": ten_forwards,
        "forward of ten rows": lambda: plain(rows),
        "empty block": empty,
        "one read": one_read,
        "twelve reads": twelve_reads,
        "one write": one_write,
        "ten invokes": ten_invokes,
        "ten invokes on one prompt": ten_on_one_prompt,
        "ten traces": ten_traces,
    }


def measure() -> Measured:
    """Both engines, in turns."""
    # Here and not above, since this module also runs in the rival's environment.
    from bench.rival import rival_python

    engines = {
        OURS: Engine("bench.engines.nnsight_core", ("nnsight-core", "torch"), Path(sys.executable)),
        RIVAL: Engine("bench.engines.nnsight_081", ("nnsight", "torch"), rival_python()),
    }
    turns = [
        Turn("forward", 200, BOTH),
        Turn("empty block", 100, BOTH),
        Turn("one read", 100, BOTH),
        Turn("twelve reads", 50, BOTH),
        Turn("one write", 100, BOTH),
        Turn("ten forwards", 20, BOTH),
        Turn("forward of ten rows", 200, (RIVAL,)),
        Turn("ten invokes", 20, BOTH),
        Turn("ten invokes on one prompt", 20, (RIVAL,)),
        Turn("ten traces", 20, BOTH),
    ]
    return take_turns(engines, turns, ROUNDS)


ROWS = (
    ("empty block", ("empty block", "forward"), ("empty block", "forward")),
    ("one read", ("one read", "forward"), ("one read", "forward")),
    ("twelve reads", ("twelve reads", "forward"), ("twelve reads", "forward")),
    ("one write", ("one write", "forward"), ("one write", "forward")),
    (
        "ten invokes (one batch there)",
        ("ten invokes", "ten forwards"),
        ("ten invokes", "forward of ten rows"),
    ),
    (
        "ten invokes (one prompt there)",
        ("ten invokes", "ten forwards"),
        ("ten invokes on one prompt", "forward"),
    ),
    ("ten traces", ("ten traces", "ten forwards"), ("ten traces", "ten forwards")),
)
"""A row's name, then for ours and for the rival a case and the plain forwards that it runs."""


def table(measured: Measured) -> Table:
    """Each case over the plain forwards that it runs, in the same process and round."""
    rows = []
    for name, *sides in ROWS:
        cells, added = [], []
        for engine, (case, plain) in zip(BOTH, sides, strict=True):
            took = measured.seconds[case][engine]
            base = measured.seconds[plain][engine]
            added.append(typical_difference(took, base) * 1e6)
            cells += [f"{added[-1]:.0f}", f"{typical_ratio(took, base):.2f}"]
        rows.append([name, *cells, f"{added[0] / added[1]:.2f}"])
    titles = [text for e in BOTH for text in (f"{e}: µs over the forward", "ratio to it")]
    return Table(["", *titles, "ours / theirs"], rows)
