"""A model as users hold it: the tree, and the ways to run something on it.

What runs something needs PyTorch, which takes seconds to import. A script that only makes a model
is not to wait for that, so the methods that run something import what does.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from nnsight_core.errors import EngineError, LocationError, NotSupportedError
from nnsight_core.node import Places, Root
from nnsight_core.prompts import NO_PROMPT, prompts_of

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from nnsight_core.async_run import AsyncRun
    from nnsight_core.backend import AsyncBackend, Backend, EditInfo, Invoke
    from nnsight_core.explain import Explanation, Read
    from nnsight_core.kept import KeptValues
    from nnsight_core.outputs import RequestOutput
    from nnsight_core.tracer import Tracer
    from nnsight_core.tree import ModelTree

_NOT_YET = ("std",)
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

    _backend: Backend | AsyncBackend | None

    def __init__(
        self, places: Places | None = None, backend: Backend | AsyncBackend | None = None
    ) -> None:
        super().__init__(places or Places(), "")
        object.__setattr__(self, "_backend", backend)
        self._places.learn = lambda: self.tree

    def trace(
        self,
        prompt: Any = NO_PROMPT,
        *,
        fn: Any = None,
        only_taps: bool = False,
        edits: list[str] | None = None,
        progress: bool = False,
        **sampling: Any,
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
            edits: names of the installed edits that run besides; None for all of them. Edits
                without a name always run.
            progress: show a bar that counts the prompts which have finished.
            **sampling: sampling arguments (`temperature`, `max_tokens`, ...) for every prompt.

        Raises:
            CaptureError: the body cannot be captured.
            NotATapError: `only_taps`, and a block wants a location that is no tap.
            TypeError: an unknown sampling argument.

        Example:
            >>> with model.trace("The Eiffel Tower is in the city of", max_tokens=1) as tracer:
            ...     hidden = model.transformer.h[6].output.save()
        """
        from nnsight_core.backend import Invoke
        from nnsight_core.outcome import reraise
        from nnsight_core.tracer import Tracer

        backend = self._backend_for(sampling)
        tracer = Tracer(self, backend, prompt, sampling, only_taps, edits, progress)
        if fn is not None:
            if prompt is NO_PROMPT:
                raise ValueError("A trace with `fn=` needs a prompt.")
            tracer._invokes.append(Invoke(prompt, sampling, None, fn, tracer._edits))
            reraise(tracer._run())
        return tracer

    def edit(
        self,
        name: str | None = None,
        *,
        fn: Any = None,
        share: float = 1.0,
        ttl: float | None = None,
        only_taps: bool = False,
        inplace: bool = True,
        **where: Any,
    ) -> Any:
        """Install the body of a `with` statement on the engine, for every request from then on.

        Each request runs its own copy, before the block that it may bring itself. What it saves is
        in the request's `output.saves`, what it raises in `output.errors`.

        Args:
            name: what `edits=` of a trace or a generation chooses it by. Several edits may have
                one name; one without a name always runs.
            fn: a function to install instead of a body; the edit is given back at once.
            share: which part of the requests it runs in, chosen by the request's id.
            ttl: seconds after which it is cleared.
            only_taps: refuse a body that would run steps eagerly.

        Raises:
            CaptureError: the body cannot be captured.
            NotSupportedError: this backend has no edits.

        Example:
            >>> with model.edit("steer", share=0.1) as (tracer, edit):
            ...     for step in tracer.all():
            ...         model.transformer.h[6].output[:] += vector
        """
        from nnsight_core.edits import EditContext, check_edit

        check_edit(name, share, ttl, inplace)
        backend = self._edit_backend(where)
        if where:
            raise TypeError(f"Unknown argument {next(iter(where))!r} of an edit.")
        context = EditContext(self, backend, name, share, ttl, only_taps)
        return context if fn is None else context.install(fn)

    @property
    def edits(self) -> list[EditInfo]:
        """The edits that are installed, in the order of their installation.

        Of a server, with `mode="async"`, as its last answer said it; see `aedits`.
        """
        return self._edit_backend({}).edits()

    async def aedits(self) -> list[EditInfo]:
        """As `edits`, asked anew where that takes a while, for a model in `mode="async"`."""
        backend = self._edit_backend({})
        return await backend.aedits() if _is_async(backend) else backend.edits()

    def clear_edits(self) -> None:
        """Clear all edits; requests that have begun with them end with them."""
        backend = self._edit_backend({})
        if _is_async(backend):
            raise NotSupportedError("This model is in mode='async': `await model.aclear_edits()`.")
        backend.clear(None)

    async def aclear_edits(self) -> None:
        """As `clear_edits`, for a model in `mode="async"`."""
        backend = self._edit_backend({})
        if _is_async(backend):
            await backend.clear(None)
        else:
            backend.clear(None)

    def _edit_backend(self, where: dict[str, Any]) -> Any:
        from nnsight_core.backend import AsyncBackend, EditBackend

        backend = self._backend_for(where)
        if not isinstance(backend, EditBackend | AsyncBackend):
            raise NotSupportedError(
                f"A {type(backend).__name__} has no edits (yet): they are installed on an engine "
                "of your own that serves requests. Put the block into each trace."
            )
        return backend

    @property
    def tree(self) -> ModelTree:
        """The module tree as data: classes, dtypes and symbolic shapes of every location."""
        if self._places.tree is None:
            backend = self._backend_for({})
            self._places.tree = self._described(backend)
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
        from nnsight_core.explain import explain

        found = [explain(text, self.tree) for text in tracer._texts]
        return found[0] if len(found) == 1 else found

    def _read(self, invokes: list[Invoke], backend: Any, only_taps: bool) -> list[Read | None]:
        """The texts of the invokes' blocks, refused if they leave the taps and must not."""
        from nnsight_core.explain import read_invoke, refuse_untapped

        known: dict[Any, Read | None] = {}
        texts: list[Read | None] = []
        for invoke in invokes:
            sign = invoke.sign()
            if sign not in known:
                known[sign] = read_invoke(invoke)
            texts.append(known[sign])
        if only_taps:
            tree = self._places.tree
            elsewhere = not self._places.sure or backend is not self._backend_for({})
            if tree is None or tree.provisional or elsewhere:
                tree = self._described(backend)  # only an engine that runs knows its taps
            refuse_untapped(texts, tree)
        return texts

    def close(self) -> None:
        """End the engine, if this model started one."""
        if self._backend is None:
            return
        if _is_async(self._backend):
            raise NotSupportedError("This model is in mode='async': `await model.aclose()`.")
        self._backend.close()

    async def aclose(self) -> None:
        """As `close`, for a model in `mode="async"`."""
        if _is_async(self._backend):
            await self._backend.aclose()
        else:
            self.close()

    def generate(self, prompts: Any, *, use_tqdm: bool | None = None, **sampling: Any) -> Any:
        """Plain generation, for one prompt or a list of them; the installed edits run in it.

        Args:
            prompts: one prompt in any form that the backend takes, or a list of them.
            use_tqdm: whether a progress bar is shown; by default for more than one prompt.
            **sampling: sampling arguments, and what a trace takes besides (`edits=`, `serve=`).

        Returns:
            A list of `RequestOutput`, in the order of the prompts; with `mode="async"` what is
            awaited for it.

        Example:
            >>> model.generate(["Hello", "Bye"], max_tokens=5)[0].outputs[0].text
        """
        return self._generate(self._backend_for(sampling), prompts, sampling, use_tqdm)

    def chat(
        self,
        messages: list[Any],
        *,
        tools: Any = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        use_tqdm: bool | None = None,
        **sampling: Any,
    ) -> Any:
        """As `generate`, for one conversation or a list of them.

        The conversation becomes a prompt by the chat template of the model's tokenizer.

        Args:
            messages: dicts of `role` and `content`; or a list of such lists.

        Raises:
            ValueError: the tokenizer has no chat template, and none was given.

        Example:
            >>> model.chat([{"role": "user", "content": "Hello!"}], max_tokens=20)
        """
        backend = self._backend_for(sampling)
        several = bool(messages) and isinstance(messages[0], list | tuple)
        prompts = [
            {
                "prompt_token_ids": self.tokenizer.apply_chat_template(
                    conversation,
                    tools=tools,
                    chat_template=chat_template,
                    add_generation_prompt=add_generation_prompt and not continue_final_message,
                    continue_final_message=continue_final_message,
                    tokenize=True,
                    return_dict=True,
                    **(chat_template_kwargs or {}),
                )["input_ids"]
            }
            for conversation in (messages if several else [messages])
        ]
        return self._generate(backend, prompts, sampling, use_tqdm)

    def _generate(
        self, backend: Any, prompts: Any, sampling: dict[str, Any], use_tqdm: bool | None
    ) -> Any:
        """Plain generation through a backend: invokes without blocks."""
        from nnsight_core.backend import Invoke
        from nnsight_core.outcome import reraise
        from nnsight_core.progress import Bar
        from nnsight_core.tracer import Tracer, check_edits

        edits = check_edits(sampling.pop("edits", None), backend)
        tracer = Tracer(self, backend, NO_PROMPT, sampling)
        tracer._invokes = [Invoke(p, sampling, edits=edits) for p in prompts_of(prompts)]
        if use_tqdm is None:
            use_tqdm = len(tracer._invokes) > 1
        tracer._bar = Bar(len(tracer._invokes)) if use_tqdm else None
        reraise(tracer._run())
        if _is_async(backend):
            return _outputs_of(tracer, tracer.backend.whole())
        return [output for output in tracer.outputs if output is not None]

    def _described(self, backend: Any) -> ModelTree:
        """The tree of the engine behind a backend.

        Raises:
            NotSupportedError: it has to be awaited, and nothing has run yet.
        """
        # A server's tree can be had at once, whatever the model's mode.
        backend = getattr(backend, "now", backend)
        if _is_async(backend):
            raise NotSupportedError(
                "Which locations there are is known once the engine runs, in mode='async' after "
                "the first trace or generation was awaited."
            )
        return backend.describe()

    def _backend_for(self, arguments: dict[str, Any]) -> Any:
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

    async def __aenter__(self) -> Self:
        """For a model in `mode="async"`: its tree is known from here on, without holding the loop.

        Example:
            >>> async with VLLM("openai-community/gpt2", mode="async") as model:
            ...     print(len(model.transformer.h), model.taps)
        """
        backend = self._backend_for({})
        if _is_async(backend):
            self._places.tree, self._places.sure = await backend.describe(), True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __str__(self) -> str:
        return str(self.tree)


async def _outputs_of(tracer: Tracer, run: AsyncRun) -> list[RequestOutput]:
    await run
    return [output for output in tracer.outputs if output is not None]


def _is_async(backend: Any) -> TypeIs[AsyncBackend]:
    from nnsight_core.backend import AsyncBackend

    return isinstance(backend, AsyncBackend)
