"""`VLLM`: a model that a server runs."""

from __future__ import annotations

import difflib
import functools
import importlib
from typing import TYPE_CHECKING, Any, Literal, Self

from nnsight_client.configuration import choose
from nnsight_client.servers import Servers
from nnsight_core.errors import LocationError, NotSupportedError
from nnsight_core.model import Model

if TYPE_CHECKING:
    from nnsight_client.connection import Trust
    from nnsight_core.tree import ModelTree

WORKER = "nnsight_vllm_worker"
_OURS = ("serve", "api_key", "remote", "verify", "retries", "mode", "dispatch")


class VLLM(Model):
    """A language model on vLLM, elsewhere: blocks run in the forward passes of a server's engine.

    Args:
        repo: the model's name or folder, for its tokenizer (and for an engine built here).
        serve: the server's address; a trace may name another.
        api_key: the key that the server wants.
        remote: use the server of the user's configuration; see `nnsight_client.configure`.
        verify: what the certificates of servers are checked against, where not what the environment
            says: a file or folder of authorities, an `ssl.SSLContext`, or False for nothing at all.
        retries: how often a request is sent anew that has surely not run, since no connection could
            be made or the server was busy.
        mode: `sync`, or `async` for traces that are awaited or iterated over (`tracer.backend`).
        dispatch: build an engine in this process instead, which the worker package does.
        **engine_args: what that engine takes.

    Raises:
        ImportError: `dispatch=True` without the worker package.
        ValueError: both a server and `dispatch=True`, an address that is none, or `remote=True`
            without a configuration.

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
        remote: bool = False,
        verify: Trust = True,
        retries: int = 3,
        mode: Literal["sync", "async"] = "sync",
        dispatch: bool = False,
        **engine_args: Any,
    ) -> None:
        for name in engine_args:
            near = difflib.get_close_matches(name, _OURS, 1, 0.7)
            if near and not dispatch:
                raise TypeError(f"Unknown argument {name!r}. Did you mean {near[0]!r}?")
        if mode not in ("sync", "async"):
            raise ValueError(f"mode={mode!r}: it is 'sync' or 'async'.")
        if dispatch and (serve is not None or remote):
            raise ValueError("A model runs on a server (serve=, remote=) or here (dispatch=True).")
        super().__init__()
        self._mode = mode
        self._repo = repo
        self._engine_args = engine_args
        self._local: Any = None
        serve, api_key = choose(serve, api_key, remote)
        self._servers = Servers(
            serve,
            api_key,
            lambda: vars(self).get("tokenizer"),
            lambda: self._places.tree if self._places.sure else None,
            verify=verify,
            retries=retries,
            repo=repo,
        )
        self._serve = self._servers.url
        if dispatch:
            self._local = _worker().VLLM(repo, mode=mode, dispatch=True, **engine_args)
            self._places.tree = self._local.tree
        else:
            self._places.recall = self._recalled

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer (transformers).

        The one of `repo`, or, where that cannot be had here, the server's.
        """
        if self._local is not None:
            return self._local.tokenizer
        from nnsight_client.tokenizers import find_tokenizer

        return find_tokenizer(self._engine_args.get("tokenizer") or self._repo, self._backend_for)

    @property
    def tree(self) -> ModelTree:
        """The module tree as data: classes, dtypes and symbolic shapes of every location.

        The server's; while that cannot be reached, as it was the last time; before the first time,
        read from transformers' classes and marked `provisional`.
        """
        places = self._places
        if places.tree is None or not places.sure:
            from nnsight_client.trees import learn, provisional

            if self._serve is not None:
                ask = functools.partial(self._described, self._backend_for({}))
                places.tree, places.sure = learn(self._repo, self._serve, ask)
            elif places.tree is None:
                places.tree, places.sure = provisional(self._repo), False
        if places.tree is None:
            self._backend_for({})  # says that no server is named
            raise LocationError(f"The tree of {self._repo} is not known.")
        return places.tree

    def __repr__(self) -> str:
        served = self._servers.names()
        runs = f" runs {served[0]!r}" if served else ""
        where = f", {self._serve}{runs}" if self._serve is not None else ""
        return f"<VLLM {self._repo!r}{where}>"

    def close(self) -> None:
        """Close the connections, and end the engine if one was built here."""
        if self._mode == "async":
            raise NotSupportedError("This model is in mode='async': `await model.aclose()`.")
        self._servers.close()
        if self._local is not None:
            self._local.close()

    async def aclose(self) -> None:
        """As `close`, for a model in `mode="async"`."""
        await self._servers.aclose()
        if self._local is not None:
            await self._local.aclose()

    async def __aenter__(self) -> Self:
        # A model without a server of its own has no tree to be asked for.
        return self if self._serve is None and self._local is None else await super().__aenter__()

    def _recalled(self) -> ModelTree | None:
        """The tree as this machine knows it from earlier, which the server's may differ from."""
        if self._serve is None:
            return None
        from nnsight_client.trees import recalled

        tree = recalled(self._repo, self._serve)
        self._places.sure = tree is None
        return tree

    def _generate(
        self, backend: Any, prompts: Any, sampling: dict[str, Any], use_tqdm: bool | None
    ) -> Any:
        if self._local is not None and backend is self._local._backend:
            return self._local._generate(backend, prompts, sampling, use_tqdm)
        return super()._generate(backend, prompts, sampling, use_tqdm)

    def _backend_for(self, arguments: dict[str, Any]) -> Any:
        server = self._servers.chosen(arguments, self._mode)
        if server is not None:
            return server
        if self._local is not None:
            return self._local._backend_for(arguments)
        raise ValueError(
            "No server is named. Give its address to the model (`VLLM(..., serve=URL)`) or to "
            "the trace (`trace(..., serve=URL)`; `remote=True` is the configured one), or build an "
            "engine in this process (`VLLM(..., dispatch=True)`)."
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
