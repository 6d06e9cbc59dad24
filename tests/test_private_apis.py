"""Private names of other distributions: the program uses those in `CHECKS` and no others.

A distribution may change a private name in any release. So each distribution in `CHECKS` has an upper bound
in a pyproject.toml, and each name has a check. The check fails when a newer release has changed the name.

A name is private if it begins with one underscore or belongs to `tensorflow.python`. The search reads the
source for imports, for attributes of foreign objects, and for attributes that a class takes from a foreign
base class by `self`, `cls` or `super()`. It imports classes to find private methods that they override.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PACKAGES = ("streamer", "sidecar")
INTERNAL = "tensorflow.python."
OWN_OBJECTS = {"self", "cls"}
DOCUMENTED = {"_asdict", "_current_frames", "_exit", "_fields", "_replace"}
"""The standard library's: of `sys`, `os` and named tuples."""


# --- The search --------------------------------------------------------------------------------------


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def is_foreign(module: str) -> bool:
    root = module.partition(".")[0]
    return root not in {*PACKAGES, "_typeshed"} and root not in sys.stdlib_module_names


def imported(tree: ast.Module) -> Iterator[str]:
    """Private modules, and private names of modules, that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [each.name for each in node.names]
            yield from (name for name in modules if is_foreign(name) and internal(name))
        elif isinstance(node, ast.ImportFrom) and node.module and is_foreign(node.module):
            for each in node.names:
                if internal(node.module) or is_private(each.name):
                    yield f"{node.module}.{each.name}"


def internal(module: str) -> bool:
    return module.startswith(INTERNAL) or any(map(is_private, module.split(".")))


def bound(tree: ast.AST) -> set[str]:
    """Names that a tree gives a value to, as variables, attributes of `self` and `cls`, or definitions.

    `self._x = other._x` does not count: the name is the other's.
    """
    names, copied = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            taken = attributes(node.value, own=False)
            copied |= {
                id(each) for each in node.targets if isinstance(each, ast.Attribute) and each.attr in taken
            }
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            names |= {node.attr} if id(node) not in copied else set()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)  # __slots__
    return names


def is_own(node: ast.expr) -> bool:
    """Whether an expression is `self`, `cls` or `super()`."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in OWN_OBJECTS


def attributes(tree: ast.AST, *, own: bool) -> set[str]:
    """Private attributes that a tree reads or sets: of `self` and its like, or of all other objects."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and is_private(node.attr) and is_own(node.value) == own
    }


def base_names(definition: ast.ClassDef) -> set[str]:
    """All names in the expressions of its base classes."""
    return {
        name
        for base in definition.bases
        for node in ast.walk(base)
        for name in ([node.id] if isinstance(node, ast.Name) else [])
        + ([node.attr] if isinstance(node, ast.Attribute) else [])
    }


def uses(trees: list[ast.Module]) -> set[str]:
    """Every private name of others in these modules."""
    classes = {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

    def family(definition: ast.ClassDef) -> set[str]:
        """Names bound by a class and by those of ours that it is derived from."""
        ours = base_names(definition) & classes.keys() - {definition.name}
        return bound(definition).union(*(family(classes[name]) for name in ours))

    ours = set().union(*map(bound, trees))
    found = {name for tree in trees for name in imported(tree)}
    found |= {name for tree in trees for name in attributes(tree, own=False)} - ours
    for definition in classes.values():
        if definition.bases:
            found |= attributes(definition, own=True) - family(definition)
    return found - DOCUMENTED


def overridden(kind: type) -> set[str]:
    """Private names of a foreign base class that a class of ours defines anew."""
    foreign = [base for base in kind.__mro__ if is_foreign(base.__module__)]
    return {
        name
        for base in kind.__mro__
        if not is_foreign(base.__module__)
        for name in vars(base)
        if is_private(name)
        and any(name in vars(each) for each in foreign)
        and name not in {"_abc_impl", "_is_protocol"}
    }


def sources() -> dict[str, ast.Module]:
    """The modules of the program by their dotted names."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text(encoding="utf-8")
        )
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def derived() -> Iterator[type]:
    """Our classes that have a foreign base class."""
    for module, tree in sources().items():
        names = {
            each.asname or each.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for each in node.names
        }
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and base_names(node) & names:
                kind = getattr(importlib.import_module(module), node.name)
                if any(is_foreign(base.__module__) for base in kind.__mro__):
                    yield kind


# --- The names ---------------------------------------------------------------------------------------


def parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def openssl_lib() -> None:
    """The functions of OpenSSL that `streamer` calls; pyOpenSSL itself calls only some of them."""
    from OpenSSL._util import ffi, lib

    declared = {
        "BIO_get_mem_data": "long(*)(BIO *, char * *)",
        "BIO_new_mem_buf": "BIO *(*)(void *, int)",
        "BIO_set_mem_eof_return": "long(*)(BIO *, int)",
        "SSL_get_error": "int(*)(SSL *, int)",
        "SSL_set_bio": "void(*)(SSL *, BIO *, BIO *)",
        "SSL_get0_param": "X509_VERIFY_PARAM *(*)(SSL *)",
        "SSL_get_verify_result": "long(*)(SSL *)",
        "SSL_peek": "int(*)(SSL *, void *, int)",
        "SSL_pending": "int(*)(SSL *)",
        "SSL_read": "int(*)(SSL *, void *, int)",
        "X509_VERIFY_PARAM_set1_host": "int(*)(X509_VERIFY_PARAM *, char *, size_t)",
        "X509_VERIFY_PARAM_set1_ip": "int(*)(X509_VERIFY_PARAM *, unsigned char *, size_t)",
        "X509_VERIFY_PARAM_set_hostflags": "void(*)(X509_VERIFY_PARAM *, unsigned int)",
        "X509_verify_cert_error_string": "char *(*)(long)",
    }
    called = {
        node.attr
        for tree in sources().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "_lib"
    }
    assert called == declared.keys()
    assert {name: ffi.typeof(getattr(lib, name, None)).cname for name in declared} == declared


def openssl_ffi() -> None:
    from OpenSSL._util import ffi

    memory = ffi.from_buffer(bytearray(b"ab"), require_writable=True)
    assert ffi.string(memory + 1, 1) == b"b"
    ffi.release(memory)
    with pytest.raises(BufferError):
        ffi.from_buffer(b"ab", require_writable=True)


def openssl_connection() -> None:
    from OpenSSL import SSL
    from OpenSSL._util import ffi

    connection = SSL.Connection(SSL.Context(SSL.TLS_CLIENT_METHOD))
    assert ffi.typeof(connection._ssl).cname == "SSL *"
    assert ffi.typeof(connection._from_ssl).cname == "BIO *"
    assert parameters(connection._raise_ssl_error) == ["ssl", "result"]


def metadata_sessions() -> None:
    """Each fetcher makes its session of the class that the attribute names."""
    from aiobotocore.httpsession import AIOHTTPSession
    from aiobotocore.utils import AioContainerMetadataFetcher, AioIMDSFetcher

    own = type("Own", (AioIMDSFetcher._ref_counted_session_cls,), {})
    assert issubclass(own, AIOHTTPSession)
    for fetcher in (AioContainerMetadataFetcher, AioIMDSFetcher):
        made = type("Fetcher", (fetcher,), {"_ref_counted_session_cls": own})()
        assert type(made._session) is own


def http_session() -> None:
    """`send` takes its session from `_get_session`, whose connector is from `_create_connector`."""
    from aiobotocore.httpsession import AIOHTTPSession

    session = AIOHTTPSession(timeout=(1, 2))
    assert (session._timeout.sock_connect, session._timeout.sock_read) == (1, 2)
    for caller, method in (("send", "_get_session"), ("_get_session", "_create_connector")):
        assert inspect.iscoroutinefunction(getattr(AIOHTTPSession, method))
        assert parameters(getattr(AIOHTTPSession, method)) == ["proxy_url"]
        assert f"await self.{method}(proxy_url)" in inspect.getsource(getattr(AIOHTTPSession, caller))


def response_content() -> None:
    """A response whose `_content` is set gives that, and does not read the body."""
    from aiobotocore.awsrequest import AioAWSResponse

    response = AioAWSResponse("https://example.com", 200, {}, None)
    response._content = b"set"
    reading = response.content
    with pytest.raises(StopIteration) as end:
        reading.send(None)
    assert end.value.value == b"set"


def response_parser() -> None:
    from aiobotocore.parsers import AioResponseParserFactory, AioRestXMLParser

    factory = AioResponseParserFactory()
    factory.set_parser_defaults(timestamp_parser=str)
    assert factory._defaults == {"timestamp_parser": str}
    assert parameters(AioRestXMLParser._parse_shape) == ["shape", "node"]
    assert parameters(AioRestXMLParser._node_tag) == ["node"]


def torch_iterator() -> None:
    """A DataLoader's iterator: None until persistent workers have begun."""
    from torch.utils.data import DataLoader

    loader = DataLoader([1, 2])
    assert loader._iterator is None
    assert "self._iterator = self._get_iterator()" in inspect.getsource(DataLoader.__iter__)


def tensorflow_datasets() -> None:
    import tensorflow as tf
    from tensorflow.python.data.ops.from_generator_op import _GeneratorDataset
    from tensorflow.python.data.ops.map_op import _MapDataset

    generator = ["init_args", "init_func", "next_func", "finalize_func", "output_signature"]
    assert parameters(_GeneratorDataset.__init__)[:5] == generator
    assert parameters(_MapDataset.__init__)[:2] == ["input_dataset", "map_func"]
    assert {"use_inter_op_parallelism", "preserve_cardinality"} <= {*parameters(_MapDataset.__init__)}
    assert tf.data.Dataset.range(1)._variant_tensor.dtype == tf.variant
    assert "_inputs" in tf.data.Dataset.__abstractmethods__


def tensorflow_operations() -> None:
    from tensorflow.python.framework import op_def_library, op_def_registry

    assert parameters(op_def_library._apply_op_helper) == ["op_type_name", "name", "keywords"]
    assert op_def_registry.get("NoOp").name == "NoOp"
    assert op_def_registry.get("PenstockNoSuchOperation") is None


def tensorflow_functions() -> None:
    """A registered EagerFunc is called as it is, and its EagerTensors are the results."""
    import tensorflow as tf
    from tensorflow.python.eager import context
    from tensorflow.python.framework import ops
    from tensorflow.python.ops import gen_script_ops, script_ops

    class Call(script_ops.EagerFunc):  # type: ignore[misc] # tensorflow publishes no types
        def __init__(self) -> None:
            self.token = script_ops._py_funcs.insert(self)

        def __call__(self, device: str | None, token: str, arguments: list[Any]) -> list[Any]:
            del device
            assert token == self.token
            with context.eager_mode():
                kinds = tf.string.as_datatype_enum, tf.int64.as_datatype_enum
                return [
                    ops.EagerTensor([[b"x", b"y\0"]], None, kinds[0]),
                    ops.EagerTensor(1 + arguments[0].numpy(), None, kinds[1]),
                ]

    call = Call()
    types = [tf.string, tf.int64]

    @tf.function  # type: ignore[untyped-decorator]
    def results(number: Any) -> Any:
        return gen_script_ops.eager_py_func(input=[number], token=call.token, is_async=False, Tout=types)

    strings, number = results(tf.constant(6, tf.int64))
    assert strings.numpy().tolist() == [[b"x", b"y\0"]]
    assert number.numpy() == 7


def tensorflow_strings() -> None:
    """The functions make a right tensor of the reader's memory, and clear the strings after it."""
    from streamer.readers.tensorflow.foreign import tensor_functions

    assert tensor_functions() is not None


def tensorflow_callers() -> None:
    """The Python functions that TensorFlow calls are in the files in which the reader looks for them."""
    import tensorflow as tf
    from tensorflow.python.eager import core, executor
    from tensorflow.python.framework import tensor_shape
    from tensorflow.python.ops import script_ops

    files = []
    tf.numpy_function(lambda: files.append(sys._getframe(1).f_code.co_filename), [], [])
    assert files == [script_ops.__file__]
    assert core._NotOkStatusException.__module__ == core.__name__
    assert "__del__" in vars(executor.Executor)
    assert "__len__" in vars(tensor_shape.TensorShape)


def next_message() -> None:
    import aiohttp
    from aiohttp.client_proto import ResponseHandler

    source = inspect.getsource(aiohttp.ClientResponse.start)
    assert "self._protocol = connection.protocol" in source
    assert "self._buffer" in inspect.getsource(ResponseHandler)


def connection_factory() -> None:
    """The pool makes protocols by it; `set_exception` gets the parser's errors, `_payload` is the body."""
    from aiohttp import TCPConnector
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.connector import BaseConnector

    made = "self._factory = functools.partial(ResponseHandler, loop=loop)"
    assert made in inspect.getsource(BaseConnector.__init__)
    assert "self._factory" in inspect.getsource(TCPConnector)
    assert parameters(ResponseHandler) == ["loop"]
    assert parameters(ResponseHandler.set_exception) == ["exc", "exc_cause"]
    assert "self.set_exception(exc, underlying_exc)" in inspect.getsource(ResponseHandler.data_received)
    assert "self._payload = payload" in inspect.getsource(ResponseHandler.data_received)


CHECKS: dict[str, tuple[str, Callable[[], None]]] = {
    "OpenSSL._util.lib": ("cryptography", openssl_lib),
    "OpenSSL._util.ffi": ("pyopenssl", openssl_ffi),
    "_ssl": ("pyopenssl", openssl_connection),
    "_from_ssl": ("pyopenssl", openssl_connection),
    "_raise_ssl_error": ("pyopenssl", openssl_connection),
    "_ref_counted_session_cls": ("aiobotocore", metadata_sessions),
    "_create_connector": ("aiobotocore", http_session),
    "_get_session": ("aiobotocore", http_session),
    "_timeout": ("aiobotocore", http_session),
    "_content": ("aiobotocore", response_content),
    "_protocol": ("aiohttp", next_message),
    "_factory": ("aiohttp", connection_factory),
    "_payload": ("aiohttp", connection_factory),
    "_defaults": ("botocore", response_parser),
    "_parse_shape": ("botocore", response_parser),
    "_node_tag": ("botocore", response_parser),
    "_iterator": ("torch", torch_iterator),
    "_inputs": ("tensorflow", tensorflow_datasets),
    "_variant_tensor": ("tensorflow", tensorflow_datasets),
    "tensorflow.python.data.ops.from_generator_op._GeneratorDataset": ("tensorflow", tensorflow_datasets),
    "tensorflow.python.data.ops.map_op._MapDataset": ("tensorflow", tensorflow_datasets),
    "_apply_op_helper": ("tensorflow", tensorflow_operations),
    "tensorflow.python.framework.op_def_library": ("tensorflow", tensorflow_operations),
    "tensorflow.python.framework.op_def_registry": ("tensorflow", tensorflow_operations),
    "_py_funcs": ("tensorflow", tensorflow_functions),
    "tensorflow.python.eager.context": ("tensorflow", tensorflow_functions),
    "tensorflow.python.framework.ops": ("tensorflow", tensorflow_functions),
    "tensorflow.python.ops.gen_script_ops": ("tensorflow", tensorflow_functions),
    "tensorflow.python._pywrap_tfe": ("tensorflow", tensorflow_strings),
    "tensorflow.python.eager.core": ("tensorflow", tensorflow_callers),
    "tensorflow.python.eager.executor": ("tensorflow", tensorflow_callers),
    "tensorflow.python.framework.tensor_shape": ("tensorflow", tensorflow_callers),
    "tensorflow.python.ops.script_ops": ("tensorflow", tensorflow_callers),
}
"""Each private name in use, with its distribution and its check."""
PINNED_BY = {"botocore": "aiobotocore"}
"""Distributions whose upper bound is in the requirements of another one."""


# --- Tests -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKS)
def test_a_private_name_is_what_it_was(name: str) -> None:
    CHECKS[name][1]()


def test_every_private_name_in_use_is_checked() -> None:
    found = uses(list(sources().values())).union(*map(overridden, derived()))
    assert found == CHECKS.keys()


@pytest.mark.parametrize("distribution", sorted({owner for owner, _ in CHECKS.values()}))
def test_a_distribution_whose_private_names_are_used_has_an_upper_bound(distribution: str) -> None:
    if distribution in PINNED_BY:
        wanted = requires(PINNED_BY[distribution]) or []
    else:
        wanted = []
        for directory in (".", "streamer"):
            project = tomllib.loads((ROOT / directory / "pyproject.toml").read_text())["project"]
            wanted += project["dependencies"]
            wanted += [each for extra in project.get("optional-dependencies", {}).values() for each in extra]
    found = [each for each in map(Requirement, wanted) if canonicalize_name(each.name) == distribution]
    assert found, f"{distribution} is required nowhere"
    for requirement in found:
        assert any(each.operator in {"<", "<=", "==", "~="} for each in requirement.specifier), requirement


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from foreign._inner import thing", {"foreign._inner.thing"}),
        ("import foreign._inner", {"foreign._inner"}),
        ("from foreign import _thing", {"foreign._thing"}),
        ("from tensorflow.python.ops import script_ops", {"tensorflow.python.ops.script_ops"}),
        ("from _typeshed import Incomplete\nimport _thread\nfrom streamer.x import _y", set()),
        ("def f(x): return x._theirs", {"_theirs"}),
        ("class A:\n def f(self): self._ours = 1\ndef g(a): return a._ours", set()),
        ("class A:\n def f(self, b): self._ssl = b._ssl", {"_ssl"}),
        ("class A(B):\n def f(self): return self._theirs", {"_theirs"}),
        ("class A(B):\n def f(self): return super()._theirs()", {"_theirs"}),
        ("class A(B):\n def f(self): self._x = 1\nclass C(A):\n def f(self): return self._x", set()),
        ("class A(B):\n _x = 1\nclass C(D):\n def f(self): return self._x", {"_x"}),
    ],
)
def test_the_search_finds_private_names(source: str, found: set[str]) -> None:
    assert uses([ast.parse(source)]) == found


def test_the_search_finds_overridden_methods() -> None:
    from aiobotocore.httpsession import AIOHTTPSession

    kind = type("Ours", (AIOHTTPSession,), {"_chunked": None, "_own": None, "__module__": "streamer.x"})
    assert overridden(kind) == {"_chunked"}
