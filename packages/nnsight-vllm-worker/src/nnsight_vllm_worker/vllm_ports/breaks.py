"""Full CUDA graphs with breaks at taps, so that Python runs there between two replays (V2 runner).

vLLM's graphs of whole decode steps run no Python. For a step whose blocks write at some taps, the
same forward is captured once more, in pieces that end at exactly these taps; then a step replays
the first piece, runs the blocks, replays the next. What is captured is kept for later steps.

Relies on (vLLM 0.26.0 and 0.27.1, `vllm/v1/worker/gpu/cudagraph_utils.py`):
- `ModelCudaGraphManager.capture` hands `CudaGraphManager.capture` a function, which for a
  description prepares dummy inputs in the buffers that graphs read (`warmup=False`) and gives a
  function that runs the forward on them, where `CUDAGraphMode.NONE` means: capture nothing itself.
  What it prepares is prepared anew before every step.
- `run_fullgraph(desc)` calls `graphs[desc].replay()` and takes the output from a buffer.
- `pool` is the memory of its graphs; `graph_capture(device=)` chooses the stream to capture on.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nnsight_core.locations import Location
from nnsight_vllm_worker.taps import Taps
from nnsight_vllm_worker.vllm_ports.checks import check_methods

_log = logging.getLogger(__name__)
_FORWARD = "_nnsight_forward"
_MOST = 64
"""How many broken graphs are kept."""
At = tuple[Location, ...]
Part = torch.cuda.CUDAGraph | tuple[Location, list[Tensor]]


def keep_forwards() -> None:
    """Have graph managers that capture from now on keep what they capture.

    Raises:
        EngineError: this vLLM lacks what the port relies on.
    """
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager

    check_methods(CudaGraphManager, {"capture": ("create_forward_fn",), "run_fullgraph": ("desc",)})
    check_methods(ModelCudaGraphManager, {"capture": ("model", "input_buffers")})
    if hasattr(CudaGraphManager, _FORWARD):
        return
    plain = CudaGraphManager.capture

    def capture(self: Any, create_forward_fn: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(self, _FORWARD, create_forward_fn)
        return plain(self, create_forward_fn, *args, **kwargs)

    setattr(CudaGraphManager, _FORWARD, None)
    CudaGraphManager.capture = capture  # type: ignore[method-assign]


class Breaks:
    """The broken graphs of one engine."""

    def __init__(self, manager: Any, taps: Taps) -> None:
        self._manager = manager
        self._taps = taps
        self._known: OrderedDict[tuple[Any, At], list[Part] | None] = OrderedDict()

    def ready(self, desc: Any, at: At) -> bool:
        """Whether a step of this description can run with breaks at these taps.

        Captures what is needed the first time, which overwrites the inputs of graphs: a step has to
        prepare its own afterwards.
        """
        key = (desc, at)
        if key not in self._known:
            self._known[key] = self._captured(desc, at)
            if len(self._known) > _MOST:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key] is not None

    def run(
        self, desc: Any, at: At, sink: Callable[[Location, list[Tensor]], None], full: Any
    ) -> Any:
        """Run a step that is ready; `full` is vLLM's own `run_fullgraph`."""
        graphs = self._manager.graphs
        plain = graphs[desc]
        parts = self._known[desc, at]
        assert parts is not None
        graphs[desc] = _Broken(parts, sink)
        try:
            return full(desc)
        finally:
            graphs[desc] = plain

    def _captured(self, desc: Any, at: At) -> list[Part] | None:
        from vllm.config import CUDAGraphMode
        from vllm.distributed.parallel_state import graph_capture

        create = getattr(self._manager, _FORWARD)
        if create is None:
            return None
        capture = _Capture(self._manager.pool)
        try:
            forward = create(desc, warmup=False)
            torch.cuda.synchronize()
            with graph_capture(device=self._manager.device):
                self._taps.listen(at, capture.cut)
                capture.begin()
                try:
                    forward(CUDAGraphMode.NONE)
                finally:
                    capture.end()
                    self._taps.rest()
        except RuntimeError as error:
            _log.warning("A graph with breaks at %s cannot be captured: %s", at, error)
            return None
        return capture.parts


class _Capture:
    """One forward, captured in pieces."""

    def __init__(self, pool: Any) -> None:
        self.parts: list[Part] = []
        self._pool = pool
        self._graph: Any = None

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads of the engine may use the device meanwhile.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        graph, self._graph = self._graph, None
        graph.capture_end()
        self.parts.append(graph)

    def cut(self, location: Location, tensors: list[Tensor]) -> None:
        self.end()
        self.parts.append((location, list(tensors)))
        self.begin()


class _Broken:
    """What stands in for a graph while a step runs."""

    def __init__(self, parts: list[Part], sink: Callable[[Location, list[Tensor]], None]) -> None:
        self._parts = parts
        self._sink = sink

    def replay(self) -> None:
        for part in self._parts:
            if isinstance(part, tuple):
                self._sink(*part)
            else:
                part.replay()
