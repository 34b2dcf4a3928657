"""Random permutations of any length in constant memory, the same in every library version."""

import numpy as np


def scramble(values: np.ndarray, key: int) -> np.ndarray:
    """Well-mixed 64-bit hashes of (value, key) by SplitMix64's finaliser (Steele et al. 2014)."""
    key = (key * 0xD1342543DE82EF95 + 0x632BE59BD9B4E019) & (2**64 - 1)
    z = np.atleast_1d(values).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def permute(indices: np.ndarray, n: int, key: int) -> np.ndarray:
    """Map `indices` through a random permutation of range(n), in constant memory for any n.

    It is a Feistel network on the next even number of bits, repeated until the result is in
    range(n) (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
    """
    half_bits = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    half_mask = (np.uint64(1) << half_bits) - np.uint64(1)
    out = indices.astype(np.uint64)
    walking = np.ones(len(out), dtype=bool)
    while walking.any():
        left, right = out[walking] >> half_bits, out[walking] & half_mask
        for round_number in range(8):
            left, right = right, left ^ (scramble(right, key + round_number) & half_mask)
        out[walking] = left << half_bits | right
        walking = out >= n
    return out.astype(np.int64)
