"""Blocks as the worker knows them: each text that came, with what it needs, read once.

Requests that run the same block carry the same bytes. What can be told from those alone (the
compiled code, what it touches, whether taps can do its writes) is kept with them; what a block may
change is made anew for each request.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from nnsight_core.effects import Effects, effects_of
from nnsight_core.keeps import Keeper
from nnsight_core.lowering import Lowered, NotLowered
from nnsight_core.node import Root
from nnsight_core.policy import TRUSTED, Policy
from nnsight_core.run import Run
from nnsight_core.tree import ModelTree
from nnsight_core.wants import Wants, lower_at_taps, wants_of
from nnsight_core.watchdog import WATCHDOG
from nnsight_core.wire.blocks import code_of, decode_names, run_with
from nnsight_core.wire.code import CodeDecoder
from nnsight_core.wire.frames import Buffer, read_frame
from nnsight_core.wire.messages import BlockMessage, expect
from nnsight_vllm_worker.blobs import Store

_MOST = 256
"""How many blocks, and of each how many lowered forms, are remembered."""


class Known:
    """One block.

    Args:
        data: the frame that requests carry it in.

    Attributes:
        block: the block as it came.
        code: its compiled code.

    Raises:
        ProtocolError: the bytes are no block of this version.
        PolicyError: the block is not allowed.
    """

    def __init__(self, data: Buffer, blocks: Blocks) -> None:
        frame = read_frame(data)
        self.block = expect(frame, BlockMessage).block
        blocks.policy.check(self.block)
        self.code = code_of(self.block, blocks.policy)
        self._buffers = frame.buffers
        self._blocks = blocks
        # Whether its bytes say all of it: nothing is imported or unpickled for it.
        self._said = all(map(_by_content, self.block.names.values()))
        self._fixed = all(_is_fixed(form) for form in self.block.names.values())
        self._names: dict[str, Any] | None = None
        self._reach: tuple[Effects, Wants] | None = None
        self._lowered: OrderedDict[int | None, Lowered | NotLowered] = OrderedDict()
        self._rests: OrderedDict[int, tuple[Lowered, Wants]] = OrderedDict()

    def run(self, key: Any, blobs: list[str], keeper: Keeper) -> Run:
        """A run of the block for one request.

        Args:
            blobs: gets the contents of the outside tensors that the run holds.
            keeper: has the kept values that it uses, and gets those that it keeps.
        """
        names = self._names
        if names is None:
            names = WATCHDOG.call(self._blocks.limit, self._decoded, blobs, keeper)
            if self._fixed:
                self._names = names
        run = run_with(self.block, self.code, names, key, self._blocks.extra)
        run.limit, run.keeper = self._blocks.limit, keeper
        self._blocks.separate(run)
        return run

    def _decoded(self, blobs: list[str], keeper: Keeper) -> dict[str, Any]:
        store = self._blocks.store

        def blob(digest: str, dtype: str, shape: list[int]) -> torch.Tensor:
            blobs.append(digest)
            return store.get(digest, dtype, shape, copy=self.code.snapshots)

        with torch.inference_mode(False):
            decoder = CodeDecoder(
                self._buffers,
                self._blocks.root,
                blob=blob,
                place=lambda tensor: tensor.to(store.device),
                kept=lambda id, name: keeper.get(id, self.code.snapshots, name),
                pickle=self._blocks.pickle,
                extra=self._blocks.extra,
                policy=self._blocks.policy,
            )
            return decode_names(self.block, decoder)

    def reach(self, run: Run) -> tuple[Effects, Wants]:
        """What a run of it touches, and what it wants of its steps."""
        if self._reach is not None:
            return self._reach
        tree = self._blocks.tree
        effects = effects_of(self.code, run.scope, tree)
        found = effects, wants_of(effects, tree)
        if self._said:
            self._reach = found
        return found

    def lowered(self, run: Run, prompt: int | None) -> Lowered | NotLowered:
        """Its writes as the taps can do them, for a prompt of so many tokens, or for any."""
        found = self._lowered.get(prompt) if self._said else None
        if found is None:
            blocks = self._blocks
            asked = (self.code, run.scope, blocks.tree, prompt, blocks.store.device)
            found = WATCHDOG.call(blocks.limit, lower_at_taps, *asked)
            if self._said:
                self._lowered[prompt] = found
            while len(self._lowered) > _MOST:
                self._lowered.popitem(last=False)
        return found

    def wants_of_rest(self, lowered: Lowered, run: Run) -> Wants:
        """What is wanted by what is left of it when the taps do its writes."""
        known = self._rests.get(id(lowered))
        if known is None:
            tree = self._blocks.tree
            known = lowered, wants_of(effects_of(lowered.rest, run.scope, tree), tree)
            if self._said:
                self._rests[id(lowered)] = known
            while len(self._rests) > _MOST:
                self._rests.popitem(last=False)
        return known[1]

    def rest(self, lowered: Lowered, run: Run) -> Run:
        """The run of what is left of it, which takes the place of the whole one's."""
        rest = Run(lowered.rest, run.scope, run.key)
        rest.saves.shared, rest.limit, rest.reader = run.saves.shared, run.limit, True
        rest.keeper = run.keeper
        self._blocks.separate(rest)
        return rest


class Blocks:
    """The blocks of one worker.

    Args:
        extra: names that every block sees besides its own.
        pickle: whether they may hold pickled values.
        policy: what they may do.

    Attributes:
        limit: how many seconds a block may run before it gives control back.
        apart: whether blocks draw random numbers of their own, since the engine's have to be the
            same on several ranks.
    """

    def __init__(
        self,
        root: Root,
        tree: ModelTree,
        store: Store,
        pickle: bool,
        extra: dict[str, Callable[..., Any]],
        limit: float | None = None,
        policy: Policy = TRUSTED,
    ) -> None:
        self.policy = policy
        self.root = root
        self.tree = tree
        self.store = store
        self.pickle = pickle
        self.extra = policy.scope(extra)
        self.limit = limit
        self.apart = False
        self._seeds = itertools.count(1)
        self._known: OrderedDict[bytes, Known] = OrderedDict()

    def separate(self, run: Run) -> None:
        """Give a run random numbers of its own, if blocks have such."""
        if self.apart:
            run.draw_apart(next(self._seeds))

    def of(self, data: bytes) -> Known:
        """The block that some bytes are.

        Raises:
            ProtocolError: they are none of this version.
        """
        known = self._known.get(data)
        if known is None:
            known = self._known[data] = Known(data, self)
            while len(self._known) > _MOST:
                self._known.popitem(last=False)
        self._known.move_to_end(data)
        return known


_CONSTANT = ("math", "numpy", "torch", "torch.nn.functional")
_FIXED = frozenset(
    ("bytes", "complex", "device", "dtype", "ellipsis", "float", "frozenset", "int", "node")
    + ("operation", "plain", "range", "ref", "scalar", "size", "slice", "source", "text")
    + ("tracer", "tuple")
)
"""Types of values that no block can change."""
_BY_CONTENT = _FIXED | {"array", "bytearray", "dict", "list", "set", "tensor"}


def _is_fixed(form: Any) -> bool:
    """Whether a typed value can be shared by requests."""
    return _of_types(form, _FIXED)


def _by_content(form: Any) -> bool:
    """Whether a typed value says all of what it is: nothing is imported or unpickled for it."""
    return _of_types(form, _BY_CONTENT)


def _of_types(form: Any, types: frozenset[str]) -> bool:
    if isinstance(form, list):
        return all(_of_types(part, types) for part in form)
    if not isinstance(form, dict):
        return True
    if form.get("$") == "pymodule":
        return form["name"] in _CONSTANT
    inner = (form.get("k"), form.get("v"))
    return form.get("$") in types and all(_of_types(part, types) for part in inner)
