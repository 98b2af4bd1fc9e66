"""Tensor parallel: the ranks of an engine, what they send one another, and how layers are split.

Relies on (vLLM 0.26.0 and 0.27.1):
- `get_tp_group()` has `ranks`, `rank_in_group`, `world_size`, and two process groups:
  `device_group` for tensors, `cpu_group` for everything else. Its `all_reduce` and `all_gather`
  make tensors whole, also where `tensor_model_parallel_all_reduce` is called.
- `MessageQueue.create_from_process_group(group, bytes, chunks)` makes a queue from the first rank
  to all others; `enqueue(object)` and `dequeue(indefinite=True)`.
- a linear layer (`model_executor/layers/linear.py`) has `tp_size`, `output_partition_sizes`
  (columns of each fused part on a rank), and its class's own: `gather_output`, `input_is_parallel`,
  `reduce_results`, `num_kv_head_replicas`. What a LoRA wraps is its `base_layer`.
- `VocabParallelEmbedding` holds rows of the vocabulary, and its output is whole.
  `LogitsProcessor` takes whole hidden states, with that layer.
- A feed-forward part ends with `down_proj`. `Attention` gives each rank's heads: `num_heads` of
  width `head_size_v`, or `v_head_dim` where they are latent; activations
  `...AndMul` of `layers/activation.py` make one column of two. Experts give back what has been
  reduced, unless `skip_final_all_reduce`, whether each rank has a part of every expert or some
  experts whole: without data parallelism all ranks have all tokens. `RoutedExperts` holds them.
- The CPU's kernels for experts take no heed of which of them a rank has.
- `load_format="dummy"` draws parameters and persistent buffers from one seed on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nnsight_core.errors import EngineError
from nnsight_core.locations import Location
from nnsight_vllm_worker.group import Group
from nnsight_vllm_worker.layouts import SUM, Layout, Piece, Shared, Split, Unknown, split
from nnsight_vllm_worker.shards import close, some
from nnsight_vllm_worker.vllm_ports.checks import check_attributes, check_methods

_GROUP = ("ranks", "rank_in_group", "world_size", "device_group", "cpu_group")
_CHUNKS = (1 << 20, 16)
_LOGITS = "LogitsProcessor"
_OF_ALL = frozenset(
    ("head_dim", "head_size", "hidden_size", "embed_dim", "input_size", "output_size", "layer_idx")
    + ("total_num_heads", "total_num_kv_heads", "vocab_size", "org_vocab_size", "top_k")
)
"""Numbers of modules that do not depend on how many ranks there are."""


def ranks_of(config: Any) -> int:
    """Over how many ranks the layers of an engine are split."""
    return config.parallel_config.tensor_parallel_size


def check(config: Any) -> None:
    """Refuse what a configuration asks for that blocks cannot have on several ranks.

    Raises:
        EngineError: tokens are dealt out over the ranks, each rank has a holder of its own, or
            vLLM cannot deal out experts here.
    """
    from vllm.platforms import current_platform

    passes = config.compilation_config.pass_config
    for name in ("enable_sp", "fuse_gemm_comms"):
        if getattr(passes, name, False):
            raise EngineError(
                f"pass_config.{name}=True cannot be had yet: tokens that are dealt out over ranks "
                "are not yet put together for a block."
            )
    backend = config.parallel_config.distributed_executor_backend
    if backend == "external_launcher":
        raise EngineError(
            f"distributed_executor_backend={backend!r} cannot be had: each rank would have a "
            "holder of its own, of which the first one alone would hear of blocks."
        )
    experts = config.parallel_config.enable_expert_parallel and config.model_config.is_moe
    if experts and current_platform.is_cpu():
        raise EngineError(
            "enable_expert_parallel=True cannot be had on the CPU: vLLM's kernels there look for "
            "every expert on every rank, and die of it. Leave it out, and each rank has a part of "
            "every expert."
        )


class Ranks(Group):
    """The tensor-parallel ranks of one engine."""

    def __init__(self) -> None:
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        check_attributes(group, _GROUP)
        check_methods(group, {"all_reduce": ("input_",), "all_gather": ("input_", "dim")})
        check_methods(MessageQueue, {"create_from_process_group": ("pg", "max_chunk_bytes")})
        check_methods(MessageQueue, {"enqueue": ("obj",), "dequeue": ("timeout", "indefinite")})
        super().__init__(group.ranks, group.rank_in_group, group.device_group, group.cpu_group)
        self._group = group
        self._queue = MessageQueue.create_from_process_group(group.cpu_group, *_CHUNKS)

    def send(self, message: Any) -> None:
        """From the first rank: hand all others a message."""
        self._queue.enqueue(message)

    def receive(self) -> Any:
        """On every other rank: the next message."""
        return self._queue.dequeue(indefinite=True)

    @contextmanager
    def watched(self, whole: Callable[[Tensor], None]) -> Iterator[None]:
        """While it lasts, `whole` is called with what collectives of the model make whole."""
        group = self._group

        def watch(name: str) -> None:
            plain = getattr(group, name)

            def collective(*args: Any, **kwargs: Any) -> Any:
                made = plain(*args, **kwargs)
                whole(made)
                return made

            setattr(group, name, collective)

        for name in ("all_reduce", "all_gather"):
            watch(name)
        try:
            yield
        finally:
            del group.all_reduce, group.all_gather

    def close(self) -> None:
        """Send no more messages."""
        self._queue.shutdown()
        # Its memory is given back when nothing holds it, which vLLM gives a worker no time for.
        self._queue.buffer = None


class Layers:
    """What the layers of a model say about how they are split.

    Attributes:
        meeting: the modules in which ranks meet, besides those that are known to.
        recorded: how the ranks hold the tensors of each location, by its name, as it was recorded.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        from vllm.model_executor.layers import activation, linear, vocab_parallel_embedding
        from vllm.model_executor.layers.attention import Attention, MLAAttention
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
        from vllm.model_executor.layers.fused_moe.runner.moe_runner_interface import (
            MoERunnerInterface,
        )

        self._linear = linear
        self._embedding = vocab_parallel_embedding
        self._activations = activation.__name__
        self._attention = (Attention, MLAAttention)
        self._experts = MoERunnerInterface
        self._modules = modules
        self._whole_tensors: set[str] = set()
        self.meeting: set[str] = set()
        self.recorded: dict[str, tuple[Layout, ...]] = {}
        self._foreign = {
            f"{path}.{name}".removesuffix(".")
            for path, module in modules.items()
            if ".layers.mamba." in type(module).__module__
            for name, _ in module.named_modules()
        }
        self._dealt = {
            id(part)
            for module in modules.values()
            if isinstance(module, RoutedExperts)
            for part in module.modules()
        }
        self._together = {
            above
            for path, module in modules.items()
            if self._joint(_bare(module))
            for above in _and_above(path)
        }

    def told(
        self, path: str, side: str, tensors: list[Tensor], entry: list[Layout]
    ) -> dict[int, Layout]:
        """What a layer says of the tensors of its input or output. See `shards.Layers`."""
        module = self._modules.get(path)
        if module is None or not tensors:
            return {}
        layer: Any = _bare(module)
        linear = self._linear
        if isinstance(layer, linear.LinearBase):
            if layer.tp_size == 1:
                return {}
            if path in self._foreign:
                return {0: Unknown("a state-space layer splits it in a way of its own")}
            return self._of_linear(layer, side)
        if isinstance(layer, self._embedding.VocabParallelEmbedding) and side == "output":
            return {0: None}
        if type(layer).__name__ == _LOGITS and side == "input":
            return {0: None}
        if side == "output" and self._ends_unreduced(layer):
            return {0: SUM}
        if isinstance(layer, self._attention) and side == "output":
            return {0: _of_heads(layer, tensors[0])}
        if isinstance(layer, self._experts) and side == "output":
            return {0: SUM if _unreduced(layer) else None}
        if type(layer).__module__ == self._activations and side == "output" and entry:
            return _halved(tensors[0], entry[0])
        return {}

    def held(self, path: str, side: str) -> tuple[Layout, ...] | None:
        """How the ranks hold what a module takes or gives; None if nobody knows.

        A linear layer knows it of its first tensor, also where nothing has called it.
        """
        layer = _bare(self._modules[path])
        recorded = self.recorded.get(str(Location(path, side)))
        plain = isinstance(layer, self._linear.LinearBase) and path not in self._foreign
        if not plain or layer.tp_size == 1:
            return recorded
        first, *rest = recorded or (None,)
        return (self._of_linear(layer, side).get(0, first), *rest)

    def _ends_unreduced(self, layer: Any) -> bool:
        """Whether a feed-forward part leaves it to what is around it to add up its summands.

        Shared experts do; what some of them multiply their output by is whole.
        """
        down = getattr(layer, "down_proj", None)
        return isinstance(_bare(down), self._linear.RowParallelLinear) and not (
            _bare(down).reduce_results or _bare(down).tp_size == 1
        )

    def compare(self, agree: Callable[[Any], list[Any]], dummy: bool) -> None:
        """Find out which tensors each rank holds whole; called on all ranks, once.

        Args:
            dummy: whether what would be loaded is alike on all ranks, so that this says nothing.
        """
        mine = {
            f"{path}.{name}": (tuple(tensor.shape), some(tensor))
            for path, module in self._modules.items()
            if not self.splits(path)
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items()
            if tensor is not None and not hasattr(tensor, "weight_loader")
            # Where ranks work together, one may have loaded its part of it.
            if not (dummy and self.together(path)) or name in module._non_persistent_buffers_set
        }
        every = agree(mine)
        self._whole_tensors = {
            name
            for name, (shape, entries) in mine.items()
            if all(
                name in other
                and other[name][0] == shape
                and close(torch.tensor(entries), torch.tensor(other[name][1]))
                for other in every
            )
        }

    def parameter(self, path: str, name: str, tensor: Tensor) -> tuple[Shared | None, int]:
        """The layout of a layer's own tensor, and the axis along which it lies.

        Raises:
            EngineError: it is not known.
        """
        layer = _bare(self._modules[path])
        embedding = self._embedding.UnquantizedEmbeddingMethod
        if f"{path}.{name}" in self._whole_tensors:
            return None, 0
        if isinstance(layer, self._embedding.VocabParallelEmbedding):
            if name == "weight" and isinstance(layer.quant_method, embedding):
                return split(tensor.shape[0]), 0
        elif isinstance(layer, self._linear.LinearBase) and path not in self._foreign:
            plain = isinstance(layer.quant_method, self._linear.UnquantizedLinearMethod)
            if plain and name in ("weight", "bias"):
                return self._of_weight(layer, name)
        raise EngineError("nothing says how the ranks share it")

    def _of_weight(self, layer: Any, name: str) -> tuple[Shared | None, int]:
        if layer.tp_size == 1:
            return None, 0
        if isinstance(layer, self._linear.RowParallelLinear):
            if name == "bias":
                return None, 0
            return split(layer.input_size_per_partition), 1
        layout = self._output(layer)
        if isinstance(layout, Split):
            return layout, 0
        raise EngineError("its layer is split over the ranks in a way that is not known")

    def check(self, path: str, name: str, value: Any) -> None:
        """Refuse what of a module that ranks share is only one rank's.

        Raises:
            EngineError: it is no plain value, or a number that may count a rank's part.
        """
        from transformers import PretrainedConfig

        plain = bool | float | str | type(None) | torch.dtype | PretrainedConfig
        if self.local(path) or isinstance(value, plain):
            return
        if isinstance(value, int) and name in _OF_ALL:
            return
        if isinstance(value, int):
            raise EngineError(
                "the module is split over the ranks, and this number may be one rank's alone. "
                "Take it from the shapes of values, which are whole"
            )
        raise EngineError(
            "the module is split over the ranks, and this would run on one of them, or show what "
            "one holds. Call the module itself, or ask for its values"
        )

    def splits(self, path: str) -> bool:
        """Whether a layer is split over the ranks itself, so that its operations are as well."""
        module = self._modules.get(path)
        return module is not None and self._joint(_bare(module))

    def unfilled(self, path: str) -> bool:
        """Whether a layer leaves its output as it found that memory, where it runs for nobody."""
        return isinstance(self._modules.get(path), self._attention)

    def local(self, path: str) -> bool:
        """Whether a module computes on one rank alone what all of them would."""
        if any(met == path or met.startswith(f"{path}.") for met in self.meeting) or not path:
            return False
        return not self.together(path)

    def together(self, path: str) -> bool:
        """Whether ranks work together at a module, or at anything in it."""
        return path in self._together

    def _joint(self, layer: nn.Module) -> bool:
        linear = isinstance(layer, self._linear.LinearBase) and layer.tp_size > 1
        kinds = (self._embedding.VocabParallelEmbedding, *self._attention, self._experts)
        name = type(layer).__name__
        known = isinstance(layer, kinds) or name == _LOGITS
        return linear or known or id(layer) in self._dealt

    def _of_linear(self, layer: Any, side: str) -> dict[int, Layout]:
        if side == "output":
            return {0: None if self._whole(layer) else self._output(layer)}
        if isinstance(layer, self._linear.RowParallelLinear) and layer.input_is_parallel:
            return {0: split(layer.input_size_per_partition)}
        return {}

    def _whole(self, layer: Any) -> bool:
        linear = self._linear
        if isinstance(layer, linear.RowParallelLinear):
            return layer.reduce_results
        return isinstance(layer, linear.ReplicatedLinear) or layer.gather_output

    def _output(self, layer: Any) -> Layout:
        linear = self._linear
        sizes = layer.output_partition_sizes
        if isinstance(layer, linear.RowParallelLinear):
            return SUM
        if type(layer) is linear.QKVParallelLinear:
            copies = (1, layer.num_kv_head_replicas, layer.num_kv_head_replicas)
            return Split(tuple(map(Piece, sizes, copies)))
        if type(layer) in (linear.ColumnParallelLinear, linear.MergedColumnParallelLinear):
            return split(*sizes)
        return Unknown(f"{type(layer).__name__} splits its output in a way that is not known")


def _unreduced(experts: Any) -> bool:
    return experts.moe_config.skip_final_all_reduce


def _of_heads(attention: Any, tensor: Tensor) -> Layout:
    latent = hasattr(attention, "v_head_dim")
    width = attention.v_head_dim if latent else attention.head_size_v
    if tensor[0].numel() != attention.num_heads * width:
        return Unknown("it is not as wide as the heads of a rank")
    return split(attention.num_heads * width)


def _and_above(path: str) -> Iterator[str]:
    """A path, and those of all modules around it."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _bare(module: Any) -> Any:
    return getattr(module, "base_layer", module)


def _halved(tensor: Tensor, entry: Layout) -> dict[int, Layout]:
    """What an activation makes of two fused parts, of which it multiplies one by the other."""
    if not isinstance(entry, Split) or len(entry.pieces) != 2:
        return {}
    first, second = entry.pieces
    if first != second or tensor[0].numel() != first.width:
        return {}
    return {0: Split((first,))}
