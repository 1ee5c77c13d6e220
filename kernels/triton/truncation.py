"""Truncation by min_p, top_k and top_p without a sort: finds a threshold, and how many tokens equal to it are kept.

The kept tokens are a head of the descending order, with ties in the order of ids. Its last value is the threshold,
found by bisection over the order of all floats. Counts and masses that decide are sums of integers, hence exact in any
order. Approximate and cheap passes in float32 come first: they narrow the range until only the tokens near the
threshold need to be read again.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Number of ties when all of them are kept.
ALL_TIES = tl.constexpr(2**62)
#: A token whose scaled logit is further below the best one has no weight, and no noise makes it win: the noise of any
#: two words differs by less than 26.01.
_REACH = tl.constexpr(26.125)
#: Passes over the row that narrow the range, each to a quarter.
_NARROWING = tl.constexpr(3)
#: Relative distance that a float32 sum must have from the wanted sum to be trusted.
_SLACK = tl.constexpr(2.0**-10)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def order_key(x):
    """Integers (int64) in the order of float32 values; 0.0 and -0.0 have one key, and adjacent values adjacent keys."""
    bits = x.to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x == 0, 0, keys).to(tl.int64)


@triton.jit
def value_of_key(key):
    """The float32 value of an order key."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def scaled_logits(x, best, temperature):
    """(x - best) / temperature in double precision; best and temperature are float64 scalars."""
    return (x.to(tl.float64) - best) / temperature


@triton.jit
def inverse_temperature(temperature):
    """For estimates in float32, where tiny temperatures must not become infinite."""
    return tl.minimum(1.0 / temperature, 1e38).to(tl.float32)


@triton.jit
def _weights(x, best, temperature, IS_MASS: tl.constexpr):
    """What a token adds to a sum (int64): 1, or its probability in units of 2**-32 of the best token's."""
    if IS_MASS:
        weights = (tl.exp(scaled_logits(x, best, temperature)) * 4294967296.0).to(tl.int64)
    else:
        weights = tl.full(x.shape, 1, tl.int64)
    return weights


@triton.jit
def _weight(x, best, temperature, IS_MASS: tl.constexpr):
    """The weight of a scalar, computed as a block, so that the same code gives it as for blocks."""
    return tl.max(_weights(x + tl.zeros([8], tl.float32), best, temperature, IS_MASS), 0)


@triton.jit
def _sum_from(x_ptr, count, threshold, best, temperature, IS_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of the weights of all x >= threshold: int64."""
    sums = tl.zeros([BLOCK], tl.int64)
    for start in range(0, count, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offsets, mask=offsets < count, other=float("-inf"))
        if IS_MASS:
            # Exponentials in double precision take most of the time.
            if tl.max(x, 0) >= threshold:
                sums += tl.where(x >= threshold, _weights(x, best, temperature, IS_MASS), 0)
        else:
            sums += (x >= threshold).to(tl.int64)
    return tl.sum(sums, 0)


@triton.jit
def _narrow(x_ptr, count, low, best, temperature, wanted, IS_MASS: tl.constexpr, WIDE: tl.constexpr):
    """A range [low, high) of values that contains the threshold: sum(low) >= wanted > sum(high).

    Tries three thresholds per pass, at equal distances, since logits are spread over the values rather than over the
    exponents that order keys begin with.
    """
    inverse = inverse_temperature(temperature) * _LOG2_E
    top = best.to(tl.float32)
    high = value_of_key(order_key(top) + 1)
    goal = wanted.to(tl.float32)
    if IS_MASS:
        goal = goal * 2.3283064365386963e-10
    min_sum, max_sum = goal * (1.0 + _SLACK), goal * (1.0 - _SLACK)
    # With a lower temperature, float32 cannot represent the scaled logits.
    passes = tl.where(temperature > 1e-30, _NARROWING, 0)
    for _ in range(passes):
        step = (high.to(tl.float64) - low.to(tl.float64)) * 0.25
        threshold1 = (low + step).to(tl.float32)
        threshold2 = (low + 2 * step).to(tl.float32)
        threshold3 = (low + 3 * step).to(tl.float32)
        sums1 = tl.zeros([WIDE], tl.float32)
        sums2 = tl.zeros([WIDE], tl.float32)
        sums3 = tl.zeros([WIDE], tl.float32)
        for start in range(0, count, WIDE):
            offsets = start + tl.arange(0, WIDE)
            x = tl.load(x_ptr + offsets, mask=offsets < count, other=float("-inf"))
            weights = tl.full([WIDE], 1.0, tl.float32)
            if IS_MASS:
                weights = tl.exp2(tl.maximum(x - top, -1e30) * inverse)
            sums1 += tl.where(x >= threshold1, weights, 0.0)
            sums2 += tl.where(x >= threshold2, weights, 0.0)
            sums3 += tl.where(x >= threshold3, weights, 0.0)
        sum1, sum2, sum3 = tl.sum(sums1, 0), tl.sum(sums2, 0), tl.sum(sums3, 0)
        lower = tl.where(sum1 >= min_sum, threshold1, low)
        lower = tl.where(sum2 >= min_sum, threshold2, lower)
        lower = tl.where(sum3 >= min_sum, threshold3, lower)
        higher = tl.where(sum3 <= max_sum, threshold3, high)
        higher = tl.where(sum2 <= max_sum, threshold2, higher)
        higher = tl.where(sum1 <= max_sum, threshold1, higher)
        low = lower
        high = higher
    return low, high


@triton.jit
def _border(x_ptr, border_ptr, count, low, high, best, temperature, IS_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Copies the values in [low, high) to the border; returns their number, and the sum from `high` on (int64)."""
    # The border of an earlier limit must have been read.
    tl.debug_barrier()
    sums = tl.zeros([BLOCK], tl.int64)
    num_border = 0
    for start in range(0, count, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offsets, mask=offsets < count, other=float("-inf"))
        if tl.max(x, 0) >= high:
            sums += tl.where(x >= high, _weights(x, best, temperature, IS_MASS), 0)
        is_border = (x >= low) & (x < high)
        flags = is_border.to(tl.int32)
        num_found = tl.sum(flags, 0)
        if num_found > 0:
            tl.store(border_ptr + num_border + tl.cumsum(flags, 0) - flags, x, mask=is_border)
        num_border += num_found
    tl.debug_barrier()
    return num_border, tl.sum(sums, 0)


@triton.jit
def _around(border_ptr, count, key, best, temperature, IS_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum from an order key on, and the nearest keys of values (int64): at or above it, and below it."""
    sums = tl.zeros([BLOCK], tl.int64)
    above = tl.full([BLOCK], 2**32, tl.int64)
    below = tl.full([BLOCK], -(2**32), tl.int64)
    for start in range(0, count, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        is_there = offsets < count
        x = tl.load(border_ptr + offsets, mask=is_there, other=0.0)
        keys = order_key(x)
        is_above = is_there & (keys >= key)
        sums += tl.where(is_above, _weights(x, best, temperature, IS_MASS), 0)
        above = tl.minimum(above, tl.where(is_above, keys, 2**32))
        below = tl.maximum(below, tl.where(is_there & (keys < key), keys, -(2**32)))
    return tl.sum(sums, 0), tl.min(above, 0), tl.max(below, 0)


@triton.jit
def _last_of_head(
    x_ptr,
    border_ptr,
    count,
    low,
    best,
    temperature,
    wanted,
    IS_MASS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The smallest head whose sum is at least `wanted` (int64, positive): its last value, and how many ties it has.

    The sum of the values from `low` on must be at least `wanted`. Only some of the values equal to `low` may still be
    allowed, so they are counted only if the values above them are not enough.
    """
    low, high = _narrow(x_ptr, count, low, best, temperature, wanted, IS_MASS, WIDE)
    num_border, above = _border(x_ptr, border_ptr, count, low, high, best, temperature, IS_MASS, BLOCK)
    low_key = order_key(low)
    high_key = order_key(high)
    sum_high = above
    while high_key - low_key > 1:
        key = low_key + (high_key - low_key) // 2
        total, next_above, next_below = _around(border_ptr, num_border, key, best, temperature, IS_MASS, BLOCK)
        total += above
        # Between two adjacent values of the border the sum is constant.
        is_enough = total >= wanted
        low_key = tl.where(is_enough, tl.minimum(next_above, high_key - 1), low_key)
        high_key = tl.where(is_enough, high_key, tl.maximum(next_below, low_key) + 1)
        sum_high = tl.where(is_enough, sum_high, total)
    threshold = value_of_key(low_key)
    weight = _weight(threshold, best, temperature, IS_MASS)
    return threshold, (wanted - sum_high + weight - 1) // weight


@triton.jit
def _reach(best, temperature):
    """The lowest value that is considered (float32): slightly too low, so that no token is missed."""
    depth = temperature * _REACH
    low = best - depth - (tl.abs(best) + depth) * 1e-6
    return tl.maximum(low, -_LARGEST).to(tl.float32)


@triton.jit
def _least_likely(low, best, temperature, min_p):
    """The lowest value from `low` on that is at least `min_p` times as likely as the best one, found by bisection."""
    min_probability = tl.minimum(min_p, 1.0)
    low_key = order_key(low) - 1
    high_key = order_key(best.to(tl.float32))
    while high_key - low_key > 1:
        key = low_key + (high_key - low_key) // 2
        is_likely = tl.exp(scaled_logits(value_of_key(key), best, temperature)) >= min_probability
        low_key = tl.where(is_likely, low_key, key)
        high_key = tl.where(is_likely, key, high_key)
    return value_of_key(high_key)


@triton.jit
def truncate(x_ptr, border_ptr, count, best, temperature, top_k, top_p, min_p, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """(threshold, num_ties): keeps all x > threshold, and the first `num_ties` (int64) of x == threshold.

    top_k and min_p are applied before top_p. x_ptr: float32 [count] whose maximum `best` (float64) is finite;
    border_ptr: float32 [count], scratch memory. Passes that wait for memory process WIDE tokens at a time, other
    passes BLOCK.
    """
    threshold = _reach(best, temperature)
    num_ties = tl.full([], ALL_TIES, tl.int64)
    if min_p > 0.0:
        threshold = _least_likely(threshold, best, temperature, min_p)
    if top_k > 0:
        wanted = top_k.to(tl.int64)
        if wanted < _sum_from(x_ptr, count, threshold, best, temperature, False, WIDE):
            threshold, num_ties = _last_of_head(
                x_ptr, border_ptr, count, threshold, best, temperature, wanted, False, WIDE, BLOCK
            )
    if top_p < 1.0:
        is_cut = num_ties < ALL_TIES
        above = tl.where(is_cut, value_of_key(order_key(threshold) + 1), threshold)
        equals = tl.where(is_cut, num_ties, 0) * _weight(threshold, best, temperature, True)
        total = equals + _sum_from(x_ptr, count, above, best, temperature, True, BLOCK)
        # Rounded up to an integer.
        mass = total.to(tl.float64) * top_p
        wanted = mass.to(tl.int64)
        wanted = tl.maximum(wanted + (wanted.to(tl.float64) < mass).to(tl.int64), 1)
        threshold, num_ties = _last_of_head(
            x_ptr, border_ptr, count, threshold, best, temperature, wanted, True, WIDE, BLOCK
        )
    return threshold, num_ties
