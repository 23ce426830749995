"""The formulas as loops over responses and tokens in float64, and random batches to compare them on."""

import math
from dataclasses import dataclass

import numpy as np
from hypothesis import assume, settings
from hypothesis import strategies as st

few = settings(max_examples=25, deadline=None)
many = settings(max_examples=60, deadline=None)


def assert_close(got, want, floor=2e-7):
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=floor)


# Random batches. Log-probs are multiples of 2^-16, so that float32 holds them and their differences exactly.


def grid(low, high):
    return st.integers(round(low * 2**16), round(high * 2**16)).map(lambda n: n / 2**16)


logprobs = grid(-8, 0) | st.sampled_from([0.0, -200.0])
close_gaps = grid(-0.01, 0.01) | grid(-2, 2) | st.just(0.0)
gaps = close_gaps | grid(-12, 12) | st.sampled_from([-200.0, -20.0, 20.0, 200.0])
token_advantages = grid(-3, 3) | st.sampled_from([0.0, 1.0, -1.0])
rows = st.lists(st.lists(logprobs, max_size=6), max_size=5)


@dataclass(frozen=True)
class Batch:
    """Responses one after another; one number for each token, except for the lengths."""

    new: list
    old: list
    rollout: list
    reference: list
    advantages: list
    keep: list
    lengths: list


def batches(gaps=gaps, min_responses=0):
    """Of 0 to 5 responses of 0 to 6 tokens; what is kept is some, all or none of them."""
    token = st.tuples(logprobs, gaps, gaps, gaps, token_advantages, st.booleans())

    def build(responses, kept):
        tokens = [token for response in responses for token in response]
        return Batch(
            new=[inside(old + gap) for old, gap, *_ in tokens],
            old=[old for old, *_ in tokens],
            rollout=[inside(old + gap) for old, _, gap, *_ in tokens],
            reference=[inside(old + gap) for old, _, _, gap, *_ in tokens],
            advantages=[advantage for *_, advantage, _ in tokens],
            keep=[keep if kept is None else kept for *_, keep in tokens],
            lengths=[len(response) for response in responses],
        )

    responses = st.lists(st.lists(token, max_size=6), min_size=min_responses, max_size=5)
    return st.builds(build, responses, st.sampled_from([None, None, True, False]))


def inside(logprob):
    return min(max(logprob, -200.0), 0.0)


def above(value, bound):
    """Whether it is; a case that rounding in float32 decides is not tested."""
    assume(value == bound or abs(value - bound) > 1e-6 * abs(bound))
    return value > bound


# Ragged


def split(values, lengths):
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [list(values[start : start + n]) for start, n in zip(starts, lengths, strict=True)]


def mean(values):
    return math.fsum(values) / len(values) if values else 0.0


def spread(numbers, lengths):
    return [number for number, n in zip(numbers, lengths, strict=True) for _ in range(n)]


# Discrepancy


def discrepancy(old, rollout, kind):
    result = []
    for log_p, log_q in zip(old, rollout, strict=True):
        if kind == "probability":
            result.append(abs(math.exp(log_p) - math.exp(log_q)))
        elif kind == "ratio":
            result.append(abs(math.exp(min(log_p - log_q, 20)) - 1))
        else:
            result.append(abs(log_p - log_q))
    return result


def sequence_mean(values, lengths):
    means = [mean(response) for response in split(values, lengths) if response]
    return mean(means) if means else math.nan


def quantile(values, percent):
    return next(x for x in sorted(values) if 100 * sum(v <= x for v in values) >= percent * len(values))


# Advantages


def advantages(rewards, group_size, kind, everyones):
    batch = [r for r in everyones if not math.isnan(r)]
    result = []
    for i, reward in enumerate(rewards):
        start = i - i % group_size
        others = [r for j, r in enumerate(rewards[start : start + group_size], start) if j != i and not math.isnan(r)]
        siblings = [*others, reward]
        compared = batch if kind == "batch" else siblings
        if math.isnan(reward) or abs(reward - mean(compared)) <= 1e-6 * max(abs(r) for r in compared):
            result.append(0.0)
            continue
        value = reward - mean(others if kind in ("leave-one-out", "rloo") else compared)
        if kind in ("grpo", "leave-one-out"):
            value /= std(siblings) + 1e-6
        if kind in ("batch-std", "batch"):
            value /= std(batch) + 1e-6
        result.append(value)
    return result


def std(values):
    return math.sqrt(sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1))


def soft_length_penalty(length, max_tokens, buffer):
    start = max_tokens - buffer
    if buffer == 0 or length <= start:
        return 0.0
    return min((length - start) / buffer, 1.0)


# Policy losses: objective, derivative by the token's log-prob, and cut side of each token


def clip(value, low, high):
    return min(max(value, low), high)


def ratio(new, old):
    return math.exp(clip(new - old, -20, 20))


def approx_kl(new, old):
    return ratio(new, old) - 1 - clip(new - old, -20, 20)


def surrogate(ratio, advantage, low, high):
    objective = min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)
    if advantage > 0 and above(ratio, 1 + high):
        return objective, 0.0, 1
    if advantage < 0 and above(1 - low, ratio):
        return objective, 0.0, -1
    return objective, ratio * advantage, 0


def ppo_clip(batch, low, high, dual=None):
    result = []
    for new, old, advantage in zip(batch.new, batch.old, batch.advantages, strict=True):
        objective, slope, side = surrogate(ratio(new, old), advantage, low, high)
        if dual is not None and advantage < 0 and above(ratio(new, old), dual):
            objective, slope, side = dual * advantage, 0.0, 1
        result.append((objective, slope if abs(new - old) <= 20 else 0.0, side))
    return result


def gspo(batch, low, high):
    columns = [split(column, batch.lengths) for column in (batch.new, batch.old, batch.advantages)]
    result = []
    for new, old, response_advantages in zip(*columns, strict=True):
        whole = math.exp(mean([clip(a - b, -20, 20) for a, b in zip(new, old, strict=True)]))
        result += [surrogate(whole, advantage, low, high) for advantage in response_advantages]
    return result


def cispo(batch, low, high):
    result = []
    for new, old, advantage in zip(batch.new, batch.old, batch.advantages, strict=True):
        weight = clip(ratio(new, old), low, high)
        side = int(above(ratio(new, old), high)) - int(above(low, ratio(new, old)))
        result.append((weight * advantage * new, weight * advantage, side))
    return result


def dppo(batch, threshold):
    result = []
    for new, rollout, advantage in zip(batch.new, batch.rollout, batch.advantages, strict=True):
        moved = math.exp(new) - math.exp(rollout)
        if advantage > 0 and above(moved, threshold):
            result.append((0.0, 0.0, 1))
        elif advantage < 0 and above(-moved, threshold):
            result.append((0.0, 0.0, -1))
        else:
            objective = ratio(new, rollout) * advantage
            result.append((objective, objective if abs(new - rollout) <= 20 else 0.0, 0))
    return result


def aggregate(objectives, lengths, keep, aggregation, norm_length):
    """What an optimizer step maximises."""
    pairs = split(list(zip(objectives, keep, strict=True)), lengths)
    kept = [[objective for objective, keeps in response if keeps] for response in pairs]
    kept = [response for response in kept if response]
    if aggregation == "token":
        return mean([objective for response in kept for objective in response])
    if aggregation == "sequence":
        return mean([mean(response) for response in kept])
    return mean([sum(response) / norm_length for response in kept])


# Corrections: weight of each token, and whether it is kept; rho is the ratio of the two policies


def token_tis(log_ratio, lengths, cap):
    return [(math.exp(min(gap, math.log(cap))), True) for gap in log_ratio]


def sequence_tis(log_ratio, lengths, cap):
    products = [math.exp(min(sum(gaps), math.log(cap))) for gaps in split(log_ratio, lengths)]
    return [(product, True) for product in spread(products, lengths)]


def token_mis(log_ratio, lengths, low, high):
    return [(math.exp(gap), True) if within(gap, low, high) else (0.0, False) for gap in log_ratio]


def sequence_mis(log_ratio, lengths, low, high):
    sums = spread([sum(gaps) for gaps in split(log_ratio, lengths)], lengths)
    return [(math.exp(gap), True) if within(gap, low, high) else (0.0, False) for gap in sums]


def geometric_mask(log_ratio, lengths, low, high):
    keep = [within(mean(gaps), low, high) for gaps in split(log_ratio, lengths)]
    return [(1.0, keeps) for keeps in spread(keep, lengths)]


def veto(log_ratio, lengths, threshold):
    keep = [not any(above(threshold, math.exp(gap)) for gap in gaps) for gaps in split(log_ratio, lengths)]
    return [(1.0, keeps) for keeps in spread(keep, lengths)]


def trust_region_mask(log_ratio, lengths, threshold):
    keep = [not any(above(math.exp(gap) - 1 - gap, threshold) for gap in gaps) for gaps in split(log_ratio, lengths)]
    return [(1.0, keeps) for keeps in spread(keep, lengths)]


def within(log_value, low, high):
    value = math.exp(min(log_value, 700))
    return not above(low, value) and not above(value, high)


# The reference policy: value of the estimate, and derivative by the token's log-prob


def reference_kl(new, old, reference, estimator):
    gap = clip(new - reference, -20, 20)
    value = {"k1": gap, "k2": gap**2 / 2, "k3": math.exp(-gap) - 1 + gap}[estimator]
    return ratio(new, old) * value, ratio(new, old) * gap


# Metrics


def discrepancy_statistics(delta, lengths):
    if not delta:
        return {}
    parts = {"first_16": [], "middle": [], "last_16": []}
    for response in split(delta, lengths):
        for t, d in enumerate(response):
            parts["first_16" if t < 16 else "last_16" if t >= len(response) - 16 else "middle"].append(d)
    statistics = {"sequence_mean": sequence_mean(delta, lengths), "token_mean": mean(delta), "max": max(delta)}
    statistics |= {f"p{percent}": quantile(delta, percent) for percent in (50, 90, 99)}
    statistics |= {name: mean(part) for name, part in parts.items() if part}
    return {f"discrepancy/{name}": value for name, value in statistics.items()}


def mismatch(old, rollout):
    if not old:
        return {}
    gaps = [a - b for a, b in zip(old, rollout, strict=True)]
    differences = [abs(math.exp(a) - math.exp(b)) for a, b in zip(old, rollout, strict=True)]
    return {
        "rollout_corr/kl": mean([-gap for gap in gaps]),
        "rollout_corr/k3_kl": mean([math.exp(gap) - gap - 1 for gap in gaps]),
        "rollout_corr/chi2_token": mean([math.exp(2 * gap) for gap in gaps]) - 1,
        "rollout_corr/raw_eff_sample_size": sum(math.exp(gap) for gap in gaps) ** 2
        / (len(gaps) * sum(math.exp(2 * gap) for gap in gaps)),
        "training/rollout_probs_diff_mean": mean(differences),
        "training/rollout_probs_diff_max": max(differences),
        "training/rollout_probs_diff_std": math.sqrt(mean([(d - mean(differences)) ** 2 for d in differences])),
    }


def importance_weights(weights, keep):
    if not weights:
        return {}
    kept = [weight for weight, keeps in zip(weights, keep, strict=True) if keeps]
    squares = sum(weight**2 for weight in kept)
    return {
        "rollout_corr/rollout_is_eff_sample_size": sum(kept) ** 2 / squares / len(weights) if squares else 0.0,
        "rollout_corr/rollout_is_mean": mean(kept),
        "rollout_corr/rollout_is_max": max(kept, default=0.0),
        "rollout_corr/kept_fraction": len(kept) / len(weights),
    }


# Budget


def running_budget(discrepancies, quantile, slack):
    """The quantile interpolates between the two numbers around it."""
    ordered = sorted(discrepancies)
    place = quantile * (len(ordered) - 1)
    below = math.floor(place)
    upper = min(below + 1, len(ordered) - 1)
    return (1 + slack) * (ordered[below] + (place - below) * (ordered[upper] - ordered[below]))
