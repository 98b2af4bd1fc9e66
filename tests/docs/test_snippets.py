"""Every Python block in the README and the docs runs.

The blocks of one page share a namespace and run in order, as a reader would type them. They run
from a file on disk, since capture reads source, and each line keeps its number, so that a traceback
points into the page. A fence that says `python notest reason="..."` is compiled and not run.

Engines here are vLLM's own default but for PyTorch's compiler, which takes longer than all the
rest; only the pages of `COMPILED` have it.
"""

import linecache
import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("packages/*/README.md")),
]
FENCE = re.compile(
    r"^(?P<indent> *)```python\b(?P<info>[^\n]*)\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S
)
COMPILED = {"docs/speed.md"}
NAMES = {"MODEL": "gpt2_path", "LLAMA": "smollm2_path", "SERVER_URL": "server_url"}


@dataclass(frozen=True)
class Block:
    page: str
    line: int  # of the first line of code
    info: str
    code: str

    @property
    def runs(self) -> bool:
        return "notest" not in self.info.split()


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(ROOT).as_posix()
    return [
        Block(name, text.count("\n", 0, m.start("code")) + 1, m["info"].strip(), dedent(m["code"]))
        for m in FENCE.finditer(text)
    ]


BLOCKS = [block for page in PAGES if page.exists() for block in blocks_of(page)]
RUN = {page: [b for b in BLOCKS if b.page == page and b.runs] for page in {b.page for b in BLOCKS}}


def as_script(blocks: list[Block]) -> str:
    """The blocks as one file in which every line has the number it has on the page."""
    script = ""
    for block in blocks:
        script += "\n" * (block.line - 1 - script.count("\n")) + block.code
    return script


def close_models(namespace: dict) -> None:
    """Ends the engines that a page leaves open, as the end of a script would."""
    for value in namespace.values():
        if type(value).__module__.startswith("nnsight_") and hasattr(type(value), "close"):
            value.close()


@pytest.mark.parametrize("page", sorted(page for page, blocks in RUN.items() if blocks))
def test_the_blocks_of_a_page_run(page, tmp_path, request, monkeypatch):
    if page in COMPILED:
        monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    script = as_script(RUN[page])
    path = tmp_path / (re.sub(r"\W", "_", page) + ".py")
    path.write_text(script, encoding="utf-8")
    linecache.checkcache(str(path))
    namespace: dict = {"__name__": "__main__", "__file__": str(path)}
    for name, fixture in NAMES.items():
        if re.search(rf"\b{name}\b", script):
            namespace[name] = request.getfixturevalue(fixture)
    try:
        with torch._dynamo.config.patch(disable=page not in COMPILED):
            exec(compile(script, str(path), "exec"), namespace)
    finally:
        close_models(namespace)


@pytest.mark.parametrize(
    "block", [pytest.param(b, id=f"{b.page}:{b.line}") for b in BLOCKS if not b.runs]
)
def test_a_block_that_does_not_run_compiles_and_says_why(block):
    compile(block.code, block.page, "exec")
    reason = re.search(r'reason="([^"]+)"', block.info)
    assert reason, f'{block.page}:{block.line}: say why: ```python notest reason="..."'
    pytest.skip(reason[1])
