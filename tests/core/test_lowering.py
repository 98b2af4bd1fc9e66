"""Lowering: each write that becomes data does what the block's Python does, and no other is."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from nnsight_core import LoopOverrunWarning, TorchModel
from nnsight_core.capture import Block
from nnsight_core.code import Code, compile_block
from nnsight_core.locations import LOGITS, SAMPLES, Phase
from nnsight_core.lowering import lower
from nnsight_core.lowering.affine import Affine, Lowered, NotLowered, regions_meet
from nnsight_core.run import Run
from nnsight_core.scope import ended, scope_of
from nnsight_core.tree import ModelTree, TensorInfo

WIDTH, ROWS, STEPS = 6, 4, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual + self.attn(hidden)
        return self.mlp(residual), residual + 1


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.twice = nn.ReLU()
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        residual = hidden
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
        return self.head(self.twice(hidden) + self.twice(residual))


ORDER = ["embed"]
ORDER += [f"layers.{i}{part}" for i in range(4) for part in (".attn", ".mlp", "")] + ["head"]


@dataclass
class Machine:
    """A model whose steps can be run with a table of writes, before a block sees a value."""

    dtype: torch.dtype = torch.float32
    writes: list[Affine] = field(default_factory=list)
    step: int = 0

    def __post_init__(self) -> None:
        module = Net(self.dtype)
        for path, part in module.named_modules():
            if path:
                part.forward = self.with_writes(path, part.forward)  # type: ignore[method-assign]
        self.model = TorchModel(module)
        self.tree = recorded(self.model.tree, self.dtype)

    def with_writes(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def written(*args: Any) -> Any:
            value = forward(*args)
            for write in self.writes:
                if write.path == path and self.step in write.steps:
                    apply(write, value[write.index] if isinstance(value, tuple) else value)
            return value

        return written

    def run(self, code: Code, names: dict[str, Any], writes: Any = ()) -> Result:
        backend: Any = self.model._backend
        interleaver = backend.interleaver
        names = {"model": self.model, **names, "tracer": self.model.trace(torch.zeros(1))}
        run = Run(code, scope_of(Block(code, names)), 0)
        outputs: list[Tensor] = []
        # As tables do, which copy what they are given before any block runs.
        self.writes = [replace(w, operand=copied(w.operand), along=copied(w.along)) for w in writes]
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for self.step in range(STEPS):
                run.step = self.step
                x = torch.randn(1 if self.step else ROWS, WIDTH, generator=generator)
                interleaver.begin((run,))
                out = backend.module(x.to(self.dtype))
                interleaver.advance(Phase.LOGITS)
                logits = interleaver.arrive(LOGITS, out[-1:].clone())
                interleaver.advance(Phase.SAMPLES)
                interleaver.arrive(SAMPLES, logits.argmax(-1))
                interleaver.advance(Phase.RESULT)
                outputs += [out, logits]
                if run.stopping or run.error is not None:
                    break
            interleaver.finish(run)
            interleaver.drop(run)
        result = ended(run, 0)
        notes = [(note.category, note.line, str(note.message)) for note in result.warnings]
        saves = {k: s for k, s in result.saves.items() if isinstance(s, Tensor | list)}
        return Result(outputs, saves, notes, run.error)


@dataclass
class Result:
    outputs: list[Tensor]
    saves: dict[str, Any]
    notes: list[Any]
    error: BaseException | None


def recorded(tree: ModelTree, dtype: torch.dtype) -> ModelTree:
    """The tree as an engine records it."""
    name = str(dtype).removeprefix("torch.")

    def info(at: str) -> TensorInfo:
        return TensorInfo(at=at, dtype=name, shape=("tokens", WIDTH))

    modules = {}
    for path, module in tree.modules.items():
        pair = path.startswith("layers.") and path.count(".") == 1
        output = (info("[0]"), info("[1]")) if pair else (info(""),)
        never = path in ("unused", "layers", "")
        update = {"output": None if never else output, "repeats": path == "twice"}
        modules[path] = module.model_copy(update=update)
    return tree.model_copy(update={"modules": modules})


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def apply(write: Affine, x: Tensor) -> None:
    """What `Affine` says, said again."""
    part = x[write.rows, write.columns]
    operand: Any = write.operand
    if write.kind == "add":
        part = part + operand
    elif write.kind == "scale":
        part = part * operand
    elif write.kind == "project":
        part = part - write.factor * (part @ operand)[..., None] * write.along
    x[write.rows, write.columns] = operand if write.kind == "set" else part.to(x.dtype)


MACHINE = Machine()
TREE = MACHINE.tree
generator = torch.Generator().manual_seed(7)
V, D, E = (torch.randn(WIDTH, generator=generator) for _ in range(3))
NAMES: dict[str, Any] = {
    "torch": torch,
    "F": functional,
    "v": V,
    "d": D,
    "e": E,
    "vs": [V, D],
    "V": torch.stack([V, D, E]),
    "table": {1: V, 2: D},
    "some": [MACHINE.model.layers[0].mlp, MACHINE.model.layers[2].mlp],
    "c": 0.3,
    "n": 2,
    "one": torch.tensor(1.5),
    "column": torch.arange(4.0)[:, None],
    "columns": torch.tensor([0, 4]),
    "rising": iter([1, 2]),
    "parameter": nn.Parameter(V.clone()),
}


def code_of(text: str) -> Code:
    return compile_block("".join(f" {t}\n" for t in text.split("\n")), "user.py", 1, "f")


def lowered(text: str, machine: Machine = MACHINE, **options: Any) -> Lowered | NotLowered:
    options = {"tokens": ROWS, "order": ORDER, **options}
    names = {"model": machine.model, **NAMES}
    return lower(code_of(text), names, machine.tree, ["tracer"], **options)


def check(text: str, machine: Machine = MACHINE, exact: bool = True, **options: Any) -> Lowered:
    """A block that is lowered does what it does otherwise, and does something."""
    found = lowered(text, machine, **options)
    assert isinstance(found, Lowered), str(found)
    want = machine.run(code_of(text), NAMES)
    got = machine.run(found.rest, NAMES, found.writes)
    assert want.error is None and got.error is None
    assert want.notes == got.notes
    same(want.outputs, got.outputs, exact)
    same(want.saves, got.saves, exact)
    plain = machine.run(code_of("pass"), NAMES)
    assert any(not torch.equal(a, b) for a, b in zip(plain.outputs, want.outputs, strict=True))
    return found


def same(want: Any, got: Any, exact: bool) -> None:
    torch.testing.assert_close(got, want, **({"rtol": 0, "atol": 0} if exact else {}))


# -- what is lowered -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("L.output[:] += v", "add"),
        ("L.output[:] -= v", "add"),
        ("L.output[:] *= c", "scale"),
        ("L.output[:] *= v", "scale"),
        ("L.output[:] /= 4", "scale"),
        ("L.output += v", "add"),
        ("L.output *= -2", "scale"),
        ("L.output[...] += v", "add"),
        ("L.output = L.output + v", "add"),
        ("L.output = v + L.output", "add"),
        ("L.output = L.output - v", "add"),
        ("L.output = L.output * c", "scale"),
        ("L.output = c * L.output", "scale"),
        ("L.output = -L.output", "scale"),
        ("L.output = L.output / 0.5", "scale"),
        ("L.output = torch.zeros_like(L.output)", "set"),
        ("L.output = torch.full_like(L.output, c)", "set"),
        ("L.output = L.output.mul(c)", "scale"),
        ("L.output[:] = L.output + v", "add"),
        ("L.output[:] = v", "set"),
        ("L.output[:] = v[None]", "set"),
        ("L.output[:] += v[None]", "add"),
        ("L.output[:] = 0", "set"),
        ("L.output[-1] = v", "set"),
        ("L.output[0] += v", "add"),
        ("L.output[-1] = L.output[-1] * 2", "scale"),
        ("L.output[3] = v", "set"),
        ("L.output[-3, 1] = c", "set"),
        ("L.output[1:, 2:5] = 0", "set"),
        ("L.output[1:, ::2] *= -2.5", "scale"),
        ("L.output[:, 3] *= 2", "scale"),
        ("L.output[..., -2:] = 1", "set"),
        ("L.output[:, [1, 4]] = 0", "set"),
        ("L.output[:, [1, -1]] *= 3", "scale"),
        ("L.output[:, columns] += 1", "add"),
        ("L.output[:, n * 1:n + 2] = 0", "set"),
        ("L.output[:, 1:3] += v[1:3]", "add"),
        ("L.output.add_(v)", "add"),
        ("L.output.sub_(v)", "add"),
        ("L.output.mul_(c)", "scale"),
        ("L.output[:, 1:3].mul_(2)", "scale"),
        ("L.output[-1].zero_()", "set"),
        ("L.output.zero_()", "set"),
        ("L.output.fill_(c)", "set"),
        ("L.output.copy_(v)", "set"),
        ("L.output[:] += 4.0 * v", "add"),
        ("L.output[:] += -v", "add"),
        ("L.output[:] += c * (v / v.norm())", "add"),
        ("L.output[:] += F.normalize(v, dim=0)", "add"),
        ("L.output[:] += v.to(L.output.dtype)", "add"),
        ("L.output[:] += v.to(L.output.device)", "add"),
        ("L.output[:] *= one", "scale"),
        ("L.output[:] += parameter", "add"),
        ("L.output[:] += vs[1]", "add"),
        ("L.output[:] += table[n]", "add"),
        ("L.output[:] += torch.ones(6) * c", "add"),
        ("h = L.output\nh += v", "add"),
        ("h = L.output\nh[:] = h * 2", "scale"),
        ("h = L.output\nL.output = h * 2", "scale"),
        ("h = L.output\nh = h * 2\nL.output = h", "scale"),
        ("h = L.output\nh *= 2\nL.output = h", "scale"),
        ("h = L.output\nh.add_(v.to(h.dtype))", "add"),
        ("h = L.output\ndtype = h.dtype\nh.add_(v.to(dtype))", "add"),
        ("w = 2 * v\nL.output[:] += w\nw = 3", "add"),
        ("model.get('layers.1.mlp').output[:] += v", "add"),
        ("layer = model.layers[1]\nlayer.mlp.output[:] += v", "add"),
        ("model.layers[-1].mlp.output[:] += v", "add"),
        ("h, r = model.layers[1].output\nh[:] += v", "add"),
        ("h, r = model.layers[1].output\nr *= c", "scale"),
        ("model.layers[1].output[0][:] += v", "add"),
        ("model.layers[1].output[1][-1] = 0", "set"),
        ("h = model.layers[1].output[0]\nh += v", "add"),
        ("pair = model.layers[1].output\npair[0][:, 2] = 0", "set"),
    ],
)  # fmt: skip
def test_one_write(text: str, kind: str) -> None:
    found = check(text.replace("L.output", "model.layers[1].mlp.output"))
    assert [w.kind for w in found.writes] == [kind]
    assert found.alone and found.writes[0].steps == (0,)


@pytest.mark.parametrize(
    "text",
    [
        "h -= (h @ d)[:, None] * d",
        "h -= (h @ d)[..., None] * d",
        "h -= (h @ d).unsqueeze(-1) * d",
        "h -= (h @ d).view(-1, 1) * d",
        "h -= d * (h @ d)[:, None]",
        "h -= torch.outer(h @ d, d)",
        "h -= torch.outer(torch.mv(h, d), d)",
        "h -= c * torch.outer(h.matmul(d), d)",
        "h -= torch.outer(h @ d, d) / (d @ d)",
        "h -= (h @ d)[:, None] * (d / d.dot(d))",
        "h -= (h * d).sum(-1, keepdim=True) * d",
        "h -= (h * d).sum(dim=-1)[:, None] * d",
        "h += -2 * (h @ d)[:, None] * d",
        "h += (h @ d)[:, None] * e",
        "h[:] = h - (h @ d).unsqueeze(-1) * d",
        "model.layers[1].mlp.output = h - (h @ d).unsqueeze(-1) * d",
        "p = (h @ d)[:, None] * d\nh -= p",
        "u = d / d.norm()\np = h @ u\nh.sub_(torch.outer(p, u))",
        "h[-1] -= (h[-1] @ d) * d",
        "h[1:] -= (h[1:] @ d)[:, None] * d",
        "h[:, 1:3] -= (h[:, 1:3] @ d[1:3])[:, None] * d[1:3]",
    ],
)
def test_a_projection(text: str) -> None:
    found = check(f"h = model.layers[1].mlp.output\n{text}", exact=False)
    assert [w.kind for w in found.writes] == ["project"] and found.alone


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("for s in tracer.iter[:3]:\n L[:] += v", range(3)),
        ("for s in tracer.iter[1:]:\n L[:] += v", "1:"),
        ("for s in tracer.iter[::2]:\n L[:] += v", "0::2"),
        ("for s in tracer.iter[1]:\n L[:] += v", (1,)),
        ("for s in tracer.iter[[0, n]]:\n L[:] += v", (0, 2)),
        ("for s in tracer.all():\n L[:] += v", ":"),
        ("for s in tracer.iter:\n L[-1] *= 2", ":"),
        ("steps = tracer.iter[1:n + 1]\nfor s in steps:\n L[:] += v", range(1, 3)),
        ("for s in tracer.iter[1:9]:\n L[:] += v", range(1, 9)),
    ],
)
def test_the_steps_of_a_loop(text: str, steps: Any) -> None:
    [write] = check(text.replace("L", "model.layers[2].mlp.output")).writes
    if isinstance(steps, str):
        start, _, stride = steps.partition(":")
        assert write.steps[:3] == range(10**6)[int(start or 0) :: int(stride.strip(":") or 1)][:3]
    else:
        assert write.steps == steps


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("for layer in model.layers[1:3]:\n layer.mlp.output[:] += v", 2),
        ("for layer in model.layers:\n layer.output[0][:] += v", 4),
        ("for i in (1, 3):\n model.layers[i].mlp.output[:] += v", 2),
        ("for i, w in zip((1, 2), vs):\n model.layers[i].mlp.output[:] += w", 2),
        ("for i, w in enumerate(vs):\n model.layers[i].mlp.output[:] += w", 2),
        ("for i, w in enumerate(V):\n model.layers[i].mlp.output[:] += w", 3),
        ("for layer, w in zip(model.layers, V):\n h, r = layer.output\n h += w", 3),
        ("for i, w in table.items():\n model.layers[i].mlp.output[:] += w", 2),
        ("for m in some:\n m.output[:, 1] = 0", 2),
        ("for i in range(2):\n for j in (1, 3):\n  model.layers[i].mlp.output[:, j] = 0", 4),
        ("for s in tracer.all():\n for layer in model.layers[::2]:\n  layer.mlp.output *= c", 2),
        ("for s in tracer.all():\n model.embed.output *= c\n model.layers[2].mlp.output[:] = 0", 2),
        ("model.embed.output[:] = 0\nfor s in tracer.iter[1:]:\n model.embed.output[:] += v", 2),
        ("model.embed.output[:, 2] = 0\nmodel.embed.output[:, 4:] = 0", 2),
        ("model.embed.output[0] = 0\nmodel.embed.output[1:] *= 2", 2),
        ("h, r = model.layers[0].output\nh += v\nr *= 2", 2),
    ],
)
def test_several_writes(text: str, count: int) -> None:
    found = check(text)
    assert len(found.writes) == count and found.alone


@pytest.mark.parametrize(
    "text",
    [
        "model.embed.output[:] = v\nx = model.embed.output.save()",
        "h = model.embed.output\nh += v\nx = h.save()",
        "h = model.embed.output\nh += v\nx = (h @ d).save()",
        "h = model.embed.output\nmodel.embed.output.add_(v)\nx = model.embed.output.save()",
        "model.embed.output += v\nx = model.layers[1].output[0].save()\ny = model.logits.save()",
        "x = model.embed.output.save()\nmodel.layers[0].mlp.output[:] *= 2",
        "model.embed.output += v\nmodel.logits[:, 2] += 3\nx = model.logits.save()",
        "model.embed.output += v\nxs = [l.output[0] for l in model.layers].save()",
        "xs = [].save()\nfor s in tracer.iter[:3]:\n model.embed.output *= c\n"
        " xs.append(model.logits)",
        "xs = [].save()\nfor s in tracer.all():\n h = model.embed.output\n h *= c\n xs.append(h)",
        "for s in tracer.all():\n model.embed.output *= c\n"
        " if model.samples.item() >= 0 and s == 1:\n  tracer.stop()",
        "model.embed.output *= c\nout = tracer.result.save()",
        "model.embed.output *= c\nx = (v.norm() * 2).save()",
        "y = d @ v\nx = y.save()\nmodel.embed.output[:] += v",
    ],
)
def test_what_is_left_runs_as_before(text: str) -> None:
    found = check(text)
    assert not found.alone and found.writes


def test_a_lowered_block_keeps_its_lines() -> None:
    found = check(
        "model.embed.output.add_(\n  v,\n); x = 1; model.layers[0].mlp.output[:] = (\n 0)\n"
        "for s in tracer.iter[1:9]:\n model.embed.output[:] *= c; y = 2"
    )
    assert found.rest.source == " (\n\n); x = 1; (\n)\n for s in tracer.iter[1:9]:\n  pass; y = 2\n"
    result = MACHINE.run(found.rest, NAMES, found.writes)
    assert [(note[0], note[1]) for note in result.notes] == [(LoopOverrunWarning, 5)]
    failing = lowered("model.embed.output[:] = 0\n\n1 / 0")
    assert isinstance(failing, Lowered) and not failing.alone
    error = MACHINE.run(failing.rest, NAMES, failing.writes).error
    assert isinstance(error, ZeroDivisionError)
    assert error.__traceback__ is not None and error.__traceback__.tb_lineno == 3


def test_a_block_without_writes_is_lowered_as_it_stands() -> None:
    found = lowered("x = model.embed.output.save()")
    assert isinstance(found, Lowered) and not found.writes and not found.alone
    found = lowered("pass")
    assert isinstance(found, Lowered) and found.alone


# -- what is not -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("if c > 0:\n L.output[:] = 0", "2: .*mlp.output is written under `if`"),
        ("while c > 0:\n L.output[:] = 0", "under `while`"),
        ("try:\n L.output[:] = 0\nfinally:\n pass", "under `try`"),
        ("with torch.no_grad():\n L.output[:] = 0", "under `with`"),
        ("match c:\n case 1:\n  L.output[:] = 0", "under `match`"),
        ("def f(): L.output[:] = 0\nf()", "in a function"),
        ("for s in tracer.all():\n L.output[:] += s * v", "2: .*depends on the step number"),
        ("for s in tracer.all():\n L.output[s] = 0", "indexed by `s`, .*step number"),
        ("w = v\nfor s in tracer.all():\n w = w * 2\n L.output[:] += w", "changes from step"),
        ("for s in tracer.all():\n L.output[:] += 1\n break", "with a way out"),
        ("for i in (1, 2):\n if i > 1: continue\n L.output[:] += 1", "with a way out"),
        ("for i in (1,):\n for s in tracer.all():\n  L.output[:] += 1", "over steps in another"),
        ("for s in tracer.iter[:2]: pass\nL.output[:] = 0", "2: .*after a loop over steps"),
        ("for x in model.embed.output:\n L.output[:] += 1", "rounds are not known"),
        ("L.output[:] = model.embed.output", "depends on embed.output"),
        ("L.output[:] += v * model.embed.output.norm()", "depends on embed.output"),
        ("x = model.embed.output.mean()\nL.output[:] += x", "depends on embed.output"),
        ("L.output[:] += model.layers[0].mlp.input", "depends on layers.0.mlp.input"),
        ("L.output[:] = L.output.relu()", "more than one sum"),
        ("L.output[:] = L.output * L.output", "more than one sum"),
        ("L.output = 2 * L.output + v", "more than one sum"),
        ("L.output = v - L.output", "more than one sum"),
        ("L.output[:] = L.output @ V.T @ V", "raises|more than one"),
        ("L.output[0] = L.output[-1] * 2", "with another part"),
        ("L.output = L.output.flip(-1)", "more than one sum"),
        ("L.output += column", "one for each column"),
        ("L.output[:, 2] = torch.ones(4)", "one for each column"),
        ("L.output[:] += unknown", "not known before"),
        ("L.output[:] += torch.randn(6)", "not known before"),
        ("L.output[:] += helper(v)", "not known before"),
        ("L.output[:] /= v", "multiply it by the reciprocal"),
        ("L.output[:] /= 3", "by no power of two"),
        ("L.output[:] /= 0", "by no power of two"),
        ("L.output **= 2", "an operator that is not lowered"),
        ("L.output.clamp_(0)", "by `clamp_`"),
        ("L.output.add_(v, alpha=2)", "by `add_`"),
        ("L.output.data[:] = 0", "in a way that is not lowered"),
        ("L.output[L.output > 0] = 0", "indexed by"),
        ("L.output[[0, 1]] = 0", "more than a number or a slice"),
        ("L.output[1:][:, 2] = 0", "indexed twice"),
        ("L.output[:, [1, 1]] += 1", "comes twice"),
        ("L.output[:, [1, 2]].mul_(2)", "makes a copy"),
        ("L.output[1:2][0] = 0", "indexed twice"),
        ("model.embed.input = v", "embed.input is written where it goes in"),
        ("L.source.linear_0.output[:] = 0", "source"),
        ("L.skip(v)", "by `skip`"),
        ("model.twice.output[:] = 0", "runs more than once"),
        ("model.layers[1].output = (v, v)", "is a tuple"),
        ("model.layers[1].output[:] = 0", "several tensors"),
        ("x = L.output.save()\nL.output[:] = 0", "2: .*in a way that is not lowered|has used it"),
        ("x = L.output.norm()\nL.output[:] = 0", "2: .*after line 1 has used it"),
        ("h = L.output\nx = h.norm()\nh[:] = 0", "3: .*after line 2 has used it"),
        ("xs = [l.mlp.output for l in model.layers]\nL.output[:] = 0", "has used it|their order"),
        ("p = L.output @ d\nL.output[:] -= torch.outer(p, d)\np.save()", "line 1 has used it"),
        ("L.output[:] += v\nL.output[-1] = 0", "2: .*written again where line 1"),
        ("for i in (1, 2):\n L.output[:] *= 2", "written again"),
        ("for s in tracer.all():\n L.output[:] *= 2\n L.output[:, 1] = 0", "written again"),
        ("h = L.output\nL.output = h * 2\nx = h.save()", "'h' holds what it was before"),
        ("h = L.output\np = h * 2\nL.output = p\np[0] = 0", "'p' holds"),
        ("p = L.output * 2\np[0] = 0\nL.output = p", "more than one|not lowered"),
        ("p = L.output * 2\nq = p\nq += 1\nL.output = p", "more than one|not lowered"),
        ("c1 = L.output[:, [1, 2]]\nc1 *= 2\nL.output[:, [1, 2]] = c1", "more than one|depends"),
        ("w = v\nw += 1\nL.output[:] += v", "line 2 may change"),
        ("v[0] = 1\nL.output[:] += v", "line 1 may change"),
        ("L.output[:] += v\nv.mul_(2)", "line 2 may change"),
        ("xs = [v]\nxs[0].mul_(2)\nL.output[:] += v", "line 2 may change"),
        ("torch.add(v, 1, out=v)\nL.output[:] += v", "line 1 may change"),
        ("vs.append(v)\nfor w in vs:\n L.output[:] += w", "may change|not known|written again"),
        ("w = torch.ones(6)\nw[0] = 3\nL.output[:] += w", "line 2 may change"),
        ("w = torch.ones(6)\nu = w\nw += 1\nL.output[:] += u", "line 3 may change"),
        ("xs = [1.0]\nxs.append(2.0)\nL.output[:] *= sum(xs)", "may change|not known"),
        ("xs = [1]\nys = xs\nxs.append(2)\nL.output[:, ys] = 0", "line 3 may change"),
        ("columns[0] = 2\nL.output[:, columns] = 0", "line 1 may change"),
        ("for w in [torch.ones(6)]:\n u = w\n u += 1\n L.output[:] += w", "line 3 may change"),
        ("L.output[:] *= sum(rising)", "not known before"),
        ("for i, w in zip(rising, vs):\n L.output[:] += w", "rounds are not known"),
        ("L.output[:] += torch.dot(v, d, out=one)", "not known before"),
        ("h = L.output\nfor s in tracer.iter[1:]:\n h[:] = 0", "in another step"),
        ("tracer.stop()\nL.output[:] = 0", "2: .*may have been stopped"),
        ("x = tracer.result.outputs\nL.output[:] = 0", "comes after result"),
        ("x = model.logits\nL.output[:] = 0", "2: .*comes after logits"),
        ("L.output[:] = 0\ncache = tracer.cache()", "opens a cache"),
        ("g = (l.output for l in model.layers)\nL.output[:] = 0", "layers.\\*.output later"),
        ("h = model.embed.output\nx = L.output.save()\nh += 1", "comes after"),
        ("for s in tracer.all():\n if s: h = L.output\n L.output[:] = 0", "comes|has used|known"),
        ("h = L.output\nfor s in tracer.iter[1:]:\n h += 1", "changes from step"),
        ("model.layers[2].mlp.output[:] = 0\nx = L.output.save()", "is not surely their order"),
        ("L.output[:] = 0\nx = L.input", "is not surely their order"),
        ("L.output[:] = 0\nx = L.source.linear_0.output", "is not surely their order"),
    ],
)  # fmt: skip
def test_what_is_not_lowered_says_why(text: str, reason: str) -> None:
    found = lowered(text.replace("L.", "model.layers[1].mlp."))
    assert isinstance(found, NotLowered), found
    assert re.search(f"line .*({reason})|line ({reason})", str(found)), str(found)


@pytest.mark.parametrize(
    "text",
    [
        "L.output[:] += torch.ones(5)",
        "L.output[:] = torch.ones(5)",
        "L.output[0] += v[None]",
        "L.output[7] = 0",
        "L.output[:, 9] = 0",
        "L.output[:, [1, 9]] = 0",
        "L.output[::-1] = 0",
        "L.output = L.output[:, :3] * 2",
        "L.output = L.output + v.double()",
        "L.output = L.output + v[None, None]",
        "L.output[0].copy_(v[None])",
        "L.output.fill_(v)",
        "L.output[:] += 1j",
        "L.output[:] -= (L.output @ d.double())[:, None] * d",
        "L.output[:] -= (L.output @ d) * d",
        "L.output[0][:, :] = 0",
        "model.layers[1].output[0] += v",
        "model.layers[1].output[0] = v",
        "model.layers[1].output[5][:] = v",
        "model.layers[9].output[:] = 0",
        "model.unused.output[:] = 0",
        "model.layers[1].mpl.output[:] = 0",
        "for s in tracer.iter[-1]:\n L.output[:] = 0",
        "for s in tracer.iter[[2, 1]]:\n L.output[:] = 0",
        "for s in tracer.iter[:2]:\n L.output[2] = 0",
        "model.layers[2].mlp.output[:] = 0\nL.output[:] = 0",
        "L.output[:] = 0\nx = model.embed.output.save()",
        "for s in tracer.all():\n L.output[:] = 0\n x = model.embed.output",
        "h = model.embed.output\nL.output[:] = 0\nh += 1\nx = model.logits",
        "for s in tracer.all():\n L.output[:] = 0\nh = L.output",
        "a, b = L.output[:2]\nfoo.bar\nL.output[:] = 0",
    ],
)
def test_what_raises_still_does(text: str) -> None:
    text = text.replace("L.", "model.layers[1].mlp.")
    assert MACHINE.run(code_of(text), NAMES).error is not None
    found = lowered(text)
    if isinstance(found, Lowered):
        assert MACHINE.run(found.rest, NAMES, found.writes).error is not None
    else:
        assert found.reasons


@pytest.mark.parametrize(
    "text",
    [
        "h = L.output\nh += c * h",
        "h = L.output\nh -= h * c",
        "h = L.output\nh.add_(h * c)",
        "h = L.output\nh[-1] += h[-1] * 2",
        "L.output *= L.output + 1",
        "L.output[:] += torch.ones_like(L.output)",
        "h = L.output\nh += h - (h @ d)[:, None] * d",
        "for s in tracer.all():\n h = L.output\n h += c * h",
        "w = v.clone()\ntorch.nn.init.ones_(w)\nL.output[:] += w",
        "w = v.clone()\ntorch.nn.init.normal_(w, std=1.0)\nL.output[:] += w",
        "w = v.clone()\ntorch.relu_(w)\nL.output[:] += w",
        "w = v.clone()\ntorch.Tensor.mul_(w, 3)\nL.output[:] += w",
        "ws = [v.clone()]\ntorch._foreach_mul_(ws, 3)\nL.output[:] += ws[0]",
        "w = v.clone()\nfor s in tracer.all():\n L.output[:] += w\n torch.nn.init.ones_(w)",
        "ws = [v.clone()]\nwith torch.no_grad():\n for w in ws: w /= 2\nL.output[:] += ws[0]",
        "x = v.clone()\nif c:\n w = x\n w /= 2\nL.output[:] += x",
        "ws = [v.clone()]\n[w.mul_(10) for w in ws]\nL.output[:] += ws[0]",
        "ws = [v.clone()]\nfor w in ws:\n if w is None: break\n w.mul_(10)\nL.output[:] += ws[0]",
        "ws = [v.clone()]\nfor s in tracer.all():\n L.output[:] += ws[0]\n for w in ws: w.mul_(2)",
        "x, w = {}, v.clone()\nx['a'] = w\nx['a'].mul_(3)\nL.output[:] += w",
        "x, w = [None], v.clone()\nx[0] = w\nx[0].mul_(3)\nL.output[:] += w",
    ],
)
def test_what_would_be_lowered_wrongly_does_what_it_says(text: str) -> None:
    """What is lowered of these must do what they do; most of them cannot be."""
    text = text.replace("L.", "model.layers[1].mlp.")
    found = lowered(text)
    want = MACHINE.run(code_of(text), NAMES)
    assert want.error is None
    if isinstance(found, Lowered):
        same(want.outputs, MACHINE.run(found.rest, NAMES, found.writes).outputs, exact=False)


def test_lowering_changes_no_value_of_the_user() -> None:
    lowered("for i, w in zip(rising, vs):\n model.layers[i].output += w * sum(rising)")
    lowered("model.embed.output *= torch.dot(v, d, out=one)")
    assert list(NAMES["rising"]) == [1, 2] and NAMES["one"].item() == 1.5


# -- types, devices, orders ------------------------------------------------------------------------

HALF = Machine(torch.bfloat16)


@pytest.mark.parametrize(
    "text",
    [
        "L.output[:] += v",
        "L.output[:] *= v",
        "L.output[:] *= c",
        "L.output[:] = v",
        "L.output[:, 1:] += c",
        "L.output[:] = L.output + v",
        "L.output = L.output * c",
        "L.output = L.output + v.to(L.output.dtype)",
        "L.output.add_(v.bfloat16())",
        "L.output *= one",
        "L.output[:] = torch.tensor(0.1)",
    ],
)
def test_a_write_is_computed_in_the_type_that_pytorch_computes_it_in(text: str) -> None:
    check(text.replace("L.", "model.layers[1].mlp."), HALF)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("L.output = L.output + v", "torch.float32 of width 6, and holds torch.bfloat16"),
        ("L.output -= (L.output @ d)[:, None] * d", "raises RuntimeError: .*same dtype"),
        ("L.output += v.double()", "computes in float64"),
        ("L.output *= torch.tensor(0.1)", "0-dimensional tensor that its dtype cannot hold"),
        ("L.output += (v > 0)", "with a value that is not known|only floats"),
        ("L.output += torch.tensor([1, 2, 3, 4, 5, 6])", "tensor of int64"),
    ],
)
def test_types_that_do_not_go_together_are_not_lowered(text: str, reason: str) -> None:
    found = lowered(text.replace("L.", "model.layers[1].mlp."), HALF)
    assert isinstance(found, NotLowered)
    assert re.search(reason, str(found)), str(found)


def test_an_operand_elsewhere_is_not_lowered() -> None:
    found = lowered("model.embed.output += v", device="cuda:0")
    assert "lies on cuda:0, and what it is written with on cpu" in str(found)
    assert isinstance(lowered("model.embed.output[:] = v", device="cuda:0"), Lowered)
    assert isinstance(lowered("model.embed.output *= one", device="cuda:0"), Lowered)


def test_a_gpu_divides_by_a_number_as_a_table_does() -> None:
    found = lowered("model.embed.output /= 3", device="cuda:0")
    assert isinstance(found, Lowered) and found.writes[0].operand == 1 / 3
    assert "no reciprocal" in str(lowered("model.embed.output /= 0", device="cuda:0"))


def test_a_model_of_which_nothing_is_recorded_is_not_lowered() -> None:
    code = code_of("model.embed.output[:] = 0")
    found = lower(code, {"model": MACHINE.model}, MACHINE.model.tree)
    assert str(found) == "line 1: embed.output is not recorded, so that it may have any shape"


def test_rows_from_an_end_need_the_number_of_tokens() -> None:
    text = "model.embed.output[2] = 0"
    assert isinstance(lowered(text), Lowered)
    assert "written in row 2, which a step may not have" in str(lowered(text, tokens=None))
    assert "written in row 2 of 2" in str(lowered(text, tokens=2))


@pytest.mark.parametrize(
    ("first", "then", "known"),
    [
        ("layers[0].mlp.output", "layers[2].attn.output", True),
        ("layers[2].mlp.output", "layers[2].output[0]", True),
        ("layers[2].output[0]", "layers[2].mlp.output", False),
        ("layers[2].attn.output", "layers[1].mlp.output", False),
        ("layers[1].attn.output", "layers[1].mlp.output", False),
        ("embed.output", "layers[1].mlp.output", False),
    ],
)
def test_without_an_order_only_numbers_and_parts_tell_it(
    first: str, then: str, known: bool
) -> None:
    text = f"model.{first}[:] = 0\nmodel.{then}[:] = 0"
    assert isinstance(lowered(text, order=()), Lowered) == known


def test_writes_and_reasons_read_well() -> None:
    found = lowered(
        "for s in tracer.iter[1:]:\n model.layers[1].output[1][-1:, 2:4] += 2\n"
        " model.layers[2].mlp.output -= torch.outer(model.layers[2].mlp.output @ d, 2 * d)\n"
        " model.head.output[:] = v"
    )
    assert isinstance(found, Lowered)
    assert [str(w) for w in found.writes] == [
        "line 2: layers.1.output (1)[-1:, 2:4] gets 2 added, at steps 1:",
        "line 3: layers.2.mlp.output has its part along a direction taken out, at steps 1:",
        "line 4: head.output becomes a tensor of 6, at steps 1:",
    ]
    found = lowered("if c:\n model.embed.output[:] = 0\nmodel.head.output = model.head.output**2")
    assert str(found) == (
        "line 2: embed.output is written under `if`\n"
        "line 3: head.output is written with more than one sum, multiple or projection of it"
    )


SLICES = st.builds(
    slice,
    st.none() | st.integers(-4, 4),
    st.none() | st.integers(-4, 4),
    st.none() | st.integers(1, 3),
)


@given(st.integers(-3, 3) | SLICES, st.integers(-3, 3) | SLICES, st.booleans())
def test_rows_meet_if_they_do_for_some_number_of_rows(one: Any, other: Any, columns: bool) -> None:
    def marked(index: Any, count: int) -> Tensor:
        marks = torch.zeros(count, dtype=torch.bool)
        if isinstance(index, slice) or -count <= index < count:
            marks[index] = True
        return marks

    want = columns and any((marked(one, n) & marked(other, n)).any() for n in range(1, 40))
    chosen = (slice(0, 4), slice(2, 4) if columns else [5])
    writes = [
        Affine("a", 0, (0,), rows, cols, "set", 0.0, 1)
        for rows, cols in zip((one, other), chosen, strict=True)
    ]
    assert regions_meet(*writes, WIDTH) == want


# -- any program -----------------------------------------------------------------------------------

PLACES = [
    *("model.embed.output", "model.layers[0].mlp.output", "model.layers[1].attn.output"),
    *("model.layers[1].mlp.output", "model.layers[1].output[0]", "model.layers[2].mlp.output"),
    *("model.layers[2].output[1]", "model.head.output"),
]
INDICES = st.sampled_from(
    [
        "[:]",
        "[-1]",
        "[0]",
        "[2]",
        "[1:]",
        "[::2]",
        "[:, 1]",
        "[:, 2:4]",
        "[-2:, ::3]",
        "[0, [1, 3]]",
    ]
)
WRITES = st.sampled_from(
    [
        "{at}{i} = 0",
        "{at}{i} *= 2",
        "{at}{i} += c",
        "{at}{i} = {at}{i} * c",
        "{at}[:] += v",
        "{at}[:] = {at} - v",
        "{at}.mul_(c)",
        "{at}{i}.add_(1)",
        "h = {at}; h += v",
        "h = {at}; h{i} = c",
        "p = {at} * 2; {at}[:] = p",
        "h[:] = 1",
        "h{i} *= 2",
        "w = w * 2; {at}[:] += w",
        "{at}[:] += w",
    ]
)
OTHERS = st.sampled_from(
    [
        "out.append({at}.clone())",
        "out.append({at}{i} * 1)",
        "h = {at}",
        "out.append(h * 1)",
        "out.append(h)",
        "p = {at} + 1",
        "p += 1",
        "out.append(p)",
        "w = v",
        "w = v + 1",
        "w += 1",
        "out.append(w * 1)",
        "out.append(model.logits)",
        "model.logits[:, 1] += 5",
        "if len(out) > 1: tracer.stop()",
        "if len(out) > 1: h = {at}",
        "q = h",
        "q += 1",
    ]
)
HEADS = ["for s in tracer.iter[:2]:", "for s in tracer.iter[1:]:", "for s in tracer.all():"]
HEADS += ["for i in (1, 2):", "for w in vs:", "for s in tracer.iter[1]:"]


@st.composite
def bodies(draw: st.DrawFn, most: int) -> list[str]:
    """Statements, most often in the order in which a step comes to their places."""
    places = draw(st.lists(st.sampled_from(range(len(PLACES))), max_size=most))
    if draw(st.integers(0, 9)):
        places.sort()
    return [
        draw(st.one_of(WRITES, WRITES, OTHERS)).format(at=PLACES[place], i=draw(INDICES))
        for place in places
    ]


@st.composite
def programs(draw: st.DrawFn) -> str:
    lines = draw(bodies(3))
    for _ in range(draw(st.integers(0, 2))):
        lines.append(draw(st.sampled_from(HEADS)))
        lines += [f" {line}" for line in [*draw(bodies(4)), "pass"]]
    return "\n".join(["out = [].save()", "w = 3 * v", *lines, *draw(bodies(1))])


@settings(max_examples=400, deadline=None)
@given(programs())
def test_a_lowered_program_does_what_it_does_as_it_stands(text: str) -> None:
    found = lowered(text)
    if isinstance(found, NotLowered):
        return
    want, got = (
        MACHINE.run(code, NAMES | {"v": V.clone(), "vs": [V.clone(), D.clone()]}, writes)
        for code, writes in ((code_of(text), ()), (found.rest, found.writes))
    )
    assert type(want.error) is type(got.error)
    if want.error is None:
        assert want.notes == got.notes
        same(want.outputs, got.outputs, True)
        same(want.saves, got.saves, True)
