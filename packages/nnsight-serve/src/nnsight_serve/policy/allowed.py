"""What restricted blocks may use, name by name: modules' functions, methods, builtins.

Everything here computes, and nothing else: it reads and writes no file, starts nothing, changes no
setting of the process, and gives no view of memory beyond the values that it is given (so no
`as_strided`, `set_`, `resize_`, `storage`, `data`, `empty`, and no `out=`). What is not listed is
refused, whatever it does.
"""

from __future__ import annotations

import builtins
import importlib
import math
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import nn

import nnsight_core
from nnsight_core import errors
from nnsight_core.outputs import CompletionOutput, Logprob, RequestOutput

_ELEMENTWISE = """
    abs absolute acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and
    bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clip copysign cos cosh deg2rad
    digamma div divide erf erfc erfinv exp exp2 expm1 floor floor_divide fmod frac heaviside hypot
    lerp lgamma log log10 log1p log2 logical_and logical_not logical_or logical_xor logit
    masked_fill mul multiply nan_to_num neg negative pow rad2deg reciprocal relu remainder round
    rsqrt sgn sigmoid sign sin sinc sinh sqrt square sub subtract tan tanh tril triu true_divide
    trunc xlogy index_add index_copy index_fill masked_scatter scatter scatter_add scatter_reduce
"""
_BOTH = f"""
    {_ELEMENTWISE}
    adjoint all allclose amax amin aminmax any argmax argmin argsort argwhere bmm broadcast_to chunk
    clone count_nonzero cross cummax cummin cumprod cumsum det diag diagonal diff
    dist dot eq equal fliplr flip flipud fmax fmin gather ge ger greater greater_equal gt
    index_select inner inverse isclose isfinite isinf isnan isneginf isposinf kthvalue le less
    less_equal log_softmax logaddexp logaddexp2 logcumsumexp logdet logsumexp lt masked_select
    matmul max maximum mean median min minimum mm mode moveaxis movedim msort multinomial mv nanmean
    nanmedian nansum narrow ne nonzero norm not_equal numel outer permute pinverse prod ravel
    repeat_interleave reshape roll select select_scatter signbit slice_scatter slogdet softmax sort
    split squeeze std sum svd swapaxes swapdims t take take_along_dim tensor_split tile topk trace
    transpose unbind unflatten unique unique_consecutive unsqueeze var vdot where flatten bernoulli
    conj real imag is_floating_point is_complex is_nonzero detach
"""
_IN_PLACE = " ".join(f"{name}_" for name in _ELEMENTWISE.split() if name != "angle")
TENSOR = frozenset(
    f"""
    {_BOTH} {_IN_PLACE} copy_ fill_ fill_diagonal_ zero_ normal_ uniform_ bernoulli_ cumsum_ relu_
    softmax log_softmax bool bfloat16 byte char cpu cuda double float half int long short contiguous
    device dim dtype element_size expand expand_as get_device H is_contiguous is_cpu is_cuda is_meta
    is_signed item itemsize mH mT nbytes ndim ndimension nelement new_full new_ones new_tensor
    new_zeros repeat requires_grad reshape_as shape size stride sum_to_size T to tolist type type_as
    view view_as
    """.split()
)
_TORCH = f"""
    cosine_similarity
    {_BOTH} arange as_tensor autocast broadcast_tensors cat clone column_stack concat concatenate
    device dropout dstack einsum enable_grad eye finfo from_numpy full full_like hstack iinfo
    inference_mode is_tensor isin isreal linspace logspace manual_seed no_grad ones ones_like polar
    promote_types rand rand_like randint randint_like randn randn_like randperm result_type
    rms_norm layer_norm row_stack searchsorted bucketize stack std_mean tensor var_mean vstack zeros
    zeros_like Size Tensor dtype Generator pi e inf nan newaxis nn linalg special fft
    strided contiguous_format preserve_format OutOfMemoryError
"""
_FUNCTIONAL = """
    binary_cross_entropy binary_cross_entropy_with_logits celu cosine_similarity cross_entropy
    dropout elu embedding gaussian_nll_loss gelu glu hardsigmoid hardswish hardtanh huber_loss
    kl_div l1_loss layer_norm leaky_relu linear log_softmax logsigmoid mish mse_loss nll_loss
    normalize pairwise_distance prelu relu relu6 rms_norm selu sigmoid silu smooth_l1_loss softmax
    softmin softplus softsign tanh tanhshrink threshold
"""
_LINALG = """
    cholesky cross det diagonal eigh eigvalsh eig eigvals inv lstsq matmul matrix_norm matrix_rank
    norm pinv qr slogdet solve svd svdvals vecdot vector_norm
"""
_SPECIAL = "digamma entr erf erfc erfinv exp2 expit expm1 gammaln log1p log_softmax logit logsumexp"
_SPECIAL += " ndtr ndtri psi round sinc softmax xlog1py xlogy"
_FFT = "fft fft2 fftfreq fftn fftshift ifft ifft2 ifftn ifftshift irfft rfft rfftfreq"
_LAYERS = """
    CELU ELU Embedding GELU GLU Hardsigmoid Hardswish Hardtanh Identity LayerNorm LeakyReLU Linear
    LogSigmoid LogSoftmax Mish ModuleList ParameterList PReLU Parameter ReLU ReLU6 RMSNorm SELU SiLU
    Sequential Sigmoid Softmax Softplus Softsign Tanh Tanhshrink Threshold Dropout
"""
_MATH = """
    acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh degrees dist e erf erfc exp
    exp2 expm1 fabs floor fmod frexp fsum gamma hypot inf isclose isfinite isinf isnan isqrt ldexp
    lgamma log log10 log1p log2 modf nan nextafter pi radians remainder sin sinh sqrt tan tanh tau
    trunc ulp gcd
"""
_NUMPY = """
    bool_ e exp float16 float32 float64 inf int16 int32 int64 int8 log log10 log2 nan newaxis pi
    sqrt tanh uint8
"""
_DTYPES = [name for name, value in vars(torch).items() if isinstance(value, torch.dtype)]
_ERRORS = [name for name, value in vars(errors).items() if isinstance(value, type)]
_NAMES = {
    "torch": [*_TORCH.split(), *_DTYPES],
    "torch.nn": [*_LAYERS.split(), "functional"],
    "torch.nn.functional": _FUNCTIONAL.split(),
    "torch.linalg": _LINALG.split(),
    "torch.special": _SPECIAL.split(),
    "torch.fft": _FFT.split(),
    "math": _MATH.split(),
    "numpy": _NUMPY.split(),
    "warnings": ["warn"],
    "nnsight_core": ["save", "keep", *_ERRORS],
    "nnsight_core.errors": _ERRORS,
}
MODULES: dict[str, frozenset[str]] = {}
"""The names that a block may take from each module."""
CALLABLES: dict[int, tuple[Any, str]] = {}
"""The functions and classes of those modules by their ids; those of PyTorch with the names under
which their arguments are looked at."""
PATHS: dict[tuple[str, str], Any] = {}
"""What may be named by an import path: those names, and where their own modules say they are."""
LAYERS: frozenset[type] = frozenset(
    cls
    for name in _LAYERS.split()
    if isinstance(cls := getattr(nn, name, None), type) and issubclass(cls, nn.Module)
)
"""The classes of modules that may travel."""
CONTEXTS = (torch.no_grad, torch.enable_grad, torch.inference_mode, torch.autocast)
_MADE = (*CONTEXTS, torch.Size, torch.device, torch.finfo, torch.iinfo, nn.Parameter)


def learn(module: str, name: str, value: Any) -> None:
    """Let blocks call what stands under a name of the list."""
    is_class = isinstance(value, type)
    if is_class and value not in _MADE and not issubclass(value, BaseException | numpy.generic):
        return  # to compare types with; nothing is made of it
    looked_at = module.startswith("torch") and not is_class
    # The same name has other arguments there.
    known_as = f"linalg.{name}" if module == "torch.linalg" else name
    CALLABLES[id(value)] = (value, known_as if looked_at else "")


def _fill() -> None:
    for path, wanted in _NAMES.items():
        module = importlib.import_module(path)
        found = {name: getattr(module, name) for name in wanted if hasattr(module, name)}
        MODULES[path] = frozenset(found)
        for name, value in found.items():
            PATHS[path, name] = value
            if isinstance(value, ModuleType) or not callable(value):
                continue
            own = (getattr(value, "__module__", None), getattr(value, "__qualname__", None))
            if isinstance(own[0], str) and isinstance(own[1], str):
                PATHS.setdefault((own[0], own[1]), value)
            learn(path, name, value)
    kernels: Any = vars(torch._C)["_nn"]
    # Where the front end says that PyTorch's own functions are.
    for name in _FUNCTIONAL.split():
        if getattr(kernels, name, None) is getattr(nn.functional, name, 0):
            PATHS["torch._C._nn", name] = getattr(nn.functional, name)


_fill()

_STRING = """
    capitalize casefold center count endswith find index isalnum isalpha isascii isdecimal isdigit
    isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip
    partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split
    splitlines startswith strip swapcase title upper zfill
"""
_NUMBER = "real imag conjugate"
_SET = "copy difference intersection isdisjoint issubset issuperset symmetric_difference union"
METHODS: dict[type, frozenset[str]] = {
    kind: frozenset(names.split())
    for kind, names in {
        str: _STRING,
        int: f"{_NUMBER} bit_length bit_count is_integer numerator denominator",
        bool: _NUMBER,
        float: f"{_NUMBER} is_integer hex",
        complex: _NUMBER,
        bytes: "hex",
        list: "append clear copy count extend index insert pop remove reverse sort",
        tuple: "count index",
        dict: "clear copy get items keys pop popitem setdefault update values",
        set: f"{_SET} add clear discard pop remove update difference_update intersection_update",
        frozenset: _SET,
        range: "start stop step count index",
        slice: "start stop step",
        torch.Size: "count index numel",
        torch.device: "type index",
        torch.dtype: "is_complex is_floating_point is_signed itemsize",
        torch.finfo: "bits dtype eps max min resolution smallest_normal tiny",
        torch.iinfo: "bits dtype max min",
        numpy.ndarray: "argmax argmin copy dtype item max mean min ndim shape size sum T tolist",
    }.items()
}
"""The attributes of values of exactly these types."""
for _kind in (RequestOutput, CompletionOutput, Logprob):
    METHODS[_kind] = frozenset(_kind.model_fields)
_BUILTINS = """
    abs all any bool callable chr complex dict divmod enumerate float frozenset int isinstance
    issubclass len list max min ord range repr reversed round set slice sorted str sum tuple zip
    map filter print pow type hex oct bin ascii format iter next True False None Ellipsis
    NotImplemented
"""
_UNUSUAL = ("SystemExit", "KeyboardInterrupt", "GeneratorExit", "BaseExceptionGroup")
_UNUSUAL = (*_UNUSUAL, "ExceptionGroup")
ERRORS = tuple(
    value
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException) and name not in _UNUSUAL
)
"""Python's own errors and warnings."""
BUILTIN_NAMES = frozenset((*_BUILTINS.split(), *(cls.__name__ for cls in ERRORS)))
REFUSED_BUILTINS = frozenset(
    name for name in vars(builtins) if name not in BUILTIN_NAMES and not name.startswith("_")
)
TYPES: tuple[type, ...] = (
    *(bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, range, slice),
    *(type(None), torch.Tensor, nn.Parameter, torch.Size, torch.device, torch.dtype),
    *(numpy.ndarray, *ERRORS),
)
"""What `type(x)` may give."""
assert nnsight_core.save is PATHS["nnsight_core", "save"] and math.pi
