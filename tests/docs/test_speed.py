"""What the page about speed says in its tables and numbers is what the code does."""

import re
from pathlib import Path

import pytest
import torch

from nnsight_core import TorchModel
from nnsight_core.code import compile_block
from nnsight_core.effects import text_of
from nnsight_core.explain import Explanation, Read, explain
from nnsight_core.taps import resolve
from nnsight_core.tree import TensorInfo
from nnsight_core.wants import Way
from nnsight_vllm_worker import taps
from nnsight_vllm_worker.vllm_ports import breaks
from tests.docs.test_engine_settings import tables_of

PAGE = Path(__file__).parents[2] / "docs/speed.md"
WAYS, LOWERED, PYTHON = tables_of(PAGE)
WIDTH = 96


class Net(torch.nn.Module):
    """Modules with the names of GPT-2's."""

    def __init__(self) -> None:
        super().__init__()
        layers = (torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH)) for _ in range(12))
        self.transformer = torch.nn.ModuleDict({"h": torch.nn.ModuleList(layers)})


def explained(code: str) -> Explanation:
    """How an example of the page runs on a compiled engine with the default taps."""
    model = TorchModel(Net())
    pair = "output[0]" in code or "residual" in code
    infos = [
        TensorInfo(at=f"[{i}]" if pair else "", dtype="float32", shape=("tokens", WIDTH))
        for i in range(2 if pair else 1)
    ]
    modules = {
        path: info.model_copy(update={"output": tuple(infos)} if path[-1:].isdigit() else {})
        for path, info in model.tree.modules.items()
    }
    tree = model.tree.model_copy(update={"modules": modules, "compiled": True})
    tree = tree.model_copy(update={"taps": tuple(resolve(tree, "resid"))})
    assert len(tree.taps) == 12
    lines = [code]
    if "residual" in code:
        lines.insert(0, "hidden, residual = layer.output")
    elif "hidden" in code:
        lines.insert(0, "hidden = layer.output")
    if not code.startswith("for step"):
        lines = ["for step in tracer.all():", *(f"    {line}" for line in lines)]
    d = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0))
    names = {"model": model, "layer": model.transformer.h[4], "torch": torch, "v": d, "d": d}
    names["tracer"] = model.trace(torch.zeros(1))
    source = "".join(f"    {line}\n" for line in lines)
    text = text_of(compile_block(source, str(PAGE), 1, "block"), names)
    assert text.effects(tree).writes_forward, code
    return explain(Read(text, names), tree)


@pytest.mark.parametrize("code", [code for _, code in LOWERED])
def test_what_is_said_to_be_done_by_taps_is(code: str) -> None:
    found = explained(code)
    assert found.writes and not found.reasons, found
    assert found.first.way <= Way.DEFERRED and found.later.way <= Way.DEFERRED


@pytest.mark.parametrize(("what", "code"), PYTHON)
def test_what_is_said_to_be_done_by_python_is(what: str, code: str) -> None:
    found = explained(code)
    assert found.reasons and not found.writes, found
    assert found.first.way is (Way.EAGER if "eager" in what else Way.INTERLEAVED)


def test_the_ways_are_those_of_the_code_from_the_fastest_to_the_freest() -> None:
    named = [name for name, _, _ in WAYS]
    assert [name for name in named if name != "tables"] == [way.name.lower() for way in Way]


def test_the_numbers_are_those_of_the_code() -> None:
    text = re.sub(r"\s+", " ", PAGE.read_text(encoding="utf-8"))
    assert f"up to {taps.MOST_BYTES >> 20} MiB, or {taps.FEWEST} slots each" in text
    assert f"never more than {taps.MOST} slots" in text
    assert f"{taps.ENTRIES} entries" in text
    assert f"up to {breaks._MOST} of them" in text
