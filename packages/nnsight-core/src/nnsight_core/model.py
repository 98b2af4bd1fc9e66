"""A model as users hold it: the tree, and the ways to run something on it."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from nnsight_core.backend import Backend, Invoke
from nnsight_core.errors import EngineError, LocationError, NotSupportedError
from nnsight_core.explain import Explanation, Read, explain, read_invoke, refuse_untapped
from nnsight_core.kept import KeptValues
from nnsight_core.node import Places, Root
from nnsight_core.outcome import reraise
from nnsight_core.outputs import RequestOutput
from nnsight_core.tracer import NO_PROMPT, Tracer
from nnsight_core.tree import ModelTree

_NOT_YET = ("chat", "clear_edits", "edit", "edits", "std")
_INSTEAD = {
    "scan": "the shapes of every location are in `model.tree` (`print(model)`), without running it",
    "session": "open one trace after the other: what the first has saved, the second can use",
    "backward": "vLLM computes no gradients",
    "all": "loop over steps in the block: `for step in tracer.all():`",
    "iter": "loop over steps in the block: `for step in tracer.iter[:5]:`",
}


class Model(Root):
    """The front end that every backend shares; subclass it for a backend of your own.

    A subclass sets up `_backend` (see `nnsight_core.Backend`) and may override `_backend_for`,
    which chooses the backend of one trace from its keyword arguments.
    """

    _backend: Backend | None

    def __init__(self, places: Places | None = None, backend: Backend | None = None) -> None:
        super().__init__(places or Places(), "")
        object.__setattr__(self, "_backend", backend)
        self._places.learn = lambda: self.tree

    def trace(
        self, prompt: Any = NO_PROMPT, *, fn: Any = None, only_taps: bool = False, **sampling: Any
    ) -> Tracer:
        """Run the body of a `with` statement inside the model's forward pass.

        With a prompt, the body is a block for that prompt. Without one, the body runs here and
        opens invokes, each of which has a prompt and a block.

        Args:
            prompt: one prompt, in any form that the backend takes.
            fn: a function to run instead of a body, for code whose source cannot be had. It is
                called with the tracer; the trace runs at once and gives back the finished tracer,
                whose `value` is what the function returned.
            only_taps: refuse blocks that would run a step eagerly, before anything runs.
            **sampling: sampling arguments (`temperature`, `max_tokens`, ...) for every prompt.

        Raises:
            CaptureError: the body cannot be captured.
            NotATapError: `only_taps`, and a block wants a location that is no tap.
            TypeError: an unknown sampling argument.

        Example:
            >>> with model.trace("The Eiffel Tower is in the city of", max_tokens=1) as tracer:
            ...     hidden = model.transformer.h[6].output.save()
        """
        backend = self._backend_for(sampling)
        tracer = Tracer(self, backend, prompt, sampling, only_taps)
        if fn is not None:
            if prompt is NO_PROMPT:
                raise ValueError("A trace with `fn=` needs a prompt.")
            tracer._invokes.append(Invoke(prompt, sampling, None, fn))
            reraise(tracer._run())
        return tracer

    @property
    def tree(self) -> ModelTree:
        """The module tree as data: classes, dtypes and symbolic shapes of every location."""
        if self._places.tree is None:
            backend = self._backend_for({})
            self._places.tree = backend.describe()
        return self._places.tree

    @property
    def taps(self) -> tuple[str, ...]:
        """The locations that are reachable in steps that run compiled."""
        return self.tree.taps

    @property
    def kept(self) -> KeptValues:
        """What blocks kept on the engine (`x.keep()`): sizes, ages, and `clear()`."""
        found = getattr(self._backend_for({}), "kept", None)
        if found is None:
            raise NotSupportedError(
                "What is kept cannot be listed here; values leave with the time limit."
            )
        return found

    def explain(self, tracer: Tracer) -> Explanation | list[Explanation]:
        """How the steps of a trace run on this engine, and why; of several invokes a list.

        Example:
            >>> with model.trace("Hello", max_tokens=8) as tracer:
            ...     hidden = model.transformer.h[3].output.save()
            >>> print(model.explain(tracer))
        """
        found = [explain(text, self.tree) for text in tracer._texts]
        return found[0] if len(found) == 1 else found

    def _read(self, invokes: list[Invoke], backend: Backend, only_taps: bool) -> list[Read | None]:
        """The texts of the invokes' blocks, refused if they leave the taps and must not."""
        texts = [read_invoke(invoke) for invoke in invokes]
        if only_taps:
            tree = self._places.tree
            if tree is None or tree.provisional or backend is not self._backend_for({}):
                tree = backend.describe()  # only an engine that runs knows its taps
            refuse_untapped(texts, tree)
        return texts

    def close(self) -> None:
        """End the engine, if this model started one."""
        if self._backend is not None:
            self._backend.close()

    def _generate(
        self, backend: Backend, prompts: Any, sampling: dict[str, Any]
    ) -> list[RequestOutput]:
        """Plain generation through a backend: invokes without blocks."""
        tracer = Tracer(self, backend, NO_PROMPT, sampling)
        tracer._invokes = [Invoke(prompt, sampling) for prompt in prompts_of(prompts)]
        reraise(tracer._run())
        return [output for output in tracer.outputs if output is not None]

    def _backend_for(self, arguments: dict[str, Any]) -> Backend:
        """The backend of one trace; takes out of `arguments` what only chooses it."""
        if self._backend is None:
            raise EngineError("This model has no backend.")
        return self._backend

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_YET:
            raise LocationError(f"`{name}` is not there yet: a model can be traced and generate.")
        if name in _INSTEAD and not self._has_module(name):
            raise NotSupportedError(f"`{name}` is not there: {_INSTEAD[name]}.")
        return super().__getattr__(name)

    def _has_module(self, name: str) -> bool:
        return self._places.tree is not None and name in self._places.tree.modules

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __str__(self) -> str:
        return str(self.tree)


def prompts_of(prompts: Any) -> list[Any]:
    """The prompts of a generation: those of a list, or the one that was given (token ids are)."""
    several = isinstance(prompts, list) and not all(isinstance(p, int) for p in prompts)
    return prompts if several else [prompts]
