"""Names as no front end of ours writes them: forged forms of values that run code or reach out."""

from __future__ import annotations

from typing import Any


def path(module: str, name: str) -> dict[str, Any]:
    """A function or class by its import path."""
    return {"$": "path", "module": module, "name": name}


def function(source: str, **other: Any) -> dict[str, Any]:
    """A function by its source."""
    form = {"$": "function", "#": 90, "name": "f", "source": source, "filename": "forged.py"}
    return {**form, "line": 1, "lazy": False, "names": {}, "module": "m", **other}


def listed(*parts: Any) -> dict[str, Any]:
    """A list."""
    return {"$": "list", "v": list(parts)}


def layer(cls: Any = None, **state: Any) -> dict[str, Any]:
    """A module as class and state."""
    return {"$": "nn", "class": cls or path("torch.nn.modules.linear", "Linear"), "state": state}


def mapping(**parts: Any) -> dict[str, Any]:
    """A dict."""
    return {"$": "dict", "k": list(parts), "v": list(parts.values())}


TENSOR = {"$": "tensor", "dtype": "float32", "shape": [], "b": 0}
PARAMETER = {**TENSOR, "parameter": True}
EXEC = path("builtins", "exec")
_PATHS = """
    os.system os.environ os._exit os.remove posix.system subprocess.Popen subprocess.run sys.exit
    sys.modules shutil.rmtree pathlib.Path io.open builtins.open builtins.exec builtins.eval
    builtins.getattr builtins.setattr builtins.compile builtins.__import__ builtins.type
    builtins.object builtins.globals builtins.print importlib.import_module pickle.loads
    pickle.load marshal.loads types.FunctionType types.CodeType ctypes.CDLL ctypes.string_at
    socket.socket urllib.request.urlopen threading.Thread multiprocessing.Process
    operator.attrgetter operator.methodcaller functools.reduce functools.partial
    inspect.currentframe gc.get_objects sys._getframe code.interact pty.spawn webbrowser.open
    tempfile.mkstemp torch.load torch.save torch.ops torch.hub.load torch.utils.cpp_extension.load
    torch.jit.load torch.jit.script torch.compile torch.from_file torch.classes.load_library
    torch.ops.load_library torch._C torch._dynamo.optimize torch.serialization.load
    torch.multiprocessing.spawn torch.distributed.init_process_group torch.empty torch.as_strided
    torch.Tensor.numpy torch.Tensor.apply_ torch.Tensor.set_ torch.nn.Module
    torch.nn.Module.register_buffer torch.cuda.memory.caching_allocator_delete
    torch.library.Library torch.autograd.Function torch.storage.UntypedStorage numpy.load
    numpy.save numpy.fromfile numpy.memmap numpy.frompyfunc numpy.vectorize
    numpy.ctypeslib.load_library numpy.lib.npyio.load math.factorial math.comb
    nnsight_core.run.Run nnsight_core.run.current_run nnsight_core.run.need_run
    nnsight_core.node.Places nnsight_core.code.compile_block nnsight_core.watchdog.WATCHDOG
    nnsight_vllm_worker.worker.startup vllm.LLM transformers.AutoModel.from_pretrained
    transformers.pipeline typing.get_type_hints warnings.linecache.os.system warnings.sys.exit
    torch.nn.functional.torch.load torch.serialization.os.system
"""
PATHS = _PATHS.split()
_MODULES = """
    os sys subprocess builtins importlib ctypes socket shutil pathlib io pickle posix gc inspect
    types threading torch._C torch.utils torch.hub torch.jit torch.ops torch.cuda
    torch.serialization torch.utils.cpp_extension torch.distributed nnsight_core.run
    nnsight_vllm_worker nnsight_serve nnsight_serve.policy vllm transformers operator functools
    itertools typing this antigravity numpy.lib numpy.ctypeslib __main__
"""
MODULES = _MODULES.split()

FORMS: dict[str, Any] = {
    **{f"path {name}": path(*name.rsplit(".", 1)) for name in PATHS},
    **{f"module {name}": {"$": "pymodule", "name": name} for name in MODULES},
    "path with a dotted name": path("torch", "serialization.os.system"),
    "path in two": path("os", "path.os.system"),
    "path without a name": path("os", ""),
    "path that is no text": {"$": "path", "module": ["os"], "name": {"a": 1}},
    "path in a list": listed(1, listed(EXEC)),
    "path as a key": {"$": "dict", "k": [EXEC], "v": [1]},
    "path in a partial": {"$": "partial", "v": [EXEC, {"$": "tuple", "v": []}, mapping()]},
    "path in a function": function("def f():\n    return g\n", names={"g": EXEC}),
    "path in a module's state": layer(weight=EXEC),
    "pickle": {"$": "pickle", "b": 0},
    "pickle in a function's names": function(
        "def f():\n    pass\n", names={"g": {"$": "pickle", "b": 0}}
    ),
    "pickle in a partial": {"$": "partial", "v": [{"$": "pickle", "b": 0}, None, None]},
    "class": {**function("class f:\n    pass\n"), "$": "class", "qualname": "f"},
    "class with code in its body": {
        **function("class f:\n    open('canary', 'w')\n"),
        "$": "class",
        "qualname": "f",
    },
    "method": {"$": "method", "self": TENSOR, "name": "numpy"},
    "method of the model": {"$": "method", "self": {"$": "node", "path": ""}, "name": "__class__"},
    "member": {"$": "member", "class": path("signal", "Signals"), "name": "SIGKILL"},
    "record": {"$": "record", "class": path("pathlib", "Path"), "v": {}},
    "cache": {"$": "cache", "v": mapping(visits=mapping(), missing=mapping())},
    "type that nobody knows": {"$": "open", "v": "canary"},
    "type that is no text": {"$": ["list"], "v": []},
    "function that imports": function("def f():\n    import os\n"),
    "function that imports as it is made": function("import os\ndef f():\n    pass\n"),
    "function with a private default": function("def f(x=().__class__):\n    pass\n"),
    "function with a private decorator": function("@().__class__\ndef f():\n    pass\n"),
    "function that opens": function("def f():\n    return open('canary', 'w')\n"),
    "function that is a class": function("class f:\n    pass\n"),
    "function of a guard's name": function("def _call_(f):\n    return f\n", name="_call_"),
    "function with a guard among its names": function(
        "def f():\n    pass\n", names={"_getattr_": path("torch", "relu")}
    ),
    "function of our own name": function(
        "def __nnsight_save__():\n    pass\n", name="__nnsight_save__"
    ),
    "function with our own name among its names": function(
        "def f():\n    return __nnsight_save__(1)\n", names={"__nnsight_save__": 1}
    ),
    "function that calls our own name": function("def f():\n    return __nnsight_keep__(1)\n"),
    "function with builtins among its names": function(
        "def f():\n    pass\n", names={"__builtins__": mapping()}
    ),
    "function named by builtins": function("f = 1\n", name="__builtins__"),
    "function in a function": function(
        "def f():\n    pass\n", names={"g": function("def g():\n    import os\n", name="g")}
    ),
    "function without end": function("def f():\n    pass\n" + "#" * (1 << 19)),
    "function nested too deep": function("def f():\n    return " + "-" * 20000 + "1\n"),
    "function in brackets": function("def f():\n    return " + "(" * 5000 + ")" * 5000 + "\n"),
    "function with a null": function("def f():\n    pass\0\n"),
    "function of no text": function(["import os"]),  # type: ignore[arg-type]
    "function on no line": function("def f():\n    pass\n", line="1"),
    "function of no module": function("def f():\n    pass\n", module=["os"]),
    "module of another class": layer(path("torch.nn.modules.module", "Module")),
    "module of a lazy class": layer(path("torch.nn.modules.lazy", "LazyModuleMixin")),
    "module of a class of PyTorch's that is not listed": layer(
        path("torch.nn.modules.transformer", "Transformer")
    ),
    "module of a function": layer(path("torch", "relu")),
    "module with another forward": layer(forward=path("torch", "zeros")),
    "module with a hook": layer(_forward_hooks=mapping(a=path("torch", "relu"))),
    "module with a backward hook": layer(_backward_hooks=mapping(a=path("torch", "relu"))),
    "module with a parameter of a method's name": layer(
        _parameters=mapping(register_forward_hook=PARAMETER)
    ),
    "module with a buffer of a method's name": layer(_buffers=mapping(__class__=TENSOR)),
    "module with a value of a method's name": layer(forward=1),
    "module with a function in it": layer(bias=function("def f():\n    pass\n")),
    "named tuple of a library": {
        "$": "named",
        "module": "nnsight_core.watch",
        "name": "Watch",
        "k": [],
        "v": [],
    },
    "range without end": {"$": "range", "v": [0, 10**15, 1]},
    "range of texts": {"$": "range", "v": ["a", "b", "c"]},
}
"""What a name may be made to hold, by what it is."""
_NAMES = """
    __builtins__ __nnsight_save__ __nnsight_keep__
    __nnsight_save__x _getattr_ _call_ _getitem_ _operate_ __name _x a.b a-b 1a
"""
NAMES = _NAMES.split()
"""Names that a block may not have."""
