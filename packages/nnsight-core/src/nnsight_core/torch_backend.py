"""The plain PyTorch backend: the same blocks on a `torch.nn.Module`, without vLLM.

Each invoke is one forward pass of its own. A causal language model with a tokenizer generates, so
that a trace means what it means on vLLM: prompts, sampling arguments, steps, logits, samples and
the finished output, with values as `[tokens, width]` (the batch axis of 1 left out).
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nnsight_core.backend import Ended, Event, Finished, Invoke
from nnsight_core.effects import effects_of
from nnsight_core.errors import NNsightError
from nnsight_core.interleaver import Interleaver
from nnsight_core.keeps import Keeper, Keeps
from nnsight_core.kept import KeptValues, handles_in, with_handles
from nnsight_core.locations import LOGITS, RESULT, SAMPLES, Location, Phase
from nnsight_core.model import Model
from nnsight_core.outputs import STOPPED, CompletionOutput, RequestOutput
from nnsight_core.prompts import NO_PROMPT
from nnsight_core.run import Run
from nnsight_core.sampling import SamplingNames, normalise
from nnsight_core.scope import ended, run_of
from nnsight_core.tracer import Tracer
from nnsight_core.tree import ModelTree
from nnsight_core.values import flat, map_tensors
from nnsight_core.watch import Watch, bare_tree


class TorchModel(Model):
    """A PyTorch module on which blocks run.

    Args:
        module: any module; it stays usable as before.
        tokenizer: makes it a causal language model of transformers' kind, which takes prompts.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> model = TorchModel(net)
        >>> with model.trace(torch.ones(1, 4)):
        ...     hidden = model[1].output.save()
    """

    def __init__(self, module: nn.Module, tokenizer: Any = None) -> None:
        backend = TorchBackend(module) if tokenizer is None else CausalBackend(module, tokenizer)
        super().__init__(backend.watch.places, backend)
        self._tokenizer = tokenizer

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that the model was built with."""
        return self._tokenizer

    def trace(self, prompt: Any = NO_PROMPT, *, fn: Any = None, **arguments: Any) -> Tracer:
        """As `Model.trace`; without a tokenizer, what is given is handed to the forward."""
        return super().trace(prompt, fn=fn, **arguments)


class TorchBackend:
    """Runs blocks in forward passes of one module. See `nnsight_core.Backend`."""

    private = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.interleaver = Interleaver(self, lambda _: None)
        weight = next(module.parameters(), None)
        self.keeps = Keeps("cpu" if weight is None else weight.device)
        self.kept = KeptValues(self)
        self._requests = itertools.count()
        name = type(module).__name__
        self.watch = Watch(module, self.interleaver, bare_tree(module, name, _engine()))

    # -- Backend ---------------------------------------------------------------------------------

    def submit(self, invokes: list[Invoke]) -> Iterator[Event]:
        self.kept.flush()
        for index, invoke in enumerate(invokes):
            output, error = None, None
            try:
                run = self._start(invoke, index)
            except NNsightError as refused:
                yield Finished(index, None, refused)
                continue
            try:
                output = self._run(invoke, run)
            except Exception as raised:  # the model's own; the other invokes go on
                error = raised
            finally:
                over = run is None or run.dead
                if run is not None:
                    self.interleaver.drop(run)
            if run is not None and over:
                yield self._ended(run, index)
            yield Finished(index, output, error)

    def describe(self) -> ModelTree:
        assert self.watch.places.tree is not None
        return self.watch.places.tree

    def close(self) -> None:
        self.kept.close()
        self.watch.remove()

    # -- Holder ----------------------------------------------------------------------------------

    def let_go(self, ids: list[str], why: str) -> None:
        self.keeps.drop(ids, why)

    def list_kept(self) -> list[tuple[str, int, float]]:
        self.keeps.tick(time.monotonic())
        return self.keeps.held()

    # -- Rows ------------------------------------------------------------------------------------

    def view(self, run: Run, location: Location, index: int, tensor: Tensor) -> Tensor | None:
        return tensor

    def whole(self, run: Run, location: Location, index: int, rows: Tensor) -> Tensor:
        return rows

    def wrote(self, run: Run, location: Location, changed: dict[int, Tensor]) -> None:
        return None

    # -- inside ----------------------------------------------------------------------------------

    def _start(self, invoke: Invoke, index: int) -> Run | None:
        run = run_of(invoke, index)
        block = invoke.block
        if run is not None:
            self._supply(run)
        if block is not None and "source" in block.code.compiled.co_names:
            tree = self.describe()
            effects = effects_of(block.code, block.names, tree)
            effects.check(tree, block.code)
            for path in effects.sources():
                self.watch.watch_source(path)
        return run

    def _supply(self, run: Run) -> None:
        """Give the run what earlier ones kept, and a place for what it keeps itself."""
        self.keeps.tick(time.monotonic())
        keeper = run.keeper = Keeper(self.keeps, str(next(self._requests)))
        copy = run.code.snapshots
        for name, value in run.scope.items():
            handles = handles_in(value)
            if handles:
                self.kept.check(handles)
                run.scope[name] = with_handles(value, lambda h: keeper.get(h.id, copy, h.name))

    def _ended(self, run: Run, index: int) -> Ended:
        assert run.keeper is not None
        run.error = run.error or run.keeper.check()
        event = _apart(ended(run, index), self._memory())
        run.keeper.settle(handle.id for handle in handles_in([event.saves, event.value]))
        self.kept.adopt(event.saves, event.value)
        return event

    def _memory(self) -> set[int]:
        """Where the model's own tensors lie, and those that are kept."""
        own = [*self.module.parameters(), *self.module.buffers(), *self.keeps.tensors()]
        return {tensor.untyped_storage().data_ptr() for tensor in own}

    def _run(self, invoke: Invoke, run: Run | None) -> RequestOutput | None:
        arguments = invoke.prompt if isinstance(invoke.prompt, tuple) else (invoke.prompt,)
        keywords = invoke.sampling
        if run is not None:
            # A module may hand on what it was given, and a write there is not meant for the user's.
            arguments, keywords = map_tensors((arguments, keywords), Tensor.clone)
        with torch.no_grad():
            if run is not None:
                self.interleaver.begin((run,))
            self.module(*arguments, **keywords)
            self.interleaver.advance(Phase.RESULT)
            if run is not None:
                self.interleaver.finish(run)
            self.interleaver.advance(Phase.OVER)
        return None


def _apart(event: Ended, memory: set[int]) -> Ended:
    """The event with saved tensors in memory of their own: no larger, and nobody else's.

    Args:
        memory: where what others use lies.
    """
    made: dict[int, Any] = {}

    def shared(tensor: Tensor) -> bool:
        held = tensor.untyped_storage()
        larger = tensor._is_view() and held.nbytes() > tensor.numel() * tensor.element_size()
        return larger or held.data_ptr() in memory

    def own(tensor: Tensor) -> Tensor:
        if not shared(tensor):
            return tensor
        return made.setdefault(id(tensor), tensor.detach().clone())

    for name, value in event.saves.items():
        # What needs no change stays the very object, so that one under two names stays one.
        if any(map(shared, flat(value))):
            event.saves[name] = made.setdefault(id(value), map_tensors(value, own))
    return event


class CausalBackend(TorchBackend):
    """Generates with a causal language model of transformers' kind."""

    def __init__(self, module: nn.Module, tokenizer: Any) -> None:
        super().__init__(module)
        self.tokenizer = tokenizer
        # transformers calls the key-value cache otherwise from release to release.
        known = inspect.signature(module.forward).parameters
        self._cache = "cache" if "cache" in known else "past_key_values"

    def view(self, run: Run, location: Location, index: int, tensor: Tensor) -> Tensor | None:
        if location.phase == Phase.FORWARD and tensor.dim() > 1 and tensor.shape[0] == 1:
            return tensor[0]
        return tensor

    def submit(self, invokes: list[Invoke]) -> Iterator[Event]:
        for invoke in invokes:
            invoke.sampling = normalise(invoke.sampling)
            _SAMPLING.check(invoke.sampling)
        yield from super().submit(invokes)

    def _run(self, invoke: Invoke, run: Run | None) -> RequestOutput | None:
        sampling = {"temperature": 1.0, "max_tokens": 16, "seed": None, **invoke.sampling}
        generator = torch.Generator()
        if sampling["seed"] is not None:
            generator.manual_seed(sampling["seed"])
        prompt = _ids(invoke.prompt, self.tokenizer)
        made: list[int] = []
        reason, cause = "length", None
        cache = None
        interleaver = self.interleaver
        with torch.no_grad():
            for step in range(sampling["max_tokens"]):
                if run is not None:
                    run.step = step
                    interleaver.begin((run,))
                ids = torch.tensor([prompt if step == 0 else made[-1:]])
                out = self.module(input_ids=ids, use_cache=True, **{self._cache: cache})
                cache = getattr(out, self._cache)
                interleaver.advance(Phase.LOGITS)
                logits = interleaver.arrive(LOGITS, out.logits[0, -1:].clone())
                interleaver.advance(Phase.SAMPLES)
                drawn = _draw(logits, sampling["temperature"], generator)
                drawn = interleaver.arrive(SAMPLES, drawn)
                interleaver.advance(Phase.RESULT)
                made.append(int(drawn))
                if run is not None and run.stopping:
                    reason, cause = "stop", STOPPED
                    break
                if made[-1] == self.tokenizer.eos_token_id and not sampling.get("ignore_eos"):
                    reason = "stop"
                    break
            if run is not None:
                interleaver.finish(run)
        output = RequestOutput(
            request_id="0",
            prompt=invoke.prompt if isinstance(invoke.prompt, str) else None,
            prompt_token_ids=prompt,
            outputs=[
                CompletionOutput(
                    index=0,
                    text=self.tokenizer.decode(made, skip_special_tokens=True),
                    token_ids=made,
                    finish_reason=reason,
                    stop_reason=cause,
                )
            ],
            finished=True,
        )
        self.interleaver.arrive(RESULT, output)
        self.interleaver.advance(Phase.OVER)
        return output


_SAMPLING = SamplingNames(["temperature", "max_tokens", "seed", "ignore_eos"])


def _ids(prompt: Any, tokenizer: Any) -> list[int]:
    """Token ids of a prompt: a text, ids, or what a tokenizer made."""
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    elif isinstance(prompt, Mapping) and "input_ids" in prompt:
        ids = torch.as_tensor(prompt["input_ids"]).reshape(-1).tolist()
    else:
        ids = list(prompt)
    if not ids:
        raise ValueError("Empty prompt: a prompt needs at least one token.")
    return ids


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial((logits.float() / temperature).softmax(-1), 1, generator=generator)


def _engine() -> str:
    return f"torch {torch.__version__}"
