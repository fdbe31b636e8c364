"""Metrics for Prometheus, made of a name, a sentence and values."""

from collections.abc import Mapping
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

PREFIX: Final = "embedfarm_"


def gauge(name: str, words: str, values: Mapping[Any, float], *labels: str) -> GaugeMetricFamily:
    """Return a gauge with the values of its labels."""
    family = GaugeMetricFamily(PREFIX + name, words, labels=labels)
    for of, value in values.items():
        family.add_metric(of, value)
    return family


def counter(
    name: str, words: str, values: Mapping[Any, float], *labels: str
) -> CounterMetricFamily:
    """Return a counter with the values of its labels."""
    family = CounterMetricFamily(PREFIX + name, words, labels=labels)
    for of, value in values.items():
        family.add_metric(of, value)
    return family
