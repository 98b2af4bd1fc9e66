"""Prompts and sampling arguments, in vLLM's terms."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any

import numpy
import torch

from nnsight_core.errors import NotSupportedError
from nnsight_core.sampling import SamplingNames, normalise
from nnsight_vllm_worker.vllm_ports.startup import refusals

_REFUSED = {
    "multi_modal_data": "which rows are an image's or a sound's is not told apart yet",
    "encoder_prompt": "a model with an encoder runs two forward passes for one prompt",
    "prompt_embeds": "it has no token ids, so its rows and steps cannot be counted",
}
OURS = "nnsight"
"""What the names of our own entries in `extra_args` begin with."""
_OPEN = ("extra_args", "structured_outputs")
"""Sampling arguments that hold values of any kind."""
_OURS = frozenset(("output_kind", "skip_clone", "skip_reading_prefix_cache"))


def prompt_of(prompt: Any) -> Any:
    """One prompt as vLLM takes it.

    Args:
        prompt: a text, token ids, a tokenizer's output (rows of 0 in its attention mask are left
            out), or a prompt dict of vLLM's.

    Raises:
        ValueError: it is empty, or more than one prompt.
        TypeError: it is none of these.
        NotSupportedError: a prompt of another kind than text.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("Empty prompt: a prompt needs at least one token.")
        return prompt
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        return {"prompt_token_ids": _ids(prompt["input_ids"], prompt.get("attention_mask"))}
    if isinstance(prompt, Mapping):
        for key, what in _REFUSED.items():
            if prompt.get(key) is not None:
                raise NotSupportedError(f"A prompt with {key!r}: {what}. Give text or token ids.")
        if prompt.get("prompt_token_ids") is not None:
            return {**prompt, "prompt_token_ids": _ids(prompt["prompt_token_ids"], None)}
        return dict(prompt)
    if isinstance(prompt, torch.Tensor) or (isinstance(prompt, list | tuple) and _numbers(prompt)):
        return {"prompt_token_ids": _ids(prompt, None)}
    if isinstance(prompt, list | tuple):
        raise ValueError(
            f"One prompt is needed, not {len(prompt)}: open one invoke per prompt "
            "(`with tracer.invoke(prompt):`)."
        )
    raise TypeError(
        f"A {type(prompt).__name__} is no prompt: give a text, token ids, a tokenizer's output or "
        "a prompt dict."
    )


def sampling_of(arguments: Mapping[str, Any]) -> Any:
    """`SamplingParams` of some arguments, checked and normalised by vLLM.

    Raises:
        TypeError: an unknown argument, with the nearest name, or a value of the wrong kind.
        ValueError: a value that vLLM refuses.
    """
    from vllm import SamplingParams

    named = {
        name: value.item() if isinstance(value, numpy.generic) else value
        for name, value in normalise(arguments).items()
    }
    sampling_names().check(named)
    for name in named.get("extra_args") or ():
        if str(name).startswith(OURS):
            raise ValueError(
                f"extra_args[{name!r}]: names that begin with {OURS!r} are where a request's block "
                "goes; take another name."
            )
    with refusals():
        try:
            params = SamplingParams(**named)
        except TypeError as error:
            raise _wrong_kind(named, error) from None
    # The engine's process reads each argument by its type, and ends where it cannot.
    write, read = _codecs()
    for name in named:
        if name in read:
            try:
                read[name](write(getattr(params, name)))
            except (TypeError, ValueError, OverflowError) as error:
                raise _of_wrong_kind(name, named[name], error) from None
    return params


@functools.cache
def _codecs() -> tuple[Callable[[Any], bytes], Mapping[str, Callable[[bytes], Any]]]:
    """What writes a sampling argument for the engine's process, and what reads each there."""
    import msgspec
    from vllm import SamplingParams

    fields = msgspec.structs.fields(SamplingParams)
    read = {f.name: msgspec.msgpack.Decoder(f.type).decode for f in fields if f.name not in _OPEN}
    return msgspec.msgpack.Encoder().encode, read


class Samplings:
    """The `SamplingParams` of one trace's invokes, made once of arguments that are the same."""

    def __init__(self) -> None:
        self._arguments: Mapping[str, Any] = {}
        self._params: Any = None

    def of(self, arguments: Mapping[str, Any]) -> Any:
        """Those of one invoke, which nobody else has.

        Args:
            arguments: as `sampling_of` takes them, besides an adapter's.

        Raises:
            TypeError, ValueError: as `sampling_of` does.
        """
        if self._params is None or not _same(arguments, self._arguments):
            named = {name: arguments[name] for name in arguments if name != "lora_request"}
            self._params, self._arguments = sampling_of(named), arguments
            # vLLM need not copy all of what is in them for each request, either.
            self._params.skip_clone = True
        params = copy.copy(self._params)
        # vLLM notes there by what it is followed, and it is the user's own.
        params.structured_outputs = copy.copy(params.structured_outputs)
        return params


def _same(here: Mapping[str, Any], there: Mapping[str, Any]) -> bool:
    """Whether two mappings hold the very same objects."""
    return here is there or (
        len(here) == len(there)
        and all(name in there and here[name] is there[name] for name in here)
    )


def _wrong_kind(named: dict[str, Any], error: TypeError) -> TypeError:
    """vLLM's complaint about a value, with the argument that has it."""
    from vllm import SamplingParams

    for name, value in named.items():
        try:
            SamplingParams(**{name: value})
        except TypeError:
            return _of_wrong_kind(name, value, error)
        except Exception:
            continue  # of the right kind, and refused for what it is
    return TypeError(f"A sampling argument is of the wrong kind: {error}.")


def _of_wrong_kind(name: str, value: Any, error: Exception) -> TypeError:
    shown = f"{name}={value!r}"[:200]
    return TypeError(f"The sampling argument {shown} is of the wrong kind: {error}.")


def lora_of(value: Any) -> Any:
    """The adapter of a request: a `LoRARequest` of vLLM's, or a dict of what one is made of.

    vLLM knows an adapter by its number, and what is cached under it by its name, so that each dict
    that says something else gets a number and a name that nothing else has.

    Args:
        value: with `name` and `path` (where the engine runs).

    Raises:
        TypeError: it is something else.
    """
    from vllm.lora.request import LoRARequest

    if value is None or isinstance(value, LoRARequest):
        return value
    if isinstance(value, Mapping) and set(value) == {"name", "path"}:
        name, path = value["name"], value["path"]
        if isinstance(name, str) and isinstance(path, str):
            number = _ADAPTERS.setdefault((name, path), _FIRST + len(_ADAPTERS))
            with refusals():
                return LoRARequest(f"{name}#{number}", number, path)
    raise TypeError(
        f"lora_request={value!r}: it is a vllm.lora.request.LoRARequest, or a dict of `name` and "
        "`path`."
    )


_FIRST = 1 << 24
"""Above what people number theirs with, and vLLM's own flags do."""
_ADAPTERS: dict[tuple[str, str], int] = {}


@functools.cache
def sampling_names() -> SamplingNames:
    """The sampling arguments that vLLM knows and a caller may give."""
    from vllm import SamplingParams

    fields = SamplingParams.__struct_fields__
    return SamplingNames(n for n in fields if not n.startswith("_") and n not in _OURS)


def _ids(ids: Any, mask: Any) -> list[int]:
    flat = _row(ids)
    if mask is not None:
        kept = _row(mask)
        if len(kept) != len(flat):
            raise ValueError(f"{len(flat)} token ids came with an attention mask of {len(kept)}.")
        flat = [id for id, keep in zip(flat, kept, strict=True) if keep]
    if not flat:
        raise ValueError("Empty prompt: a prompt needs at least one token.")
    if set(map(type, flat)) == {int}:
        return flat
    try:
        return [index(id) for id in flat]
    except TypeError:
        raise _no_ids(ids) from None


def _no_ids(ids: Any) -> TypeError:
    return TypeError(f"Token ids of a prompt are whole numbers, unlike what is in {ids!r:.80}.")


def _numbers(values: Sequence[Any]) -> bool:
    return all(issubclass(kind, int) for kind in set(map(type, values)))


def _row(values: Any) -> list[Any]:
    """The numbers of one row, in any form."""
    if isinstance(values, list | tuple) and len(values) == 1 and not isinstance(values[0], int):
        values = values[0]
    if isinstance(values, list | tuple):
        if set(map(type, values)) == {int}:
            return [*values]
        nested = next((v for v in values if isinstance(v, list | tuple)), None)
        if nested is not None:
            raise ValueError(
                f"One prompt is needed, not {len(values)} rows: open one invoke per prompt."
            )
        return [*values]
    try:
        rows = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise _no_ids(values) from None
    if rows.dim() > 1 and rows.shape[0] != 1 and rows.numel():
        raise ValueError(
            f"One prompt is needed, not {rows.shape[0]} rows: open one invoke per prompt."
        )
    return rows.reshape(-1).tolist()
