"""Order of the chips of a TPU pod in the mesh. The mesh axes follow the torus of links between the chips.

Slices are connected by the network of the data center. They are distributed over ``data`` as far as possible, and the
rest over ``fsdp``. Does not know: sharding rules of arrays.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax.experimental import mesh_utils

from jaxrl_llm.config import ConfigError


def arranged(shape: tuple[int, ...], devices: list[Any]) -> np.ndarray:
    """Return the chips as an array with the shape of the mesh [data, fsdp, expert, context, tensor].

    Raises:
        ConfigError: the slices cannot be distributed over ``data`` and ``fsdp``.
    """
    num_slices = len({getattr(device, "slice_index", 0) for device in devices})
    if num_slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    data, fsdp, *others = shape
    of_data = math.gcd(data, num_slices)
    of_fsdp = num_slices // of_data
    if fsdp % of_fsdp:
        raise ConfigError(f"mesh.data={data} x mesh.fsdp={fsdp} must be a multiple of the {num_slices} TPU slices")
    within = (data // of_data, fsdp // of_fsdp, *others)
    slices = (of_data, of_fsdp, 1, 1, 1)
    return mesh_utils.create_hybrid_device_mesh(within, slices, devices, allow_split_physical_axes=True)
