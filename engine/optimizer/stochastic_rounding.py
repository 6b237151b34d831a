"""Rounds fp32 to bf16 at random: the probability of a neighbour grows with its nearness, so the mean is exact.

Small updates of a bf16 weight then count on average, while rounding to nearest would drop all of them. The random bits
are a hash of the seed, the step, the element's position and the state. So they do not depend on chunk sizes or threads,
and runs are reproducible. All code is integer arithmetic on tensors, which can be compiled or run eagerly.

Source of the rounding: Zamirai et al., Revisiting BFloat16 Training, section 4.1.
Source of the hash's two rounds and constants: Wellons, hash-prospector (lowbias32).
Source of the third and fourth multiplier: Appleby, MurmurHash3, and Knuth's golden ratio in 32 bits.
"""

import hashlib
from collections.abc import Sequence

import torch

NUM_KEYS = 4
# Elements with the same keys: a hash serves two neighbouring elements, and int32 counts 2**32 words.
NUMEL_PER_KEY = 2**33

# A block has fewer than 2**40 elements.
_BLOCK_SHIFT = 40

_FIRST_MULTIPLIER = 0x7FEB352D
_MULTIPLIERS = (0x846CA68B, 0x9E3779B1, 0x85EBCA6B)  # one for each state
_LOW_HALF = 0xFFFF
_HIGH_HALF = -0x10000
_NAN = 0x7FC00000


def element_position(block: int, element: int) -> int:
    """Returns a unique index of a block's element among all elements of the model."""
    return (block << _BLOCK_SHIFT) + element


def rounding_keys(seed: int, step: int, position: int) -> list[int]:
    """Returns the hash's keys, `NUM_KEYS` int32 numbers, which it combines with the low bits of the position."""
    text = f"{seed} {step} {position // NUMEL_PER_KEY}".encode()
    digest = hashlib.blake2b(text, digest_size=4 * NUM_KEYS).digest()
    return [int.from_bytes(digest[i : i + 4], "little", signed=True) for i in range(0, len(digest), 4)]


def random_words(words: torch.Tensor, keys: torch.Tensor | Sequence[int]) -> list[torch.Tensor]:
    """Returns 32 random bits for each of three states: the low half for a pair's even element, the rest for the odd.

    `words`: int32, half the elements' positions. `keys`: `NUM_KEYS` int32 numbers; a tensor for compiled kernels.
    """
    mixed = words ^ keys[0]
    mixed = (mixed ^ shifted_right(mixed, 16)) * _FIRST_MULTIPLIER
    mixed = mixed ^ shifted_right(mixed, 15)
    results = []
    for index, multiplier in enumerate(_MULTIPLIERS, start=1):
        product = (mixed ^ keys[index]) * _signed(multiplier)
        results.append(product ^ shifted_right(product, 16))
    return results


def rounded_pairs(even: torch.Tensor, odd: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Rounds pairs of fp32 numbers to pairs of bf16 numbers. A pair is an int32 word with the even element low.

    Infinities do not change. NaN stays NaN unless its mantissa is nearly all ones: see `plain_nan`.
    """
    low = even.view(torch.int32) + (random & _LOW_HALF)
    high = odd.view(torch.int32) + shifted_right(random, 16)
    return shifted_right(low, 16) | (high & _HIGH_HALF)


def rounded(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Rounds single fp32 numbers to bf16. `random`: int16, 16 bits for each."""
    bits = plain_nan(values).view(torch.int32) + (random.to(torch.int32) & _LOW_HALF)
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


def random_halves(position: int, numel: int, seed: int, step: int, device: torch.device) -> list[torch.Tensor]:
    """Returns 16 random bits, int16, for every element of a range within one key, for each of three states."""
    first = position % NUMEL_PER_KEY
    words = torch.arange(first // 2, (first + numel + 1) // 2, device=device).to(torch.int32)
    # The low half of a word comes first in memory and belongs to the even element.
    halves = random_words(words, rounding_keys(seed, step, position))
    return [word.view(torch.int16)[first % 2 :][:numel] for word in halves]


def plain_nan(values: torch.Tensor) -> torch.Tensor:
    """Replaces every NaN of an fp32 tensor by the one that stays NaN when rounding adds bits to it."""
    return torch.where(values == values, values.view(torch.int32), _NAN).view(torch.float32)


def shifted_right(values: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Shifts int32 to the right and fills with zeros; PyTorch's own shift repeats the sign."""
    return (values >> num_bits) & ((1 << (32 - num_bits)) - 1)


def _signed(constant: int) -> int:
    return constant - (1 << 32) if constant >= 1 << 31 else constant
