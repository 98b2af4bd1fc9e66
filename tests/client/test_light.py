"""What importing the client, and making a model with it, brings into a process."""

from __future__ import annotations

import subprocess
import sys

HEAVY = "torch transformers numpy pydantic httpx orjson asyncio vllm nnsight_vllm_worker fastapi"


def check(script: str) -> None:
    names = "import sys; print(*{m.partition('.')[0] for m in sys.modules})"
    said = subprocess.run(
        [sys.executable, "-c", f"{script}\n{names}"], check=True, capture_output=True, text=True
    ).stdout
    assert not set(said.split()) & set(HEAVY.split())
    assert "nnsight_client" in said


def test_importing_it_brings_nothing_heavy():
    check("import nnsight_client")
    check("from nnsight_client import VLLM, configure")


def test_making_a_model_brings_nothing_heavy():
    check(
        "from nnsight_client import VLLM\n"
        "with VLLM('openai-community/gpt2', serve='http://127.0.0.1:6677') as model:\n"
        "    print(repr(model))"
    )


def test_what_core_exports_is_there_all_the_same():
    script = (
        "import nnsight_core, sys\n"
        "assert 'torch' not in sys.modules\n"
        "from nnsight_core import TorchModel, save\n"
        "assert 'torch' in sys.modules and nnsight_core.TorchModel is TorchModel"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
