"""Code: a block's text compiled with the user's lines, and what it may change."""

from __future__ import annotations

import traceback

import pytest

from nnsight_core import CaptureError
from nnsight_core.code import SAVE, compile_block


def run(text: str, **names: object) -> dict[str, object]:
    code = compile_block(text, "user.py", 7, "f")
    scope = {SAVE: lambda value: ("saved", value), **names}
    exec(code.compiled, scope)
    return scope


def test_lines_and_names_of_a_traceback_are_the_users() -> None:
    code = compile_block("    x = 1\n    def g():\n        1 / 0\n    g()\n", "user.py", 7, "f")
    with pytest.raises(ZeroDivisionError) as raised:
        exec(code.compiled, {})
    places = [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(raised.tb)][1:]
    assert places == [("user.py", 10, "f"), ("user.py", 9, "g")]


def test_a_text_without_indentation_keeps_its_lines_and_its_texts() -> None:
    code = compile_block("def g():\n    return '''a\nb'''\nx = 1 / 0\n", "user.py", 7, "f")
    scope: dict[str, object] = {}
    with pytest.raises(ZeroDivisionError) as raised:
        exec(code.compiled, scope)
    assert traceback.extract_tb(raised.tb)[-1].lineno == 10
    assert scope["g"]() == "a\nb"  # type: ignore[operator]


def test_save_becomes_a_call_of_ours_and_other_methods_stay() -> None:
    class Thing:
        def save(self, path: str) -> str:
            return path

    scope = run(" x = (1 + 1).save()\n y = thing.save('there')\n", thing=Thing())
    assert scope["x"] == ("saved", 2) and scope["y"] == "there"


def test_annotated_names_are_plain_names() -> None:
    scope = run(" x: Missing = 1\n y: Missing\n class A:\n  z: int = 2\n")
    assert scope["x"] == 1 and "__annotations__" not in scope
    assert scope["A"].__annotations__ == {"z": int}  # type: ignore[attr-defined]


def test_what_cannot_be_read_is_a_capture_error_with_the_place() -> None:
    with pytest.raises(CaptureError, match=r"user\.py:7 cannot be read as Python"):
        compile_block("    x = (\n", "user.py", 7, "f")
    with pytest.raises(CaptureError, match=r"user\.py:8: `return` cannot stand in a block"):
        compile_block("    x = 1\n    return x\n", "user.py", 7, "f")
    with pytest.raises(CaptureError, match=r"user\.py:8: 'break' outside loop"):
        compile_block("    x = 1\n    break\n", "user.py", 7, "f")


@pytest.mark.parametrize(
    "text",
    [
        "x = h.output.save()",
        "x = h.output.argmax(-1).save()",
        "x = torch.stack([a, b]).save()",
        "x = [float(v) for v in h.output[0]]",
        "h.output[0].save()",
        "xs = []; xs.append(h.output)",
    ],
)
def test_a_block_that_changes_nothing_takes_no_snapshots(text: str) -> None:
    assert not compile_block(" " + text, "user.py", 1, "f").snapshots


@pytest.mark.parametrize(
    "text",
    [
        "x += 1",
        "x[0] = 1",
        "del x[0]",
        "x.data = y",
        "x.add_(1)",
        "helper(x)",
        "helper.change(x)",
        "torch.add(x, 1, out=x)",
        "fs[0](x)",
    ],
)
def test_a_block_that_may_change_something_takes_snapshots(text: str) -> None:
    assert compile_block(" " + text, "user.py", 1, "f").snapshots


def test_the_same_text_is_compiled_once() -> None:
    one, two = (compile_block(" x = 1\n", "user.py", 1, "f") for _ in range(2))
    assert one is two and one is not compile_block(" x = 1\n", "user.py", 2, "f")
