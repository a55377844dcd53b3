"""The checksum of an array, one element after the other, in Python's own whole numbers."""

import numpy as np


def checksum(array: np.ndarray) -> int:
    """Sum of mixed bits times an odd number of the place, modulo 2^32; elements of at most 4 bytes."""
    raw, width = array.tobytes(), array.dtype.itemsize
    total = 0
    for place in range(array.size):
        bits = int.from_bytes(raw[place * width : (place + 1) * width], "little")
        spread = place * 2654435769 % 2**32
        total += (bits ^ (bits >> 16)) * ((spread ^ (spread >> 16)) | 1)
    return total % 2**32
