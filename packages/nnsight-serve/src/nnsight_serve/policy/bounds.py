"""How large the values may be that restricted blocks make.

What a call would make is told from its arguments before it runs. That bounds each single value, not
all of a block's together, and not how long a call takes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

import numpy
from torch import Tensor, nn

from nnsight_core.errors import PolicyError
from nnsight_serve.policy.text import refused

MAX_ELEMENTS = 1 << 30
"""How many elements one tensor may have."""
MAX_ITEMS = 10_000_000
"""How many items a list, tuple or range may have, and how many characters a text."""
MAX_PARTS = 1 << 18
"""Into how many tensors one may be taken apart."""
MAX_BITS = 1 << 16
"""How many bits a whole number may have."""
MAX_MODULAR = 1 << 12
"""How many bits each number of a `pow(base, exponent, modulus)` may have."""
MAX_CUBIC = 1 << 36
"""How many steps a decomposition may take: the size of a matrix times its smaller side."""
MAX_TOKENIZED = 1 << 17
"""How many characters, or ids, a tokenizer takes."""
_SEQUENCES = (str, bytes, bytearray, list, tuple)
_ARRAYS = (Tensor, numpy.ndarray)


def too_large(what: str, size: int, most: int) -> PolicyError:
    """The error for a value beyond a bound."""
    shown = size if size < 10**30 else "far more"
    return refused(f"{what} of {shown}, where {most} is the most,", "Make less at a time.")


def elements(count: int) -> None:
    """Refuse a tensor of so many elements, if that is too many."""
    if count > MAX_ELEMENTS:
        raise too_large("a tensor", count, MAX_ELEMENTS)


def items(count: int) -> None:
    """Refuse a sequence of so many items, if that is too many."""
    if count > MAX_ITEMS:
        raise too_large("a sequence or text", count, MAX_ITEMS)


def parts(count: int) -> None:
    """Refuse to take a tensor apart into so many, if that is too many."""
    if count > MAX_PARTS:
        raise too_large("the parts of a tensor", count, MAX_PARTS)


def nested(value: Any) -> None:
    """Refuse lists in lists that would make too large an array: one may stand in many places."""
    count = 1
    while isinstance(value, list | tuple) and value:
        count *= len(value)
        elements(count)
        value = value[0]


def bits(count: int, most: int = MAX_BITS) -> None:
    """Refuse a whole number of so many bits, if that is too many."""
    if count > most:
        raise too_large("the bits of a whole number", count, most)


# -- operators ------------------------------------------------------------------------------------

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "@": operator.matmul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
    "<<": operator.lshift,
    ">>": operator.rshift,
    "|": operator.or_,
    "^": operator.xor,
    "&": operator.and_,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda left, right: left in right,
    "not in": lambda left, right: left not in right,
}
IN_PLACE: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.iadd,
    "-": operator.isub,
    "*": operator.imul,
    "@": operator.imatmul,
    "/": operator.itruediv,
    "//": operator.ifloordiv,
    "%": operator.imod,
    "**": operator.ipow,
    "<<": operator.ilshift,
    ">>": operator.irshift,
    "|": operator.ior,
    "^": operator.ixor,
    "&": operator.iand,
}


def whole(value: Any) -> int | None:
    """A whole number as Python takes it for a size, whatever holds it; None if it is none."""
    if isinstance(value, Tensor):
        return None if value.is_floating_point() or value.numel() != 1 else int(value)
    return int(value) if isinstance(value, int | numpy.integer) else None


def operands(symbol: str, left: Any, right: Any) -> None:
    """Refuse an operation that would make something too large."""
    if isinstance(left, _ARRAYS) and isinstance(right, _ARRAYS):
        multiplied(left, right) if symbol == "@" else broadcast([left, right])
        return
    if isinstance(left, int) and isinstance(right, int):
        if symbol == "*":
            bits(left.bit_length() + right.bit_length())
        elif symbol == "**":
            bits(left.bit_length() * max(right, 0))
        elif symbol == "<<":
            bits(left.bit_length() + max(right, 0))
    elif symbol == "*":
        if isinstance(left, _SEQUENCES):
            items(len(left) * (whole(right) or 0))
        elif isinstance(right, _SEQUENCES):
            items(len(right) * (whole(left) or 0))
    elif symbol == "+" and isinstance(left, _SEQUENCES) and isinstance(right, _SEQUENCES):
        items(len(left) + len(right))


# -- tensors --------------------------------------------------------------------------------------


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """The tensors among values and in the lists and tuples that these are."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (part for part in value if isinstance(part, Tensor))


def broadcast(given: list[Any]) -> None:
    """Refuse what would be as large as all of these along each of their axes."""
    axes = max((len(tensor.shape) for tensor in given), default=0)
    shape = [1] * axes
    for tensor in given:
        for place, size in enumerate(tensor.shape, axes - len(tensor.shape)):
            shape[place] = max(shape[place], size)
    elements(math.prod(shape))


def multiplied(left: Any, right: Any) -> None:
    """Refuse a matrix product that would be too large."""
    pairs = zip_longest(left.shape[-3::-1], right.shape[-3::-1], fillvalue=1)
    rows = left.shape[-2] if len(left.shape) > 1 else 1
    columns = right.shape[-1] if len(right.shape) > 1 else 1
    elements(math.prod(max(pair) for pair in pairs) * rows * columns)


def _numbers(*values: Any) -> list[int]:
    found: list[int] = []
    for value in values:
        if isinstance(value, list | tuple):
            found += _numbers(*value)
        elif not isinstance(value, bool):
            number = whole(value)
            if number is not None:
                found.append(abs(number))
    return found


_AXIS = ("dim", "axis")
_FIRST = ("input", "tensor", "self", "A", "x", "a", "x1")
"""How functions of PyTorch name their first tensor, and as NumPy does."""


def _role(args: tuple[Any, ...], named: dict[str, Any], place: int, *names: str) -> Any:
    """The argument at a place, or under one of its names."""
    if len(args) > place:
        return args[place]
    return next((named[name] for name in names if name in named), None)


def _along(tensor: Tensor, axis: Any) -> int:
    """How long a tensor is along an axis, the first if none is given."""
    place = whole(axis) or 0
    return tensor.shape[place] if -tensor.dim() <= place < tensor.dim() else 1


def _any(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    given = list(tensors_in(*args, *named.values()))
    if len(given) > 1:
        broadcast(given)


def _sized(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    sizes = [value for name, value in named.items() if name not in ("dtype", "device")]
    elements(math.prod(n for n in _numbers(*args, *sizes) if n))


def _filled(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """`full(size, value)`."""
    elements(math.prod(_numbers(args[:1], named.get("size"))))


def _new_filled(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    _filled(args[1:], named)


def _new_sized(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    _sized(args[1:], named)


def _counted(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """`arange(start, end, step)`, or `arange(end)`."""
    given = [float(part) for part in args[:3]]
    first = float(named.get("start", given[0] if len(given) > 1 else 0))
    last = float(named.get("end", given[1] if len(given) > 1 else given[0] if given else 0))
    step = float(named.get("step", given[2] if len(given) > 2 else 1))
    if len(given) == 1 and "end" in named:
        first = given[0]
    count = abs(last - first) / (abs(step) or 1)
    elements(int(count) if math.isfinite(count) else MAX_ELEMENTS + 1)


def _spaced(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    elements(max(_numbers(*args[2:3], named.get("steps")), default=0))


def _repeated(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """`repeat`, `tile`: so many times what there is."""
    times = math.prod(n for n in _numbers(*args[1:], *named.values()) if n)
    elements(sum(t.numel() for t in tensors_in(*args[:1])) * times)


def _interleaved(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    if "output_size" in named:
        raise refused("`repeat_interleave(output_size=...)` is not allowed", "Leave it out.")
    repeats = _role(args, named, 1, "repeats")
    given = args[0] if args and isinstance(args[0], Tensor) else None
    if repeats is None:  # what is given says how often each of its places is to come
        given, repeats = None, given
    if isinstance(repeats, Tensor):
        most = int(repeats.sum()) if repeats.numel() else 0
        elements(most * (given.numel() if given is not None else 1))
    elif given is not None:
        elements(given.numel() * abs(whole(repeats) or 0))


def _expanded(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    given = args[0] if args and isinstance(args[0], Tensor) else None
    wanted = [*args[1:], *named.values()]
    if any(isinstance(part, Tensor) and part.dim() for part in wanted):
        broadcast(list(tensors_in(*args, *named.values())))
        return
    shape = [n for part in wanted for n in (part if isinstance(part, list | tuple) else [part])]
    kept = list(given.shape) if given is not None else []
    kept = [1] * (len(shape) - len(kept)) + kept
    counted = [(whole(n), k) for n, k in zip(shape, kept, strict=False)]
    elements(math.prod(k if n is None or n == -1 else n for n, k in counted))


def _joined(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    elements(sum(tensor.numel() for tensor in tensors_in(*args, *named.values())))


def _crossed(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    elements(math.prod(tensor.numel() for tensor in tensors_in(*args, *named.values())))


def _matrix(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    left, right = _role(args, named, 0), _role(args, named, 1, "other", "mat2", "vec", "x2")
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        multiplied(left, right)
    else:
        _crossed(args, named)


def _linear(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    given, weight = _role(args, named, 0), _role(args, named, 1, "weight")
    if isinstance(given, Tensor) and isinstance(weight, Tensor) and weight.dim():
        elements(math.prod(given.shape[:-1]) * weight.shape[0])
    else:
        _crossed(args, named)


def _inner(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    given = list(tensors_in(*args, *named.values()))
    elements(math.prod(n for tensor in given for n in tensor.shape[:-1]))


def _diagonal(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    for tensor in tensors_in(*args, *named.values()):
        if tensor.dim() == 1:
            elements((tensor.numel() + sum(_numbers(*args[1:], *named.values()))) ** 2)


def _square(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """`eye(n, m)`."""
    sizes = _numbers(*args[:2], named.get("n"), named.get("m"))
    elements(math.prod(sizes) if len(sizes) > 1 else math.prod(sizes) ** 2)


def _picked(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """`index_select(x, dim, index)`."""
    given, picked = _role(args, named, 0), _role(args, named, 2, "index")
    if isinstance(given, Tensor) and isinstance(picked, Tensor):
        size = _along(given, _role(args, named, 1, *_AXIS))
        elements(given.numel() // max(1, size) * picked.numel())
    else:
        _crossed(args, named)


def _embedded(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """`embedding(indices, weights)`."""
    given, weight = _role(args, named, 0), _role(args, named, 1, "weight")
    if isinstance(given, Tensor) and isinstance(weight, Tensor) and weight.dim():
        elements(given.numel() * weight.shape[-1])
    else:
        _crossed(args, named)


def _cubic(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """What takes time as the third power of a matrix's size, where no time limit reaches it."""
    for tensor in tensors_in(*args, *named.values()):
        if tensor.dim() > 1 and tensor.numel() * min(tensor.shape[-2:]) > MAX_CUBIC:
            raise refused(f"a decomposition of {list(tensor.shape)} is not allowed", "Take less.")
    _any(args, named)


def _full(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """What makes square matrices of the longer side of each."""
    for tensor in tensors_in(*args, *named.values()):
        if tensor.dim() > 1:
            elements(math.prod(tensor.shape[:-2]) * max(tensor.shape[-2:]) ** 2)
    _cubic(args, named)


def _svd(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """`torch.svd(x, some=True)`."""
    some = _role(args, named, 1, "some")
    (_cubic if some is None or some else _full)(args, named)


def _linalg_svd(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """`torch.linalg.svd(x, full_matrices=True)`."""
    full = _role(args, named, 1, "full_matrices")
    (_full if full is None or full else _cubic)(args, named)


def _qr(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    mode = _role(args, named, 1, "mode")
    (_full if mode == "complete" else _cubic)(args, named)


def _norm(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """`torch.norm(x, p)`, which decomposes a matrix for its nuclear norm."""
    (_cubic if _role(args, named, 1, "p") == "nuc" else _any)(args, named)


def _linalg_norm(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """`torch.linalg.norm(x, ord, dim)`, of rows or columns if `dim` is one number."""
    order, axis = _role(args, named, 1, "ord"), _role(args, named, 2, *_AXIS)
    (_any if order is None or whole(axis) is not None else _cubic)(args, named)


def _transformed(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """`fft(x, n, dim)`, `fftn(x, s, dim)`: as long along its axes as is asked for."""
    for tensor in tensors_in(*args[:1]):
        sizes = _flat(_role(args, named, 1, "n", "s"))
        axes = _flat(_role(args, named, 2, *_AXIS)) or list(range(-len(sizes), 0))
        shape = list(tensor.shape)
        for axis, size in zip(axes, sizes, strict=False):
            if -len(shape) <= axis < len(shape) and size >= 0:
                shape[axis] = max(size, shape[axis])
        elements(2 * math.prod(shape))


def _flat(value: Any) -> list[int]:
    parts = value if isinstance(value, list | tuple) else [value]
    return [number for number in map(whole, parts) if number is not None]


def _drawn(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """`multinomial(weights, count)`."""
    rows = [t.shape[0] if t.dim() > 1 else 1 for t in tensors_in(*args[:1])]
    elements(math.prod(rows) * math.prod(_numbers(*args[1:2], named.get("num_samples"))))


def _apart(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """`unbind(x, dim)`: so many tensors."""
    for tensor in tensors_in(*args[:1]):
        parts(_along(tensor, _role(args, named, 1, *_AXIS)))


def _split(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """`split(x, size or sizes, dim)`."""
    size = _role(args, named, 1, "split_size", "split_size_or_sections")
    if isinstance(size, list | tuple):
        parts(len(size))
        return
    for tensor in tensors_in(*args[:1]):
        parts(_along(tensor, _role(args, named, 2, *_AXIS)) // max(1, whole(size) or 0))


def _chunks(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """`chunk(x, count)`, `tensor_split(x, count or indices)`."""
    count = _role(args, named, 1, "chunks", "sections", "indices", "indices_or_sections")
    if isinstance(count, list | tuple):
        parts(len(count))
    elif isinstance(count, Tensor) and count.dim():
        parts(count.numel())
    else:
        parts(abs(whole(count) or 0))


def _written(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """`tensor(lists in lists)`."""
    nested(_role(args, named, 0, "data", "obj"))


def _new_written(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    _written(args[1:], named)


def _listed(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    for tensor in tensors_in(*args[:1]):
        items(tensor.numel())


def _einsum(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    if not args or not isinstance(args[0], str):
        raise refused("`einsum` without its equation in a text is not allowed")
    into, arrow, out = args[0].replace(" ", "").partition("->")
    given = list(tensors_in(*args[1:]))
    terms = into.split(",")
    if "." in into or not arrow or len(terms) != len(given):
        _crossed(args, named)
        return
    sizes = {
        c: n
        for term, t in zip(terms, given, strict=True)
        for c, n in zip(term, t.shape, strict=False)
    }
    elements(math.prod(sizes.get(letter, 1) for letter in out))


_CHECKS: dict[str, Callable[[tuple[Any, ...], dict[str, Any]], None]] = {
    **dict.fromkeys(("zeros", "ones", "rand", "randn", "randperm"), _sized),
    **dict.fromkeys(("new_zeros", "new_ones"), _new_sized),
    "randint": lambda args, named: elements(
        math.prod(_numbers(*(a for a in args if isinstance(a, list | tuple)), named.get("size")))
    ),
    "full": _filled,
    "new_full": _new_filled,
    "eye": _square,
    "arange": _counted,
    **dict.fromkeys(("linspace", "logspace"), _spaced),
    **dict.fromkeys(("repeat", "tile"), _repeated),
    "repeat_interleave": _interleaved,
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expanded),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack", "hstack", "vstack"), _joined),
    **dict.fromkeys(("dstack", "column_stack", "row_stack"), _joined),
    **dict.fromkeys(("outer", "ger"), _crossed),
    **dict.fromkeys(("matmul", "mm", "bmm", "mv"), _matrix),
    **dict.fromkeys(("linear",), _linear),
    "inner": _inner,
    "diag": _diagonal,
    "index_select": _picked,
    "embedding": _embedded,
    **dict.fromkeys(("svdvals", "eigh", "eigvalsh", "eig", "eigvals", "inv", "pinv"), _cubic),
    **dict.fromkeys(("inverse", "pinverse", "det", "slogdet", "logdet"), _cubic),
    **dict.fromkeys(("cholesky", "lstsq", "solve", "matrix_rank", "matrix_norm"), _cubic),
    "svd": _svd,
    "linalg.svd": _linalg_svd,
    "qr": _qr,
    "norm": _norm,
    "linalg.norm": _linalg_norm,
    **dict.fromkeys(
        ("fft", "fft2", "fftn", "ifft", "ifft2", "ifftn", "rfft", "irfft"), _transformed
    ),
    **dict.fromkeys(("tensor", "as_tensor"), _written),
    "new_tensor": _new_written,
    "multinomial": _drawn,
    "unbind": _apart,
    "split": _split,
    **dict.fromkeys(("chunk", "tensor_split"), _chunks),
    "tolist": _listed,
    "einsum": _einsum,
    **dict.fromkeys(("fftfreq", "rfftfreq"), _sized),
}


def arguments(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Refuse a call of PyTorch that would make something too large, or write where it likes."""
    if "out" in named:
        raise refused(f"`{name}(out=...)` is not allowed", "Use what it gives back.")
    first = next((part for part in _FIRST if part in named), None)
    if first is not None and not args:
        args = (named[first],)
        named = {part: value for part, value in named.items() if part != first}
    check = _CHECKS.get(name) or _CHECKS.get(name.removeprefix("linalg."), _any)
    check(args, named)


def layer(module: nn.Module, given: tuple[Any, ...]) -> None:
    """Refuse a call of a layer that would make something too large."""
    for tensor in tensors_in(*given):
        rows = tensor.numel() // max(1, tensor.shape[-1] if tensor.dim() else 1)
        for part in module.modules():
            weight = part._parameters.get("weight")
            if weight is not None and weight.dim() == 2:
                embeds = isinstance(part, nn.Embedding)
                elements(tensor.numel() * weight.shape[1] if embeds else rows * weight.shape[0])


def index(tensor: Tensor | numpy.ndarray, at: Any) -> None:
    """Refuse an index that would pick too much out of an array."""
    if isinstance(at, list) and any(not isinstance(part, int) for part in at[:64]):
        index(tensor, tuple(at))  # PyTorch and NumPy may take such a list for what it holds
    picked: list[list[int]] = []
    given = at if isinstance(at, tuple) else (at,)
    axis, size = 0, 1
    for place, part in enumerate(given):
        if part is Ellipsis:
            axis = max(0, len(tensor.shape) - (len(given) - place - 1))
        elif isinstance(part, Tensor | numpy.ndarray) and str(part.dtype)[-4:] == "bool":
            size *= math.prod(tensor.shape[axis : axis + len(part.shape)])
            axis += len(part.shape)
            picked.append([math.prod(part.shape)])
        elif isinstance(part, Tensor | numpy.ndarray | _LISTS):
            size *= tensor.shape[axis] if axis < len(tensor.shape) else 1
            axis += 1
            picked.append(_shape(part))
        elif part is not None:
            axis += 1
    if picked:
        together = zip_longest(*(shape[::-1] for shape in picked), fillvalue=1)
        count = math.prod(max(sizes) for sizes in together)
        elements(count * (math.prod(tensor.shape) // max(1, size)))


_LISTS = list | tuple | range | bytes | bytearray


def _shape(part: Any) -> list[int]:
    """The shape of what a list is taken for as an index."""
    shape: list[int] = []
    while isinstance(part, _LISTS) and len(part):
        shape.append(len(part))
        part = part[0]
    return [*shape, *getattr(part, "shape", ())]
