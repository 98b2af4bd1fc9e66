"""Runs cells as a notebook does: in a real kernel where one is installed, else as its kernel would.

What a kernel does to a cell's code decides whether a block is found in it: the text lies in
`linecache` under the name of a file that does not exist, and each statement is compiled by itself.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import json
import linecache
import os
import re
import subprocess
import sys
import tempfile
import traceback
import types
import zlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
REAL = all(map(importlib.util.find_spec, ("nbclient", "ipykernel")))


def run(cells: list[str], timeout: int = 200) -> list[str]:
    """What each cell shows, in a kernel of its own."""
    paths = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(cells),
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def shows(told: str, line: int, text: str) -> bool:
    """Whether a cell shows a line with its number and an arrow."""
    return re.search(rf"-> {line} +{re.escape(text)}", told) is not None


def _run_really(cells: list[str]) -> list[str]:
    import nbclient
    import nbformat

    with tempfile.TemporaryDirectory() as folder:
        kernel = Path(folder) / "kernels" / "python3"
        kernel.mkdir(parents=True)
        start = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        spec = {"argv": start, "display_name": "Python", "language": "python"}
        (kernel / "kernel.json").write_text(json.dumps(spec))
        os.environ["JUPYTER_PATH"] = folder
        book: Any = nbformat.v4.new_notebook()
        book.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
        nbclient.NotebookClient(book, kernel_name="python3", allow_errors=True).execute()
    return [_shown(cell.outputs) for cell in book.cells]


def _shown(outputs: list[Any]) -> str:
    texts = []
    for output in outputs:
        plain = output.get("data", {}).get("text/plain", "")
        texts += [output.get("text", ""), plain, "\n".join(output.get("traceback", []))]
    return re.sub("\x1b\\[[0-9;]*m", "", "\n".join(text for text in texts if text))


class _Kernel:
    """What `ipykernel` and IPython do to run a cell and to show its error."""

    def __init__(self) -> None:
        self.module = types.ModuleType("__main__")
        sys.modules["__main__"] = self.module
        self.names = vars(self.module)
        self.magics: dict[str, Any] = {"__name__": "IPython.core.magics.execution"}
        exec(_MAGICS, self.magics)

    def run(self, cell: str) -> str:
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            try:
                if cell.startswith("%%time\n"):
                    value = self.magics["timed"](cell.partition("\n")[2], self.names)
                else:
                    value = self._run(cell)
                if value is not None:
                    print(repr(value))
            except Exception as error:
                print(_traceback(error))
        return shown.getvalue()

    def _run(self, cell: str) -> Any:
        number = zlib.crc32(cell.encode())
        name = f"{tempfile.gettempdir()}/ipykernel_{os.getpid()}/{number}.py"
        lines = [line + "\n" for line in cell.splitlines()]
        linecache.cache[name] = (len(cell), None, lines, name)
        tree = ast.parse(cell, name)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        for node in tree.body:
            exec(compile(ast.Module([node], []), name, "exec"), self.names)
        if isinstance(last, ast.Expr):
            return eval(compile(ast.Expression(last.value), name, "eval"), self.names)
        return None


# `%%time`, in a module of IPython's name.
_MAGICS = """
import ast

def timed(cell, names):
    expr = cell
    tree = ast.parse(expr)
    value = None
    if isinstance(tree.body[-1], ast.Expr):
        value = ast.Expression(tree.body.pop().value)
    exec(compile(tree, "<timed exec>", "exec"), names)
    return value and eval(compile(value, "<timed exec>", "eval"), names)
"""


def _traceback(error: BaseException) -> str:
    """An error's lines in the way of IPython, with the lines around each."""
    parts = []
    if error.__cause__ is not None:
        parts += [_traceback(error.__cause__), "The above exception was the direct cause:"]
    for frame in traceback.extract_tb(error.__traceback__):
        parts.append(f"File {frame.filename}, line {frame.lineno}, in {frame.name}")
        for number in range(max((frame.lineno or 1) - 2, 1), (frame.lineno or 1) + 3):
            line = linecache.getline(frame.filename, number).rstrip("\n")
            arrow = "----> " if number == frame.lineno else "      "
            parts.append(f"{arrow}{number} {line}")
    return "\n".join([*parts, "".join(traceback.format_exception_only(error)).rstrip()])


if __name__ == "__main__":
    given = json.load(sys.stdin)
    kernel = None if REAL else _Kernel()
    print(json.dumps([kernel.run(c) for c in given] if kernel else _run_really(given)))
