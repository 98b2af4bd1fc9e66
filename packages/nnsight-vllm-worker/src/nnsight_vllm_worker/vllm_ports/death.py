"""The death of a sync engine's processes, told to whoever waits for them.

vLLM notices that its engine's process has ended, but a call that already waits for an answer of it
(an output, an RPC) then waits for ever. A thread waits for the same end and answers in its place.

Relies on (vLLM 0.26.0 and 0.27.1, `vllm/v1/engine/core_client.py`): a `SyncMPClient` has
`outputs_queue` (an exception in it is raised by `get_output`), `utility_results` (futures by call),
and `resources` with `engine_dead` and `engine_manager.processes`.
"""

from __future__ import annotations

import multiprocessing.connection
import threading
import time
from typing import Any

from nnsight_vllm_worker.vllm_ports.checks import check_attributes

_PATIENCE = 5.0


def watch(llm: Any) -> None:
    """From now on, end what waits for an engine that has ended (one in this process cannot)."""
    client = llm.llm_engine.engine_core
    if not hasattr(client, "resources"):
        return
    check_attributes(client, ("outputs_queue", "utility_results"))
    check_attributes(client.resources, ("engine_dead", "engine_manager"))
    check_attributes(client.resources.engine_manager, ("processes",))
    # The thread holds none of what is to be collected when the engine is forgotten.
    parts = (client.resources, client.outputs_queue, client.utility_results)
    threading.Thread(target=_wait, args=parts, name="nnsight-engine", daemon=True).start()


def _wait(resources: Any, outputs: Any, futures: dict[int, Any]) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    multiprocessing.connection.wait([p.sentinel for p in resources.engine_manager.processes])
    # From then on vLLM refuses new calls itself, so nothing that waits comes after this.
    deadline = time.monotonic() + _PATIENCE
    while not resources.engine_dead and time.monotonic() < deadline:
        time.sleep(0.01)
    outputs.put_nowait(EngineDeadError())
    for future in list(futures.values()):
        if not future.done():
            future.set_exception(EngineDeadError())
