"""`/metrics` for Prometheus, with vLLM's names where they mean the same.

Nothing in it depends on the content of prompts and answers.
"""

import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from fastapi.responses import Response

from moepack.serving.engine import Engine
from moepack.serving.http.refusal import Refusal
from moepack.serving.sequence import Piece, Sequence

__all__ = ["Metrics"]

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
"""Upper bounds of the histograms of times."""
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
"""Upper bounds of the histograms of lengths."""

_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("Time from a request to its first token.", SECONDS),
    "vllm:inter_token_latency_seconds": ("Time between two tokens of an answer.", SECONDS),
    "vllm:e2e_request_latency_seconds": ("Time from a request to its end.", SECONDS),
    "vllm:request_queue_time_seconds": ("Time that a request waited for a slot.", SECONDS),
    "vllm:request_prompt_tokens": ("Tokens of a prompt.", TOKENS),
    "vllm:request_generation_tokens": ("Tokens of an answer.", TOKENS),
}
_COUNTERS = {
    "vllm:prompt_tokens": "Tokens of all prompts.",
    "vllm:generation_tokens": "Tokens of all answers.",
    "vllm:prefix_cache_queries": "Tokens of prompts that were looked up in kept prefixes.",
    "vllm:prefix_cache_hits": "Tokens of prompts that were found there.",
}


class Metrics:
    """Counts and times of all sequences. Without prometheus-client, nothing is counted.

    Args:
        engine: the engine.
        name: the name of the model, a label of every metric.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._is_on = find_spec("prometheus_client") is not None
        if not self._is_on:
            return
        import prometheus_client as client

        self._registry = client.CollectorRegistry()
        label = {"labelnames": ["model_name"], "registry": self._registry}
        self._histograms = {
            key: client.Histogram(key, text, buckets=bounds, **label).labels(name)  # type: ignore[arg-type]
            for key, (text, bounds) in _HISTOGRAMS.items()
        }
        self._counters = {
            key: client.Counter(key, text, **label).labels(name)  # type: ignore[arg-type]
            for key, text in _COUNTERS.items()
        }
        self._ended = client.Counter(
            "vllm:request_success", "Ended requests by how they ended.", ["model_name", "finished_reason"],
            registry=self._registry,
        )  # fmt: skip
        self._name = name
        for key, text, value in self._gauges():
            client.Gauge(key, text, **label).labels(name).set_function(value)  # type: ignore[arg-type]
        client.ProcessCollector(registry=self._registry)

    def _gauges(self) -> Iterator[tuple[str, str, Any]]:
        """Yield the names, descriptions and values of the gauges that are measured on request."""
        engine = self._engine
        yield "vllm:num_requests_running", "Running answers.", lambda: engine.counts()["active"]
        yield "vllm:num_requests_waiting", "Requests that wait for a slot.", lambda: engine.counts()["waiting"]
        yield "moepack:kept_prefixes", "Prefixes that are kept for later prompts.", lambda: engine.counts()["kept"]
        yield "moepack:cached_tokens", "Tokens whose keys and values are in memory.", engine.cached_tokens
        most = engine.slots * engine.context
        yield "vllm:kv_cache_usage_perc", "Their part of the maximum.", lambda: engine.cached_tokens() / most

    def end(self, sequence: Sequence, last: Piece | None) -> None:
        """Count a sequence that ended with a piece, or that its client left."""
        if not self._is_on:
            return
        reason = "abort" if last is None else last.finish
        self._ended.labels(self._name, reason).inc()
        self._observe("vllm:e2e_request_latency_seconds", time.monotonic() - sequence.asked)
        if sequence.started is not None:
            self._observe("vllm:request_queue_time_seconds", sequence.started - sequence.asked)
            self._counters["vllm:prefix_cache_queries"].inc(sequence.prompt)
            self._counters["vllm:prefix_cache_hits"].inc(sequence.cached)
        if sequence.written is not None:
            self._observe("vllm:time_to_first_token_seconds", sequence.written - sequence.asked)
        for gap in sequence.gaps:
            self._observe("vllm:inter_token_latency_seconds", gap)
        self._observe("vllm:request_prompt_tokens", sequence.prompt)
        self._observe("vllm:request_generation_tokens", sequence.generated)
        self._counters["vllm:prompt_tokens"].inc(sequence.prompt)
        self._counters["vllm:generation_tokens"].inc(sequence.generated)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def response(self) -> Response:
        """Return all metrics in Prometheus' text format.

        Raises:
            Refusal: prometheus-client is not installed.
        """
        if not self._is_on:
            message = "metrics need prometheus-client: pip install 'moepack[serve]'"
            raise Refusal(501, message, "not_implemented", "server_error")
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)
