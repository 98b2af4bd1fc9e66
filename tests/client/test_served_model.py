"""A server may run another model than the one that was asked for."""

from __future__ import annotations

import asyncio
import os
import warnings
from pathlib import Path
from urllib.parse import quote

import pytest

from nnsight_client import VLLM
from nnsight_client.served import HEADER, Served
from nnsight_core import NNsightWarning

URL = "http://127.0.0.1:6677"
IDS = [1, 2, 3]
ONE = {"max_tokens": 1}


@pytest.fixture(autouse=True)
def strict():
    """A warning that was not expected is an error, also where it was given before."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", NNsightWarning)
        yield


def test_another_model_is_told_of_once(server_url, gpt2_path):
    with VLLM("some-org/other-model", serve=server_url) as model:
        assert repr(model) == f"<VLLM 'some-org/other-model', {server_url}>"
        with pytest.warns(NNsightWarning, match="runs .*, and 'some-org/other-model' was asked"):
            with model.trace(IDS, **ONE):
                hidden = model.transformer.h[3].output.save()
        assert hidden.shape[0] == len(IDS) and f"runs {gpt2_path!r}" in repr(model)
        assert model.generate(IDS, **ONE)[0].finished


def test_so_it_is_by_a_tree_and_in_async(server_url):
    with pytest.warns(NNsightWarning, match="was asked for"):
        VLLM("some-org/other-model", serve=server_url).tree

    async def ask() -> None:
        model = VLLM("some-org/other-model", serve=server_url, mode="async")
        with pytest.warns(NNsightWarning, match="was asked for"):
            await model.generate(IDS, **ONE)
        await model.aclose()

    asyncio.run(ask())


def took(repo: str, *names: str) -> Served:
    served = Served(repo, URL)
    served.take({HEADER: ",".join(map(quote, names))})
    return served


@pytest.mark.parametrize(
    ("repo", "names"),
    [
        ("openai-community/gpt2", ["openai-community/gpt2"]),
        ("openai-community/gpt2", ["/models/GPT2/"]),
        ("/home/ann/gpt2", ["openai-community/gpt2"]),
        (r"C:\models\gpt2", ["gpt2"]),
        ("mine/alias", ["/models/gpt2", "alias"]),
        ("a,b c", ["x", "a,b c"]),
        ("org/gpt2", ["/home/ann/.cache/hub/models--openai-community--gpt2/snapshots/0a1b2c"]),
        ("other", []),
    ],
)
def test_one_model_under_several_names_is_the_same(repo: str, names: list[str]):
    assert took(repo, *names).names == tuple(names)


def test_a_folder_may_be_named_by_a_dot_or_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "gpt2").mkdir()
    os.symlink(tmp_path / "gpt2", tmp_path / "current")
    monkeypatch.chdir(tmp_path / "gpt2")
    for repo in (".", "./", str(tmp_path / "current")):
        assert took(repo, "openai-community/gpt2").names


@pytest.mark.parametrize("names", [["gpt2-large"], ["models--openai-community--gpt2-large"]])
def test_another_one_is_not(names: list[str]):
    with pytest.warns(NNsightWarning, match="give its name"):
        took("openai-community/gpt2", *names)
