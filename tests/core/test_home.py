"""Lines that come home: a traceback shows the user's file, line and text, wherever a block stands.

Each case is a function whose failing line ends in `# boom`. It runs on a model in this process and
on one whose blocks travel.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import inspect
import linecache
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nnsight_core import TorchModel

from . import notebook, wired
from .notebook import shows
from .wired import X

model: TorchModel
MARK = "# boom"
CASES: list[tuple[Callable[[], Any], tuple[str, ...]]] = []


def case(*names: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """A case whose traceback ends in frames of these names, the block's own being the first."""

    def keep(function: Callable[[], Any]) -> Callable[[], Any]:
        CASES.append((function, names or (function.__name__,)))
        return function

    return keep


def named(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator as people write them."""

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


def bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that hides what it decorates."""

    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


def helper(value: Any) -> Any:
    """A function that a block calls."""
    value = value + 1
    return value.reshape(7)  # boom


@named
def decorated(value: Any) -> Any:
    """One with a decorator."""
    return value.reshape(7)  # boom


@bare
@named
def twice(value: Any) -> Any:
    """One with two."""
    return value.reshape(7)  # boom


class Tool:
    """A class that a block uses."""

    @staticmethod
    def static(value: Any) -> Any:
        """A static method."""
        return value.reshape(7)  # boom

    def use(self, value: Any) -> Any:
        """A method."""
        return self.static(value)

    @property
    def broken(self) -> Any:
        """A property."""
        return [][0]  # boom


fail = lambda value: value.reshape(7)  # noqa: E731  # boom


@case()
def plain() -> None:
    with model.trace(X):
        x = model[0].output
        y = 1 / 0  # boom


@case("under_decorators")
@named
@bare
def under_decorators() -> None:
    with model.trace(X):
        y = 1 / 0  # boom


@case("calls", "helper")
def calls() -> None:
    with model.trace(X):
        helper(model[0].output)


@case("calls_decorated", "inner", "decorated")
def calls_decorated() -> None:
    with model.trace(X):
        decorated(model[0].output)


@case("calls_twice", "inner", "inner", "twice")
def calls_twice() -> None:
    with model.trace(X):
        twice(model[0].output)


@case("calls_a_method", "use", "static")
def calls_a_method() -> None:
    with model.trace(X):
        Tool().use(model[0].output)


@case("reads_a_property", "broken")
def reads_a_property() -> None:
    with model.trace(X):
        x = Tool().broken


@case("calls_a_lambda", "<lambda>")
def calls_a_lambda() -> None:
    with model.trace(X):
        fail(model[0].output)


@case("Holder")
def a_class_body() -> None:
    class Holder:
        width = 7
        with model.trace(X):
            x = model[0].output.reshape(width)  # boom


@case("read")
def a_method() -> None:
    class Probe:
        width = 7

        def read(self) -> None:
            with model.trace(X):
                x = model[0].output
                x.reshape(self.width)  # boom

    Probe().read()


@case("make")
def a_class_method() -> None:
    class Probe:
        @classmethod
        def make(cls) -> None:
            with model.trace(X):
                y = 1 / 0  # boom

    Probe.make()


@case("read")
def an_async_function() -> None:
    async def read() -> None:
        await asyncio.sleep(0)
        with model.trace(X):
            y = 1 / 0  # boom

    asyncio.run(read())


@case("each")
def a_generator() -> None:
    def each() -> Iterator[int]:
        yield 1
        with model.trace(X):
            y = 1 / 0  # boom

    list(each())


@case("innermost")
def a_closure() -> None:
    width = 7

    def inner() -> None:
        def innermost() -> None:
            with model.trace(X):
                x = model[0].output.reshape(width)  # boom

        innermost()

    inner()


@case("read")
def a_default_of_a_lambda() -> None:
    def read() -> Any:
        with model.trace(X):
            y = 1 / 0  # boom

    (lambda value=read(): value)()  # noqa: B008


@case()
def a_header_over_several_lines() -> None:
    with model.trace(
        X,
    ) as tracer:
        x = model[0].output

        # a comment
        y = 1 / 0  # boom


@case()
def a_statement_over_several_lines() -> None:
    with model.trace(X):
        total = sum(
            [
                1,
                2 / 0,  # boom
            ]
        )


@case()
def a_text_over_several_lines() -> None:
    with model.trace(X):
        text = """
one
        two
"""
        y = 1 / 0  # boom


# fmt: off
@case()
def a_body_on_the_line_of_its_header() -> None:
    with model.trace(X): y = 1 / 0  # noqa: E701  # boom


@case()
def two_statements_on_a_line() -> None:
    with model.trace(X): x = model[0].output; y = x / z  # type: ignore  # noqa: E701, E702, F821  # boom


@case()
def a_line_that_is_continued() -> None:
    with model.trace(X):
        x = \
            1 + \
            1 / 0  # boom
# fmt: on


@case()
def letters_beyond_ascii() -> None:
    with model.trace(X):
        größe = "ünï"
        é = größe + 1  # type: ignore[operator]  # boom


@case()
def statements_in_statements() -> None:
    for _ in range(2):
        if X is not None:
            with model.trace(X):
                for number in (1, 0):
                    if number == 0:
                        with open(os.devnull):
                            try:
                                pass
                            finally:
                                y = 1 / number  # boom


@case()
def an_assertion() -> None:
    with model.trace(X):
        x = model[0].output
        assert x is None, "not none"  # boom


@case("a_function_of_the_block", "inside")
def a_function_of_the_block() -> None:
    with model.trace(X):

        @bare
        def inside(value: Any) -> Any:
            return value.reshape(7)  # boom

        inside.__closure__[0].cell_contents(model[0].output)


@case("a_class_of_the_block", "use")
def a_class_of_the_block() -> None:
    with model.trace(X):

        class Inside:
            def use(self) -> Any:
                return 1 / 0  # boom

        Inside().use()


@case("a_generator_expression", "<genexpr>")
def a_generator_expression() -> None:
    with model.trace(X):
        total = sum(
            1 / number  # boom
            for number in (1, 0)
        )


@case()
def an_invoke_in_a_loop() -> None:
    with model.trace() as tracer:
        for number in (1, 0):
            with tracer.invoke(X):
                y = 1 / number  # boom


@case()
def an_error_of_ours() -> None:
    with model.trace(X):
        last = model[1].output
        first = model[0].output  # boom


@case("read")
def a_function_instead_of_a_body() -> None:
    def read(tracer: Any) -> Any:
        return model[0].output.reshape(7)  # boom

    model.trace(X, fn=read)


@pytest.fixture(params=["here", "wired"])
def ways(request: pytest.FixtureRequest) -> None:
    """A model that runs blocks where they stand, and one to which they travel."""
    global model
    model = wired.make(wired=request.param == "wired")


on_both_ways = pytest.mark.usefixtures("ways")


def failure(function: Callable[[], Any]) -> Exception:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("no error came")


def frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of a traceback below our own."""
    found = traceback.extract_tb(error.__traceback__)
    ours = [i for i, frame in enumerate(found) if f"{os.sep}nnsight_core{os.sep}" in frame.filename]
    return list(found)[ours[-1] + 1 :] if ours else list(found)


def check(error: BaseException, names: tuple[str, ...], filename: str = __file__) -> None:
    found = frames(error)
    assert tuple(frame.name for frame in found) == names
    for frame in found:
        assert frame.filename == filename
        assert frame.line == linecache.getline(filename, frame.lineno or 0).strip()
    assert (found[-1].line or "").endswith(MARK)


@on_both_ways
@pytest.mark.parametrize(("function", "names"), CASES, ids=[f.__name__ for f, _ in CASES])
def test_the_traceback_ends_at_the_user_s_line(
    function: Callable[[], Any], names: tuple[str, ...]
) -> None:
    error = failure(function)
    check(error, names)
    assert error.__notes__[-1].startswith("Raised in the block of invoke")


@on_both_ways
@pytest.mark.parametrize(("function", "names"), CASES, ids=[f.__name__ for f, _ in CASES])
def test_what_shows_a_frame_s_source_begins_at_its_function(
    function: Callable[[], Any], names: tuple[str, ...]
) -> None:
    """Debuggers, notebooks and pytest show the lines from where a frame's code begins."""
    last = failure(function).__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    assert last is not None
    code = last.tb_frame.f_code
    begin = linecache.getline(__file__, code.co_firstlineno)
    if names[-1].isidentifier() and names[-1] != "Holder":
        assert re.match(rf"\s*(@|(async )?def {names[-1]}\b)", begin), begin
    else:
        assert code.co_firstlineno <= last.tb_lineno
    lines, first = inspect.getsourcelines(last.tb_frame)
    assert lines[last.tb_lineno - first].rstrip().endswith(MARK)


@on_both_ways
def test_a_function_of_a_module_of_the_user_s(tmp_path: Path) -> None:
    path = tmp_path / "theirs.py"
    path.write_text("import math\n\n\ndef far(value):\n    return math.sqrt(-1)  # boom\n")
    spec = importlib.util.spec_from_file_location("theirs", path)
    assert spec is not None and spec.loader is not None
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    far = theirs.far

    def reads() -> None:
        with model.trace(X):
            far(model[0].output)

    found = frames(failure(reads))
    assert [(f.filename, f.name) for f in found] == [(__file__, "reads"), (str(path), "far")]
    assert found[1].lineno == 5 and found[1].line == "return math.sqrt(-1)  # boom"


@on_both_ways
def test_a_cause_is_shown_with_its_own_lines() -> None:
    def asks() -> None:
        with model.trace(X):
            try:
                helper(model[0].output)
            except RuntimeError as error:
                raise LookupError("asked") from error  # boom

    error = failure(asks)
    check(error, ("asks",))
    assert isinstance(error, LookupError) and isinstance(error.__cause__, RuntimeError)
    found = traceback.extract_tb(error.__cause__.__traceback__)
    assert [f.name for f in found] == ["asks", "helper"]
    assert (found[1].line or "").endswith(MARK)


@on_both_ways
def test_a_group_of_a_block_is_shown_with_the_lines_of_its_members() -> None:
    def collects() -> None:
        with model.trace(X):
            errors = []
            for number in (0, 1):
                try:
                    1 / number
                    helper(model[0].output)
                except Exception as error:
                    errors.append(error)
            raise ExceptionGroup("both", errors)  # boom

    error = failure(collects)
    check(error, ("collects",))
    assert isinstance(error, ExceptionGroup) and len(error.exceptions) == 2
    first, second = error.exceptions
    assert isinstance(first, ZeroDivisionError) and isinstance(second, RuntimeError)
    assert [f.line for f in traceback.extract_tb(first.__traceback__)] == ["1 / number"]
    assert [f.name for f in traceback.extract_tb(second.__traceback__)] == ["collects", "helper"]


class Diverged(ValueError):
    """An error of the user's own, made in a way of its own."""

    def __init__(self, *, hidden: Any, limit: float) -> None:
        super().__init__(f"above {limit}")
        self.hidden = hidden
        self.limit = limit


@on_both_ways
def test_an_error_of_the_user_s_own_class_brings_its_attributes() -> None:
    def looks() -> None:
        with model.trace(X):
            raise Diverged(hidden=model[0].output, limit=0.5)  # boom

    error = failure(looks)
    check(error, ("looks",))
    with model.trace(X):
        hidden = model[0].output.save()
    assert isinstance(error, Diverged) and str(error) == "above 0.5" and error.limit == 0.5
    assert error.hidden.equal(hidden)


@on_both_ways
def test_each_of_several_bad_invokes_has_its_own_lines_and_note() -> None:
    def reads() -> None:
        nonlocal kept
        with model.trace() as tracer:
            for number in range(3):
                with tracer.invoke(X):
                    kept = model[0].output.save()
                    if number == 0:
                        helper(kept)
                    if number == 2:
                        raise Diverged(hidden=None, limit=number)  # boom

    kept: Any = None
    group = failure(reads)
    assert isinstance(group, ExceptionGroup) and str(group).startswith("2 errors in 3 invokes")
    first, second = group.exceptions
    check(first, ("reads", "helper"))
    check(second, ("reads",))
    assert [e.__notes__ for e in group.exceptions] == [
        [f"Raised in the block of invoke {number}."] for number in (0, 2)
    ]
    assert len(kept) == 3 and all(value.shape == (1, 2) for value in kept)


@on_both_ways
def test_code_under_a_trace_function_keeps_its_lines_and_its_trace_function() -> None:
    """As under a debugger or a coverage tool, which are there before a trace is entered."""
    seen: set[int] = set()

    def tracer(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename == __file__:
            seen.add(frame.f_lineno)
        return tracer

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        error = failure(plain)
        after = sys.gettrace()
    finally:
        sys.settrace(before)
    check(error, ("plain",))
    assert after is tracer
    # The lines of the block count as run, though they ran elsewhere.
    first = plain.__code__.co_firstlineno
    assert {first + 2, first + 3, first + 4} <= seen


# -- in processes of their own ---------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
SCRIPT = """
import traceback
from tests.core import wired
from tests.core.wired import X

def helper(value):
    return value.reshape(7)  # boom

for way in (False, True):
    model = wired.make(way)
    try:
        with model.trace(X) as tracer:
            x = model[0].output.save()
            helper(x)
    except RuntimeError:
        traceback.print_exc()
    assert x.shape == (1, 2)

with model.trace(X):
    y = 1 / 0  # uncaught
"""
SHOWN = """
  File "{file}", line 14, in <module>
    helper(x)
  File "{file}", line 7, in helper
    return value.reshape(7)  # boom
RuntimeError: shape '[7]' is invalid for input of size 2
Raised in the block of invoke 0.
"""
UNCAUGHT = """
  File "{file}", line 20, in <module>
    y = 1 / 0  # uncaught
ZeroDivisionError: division by zero
Raised in the block of invoke 0.
"""


def python(*arguments: str, cwd: Path = ROOT, **environment: str) -> str:
    """What a Python process writes, without marks under lines."""
    paths = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=200,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )
    lines = (done.stdout + done.stderr).splitlines(keepends=True)
    return "".join(line for line in lines if line.strip(" ~^\n"))


def test_a_script(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    told = python(str(path))
    assert told.count(SHOWN.format(file=path)) == 2, told
    assert told.endswith(UNCAUGHT.format(file=path)), told


def test_a_module_that_is_run_by_name(tmp_path: Path) -> None:
    package = tmp_path / "theirs"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(SCRIPT)
    told = python("-m", "theirs", cwd=tmp_path)
    assert told.count(SHOWN.format(file=package / "__main__.py")) == 2, told
    assert told.endswith(UNCAUGHT.format(file=package / "__main__.py")), told


def test_python_c() -> None:
    told = python("-c", SCRIPT)
    assert told.count(SHOWN.format(file="<string>")) == 2, told
    uncaught = UNCAUGHT.format(file="<string>")
    if sys.version_info < (3, 13):
        # Python itself shows no text of what `-c` was given; it names the line.
        uncaught = uncaught.replace("    y = 1 / 0  # uncaught\n", "")
    assert told.endswith(uncaught), told


def test_code_typed_into_exec_under_python_c_is_not_taken_for_it() -> None:
    told = python(
        "-c",
        "from tests.core import wired\n"
        "model, X = wired.make(), wired.X\n"
        "try:\n"
        "    exec('\\n\\nwith model.trace(X): y = 1 / 0')\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n",
    )
    assert told.startswith("CaptureError The source of the block at <string>:3 cannot be had")


def test_python_c_whose_code_is_warm() -> None:
    told = python(
        "-c",
        """
from tests.core import wired
model, X = wired.make(), wired.X
def read(number):
    for turn in range(100):
        if turn == number:
            with model.trace(X):
                y = 1 / 0
for number in range(100, 200):
    read(number)
try:
    read(50)
except ZeroDivisionError as error:
    print(error.__traceback__.tb_next.tb_lineno)
""",
    )
    assert told == "7\n", told


EXAMPLES = """
>>> model = wired.make({way})
>>> with model.trace(X) as tracer:
...     x = model[0].output.save()
>>> x.shape
torch.Size([1, 2])
>>> with model.trace(X):
...     y = 1
...     y = y / 0  # boom
Traceback (most recent call last):
ZeroDivisionError: division by zero
Raised in the block of invoke 0.
>>> with model.trace(X):
...     y = 1
...     y = y + "a"  # boom
"""


def test_a_doctest(tmp_path: Path) -> None:
    path = tmp_path / "examples.py"
    examples = EXAMPLES.format(way=False) + EXAMPLES.format(way=True)
    path.write_text(f"'''Examples.\n>>> from tests.core import wired\n>>> X = wired.X{examples}'''")
    told = python("-m", "doctest", str(path))
    assert told.count("Failed example:") == 2, told
    for number in (6, 11):
        shown = f"""
      File "<doctest examples[{number}]>", line 3, in <module>
        y = y + "a"  # boom
    TypeError: unsupported operand"""
        assert shown in told, told


UNDER_PYTEST = """
# The first line of the file.
from tests.core import wired
from tests.core.wired import X

model = wired.make({way})


def helper(value):
    width = 7
    return value.reshape(width)


def test_block():
    expected = 2
    with model.trace(X):
        x = model[0].output.save()
        assert x.shape[1] == expected + 1


def test_helper():
    with model.trace(X):
        x = helper(model[0].output).save()
"""
PYTEST_SHOWS = [
    """
    def test_block():
        expected = 2
        with model.trace(X):
            x = model[0].output.save()
>           assert x.shape[1] == expected + 1
""",
    """
    def helper(value):
        width = 7
>       return value.reshape(width)
""",
]


def test_pytest_shows_the_lines_from_the_function_on(tmp_path: Path) -> None:
    for way in (False, True):
        (tmp_path / f"test_{way}.py").write_text(UNDER_PYTEST.format(way=way))
    told = python("-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, str(tmp_path))
    for shown in PYTEST_SHOWS:
        assert told.count(shown) == 2, told
    for way in (False, True):
        assert f"test_{way}.py:18: AssertionError" in told, told
        assert f"test_{way}.py:11: RuntimeError" in told, told
    assert "The first line of the file" not in told and "4 failed" in told, told


CELLS = [
    SCRIPT.split("for way")[0].lstrip() + "model = wired.make({way})",
    "# a comment\nwith model.trace(X) as tracer:\n    x = model[0].output.save()\n    helper(x)\n",
    "def read():\n    with model.trace(X):\n        y = 1 / 0  # boom\n\nread()\n",
    "x = x + 1\nx.shape\n",
    "%%time\nwith model.trace(X):\n    x = model[0].output.save()\n    y = 1 / 0  # boom\n",
    "%%time\nwith model.trace(X):\n    x = model[0].output.save()\nx.shape\n",
]


def test_cells_of_a_notebook() -> None:
    told = notebook.run([cell.format(way=way) for way in (False, True) for cell in CELLS])
    for made, called, inside, after, timed, timed_after in (told[:6], told[6:]):
        assert made == "", made
        assert shows(called, 4, "helper(x)"), called
        assert shows(called, 6, "return value.reshape(7)"), called
        assert shows(inside, 3, "y = 1 / 0  # boom"), inside
        assert "torch.Size([1, 2])" in after, after
        assert shows(timed, 3, "y = 1 / 0  # boom"), timed
        assert "torch.Size([1, 2])" in timed_after, timed_after


CLASSES = [
    """\
import dataclasses
import torch
from torch import nn
from tests.core import wired
model = wired.make()
model._backend.pickle = False
X = torch.ones(1, 2)
""",
    """\
# another line
class Probe(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(2, 1)

    def forward(self, x):
        return self.map(x) * 0 + 7

@dataclasses.dataclass
class Pair:
    a: float

    def twice(self):
        return 2 * self.a
""",
    """\
probe, pair = Probe(), Pair(3.0)
with model.trace(X):
    x = (probe(model[0].output) + pair.twice()).save()
x.item()
""",
    """\
class Other(Probe):
    def forward(self, x):
        return super().forward(x) + 100
probe = Other()
with model.trace(X):
    x = probe(model[0].output).save()
x.item()
""",
]


def test_classes_of_a_notebook_travel_as_source() -> None:
    """Where nothing may be pickled, as on a server."""
    told = notebook.run(CLASSES)
    assert [text.strip() for text in told] == ["", "", "13.0", "107.0"], told
