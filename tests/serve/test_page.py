"""The page of a server, as a person uses it in a browser."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from nnsight_client import VLLM
from tests.fixtures.browser import Tab, browsing
from tests.fixtures.server import KEY, Server

NASTY = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">"
CALLED = (
    "[...document.querySelectorAll('#tree .toggle')].filter(b => b.firstChild.textContent === {})"
)


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with browsing() as tab:
        tab.look()
        yield tab


@pytest.fixture
def page(tab: Tab, server: Server) -> Iterator[Tab]:
    """The page of a server that wants no key; whatever is done with it, it stays clean."""
    tab.errors.clear()
    tab.requests.clear()
    permissions = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    tab.call("Browser.grantPermissions", permissions=permissions, origin=server.url)
    tab.go(server.url)
    tab.until("document.querySelector('#state.well')")
    yield tab
    assert tab.errors == []
    assert {urlsplit(url).netloc for url in tab.requests} == {urlsplit(server.url).netloc}


def opened(page: Tab, *names: str) -> None:
    """Open modules, each within the one before."""
    for name in names:
        page.run(CALLED.format(repr(name)) + ".at(-1).click()")


def test_what_is_served_is_shown(page, server, gpt2_path):
    name = gpt2_path.rpartition("/")[2]
    assert page.run("document.getElementById('model').textContent") == name
    assert page.run("document.title").startswith(name)
    assert "vllm" in page.run("document.getElementById('about').textContent")
    load = page.run("document.getElementById('load').innerText")
    assert "Running requests\n0" in load and "Blocks in the engine\n0" in load
    assert page.run("document.getElementById('door').hidden")


def test_layers_that_look_alike_are_one_row_until_they_are_opened(page):
    before = page.run("document.querySelectorAll('#tree .row').length")
    opened(page, "transformer", "h")
    assert page.run("document.querySelectorAll('#tree .row').length") < before + 12
    text = page.run("document.getElementById('tree').innerText")
    assert "0 – 11" in text and re.search(r"12 × \w+, all alike", text)
    opened(page, "0 – 11", "7", "mlp")
    text = page.run("document.getElementById('tree').innerText")
    assert "c_fc" in text and "tokens × 96" in text
    opened(page, "0 – 11")
    assert page.run(CALLED.format("'7'") + "[0].checkVisibility()") is False


def test_search_finds_and_a_location_is_copied(page):
    page.write("search", "h.7.mlp output")
    page.until("document.querySelectorAll('#hits li').length")
    hits = page.run("document.getElementById('hits').innerText")
    assert "model.transformer.h[7].mlp.output" in hits and "float32 tokens × 96" in hits
    assert "h[6]" not in hits
    page.run("document.querySelector('#hits .place').click()")
    page.until("document.getElementById('said').textContent")
    copied = page.run("navigator.clipboard.readText()")
    assert copied == page.run("document.querySelector('#hits .place').textContent")
    assert copied.startswith("model.transformer.h[7].mlp")
    page.write("search", "no such thing")
    page.until("document.getElementById('found').textContent === 'No location is called so.'")
    page.write("search", " ")
    page.until("document.getElementById('tree').checkVisibility()")


def test_what_is_copied_where_the_clipboard_is_kept_from_the_page(page):
    page.run("window.clipboard = navigator.clipboard, 0")
    page.run("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.run("document.querySelector('.copy').click()")
    page.until("document.getElementById('said').textContent")
    said = page.run("document.getElementById('said').textContent")
    assert said == "Copied from nnsight_client import VLLM"
    copied = page.run("window.clipboard.readText()")
    assert copied == page.run("document.getElementById('trace').textContent")


@pytest.mark.parametrize("width", [390, 1200])
def test_edits_are_shown_with_their_statistics_and_names_are_only_text(
    page, server, gpt2_path, width
):
    page.look(width)
    with VLLM(gpt2_path, serve=server.url) as model:
        with model.edit(NASTY, share=0.5, ttl=600) as (tracer, edit):
            model.transformer.h[3].output.mean().save()
        with model.edit("broken") as (tracer, broken):
            raise ValueError
        for _ in range(3):
            httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hello", "max_tokens": 1})
        page.until("document.querySelectorAll('#edits tbody tr').length === 2")
        page.until("document.querySelector('#edits tbody .bad')?.textContent === '3'")
        rows = "[...document.querySelectorAll('#edits tbody tr')]"
        cells = page.run(f"{rows}.map(row => [...row.cells].map(cell => cell.textContent))")
        nasty, other = ([text.strip() for text in row] for row in cells)
        assert nasty[0].startswith(NASTY) and nasty[4] == "50 %"
        assert nasty[3] in ("in 9 minutes", "in 10 minutes")
        assert other[0].startswith("broken") and other[3:6] == ["—", "100 %", "3"]
        assert page.run("document.querySelectorAll('#edits script, #edits img').length") == 0
        assert "taken" not in page.run("document.title")
        # Nothing is wider than the screen.
        assert page.run("document.documentElement.scrollWidth <= innerWidth")
        model.clear_edits()
    page.until("document.getElementById('edits').hidden")
    page.look()


def test_the_snippet_runs(page, server, tmp_path):
    page.run("[...document.querySelectorAll('.copy')][0].click()")
    page.until("document.getElementById('said').textContent")
    code = page.run("navigator.clipboard.readText()")
    assert f'serve="{server.url}"' in code
    path = tmp_path / "snippet.py"
    path.write_text(code)
    names: dict = {}
    exec(compile(code, str(path), "exec"), names)
    names["model"].close()
    assert names["hidden"].shape[-1] == 96 and names["logits"].shape[0] == 1


def test_the_page_works_with_the_keyboard(page):
    page.run("document.getElementById('search').focus()")
    page.press("Tab")
    assert page.run("document.activeElement.className") == "toggle"
    page.press("Enter")
    assert page.run("document.activeElement.getAttribute('aria-expanded')") == "false"
    unnamed = page.run(
        "[...document.querySelectorAll('button, input')].filter(e => e.checkVisibility() && "
        "!(e.textContent || e.getAttribute('aria-label') || e.labels?.length)).length"
    )
    assert unnamed == 0


def test_files_come_with_headers_that_keep_others_out(server):
    with httpx.Client(base_url=server.url) as http:
        answer = http.get("/")
        assert answer.headers["content-type"].startswith("text/html")
        for path in ("/", "/page/page.js", "/page/tree.js", "/page/page.css", "/page/icon.svg"):
            answer = http.get(path)
            assert "default-src 'self'" in answer.headers["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"
            again = http.get(path, headers={"If-None-Match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        for path in ("/page/nothing.js", "/page/../app.py", "/page/%2e%2e%2fapp.py"):
            assert http.get(path).status_code == 404


def test_a_key_is_asked_for_and_a_wrong_one_is_one_sentence(tab, keyed_server):
    tab.look()
    tab.go(keyed_server.url)
    tab.until("document.getElementById('door')?.checkVisibility()")
    assert tab.run("document.getElementById('wrong').textContent") == ""
    for wrong in ("another", "schlüssel 🗝"):
        tab.write("key", wrong)
        tab.press("Enter")
        tab.until("document.getElementById('wrong').textContent")
        said = tab.run("document.getElementById('wrong').textContent")
        assert said == "This server does not know that key."
        assert not tab.run("document.getElementById('inside').checkVisibility()")
    tab.errors.clear()
    tab.write("key", KEY)
    tab.press("Enter")
    tab.until("document.querySelector('#state.well')")
    assert "layers" in tab.run("document.getElementById('trace').textContent")
    assert KEY not in tab.run("document.documentElement.outerHTML")
    # It stays in this tab.
    tab.call("Page.reload")
    tab.until("document.querySelector('#state.well')")
    assert tab.run("localStorage.length") == 0 and tab.errors == []
    # And is asked for again once the server does not know it any more.
    tab.run("sessionStorage.setItem('nnsight-key', 'other')")
    tab.until("document.getElementById('door').checkVisibility()")


def test_a_server_that_is_gone_is_said(tab, keyed_server):
    tab.go(keyed_server.url)
    tab.until("document.getElementById('door')?.checkVisibility()")
    tab.write("key", KEY)
    tab.press("Enter")
    tab.until("document.querySelector('#state.well')")
    (engine,) = (p for p in keyed_server.processes() if "EngineCore" in "".join(p.cmdline()))
    os.kill(engine.pid, signal.SIGKILL)
    tab.until("document.querySelector('#state.gone')?.textContent.includes('must be restarted')")
    keyed_server.process.kill()
    keyed_server.process.wait(30)
    tab.until("document.querySelector('#state.gone')?.textContent.includes('does not answer')")
