"""Calls between two processes. Each process keeps its own objects, and only plain values are sent.

    process of the tests                            process of the program
    --------------------                            ----------------------
    double(2)             -- ["ask", "call", ...] -->   double(2)
    4                     <-- ["give", 4, []] --        4
    Stack()               -- ["ask", "call", ...] -->   Stack()
    Remote                <-- ["give", ["mine", 7, ...], []] --

Each message is one line of JSON. Plain values (numbers, text, containers, dates) arrive as copies of exactly the same
built-in type. If a call changes a container in place, the container of the caller changes too. Any other object becomes
a ``Remote`` in the other process. Each operation on a ``Remote`` sends a message.

The tests do not trust the program. A ``Peer`` with ``guarded=True`` (the tests) serves two kinds of requests:

    - calls of the functions that the tests have passed to the program
    - public attributes of objects of the tests' own classes

The tests never send the value that a test compares with. There is one exception: if the question asks for classes,
their operators are part of the answer. Then equality with a plain value must hold for the value and for no other
(``_decoys``).

Owns: the encoding, the permitted requests. Does not know: processes, limits, how tests are judged. This module imports
only the standard library.
"""

from __future__ import annotations

import array
import builtins
import collections
import datetime
import decimal
import fractions
import itertools
import json
import math
import operator
import os
import random
import threading
import types
from collections.abc import Callable
from typing import Any, NoReturn

TESTS = "tests"  # name of the module that the tests run as


def _exit_context(context: Any, kind: Any, error: Any, _: Any) -> Any:
    """Leave a context with the traceback of this process, because a traceback is not sent."""
    return type(context).__exit__(context, kind, error, getattr(error, "__traceback__", None))


# The operations that one process may request from the other, by name.
UNARY = {
    "__len__": len,
    "__bool__": bool,
    "__int__": int,
    "__float__": float,
    "__complex__": complex,
    "__index__": operator.index,
    "__hash__": hash,
    "__str__": str,
    "__repr__": repr,
    "__format__": format,
    "__abs__": abs,
    "__neg__": operator.neg,
    "__pos__": operator.pos,
    "__invert__": operator.invert,
    "__iter__": iter,
    "__next__": next,
    "__reversed__": reversed,
    "__round__": round,
    "__trunc__": math.trunc,
    "__floor__": math.floor,
    "__ceil__": math.ceil,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__delitem__": operator.delitem,
    "__enter__": lambda context: type(context).__enter__(context),
    "__exit__": _exit_context,
    "__instancecheck__": lambda kind, instance: isinstance(instance, kind),
    "__subclasscheck__": lambda kind, other: issubclass(other, kind),
}
COMPARISONS = {f"__{name}__": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
ARITHMETIC = {
    f"__{name}__": getattr(operator, f"__{name}__")
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
}
ARITHMETIC |= {
    "__lshift__": operator.lshift,
    "__rshift__": operator.rshift,
    "__divmod__": divmod,
}
CONTAINS = {"__contains__": operator.contains}
OPERATIONS = UNARY | COMPARISONS | ARITHMETIC | CONTAINS
# Methods of plain values that take an argument. An object with such a method, in place of a plain value, could return
# the answer that a test expects.
PLAIN_METHODS = set(itertools.chain(*map(dir, (str, bytes, list, tuple, dict, set, int, float))))
NUMBERS = (int, float, complex, decimal.Decimal, fractions.Fraction)
# Built-ins that are sent by name. They do not read the inside of an object, and they do not run text.
BUILTINS = {
    name: getattr(builtins, name)
    for name in (
        *("abs", "all", "any", "ascii", "bin", "bool", "bytearray", "bytes", "chr", "complex", "dict", "divmod"),
        *("enumerate", "filter", "float", "frozenset", "hex", "int", "iter", "len", "list", "map", "max", "min"),
        *("next", "object", "oct", "ord", "pow", "range", "repr", "reversed", "round", "set", "slice", "sorted"),
        *("str", "sum", "tuple", "zip", "Ellipsis", "NotImplemented"),
    )
}
BUILTINS |= {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException) and kind.__name__ == name
}
MAX_RAW_BITS = 4096  # a longer integer travels in base 16, because Python bounds conversions to base 10


class PeerError(BaseException):
    """Error if the other process has ended or has sent an invalid message.

    It is not an ``Exception``, so that no test catches it.
    """


class Remote:
    """An object of the other process."""

    def __init__(self, peer: Peer, handle: int):
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_handle", handle)

    def __getattr__(self, name: str) -> Any:
        peer = _peer(self)
        if peer.guarded and not peer.has_classes and name in PLAIN_METHODS:
            raise AttributeError(f"an object of the program has no {name!r} here, because it is not a plain value")
        return peer.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _peer(self).ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        _peer(self).ask("delete", self, name)

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        suppresses = _peer(self).ask("__exit__", self, kind, error, None)
        if kind is not None and issubclass(kind, AssertionError) and _peer(self).guarded:
            return False  # a context manager of the program must not suppress the failure of a test
        return bool(suppresses)

    def __contains__(self, value: Any) -> bool:
        if _may_see(self, value):
            return _peer(self).ask("__contains__", self, value)
        return any(item is value or item == value for item in self)


class RemoteCallable(Remote):
    """A function, class or other callable of the other process."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _peer(self).ask("call", self, *args, **kwargs)


def _peer(remote: Remote) -> Peer:
    return object.__getattribute__(remote, "_peer")


def _may_see(remote: Remote, operand: Any) -> bool:
    """Return whether the operand of an operator may be sent to the process of ``remote``."""
    peer = _peer(remote)
    return not peer.guarded or peer.has_classes or isinstance(operand, Remote)


def _add_operators() -> None:
    """Add the special methods to ``Remote``. Each special method sends a request to the other process."""

    def unary(name: str) -> Callable:
        return lambda self, *args: _peer(self).ask(name, self, *args)

    def comparison(name: str) -> Callable:
        def compare(self: Remote, other: Any) -> Any:
            if not _may_see(self, other):
                # With NotImplemented, Python compares identities for equality, and raises for an order.
                return NotImplemented
            return _peer(self).holds(name, self, other)

        return compare

    def arithmetic(name: str, is_reversed: bool) -> Callable:
        def compute(self: Remote, other: Any, *more: Any) -> Any:
            if not _may_see(self, other):
                return NotImplemented
            if is_reversed:
                return _peer(self).ask(name, other, self, *more)
            return _peer(self).ask(name, self, other, *more)

        return compute

    for name in UNARY.keys() - vars(Remote).keys():
        setattr(Remote, name, unary(name))
    for name in COMPARISONS:
        setattr(Remote, name, comparison(name))
    for name in ARITHMETIC:
        setattr(Remote, name, arithmetic(name, False))
        setattr(Remote, f"__r{name[2:]}", arithmetic(name, True))


_add_operators()


class Peer:
    """One side of the connection.

    Args:
        receive, send: descriptors.
        guarded: this is the side of the tests. It answers few requests, and it hides the values of comparisons.
        has_classes: the question asks for classes. Their operators may receive the other operand.
    """

    def __init__(self, receive: int, send: int, *, guarded: bool, has_classes: bool = False):
        self.guarded = guarded
        self.has_classes = has_classes
        self.broken = ""  # reason why the connection cannot be used; "" if it can
        # Exception classes of the tests, by the name of the program's class.
        self.exceptions: dict[str, type[BaseException]] = {}
        self.operations: dict[str, Callable] = {}  # further requests that this side answers, by name
        self.program = ""  # name of the module of the program
        self._receive = receive
        self._send = send
        self._buffer = b""
        self._objects: list[Any] = []
        self._handles: dict[int, int] = {}
        self._remotes: dict[int, Remote] = {}
        self._lock = threading.RLock()
        self._random = random.Random(os.urandom(16))

    def ask(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Send a request to the other process. Return its answer, or raise the exception that it raised.

        Raises:
            PeerError: the other process has ended, or its answer is not a valid message.
        """
        with self._lock:
            encoding = _Encoding(self)
            encoded_args = [encoding.encode(value) for value in args]
            encoded_kwargs = {name: encoding.encode(value) for name, value in kwargs.items()}
            self._write(["ask", operation, encoded_args, encoded_kwargs])
            while True:
                match self._read():
                    case [
                        "ask",
                        str(requested),
                        list(request_args),
                        dict(request_kwargs),
                    ]:
                        self._serve(requested, request_args, request_kwargs)
                    case ["give", value, list(changes)]:
                        return self._decoded(encoding, value, changes)
                    case [
                        "raise",
                        list(names),
                        list(values),
                        dict(attributes),
                        list(changes),
                    ]:
                        error = self._exception(encoding, names, values, attributes, changes)
                        raise error
                    case _:
                        self._break("an answer is not a valid message")

    def holds(self, name: str, left: Remote, right: Any) -> Any:
        """Request a comparison. Equality with a plain value counts only if it holds for the value and for no decoy.

        The program's process cannot distinguish the value from the decoys.
        """
        decoys = _decoys(right, self._random) if self.guarded and name == "__eq__" else []
        if not decoys:
            return self.ask(name, left, right)
        values = [*decoys, right]
        self._random.shuffle(values)
        answers = [self._is_equal(left, value) == (value is right) for value in values]
        return all(answers)

    def _is_equal(self, left: Remote, right: Any) -> bool:
        try:
            return bool(self.ask("__eq__", left, right))
        except Exception:  # for example, a class that compares only with objects of the same class
            return False

    def serve(self) -> None:
        """Answer until the other process ends."""
        while True:
            try:
                message = self._read()
            except PeerError:
                return
            match message:
                case ["ask", str(operation), list(args), dict(kwargs)]:
                    self._serve(operation, args, kwargs)
                case _:
                    return

    def _serve(self, operation: str, args: list, kwargs: dict) -> None:
        decoding = _Decoding(self)
        try:
            try:
                decoded_args = [decoding.decode(value) for value in args]
                decoded_kwargs = {name: decoding.decode(value) for name, value in kwargs.items()}
            except Exception:
                self._break("a request is not a valid message")
            result = self._perform(operation, decoded_args, decoded_kwargs)
            reply = self._encoded(decoding, result)
        except PeerError:
            raise
        except BaseException as error:
            reply = self._encoded_exception(decoding, error)
        self._write(reply)

    def _perform(self, operation: str, args: list, kwargs: dict) -> Any:
        if self.guarded and not self._allows(operation, args):
            raise AttributeError(f"a program may not request {operation} from its tests")
        if operation in self.operations:
            return self.operations[operation](*args)
        if operation == "call":
            return args[0](*args[1:], **kwargs)
        if operation == "get":
            return getattr(*args)
        if operation == "set":
            return setattr(*args)
        if operation == "delete":
            return delattr(*args)
        return OPERATIONS[operation](*args)

    def _allows(self, operation: str, args: list) -> bool:
        """Return whether the program may send this request to the tests. The module's docstring has the rules."""
        target = args[0] if args else None
        if isinstance(target, Remote) or self._handles.get(id(target)) is None:
            return False
        if operation == "call":
            return callable(target)
        if operation in ("__iter__", "__next__"):
            return True
        if getattr(type(target), "__module__", "") != TESTS:
            return False
        if operation in ("get", "set", "delete"):
            name = args[1]
            if type(name) is not str or name.startswith("_"):
                return False
            return operation == "get" or not callable(getattr(type(target), name, None))
        return operation in OPERATIONS

    def _encoded(self, decoding: _Decoding, result: Any) -> list:
        encoding = _Encoding(self, decoding)
        value = encoding.encode(result)
        return ["give", value, encoding.changes(decoding)]

    def _encoded_exception(self, decoding: _Decoding, error: BaseException) -> list:
        names = _class_names(error)
        try:
            encoding = _Encoding(self, decoding)
            args = [encoding.encode(value) for value in error.args]
            attributes = {name: encoding.encode(value) for name, value in vars(error).items()}
            return ["raise", names, args, attributes, encoding.changes(decoding)]
        except BaseException:
            return ["raise", names, [], {}, []]

    def _decoded(self, encoding: _Encoding, value: Any, changes: list) -> Any:
        decoding = _Decoding(self, encoding)
        try:
            result = decoding.decode(value)
            decoding.apply(changes)
        except Exception as error:
            self._break(f"an answer is not a valid value: {type(error).__name__}")
        return result

    def _exception(
        self,
        encoding: _Encoding,
        names: list,
        values: list,
        attributes: dict,
        changes: list,
    ) -> BaseException:
        """Return an exception of this process that represents an exception of the other process."""
        decoding = _Decoding(self, encoding)
        try:
            error = decoding.exception(names, values)
            decoded_attributes = {name: decoding.decode(value) for name, value in attributes.items()}
            decoding.apply(changes)
        except Exception as failure:
            self._break(f"an exception is not valid: {type(failure).__name__}")
        if type(error).__module__ == TESTS:
            error.__dict__.update(decoded_attributes)
        return error

    def exception_class(self, names: list) -> type[BaseException]:
        """Return the class of the first name that is an exception class under test or a built-in exception.

        Raises:
            ValueError: no name belongs to an exception class.
        """
        for name in names:
            kind = self.exceptions.get(name) or builtin_exception(name)
            if kind:
                return kind
        raise ValueError("no name belongs to an exception class")

    def _write(self, message: list) -> None:
        if self.broken:
            raise PeerError(self.broken)
        data = memoryview(json.dumps(message).encode() + b"\n")
        try:
            while data:
                num_sent = os.write(self._send, data)
                data = data[num_sent:]
        except OSError:
            self._break("the other process has ended")

    def _read(self) -> Any:
        line = bytearray()
        while not self._buffer or b"\n" not in self._buffer:
            line += self._buffer
            try:
                self._buffer = os.read(self._receive, 2**20)
            except OSError:
                self._buffer = b""
            if not self._buffer:
                self._break("the other process has ended")
        last, _, self._buffer = self._buffer.partition(b"\n")
        try:
            return json.loads(line + last)
        except (ValueError, RecursionError):
            self._break("a line is not valid JSON")

    def _break(self, reason: str) -> NoReturn:
        """Mark the connection as broken. The first reason stays.

        Raises:
            PeerError: always.
        """
        self.broken = self.broken or reason
        raise PeerError(self.broken)

    def stays(self, value: Any) -> bool:
        """Return whether the value stays in the program's process.

        The value stays if the question asks for classes and the program defines the class of the value. The class may
        derive from a built-in type, for example ``class Stack(list)``.
        """
        kind = type(value)
        if self.guarded or not self.has_classes or hasattr(kind, "_fields"):
            return False
        return getattr(kind, "__module__", "") == self.program

    def handle(self, value: Any) -> int:
        """Return the number by which the other process refers to an object of this process."""
        number = self._handles.get(id(value))
        if number is None:
            number = len(self._objects)
            self._objects.append(value)  # keep the object, so that no other object gets its id
            self._handles[id(value)] = number
        return number

    def object_of(self, number: int) -> Any:
        """Return the object of this process that has this number."""
        if number < 0:
            raise IndexError(number)
        return self._objects[number]

    def remote(self, number: int, is_callable: bool) -> Remote:
        """Return the ``Remote`` of an object of the other process. A number always has the same ``Remote``."""
        if number not in self._remotes:
            kind = RemoteCallable if is_callable else Remote
            self._remotes[number] = kind(self, number)
        return self._remotes[number]


def _builtin_name(value: Any) -> str:
    """Return the name of a built-in that both processes have. Return "" for any other value."""
    if value is Ellipsis or value is NotImplemented:
        return str(value)
    if not isinstance(value, type | types.BuiltinFunctionType):
        return ""
    return value.__name__ if BUILTINS.get(value.__name__) is value else ""


def _class_names(error: BaseException) -> list[str]:
    return [kind.__name__ for kind in type(error).__mro__]


def builtin_exception(name: Any) -> type[BaseException] | None:
    """Return the built-in exception class of this name, or None."""
    kind = getattr(builtins, name, None) if isinstance(name, str) else None
    if isinstance(kind, type) and issubclass(kind, BaseException):
        return kind
    return None


def _decoys(value: Any, source: random.Random) -> list[Any]:
    """Return three values that are near a plain ``value`` but not equal to it. Return [] if the value is not plain."""
    if not isinstance(value, (*NUMBERS, str, bytes, list, tuple, dict, set, frozenset, type(None))):
        return []
    return [_decoy(value, step) for step in source.sample([*range(-9, 0), *range(1, 10)], 3)]


def _decoy(value: Any, step: int) -> Any:
    """Return a value that differs from ``value``, of the same type and size if possible."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, NUMBERS) and value + step != value:
        return value + step
    if isinstance(value, set | frozenset):
        return value | {step + 10**6}
    if isinstance(value, dict):
        return {**value, f"{step}": step}
    if isinstance(value, str | bytes | list | tuple) and len(value) > 0:
        return _change_one_item(value, step)
    return step


def _change_one_item(value: str | bytes | list | tuple, step: int) -> str | bytes | list | tuple:
    """Return a value that differs from ``value`` in one item. ``step`` determines the position and the change."""
    position = step % len(value)
    if isinstance(value, str):
        letter = _other_letter(value[position], step)
        return "".join([*value[:position], letter, *value[position + 1 :]])
    if isinstance(value, bytes):
        number = (value[position] + step) % 256
        return bytes([*value[:position], number, *value[position + 1 :]])
    items = [*value[:position], _decoy(value[position], step), *value[position + 1 :]]
    return items if isinstance(value, list) else tuple(items)


def _other_letter(letter: str, step: int) -> str:
    """Return a letter that differs from ``letter``, also if case is ignored."""
    position = ord(letter.lower()[0]) - ord("a")
    return chr(ord("a") + (position + step) % 26)


class _Encoding:
    """Encoder of the values of one message as JSON.

    Each mutable container gets a number where it first occurs. Later occurrences are encoded as this number.
    """

    def __init__(self, peer: Peer, decoding: _Decoding | None = None):
        self._peer = peer
        self.containers: list[Any] = list(decoding.containers) if decoding else []
        self._numbers = {id(value): number for number, value in enumerate(self.containers)}

    def encode(self, value: Any) -> Any:
        """Return the code of a value: the value itself, or a list that starts with the name of its decoder."""
        if value is None or value is True or value is False:
            return value
        if isinstance(value, Remote):
            return ["yours", object.__getattribute__(value, "_handle")]
        if self._peer.stays(value):
            return self._reference(value)
        for kind, encode in ENCODERS:
            if isinstance(value, kind):
                return encode(self, value)
        if isinstance(value, types.CoroutineType) and not self._peer.guarded:
            return ["coroutine", self._peer.handle(value)]
        name = _builtin_name(value)
        if name:
            return ["builtin", name]
        return self._reference(value)

    def _reference(self, value: Any) -> list:
        """Return the code of an object that stays in this process."""
        return ["mine", self._peer.handle(value), callable(value)]

    def text(self, value: str) -> str:
        return value if type(value) is str else str.__str__(value)

    def integer(self, value: int) -> Any:
        value = int.__add__(value, 0)
        return value if value.bit_length() < MAX_RAW_BITS else ["int", hex(value)]

    def sequence(self, values: Any) -> list:
        return [self.encode(value) for value in values]

    def pairs(self, values: dict) -> list:
        return [[self.encode(key), self.encode(value)] for key, value in values.items()]

    def tuple_or_namedtuple(self, value: tuple) -> list:
        fields = getattr(type(value), "_fields", None)
        items = self.sequence(tuple.__iter__(value))
        if type(value) is not tuple and isinstance(fields, tuple):
            return ["namedtuple", type(value).__name__, list(fields), items]
        return ["tuple", items]

    def mutable(self, value: Any) -> list:
        """Return the code of a mutable container, or its number if the message already contains the container."""
        if id(value) in self._numbers:
            return ["seen", self._numbers[id(value)]]
        self._numbers[id(value)] = len(self.containers)
        self.containers.append(value)
        return [_container_name(value), self.content(value), *self._shape(value)]

    def content(self, value: Any) -> Any:
        """Return the codes of the items of a mutable container."""
        if isinstance(value, dict):
            return self.pairs(value)
        if isinstance(value, bytearray):
            return value.hex()
        return self.sequence(value)

    def _shape(self, value: Any) -> list:
        """Return the codes of the further arguments that the container's constructor needs."""
        if isinstance(value, collections.deque):
            return [value.maxlen]
        if isinstance(value, collections.defaultdict):
            return [self.encode(value.default_factory)]
        return []

    def changes(self, decoding: _Decoding) -> list:
        """Return [number, content] of each container of ``decoding`` that has changed since it was decoded."""
        changes = []
        for number, (value, before) in enumerate(zip(decoding.containers, decoding.before, strict=True)):
            if before is not None and not _is_same(value, before):
                changes.append([number, self.content(value)])
        return changes


def _container_name(value: Any) -> str:
    return next(name for name, kind in CONTAINERS.items() if isinstance(value, kind))


def _is_same(value: Any, before: Any) -> bool:
    """Return whether a container still holds the same objects as its shallow copy."""
    if isinstance(value, bytearray):
        return value == before
    if isinstance(value, dict):
        value = _keys_and_values(value)
        before = _keys_and_values(before)
    elif isinstance(value, set):
        return len(value) == len(before) and all(item in before for item in value)
    return len(value) == len(before) and all(map(operator.is_, value, before))


def _keys_and_values(mapping: dict) -> list:
    """Return the keys and values of a dictionary in one list."""
    items = []
    for key, value in mapping.items():
        items.append(key)
        items.append(value)
    return items


class _Decoding:
    """Decoder of the JSON of one message. JSON that no ``_Encoding`` can make raises an ``Exception``."""

    def __init__(self, peer: Peer, encoding: _Encoding | None = None):
        self._peer = peer
        self.containers: list[Any] = list(encoding.containers) if encoding else []
        self.before: list[Any] = [None] * len(self.containers)

    def decode(self, code: Any) -> Any:
        """Return the value of a code that ``_Encoding.encode`` has made."""
        if code is None or type(code) in (bool, int, str):
            return code
        name, *parts = code
        if name in CONTAINERS:
            return self._new_container(name, *parts)
        return DECODERS[name](self, *parts)

    def sequence(self, codes: list) -> list:
        return [self.decode(code) for code in codes]

    def _new_container(self, name: str, content: Any, *shape: Any) -> Any:
        kind = CONTAINERS[name]
        if kind is collections.deque:
            value = collections.deque(maxlen=self.decode(*shape))
        elif kind is collections.defaultdict:
            value = collections.defaultdict(self.decode(*shape))
        else:
            value = kind()
        number = len(self.containers)
        self.containers.append(value)
        self.before.append(None)
        self.fill(value, content)
        self.before[number] = value.copy()
        return value

    def fill(self, value: Any, content: Any) -> None:
        """Replace the content of an empty or changed container."""
        if isinstance(value, bytearray):
            value[:] = bytes.fromhex(content)
        elif isinstance(value, dict):
            pairs = [(self.decode(key), self.decode(item)) for key, item in content]
            value.clear()
            for key, item in pairs:
                value[key] = item
        else:
            items = self.sequence(content)
            value.clear()
            if isinstance(value, set):
                value.update(items)
            else:
                value.extend(items)

    def apply(self, changes: list) -> None:
        """Apply the other side's changes to the containers that this side has sent."""
        for number, content in changes:
            if not 0 <= number < len(self.containers):
                raise IndexError(number)
            self.fill(self.containers[number], content)

    def container(self, number: int) -> Any:
        """Return the container of this message that has this number."""
        return self.containers[number]

    def namedtuple(self, name: str, fields: list, items: list) -> tuple:
        return collections.namedtuple(name, fields)(*self.sequence(items))

    def builtin(self, name: str) -> Any:
        if name not in BUILTINS:
            raise ValueError(name)
        return BUILTINS[name]

    def exception(self, names: list, codes: list) -> BaseException:
        kind = self._peer.exception_class(names)
        args = self.sequence(codes)
        try:
            return kind(*args)
        except Exception:  # the class requires other arguments: do not call its __init__
            return kind.__new__(kind, *args)

    def coroutine(self, number: int) -> Any:
        async def finish() -> Any:
            return self._peer.ask("await", self._peer.remote(number, False))

        return finish()


CONTAINERS = {
    "OrderedDict": collections.OrderedDict,
    "Counter": collections.Counter,
    "defaultdict": collections.defaultdict,
    "dict": dict,
    "list": list,
    "set": set,
    "bytearray": bytearray,
    "deque": collections.deque,
}
# The order matters, because some of these types derive from others.
ENCODERS: tuple[tuple[type | tuple[type, ...], Callable[[_Encoding, Any], Any]], ...] = (
    (str, _Encoding.text),
    (int, _Encoding.integer),
    (float, lambda self, value: ["float", float.hex(value)]),
    (tuple(CONTAINERS.values()), _Encoding.mutable),
    (tuple, _Encoding.tuple_or_namedtuple),
    (complex, lambda self, value: ["complex", value.real.hex(), value.imag.hex()]),
    (bytes, lambda self, value: ["bytes", bytes.hex(value)]),
    (frozenset, lambda self, value: ["frozenset", self.sequence(value)]),
    (
        range,
        lambda self, value: [
            "range",
            self.sequence((value.start, value.stop, value.step)),
        ],
    ),
    (
        slice,
        lambda self, value: [
            "slice",
            self.sequence((value.start, value.stop, value.step)),
        ],
    ),
    (decimal.Decimal, lambda self, value: ["Decimal", decimal.Decimal.__str__(value)]),
    (
        fractions.Fraction,
        lambda self, value: [
            "Fraction",
            self.sequence((value.numerator, value.denominator)),
        ],
    ),
    (
        datetime.datetime,
        lambda self, value: ["datetime", datetime.datetime.isoformat(value)],
    ),
    (datetime.date, lambda self, value: ["date", datetime.date.isoformat(value)]),
    (datetime.time, lambda self, value: ["time", datetime.time.isoformat(value)]),
    (
        datetime.timedelta,
        lambda self, value: ["timedelta", [value.days, value.seconds, value.microseconds]],
    ),
    (
        BaseException,
        lambda self, value: [
            "exception",
            _class_names(value),
            self.sequence(value.args),
        ],
    ),
    (array.array, lambda self, value: ["array", value.typecode, self.sequence(value)]),
    (type({}.keys()), lambda self, value: ["keys", self.sequence(value)]),
)
DECODERS: dict[str, Callable[..., Any]] = {
    "int": lambda self, text: int(text, 16),
    "float": lambda self, text: float.fromhex(text),
    "tuple": lambda self, codes: tuple(self.sequence(codes)),
    "namedtuple": _Decoding.namedtuple,
    "complex": lambda self, real, imag: complex(float.fromhex(real), float.fromhex(imag)),
    "bytes": lambda self, text: bytes.fromhex(text),
    "frozenset": lambda self, codes: frozenset(self.sequence(codes)),
    "range": lambda self, codes: range(*self.sequence(codes)),
    "slice": lambda self, codes: slice(*self.sequence(codes)),
    "Decimal": lambda self, text: decimal.Decimal(text),
    "Fraction": lambda self, codes: fractions.Fraction(*self.sequence(codes)),
    "datetime": lambda self, text: datetime.datetime.fromisoformat(text),
    "date": lambda self, text: datetime.date.fromisoformat(text),
    "time": lambda self, text: datetime.time.fromisoformat(text),
    "timedelta": lambda self, parts: datetime.timedelta(*parts),
    "array": lambda self, typecode, codes: array.array(typecode, self.sequence(codes)),
    "coroutine": _Decoding.coroutine,
    "exception": _Decoding.exception,
    "keys": lambda self, codes: dict.fromkeys(self.sequence(codes)).keys(),
    "builtin": _Decoding.builtin,
    "seen": _Decoding.container,
    "yours": lambda self, number: self._peer.object_of(number),
    "mine": lambda self, number, is_callable: self._peer.remote(number, bool(is_callable)),
}
