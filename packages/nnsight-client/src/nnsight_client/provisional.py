"""A model's tree without an engine: transformers' classes under the names that vLLM gives them.

vLLM fuses what transformers keeps apart (`qkv_proj`, `gate_up_proj`), and leaves out what does
nothing at inference. No engine has confirmed such a tree, so it shows names and refuses none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nnsight_core.tree import ModelTree, ModuleInfo

FAMILIES = ("gemma2", "gpt2", "llama", "mixtral", "qwen2", "qwen2_moe", "qwen3")
"""The types of models whose names are known to be vLLM's."""
_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")


@dataclass(slots=True)
class _Part:
    """A module that is to be."""

    cls: str
    children: dict[str, _Part] = field(default_factory=dict)


# The layers of a model share these.
_ACTS: dict[str, _Part] = {}
_ROTARY = _Part("RotaryEmbedding", {"apply_rotary_emb": _Part("ApplyRotaryEmb")})


def provisional_tree(repo: str) -> ModelTree | None:
    """The tree of a model as far as transformers knows it; None for one of another family.

    Raises:
        OSError: the model's configuration cannot be had (no such folder, no hub).
        ValueError: it is none of transformers' own.
    """
    import torch
    import transformers

    # Nothing that a repository brings along is run.
    config = transformers.AutoConfig.from_pretrained(repo, trust_remote_code=False)
    if config.model_type not in FAMILIES:
        return None
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    root = _renamed(_part(model), config)
    modules: dict[str, ModuleInfo] = {}
    _spell(root, "", {}, modules)
    engine = f"transformers {transformers.__version__}"
    return ModelTree(model=repo, engine=engine, provisional=True, modules=modules)


def _part(module: Any) -> _Part:
    children = {name: _part(child) for name, child in module.named_children()}
    kept = {name: part for name, part in children.items() if part.cls != "Dropout"}
    return _fused(_Part(type(module).__name__, kept))


def _fused(part: _Part) -> _Part:
    """A module as vLLM has it, where its children show what it is."""
    children = part.children
    if children.keys() >= {*_QKV}:
        norms = {name: child for name, child in children.items() if name.endswith("_norm")}
        part.children = {
            "qkv_proj": _Part("QKVParallelLinear"),
            "o_proj": children["o_proj"],
            "rotary_emb": _ROTARY,
            "attn": _Part("Attention"),
            **norms,
        }
    elif children.keys() >= {*_GATE_UP}:
        act = "GeluAndMul" if "gelu" in children["act_fn"].cls.lower() else "SiluAndMul"
        part.children = {
            "gate_up_proj": _Part("MergedColumnParallelLinear"),
            "down_proj": children["down_proj"],
            "act_fn": _Part(act),
        }
    elif "c_attn" in children:
        children["attn"] = _Part("Attention")
    elif "c_fc" in children:
        children["act"] = _ACTS.setdefault(children["act"].cls, children["act"])
    elif "experts" in children:
        part.children = _mixture(children)
    return part


def _mixture(children: dict[str, _Part]) -> dict[str, _Part]:
    """The children of a mixture of experts, whose experts are one module."""
    method = _Part("UnquantizedFusedMoEMethod")
    experts = _Part("MoERunner", {"routed_experts": _Part("RoutedExperts")})
    experts.children["routed_experts"].children["quant_method"] = method
    shared, gate = children.get("shared_expert"), children.get("shared_expert_gate")
    if shared is None or gate is None:
        return {"gate": children["gate"], "experts": experts}
    shared.children["expert_gate"] = gate
    experts.children["_shared_experts"] = _Part("SharedExperts", {"_layer": shared})
    return {
        "gate": children["gate"],
        "shared_expert_gate": gate,
        "shared_expert": shared,
        "experts": experts,
    }


def _renamed(root: _Part, config: Any) -> _Part:
    """The whole, as vLLM's class of the family builds it."""
    kind, body = config.model_type, root.children.get("model")
    if body is not None:
        body.children.pop("rotary_emb", None)  # each attention has it
        if kind == "mixtral":
            for layer in body.children["layers"].children.values():
                layer.children = {
                    "block_sparse_moe" if name == "mlp" else name: child
                    for name, child in layer.children.items()
                }
        if kind == "gemma2":
            root.children.pop("lm_head")
        elif kind.startswith("qwen") and config.tie_word_embeddings:
            root.children["lm_head"] = body.children["embed_tokens"]
    root.children["logits_processor"] = _Part("LogitsProcessor")
    return root


def _spell(part: _Part, path: str, first: dict[int, str], modules: dict[str, ModuleInfo]) -> None:
    met = first.setdefault(id(part), path)
    same_as = None if met == path else met
    modules[path] = ModuleInfo(cls=part.cls, children=tuple(part.children), same_as=same_as)
    for name, child in part.children.items():
        _spell(child, f"{path}.{name}" if path else name, first, modules)
