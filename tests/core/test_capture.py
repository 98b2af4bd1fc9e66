"""Capture: from a `with` statement that is being entered to its body, and names bound after it."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import linecache
import os
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from nnsight_core import CaptureError, TorchModel, save

close = torch.testing.assert_close
X = torch.arange(8.0).reshape(2, 4)


def make() -> TorchModel:
    torch.manual_seed(0)
    return TorchModel(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))


MODEL = model = make()


def plain(upto: int) -> torch.Tensor:
    value = X
    with torch.no_grad():
        for layer in list(MODEL._backend.module)[: upto + 1]:  # type: ignore[union-attr]
            value = layer(value)
    return value


FIRST, SECOND, LAST = plain(0), plain(1), plain(2)


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str], ModuleType]:
    """Imports a text as a module of its own, from a file."""

    def load(text: str) -> ModuleType:
        path = tmp_path / f"user_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(textwrap.dedent(text))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        module.model, module.X, module.torch = model, X, torch  # type: ignore[attr-defined]
        spec.loader.exec_module(module)
        return module

    return load


# -- body shapes ---------------------------------------------------------------------------------


def test_a_body_on_the_line_of_its_header() -> None:
    # fmt: off
    with model.trace(X) as t: x = model[0].output.save()  # noqa: E701
    # fmt: on
    close(x, FIRST)
    close(t.saves["x"], FIRST)


def test_two_statements_on_the_line_of_a_header() -> None:
    # fmt: off
    with model.trace(X): a = model[0].output.save(); b = model[1].output.save()  # noqa: E701, E702
    # fmt: on
    close(a, FIRST)
    close(b, SECOND)


def test_a_body_that_starts_with_try() -> None:
    with model.trace(X):
        try:
            x = model[0].output.save()
            raise ValueError("never mind")
        except ValueError as error:
            text = str(error).save()
        finally:
            last = model[2].output.save()
    close(x, FIRST)
    close(last, LAST)
    assert text == "never mind"


def test_a_body_that_starts_with_with() -> None:
    with model.trace(X):
        with torch.enable_grad():
            on = torch.is_grad_enabled().save()
            x = model[0].output.save()
        off = torch.is_grad_enabled().save()
    close(x, FIRST)
    assert on is True and off is False


def test_a_body_that_starts_with_a_decorated_function() -> None:
    def twice(function: Any) -> Any:
        return lambda value: function(function(value))

    with model.trace(X):

        @twice
        def add(value: Any) -> Any:
            return value + 1

        x = add(model[0].output).save()
    close(x, FIRST + 2)


def test_a_nested_function_may_use_nonlocal_and_global() -> None:
    count = 10
    with model.trace(X):

        def bump() -> None:
            nonlocal count
            global GLOBAL_COUNT
            count += 1
            GLOBAL_COUNT += 1

        bump()
        bump()
        count = count.save()
        seen = (GLOBAL_COUNT + 0).save()
    assert count == 12 and seen == 102 and GLOBAL_COUNT == 100


GLOBAL_COUNT = 100


def test_a_nonlocal_of_a_function_in_the_block_stays_a_nonlocal() -> None:
    with model.trace(X):

        def counter() -> Any:
            n = 0

            def bump() -> int:
                nonlocal n
                n += 1
                return n

            return bump

        one, two = counter(), counter()
        one()
        found = [one(), two()].save()
    assert found == [2, 1]


def test_a_global_that_a_block_declares_is_bound_in_the_module() -> None:
    with model.trace(X):
        global MADE
        MADE = model[0].output.save()
    close(MADE, FIRST)


def test_comprehensions_see_the_names_of_the_block() -> None:
    with model.trace(X):
        factor = 3
        each = [layer.output * factor for layer in model].save()
        by = {str(i): i * factor for i in range(3) if i < factor}.save()
        flat = [a * b for a in range(2) for b in range(factor)].save()
    close(each, [FIRST * 3, SECOND * 3, LAST * 3])
    assert by == {"0": 0, "1": 3, "2": 6} and flat == [0, 0, 0, 0, 1, 2]


def test_a_class_in_a_body() -> None:
    scale = 5
    with model.trace(X):

        class Scaler:
            scale = 2

            def __call__(self, value: Any) -> Any:
                return value * scale * self.scale

        x = Scaler()(model[0].output).save()
    close(x, FIRST * 10)


def test_a_walrus_binds_a_name_that_comes_home() -> None:
    with model.trace(X):
        if (x := model[0].output.save()).sum() != 0:
            seen = True.save()
    close(x, FIRST)
    assert seen is True


def test_a_header_over_many_lines() -> None:
    with model.trace(
        X,
    ) as tracer:
        x = model[0].output.save()
    close(x, FIRST)
    close(tracer.saves["x"], FIRST)


def test_a_trace_as_the_last_of_several_items() -> None:
    entered = []

    @contextlib.contextmanager
    def around() -> Any:
        entered.append("in")
        yield 3
        entered.append("out")

    with around() as three, model.trace(X) as tracer:
        x = (model[0].output * three).save()
    close(x, FIRST * 3)
    assert entered == ["in", "out"]
    with (
        around() as three,
        around(),
        model.trace(X),
    ):
        x = (model[0].output * three).save()
    close(x, FIRST * 3)


def test_a_trace_that_is_not_the_last_item_is_refused() -> None:
    with pytest.raises(CaptureError, match="must be the last item"):
        with model.trace(X), contextlib.nullcontext():
            x = model[0].output.save()


def test_the_same_trace_twice_in_one_header_is_refused() -> None:
    with pytest.raises(CaptureError, match="must be the last item"):
        with model.trace(X), model.trace(X):
            x = model[0].output.save()


def test_a_trace_may_be_made_before_its_with() -> None:
    trace = model.trace(X)
    with trace:
        x = model[0].output.save()
    close(x, FIRST)


def test_a_body_in_for_if_try_and_while() -> None:
    found = []
    for factor in (1, 2):
        if factor:
            try:
                while True:
                    with model.trace(X):
                        x = (model[0].output * factor).save()
                    found.append(x)
                    break
            finally:
                pass
    close(found, [FIRST, FIRST * 2])


def test_an_invoke_in_a_loop_and_a_condition() -> None:
    with model.trace() as tracer:
        for factor in range(4):
            if factor % 2:
                with tracer.invoke(X * factor):
                    x = model[0].input.save()
    close(x, [X, X * 3])


def test_a_body_in_a_method_and_in_a_nested_function() -> None:
    class Probe:
        factor = 2

        def read(self) -> Any:
            def inner() -> Any:
                with model.trace(X):
                    x = (model[0].output * self.factor).save()
                return x

            return inner()

    close(Probe().read(), FIRST * 2)


def test_a_body_in_a_lambdas_default() -> None:
    def read() -> Any:
        with model.trace(X):
            x = model[0].output.save()
        return x

    close((lambda value=read(): value)(), FIRST)  # noqa: B008


def test_a_body_in_a_generator_and_in_a_coroutine() -> None:
    def layers() -> Any:
        for index in range(2):
            with model.trace(X):
                x = model[index].output.save()
            yield x

    async def read() -> Any:
        with model.trace(X):
            x = model[0].output.save()
        return x

    close(list(layers()), [FIRST, SECOND])
    coroutine = read()
    with pytest.raises(StopIteration) as stopped:
        coroutine.send(None)
    close(stopped.value.value, FIRST)


def test_a_body_in_a_class_body() -> None:
    class Holder:
        with model.trace(X):
            x = model[0].output.save()
        double = x * 2

    close(Holder.x, FIRST)
    close(Holder.double, FIRST * 2)


def test_a_body_at_module_level(load: Any) -> None:
    module = load(
        """
        with model.trace(X) as tracer:
            x = model[0].output.save()
            kept = 1
        y = x + 1
        """
    )
    close(module.y, FIRST + 1)
    close(module.tracer.saves["x"], FIRST)
    assert not hasattr(module, "kept")


def test_a_body_indented_with_tabs(load: Any) -> None:
    module = load(
        "def read():\n\tfor _ in range(1):\n\t\twith model.trace(X):\n"
        "\t\t\tif True:\n\t\t\t\tx = model[0].output.save()\n\treturn x\n"
    )
    close(module.read(), FIRST)


def test_annotations_of_a_body_are_evaluated_as_in_its_file(load: Any) -> None:
    body = """
        def read():
            with model.trace(X):
                def same(value: Missing) -> Missing:
                    return value
                x: torch.Tensor = same(model[0].output).save()
            return x
        """
    close(load("from __future__ import annotations\n" + textwrap.dedent(body)).read(), FIRST)
    with pytest.raises(NameError, match="Missing"):
        load(body).read()


def test_relative_imports_and_names_of_the_module_in_a_body(load: Any) -> None:
    module = load(
        """
        import json as parser
        LIMIT = 2
        def read():
            with model.trace(X):
                import math
                from math import floor as down
                x = (model[0].output * LIMIT * down(math.pi)).save()
                name = (__name__ + parser.dumps([1])).save()
            return x, name
        """
    )
    x, name = module.read()
    close(x, FIRST * 6)
    assert name == module.__name__ + "[1]"


def test_comments_and_blank_lines_around_a_body() -> None:
    with model.trace(X):  # a comment
        # another

        x = model[0].output.save()

        # a last one
        text = """
  a text that is not indented
"""
        text = text.save()
    close(x, FIRST)
    assert text == "\n  a text that is not indented\n"


def test_names_and_texts_beyond_ascii() -> None:
    größe = 2
    # fmt: off
    with model.trace(X): é = "ünï"; x = (model[0].output * größe).save(); text = é.save()  # noqa: E701, E702
    # fmt: on
    close(x, FIRST * 2)
    assert text == "ünï"


# -- what cannot be captured -----------------------------------------------------------------------


def test_code_without_source_is_refused_with_the_way_out() -> None:
    text = "with model.trace(X):\n    x = model[0].output.save()\n"
    with pytest.raises(CaptureError, match=r"cannot be had.*fn=function"):
        exec(text, {"model": model, "X": X})


def test_a_function_can_be_given_instead_of_a_body() -> None:
    scope: dict[str, Any] = {"model": model}
    exec("def read(tracer):\n    return model[0].output * 2", scope)
    tracer = model.trace(X, fn=scope["read"])
    close(tracer.value, FIRST * 2)
    assert tracer.saves == {}


def test_a_function_instead_of_a_body_needs_a_prompt() -> None:
    with pytest.raises(ValueError, match="needs a prompt"):
        model.trace(fn=lambda tracer: None)


def test_an_exit_stack_is_refused() -> None:
    with contextlib.ExitStack() as stack, pytest.raises(CaptureError, match="No `with` statement"):
        stack.enter_context(model.trace(X))


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("return model[0].output", "`return` cannot stand in a block"),
        ("yield model[0].output", "`yield` cannot stand in a block"),
        ("x = yield from []", "`yield` cannot stand in a block"),
        ("if True:\n                break", "break"),
        ("continue", "continue"),
    ],
)
def test_leaving_the_function_from_a_body_is_refused(
    load: Any, statement: str, message: str
) -> None:
    module = load(
        f"""
        def read():
          for _ in range(1):
            with model.trace(X):
              {statement}
        """
    )
    with pytest.raises(CaptureError, match=message) as refused:
        list(module.read() or ())
    assert module.__file__ in str(refused.value)


@pytest.mark.parametrize(
    ("statement", "word"),
    [
        ("await nothing()", "await"),
        ("async for _ in nothing(): pass", "asyncfor"),
        ("async with nothing(): pass", "asyncwith"),
    ],
)
def test_waiting_in_a_body_is_refused(load: Any, statement: str, word: str) -> None:
    module = load(
        f"""
        async def nothing(): pass
        async def read():
            with model.trace(X):
                {statement}
        """
    )
    with pytest.raises(CaptureError, match=f"`{word}` cannot stand in a block"):
        module.read().send(None)


def test_return_and_yield_of_functions_in_a_body_are_their_own() -> None:
    with model.trace(X):

        def each() -> Any:
            for value in (1, 2, 3):
                if value == 2:
                    continue
                yield value
                if value == 3:
                    break

        found = list(each()).save()
        made = (lambda: 5)().save()
    assert found == [1, 3] and made == 5


@pytest.mark.parametrize(
    "changed",
    [
        "# one line more\n{}",
        "{}".replace("{}", "def read():\n    pass\n"),
        "{} (",
        *(
            f"def read():\n    with model.trace(X):\n        x = {new}.save()\n    return x\n"
            for new in (
                "other[0].output",
                "model[2].output",
                "model[0].input",
                "(2 * model).output",
            )
        ),
        "def read():\n    with model.trace(X):\n        model[0].output.save()\n    return x\n",
    ],
    ids=["moved", "gone", "broken", "name", "number", "attribute", "more", "less"],
)
def test_a_file_that_was_changed_since_it_was_imported_is_refused(load: Any, changed: str) -> None:
    text = (
        "def read():\n    with model.trace(X):\n        x = model[0].output.save()\n    return x\n"
    )
    module = load(text)
    Path(module.__file__).write_text(changed.format(text))
    linecache.checkcache(module.__file__)
    with pytest.raises(CaptureError, match="changed since it was imported"):
        module.read()


EVERYTHING = """
from __future__ import annotations
import pytest
SIGN = -1
def read(flag=True):
    total: dict[str, int] = {}
    try:
        while flag:
            with model.trace(X) as tracer:
                if __debug__:
                    total["debug"] = 1
                assert (out := model[0].output) is not None, f"{SIGN!r:>{9}} {'a' in {'b', 'a'}}"
                both = [a + b for a, b in zip((1, 2), (3, 4)) if a not in (5, 6)]
                named = {k: (lambda v, *, w=SIGN: v * w)(v) for k, v in enumerate(both)}
                class Own:
                    'A class.'
                    size: int = 3
                    def get(self) -> int:
                        return super().__hash__() * 0 + self.size
                x: torch.Tensor = out[..., 0:1:2] * -1 + 2 ** 3
                match both:
                    case [4, *rest]:
                        x = x + len(rest)
                x = (x, named, Own().get()).save()
            break
    finally:
        flag = False
    return x
"""


@pytest.mark.parametrize("way", ["imported", "rewritten", "optimized"])
def test_a_file_that_was_not_changed_is_never_taken_for_one_that_was(
    tmp_path: Path, load: Any, way: str
) -> None:
    if way == "imported":
        x, named, size = load(EVERYTHING).read()
        assert x.shape == (2, 1) and named == {0: -4, 1: -6} and size == 3
        return
    test = "def test_it():\n    assert read()[1] == {0: -4, 1: -6}\n"
    head = "from tests.core.test_capture import X, model, torch\n"
    text = EVERYTHING.replace("import pytest\n", head) + test
    path = tmp_path / "test_user.py"
    path.write_text(text if way == "rewritten" else text + "test_it()\n")
    flags = ["-m", "pytest", "-p", "no:cacheprovider"] if way == "rewritten" else ["-O"]
    environment = {**os.environ, "PYTHONPATH": "."}
    done = subprocess.run(
        [sys.executable, *flags, str(path)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_block_that_was_captured_before_is_not_looked_up_again(load: Any) -> None:
    module = load(
        "def read():\n    with model.trace(X):\n        x = model[0].output.save()\n    return x"
    )
    close(module.read(), FIRST)
    Path(module.__file__).write_text("")
    linecache.checkcache(module.__file__)
    close(module.read(), FIRST)


# -- other places that code comes from -------------------------------------------------------------

SCRIPT = """
import torch
from torch import nn
from nnsight_core import TorchModel
model = TorchModel(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
with model.trace(torch.ones(1, 2)) as tracer:
    x = model[0].output.save()
with model.trace(torch.ones(1, 2)): y = model[1].output.save()
assert torch.equal(x.relu(), y) and tracer.saves["x"] is x
print("shape", *x.shape)
"""


def test_a_script_and_python_c(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    for command in ([str(path)], ["-c", SCRIPT]):
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        assert done.stdout == "shape 1 2\n", done.stderr


def test_standard_input_is_refused_with_the_way_out() -> None:
    done = subprocess.run([sys.executable], input=SCRIPT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "cannot be had" in done.stderr and "fn=function" in done.stderr


def run_cell(text: str, name: str, scope: dict[str, Any]) -> None:
    # As IPython does it: the text lies in linecache under a name that is no file.
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), scope)


def test_a_cell_of_a_notebook() -> None:
    scope: dict[str, Any] = {"model": model, "X": X, "__name__": "__main__"}
    text = "with model.trace(X) as tracer:\n    x = model[0].output.save()\nx = x + 1\n"
    run_cell(text, "<ipython-input-1-abc>", scope)
    close(scope["x"], FIRST + 1)
    run_cell(text.replace("model[0]", "model[2]"), "<ipython-input-2-abc>", scope)
    close(scope["x"], LAST + 1)


# -- the frame around a body -----------------------------------------------------------------------


def test_python_never_runs_a_body_where_it_stands() -> None:
    ran = []
    with model.trace(X):
        ran = [*ran, "here"]
        y = 1
    assert ran == []
    with pytest.raises(UnboundLocalError):
        print(y)


def test_a_trace_function_is_restored_and_sees_the_lines_around_a_body() -> None:
    lines: list[int] = []
    here = sys._getframe()

    def tracer(frame: Any, event: str, argument: Any) -> Any:
        if frame is here and event == "line":
            lines.append(frame.f_lineno - first)
        return tracer

    before = sys.gettrace(), here.f_trace
    first = here.f_lineno
    sys.settrace(tracer)
    here.f_trace = tracer
    try:
        with model.trace(X):  # first + 4
            x = model[0].output.save()
        restored = sys.gettrace(), here.f_trace  # first + 6
    finally:
        sys.settrace(before[0])
        here.f_trace = before[1]
    assert restored == (tracer, tracer)
    assert lines[:2] == [3, 4] and 6 in lines and 5 not in lines
    close(x, FIRST)


def test_no_trace_function_is_left_behind() -> None:
    before = sys.gettrace(), sys._getframe().f_trace, sys._getframe().f_trace_opcodes
    with model.trace(X):
        x = model[0].output.save()
    assert (sys.gettrace(), sys._getframe().f_trace, sys._getframe().f_trace_opcodes) == before
    with pytest.raises(CaptureError), contextlib.ExitStack() as stack:
        stack.enter_context(model.trace(X))
    assert (sys.gettrace(), sys._getframe().f_trace, sys._getframe().f_trace_opcodes) == before
    with pytest.raises(ZeroDivisionError), model.trace(X):
        1 / 0
    assert (sys.gettrace(), sys._getframe().f_trace, sys._getframe().f_trace_opcodes) == before


def test_names_are_bound_in_closures_and_modules(load: Any) -> None:
    x = other = None

    def inner() -> None:
        nonlocal x
        with model.trace(X):
            x = model[0].output.save()

    inner()
    close(x, FIRST)
    assert other is None
    module = load(
        """
        x = None
        def read():
            global x
            with model.trace(X):
                x = model[0].output.save()
        """
    )
    module.read()
    close(module.x, FIRST)


def test_a_cell_shared_with_a_closure_gets_the_new_value() -> None:
    x = None

    def seen() -> Any:
        return x

    with model.trace(X):
        x = model[0].output.save()
    close(seen(), FIRST)


def test_the_as_target_may_be_an_attribute_or_an_item() -> None:
    class Holder:
        tracer: Any = None

    holder, items = Holder(), {}
    with model.trace(X) as holder.tracer:
        x = model[0].output.save()
    with model.trace(X) as items["tracer"]:
        x = model[0].output.save()
    close(holder.tracer.saves["x"], FIRST)
    close(items["tracer"].saves["x"], FIRST)


def test_an_old_value_of_a_name_that_is_bound_anew_is_not_taken_along() -> None:
    x = object()
    unused = x
    with model.trace(X):
        kept = sorted(n for n in globals() if n in ("x", "unused")).save()
        x = model[0].output.save()
        y = x + 1
    assert kept == []


class Token:
    """Something that can be watched dying."""


def test_nothing_of_the_frame_or_the_block_is_kept_alive() -> None:
    def read() -> tuple[Any, Any, Any]:
        token, unused = Token(), Token()
        with model.trace(X) as tracer:
            assert token
            inner = Token()
            x = model[0].output.save()
        assert x is not None
        return weakref.ref(token), weakref.ref(unused), tracer

    token, unused, tracer = read()
    gc.collect()
    assert token() is None and unused() is None
    close(tracer.saves["x"], FIRST)


def test_nothing_is_kept_alive_after_an_error() -> None:
    def read() -> Any:
        token = Token()
        try:
            with model.trace(X):
                assert token
                raise ValueError("stop")
        except ValueError:
            pass
        return weakref.ref(token)

    found = read()
    gc.collect()
    assert found() is None


def test_values_go_without_the_garbage_collector() -> None:
    def read() -> Any:
        with model.trace(X):
            x = model[0].output.save()
        return weakref.ref(x)

    gc.collect()
    gc.disable()
    try:
        assert read()() is None
    finally:
        gc.enable()


def test_a_debugger_of_frames_may_look_at_a_body() -> None:
    frames: list[str] = []

    def tracer(frame: Any, event: str, argument: Any) -> Any:
        frames.append(frame.f_code.co_name)
        return tracer

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        with model.trace(X):
            x = save(model[0].output)
    finally:
        sys.settrace(before)
    close(x, FIRST)
    assert "forward" in frames


def test_a_name_is_bound_in_every_frame_whose_invoke_saves_it() -> None:
    def add(tracer: Any) -> Any:
        with tracer.invoke(X):
            h = model[0].output.save()
        yield
        yield h

    h: Any = "stale"
    with model.trace() as tracer:
        other = add(tracer)
        next(other)
        with tracer.invoke(X):
            h = model[1].output.save()
    close(h, [FIRST, SECOND])
    assert next(other) is h


def test_a_name_is_left_alone_where_an_invoke_only_reads_it() -> None:
    def add(tracer: Any, h: float) -> Any:
        with tracer.invoke(X):
            _ = (model[0].output * h).save()
        yield
        yield h

    with model.trace() as tracer:
        other = add(tracer, 2.0)
        next(other)
        with tracer.invoke(X):
            h = model[1].output.save()
    close(h[-1], SECOND)
    assert next(other) == 2.0


v = 100


def test_a_variable_around_a_class_hides_that_of_the_module() -> None:
    v = 1

    class Inner:
        with model.trace(X):
            x = (model[0].output * 0 + v).save()

        class Innermost:
            with model.trace(X):
                y = (model[0].output * 0 + v).save()

    close(Inner.x, torch.ones(2, 4))
    close(Inner.Innermost.y, torch.ones(2, 4))


def test_a_variable_that_has_no_value_hides_that_of_the_module() -> None:
    if not model:
        v = 1
    with pytest.raises(NameError, match="v"), model.trace(X):
        (model[0].output * 0 + v).save()


def test_a_variable_of_a_comprehension_hides_nothing() -> None:
    assert [v for v in range(2)] == [0, 1]  # noqa: C416
    with model.trace(X):
        x = (model[0].output * 0 + v).save()
    close(x, torch.full((2, 4), 100.0))


class _Private:
    __vec = 2.0

    def __init__(self) -> None:
        self.__bias = 1.0

    def read(self, __given: float = 3.0) -> Any:
        __k = 4.0

        def called(__this: float = 0.0, **more: float) -> float:
            return __this + sum(more.values())

        with model.trace(X) as __tracer:
            assert __tracer is not None
            __x = (model[0].output * 0 + self.__vec + self.__bias + __given + __k).save()
            y = called(__this=5.0).save()

            class Other:
                __vec = 7.0

                def get(self) -> float:
                    return self.__vec

            other, name = Other().get().save(), "self.__vec".save()
        return __x, y, other, name


def test_private_names_are_those_of_the_class_around_a_block() -> None:
    x, y, other, name = _Private().read()
    close(x, torch.full((2, 4), 10.0))
    assert (y, other, name) == (5.0, 7.0, "self.__vec")
