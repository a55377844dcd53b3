"""A checksum depends on values only: it equals plain arithmetic, wherever the array is, and every bit counts."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from reference import checksum as oracle
from support.building import needs_libtpu

from jaxrl_llm.ops.checksum import checksum, checksums
from jaxrl_llm.planning import chips

DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16, np.int8, np.uint8, bool, np.int32, np.uint32]
# Nothing, one number, odd sizes, last axes that 32 divides, that share a factor with it, that do neither.
SHAPES = [(), (0,), (3, 0), (1,), (7,), (64,), (5, 32), (3, 4, 20), (2, 3, 5, 11), (9, 96)]


def random_bits(shape, dtype, seed=0):
    """Return every bit pattern of a type, including NaN and infinity for floats."""
    rng = np.random.default_rng(seed)
    if dtype is bool:
        return rng.random(shape) < 0.5
    width = np.dtype(dtype).itemsize
    return rng.integers(0, 256, (*shape, width), np.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_it_is_what_plain_arithmetic_says(dtype):
    arrays = [random_bits(shape, dtype, seed) for seed, shape in enumerate(SHAPES)]
    expected = [oracle.checksum(array) for array in arrays]
    assert checksums(arrays).tolist() == expected
    assert checksums(arrays).dtype == checksums([]).dtype == jnp.uint32
    assert len(set(expected)) >= len(SHAPES) - 3  # the empty ones have 0, one number may


@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "fsdp"), P("fsdp", "data"), P(("data", "fsdp"))], ids=str)
@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_no_mesh_and_no_memory_changes_it(spec, memory):
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    arrays = [random_bits((16, 24), np.float32), random_bits((8, 4, 64), ml_dtypes.bfloat16), random_bits((8, 8), bool)]
    sharding = NamedSharding(mesh, spec, memory_kind=memory)
    placed = jax.device_put(arrays, [sharding] * len(arrays))
    expected = [oracle.checksum(array) for array in arrays]
    assert jax.jit(checksums)(placed).tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_each_bit_that_flips_shows(dtype):
    array = random_bits((3, 5), dtype)
    bits = 1 if dtype is bool else 8 * array.dtype.itemsize
    flipped = np.repeat(array[None], array.size * bits, axis=0)
    raw = flipped.view(np.uint8).reshape(array.size * bits, array.size, -1)
    for i, one in enumerate(raw):
        one[i // bits, i % bits // 8] ^= 1 << (i % bits % 8)
    seen = jax.vmap(checksum)(flipped)
    assert checksum(array) not in seen and len(set(seen.tolist())) == len(seen)


def test_elements_that_change_places_show():
    array = jnp.arange(1.0, 17.0).reshape(4, 4)
    swapped = [array.at[i // 4, i % 4].set(array[j // 4, j % 4]).at[j // 4, j % 4].set(array[i // 4, i % 4])
               for i in range(16) for j in range(i)]  # fmt: skip
    assert checksum(array) not in jax.vmap(checksum)(jnp.stack(swapped))
    # Of opposite sign, and zeros of both: their difference is the highest bit alone.
    for x in (3.0, 0.0):
        for shape in ((2,), (2, 1), (2, 64)):
            pair = jnp.full(shape, x).at[1].multiply(-1)
            assert checksum(pair) != checksum(pair[::-1])
    # Rows, columns, and the same bits in another shape that is no other order.
    assert checksum(array) != checksum(array[::-1]) and checksum(array) != checksum(array.T)
    assert checksum(array) == checksum(array.reshape(2, 8)) == checksum(array.reshape(16))


def test_more_elements_than_places_are_summed_as_few_are():
    """8 billion elements: the program's constants have 32 bits, and it needs no array of this size."""
    compiled = jax.jit(checksum).lower(jax.ShapeDtypeStruct((2**20, 2**13), jnp.bool_)).compile()
    assert "u64" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**33 / 4


def test_it_takes_little_memory_beside_the_array():
    """A CPU's program would otherwise write every term of a long sum."""
    large = jax.ShapeDtypeStruct((512, 4096), jnp.float32)
    memory = jax.jit(checksums).lower([large, large]).compile().memory_analysis()
    assert memory.temp_size_in_bytes < memory.argument_size_in_bytes / 16


@needs_libtpu
def test_a_tpu_writes_out_no_terms():
    """A cache of 128 MiB and a matrix of 224 MiB.

    Sums of 32 neighbours, in rows of 128 places, would take as much memory.
    """
    devices, _ = chips.devices_of("v5e:2x2")
    where = jax.sharding.SingleDeviceSharding(devices[0])
    cache, matrix = ((64, 2, 4096, 128), jnp.bfloat16), ((4096, 14336), jnp.float32)
    needed = checksums.lower([jax.ShapeDtypeStruct(*of, sharding=where) for of in (cache, matrix)]).compile()
    assert needed.memory_analysis().argument_size_in_bytes == 352 << 20
    assert needed.memory_analysis().temp_size_in_bytes < 1 << 20
