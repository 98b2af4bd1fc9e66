"""What a client knows of a tree: from the server, from earlier, or from transformers' classes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nnsight_client import VLLM, trees
from nnsight_client.provisional import FAMILIES, provisional_tree
from nnsight_core import LocationError, ModelTree, ModuleInfo, ProtocolError
from nnsight_core.tree_cache import keep_tree
from nnsight_core.wire.frames import VERSION
from tests.client.test_model import answering

ONE: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """Nothing is known from earlier."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(trees, "_unreachable", {})


def tree_with(layers: int, *names: str) -> ModelTree:
    """A tree of some layers, each of which has children of some names."""
    paths = {f"layers.{n}": names for n in range(layers)}
    modules = {"": ModuleInfo(cls="Model", children=("layers",))}
    modules["layers"] = ModuleInfo(cls="List", children=tuple(str(n) for n in range(layers)))
    for path, children in paths.items():
        modules[path] = ModuleInfo(cls="Layer", children=children)
        modules |= {f"{path}.{child}": ModuleInfo(cls="Part") for child in children}
    return ModelTree(model="tiny", engine="test", modules=modules)


def described(tree: ModelTree) -> Any:
    answer = {"protocol": VERSION, "sampling": [], "tree": tree.model_dump(mode="json")}
    return answering(json.dumps(answer).encode(), "application/json")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_names_of_a_provisional_tree_are_the_engines(family, request):
    engine = request.getfixturevalue(family)
    tree = provisional_tree(engine._repo)
    assert tree is not None and tree.provisional and not engine.tree.provisional
    assert tree.modules.keys() == engine.tree.modules.keys()
    for path, info in engine.tree.modules.items():
        assert tree.modules[path].children == info.children, path
        assert tree.modules[path].same_as == info.same_as, path


def test_without_a_server_it_is_the_provisional_one(llama_path):
    model = VLLM(llama_path)
    assert model.tree.provisional and "(qkv_proj): QKVParallelLinear" in str(model)
    assert len(model.model.layers) == 6 and "gate_up_proj" in dir(model.model.layers[0].mlp)
    # It refuses nothing: whoever runs the model has the last word.
    assert repr(model.model.layers[0].of_another_release) == "<model.layers.0.of_another_release>"
    with pytest.raises(ValueError, match="No server is named"):
        with model.trace("Hello"):
            logits = model.logits.save()


def test_a_model_of_another_family_has_none(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "opt"}')
    assert provisional_tree(str(tmp_path)) is None
    model = VLLM(str(tmp_path))
    assert repr(model.anything[3].at_all) == "<anything.3.at_all>"
    with pytest.raises(ValueError, match="No server is named"):
        model.tree


def test_nothing_of_a_repository_is_run(tmp_path):
    ran = tmp_path / "ran"
    auto = {"AutoConfig": "mine.Config", "AutoTokenizer": ["mine.Config", None]}
    config = {"model_type": "mine", "auto_map": auto}
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(f"open({str(ran)!r}, 'w')")
    model = VLLM(str(tmp_path))
    for use in (lambda: model.tree, lambda: model.tokenizer):
        with pytest.raises(ValueError):
            use()
    assert not ran.exists()


def test_what_a_server_said_is_there_when_it_is_not():
    with described(tree_with(3, "mlp")) as url:
        assert len(VLLM("tiny", serve=url).layers) == 3
    model = VLLM("tiny", serve=url, retries=0)
    assert repr(model.layers[1].mlp) == "<layers.1.mlp>"
    with pytest.raises(LocationError, match=r"Nearest: layers\.1\.mlp"):
        model.layers[1].mpl
    assert len(model.layers) == 3 and "(0-2): Layer" in str(model)
    with pytest.raises(ProtocolError, match="No server answers"):
        with model.trace("Hello"):
            logits = model.logits.save()
    with pytest.raises(ProtocolError, match="No server answers"):
        VLLM("another", serve=url, retries=0).tree


def test_a_server_that_is_away_is_not_asked_at_every_turn(monkeypatch):
    keep_tree(tree_with(3, "mlp"), "tiny", "http://127.0.0.1:1", {})
    model = VLLM("tiny", serve="http://127.0.0.1:1", retries=0)
    assert len(model.layers) == 3
    monkeypatch.setattr("nnsight_client.http_backend.HttpBackend.describe", None)
    assert [repr(layer) for layer in model.layers] == [f"<layers.{n}>" for n in range(3)]


def test_what_was_known_never_refuses_what_the_server_has():
    with described(tree_with(4, "mlp", "moe")) as url:
        keep_tree(tree_with(2, "mlp", "gone"), "tiny", url, {})
        assert repr(VLLM("tiny", serve=url).layers[3]) == "<layers.3>"
        assert repr(VLLM("tiny", serve=url).layers[0].moe) == "<layers.0.moe>"
        assert repr(VLLM("tiny", serve=url).layers[-1]) == "<layers.3>"
        assert len(VLLM("tiny", serve=url).layers) == 4
        assert "moe" in str(VLLM("tiny", serve=url))
        with pytest.raises(LocationError, match=r"Nearest: layers\.0\.moe"):
            VLLM("tiny", serve=url).layers[0].moo


def test_a_trace_goes_by_what_the_server_has(server_url, gpt2_path):
    keep_tree(tree_with(2, "mlp"), gpt2_path, server_url, {})
    model = VLLM(gpt2_path, serve=server_url)
    layer = model.transformer.h[6]
    with model.trace("The capital of France is", **ONE):
        hidden = layer.mlp.output.save()
        other = model.transformer.h[7].output.save()
    assert hidden.shape == other.shape and len(model.transformer.h) == 12


def test_a_server_may_be_another_one_than_it_was(server_url, gpt2_path):
    model = VLLM(gpt2_path, serve=server_url)
    model._places.tree = tree_with(2, "mlp")
    with model.trace("The capital of France is", **ONE):
        hidden = model.transformer.h[6].output.save()
    assert hidden.shape[1] == 96
    with pytest.raises(LocationError, match=r"Nearest: transformer\.h\.1\.mlp"):
        with model.trace("The capital of France is", **ONE):
            hidden = model.transformer.h[1].mpl.output.save()
