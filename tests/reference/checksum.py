"""The checksum of an array, element by element, in Python integers."""

import numpy as np


def checksum(array: np.ndarray) -> int:
    """Return the sum of mixed bits times an odd number of the index, modulo 2^32. Elements have at most 4 bytes."""
    raw, width = array.tobytes(), array.dtype.itemsize
    total = 0
    for place in range(array.size):
        bits = int.from_bytes(raw[place * width : (place + 1) * width], "little")
        spread = place * 2654435769 % 2**32
        total += (bits ^ (bits >> 16)) * ((spread ^ (spread >> 16)) | 1)
    return total % 2**32
