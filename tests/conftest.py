"""What all tests share: models made once, engines started once, a clean environment."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.fixtures.ranks import RANKS, spread
from tests.fixtures.served import SERVED, Served

if TYPE_CHECKING:
    from nnsight_core import TorchModel
    from nnsight_vllm_worker import VLLM

pytest_plugins = ["tests.fixtures.server"]

ROOT = Path(__file__).parent.parent

# Set before anything imports vLLM. Most engines run in the tests' own process, which starts three
# times as fast; the tests of vLLM's default (tests/processes) run apart and unset the switch.
os.environ.update(
    HF_HUB_OFFLINE="1",
    # Else PyTorch's look at whether there is a GPU keeps engines from being forked.
    PYTORCH_NVML_BASED_CUDA_CHECK="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_HOST_IP="127.0.0.1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)
if RANKS > 1:
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
# `NNSIGHT_TEST_COMPILED=1` runs every test on compiled engines (with CUDA graphs on a GPU).
COMPILED = os.environ.get("NNSIGHT_TEST_COMPILED") == "1"
if not COMPILED:
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there is a GPU, the worker's tests run on it and are marked so (`make test-gpu`)."""
    import torch

    # With AMX, vLLM refuses experts and Mamba layers of single precision, as they are here.
    torch.cpu._is_amx_tile_supported = lambda: False  # type: ignore[assignment]
    if SERVED or RANKS > 1:
        items[:] = [item for item in items if item.get_closest_marker("local") is None]
    if torch.cuda.is_available():
        for item in items:
            if {"worker", "processes"} & set(item.path.parts):
                several = RANKS > 1 or item.path.name.startswith("test_ranks")
                item.add_marker(pytest.mark.gpu2 if several else pytest.mark.gpu)


def _prepare(name: str) -> str:
    spec = importlib.util.spec_from_file_location("prepare", ROOT / "scripts/prepare_models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["prepare"] = module
    spec.loader.exec_module(module)
    if RANKS > 1 and name == "gpt2":
        name = "gpt2_wide"
    return str(module.prepare(name))


@pytest.fixture(scope="session")
def gpt2_path() -> str:
    """A tiny trained GPT-2: 12 layers, 96 wide."""
    return _prepare("gpt2")


@pytest.fixture(scope="session")
def llama_path() -> str:
    """A tiny trained Llama: 6 layers, 128 wide."""
    return _prepare("llama")


@pytest.fixture(scope="session")
def qwen3_path() -> str:
    """A tiny trained Qwen3: 6 layers, 128 wide, norms on queries and keys."""
    return _prepare("qwen3")


@pytest.fixture(scope="session")
def smollm2_path() -> str:
    """SmolLM2-135M-Instruct: a real Llama of 30 layers."""
    return _prepare("smollm2")


def _engine(path: str, **arguments: Any) -> Any:
    import torch

    from nnsight_vllm_worker import VLLM

    if torch.cuda.is_available():
        # Several engines share one GPU here, and measuring how much of it is free for keys and
        # values throws away the graphs of the other engines of a process.
        space = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.05}
        arguments = {**space, **arguments}
    # Compiling takes longer than most tests; what is compiled has fixtures of its own.
    if COMPILED:
        arguments = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]}, **arguments}
    else:
        arguments = {"enforce_eager": True, **arguments}
    if RANKS > 1:
        arguments = spread(RANKS, **arguments)
    settings = {"dtype": "float32", "max_model_len": 256, "seed": 0, **arguments}
    if SERVED:
        return Served(path, **settings)
    return VLLM(path, dispatch=True, **settings)


def _compiled(path: str, **arguments: Any) -> Any:
    """An engine as vLLM builds it by default: compiled, on a GPU with CUDA graphs."""
    import torch

    torch._dynamo.config.disable = False
    graphs = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TORCH_COMPILE_DISABLE", raising=False)
        return _engine(path, enforce_eager=False, compilation_config=graphs, **arguments)


def _small_engine(name: str) -> Any:
    # Blocks for a few hundred short requests at once; the space set above is a gibibyte per engine.
    return _engine(_prepare(name), num_gpu_blocks_override=300)


def _mixture(name: str) -> VLLM:
    """An engine of a mixture of experts, whatever other engines this process has.

    The first engine makes vLLM's process groups, among them the experts' if it is a mixture itself.
    """
    import torch
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized() and parallel_state._EP is None:
        backend = torch.distributed.get_backend(parallel_state.get_world_group().device_group)
        group = parallel_state.init_model_parallel_group([[0]], 0, backend, group_name="ep")
        parallel_state._EP = group
    return _small_engine(name)


@pytest.fixture(scope="session")
def gpt2(gpt2_path: str) -> Iterator[VLLM]:
    """The GPT-2 on vLLM, in this process."""
    with _engine(gpt2_path) as model:
        yield model


@pytest.fixture(scope="session")
def tight(gpt2_path: str) -> Iterator[VLLM]:
    """The GPT-2 in an engine with little room: 40 tokens a pass, 6 requests, 320 tokens in all."""
    room = {"max_num_batched_tokens": 40, "max_num_seqs": 6}
    memory = {"block_size": 16, "num_gpu_blocks_override": 20}
    with _engine(gpt2_path, **room, **memory) as model:
        yield model


@pytest.fixture(scope="session")
def restricted(gpt2_path: str) -> Iterator[VLLM]:
    """The GPT-2 in an engine whose blocks run under the restricted policy."""
    with _engine(gpt2_path, policy="restricted", num_gpu_blocks_override=50) as model:
        yield model


@pytest.fixture(scope="session")
def compiled_tight(gpt2_path: str) -> Iterator[VLLM]:
    """The GPT-2, compiled, in an engine whose passes take 32 tokens."""
    with _compiled(gpt2_path, max_num_batched_tokens=32, num_gpu_blocks_override=40) as model:
        yield model


@pytest.fixture(scope="session")
def compiled_gpt2(gpt2_path: str) -> Iterator[VLLM]:
    """The GPT-2, compiled, with taps beside the default ones."""
    taps = ["resid", "transformer.h.*.mlp.output", "transformer.h.*.attn.input"]
    with _compiled(gpt2_path, taps=taps) as model:
        yield model


@pytest.fixture(scope="session")
def compiled_llama(llama_path: str) -> Iterator[VLLM]:
    """The Llama, compiled, with the default taps."""
    with _compiled(llama_path) as model:
        yield model


@pytest.fixture(scope="session")
def llama(llama_path: str) -> Iterator[VLLM]:
    """The Llama on vLLM, in this process."""
    with _engine(llama_path) as model:
        yield model


@pytest.fixture(scope="session")
def qwen3(qwen3_path: str) -> Iterator[VLLM]:
    """The Qwen3 on vLLM, in this process."""
    with _engine(qwen3_path) as model:
        yield model


@pytest.fixture(scope="session")
def qwen2() -> Iterator[VLLM]:
    """A tiny trained Qwen2 on vLLM, in this process: 6 layers, 128 wide, biased attention."""
    with _small_engine("qwen2") as model:
        yield model


@pytest.fixture(scope="session")
def mixtral() -> Iterator[VLLM]:
    """A tiny trained Mixtral on vLLM, in this process: 4 layers, 2 of 4 experts."""
    with _mixture("mixtral") as model:
        yield model


@pytest.fixture(scope="session")
def qwen2_moe() -> Iterator[VLLM]:
    """A tiny trained Qwen2-MoE on vLLM, in this process: as Mixtral, and one shared expert."""
    with _mixture("qwen2_moe") as model:
        yield model


@pytest.fixture(scope="session")
def gemma2() -> Iterator[VLLM]:
    """A tiny trained Gemma 2 on vLLM, in this process: 4 layers, capped, norms on both sides."""
    with _small_engine("gemma2") as model:
        yield model


@pytest.fixture(scope="session")
def granitemoehybrid() -> Iterator[VLLM]:
    """A tiny trained hybrid on vLLM, in this process: 5 layers, Mamba 2 and attention by turns."""
    with _small_engine("granitemoehybrid") as model:
        yield model


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A LoRA adapter for the Llama, with random weights: rank 4 on q, v and down projections."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(0)
    weights = {}
    for layer in range(6):
        for name, given, made in (
            ("self_attn.q_proj", 128, 128),
            ("self_attn.v_proj", 128, 64),
            ("mlp.down_proj", 256, 128),
        ):
            at = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{at}.lora_A.weight"] = 0.3 * torch.randn(4, given, generator=random)
            weights[f"{at}.lora_B.weight"] = 0.3 * torch.randn(made, 4, generator=random)
    folder = tmp_path_factory.mktemp("adapter")
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 8,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "base_model_name_or_path": "llama",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="session")
def lora(llama_path: str) -> Iterator[VLLM]:
    """The Llama in an engine that takes adapters."""
    import torch

    # vLLM's kernels for adapters take half precision only on a GPU.
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    # Two for one adapter: vLLM's CPU kernels give rows without one the adapter of the last slot.
    settings = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "dtype": dtype}
    with _engine(llama_path, **settings) as model:
        yield model


@pytest.fixture(scope="session")
def near() -> Callable[[Any, Any], None]:
    """Asserts that a value equals the oracle's, as far as float32 goes on this device."""
    import torch

    # vLLM's GPU attention multiplies float32 matrices in TF32, which keeps ten bits.
    rtol, atol = (2e-2, 5e-3) if torch.cuda.is_available() else (1e-3, 2e-4)

    def check(here: Any, there: Any) -> None:
        torch.testing.assert_close(here, there, rtol=rtol, atol=atol)

    return check


def _oracle(path: str) -> TorchModel:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from nnsight_core import TorchModel

    # The plain attention: some releases leave Gemma's soft cap out of the faster ones.
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype="float32", attn_implementation="eager"
    ).eval()
    return TorchModel(model, tokenizer=AutoTokenizer.from_pretrained(path))


@pytest.fixture(scope="session")
def hf_gpt2(gpt2_path: str) -> TorchModel:
    """The same GPT-2 in transformers, on the PyTorch backend."""
    return _oracle(gpt2_path)


@pytest.fixture(scope="session")
def hf_llama(llama_path: str) -> TorchModel:
    """The same Llama in transformers, on the PyTorch backend."""
    return _oracle(llama_path)


@pytest.fixture(scope="session")
def hf_qwen3(qwen3_path: str) -> TorchModel:
    """The same Qwen3 in transformers, on the PyTorch backend."""
    return _oracle(qwen3_path)


@pytest.fixture(scope="session")
def hf_qwen2() -> TorchModel:
    """The same Qwen2 in transformers, on the PyTorch backend."""
    return _oracle(_prepare("qwen2"))


@pytest.fixture(scope="session")
def hf_mixtral() -> TorchModel:
    """The same Mixtral in transformers, on the PyTorch backend."""
    return _oracle(_prepare("mixtral"))


@pytest.fixture(scope="session")
def hf_qwen2_moe() -> TorchModel:
    """The same Qwen2-MoE in transformers, on the PyTorch backend."""
    return _oracle(_prepare("qwen2_moe"))


@pytest.fixture(scope="session")
def hf_gemma2() -> TorchModel:
    """The same Gemma 2 in transformers, on the PyTorch backend."""
    return _oracle(_prepare("gemma2"))


@pytest.fixture(scope="session")
def hf_granitemoehybrid() -> TorchModel:
    """The same hybrid in transformers, on the PyTorch backend."""
    return _oracle(_prepare("granitemoehybrid"))
