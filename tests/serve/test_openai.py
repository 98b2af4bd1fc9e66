"""The OpenAI routes of a server, used through OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from nnsight_client import VLLM
from nnsight_serve.cli import _parser, _settings
from nnsight_serve.openai import prompts_in
from tests.fixtures.server import Server, serving

PROMPT = "The Eiffel Tower is in the city of"
NAME = "gpt2-of-the-tests"
KEY = "a key"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}
MAX_BODY = 100_000


@pytest.fixture(scope="module")
def spoken(gpt2_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the GPT-2 under a name, with a chat template and a key."""
    flags = ["--served-model-name", NAME, "--chat-template", TEMPLATE, "--response-role", "oracle"]
    flags += ["--max-body", str(MAX_BODY)]
    with serving(tmp_path_factory.mktemp("openai"), gpt2_path, *flags, key=KEY) as running:
        yield running


@pytest.fixture(scope="module")
def client(spoken: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{spoken.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def ours(spoken: Server, gpt2_path: str) -> Iterator[VLLM]:
    with VLLM(gpt2_path, serve=spoken.url, api_key=KEY) as model:
        yield model


LONG = {"ignore_eos": True}


@pytest.fixture(autouse=True)
def unharmed(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test, nothing is left in the engine."""
    yield
    if "ours" in request.fixturenames:
        request.getfixturevalue("ours").clear_edits()
        server = request.getfixturevalue("spoken")
        assert server.empty() and loaded(server)["edits"] == 0


def loaded(server: Server) -> dict[str, int]:
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.get(f"{server.url}/v1/load", headers=headers).raise_for_status().json()


def text_of(made: Any) -> str:
    return made.choices[0].text


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **options: Any) -> Any:
    given = {**GREEDY, "extra_body": LONG, **options}
    return client.completions.create(model=NAME, prompt=prompt, **given)


def chat(client: openai.OpenAI, text: str = PROMPT, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    given = {**GREEDY, "extra_body": LONG, **options}
    return client.chat.completions.create(model=NAME, messages=messages, **given)


def test_the_model_is_listed_under_its_name(client, gpt2_path):
    [model] = client.models.list().data
    assert (model.id, model.owned_by) == (NAME, "vllm")
    assert model.model_extra is not None and model.model_extra["root"] == gpt2_path


def test_a_completion_is_what_a_generation_of_ours_is(client, ours):
    prompts = [PROMPT, "The capital of France is"]
    made = complete(client, prompts)
    outputs = ours.generate(prompts, **GREEDY, **LONG)
    assert [c.text for c in made.choices] == [o.outputs[0].text for o in outputs]
    assert made.choices[0].text.startswith(" Paris")
    assert made.usage.prompt_tokens == sum(len(o.prompt_token_ids) for o in outputs)
    # Without edits there is nothing to say of them.
    assert "nnsight" not in made.model_extra


def test_ids_of_no_token_are_refused_and_the_engine_goes_on(client, ours):
    strange: list[dict[str, Any]] = [
        {"prompt": [1, -1, 3]},
        {"prompt": [1, -(10**6)]},
        {"prompt": [10**6]},
        {"extra_body": {"stop_token_ids": [10**9], "min_tokens": 3}},
        {"extra_body": {"allowed_token_ids": [10**6]}},
    ]
    for options in strange:
        with pytest.raises(openai.BadRequestError):
            complete(client, **options)
    assert text_of(complete(client)).startswith(" Paris")


def test_a_chat_goes_through_the_template_that_was_given(client):
    made = chat(client)
    assert made.choices[0].message.content == complete(client).choices[0].text
    assert made.choices[0].message.role == "oracle"


def test_streams_come_in_pieces_that_make_the_whole(client):
    whole = complete(client).choices[0].text
    pieces = [part.choices[0].text for part in complete(client, stream=True)]
    assert len(pieces) == GREEDY["max_tokens"] and "".join(pieces) == whole
    deltas = [part.choices[0].delta.content for part in chat(client, stream=True)]
    assert "".join(d or "" for d in deltas) == whole


def test_several_choices_and_logprobs(client):
    made = complete(client, n=3, temperature=1.0, seed=1, logprobs=2)
    assert [choice.index for choice in made.choices] == [0, 1, 2]
    for choice in made.choices:
        assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.tokens) == 6
        assert all(2 <= len(each) <= 3 for each in choice.logprobs.top_logprobs)
    [first, *_] = chat(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert first.token == " Paris" and len(first.top_logprobs) == 2


@pytest.mark.parametrize(
    ("options", "kind", "param", "says"),
    [
        ({"model": "another"}, openai.NotFoundError, "model", "`another` does not exist"),
        ({"temperature": -1.0}, openai.BadRequestError, "temperature", "non-negative"),
        ({"prompt": "a " * 500}, openai.BadRequestError, None, "maximum context length"),
        ({"n": "many"}, openai.BadRequestError, "body.n", "integer"),
        ({"extra_body": {"edits": ["x"]}}, openai.BadRequestError, "edits", "there: none"),
        ({"extra_body": {"edits": "x"}}, openai.BadRequestError, "edits", "a list of names"),
        ({"extra_body": {"edits": [1]}}, openai.BadRequestError, "edits", "a list of names"),
        (
            {"extra_body": {"edits": [], "use_beam_search": True}},
            openai.BadRequestError,
            "edits",
            "beam search",
        ),
        *(
            (
                {"extra_body": {"vllm_xargs": {name: "x"}}},
                openai.BadRequestError,
                "vllm_xargs",
                "the server's own",
            )
            for name in ("nnsight", "nnsight_edits", "nnsight_key", "nnsight_asked")
        ),
    ],
)
def test_refusals_are_those_that_openais_client_knows(client, spoken, options, kind, param, says):
    with pytest.raises(kind, match=says) as caught:
        client.completions.create(**{"model": NAME, "prompt": PROMPT, **GREEDY, **options})
    assert caught.value.body["code"] == caught.value.status_code
    if param is not None:
        assert caught.value.body["param"] == param
    assert spoken.live() == 0


def test_entries_of_ones_own_are_passed_on(client):
    extra = {"vllm_xargs": {"mine": 1}, **LONG}
    assert complete(client, extra_body=extra).choices[0].text == complete(client).choices[0].text


def test_it_may_be_asked_for_under_each_of_its_names(ours, spoken, gpt2_path):
    for name in (NAME, f"org/{NAME}", f"{gpt2_path}/", f"another/folder/{Path(gpt2_path).name}"):
        with VLLM(name, serve=spoken.url, api_key=KEY) as model:
            assert model.generate([1, 2, 3], **GREEDY)[0].finished
            assert repr(model) == f"<VLLM {name!r}, {spoken.url} runs {gpt2_path!r}>"


def test_the_key_guards_these_routes_too(spoken):
    for key in ("another", KEY + "x"):
        stranger = openai.OpenAI(base_url=f"{spoken.url}/v1", api_key=key, max_retries=0)
        with pytest.raises(openai.AuthenticationError, match="Authorization: Bearer"):
            stranger.models.list()
        with pytest.raises(openai.AuthenticationError):
            complete(stranger)
        with pytest.raises(openai.AuthenticationError):
            chat(stranger)
    assert httpx.post(f"{spoken.url}/v1/completions", json={"prompt": PROMPT}).status_code == 401


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_refused(client, spoken, chunked):
    body = b'{"prompt": "' + b"a" * (MAX_BODY + 1)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    answer = httpx.post(
        f"{spoken.url}/v1/completions", content=iter([body]) if chunked else body, headers=headers
    )
    assert answer.status_code == 413 and answer.json()["error"]["code"] == 413
    assert str(MAX_BODY) in answer.json()["error"]["message"]


def test_no_more_of_vllms_server_is_there(spoken):
    headers = {"Authorization": f"Bearer {KEY}"}
    for path in ("/v1/responses", "/v1/chat/completions/batch", "/tokenize", "/v1/messages"):
        assert httpx.post(spoken.url + path, json={}, headers=headers).status_code == 404


def steer(model: VLLM, name: str | None = "steer") -> Any:
    with model.edit(name) as (tracer, edit):
        for _ in tracer.all():
            model.transformer.h[3].output[:] *= -2.0
    return edit


def choosing(edits: list[str]) -> dict[str, Any]:
    return {"extra_body": {"edits": edits, **LONG}}


def test_an_edit_belongs_to_every_request_and_names_choose(client, ours):
    plain = text_of(complete(client))
    edit = steer(ours)
    steered = complete(client)
    [output] = ours.generate(PROMPT, **GREEDY, **LONG)
    assert text_of(steered) == output.outputs[0].text != plain
    assert steered.model_extra["nnsight"] == {"edits": [edit.id], "errors": []}
    assert text_of(complete(client, **choosing(["steer"]))) == text_of(steered)
    without = complete(client, **choosing([]))
    assert text_of(without) == plain and "nnsight" not in without.model_extra
    steer(ours, None)
    assert text_of(complete(client, **choosing([]))) == text_of(steered)
    with pytest.raises(openai.BadRequestError, match="no edit 'other' is installed; there: 'st"):
        complete(client, **choosing(["other"]))


def test_chats_have_edits_as_well(client, ours):
    steer(ours)
    for edits in (["steer"], []):
        made = chat(client, **choosing(edits)).choices[0].message.content
        assert made == text_of(complete(client, **choosing(edits)))


def test_what_edits_raise_is_told_and_logged_and_the_request_goes_on(client, ours, spoken):
    plain = text_of(complete(client))
    with ours.edit("broken") as (tracer, edit):
        raise ValueError("here")
    made = complete(client, [PROMPT, "Hello"], n=2, temperature=1.0)
    assert len(made.choices) == 4
    error = {"edit": edit.id, "name": "broken", "type": "ValueError", "message": "here"}
    assert made.model_extra["nnsight"] == {"edits": [edit.id], "errors": [error]}
    assert (
        f"The edit {edit.id} has failed once, last with ValueError: here" in spoken.log.read_text()
    )
    assert text_of(complete(client)) == plain
    [info] = ours.edits
    assert info.errors == info.requests == 5


def test_a_stream_says_it_at_the_end_to_who_names_edits(client, ours):
    edit = steer(ours)
    whole = text_of(complete(client))
    *parts, last = complete(client, stream=True, **choosing(["steer"]))
    assert "".join(part.choices[0].text for part in parts) == whole
    assert last.choices == [] and (last.id, last.model) == (parts[0].id, NAME)
    assert last.model_extra["nnsight"] == {"edits": [edit.id], "errors": []}
    others = list(complete(client, stream=True))
    assert "".join(part.choices[0].text for part in others) == whole
    *parts, last = chat(client, stream=True, **choosing(["steer"]))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole
    assert last.object == parts[0].object and last.model_extra["nnsight"]["edits"] == [edit.id]


def test_a_request_keeps_the_edits_that_it_began_with(client, ours):
    edit = steer(ours)
    whole = text_of(complete(client, max_tokens=100))
    with complete(client, max_tokens=100, stream=True) as stream:
        parts = iter(stream)
        text = next(parts).choices[0].text
        edit.clear()
        assert text + "".join(part.choices[0].text for part in parts) == whole
    assert text_of(complete(client, max_tokens=100)) != whole


def test_an_edit_that_waits_for_the_output_does_not_hold_the_answer(client, ours):
    with ours.edit("late") as (tracer, edit):
        text = tracer.result.outputs[0].text.save()
    assert complete(client).model_extra["nnsight"] == {"edits": [edit.id], "errors": []}


def test_a_client_that_leaves_takes_its_request_along(client, ours, spoken):
    steer(ours)
    with complete(client, max_tokens=240, stream=True) as stream:
        next(iter(stream))
        assert loaded(spoken)["requests"] == 1 == spoken.live()
    assert spoken.empty(within=2) and loaded(spoken)["requests"] == 0


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({"prompt": "a"}, 1),
        ({"prompt": ["a", "b", "c"], "n": 4}, 3),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1], [2, 3]]}, 2),
        ({"prompt": ["a"], "prompt_embeds": ["x", "y"]}, 3),
        ({"prompt": None, "prompt_embeds": "x"}, 1),
        ({"prompt": []}, 1),
        ({"messages": [{}, {}]}, 1),
        ([1, 2], 1),
    ],
)
def test_each_prompt_of_a_body_is_a_request_of_the_engine(body, count):
    for encoding in ("utf-8", "utf-16"):  # which vLLM reads as well
        assert prompts_in(json.dumps(body).encode(encoding)) == count
    assert prompts_in(b"{bad") == prompts_in(b"[" * 100_000) == 1


def read(*command: str) -> Any:
    return _settings(["m", *command], _parser())


def test_flags_of_the_routes_are_read_in_vllms_spelling(tmp_path: Path):
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    flags = ["--chat-template", str(template), "--enable-auto-tool-choice"]
    flags += ["--tool-call-parser", "hermes", "--dtype", "float32"]
    settings = read(*flags)
    assert settings.engine == {"dtype": "float32"}
    assert settings.openai == {
        "chat_template": str(template),
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
    }


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--ssl-keyfile", "x"], "knows the flag --ssl-keyfile"),
        (["--tool-server", "demo"], "knows the flag --tool-server"),
        (["--chat-templat", "x"], "Did you mean --chat-template?"),
    ],
)
def test_other_flags_of_vllms_server_are_unknown(flags, says):
    from nnsight_vllm_worker.vllm_ports import arguments

    with pytest.raises(arguments.UsageError, match=says.replace("?", r"\?")):
        read(*flags)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"enable_auto_tool_choice": True}, "requires --tool-call-parser"),
        ({"enable_auto_tool_choice": True, "tool_call_parser": "x"}, "invalid tool call parser: x"),
        ({"chat_template": "no/such/file.jinja"}, "refuses its arguments"),
        ({"chat_templat": "x"}, "Did you mean chat_template?"),
        ({"host": "x"}, "no argument 'host'"),
    ],
)
def test_arguments_are_judged_before_an_engine_is_built(given, says):
    from nnsight_vllm_worker.vllm_ports.openai import arguments_of

    with pytest.raises(ValueError, match=says.replace("?", r"\?")):
        arguments_of("m", {}, given)
