"""The tables on the page about engine settings are those of the code."""

import inspect
import re
from pathlib import Path

from nnsight_vllm_worker import VLLM
from nnsight_vllm_worker.settings import REFUSED, SETTINGS

PAGE = Path(__file__).parents[2] / "docs/engine-settings.md"


def tables_of(page: Path) -> list[list[list[str]]]:
    """The cells of each table of a page, without its header and without code marks."""
    found = re.findall(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8"), re.M)
    return [
        [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines[2:]]
        for lines in (table.splitlines() for table in found)
    ]


def test_the_page_lists_every_setting_with_its_reason() -> None:
    assert tables_of(PAGE)[0] == [
        [s.name, str(s.value), "forced" if s.forced else "default", s.reason] for s in SETTINGS
    ]


def test_the_page_lists_everything_that_is_refused() -> None:
    assert tables_of(PAGE)[1] == [[name, reason] for name, reason in REFUSED.items()]


def test_the_page_lists_every_argument_of_ours_with_its_default() -> None:
    ours = inspect.signature(VLLM.__init__).parameters
    listed = {name.partition("`")[0]: default for name, default, _ in tables_of(PAGE)[2]}
    assert listed.keys() <= ours.keys()
    words = {60.0: "60 seconds", 3600.0: "1 hour", 4 << 30: "4 GiB"}
    for name, default in listed.items():
        held = ours[name].default
        assert default == words.get(held) or default.strip('"') == str(held)
