"""The tables on the page about engine settings are those of the code."""

import re
from pathlib import Path

from nnsight_vllm_worker.settings import REFUSED, SETTINGS

PAGE = Path(__file__).parents[2] / "docs/engine-settings.md"


def tables() -> list[list[list[str]]]:
    """The cells of each table of the page, without its header and without code marks."""
    found = re.findall(r"(?:^\|.*\n)+", PAGE.read_text(encoding="utf-8"), re.M)
    return [
        [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines[2:]]
        for lines in (table.splitlines() for table in found)
    ]


def test_the_page_lists_every_setting_with_its_reason() -> None:
    assert tables()[0] == [
        [s.name, str(s.value), "forced" if s.forced else "default", s.reason] for s in SETTINGS
    ]


def test_the_page_lists_everything_that_is_refused() -> None:
    assert tables()[1] == [[name, reason] for name, reason in REFUSED.items()]


def test_environment_variables_are_said_to_be_some() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for setting in SETTINGS:
        assert (f"`{setting.name}` is an environment variable" in text) == setting.environment
