"""Blocks under the restricted policy without an engine: they travel, are checked and run here."""

from __future__ import annotations

import ast
import linecache
from pathlib import Path
from textwrap import indent
from typing import Any

import torch
from torch import nn

from nnsight_core import TorchModel
from nnsight_core.backend import Invoke
from nnsight_core.block_tracer import BLOCK_TRACER
from nnsight_core.policy import TRUSTED, Policy
from nnsight_core.run import Run
from nnsight_core.wire.blocks import code_of, decode_names, encode_block, run_with
from nnsight_core.wire.code import CodeDecoder, CodeEncoder
from nnsight_core.wire.data import tensor_of
from nnsight_core.wire.frames import read_frame
from nnsight_core.wire.messages import BlockData, BlockMessage, expect
from nnsight_serve.policy import RESTRICTED
from tests.core.wired import WiredBackend

X = torch.ones(1, 2)


def small_model(policy: Policy = RESTRICTED) -> TorchModel:
    """A small model whose blocks travel, and are run under a policy."""
    torch.manual_seed(0)
    model = TorchModel(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 3)))
    model._backend.__class__ = PolicyBackend
    model._backend.root = model  # type: ignore[union-attr]
    model._backend.policy = policy  # type: ignore[union-attr]
    return model


class PolicyBackend(WiredBackend):
    """Runs blocks of which it has nothing but their frames, under a policy."""

    policy: Policy

    def _ship(self, invoke: Invoke, index: int) -> Run:
        encoder = CodeEncoder()
        data = encode_block(invoke, encoder)
        assert data is not None
        frame = read_frame(BlockMessage(block=data).frame(encoder.buffers).to_bytes())
        return run_of(
            expect(frame, BlockMessage).block, self.root, self.policy, frame.buffers, encoder
        )


def run_of(
    data: BlockData,
    root: Any,
    policy: Policy = RESTRICTED,
    buffers: list[Any] | None = None,
    encoder: CodeEncoder | None = None,
) -> Run:
    """The run of a block, as a worker makes it."""
    extra = policy.scope({"print": print})
    policy.check(data)
    code = code_of(data, policy)
    decoder = CodeDecoder(
        buffers or [],
        root,
        blob=lambda h, dtype, shape: tensor_of(encoder.blobs[h], dtype, shape),  # type: ignore
        pickle=False,
        extra=extra,
        policy=policy,
    )
    run = run_with(data, code, decode_names(data, decoder), 0, extra)
    return run


def forged(text: str, **names: Any) -> tuple[BlockData, CodeEncoder]:
    """A block of this text as anybody can write it, past all that a front end looks at."""
    encoder = CodeEncoder()
    used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    forms = {name: encoder.encode(value) for name, value in names.items() if name in used}
    source = indent(text, "    ") + "\n"
    return BlockData(
        source=source, filename="forged.py", line=2, function="f", names=forms
    ), encoder


def run_forged(model: TorchModel, text: str, limit: float | None = None, **names: Any) -> Run:
    """Run a block of this text on a small model, as a worker does; gives its run."""
    data, encoder = forged(text, model=model, tracer=BLOCK_TRACER, **names)
    run = run_of(data, model, RESTRICTED, encoder.buffers, encoder)
    run.limit = limit
    backend: Any = model._backend
    backend._run(Invoke(X, {}), run)
    backend.interleaver.drop(run)
    return run


def trace(model: Any, text: str, folder: Path, prompt: Any = X, **names: Any) -> dict[str, Any]:
    """Trace a block of this text, from a file of its own; gives the script's names."""
    script = "with model.trace(prompt, **sampling) as tracer:\n" + indent(text, "    ") + "\n"
    path = folder / "script.py"
    path.write_text(script, encoding="utf-8")
    linecache.checkcache(str(path))
    scope = {"model": model, "prompt": prompt, "sampling": {}, **names}
    scope |= {"__name__": "__main__", "__file__": str(path)}
    exec(compile(script, str(path), "exec"), scope)
    return scope


__all__ = ["RESTRICTED", "TRUSTED", "X", "run_of", "small_model", "trace"]
