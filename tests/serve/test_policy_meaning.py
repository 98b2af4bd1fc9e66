"""What restricted blocks may do means what it means in trusted ones."""

# ruff: noqa: E501 - each text stands on the line of its name

from __future__ import annotations

import functools
import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nnsight_core import NotSupportedError, PolicyError
from nnsight_core.traceback import users_file
from tests.core.shipped import SCALE
from tests.serve.restricted import RESTRICTED, TRUSTED, small_model, trace

NAMES = {"torch": torch, "math": math, "np": np, "F": F, "functools": functools}


def helper(x, *, by=2.0):
    """A function of the user's."""
    total = 0
    for row in x:
        total += row * by
    return total + SCALE


MEANINGS = {
    "augmented_items": "x = [1, 2, [3]]\nx[0] += 5\nx[2] += [4]\nx[-1][0] *= 7\nx.save()",
    "augmented_in_order": """
order = []
def at(name, value):
    order.append(name)
    return value
d = {"k": 1}
at("owner", d)[at("index", "k")] += at("value", 10)
def changes():
    d["k"] = 100
    return 1
d["k"] += changes()
x = (order, d)
x.save()
""",
    "augmented_names": "n = 3\nn **= 4\nn //= 2\nn <<= 2\nn |= 1\nn ^= 3\nn &= 127\nn >>= 1\nn -= 1\nx = n.save()",
    "augmented_list_is_the_same": "a = [1]\nb = a\nb += (2, 3)\nb += 'xy'\nx = (a is b, a)\nx.save()",
    "augmented_tensor": "a = torch.ones(3)\nb = a\nb += 1\nb[1:] *= 3\nx = (a, a is b)\nx.save()",
    "unpacking": "a, (b, *c), d = e = 1, [2, 3, 4], 5\nx = (a, b, c, d, e)\nx.save()",
    "unpacking_once": "n = []\ndef f():\n    n.append(1)\n    return 1, 2\na, b = c = f()\nx = (n, a, b, c)\nx.save()",
    "unpacking_in_loops": "x = [(a, b) for a, b in {'k': 1}.items()]\nfor i, (p, q) in enumerate([(1, 2)]):\n    x.append((i, p, q))\nx.save()",
    "comprehensions": "x = ([i * j for i in range(3) for j in range(i)], {i: -i for i in range(3)}, {i % 2 for i in range(9)}, sum(i for i in range(5)))\nx.save()",
    "closures": "fs = [lambda y, i=i: y + i for i in range(3)]\ndef outer():\n    n = 0\n    def inner():\n        nonlocal n\n        n += 1\n        return n\n    return inner() + inner()\nx = ([f(10) for f in fs], outer())\nx.save()",
    "globals": "n = 1\ndef f():\n    global n\n    n += 1\nf()\nx = n.save()",
    "recursion": "def f(n):\n    return 1 if n < 2 else n * f(n - 1)\nx = f(10).save()",
    "stars": "def f(*a, k=1, **o):\n    return a, k, o\nx = (f(*[1, 2], *'ab', k=3, **{'z': 4}), [*range(3), *(7,)])\nx.save()",
    "walrus": "x = [y for i in range(5) if (y := i * i) > 3]\nx.save()",
    "comparisons": "x = (1 < 2 < 3, 1 == 1.0, 'a' in 'abc', None is None, 3 not in [1], 2 >= 3, 1 != 2)\nx.save()",
    "errors_caught": "x = []\ntry:\n    1 / 0\nexcept ZeroDivisionError as e:\n    x.append(e.args)\nelse:\n    x.append('no')\nfinally:\n    x.append('end')\nx.save()",
    "f_strings": "v = 3.14159\nx = f'{v:.2f}|{v!r:>9}|{5:03d}|{v=}|{[1]}|{\"é\"!a}'.save()",
    "texts": "x = ', '.join(['a', 'b']).upper().replace('A', 'z').center(9, '.') + '%05.1f %s' % (2.5, [1])\nx.save()",
    "formats": "x = ('%(a)5d|%(b)-8.3f|%%|%(a)s' % {'a': 7, 'b': 2.5}, '%c%x%+d' % ('q', 255, 3), '%s %r %s' % ([1, [2]], {'k': (3,)}, torch.ones(2)), '100%% of %s' % 'it')\nx.save()",
    "texts_of_values": "a = [1]\nb = {'k': (a, a), 's': {2}, 'f': frozenset([3])}\nx = (str(b), repr(b), ascii('é'), f'{b}{b!r}', str(b.items()), str(b.values()), repr(slice(1, a)), repr(ValueError('v', a)), str(KeyError('k')), str(torch.ones(2)), str(range(3)), str(None), str(2 ** 70), str(), str(raw), str(raw, 'utf-8'))\nx.save()",
    "numbers_of_texts": "x = (int('12'), int('ff', 16), int('0b11', 0), int(2.9), int(), int(base=36, *['z']), pow(3, -1, 7), pow(2, 10 ** 9, 97))\nx.save()",
    "lists": "x = [3, 1, 2]\nx.sort(key=lambda v: -v)\nx.extend((7, 8))\nx.insert(0, x.pop())\nx[1:3] = [9]\ndel x[0]\nx.save()",
    "dicts": "d = {'a': 1}\nd.update(b=2)\nd.setdefault('c', []).append(3)\nx = (d, list(d.items()), d.get('q', 0), {**d, 'z': 1})\nx.save()",
    "builtins": "x = (sorted([3, 1], reverse=True), max(1, 2), min([3, 4], key=lambda v: -v), list(map(str, [1])), list(filter(None, [0, 1])), list(zip('ab', range(2))), list(reversed([1, 2])), round(2.567, 2), abs(-1), any([0, 1]), all([]), divmod(7, 2), pow(2, 5), pow(2, 5, 7), isinstance(1, int), type(1.5) is float, len('abc'), repr('a'), sum([[1], [2]], []), list(iter([1])), next(iter([5])), bin(5), format(7, '03d'))\nx.save()",
    "numbers": "x = (7 // 2, -7 % 3, 2 ** 10, 1 << 4, 6 & 3, 6 | 1, 6 ^ 2, ~5, 1.5e3, 2 ** 0.5, 3 * 'ab', [0] * 3, (1 + 2j).conjugate())\nx.save()",
    "math": "x = (math.sqrt(2), math.pi, math.floor(2.5), math.log(3, 2), math.isclose(1, 1), np.pi, float(np.exp(1.0)))\nx.save()",
    "tensors": "t = torch.arange(12.0).reshape(3, 4)\nx = (t @ t.T, t[1:, ::2], t[[0, 2]], t[t > 5], t.sum(-1, keepdim=True), t.topk(2).values, torch.cat([t, t]), t.split(2, 1), t.max(dim=0).indices, t.norm(), t.softmax(-1), torch.einsum('ij,kj->ik', t, t), t.to(torch.float64), t.shape, t.dtype, -t, t.T, t.mean(0)[None], t.expand(2, 3, 4), F.normalize(t, dim=-1), F.cosine_similarity(t, t), torch.linalg.norm(t), torch.where(t > 2, t, 0.0))\nx.save()",
    "tensors_by_name": "t = torch.arange(12.0).reshape(3, 4)\ni = torch.tensor([2, 0])\nx = (torch.matmul(other=t.T, input=t), F.linear(bias=torch.ones(3), weight=t, input=t), F.embedding(weight=t, input=i), torch.index_select(index=i, dim=-1, input=t), t.index_select(-1, i), torch.tile(dims=(2, 1), input=t), torch.split(tensor=t, split_size_or_sections=2, dim=1), t.split([1, 2]), t.chunk(2, 1), t.tensor_split((1, 2), dim=1), t.unbind(1), torch.repeat_interleave(torch.tensor([1, 2])), torch.repeat_interleave(input=t, repeats=2, dim=0), torch.tensor([[1, 2], [3, 4]]), [*t], torch.tensor([]))\nx.save()",
    "decompositions": "t = torch.arange(12.0).reshape(3, 4)\nfound = (*torch.linalg.svd(t), torch.linalg.svd(t, full_matrices=False).S, torch.svd(t).S, torch.linalg.qr(t).R, torch.linalg.norm(t, 2), torch.linalg.norm(t, ord=2, dim=-1), t.norm('nuc'), t.norm(2, -1), torch.linalg.norm(t), torch.fft.fft(t, 8), torch.fft.fft2(t), torch.fft.irfft(torch.fft.rfft(t, dim=0), n=3, dim=0), torch.fft.ifftn(t, s=(2, 2)), torch.fft.fftshift(t))\nx = [part.shape for part in found]\nx.save()",
    "tensors_in_place": "t = torch.zeros(3, 4)\nt.fill_(2).mul_(3)\nt[0] = 1\nt[:, 1] -= 5\nt.index_add_(0, torch.tensor([1]), torch.ones(1, 4))\nt.clamp_(min=0)\nt.copy_(t + 1)\nx = t.save()",
    "random": "torch.manual_seed(3)\nx = torch.randn(3).save()",
    "without_gradients": "with torch.no_grad():\n    x = (model[0].output * 2).save()",
    "locations": "b = model[0].input\na = model[0].output.save()\nx = (b, model[1].output, model[2].output)\nx.save()",
    "writes": "model[0].output[:] = 1\nmodel[1].output += 2\nmodel[2].output *= 3\nx = model[2].output.save()",
    "writes_by_assignment": "model[0].output = model[0].output * 2 + 1\nx = model[2].output.save()",
    "writes_to_inputs": "model[2].input = model[2].input + 1\nx = model[2].output.save()",
    "weights": "x = (model[0].weight @ model[0].weight.T).save()",
    "modules_called": "x = model[2](model[1](model[0].output)).save()",
    "modules_by_path": "x = [model.get(path).output for path in ('0', '1')]\nx.save()",
    "skip": "model[1].skip(torch.zeros(1, 2))\nx = model[2].output.save()",
    "functions": "x = helper(model[0].output, by=3.0).save()",
    "functions_decorated": "def twice(f):\n    return lambda *a: f(*a) * 2\n@twice\ndef g(v):\n    return v + 1\nx = g(model[0].output).save()",
    "functions_without_gradients": "@torch.no_grad()\ndef g(v):\n    return v + 1, torch.is_tensor(v)\nx = g(model[0].output)\nx.save()",
    "functions_without_gradients_from_outside": "x = gradless(model[0].output).save()",
    "functions_partial": "x = part(model[0].output).save()",
    "functions_by_path": "x = relu(softmax(model[0].output, dim=-1) - 0.5).save()",
    "outside": "x = (sae(model[0].output) + steer * number, table['a'][0], array.sum(), ids)\nx.save()",
    "cache": "c = tracer.cache(modules=[model[0]])\ny = model[2].output\nx = y.save()",
    "steps": "x = [].save()\nfor step in tracer.iter[:1]:\n    x.append((step, model[0].output))",
    "assertions": "assert 1 < 2, 'no'\nx = 1 .save()",
    "conditions": "h = model[0].output\nif h.sum().item() > 0 or not h.numel():\n    x = 'more'\nelse:\n    x = 'less'\nx.save()",
    "while_loops": "n, x = 0, []\nwhile n < 5:\n    n += 1\n    if n == 2:\n        continue\n    if n == 4:\n        break\n    x.append(n)\nelse:\n    x.append('end')\nx.save()",
}


@torch.no_grad()
def gradless(x):
    """A function of the user's that is decorated."""
    return x * 3


OUTSIDE = {
    "gradless": gradless,
    "helper": helper,
    "part": functools.partial(helper, by=5.0),
    "relu": F.relu,
    "softmax": torch.softmax,
    "sae": nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)),
    "steer": torch.ones(2),
    "number": 2.5,
    "table": {"a": [1, (2, "b")]},
    "array": np.arange(3.0),
    "raw": b"raw",
    "ids": frozenset([1, 2]),
}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return type(a) is type(b) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("name", MEANINGS)
def test_it_means_what_it_means_in_a_trusted_block(tmp_path, name):
    found = []
    for policy in (TRUSTED, RESTRICTED):
        names = {**NAMES, **OUTSIDE}
        text = MEANINGS[name].strip()
        found.append(trace(small_model(policy), text, tmp_path, **names))
    assert "x" in found[0] and same(found[0]["x"], found[1]["x"])


def test_what_is_printed_comes_home(tmp_path, capsys):
    trace(small_model(), "print('a', 1, sep='-', end='!')", tmp_path)
    assert capsys.readouterr().out == "a-1!"


def test_a_warning_has_the_line_of_the_user(tmp_path):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trace(small_model(), "x = 1\nwarnings.warn('careful')", tmp_path, warnings=warnings)
    seen = [(str(w.message), w.lineno, users_file(w.filename)) for w in found]
    assert seen == [("careful", 3, str(tmp_path / "script.py"))]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("x = 1\ny = [][3]", IndexError),
        ("x = 1\ny = {}['a']", KeyError),
        ("x = 1\ny = torch.ones(2) + torch.ones(3)", RuntimeError),
        ("x = 1\nraise ValueError('mine')", ValueError),
        ("x = 1\ny = nothing_of_this_name", NameError),
        ("x = torch\nx.load('a')", PolicyError),
        ("x = 1\nmodel[0].output.backward()", NotSupportedError),
    ],
)
def test_an_error_has_the_line_of_the_user(tmp_path, text, kind):
    lines = {}
    for policy in (TRUSTED, RESTRICTED):
        if policy is TRUSTED and kind is PolicyError:
            continue
        with pytest.raises(kind) as raised:
            trace(small_model(policy), text, tmp_path, torch=torch)
        last = raised.value.__traceback__
        seen = []
        while last is not None:
            seen.append((last.tb_frame.f_code.co_filename, last.tb_lineno))
            last = last.tb_next
        lines[policy] = (seen[-1], str(raised.value))
        if kind is not NotSupportedError:
            assert seen[-1] == (str(tmp_path / "script.py"), 3)
    assert len(set(lines.values())) == 1


def test_a_refused_text_says_the_line_and_what_to_do(tmp_path):
    with pytest.raises(PolicyError) as raised:
        trace(small_model(), "x = 1\nimport os", tmp_path)
    assert str(raised.value).startswith(f"{tmp_path / 'script.py'}:3: ")
    assert "Import above the block" in str(raised.value)
