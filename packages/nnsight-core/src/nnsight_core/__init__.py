"""nnsight core: capture a block, run it interleaved with a forward pass, ship it and its values.

Needs no GPU and no vLLM. Backends subclass `Model` and implement `Backend`; `TorchModel` is the one
that ships with it.

What is exported is imported when it is first asked for: most of it needs PyTorch, which takes
seconds to import.
"""

import importlib
from typing import TYPE_CHECKING, Any

from nnsight_core.errors import (
    BlockError,
    BlockTimeout,
    BusyError,
    CaptureError,
    EditErrorWarning,
    EncodeError,
    EngineDeadError,
    EngineError,
    KeepLimitError,
    KeptError,
    LateWriteError,
    LocationError,
    LoopOverrunWarning,
    NNsightError,
    NNsightWarning,
    NotATapError,
    NotSupportedError,
    OutOfOrderError,
    PolicyError,
    ProtocolError,
    SaveLimitError,
    StepError,
    UnboundSaveWarning,
    WriteError,
)

if TYPE_CHECKING:
    from nnsight_core.backend import (
        AsyncBackend,
        Backend,
        EditBackend,
        EditInfo,
        EditSpec,
        Ended,
        Event,
        Finished,
        Invoke,
        Noted,
        Printed,
        Saved,
        Went,
    )
    from nnsight_core.cache import Cache
    from nnsight_core.edits import Edit
    from nnsight_core.kept import Kept, KeptInfo, KeptValues
    from nnsight_core.model import Model
    from nnsight_core.node import Node
    from nnsight_core.outputs import CompletionOutput, Logprob, RequestOutput
    from nnsight_core.run import keep, save
    from nnsight_core.torch_backend import TorchModel
    from nnsight_core.tracer import Tracer
    from nnsight_core.tree import ModelTree, ModuleInfo, TensorInfo

__all__ = [
    "AsyncBackend",
    "Backend",
    "BlockError",
    "BlockTimeout",
    "BusyError",
    "Cache",
    "CaptureError",
    "CompletionOutput",
    "Edit",
    "EditBackend",
    "EditErrorWarning",
    "EditInfo",
    "EditSpec",
    "EncodeError",
    "Ended",
    "EngineDeadError",
    "EngineError",
    "Event",
    "Finished",
    "Invoke",
    "KeepLimitError",
    "Kept",
    "KeptError",
    "KeptInfo",
    "KeptValues",
    "LateWriteError",
    "LocationError",
    "Logprob",
    "LoopOverrunWarning",
    "Model",
    "ModelTree",
    "ModuleInfo",
    "NNsightError",
    "NNsightWarning",
    "Node",
    "NotATapError",
    "NotSupportedError",
    "Noted",
    "OutOfOrderError",
    "PolicyError",
    "Printed",
    "ProtocolError",
    "RequestOutput",
    "SaveLimitError",
    "Saved",
    "StepError",
    "TensorInfo",
    "TorchModel",
    "Tracer",
    "UnboundSaveWarning",
    "Went",
    "WriteError",
    "keep",
    "save",
]

_EXPORTS = {
    "backend": "AsyncBackend Backend EditBackend EditInfo EditSpec Ended Event Finished Invoke "
    "Noted Printed Saved Went",
    "cache": "Cache",
    "edits": "Edit",
    "kept": "Kept KeptInfo KeptValues",
    "model": "Model",
    "node": "Node",
    "outputs": "CompletionOutput Logprob RequestOutput",
    "run": "keep save",
    "torch_backend": "TorchModel",
    "tracer": "Tracer",
    "tree": "ModelTree ModuleInfo TensorInfo",
}
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
