"""Attacks on what blocks share: the model, its nodes, tensors from outside, each other's values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import nnsight_core
from nnsight_core import LateWriteError, LocationError, WriteError
from nnsight_core.current import current_run
from tests.fixtures.attack import GREEDY, READER, assert_beside, harmless

pytest_plugins = ["tests.fixtures.attack"]
pytestmark = [pytest.mark.usefixtures("unharmed"), pytest.mark.local]


# -- names, nodes and the model ------------------------------------------------------------------


def test_names_that_are_deleted(gpt2: Any, normal: Any) -> None:
    def deletes(model: Any, tracer: Any) -> int:
        model.transformer.h[3].output
        del model, tracer
        globals().clear()
        return 1

    assert assert_beside(gpt2, normal, deletes) == 1
    with gpt2.trace(temperature=0.0, max_tokens=1) as tracer:
        with tracer.invoke(READER):
            gpt2.transformer.h[2].output
            del gpt2
            vars().clear()
        with tracer.invoke(READER):
            hidden = gpt2.transformer.h[2].output.save()  # noqa: F821
    assert hidden.shape == (8, 96)


def test_code_that_a_block_makes_is_a_part_of_it(gpt2: Any, normal: Any) -> None:
    def executes(model: Any, tracer: Any) -> Any:
        exec("hidden = model.transformer.h[3].output; hidden[:] = 0", {"model": model})
        return eval("model.transformer.h[5].output", {"model": model})

    zeroed = assert_beside(gpt2, normal, executes)
    assert not torch.equal(zeroed, torch.zeros_like(zeroed))


@pytest.mark.parametrize("name", ["output", "logits", "weight", "training", "_places", "children"])
def test_nodes_take_no_other_values(gpt2: Any, normal: Any, name: str) -> None:
    def sets(model: Any, tracer: Any) -> None:
        setattr(model if name == "logits" else model.transformer.h[3], name, "mine")

    error = assert_beside(gpt2, normal, sets)
    assert isinstance(error, LocationError | WriteError)


def test_weights_are_written_by_nobody(gpt2: Any, normal: Any) -> None:
    def writes(model: Any, tracer: Any) -> None:
        model.transformer.h[0].ln_1.weight.mul_(2)

    def writes_unseen(model: Any, tracer: Any) -> Any:
        model.transformer.h[0].ln_1.weight.data.fill_(2)
        model.transformer.h[0].attn.attn.kv_cache.data.zero_()
        return assert_beside

    assert isinstance(assert_beside(gpt2, normal, writes), WriteError)
    assert_beside(gpt2, normal, writes_unseen)
    assert_beside(gpt2, normal, harmless)


@pytest.mark.parametrize("where", ["weight", "bias"])
def test_weights_are_not_written_by_a_function_either(gpt2: Any, where: str) -> None:
    logits = []
    for attack in (False, True, False):
        try:
            with gpt2.trace(READER, temperature=0.0, max_tokens=1):
                if attack:
                    F.relu(getattr(gpt2.transformer.h[0].ln_1, where), inplace=True)
                out = gpt2.logits.save()
        except WriteError:
            continue
        logits.append(out)
    assert torch.equal(logits[0], logits[-1])


METHODS = {
    "parameters": lambda m: [p.mul_(1.5) for p in m.transformer.h[0].parameters()],
    "state_dict": lambda m: [p.zero_() for p in m.state_dict().values()],
    "half": lambda m: m.half(),
    "hook": lambda m: m.transformer.h[3].register_forward_hook(lambda *a: a[2] * 0),
    "apply": lambda m: m.apply(lambda part: part.train()),
}


@pytest.mark.parametrize("method", METHODS)
def test_methods_of_every_module_are_not_a_blocks(gpt2: Any, normal: Any, method: str) -> None:
    call = METHODS[method]

    def calls(model: Any, tracer: Any) -> None:
        call(model)
        model.transformer.h[3].output

    assert isinstance(assert_beside(gpt2, normal, calls), LocationError)
    assert_beside(gpt2, normal, harmless)


class Late(torch.Tensor):
    """Runs code of its own wherever it is used outside a block."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if current_run() is None:
            raise SystemExit("outside")
        return super().__torch_function__(func, types, args, kwargs or {})


class LateKernels(torch.Tensor):
    """Does so one level below."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if current_run() is None:
            raise SystemExit("outside")
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [Late, LateKernels])
@pytest.mark.parametrize("way", ["output", "input", "logits", "skip"])
def test_a_class_of_tensors_runs_no_code_outside_its_block(
    gpt2: Any, normal: Any, kind: Any, way: str
) -> None:
    def replaces(model: Any, tracer: Any) -> Any:
        module = model.transformer.h[3].mlp
        for _ in tracer.iter[:2]:
            if way == "output":
                module.output = module.output.as_subclass(kind)
            elif way == "input":
                module.input = module.input.as_subclass(kind)
            elif way == "skip":
                module.skip(module.input.as_subclass(kind))
            else:
                model.logits = model.logits.as_subclass(kind)
            hidden = model.samples
        return torch.ones(3).as_subclass(kind)

    kept = assert_beside(gpt2, normal, replaces)
    assert type(kept) is torch.Tensor and kept.tolist() == [1, 1, 1]


class Container(tuple):  # type: ignore[type-arg]
    """Runs code of its own wherever it is looked into outside a block."""

    def __iter__(self) -> Iterator[Any]:
        if current_run() is None:
            raise SystemExit("outside")
        return super().__iter__()


@pytest.mark.parametrize("way", ["none", "output", "inputs", "skip"])
def test_a_class_of_containers_runs_no_code_outside_its_block(llama: Any, way: str) -> None:
    with llama.trace(**GREEDY) as tracer:
        with tracer.invoke(READER):
            pair = llama.model.layers[4].output.save()
        with tracer.invoke(READER):
            layer = llama.model.layers[2]
            if way == "output":
                layer.output = Container(layer.output)
            elif way == "inputs":
                layer.inputs = Container(layer.inputs)
            elif way == "skip":
                layer.skip(Container(layer.inputs[0][1:]))
            other = llama.model.layers[4].output.save()
    assert all(map(torch.equal, pair, other)) == (way != "skip")


# -- values of others ----------------------------------------------------------------------------


def test_what_two_blocks_name_is_each_ones_own(gpt2: Any) -> None:
    numbers: list[int] = [1, 2]
    table = {"of": numbers, "small": torch.zeros(3)}

    def add(number: int) -> list[int]:
        numbers.append(number)
        table["small"][:] += number
        return numbers

    with gpt2.trace(**GREEDY) as tracer:
        for index in range(3):
            with tracer.invoke(READER):
                for step in tracer.iter[:3]:
                    gpt2.transformer.h[3].output
                    add(10 * index + step)
                    table["of"].append(-1 - index)
                    table[index] = index
                mine = nnsight_core.save(list(numbers))
                small = nnsight_core.save(table["small"])
                keys = [key for key in table if key not in ("of", "small")].save()
    assert numbers == [1, 2] and table["small"].tolist() == [0, 0, 0] and len(table) == 2
    for index in range(3):
        own = [10 * index, 10 * index + 1, 10 * index + 2]
        assert mine[index][:2] == [1, 2] and [n for n in mine[index][2:] if n in own] == own
        assert small[index].tolist() == [sum(own)] * 3 and keys[index] == [index]


@pytest.mark.parametrize("way", ["plain", "function", "out", "inplace", "numpy"])
def test_a_large_tensor_that_one_block_changes_is_whole_for_the_others(gpt2: Any, way: str) -> None:
    big = -torch.ones(64, 96)
    ways: dict[str, Any] = {"zero": torch.Tensor.zero_}
    zero = ways["zero"]

    def run() -> list[float]:
        with gpt2.trace(temperature=0.0, max_tokens=2, ignore_eos=True) as tracer:
            with tracer.invoke(READER):
                gpt2.transformer.h[1].output
                first = big.sum().item()
                gpt2.transformer.h[8].output
                last = big.sum().item()
                sums = [first, last].save()
            with tracer.invoke(READER):
                gpt2.transformer.h[5].output
                if way == "plain":
                    big[:] = 0
                elif way == "function":
                    zero(big)
                elif way == "out":
                    torch.relu(big, out=big)
                elif way == "numpy":
                    big.numpy()[:] = 0
            with tracer.invoke(READER):
                for _ in tracer.iter[:2]:
                    gpt2.transformer.h[9].output
                after = big.sum().item().save()
        return [*sums, after]

    def changes() -> list[float]:
        with gpt2.trace(temperature=0.0, max_tokens=2, ignore_eos=True) as tracer:
            with tracer.invoke(READER):
                gpt2.transformer.h[5].output
                F.relu(big, inplace=True)
            with tracer.invoke(READER):
                gpt2.transformer.h[9].output
                after = big.sum().item().save()
        return [after]

    before = big.sum().item()
    for _ in range(3):
        try:
            found = changes() if way == "inplace" else run()
        except (TypeError, LateWriteError, RuntimeError):
            continue
        assert set(found) == {before} and big.sum().item() == before
    # What one has failed with is there for the next.
    with gpt2.trace(READER, temperature=0.0, max_tokens=1):
        total = big.sum().item().save()
    assert total == before
