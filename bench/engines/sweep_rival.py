"""nnsight 0.8.1 on vLLM, for the sweep; it is looked for in `PYTHONPATH`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from nnsight.modeling.vllm import VLLM  # type: ignore[import-not-found]

from bench.workloads.sweep import EDIT, SAMPLING, TRACE, arguments, prompts


def cases() -> dict[str, Callable[[], Any]]:
    way = os.environ["BENCH_WAY"]
    name, how = arguments(way == "eager")
    how.pop("enforce_eager", None)
    how.pop("compilation_config", None)
    if way != "eager":
        how["taps"] = ["model.layers.16.output"]
    model = VLLM(name, dispatch=True, **how)
    layer = model.model.layers[16]
    given = prompts()

    def trace() -> Any:
        with model.trace(**SAMPLING) as tracer:
            for ids in given:
                with tracer.invoke(ids):
                    hidden = layer.output[0][-1].clone().save()
        assert len(hidden) == len(given)
        return hidden

    def edit() -> Any:
        with model.edit() as (_, installed):
            hidden = layer.output[0][-1].clone().save()  # noqa: F841
        outputs = model.generate(given, **SAMPLING)
        installed.clear()
        assert all("hidden" in output.saves for output in outputs)
        return outputs

    return {f"{TRACE}, {way}": trace, f"{EDIT}, {way}": edit}
