"""Effects: what a block may read and write, from its text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nnsight_core import LocationError, TorchModel
from nnsight_core.code import compile_block
from nnsight_core.effects import Effects, effects_of


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.mlp(self.norm(x))
        return x + inner


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


model = TorchModel(Net())


def effects(text: str, **names: Any) -> Effects:
    code = compile_block("".join(f" {line}\n" for line in text.split("\n")), "user.py", 5, "f")
    return effects_of(code, {"model": model, "torch": torch, **names}, model.tree)


def reads(text: str, **names: Any) -> list[str]:
    return list(dict.fromkeys(_text(a) for a in effects(text, **names).reads))


def writes(text: str, **names: Any) -> list[str]:
    return list(dict.fromkeys(_text(a) for a in effects(text, **names).writes))


def _text(access: Any) -> str:
    return f"{access.path}.{access.side}" if access.path else access.side


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = model.head.output.save()", ["head.output"]),
        ("x = model.layers[1].mlp.input", ["layers.1.mlp.input"]),
        ("x = model.layers[-1].inputs", ["layers.3.input"]),
        ("a = model.logits; b = model.samples", ["logits", "samples"]),
        ("h = model.head; h = h.output if True else h.input", ["head.output", "head.input"]),
        ("l = model.layers[0]; l.mlp.input; l.output", ["layers.0.mlp.input", "layers.0.output"]),
        ("x = model.layers[i].output", ["layers.*.output"]),
        ("for l in model.layers: l.output", ["layers.*.output"]),
        ("for l in model.layers[1:3]: l.mlp.output", ["layers.*.mlp.output"]),
        ("for i, l in enumerate(model.layers): l.output", ["layers.*.output"]),
        ("ms = model.layers[1:3]\nms[1].mlp.output", ["layers.*.mlp.output"]),
        ("a, b = model.layers[1], model.layers[2]\nb.output", ["layers.*.output"]),
        ("a, *b = model.layers[0], model.layers[2]\nb[0].output", ["layers.*.output"]),
        ("ps = [(model.layers[1], v), (model.layers[2], v)]\nps[1][0].output", ["layers.*.output"]),
        ("ps = [(model.layers[1], v)]\nfor l, v in ps: l.output", ["layers.1.output"]),
        ("ps = [[model.layers[1]], model.layers[2]]\nps[1].output", ["?.output"]),
        ("for l, v in zip(model.layers, vs): l.output", ["layers.*.output"]),
        ("xs = [l.output for l in model.layers]", ["layers.*.output"]),
        ("xs = [l.mlp for l in model.layers]\n[m.output for m in xs]", ["layers.*.mlp.output"]),
        ("for l in (model.layers[0], model.layers[2]): l.output", ["layers.*.output"]),
        ("ls = []\nls.append(model.layers[1])\nls[0].output", ["layers.1.output"]),
        ("def f(): return model.head.output\nf()", ["head.output"]),
        ("f = lambda: model.head.output", ["head.output"]),
        ("while model.head.output.sum() > 0: pass", ["head.output"]),
        ("try: model.head.output\nexcept E: model.logits", ["head.output", "logits"]),
        ("with open(model.head.output): model.logits", ["head.output", "logits"]),
        ("x = {'a': model.head.output}['a']", ["head.output"]),
        ("x = model.layers[0].source.self_mlp_0.output", ["layers.0.source.self_mlp_0.output"]),
        ("model.head", []),
    ],
)  # fmt: skip
def test_reads(text: str, expected: list[str]) -> None:
    assert reads(text, i=1, vs=[1]) == expected
    assert writes(text, i=1, vs=[1]) == [] or "open" in text


def test_reads_through_names_that_hold_nodes() -> None:
    assert reads("layer.mlp.output", layer=model.layers[2]) == ["layers.2.mlp.output"]
    some = [model.layers[0], model.layers[2]]
    assert reads("for l in some: l.output", some=some) == ["layers.*.output"]
    assert reads("some[0].output", some=some) == ["layers.*.output"]
    assert reads("s.self_mlp_0.output", s=model.layers[0].source) == [
        "layers.0.source.self_mlp_0.output"
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model.head.output = v", ["head.output"]),
        ("model.head.input = v", ["head.input"]),
        ("model.head.inputs = v", ["head.input"]),
        ("model.logits = v", ["logits"]),
        ("model.head.output[:] = 0", ["head.output"]),
        ("model.head.output[0][1] += 1", ["head.output"]),
        ("model.head.output += 1", ["head.output"]),
        ("h = model.head.output\nh *= 2", ["head.output"]),
        ("h = model.head.output\nh[0].mul_(2)", ["head.output"]),
        ("h = model.head.output\nv = h.view(-1)\nv[0] = 1", ["head.output"]),
        ("h = model.head.output\nh.data = v", ["head.output"]),
        ("h = model.head.output\ntorch.add(h, 1, out=h)", ["head.output"]),
        ("a, b = model.head.output\nb[0] = 1", ["head.output"]),
        ("for l in model.layers: l.output[:] = 0", ["layers.*.output"]),
        ("xs = [l.output for l in model.layers]\nxs[0][:] = 0", ["layers.*.output"]),
        ("xs = []\nxs.append(model.head.output)\nxs[0][:] = 0", ["head.output"]),
        ("if c: h = model.head.output\nelse: h = None\nh[:] = 0", ["head.output"]),
        ("h = model.head.output\nfor i in r:\n h[0] = 1\n h = None", ["head.output"]),
        ("h = None\nwhile c:\n if h: h[0] = 1\n h = model.head.output", ["head.output"]),
        ("helper(model.head.output)", ["head.output"]),
        ("helper.change(model.head.output)", ["head.output"]),
        ("model.layers[1].skip(v)", ["layers.1.output"]),
        ("def f(h): h[:] = 0\nf(model.head.output)", ["head.output"]),
        ("(h := model.head.output)[:] = 0", ["head.output"]),
    ],
)  # fmt: skip
def test_writes(text: str, expected: list[str]) -> None:
    assert writes(text, v=1, c=1, r=[1]) == expected


@pytest.mark.parametrize(
    "text",
    [
        "h = model.head.output\nh = h + 1\nh[:] = 0",
        "h = model.head.output.clone()[0] + 1; h += 1",
        "x = torch.relu(model.head.output).save()",
        "x = float(model.head.output.sum())",
        "x = model.head.output.norm(dim=-1).tolist()",
    ],
)
def test_what_is_no_write(text: str) -> None:
    assert reads(text) == ["head.output"] and writes(text) == []


def test_code_that_cannot_be_seen_makes_a_block_opaque() -> None:
    assert effects("helper(model.head)").opaque
    assert effects("helper.read(model.head)").opaque
    assert effects("helper()").opaque
    assert not effects("x = len(torch.relu(model.head.output))").opaque
    assert not effects("model.head(model.logits)").opaque


def test_an_access_knows_its_line() -> None:
    found = effects("x = 1\nmodel.head.output = model.layers[0].output")
    assert {a.line for a in found.reads} == {6} == {a.line for a in found.writes}


def test_sources_name_the_modules_whose_operations_are_touched() -> None:
    found = effects("model.layers[0].source.inner_0.output; model.layers[i].source.x_0.input")
    assert found.sources() == ["layers.0"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model.layers[0].mpl.output", r"user\.py:5: Net has no module 'layers\.0\.mpl'.*0\.mlp"),
        ("x = 1\nmodel.layers[9].output", r"user\.py:6: .*'layers\.9'"),
        ("model.layers[0].source.self_mpl_0.output", r"no operation 'self_mpl_0'.*self_mlp_0"),
    ],
)  # fmt: skip
def test_what_cannot_exist_is_refused_with_its_line_and_the_nearest(
    text: str, message: str
) -> None:
    code = compile_block("".join(f" {t}\n" for t in text.split("\n")), "user.py", 5, "f")
    with pytest.raises(LocationError, match=message):
        effects_of(code, {"model": model}, model.tree).check(model.tree, code)


def test_what_may_exist_is_not_refused() -> None:
    text = " model.layers[i].mpl.output\n model.head.weight\n unknown.mpl.output\n"
    code = compile_block(text, "user.py", 5, "f")
    effects_of(code, {"model": model}, model.tree).check(model.tree, code)
