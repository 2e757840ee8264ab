"""How strongly two counts say that one of two things is worse, at any time and however often it is asked.

Outcomes of a canary and of the model beside it are compared in pairs. If the canary is not worse, it is the
worse one of a pair with probability at most 1/2. The evidence against that is the ratio of two likelihoods:
of the pairs under every larger probability, equally weighted, and under 1/2. Such a ratio is a martingale
with mean at most 1, so the probability that it ever reaches 1/α is at most α (Ville 1939; Robbins 1970,
"Statistical methods related to the law of the iterated logarithm"). A fixed test that is asked after every
request would find a difference in the end, whether there is one or not.
"""

from __future__ import annotations

import math

_NEGLIGIBLE = 1e-12


def log_evidence(worse: int, better: int) -> float:
    """Return the natural logarithm of the evidence, given that many pairs in which the canary was worse, and
    better. Costs up to a few thousand steps for a million pairs."""
    pairs = worse + better
    if pairs == 0:
        return 0.0
    # E = 2^(n+1) · B(worse+1, better+1) · P(Bin(n+1, 1/2) <= worse), n = pairs. Both branches sum the shorter
    # tail, whose terms shrink.
    if 2 * worse < pairs:
        return math.log(_tail(pairs + 1, worse)) - math.log(better + 1)
    beta = math.lgamma(worse + 1) + math.lgamma(better + 1) - math.lgamma(pairs + 2)
    first = _log_choose(pairs + 1, worse + 1) - (pairs + 1) * math.log(2)
    above = math.exp(first + math.log(_tail(pairs + 1, better)))
    return (pairs + 1) * math.log(2) + beta + math.log1p(-min(above, 1.0 - _NEGLIGIBLE))


def _tail(n: int, k: int) -> float:
    """Return the sum of C(n, j) for j from 0 to k, in units of C(n, k); k is at most about n/2."""
    term = total = 1.0
    for j in range(k, 0, -1):
        term *= j / (n - j + 1)
        total += term
        if term < _NEGLIGIBLE * total:
            break
    return total


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
