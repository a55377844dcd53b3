"""The test process is stricter than production: 8 simulated devices, rank promotion raises, warnings are errors."""

import gc
import os
import pathlib

import jaxlib.version

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Most of a test's time goes to compiling what runs a few times. These make a quarter of it; measured on one update:
# 29 s, 17 s with the first, 8 s with both. Later compilers do not know the second, and end the process over it. The
# third leaves a program in one piece, where several cores would compile its parts: a quarter less work for all of them.
QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
if jaxlib.version.__version_info__ < (0, 11):
    QUICK_TO_COMPILE["xla_cpu_use_fusion_emitters"] = False
if "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = " ".join(f"--{name}={int(value)}" for name, value in QUICK_TO_COMPILE.items())
# One compilation cache for all processes of a session, kept for the next session.
CACHE = pathlib.Path(__file__).parents[1] / ".cache" / "tests"
CACHE_BYTES = 2**30  # a whole run of every tier writes less than half of this
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")

import jax  # noqa: E402, what is above is read when it is imported
import jaxtyping  # noqa: E402
import pytest  # noqa: E402
from support import compilation_cache, tiers  # noqa: E402

# Tracing makes millions of small objects, few of them in cycles: to look for those less often saves a tenth of it.
gc.set_threshold(100_000, 50, 50)
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Tests also pass numpy arrays and numbers to functions whose signatures say Array. jax functions accept both.
jaxtyping.Array = jax.typing.ArrayLike

# The signatures in these are checked at every call, arrays' shapes and types too; in this process alone. Where they say
# float, an int is one.
CHECK = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
jaxtyping.install_import_hook(["jaxrl_llm.ops", "jaxrl_llm.algorithms"], CHECK)

MAPS, MANY_MAPS = pathlib.Path("/proc/self/maps"), 20_000
MANY_MAPS_OF_QUICK = 40_000


def pytest_addoption(parser):
    names = ", ".join(tiers.TIERS)
    parser.addoption("--tier", choices=tuple(tiers.TIERS), help=f"run only the tests of this tier: {names}")


def pytest_configure(config):
    compilation_cache.write_whole_entries()
    if not hasattr(config, "workerinput"):  # the first process of a session, before its workers start
        compilation_cache.prune(CACHE, CACHE_BYTES)


def pytest_collection_modifyitems(config, items):
    tier_of_item = {item: tiers.tier_of(item) for item in items}
    wanted = config.getoption("tier")
    if wanted is None:
        return
    config.hook.pytest_deselected(items=[item for item in items if tier_of_item[item] != wanted])
    items[:] = [item for item in items if tier_of_item[item] == wanted]


@pytest.fixture(autouse=True, scope="module")
def few_maps(request):
    """Clear jax's caches in time:

    Linux gives a process 65,530 memory maps, and every compiled program takes some. A test file adds up to 6,000 maps
    without the slow tests (measured: tests/replay/test_ring.py).
    """
    yield
    is_quick = request.config.getoption("tier") == tiers.PLAIN or request.config.getoption("markexpr") == "not slow"
    most = MANY_MAPS_OF_QUICK if is_quick else MANY_MAPS
    if MAPS.is_file() and len(MAPS.read_bytes().splitlines()) > most:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def own(request, tmp_path):
    """Return the path of a file with user functions: the content of the module's constant OWN."""
    path = tmp_path / "own.py"
    path.write_text(request.module.OWN)
    return path
