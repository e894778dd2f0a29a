"""Typed statistics that sum over micro-batches and ranks without knowing which."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sum:
    """A total: over micro-batches and replicas it adds up."""

    value: float


@dataclass(frozen=True)
class Mean:
    """`total / count`; both add up, so that no mean of means is ever taken."""

    total: float
    count: float


@dataclass(frozen=True)
class Max:
    """The largest value; `-inf` where there was none."""

    value: float


Stat = Sum | Mean | Max
Stats = dict[str, Stat]
