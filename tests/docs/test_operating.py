"""The tables on the page about operating a server are those of the code."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nnsight_serve.bodies import Bodies
from nnsight_serve.cli import _parser
from nnsight_serve.limits import Limits
from nnsight_serve.metrics import EngineMetrics, Metrics
from tests.docs.test_engine_settings import tables_of

PAGE = Path(__file__).parents[2] / "docs/operating.md"
UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}


def read(default: str) -> str:
    """A default as the code has it."""
    number, _, unit = default.partition(" ")
    return str(int(number) * UNITS[unit]) if unit in UNITS else default


def test_the_page_lists_every_option_with_its_default() -> None:
    listed = {cells[0]: read(cells[1].strip("`")) for cells in tables_of(PAGE)[0]}
    actions = [action for action in _parser()._actions if action.option_strings]
    # vLLM's side has the default taps.
    held = {a.option_strings[0]: "" if a.default is None else str(a.default) for a in actions}
    assert listed == {**held, "--tap": "resid"}


def test_the_page_lists_every_metric_with_its_labels() -> None:
    listed = {name: labels.replace("`", "").split(", ") for name, labels, _ in tables_of(PAGE)[2]}
    metrics = Metrics()
    engine: Any = SimpleNamespace(
        alive=True,
        edits=SimpleNamespace(infos=list),
        metrics=lambda: SimpleNamespace(collect=list),
    )
    counts = dict.fromkeys(("live", "keep_bytes", "blob_bytes", "entries"), 0)
    pulse: Any = SimpleNamespace(counts=counts)
    state = EngineMetrics(engine, pulse, Limits(None, 1), Bodies(1, 1))
    collectors = [*metrics.registry._collector_to_names]
    kept = {
        f"{c._name}{'_total' if c._type == 'counter' else ''}": list(c._labelnames) or [""]  # type: ignore[attr-defined]
        for c in collectors
    }
    assert listed == {**kept, **{metric.name: [""] for metric in state.collect()}}
