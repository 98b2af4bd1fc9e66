"""The tokenizer of an engine, as files.

Relies on (vLLM 0.26.0 and 0.27.1): `get_tokenizer` of an `AsyncLLM`, and that what it gives holds
all that transformers' own tokenizer does, while its class is one that vLLM derives from that one's
(`vllm/tokenizers/hf.py`). Nobody else could load what is saved under the name of such a class.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from nnsight_core.errors import NotSupportedError
from nnsight_core.wire.tokenizer import is_file


def files_of(llm: Any) -> dict[str, bytes]:
    """What transformers saves an engine's tokenizer as, by file name.

    Raises:
        NotSupportedError: the engine has none, or none of transformers'.
    """
    found: Any = None
    try:
        found = llm.get_tokenizer()
    except ValueError:
        pass  # the engine was told to load none
    if not hasattr(found, "save_pretrained"):
        raise NotSupportedError(
            f"The engine has no tokenizer that can be handed out ({type(found).__name__})."
        )
    own: Any = next(cls for cls in type(found).__mro__ if not cls.__module__.startswith("vllm."))
    plain = own.__new__(own)
    vars(plain).update(vars(found))
    with tempfile.TemporaryDirectory() as folder:
        plain.save_pretrained(folder)
        saved = sorted(Path(folder).iterdir())
        return {file.name: file.read_bytes() for file in saved if is_file(file.name)}
