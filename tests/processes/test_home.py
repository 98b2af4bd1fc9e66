"""What comes home from an engine in processes of its own: lines, errors, warnings, prints."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight_core import BlockError
from nnsight_vllm_worker import VLLM
from tests.core import notebook

ROOT = Path(__file__).parents[2]
PROMPT = "The Eiffel Tower is in the city of"
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "enforce_eager": True}
if torch.cuda.is_available():
    # Several engines share one GPU in these tests.
    SETTINGS["gpu_memory_utilization"] = 0.1
    # A process that has had one engine cannot fork another onto the GPU.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


# -- where code comes from -------------------------------------------------------------------------

SCRIPT = """import traceback
from nnsight_vllm_worker import VLLM

class Diverged(ValueError):
    def __init__(self, *, hidden, limit):
        super().__init__(f"above {{limit}}")
        self.hidden, self.limit = hidden, limit

def helper(hidden):
    try:
        return hidden.reshape(-1, 7)  # low
    except RuntimeError as error:
        raise Diverged(hidden=hidden, limit=0.5) from error  # high

if __name__ == "__main__":
    model = VLLM({path!r}, **{settings!r})
    try:
        with model.trace({prompt!r}, temperature=0.0, max_tokens=1) as tracer:
            hidden = model.transformer.h[2].output.save()
            helper(hidden)
    except Diverged as error:
        traceback.print_exc()
        print("the same", error.hidden.equal(hidden), error.limit)
"""
UNCAUGHT = """
    with model.trace({prompt!r}, max_tokens=1): y = 1 / 0  # uncaught
"""
SHOWN = [
    ("<module>", 20, "helper(hidden)"),
    ("helper", 11, "return hidden.reshape(-1, 7)  # low"),
    ("helper", 13, "raise Diverged(hidden=hidden, limit=0.5) from error  # high"),
    ("<module>", 25, "with model.trace({prompt!r}, max_tokens=1): y = 1 / 0  # uncaught"),
]
CAUSED = "\nThe above exception was the direct cause of the following exception:\n"


def python(*arguments: str) -> str:
    """What a Python process with an engine of its own writes."""
    paths = os.pathsep.join([str(ROOT), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=300
    )
    return done.stdout + done.stderr


def script(gpt2_path: str) -> str:
    return (SCRIPT + UNCAUGHT).format(path=gpt2_path, settings=SETTINGS, prompt=PROMPT)


def test_a_script(gpt2_path: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(script(gpt2_path))
    told = python(str(path))
    for function, line, text in SHOWN:
        shown = f'  File "{path}", line {line}, in {function}\n    {text.format(prompt=PROMPT)}\n'
        assert shown in told, told
    assert "the same True 0.5" in told and CAUSED in told, told
    assert told.count("Raised in the block of invoke 0.") == 2, told


def test_python_c(gpt2_path: str) -> None:
    told = python("-c", script(gpt2_path))
    for function, line, text in SHOWN:
        shown = f'  File "<string>", line {line}, in {function}\n'
        if "uncaught" not in text or sys.version_info >= (3, 13):
            # Python itself shows no text of what `-c` was given before that.
            shown += f"    {text.format(prompt=PROMPT)}\n"
        assert shown in told, told
    assert "the same True 0.5" in told and CAUSED in told, told


CELLS = [
    "model = VLLM({path!r}, **{settings!r})",
    """# The first line.
with model.trace({prompt!r}, max_tokens=1) as tracer:
    hidden = model.transformer.h[2].output.save()
    print("in the block")
    helper(hidden)
""",
    "hidden.shape",
    "%%time\nwith model.trace({prompt!r}, max_tokens=1):\n    x = 1 / 0\n",
    "model.close()",
]


def test_cells_of_a_notebook(gpt2_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    cells = [SCRIPT.partition("if __name__")[0], *CELLS]
    values = {"path": gpt2_path, "settings": SETTINGS, "prompt": PROMPT}
    _, _, told, after, timed, _ = notebook.run([c.format(**values) for c in cells], timeout=300)
    assert "[invoke 0] in the block\n" in told
    for line, text in (
        (5, "helper(hidden)"),
        (11, "return hidden.reshape(-1, 7)  # low"),
        (13, "raise Diverged(hidden=hidden, limit=0.5) from error  # high"),
    ):
        assert notebook.shows(told, line, text), told
    assert "Diverged: above 0.5\nRaised in the block of invoke 0." in told, told
    assert "torch.Size([8, 96])" in after, after
    assert notebook.shows(timed, 2, "x = 1 / 0"), timed


# -- one engine ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(gpt2_path: str) -> Iterator[VLLM]:
    """An engine in processes of its own."""
    before = os.environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    with VLLM(gpt2_path, **SETTINGS) as model:
        yield model
    if before is not None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = before


def lines(error: BaseException) -> list[str]:
    """The texts of the frames of this file."""
    found = traceback.extract_tb(error.__traceback__)
    return [frame.line or "" for frame in found if frame.filename == __file__]


class Diverged(ValueError):
    """An error of the user's own, made in a way of its own."""

    def __init__(self, *, hidden: torch.Tensor, limit: float) -> None:
        super().__init__(f"above {limit}")
        self.hidden = hidden
        self.limit = limit
        self.lock = io.StringIO()


def check(hidden: torch.Tensor) -> None:
    """A function that a block calls."""
    try:
        hidden.reshape(-1, 7)  # low
    except RuntimeError as error:
        raise Diverged(hidden=hidden[:2], limit=0.5) from error  # high


def test_an_error_of_the_user_s_own_class_comes_home_whole(model: VLLM) -> None:
    with pytest.raises(Diverged, match="above 0.5") as raised:
        with model.trace(PROMPT, max_tokens=1):
            hidden = model.transformer.h[2].output.save()
            check(hidden)
    error = raised.value
    assert error.limit == 0.5 and torch.equal(error.hidden, hidden[:2])
    assert not hasattr(error, "lock")
    assert lines(error)[1:] == [
        "check(hidden)",
        "raise Diverged(hidden=hidden[:2], limit=0.5) from error  # high",
    ]
    cause = error.__cause__
    assert isinstance(cause, RuntimeError) and lines(cause) == ["hidden.reshape(-1, 7)  # low"]
    assert error.__notes__ == ["Raised in the block of invoke 0."]


def test_a_group_that_a_block_raises_comes_home_with_its_members(model: VLLM) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        with model.trace(PROMPT, max_tokens=1):
            errors = []
            for layer in (1, 2):
                try:
                    check(model.transformer.h[layer].output)
                except Diverged as error:
                    errors.append(error)
            raise ExceptionGroup("both", [*errors, KeyError("third")])
    assert raised.value.message == "both"
    first, second, third = raised.value.exceptions
    assert isinstance(first, Diverged) and isinstance(second, Diverged)
    assert first.hidden.shape == (2, 96) and not torch.equal(first.hidden, second.hidden)
    assert lines(second)[0] == "check(model.transformer.h[layer].output)"
    assert isinstance(second.__cause__, RuntimeError)
    assert type(third) is KeyError and third.args == ("third",)


def test_each_of_several_bad_invokes_has_its_own_error_and_the_good_ones_values_are_bound(
    model: VLLM,
) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        with model.trace(temperature=0.0, max_tokens=1) as tracer:
            for number in range(4):
                with tracer.invoke(PROMPT):
                    hidden = model.transformer.h[2].output.save()
                    if number == 1:
                        check(hidden)
                    if number == 2:
                        exit(number)
                    logits = model.logits.save()
    first, second = raised.value.exceptions
    assert isinstance(first, Diverged) and lines(first)[0] == "check(hidden)"
    assert isinstance(second, BlockError) and str(second) == "SystemExit: 2"
    assert lines(second)[0] == "exit(number)"
    assert first.__notes__ == ["Raised in the block of invoke 1."]
    assert [h.shape for h in hidden] == [(8, 96)] * 4
    assert [value is None for value in logits] == [False, True, True, False]
    assert torch.equal(logits[0], logits[3])
    assert [o and o.outputs[0].text for o in tracer.outputs] == [" Paris", None, None, " Paris"]


class Suspicious(UserWarning):
    """A warning of the user's own."""


def doubt(hidden: torch.Tensor) -> None:
    """A function that warns where it was called."""
    warnings.warn("twice", Suspicious, stacklevel=2)


def test_warnings_come_home_with_their_class_file_and_line(model: VLLM) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            hidden = model.transformer.h[2].output
            warnings.warn("once", RuntimeWarning, stacklevel=1)  # line 3
            doubt(hidden)  # line 4
            warnings.warn(Suspicious("third"), stacklevel=1)  # line 5
            for number in range(2):
                warnings.warn(f"in a loop: {number}", stacklevel=1)  # line 7
    with open(__file__) as file:
        text = file.read().splitlines()
    found = [(w.category, str(w.message), text[w.lineno - 1][-6:]) for w in caught]
    assert {w.filename for w in caught} == {__file__}
    assert found == [
        (RuntimeWarning, "once", "line 3"),
        (Suspicious, "twice", "line 4"),
        (Suspicious, "third", "line 5"),
        (UserWarning, "in a loop: 0", "line 7"),
        (UserWarning, "in a loop: 1", "line 7"),
    ]


def test_warnings_follow_the_filters_of_the_user_s_process(model: VLLM) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", category=Suspicious)
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            doubt(model.transformer.h[2].output)
            warnings.warn("seen", stacklevel=1)
    assert [str(w.message) for w in caught] == ["seen"]


def test_warnings_that_are_errors_here_are_raised_when_the_values_are_bound(model: VLLM) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", Suspicious)
        with pytest.raises(ExceptionGroup, match="2 errors in 2 invokes") as raised:
            with model.trace(temperature=0.0, max_tokens=1) as tracer:
                for _ in range(2):
                    with tracer.invoke(PROMPT):
                        hidden = model.transformer.h[2].output.save()
                        doubt(hidden)
                        logits = model.logits.save()
    assert torch.equal(*hidden) and torch.equal(*logits)
    assert [o and o.outputs[0].text for o in tracer.outputs] == [" Paris", " Paris"]
    for error in raised.value.exceptions:
        assert isinstance(error, Suspicious) and lines(error) == ["doubt(hidden)"]


def test_prints_come_home_in_order_with_their_invoke(
    model: VLLM, capsys: pytest.CaptureFixture[str]
) -> None:
    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        for number in range(2):
            with tracer.invoke(PROMPT):
                print("before", number, flush=True)
                hidden = model.transformer.h[2].output
                print("a", "b", sep="-", end="")
                print("-c")
                print("one\ntwo", end="\n\n")
                own = io.StringIO()
                print("kept in the block", file=own)
                told = own.getvalue().save()
                print()
                print("after", tuple(hidden.shape))
    out = capsys.readouterr().out
    assert told == ["kept in the block\n"] * 2
    for number in range(2):
        mark = f"[invoke {number}] "
        mine = [line[len(mark) :] for line in out.splitlines() if line.startswith(mark)]
        expected = [f"before {number}", "a-b-c", "one", "two", "", "", "after (8, 96)"]
        assert mine == expected
    assert len(out.splitlines()) == 14


def test_what_was_printed_before_an_error_comes_home(
    model: VLLM, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ZeroDivisionError):
        with model.trace(PROMPT, max_tokens=1):
            print("before the error")
            1 / 0
            print("never")
    assert capsys.readouterr().out == "[invoke 0] before the error\n"
