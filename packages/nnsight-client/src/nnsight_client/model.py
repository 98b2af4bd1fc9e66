"""`VLLM`: a model that a server runs."""

from __future__ import annotations

import difflib
import functools
import importlib
from typing import TYPE_CHECKING, Any, Literal

from nnsight_core.errors import NotSupportedError
from nnsight_core.model import Model

if TYPE_CHECKING:
    from nnsight_client.servers import Servers

WORKER = "nnsight_vllm_worker"


class VLLM(Model):
    """A language model on vLLM, elsewhere: blocks run in the forward passes of a server's engine.

    Args:
        repo: the model's name or folder, for its tokenizer (and for an engine built here).
        serve: the server's address; a trace may name another.
        api_key: the key that the server wants.
        mode: `sync`, or `async` for traces that are awaited or iterated over (`tracer.backend`).
        dispatch: build an engine in this process instead, which the worker package does.
        **engine_args: what that engine takes.

    Raises:
        ImportError: `dispatch=True` without the worker package.
        ValueError: both a server and `dispatch=True`, or an address that is none.

    Example:
        >>> model = VLLM("openai-community/gpt2", serve="http://127.0.0.1:6677")
        >>> with model.trace("The Eiffel Tower is in the city of", temperature=0.0, max_tokens=1):
        ...     hidden = model.transformer.h[6].output.save()
    """

    def __init__(
        self,
        repo: str,
        *,
        serve: str | None = None,
        api_key: str | None = None,
        mode: Literal["sync", "async"] = "sync",
        dispatch: bool = False,
        **engine_args: Any,
    ) -> None:
        for name in engine_args:
            near = difflib.get_close_matches(name, ("serve", "api_key", "mode", "dispatch"), 1, 0.7)
            if near and not dispatch:
                raise TypeError(f"Unknown argument {name!r}. Did you mean {near[0]!r}?")
        if mode not in ("sync", "async"):
            raise ValueError(f"mode={mode!r}: it is 'sync' or 'async'.")
        super().__init__()
        self._mode = mode
        self._repo = repo
        self._serve = serve
        self._api_key = api_key
        self._engine_args = engine_args
        self._local: Any = None
        if dispatch:
            if serve is not None:
                raise ValueError("A model runs on a server (serve=) or here (dispatch=True).")
            self._local = _worker().VLLM(repo, mode=mode, dispatch=True, **engine_args)
            self._places.tree = self._local.tree
        elif serve is not None:
            self._servers.backend(serve)

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer (transformers)."""
        if self._local is not None:
            return self._local.tokenizer
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._engine_args.get("tokenizer") or self._repo)

    def close(self) -> None:
        """Close the connections, and end the engine if one was built here."""
        if self._mode == "async":
            raise NotSupportedError("This model is in mode='async': `await model.aclose()`.")
        if "_servers" in vars(self):
            self._servers.close()
        if self._local is not None:
            self._local.close()

    async def aclose(self) -> None:
        """As `close`, for a model in `mode="async"`."""
        if "_servers" in vars(self):
            await self._servers.aclose()
        if self._local is not None:
            await self._local.aclose()

    def _generate(
        self, backend: Any, prompts: Any, sampling: dict[str, Any], use_tqdm: bool | None
    ) -> Any:
        if self._local is not None and backend is self._local._backend:
            return self._local._generate(backend, prompts, sampling, use_tqdm)
        return super()._generate(backend, prompts, sampling, use_tqdm)

    def _backend_for(self, arguments: dict[str, Any]) -> Any:
        serve = arguments.pop("serve", None)
        api_key = arguments.pop("api_key", None)
        if serve is None and self._local is not None:
            return self._local._backend_for(arguments)
        url = serve or self._serve
        if url is None:
            raise ValueError(
                "No server is named. Give its address to the model (`VLLM(..., serve=URL)`) or to "
                "the trace (`trace(..., serve=URL)`), or build an engine in this process "
                "(`VLLM(..., dispatch=True)`)."
            )
        return self._servers.backend(url, api_key, self._mode)

    def _described(self, backend: Any) -> Any:
        return super()._described(getattr(backend, "now", backend))

    @functools.cached_property
    def _servers(self) -> Servers:
        from nnsight_client.servers import Servers

        return Servers(
            self._serve,
            self._api_key,
            lambda: vars(self).get("tokenizer"),
            lambda: self._places.tree,
        )


def _worker() -> Any:
    """The worker package, which this one never needs but for an engine of its own."""
    try:
        return importlib.import_module(WORKER)
    except ModuleNotFoundError as error:
        if error.name != WORKER:
            raise
        raise ImportError(
            "dispatch=True builds an engine in this process, which needs the worker package: "
            "pip install 'nnsight-vllm-worker[cuda]' (or [cpu]). To use a server instead, give "
            "serve=URL."
        ) from None
