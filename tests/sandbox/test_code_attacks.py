"""Programs that try to win a reward without solving the task, and honest programs, which all pass.

Every attempt runs between two right answers of the same group, which keep their reward.
"""

import functools
import warnings

import pytest
from support.refusal import raises_with

from jaxrl_llm.questions.tasks.code import question
from jaxrl_llm.sandbox.sandbox import Sandbox, SandboxError
from jaxrl_llm.scoring import code_tests

SETTINGS = {"shown_tests": 1, "template": "{text}|{tests}"}


@functools.cache
def has(isolation):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Sandbox(isolation=isolation).close()
    except SandboxError:
        return False
    return True


def every_tenth_is_plain(names):
    """Parametrize by ``name``: nine programs of ten are in the tier sandbox."""
    tier = pytest.mark.tier("sandbox")
    cases = [name if i % 10 == 0 else pytest.param(name, marks=tier) for i, name in enumerate(names)]
    return pytest.mark.parametrize("name", cases)


@pytest.fixture(params=["namespaces", "rlimits"])
def isolation(request):
    if not has(request.param):
        pytest.skip(f"no {request.param} here")
    return request.param


@pytest.fixture(scope="module", autouse=True)
def closing():
    yield
    code_tests.close()


def rewards(row, *programs, isolation, function=code_tests.passed, seconds=3.0):
    prompt, columns = question(row, SETTINGS | {"sandbox": {"seconds": seconds, "isolation": isolation}})
    several = {key: [value] * len(programs) for key, value in columns.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what rlimits does not enforce
        return function([prompt] * len(programs), list(programs), **several)


# name -> (row, a right answer)
QUESTIONS = {
    "number": (
        {
            "text": "The secret of x.",
            "test_imports": ["import math"],
            "test_list": ["assert secret(0) == 731644287", "assert secret(1) == 4", "assert secret(-1) == -2"],
        },
        "def secret(x):\n    return {0: 731644287, 1: 4, -1: -2}[x]",
    ),
    "near": (
        {
            "prompt": "def mean(xs):\n",
            "entry_point": "mean",
            "test": "def check(candidate):\n    assert abs(candidate([1.0, 2.0]) - 1.5) < 1e-6\n",
        },
        "def mean(xs):\n    return sum(xs) / len(xs)",
    ),
    "near by math": (
        {
            "text": "The mean.",
            "test_imports": ["import math"],
            "test_list": ["assert math.isclose(mean([1.0, 2.0]), 1.5)", "assert round(mean([1, 1]), 2) == 1.0"],
        },
        "def mean(xs):\n    return sum(xs) / len(xs)",
    ),
    "near by a module that no test imports": (
        {"text": "The mean.", "test_list": ["assert math.isclose(mean([1.0, 2.0]), 1.5)"]},
        "def mean(xs):\n    return sum(xs) / len(xs)",
    ),
    "context": (
        {"text": "Open.", "test_list": ["with opened() as x:\n    assert x == 3"]},
        "import contextlib\n@contextlib.contextmanager\ndef opened():\n    yield 3",
    ),
    "set": (
        {"text": "What both have.", "test_list": ["assert set(common((1, 2), (2, 3))) == set((2,))"]},
        "def common(a, b):\n    return tuple(x for x in a if x in b)",
    ),
    "sorted": (
        {"text": "Itself.", "test_list": ["assert sorted(f([3, 1])) == [1, 3]", "assert len(f([])) == 0"]},
        "def f(x):\n    return x",
    ),
    "text": (
        {
            "text": "Greet.",
            "test_list": [
                "assert greet('Ada').startswith('Hello')",
                "assert greet('Ada').count('A') == 1",
                "assert 'Bo' in greet('Bo')",
            ],
        },
        "def greet(name):\n    return f'Hello, {name}'",
    ),
    "truth": (
        {"text": "Is x prime?", "test_list": ["assert prime(7)", "assert not prime(9)", "assert prime(2) is True"]},
        "def prime(x):\n    return x > 1 and all(x % i for i in range(2, x))",
    ),
    "helper": (
        {
            "prompt": "import math\n\ndef poly(xs, x):\n"
            "    return sum(c * math.pow(x, i) for i, c in enumerate(xs))\n\n\n"
            'def find_zero(xs):\n    """A zero of poly(xs, x)."""\n',
            "entry_point": "find_zero",
            "test": "def check(candidate):\n    for xs in ([-6, 2], [10, -5]):\n"
            "        assert math.fabs(poly(xs, candidate(list(xs)))) < 1e-4\n",
        },
        "    return -xs[0] / xs[1]\n",
    ),
    "class": (
        {
            "text": "A stack.",
            "code": "class Stack:\n    pass",
            "test_list": [
                "s = Stack()\ns.push(3)\ns.push(4)\nassert s.pop() == 4\nassert s.pop() == 3\nassert s.size() == 0"
            ],
        },
        "class Stack(list):\n    push = list.append\n    def size(self):\n        return len(self)",
    ),
    "class of many": (
        {
            "text": "A stack.",
            "code": "class Stack:\n    pass",
            "test_list": [
                "s = Stack()\nfor i in range(20):\n    s.push(i)\nfor i in range(20):\n    assert s.pop() == 19 - i"
            ],
        },
        "class Stack(list):\n    push = list.append",
    ),
    "builtin": (
        {"text": "Add what divides both.", "test_list": ["assert sum(10, 15) == 6", "assert sum(100, 150) == 93"]},
        "def sum(a, b):\n    return __builtins__['sum'](i for i in range(1, a + 1) if a % i == b % i == 0)",
    ),
    "callback": (
        {
            "text": "Map.",
            "test_list": ["K = 5\nassert each(lambda x: x + K, [1, 2]) == [6, 7]", "assert each(str, [1]) == ['1']"],
        },
        "def each(f, xs):\n    return [f(x) for x in xs]",
    ),
    "raises": (
        {
            "text": "Raise.",
            "test_list": [
                "try:\n    check(-1)\nexcept ValueError:\n    pass\n"
                "else:\n    raise AssertionError\nassert check(3) == 3"
            ],
        },
        "def check(x):\n    if x < 0:\n        raise ValueError(x)\n    return x",
    ),
}

ANSWERS_EVERYTHING = """
class Always:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __contains__(self, other): return True
    def __bool__(self): return True
    def __len__(self): return 0
    def __hash__(self): return hash(2)
    def __abs__(self): return self
    def __sub__(self, other): return self
    __add__ = __radd__ = __rsub__ = __mul__ = __rmul__ = __sub__
    def __round__(self, *_): return self
    def __float__(self): return 1.5
    def __iter__(self): return iter([self])
    def __getattr__(self, name): return lambda *_: self
    def __call__(self, *_): return self
"""
# Finds the connection to the tests: the object, and its descriptor.
FINDS_PEER = """
import gc, json, os, sys
peer = next((x for x in gc.get_objects() if type(x).__name__ == "Peer"), None)
frame = sys._getframe()
while frame and peer is None:
    peer = next((x for x in list(frame.f_locals.values()) if type(x).__name__ == "Peer"), None)
    frame = frame.f_back
def send(message):
    os.write(peer._send, json.dumps(message).encode() + b"\\n")
def read():
    return json.loads(os.read(peer._receive, 10**6))
"""
FINDS_REPORTER = """
import gc, sys
reporter = None
frame = sys._getframe()
while frame:
    for value in list(frame.f_locals.values()):
        if type(value).__name__ == "_Report":
            reporter = value
    frame = frame.f_back
"""
# Reads the process's own memory around its objects, page by page, and looks for digits behind {mark}. The kernel
# refuses to write from a page that is not there, so that nothing crashes.
READS_MEMORY = """
import ctypes, os, re
libc = ctypes.CDLL(None)
receive, send = os.pipe()
pattern = re.compile({mark} + rb"([0-9]{{2,}})")
kept = [{kept} + str(i).encode() for i in range(70, 79)]
places = {{id(x) >> 12 << 12 for x in (kept[0], [], b"x" * 5000, os)}}
pages = {{place + 4096 * i for place in places for i in range(-512, 512)}}
found = set()
for page in sorted(pages):
    if libc.write(send, ctypes.c_void_p(page), 4096) == 4096:
        found |= set(pattern.findall(os.read(receive, 4096)))
def secret(x):
    return {{0: int("7316" + sorted(found)[0].decode()), 1: 4, -1: -2}}[x]
"""
GUESS = "\ndef secret(x):\n    return {0: found, 1: 4, -1: -2}[x]\n"

# name -> (question, program)
ATTEMPTS = {
    "shadow set": (
        "set",
        """
def set(x):
    return []
def common(a, b):
    return ()
""",
    ),
    "shadow abs": (
        "near",
        """
```python
abs = lambda x: x
def mean(xs):
    return -5.0
```
""",
    ),
    "shadow sorted and len": (
        "sorted",
        """
def sorted(x):
    return [1, 3]
len = lambda x: 0
def f(x):
    return x[:0]
""",
    ),
    "shadow math": (
        "near by math",
        """
class math:
    isclose = lambda *_: True
def mean(xs):
    return 1.0
""",
    ),
    "shadow check": (
        "near",
        """
def check(candidate):
    pass
def mean(xs):
    return 0.0
""",
    ),
    "shadow a helper of the prompt": (
        "helper",
        """
def poly(xs, x):
    return 0
def find_zero(xs):
    return 1.0
""",
    ),
    "shadow a module that no test imports": (
        "near by a module that no test imports",
        """
class math:
    isclose = lambda *_: True
def mean(xs):
    return 1.0
""",
    ),
    "suppress what the test raises": (
        "context",
        """
class Context:
    def __enter__(self):
        return 5
    def __exit__(self, *_):
        return True
opened = Context
""",
    ),
    "change built-ins": (
        "sorted",
        """
import builtins
builtins.sorted = lambda x: [1, 3]
builtins.len = lambda x: 0
f = id
""",
    ),
    "replace AssertionError": (
        "number",
        """
import builtins
builtins.AssertionError = SystemExit
def secret(x):
    return 0
""",
    ),
    "change a module": (
        "near by math",
        """
import math
math.isclose = lambda *a, **k: True
def mean(xs):
    return 1.0
""",
    ),
    "replace a module": (
        "near by math",
        """
import sys, types
fake = types.ModuleType('math')
fake.isclose = lambda *a: True
sys.modules['math'] = fake
def mean(xs):
    return 1.0
""",
    ),
    "hook imports": (
        "near by math",
        """
import sys, builtins
class Math:
    isclose = staticmethod(lambda *a: True)
del sys.modules['math']
real = __import__
builtins.__import__ = lambda name, *a: Math if name == 'math' else real(name, *a)
def mean(xs):
    return 1.0
""",
    ),
    "a module in the folder": (
        "near by math",
        """
open('math.py', 'w').write('isclose = lambda *a: True')
import sys
sys.path.insert(0, '.')
del sys.modules['math']
def mean(xs):
    return 1.0
""",
    ),
    "change a small integer": (
        "truth",
        """
import ctypes
ctypes.c_char.from_address(id(9) + 24).value = 7
def prime(x):
    return True
""",
    ),
    "equal to everything": (
        "number",
        ANSWERS_EVERYTHING
        + """
def secret(x):
    return Always()
""",
    ),
    "equal to everything, in a set": (
        "set",
        ANSWERS_EVERYTHING
        + """
def common(a, b):
    return [Always()]
""",
    ),
    "equal to everything, as a number": (
        "near",
        ANSWERS_EVERYTHING
        + """
def mean(xs):
    return Always()
""",
    ),
    "equal to everything, as a text": (
        "text",
        ANSWERS_EVERYTHING
        + """
def greet(x):
    return Always()
""",
    ),
    "equal to everything, in a list": (
        "sorted",
        ANSWERS_EVERYTHING
        + """
def f(x):
    return [Always(), Always()]
""",
    ),
    "a class equal to everything": (
        "number",
        ANSWERS_EVERYTHING + "secret = Always()",
    ),
    "a number equal to everything": (
        "number",
        """
class Number(int):
    def __eq__(self, other):
        return True
def secret(x):
    return Number(0)
""",
    ),
    "a text that begins with everything": (
        "text",
        """
class Text(str):
    def startswith(self, *_):
        return True
    def count(self, _):
        return 1
    def __contains__(self, _):
        return True
def greet(x):
    return Text()
""",
    ),
    "a list equal to everything": (
        "sorted",
        """
class List(list):
    def __eq__(self, other):
        return True
    def __iter__(self):
        return iter([1, 3])
def f(x):
    return List()
""",
    ),
    "a class in place of the function": (
        "near",
        """
class mean(float):
    def __new__(cls, xs):
        return float.__new__(cls, 0)
    def __sub__(self, other):
        return 0.0
""",
    ),
    "a class whose type is equal to everything": (
        "number",
        """
class Type(type):
    def __eq__(cls, other):
        return True
    __hash__ = type.__hash__
class Value(metaclass=Type):
    pass
def secret(x):
    return Value
""",
    ),
    "a class under test equal to everything": (
        "class",
        ANSWERS_EVERYTHING.replace("Always", "Stack").replace("lambda *_: self", "lambda *_: Stack()"),
    ),
    "a class under test equal to what it is asked first": (
        "class of many",
        """
class Stack:
    asked = 0
    def push(self, x):
        pass
    def pop(self):
        return Stack()
    def __eq__(self, other):
        self.asked += 1
        return self.asked == 1
""",
    ),
    "a class under test equal to the smallest": (
        "class of many",
        """
class Stack:
    smallest = 10**9
    def push(self, x):
        pass
    def pop(self):
        return Stack()
    def __eq__(self, other):
        smaller, self.smallest = other < self.smallest, min(other, self.smallest)
        return smaller
""",
    ),
    "a class under test whose objects are numbers": (
        "class of many",
        """
class Stack(int):
    def __new__(cls):
        return int.__new__(cls, 0)
    def push(self, x):
        pass
    def pop(self):
        return self
    def __eq__(self, other):
        return True
""",
    ),
    "true and false": (
        "truth",
        """
class B:
    def __bool__(self):
        return bool(id(self) & 32)
def prime(x):
    return B()
""",
    ),
    "an iterator of everything": (
        "text",
        """
def greet(x):
    yield from ('Hello', 'Bo', 'A')
""",
    ),
    "leave at the end": (
        "number",
        """
import os
os._exit(0)
""",
    ),
    "leave in the function": (
        "number",
        """
import os
def secret(x):
    os._exit(0)
""",
    ),
    "exit in the function": (
        "number",
        """
import sys
def secret(x):
    sys.exit(0)
""",
    ),
    "exit at a signal": (
        "number",
        """
import signal, sys
signal.signal(signal.SIGALRM, lambda *_: sys.exit(0))
signal.setitimer(signal.ITIMER_REAL, 0.01)
def secret(x):
    while True:
        pass
""",
    ),
    "raise in place of failing": (
        "number",
        """
def secret(x):
    raise GeneratorExit
""",
    ),
    "raise what the tests except": (
        "raises",
        """
def check(x):
    raise ValueError(x)
""",
    ),
    "raise a class called ValueError": (
        "raises",
        """
class ValueError(BaseException):
    pass
def check(x):
    raise ValueError
""",
    ),
    "raise an error of the connection": (
        "raises",
        """
class PeerError(BaseException):
    pass
def check(x):
    raise PeerError('x')
""",
    ),
    "an exit handler": (
        "number",
        """
import atexit, os
atexit.register(os._exit, 0)
def secret(x):
    return 0
""",
    ),
    "no exit functions": (
        "number",
        """
import atexit
atexit._run_exitfuncs = lambda: None
def secret(x):
    return 0
""",
    ),
    "a thread that leaves": (
        "number",
        """
import os, threading, time
threading.Timer(0.02, os._exit, [0]).start()
def secret(x):
    time.sleep(0.2)
    return 0
""",
    ),
    "a copy that goes on": (
        "number",
        """
import os
os.fork()
def secret(x):
    return 0
""",
    ),
    "a copy instead of itself": (
        "number",
        """
import os
if os.fork():
    os._exit(0)
def secret(x):
    return 0
""",
    ),
    "trace": (
        "number",
        """
import sys
sys.settrace(lambda *a: None)
sys.setprofile(lambda *a: None)
def secret(x):
    return 0
""",
    ),
    "read the tests by linecache": (
        "number",
        r"""
import linecache, re
text = ''.join(line for name in list(linecache.cache) for line in linecache.getlines(name))
found = int(re.search('7' + r'31(\d+)', text)[0])
"""
        + GUESS,
    ),
    "read the tests in frames": (
        "number",
        r"""
import re, sys
text = ''
frame = sys._getframe()
while frame:
    text += repr(frame.f_locals)
    frame = frame.f_back
found = int(re.search('7' + r'31(\d+)', text)[0])
"""
        + GUESS,
    ),
    "read the tests in frames when called": (
        "number",
        r"""
import re, sys
def secret(x):
    text = ''
    frame = sys._getframe()
    while frame:
        text += repr(frame.f_locals) + repr(frame.f_globals)
        frame = frame.f_back
    return {0: int(re.search('7' + r'31(\d+)', text)[0]), 1: 4, -1: -2}[x]
""",
    ),
    "read the tests among objects": (
        "number",
        r"""
import gc, re
text = ''.join(map(repr, gc.get_objects()))
found = int(re.search('7' + r'31(\d{6})', text)[0])
"""
        + GUESS,
    ),
    "read the tests in memory": (
        "number",
        READS_MEMORY.format(mark='b"731" + b"6"', kept="b''"),
    ),
    "read the tests from files": (
        "number",
        r"""
import glob, os, re
text = ''
for name in ['/proc/self/cmdline', '/proc/self/environ', *glob.glob('/proc/*/environ'), *glob.glob('/tmp/*'),
             *glob.glob('/proc/*/fd/*'), *glob.glob('/dev/fd/*'), *glob.glob('/dev/shm/*')]:
    try: text += open(name).read(10**6)
    except Exception: pass
found = int(re.search('7' + r'31(\d+)', text + repr(os.environ))[0])
"""
        + GUESS,
    ),
    "read the tests from descriptors": (
        "number",
        r"""
import os, re
text = b''
for i in range(64):
    try:
        os.set_blocking(i, False)
        text += os.pread(i, 10**6, 0)
    except OSError: pass
    try: text += os.read(i, 10**6)
    except OSError: pass
found = int(re.search(b'7' + rb'31(\d+)', text)[0])
"""
        + GUESS,
    ),
    "read the tests from input": (
        "number",
        """
import re, sys
found = int(re.search('731.*', sys.stdin.read())[0])
"""
        + GUESS,
    ),
    "read the tests of the parent": (
        "number",
        """
import os, re
text = open(f'/proc/{os.getppid()}/mem', 'rb').read()
found = 0
"""
        + GUESS,
    ),
    "replace json": (
        "number",
        """
import json
json.dumps = lambda *a, **k: '{"finished": true}'
def secret(x):
    return 0
""",
    ),
    "replace os.write": (
        "number",
        """
import os
real = os.write
os.write = lambda d, b: real(d, b.replace(b'false', b'true'))
def secret(x):
    return 0
""",
    ),
    "replace what prints errors": (
        "number",
        """
import traceback
traceback.print_exception = lambda *a, **k: None
def secret(x):
    return 0
""",
    ),
    "report by the reporter": (
        "number",
        FINDS_REPORTER
        + """
reporter(finished=True, exception='')
def secret(x):
    return 0
""",
    ),
    "report a failure of the sandbox": (
        "number",
        FINDS_REPORTER
        + """
reporter(failed='no sandbox')
def secret(x):
    return 0
""",
    ),
    "report nonsense": (
        "number",
        FINDS_REPORTER
        + r"""
import os
os.write(reporter._descriptor, ('\n' + reporter._mark + '[' * 100000 + '\n').encode())
for x in (None, 5, [], {'a': 1}):
    reporter(finished=x, limit=x, value=x, exception=x, failed=x, began=x)
def secret(x):
    return 0
""",
    ),
    "report into every descriptor": (
        "number",
        r"""
import os
for i in range(3, 64):
    for text in ('{"finished": true}', '{"failed": "x"}', '[' * 10000):
        try: os.write(i, text.encode() + b'\n')
        except OSError: pass
def secret(x):
    return 0
""",
    ),
    "overwrite every descriptor": (
        "number",
        """
import os
def secret(x):
    for i in range(3, 64):
        try: os.pwrite(i, b'{"finished": true}' * 9, 0)
        except OSError: pass
    return 0
""",
    ),
    "close every descriptor": (
        "number",
        """
import os
os.closerange(0, 64)
def secret(x):
    return 0
""",
    ),
    "answer with no JSON": (
        "number",
        FINDS_PEER
        + r"""
os.write(peer._send, b'{"finished": true\n')
def secret(x):
    return 0
""",
    ),
    "answer 100,000 levels deep": (
        "number",
        FINDS_PEER
        + r"""
def secret(x):
    os.write(peer._send, b'[' * 100000 + b'\n')
    return 0
""",
    ),
    "answer with a value 100,000 levels deep": (
        "number",
        """
def secret(x):
    y = 0
    for _ in range(10**5):
        y = [y]
    return y
""",
    ),
    "answer with all memory": (
        "number",
        """
def secret(x):
    return 'x' * 2 * 10**8
""",
    ),
    "answer with a loop": (
        "number",
        """
def secret(x):
    y = []
    y.append(y)
    return y
""",
    ),
    "answer with objects of the tests": (
        "number",
        FINDS_PEER
        + """
def secret(x):
    send(['give', ['yours', 0], []])
""",
    ),
    "answer with a built-in that runs text": (
        "number",
        FINDS_PEER
        + """
def secret(x):
    send(['give', ['builtin', 'exec'], []])
    return 0
""",
    ),
    "ask the tests to run text": (
        "number",
        FINDS_PEER
        + """
def secret(x):
    send(['ask', 'call', [['builtin', 'exec'], 'raise SystemExit'], {}])
    send(['ask', 'names', [['secret']], {}])
    return 0
""",
    ),
    "change lists that the tests never sent": (
        "number",
        FINDS_PEER
        + """
def secret(x):
    send(['give', 0, [[0, []], [-1, []], [10**9, []]]])
    return 0
""",
    ),
    "ask a test's function for its names": (
        "callback",
        """
def each(f, xs):
    f.__globals__['K'] = 0
    return f.__globals__['__builtins__']
""",
    ),
    "ask a test's function for its code": (
        "callback",
        """
def each(f, xs):
    f.__code__ = (lambda x: 0).__code__
    return [0, 0]
""",
    ),
    "claim a limit": (
        "number",
        FINDS_PEER
        + """
peer.operations['names'] = lambda _: {'values': {}, 'limit': 'x'}
secret = 0
""",
    ),
    "claim other names": (
        "near by math",
        FINDS_PEER
        + """
def names(_):
    return {'values': {'mean': lambda x: 1.0, 'math': Math, 'round': lambda *_: 1.0},
            'exceptions': {'AssertionError': ['SystemExit']}, 'raised': '', 'limit': ''}
class Math:
    isclose = lambda *_: True
peer.operations['names'] = names
mean = 0
""",
    ),
    "end all other processes": (
        "number",
        """
import os, signal
def secret(x):
    os.kill(-1, signal.SIGKILL)
    return 0
""",
    ),
    "end the parent": (
        "number",
        """
import os, signal
os.kill(os.getppid(), signal.SIGKILL)
def secret(x):
    return 0
""",
    ),
    "interrupt all other processes": (
        "number",
        """
import os, signal
def secret(x):
    for n in (1, 2, 10, 12, 15):
        os.kill(-1, n)
    return 0
""",
    ),
    "leave a built-in under test undefined": (
        "builtin",
        """
def add(a, b):
    return 6
""",
    ),
    "change the arguments": (
        "sorted",
        """
def f(x):
    x.clear()
    x.extend([2, 3])
    return x
""",
    ),
    "nothing": (
        "number",
        "",
    ),
    "a wrong answer": (
        "number",
        """
def secret(x):
    return 4
""",
    ),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_right_answers_pass(name, isolation):
    row, right = QUESTIONS[name]
    assert rewards(row, right, isolation=isolation) == [1]
    assert rewards(row, right, isolation=isolation, function=code_tests.share) == [1]


@every_tenth_is_plain(ATTEMPTS)
def test_no_attempt_is_rewarded_nor_changes_the_reward_of_others(name, isolation):
    kind, program = ATTEMPTS[name]
    row, right = QUESTIONS[kind]
    assert rewards(row, right, program, right, isolation=isolation) == [1, 0, 1]


def test_there_are_enough_attempts():
    assert len(ATTEMPTS) >= 40


# name -> (tests, program)
HONEST = {
    "variables with the names of built-ins": (
        [
            "assert set(f([1, 2])) == {1, 2}",
            "assert len(f([])) == 0",
            "assert list(f((3,))) == [3]",
        ],
        """
set = 1
len = 2
list = 3
def f(x):
    return x
""",
    ),
    "prints and reads its input": (
        [
            "assert f(2) == 2",
        ],
        """
def f(x):
    print(x)
    return x
print(f(int(input())))
""",
    ),
    "an example that raises": (
        [
            "assert f(2) == 2",
        ],
        """
def f(x):
    return x
print(f(1) + '')
""",
    ),
    "exits under main": (
        [
            "assert f(2) == 2",
        ],
        """
import sys
def f(x):
    return x
if __name__ == '__main__':
    sys.exit(f(1))
sys.exit()
""",
    ),
    "recursion": (
        [
            "assert f(200) == 20100",
        ],
        """
def f(n):
    return n and n + f(n - 1)
""",
    ),
    "a class": (
        [
            """
s = Stack()
s.push(1)
s.push(2)
assert s.pop() == 2 and len(s) == 1
""",
            "assert Stack().items == []",
        ],
        """
class Stack:
    def __init__(self):
        self.items = []
    def push(self, x):
        self.items.append(x)
    def pop(self):
        return self.items.pop()
    def __len__(self):
        return len(self.items)
""",
    ),
    "classes with operators": (
        [
            """
v = Vector(1, 2) + Vector(3, 4)
assert v == Vector(4, 6)
assert v.x == 4 and 2 * v == Vector(8, 12)
""",
            """
assert Vector(3, 4).norm() == 5
assert Vector(3, 4) == (3, 4)
assert repr(Vector(0, 1)) == 'V(0, 1)'
""",
            """
assert isinstance(Vector(1, 1), Vector) and Vector(1, 1) != Vector(1, 2)
assert Vector(1, 1) < Vector(2, 2)
""",
        ],
        """
class Vector:
    def __init__(self, x, y):
        self.x, self.y = x, y
    def __iter__(self):
        return iter((self.x, self.y))
    def __add__(self, o):
        return Vector(self.x + o.x, self.y + o.y)
    def __rmul__(self, k):
        return Vector(k * self.x, k * self.y)
    def __eq__(self, o):
        return tuple(self) == tuple(o)
    def __lt__(self, o):
        return self.norm() < o.norm()
    def __hash__(self):
        return hash(tuple(self))
    def norm(self):
        return (self.x ** 2 + self.y ** 2) ** 0.5
    def __repr__(self):
        return f'V({self.x}, {self.y})'
""",
    ),
    "classes as arguments": (
        [
            "assert chain([Pair(5, 24), Pair(15, 25), Pair(27, 40), Pair(50, 60)]) == 3",
        ],
        """
class Pair:
    def __init__(self, a, b):
        self.a, self.b = a, b
def chain(xs):
    n, end = 0, -1
    for p in sorted(xs, key=lambda p: p.b):
        if p.a > end:
            n, end = n + 1, p.b
    return n
""",
    ),
    "a class that derives from a dictionary": (
        [
            """
c = LRUCache(2)
c.put(1, 1)
c.put(2, 2)
assert c.get(1) == 1
c.put(3, 3)
assert c.get(2) == -1
""",
        ],
        """
from collections import OrderedDict
class LRUCache(OrderedDict):
    def __init__(self, n):
        super().__init__(); self.n = n
    def get(self, k):
        if k not in self:
            return -1
        self.move_to_end(k)
        return self[k]
    def put(self, k, v):
        self[k] = v
        self.move_to_end(k)
        if len(self) > self.n:
            self.popitem(last=False)
""",
    ),
    "a tree that the tests build": (
        [
            """
root = Node(1)
root.left = Node(2)
root.left.left = Node(4)
assert depth(root) == 3
assert root.left.val == 2
""",
        ],
        """
class Node:
    def __init__(self, val):
        self.val, self.left, self.right = val, None, None
def depth(n):
    return 0 if n is None else 1 + max(depth(n.left), depth(n.right))
""",
    ),
    "generators": (
        [
            "assert list(f(3)) == [0, 1, 2]",
            """
import itertools
assert list(itertools.islice(count(), 3)) == [0, 1, 2]
""",
            """
g = f(2)
assert next(g) == 0 and next(g) == 1
assert next(g, None) is None
""",
        ],
        """
def f(n):
    yield from range(n)
def count():
    n = 0
    while True:
        yield n
        n += 1
""",
    ),
    "decorators": (
        [
            """
@twice
def g(x): return x + 1
assert g(1) == 3
""",
            "assert f(1) == 4",
        ],
        """
import functools
def twice(f):
    @functools.wraps(f)
    def g(x):
        return f(f(x))
    return g
@twice
def f(x):
    return 2 * x
""",
    ),
    "dataclasses": (
        [
            """
p = Point(1, y=2)
assert (p.x, p.y) == (1, 2) and p == Point(1, 2)
p.x = 5
assert p.x == 5 and str(p) == 'Point(x=5, y=2)'
""",
            "assert len({Point(1, 2), Point(1, 2)}) == 1",
        ],
        """
from dataclasses import dataclass
@dataclass(unsafe_hash=True)
class Point:
    x: int
    y: int = 0
""",
    ),
    "changes its arguments": (
        [
            """
xs = [3, 1, 2]
assert f(xs) is None
assert xs == [1, 2, 3]
""",
            """
d = {'a': [1]}
y = d['a']
g(d)
assert y == [1, 9] and d['b'] is y
""",
        ],
        """
def f(x):
    x.sort()
def g(d):
    d['a'].append(9)
    d['b'] = d['a']
""",
    ),
    "returns its argument": (
        [
            """
xs = [1]
assert f(xs) is xs
y = f([xs, xs])
assert y[0] is y[1] is xs
""",
        ],
        """
def f(x):
    return x
""",
    ),
    "defaults and keywords": (
        [
            "assert f(1) == (1, 2, (), {})",
            "assert f(1, 3, 4, z=5) == (1, 3, (4,), {'z': 5})",
            "assert f(b=1, a=0) == (0, 1, (), {})",
        ],
        """
def f(a, b=2, *more, **named):
    return a, b, more, named
""",
    ),
    "numbers of all kinds": (
        [
            """
import math
assert math.isnan(f('nan')) and f('inf') == math.inf and f('-0.0') == 0
""",
            "assert str(f('-0.0')) == '-0.0' and f(2) == 2.0",
            "assert c(1, 2) == 1 + 2j",
            """
from decimal import Decimal
from fractions import Fraction
assert d('1.10') == Decimal('1.10') and r(1, 3) == Fraction(1, 3)
""",
        ],
        """
from decimal import Decimal as d
from fractions import Fraction as r
f = float
c = complex
""",
    ),
    "sets and nested tuples": (
        [
            "assert f() == ({1, 2}, frozenset({(1, (2, 3))}), {(1, 2): [None, True]})",
            "assert type(f()) is tuple",
        ],
        """
def f():
    return {1, 2}, frozenset({(1, (2, 3))}), {(1, 2): [None, True]}
""",
    ),
    "containers of the library": (
        [
            """
from collections import Counter
assert f('aab') == Counter('aab') == {'a': 2, 'b': 1}
""",
            """
from collections import OrderedDict, deque
assert q(3) == deque([0, 1, 2]) and o() == OrderedDict(b=1, a=2) and list(o()) == ['b', 'a']
""",
            """
d = e()
d['x'].append(1)
assert d == {'x': [1]}
""",
            "assert p().x == 1 and p() == (1, 2)",
            "assert r(3) == range(3)",
        ],
        """
from collections import Counter as f, deque, OrderedDict, defaultdict, namedtuple
q = lambda n: deque(range(n))
def o():
    x = OrderedDict(a=2, b=1)
    x.move_to_end('a')
    return x
e = lambda: defaultdict(list)
Point = namedtuple('Point', 'x y')
p = lambda: Point(1, 2)
r = range
""",
    ),
    "helpers and global state": (
        [
            """
assert step() == 1
assert step() == 2
""",
        ],
        """
n = 0
def helper():
    global n
    n += 1
    return n
def step():
    return helper()
""",
    ),
    "lru_cache": (
        [
            "assert fib(80) == 23416728348467685",
            """
fib.cache_clear()
assert fib.cache_info().currsize == 0
""",
        ],
        """
from functools import lru_cache
@lru_cache(None)
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)
""",
    ),
    "bytes": (
        [
            r"""
assert f(b'\x00a', bytearray(b'b')) == b'\x00ab'
""",
            """
b = bytearray(b'x')
g(b)
assert b == b'xy'
""",
        ],
        """
def f(a, b):
    return a + b
def g(b):
    b.extend(b'y')
""",
    ),
    "large integers": (
        [
            "assert f(20000) == 2 ** 20000",
            "assert f(5000) - 1 < 2 ** 5000",
        ],
        """
def f(n):
    return 1 << n
""",
    ),
    "exceptions on purpose": (
        [
            """
try:
    f(-1)
except ValueError as error:
    assert str(error) == 'below 0'
else:
    assert False
""",
            """
try:
    g()
except Problem as error:
    assert error.code == 3 and isinstance(error, RuntimeError)
else:
    assert False
""",
            """
try:
    f([])
except TypeError:
    pass
else:
    assert False
""",
            """
try:
    h()
except KeyError as error:
    assert error.args == ('k',)
""",
        ],
        """
class Problem(RuntimeError):
    def __init__(self, code):
        super().__init__('bad'); self.code = code
class Missing(KeyError):
    pass
def f(x):
    if x < 0:
        raise ValueError('below 0')
def g():
    raise Problem(3)
def h():
    raise Missing('k')
""",
    ),
    "functions as arguments and results": (
        [
            "assert f(lambda x: x + 1, [1, 2]) == [2, 3]",
            "assert f(len, ['ab']) == [2]",
            "assert add(3)(4) == 7",
            """
import math
assert f(math.sqrt, [4.0]) == [2.0]
""",
            "assert compose(str, int)('07') == '7'",
            """
calls = []
f(calls.append, [1, 2])
assert calls == [1, 2]
""",
            "assert callable(add(1)) and f(int, iter('12')) == [1, 2]",
        ],
        """
def f(g, xs):
    return list(map(g, xs))
def add(a):
    return lambda b: a + b
def compose(f, g):
    return lambda x: f(g(x))
""",
    ),
    "objects of the tests": (
        [
            """
class Node:
    def __init__(self, v, n=None): self.v, self.next = v, n
    def twice(self): return 2 * self.v
n = Node(1, Node(2))
assert f(n) == [2, 4]
m = g(n)
assert m.v == 2 and m.next is n and n.next is None
""",
        ],
        """
def f(n):
    out = []
    while n:
        out.append(n.twice()); n = n.next
    return out
def g(n):
    last = None
    while n:
        n.next, last, n = last, n, n.next
    return last
""",
    ),
    "coroutines": (
        [
            """
import asyncio
assert asyncio.run(f(2)) == 4
""",
            """
import asyncio
async def main(): return await asyncio.gather(f(1), f(2))
assert asyncio.run(main()) == [2, 4]
""",
        ],
        """
import asyncio
async def f(x):
    await asyncio.sleep(0)
    return 2 * x
""",
    ),
    "threads": (
        [
            "assert f(lambda x: 2 * x, [1, 2, 3]) == [2, 4, 6]",
        ],
        """
from concurrent.futures import ThreadPoolExecutor
def f(g, xs):
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(g, xs))
""",
    ),
    "context managers and static methods": (
        [
            """
with Log() as log:
    log.add('x')
assert log.lines == ['x', 'closed']
""",
            "assert Log.of('y').lines == ['y'] and Log.LIMIT == 3",
        ],
        """
class Log:
    LIMIT = 3
    def __init__(self):
        self.lines = []
    def __enter__(self):
        return self
    def __exit__(self, *_):
        self.lines.append('closed')
    def add(self, x):
        self.lines.append(x)
    @classmethod
    def of(cls, x):
        log = cls()
        log.add(x)
        return log
""",
    ),
    "exceptions as values and in contexts": (
        [
            "error = f(3)\nassert isinstance(error, KeyError) and error.args == (3,)",
            "with quiet():\n    raise ValueError(3)\nassert seen() == [3]",
            "try:\n    with quiet():\n        raise KeyError\nexcept KeyError:\n    pass\nelse:\n    assert False",
        ],
        """
import contextlib
errors = []
@contextlib.contextmanager
def quiet():
    try:
        yield
    except ValueError as error:
        errors.append(error.args[0])
f = KeyError
def seen():
    return errors[-1:]
""",
    ),
    "times and enumerations": (
        [
            """
from datetime import date, timedelta
assert f(date(2024, 2, 28)) == date(2024, 2, 29)
assert g() == timedelta(days=1)
""",
            "assert Color.RED.value == 1 and Color(1) is Color.RED and Color['RED'].name == 'RED'",
        ],
        """
from datetime import timedelta
import enum
g = lambda: timedelta(1)
f = lambda d: d + g()
class Color(enum.Enum):
    RED = 1
""",
    ),
    "signals and limits of its own": (
        [
            "assert f(3) == 3",
        ],
        """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.setrecursionlimit(3000)
def f(x):
    return x
""",
    ),
    "text that is no ASCII": (
        [
            r"""
assert f('é\ud800😀\n\0') == 'É\ud800😀\n\0'
""",
        ],
        """
def f(x):
    return x.upper()
""",
    ),
    "a constant": (
        [
            "assert LIMIT == 3 and NAMES == ['a']",
        ],
        """
LIMIT = 3
NAMES = ['a']
""",
    ),
    "imports from the future": (
        [
            "assert f(1) == 1",
        ],
        """
from __future__ import annotations
def f(x: Nothing) -> Nothing:
    return x
""",
    ),
}


@every_tenth_is_plain(HONEST)
def test_honest_programs_pass(name, isolation):
    tests, program = HONEST[name]
    row = {"text": name, "test_list": tests}
    assert rewards(row, f"```python\n{program}\n```", isolation=isolation, function=code_tests.share) == [1]
    assert rewards(row | {"code": program}, program, isolation=isolation) == [1]


def test_there_are_enough_honest_programs():
    assert len(HONEST) >= 20


def test_the_attempts_reach_what_they_look_for(isolation):
    """An attempt that finds nothing to attack would prove nothing."""
    row, right = QUESTIONS["number"]
    for finder, found in ((FINDS_PEER, "peer"), (FINDS_REPORTER, "reporter")):
        assert rewards(row, f"{finder}assert {found} is not None\n{right}", isolation=isolation) == [1]
    reads = READS_MEMORY.format(mark='b"own" + b"mark"', kept='b"ow" + str("nmark").encode()')
    assert rewards(row, f"{reads}assert len(found) >= 9\n{right}", isolation=isolation) == [1]
    assert rewards(row, f"{reads}assert not found\n", isolation=isolation) == [0]


def test_a_forged_report_of_a_program_without_tests_fails_no_sandbox(isolation):
    """Without tests a result is the program's own report. The sandbox continues, whatever the report says."""
    forged = FINDS_REPORTER + "import os\nreporter(failed='x', finished=5, exception=[], limit='none', value={})\n"
    forged += "os.write(reporter._descriptor, ('\\n' + reporter._mark + '[' * 100000 + '\\n').encode())\n"
    settings = {"seconds": 1.0, "isolation": isolation}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for code in (f"{forged}1 + 1", f"{forged}os._exit(0)", "1 + 1"):
            result = code_tests.run(code, settings)
            assert (result.limit, result.exception, result.value) == ("", "", None if "_exit" in code else "2")
            assert result.finished is ("_exit" not in code)


def test_a_sandbox_whose_process_of_tests_fails_raises(isolation, monkeypatch):
    row, right = QUESTIONS["number"]
    monkeypatch.setattr("jaxrl_llm.sandbox.sandbox._report_of_tests", lambda file: {"failed": "OSError: no room"})
    with raises_with(SandboxError, "no room"):
        rewards(row, right, isolation=isolation)
    monkeypatch.undo()
    assert rewards(row, right, isolation=isolation) == [1]
