"""Names: what a block needs from outside, what it binds, what it saves."""

from __future__ import annotations

import ast

import pytest

from nnsight_core.names import analyse


def of(text: str, lazy: bool = False) -> tuple[str, str, str]:
    names = analyse(ast.parse(text).body, lazy)
    return " ".join(names.needs), " ".join(names.binds), " ".join(names.saved)


@pytest.mark.parametrize(
    ("text", "needs"),
    [
        ("x = a; y = x", "a"),
        ("x = x", "x"),
        ("x += 1", "x"),
        ("del x; x", "x"),
        ("x = 1; del x; y = x", "x"),
        ("x: int = a", "a"),
        ("x: Some = 1", ""),
        ("if c: x = 1\ny = x", "c x"),
        ("if c: x = 1\nelse: x = 2\ny = x", "c"),
        ("for i in xs: y = i\nz = i", "xs i"),
        ("for i in xs:\n  if i: t = i\n  u = t", "xs t"),
        ("while c: x = 1\nx", "c x"),
        ("with m() as f: x = f\nf; x", "m x"),
        ("try: x = a\nexcept E as e: y = e\nx; y", "a E x y"),
        ("try: x = a\nfinally: z = 1\nz; x", "a x"),
        ("try: x = a\nexcept* E as e: y = e", "a E"),
        ("match v:\n case [a, *b]: a; b\n case {'k': c, **r}: c; r\n case P(q=d) if d: d", "v P"),
        ("(y := x); y", "x"),
        ("c and (y := 1); y", "c y"),
        ("(y := 1) if c else (y := 2); y", "c"),
        ("(y := 1) if c else 2; y", "c y"),
        ("[i for i in xs if i]", "xs"),
        ("a < (y := 1); y", "a"),
        ("a < 0 < (y := 3); y", "a y"),
        ("a < 0 < (y := 3) < y", "a"),
        ("assert a, (y := 1); y", "a y"),
        ("assert (y := 1), y; y", "y"),
        ("[(i, j) for i in xs for j in i]", "xs"),
        ("{k: v for k, v in xs}; k", "xs k"),
        ("[y := i for i in xs]", "xs"),
        ("f(a, *b, **c)", "f a b c"),
        ("def f(p, q=d, *, r: T = e) -> U: return p + q + z", "d e T U z"),
        ("def f(): return f()", ""),
        ("def f(): return y\ny = 1", "y"),
        ("y = 1\ndef f(): return y", ""),
        ("def f():\n  x = 1\n  def g():\n    nonlocal x\n    x = w\n  return g", "w"),
        ("@d\ndef f(): pass", "d"),
        ("async def f():\n  async for i in xs: i\n  async with m as n: n", "xs m"),
        ("lambda p, q=d: p + q + z", "d z"),
        ("class A(B, metaclass=M):\n  x = y\n  def f(self): return x + self.y + A", "B M y x"),
        ("class A:\n  x: T = 1", "T"),
        ("import a.b, c as d\na; d", ""),
        ("from a import b as c\nc", ""),
        ("from a import b\na", "a"),
        ("x = f'{a} {b!r:>{c}}'", "a b c"),
        ("a[i], b.c, *d = v", "v a i b"),
        ("global x\nx = 1", ""),
    ],
)
def test_needed_names_are_those_that_may_be_read_before_they_are_bound(
    text: str, needs: str
) -> None:
    assert of(text)[0].split() == needs.split()


def test_annotations_that_are_not_evaluated_need_nothing() -> None:
    assert of("def f(p: T) -> U: pass\nclass A:\n  x: V = 1", lazy=True)[0] == ""


@pytest.mark.parametrize(
    ("text", "binds"),
    [
        ("a = b = 1; c, (d, *e) = v", "a b c d e"),
        ("a += 1; b: int = 1; c: int", "a b"),
        ("for a, b in c: d = 1", "a b d"),
        ("with m as a, n as (b, c): pass", "a b c"),
        ("try: a = 1\nexcept E as b: c = 1\nelse: d = 1\nfinally: e = 1", "a d b c e"),
        ("try: a = 1\nexcept* E as b: c = 1", "a b c"),
        ("match v:\n case {'k': a, **b} | C(a, b): c = 1", "a b c"),
        ("import a.b, c as d", "a d"),
        ("def f(a): b = 1\nclass C: d = 1", "f C"),
        ("def f():\n  global a\n  nonlocal b\n  a = b = 1", "a b f"),
        ("class C:\n  def f(self):\n    global a\n    a = 1", "a C"),
        ("[a := i for i in xs]; lambda: (b := 1)", "a"),
        ("del a", "a"),
        ("a.b = 1; a[0] = 1", ""),
    ],
)
def test_bound_names_are_the_blocks_own(text: str, binds: str) -> None:
    assert sorted(of(text)[1].split()) == sorted(binds.split())


@pytest.mark.parametrize(
    ("text", "saved"),
    [
        ("x = a.save()", "a x"),
        ("x = y = a.save()", "a x y"),
        ("x: int = a.save()", "a x"),
        ("x.save()", "x"),
        ("y = x.save()", "y x"),
        ("y = save(x)", "y x"),
        ("y = nnsight_core.save(x)", "y x"),
        ("(y := a.b.save())", "y"),
        ("a, (b, *c) = pair.save()", "a b c pair"),
        ("xs[0] = a.b.save(); o.x = a.b.save()", ""),
        ("x = a.save", ""),
    ],
)
def test_saved_names_hold_what_save_was_given_or_gave_back(text: str, saved: str) -> None:
    assert sorted(of(text)[2].split()) == sorted(saved.split())


def test_a_needed_name_knows_its_line() -> None:
    assert analyse(ast.parse("x = 1\ny = z").body).needs == {"z": 2}
