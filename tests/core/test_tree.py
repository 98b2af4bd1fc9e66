"""The module tree as data."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from nnsight_core import ModelTree, ModuleInfo, TensorInfo
from nnsight_core.tree import TOKENS

from . import nets


def tree() -> ModelTree:
    hidden = TensorInfo(dtype="bfloat16", shape=(TOKENS, 8))
    layer = ModuleInfo(cls="Layer", children=("mlp",), output=(hidden, hidden))
    modules = {"": ModuleInfo(cls="Net", children=("layers", "norm"))}
    modules["layers"] = ModuleInfo(cls="ModuleList", children=("0", "1", "2", "3"))
    for i in range(4):
        modules[f"layers.{i}"] = layer
        modules[f"layers.{i}.mlp"] = ModuleInfo(
            cls="MLP" if i < 3 else "MoE", output=(TensorInfo(at="[0]", dtype="int8", shape=()),)
        )
    modules["norm"] = ModuleInfo(cls="Norm", operations=("x_0",))
    return ModelTree(model="a/b", engine="test 1", modules=modules)


def test_a_tree_comes_back_from_json_as_it_was() -> None:
    for one in (tree(), nets.make().tree):
        assert ModelTree.model_validate_json(one.model_dump_json()) == one


def test_a_tree_of_another_version_or_with_unknown_fields_is_refused() -> None:
    data = tree().model_dump()
    for change in ({"version": 2}, {"more": 1}, {"modules": {"": {"cls": 1}}}):
        with pytest.raises(ValidationError):
            ModelTree.model_validate({**data, **change})


def test_nearest_names_the_likely_siblings_then_what_is_there() -> None:
    assert tree().nearest("layers.1.mpl") == ["layers.1.mlp"]
    assert tree().nearest("nrom") == ["norm"]
    assert tree().nearest("layers.17")[0].startswith("layers.")
    assert tree().nearest("layers.0.zzz") == ["layers.0.mlp"]
    assert tree().nearest("layer.0.mlp.x")[0].startswith("layers.")


def test_printing_collapses_modules_that_look_alike() -> None:
    assert str(tree()).splitlines() == [
        "Net",
        "  (layers): ModuleList",
        "    (0-2): Layer → bfloat16 tokens × 8, bfloat16 tokens × 8",
        "      (mlp): MLP → int8 scalar",
        "    (3): Layer → bfloat16 tokens × 8, bfloat16 tokens × 8",
        "      (mlp): MoE → int8 scalar",
        "  (norm): Norm",
    ]


def test_the_tree_of_a_module_names_shared_modules_once() -> None:
    made = nets.make().tree
    assert made.model == "Net" and made.engine.startswith("torch ")
    assert made.modules["again"].same_as == "twice" and made.modules["twice"].same_as is None
    assert made.modules["layers.0"].children == ("norm", "mlp")
