"""`VLLM`: a model on a vLLM engine in this process's hands."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any, Literal

from nnsight_core.errors import EngineDeadError, NotSupportedError
from nnsight_core.keeps import LIMIT, SECONDS
from nnsight_core.model import Model
from nnsight_core.prompts import prompts_of
from nnsight_core.sampling import normalise
from nnsight_core.taps import RESID, resolve
from nnsight_core.tracer import Tracer, check_edits
from nnsight_core.tree import ModelTree
from nnsight_core.tree_cache import keep_tree, load_tree
from nnsight_vllm_worker.async_backend import LocalAsyncBackend
from nnsight_vllm_worker.async_engine import AsyncEngine
from nnsight_vllm_worker.backend import LocalBackend
from nnsight_vllm_worker.convert import output_of
from nnsight_vllm_worker.engine import BLOCK_TIMEOUT, SyncEngine
from nnsight_vllm_worker.policies import find_policy
from nnsight_vllm_worker.prompts import lora_of, prompt_of, sampling_of
from nnsight_vllm_worker.settings import SETTINGS
from nnsight_vllm_worker.vllm_ports.meta import tree_of
from nnsight_vllm_worker.vllm_ports.startup import engine


class VLLM(Model):
    """A language model on vLLM, whose forward passes blocks run in.

    Args:
        repo: a model's name or folder, as vLLM takes it.
        mode: `sync`, or `async` for an engine that belongs to the running event loop: traces are
            then awaited or iterated over (`tracer.backend`), and so is what `generate` and `chat`
            give.
        dispatch: build the engine now; otherwise the first trace or generation does.
        serve: a server's address, whose engine is used instead (with the client package).
        api_key: the key that the server wants.
        remote: use the server of the user's configuration.
        block_timeout: seconds that a block may hold the engine, which all requests share, before it
            gives control back; None for as long as it likes.
        taps: patterns of the locations that blocks reach while the engine runs compiled, with CUDA
            graphs: `"model.layers.*.mlp.output"`, or `"resid"`, the residual stream after every
            layer. Any other location makes the steps that want it run eagerly.
        only_taps: refuse blocks that would run a step eagerly.
        keep_bytes: how much memory the values may take that blocks keep on the engine.
        keep_seconds: how long they stay.
        policy: what blocks may do: `trusted` ones anything, `restricted` ones what a list allows
            (with the server's package); or the import path of a policy of your own.
        save_device: where saved tensors arrive, such as `cuda`; the CPU otherwise.
        **engine_args: whatever `vllm.LLM` takes. What we force or default is in
            `engine_settings()`.

    Raises:
        EngineError: the engine cannot be built; the message holds the root cause.
        ImportError: the policy is in a package that is not here.
        ValueError: an unknown mode, or a setting that cannot be had.

    Example:
        >>> model = VLLM("openai-community/gpt2", dispatch=True)
        >>> with model.trace("The Eiffel Tower is in the city of", temperature=0.0, max_tokens=1):
        ...     hidden = model.transformer.h[6].output.save()
        ...     logits = model.logits.save()
    """

    def __init__(
        self,
        repo: str,
        *,
        mode: Literal["sync", "async"] = "sync",
        dispatch: bool = False,
        serve: str | None = None,
        api_key: str | None = None,
        remote: bool = False,
        save_device: str = "cpu",
        taps: str | Sequence[str] = RESID,
        only_taps: bool = False,
        block_timeout: float | None = BLOCK_TIMEOUT,
        keep_bytes: int = LIMIT,
        keep_seconds: float = SECONDS,
        policy: str = "trusted",
        **engine_args: Any,
    ) -> None:
        if mode not in ("sync", "async"):
            raise ValueError(f"mode={mode!r}: it is 'sync' or 'async'.")
        path, rules = find_policy(policy)
        # What would be unpickled is code.
        how: dict[str, Any] = {"pickle": not rules.guards, "device": save_device}
        backend: LocalBackend | LocalAsyncBackend
        if mode == "async":
            ready = (self._build_async, self._confirm)
            backend = LocalAsyncBackend(*ready, lambda: self.tokenizer, **how)
        else:
            backend = LocalBackend(self._dispatched, lambda: self.tokenizer, **how)
        super().__init__(backend=backend)
        self._repo = repo
        self._mode = mode
        if remote:
            serve, api_key = _client().choose(serve, api_key, remote)
        self._serve = serve
        self._api_key = api_key
        self._limits = {
            "block_timeout": block_timeout,
            "keep_bytes": keep_bytes,
            "keep_seconds": keep_seconds,
            "policy": path,
            "pickle": not rules.guards,
        }
        self._arguments = {**engine_args, "taps": taps}
        self._only_taps = only_taps
        self._engine: SyncEngine | None = None
        self._closed = False
        if dispatch and serve is not None:
            raise ValueError("A model runs on a server (serve=) or here (dispatch=True).")
        if policy != "trusted" and serve is not None:
            raise ValueError("policy= is for an engine of your own; a server (serve=) has its own.")
        if dispatch and isinstance(backend, LocalAsyncBackend):
            backend.start()
        elif dispatch:
            self._dispatched()

    def trace(self, *args: Any, only_taps: bool = False, **sampling: Any) -> Tracer:
        return super().trace(*args, only_taps=only_taps or self._only_taps, **sampling)

    trace.__doc__ = Model.trace.__doc__

    @property
    def dispatched(self) -> bool:
        """Whether the engine has been built."""
        return self._built is not None

    @property
    def _built(self) -> SyncEngine | AsyncEngine | None:
        backend = self._backend
        return backend.engine if isinstance(backend, LocalAsyncBackend) else self._engine

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer (transformers)."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._arguments.get("tokenizer") or self._repo)

    @property
    def llm(self) -> Any:
        """vLLM's own `LLM` (or `AsyncLLM`), for what this class does not offer."""
        if isinstance(self._backend, LocalAsyncBackend):
            return self._backend.start().llm
        return self._dispatched().llm

    @property
    def tree(self) -> ModelTree:
        """The module tree as data: classes, dtypes and symbolic shapes of every location.

        Before the engine is built it is read from vLLM's classes and marked `provisional`, unless
        an engine has recorded it on this machine before.
        """
        if self._places.tree is None and self._serve is not None:
            self._places.tree = self._described(self._backend_for({}))
        if self._places.tree is None:
            tree = load_tree(self._repo, engine(), self._arguments)
            if tree is None:
                arguments = {k: v for k, v in self._arguments.items() if k != "taps"}
                tree = tree_of(self._repo, arguments)
                keep_tree(tree, self._repo, engine(), self._arguments)
            self._places.tree = tree
        return self._places.tree

    def _generate(
        self, backend: Any, prompts: Any, sampling: dict[str, Any], use_tqdm: bool | None
    ) -> Any:
        if backend is not self._backend or not isinstance(backend, LocalBackend):
            return super()._generate(backend, prompts, sampling, use_tqdm)
        named = normalise(sampling)
        edits, lora = (
            check_edits(named.pop("edits", None), backend),
            lora_of(named.pop("lora_request", None)),
        )
        params = sampling_of(named)
        engine = self._dispatched()
        if engine.edits.chosen(edits):
            return super()._generate(backend, prompts, sampling, use_tqdm)
        # Nothing of ours has a part in it, so that vLLM's own way can do it.
        given = [prompt_of(p) for p in prompts_of(prompts)]
        bar = len(given) > 1 if use_tqdm is None else use_tqdm
        outputs = engine.generate(given, params, use_tqdm=bar, lora_request=lora)
        return [output_of(output) for output in outputs]

    def engine_settings(self) -> str:
        """What is forced or defaulted on vLLM's engine, each with its reason, as a table."""
        rows = [
            (s.name, str(s.value), "forced" if s.forced else "default", s.reason) for s in SETTINGS
        ]
        if self._engine is not None:
            size = self._engine.counts()["tap_bytes"] / 2**20
            where = f"{len(self.taps)} locations"
            rows.append(("taps", where, "default", f"they take {size:.0f} MiB of device memory"))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join(
            "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]])
            for row in rows
        )

    async def aclose(self) -> None:
        """As `close`, for a model in `mode="async"`."""
        if not isinstance(self._backend, LocalAsyncBackend):
            self.close()
            return
        self._closed = True
        if "_servers" in vars(self):
            await self._servers.aclose()
        await self._backend.aclose()

    def close(self) -> None:
        """End the engine and its processes."""
        if isinstance(self._backend, LocalAsyncBackend):
            raise NotSupportedError("This model is in mode='async': `await model.aclose()`.")
        self._closed = True
        if "_servers" in vars(self):
            self._servers.close()
        if self._engine is not None:
            self._engine.close()

    def restart(self) -> None:
        """Build the engine anew, with the same arguments: after it died, or was closed.

        What was installed on it is gone.

        Example:
            >>> try:
            ...     with model.trace("Hello"):
            ...         logits = model.logits.save()
            ... except EngineDeadError:
            ...     model.restart()
        """
        self._closed = False
        if isinstance(self._backend, LocalAsyncBackend):
            self._backend.forget()
            self._backend.start()
            return
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        self._dispatched()

    def _dispatched(self) -> SyncEngine:
        if self._closed:
            raise EngineDeadError("This model was closed; `model.restart()` opens it again.")
        if self._engine is None:
            self._check_taps()
            self._engine = SyncEngine(self._repo, self._arguments, **self._limits)
            self._confirm(self._engine)
        return self._engine

    def _build_async(self) -> AsyncEngine:
        if self._closed:
            raise EngineDeadError("This model was closed; `model.restart()` opens it again.")
        self._check_taps()
        return AsyncEngine(self._repo, self._arguments, **self._limits)

    def _check_taps(self) -> None:
        if self._arguments["taps"] not in (RESID, (), []):
            # A misspelt pattern is known before an engine is built, which takes long.
            resolve(self.tree, self._arguments["taps"])

    def _confirm(self, built: SyncEngine | AsyncEngine) -> None:
        """The tree is the one that the engine itself has recorded."""
        self._places.tree = built.tree
        keep_tree(built.tree, self._repo, engine(), self._arguments)

    def _backend_for(self, arguments: dict[str, Any]) -> Any:
        elsewhere = arguments.get("serve") or arguments.get("remote") or self._serve
        if not elsewhere:
            for name in ("serve", "api_key", "remote"):
                arguments.pop(name, None)
            return super()._backend_for(arguments)
        return self._servers.chosen(arguments, self._mode)

    @functools.cached_property
    def _servers(self) -> Any:
        return _client().Servers(
            self._serve,
            self._api_key,
            lambda: vars(self).get("tokenizer"),
            lambda: self._places.tree,
        )


def _client() -> Any:
    """The client package, which this one needs for nothing but another's server."""
    try:
        return importlib.import_module("nnsight_client.servers")
    except ModuleNotFoundError as error:
        if error.name != "nnsight_client":
            raise
        raise ImportError("serve= needs the client package: pip install nnsight-client.") from None
