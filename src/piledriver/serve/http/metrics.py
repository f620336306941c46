"""Prometheus metrics under vLLM's names, so that its dashboards show this server too."""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Iterator
from typing import Any

from piledriver.core.errors import MissingDependencyError
from piledriver.serve.ipc.remote_engine import RemoteEngine
from piledriver.serve.request import RequestOutput

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class ServerMetrics:
    """Counters, gauges and histograms of one server."""

    def __init__(self, model_name: str, engine: RemoteEngine) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError as error:
            raise MissingDependencyError("prometheus_client", extra="serve", purpose="/metrics") from error
        self._prometheus = prometheus
        # A registry of its own: two servers in one process (tests, notebooks) must not share figures.
        self.registry = prometheus.CollectorRegistry()
        labels: dict[str, Any] = {"registry": self.registry, "labelnames": ["model_name"]}

        def gauge(name: str, text: str, value: Any) -> None:
            prometheus.Gauge(f"vllm:{name}", text, **labels).labels(model_name).set_function(value)

        def counter(name: str, text: str) -> Any:
            return prometheus.Counter(f"vllm:{name}", text, **labels).labels(model_name)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            return prometheus.Histogram(f"vllm:{name}", text, buckets=buckets, **labels).labels(model_name)

        blocks = engine.facts.blocks
        gauge("num_requests_running", "Answers that are being decoded", lambda: engine.running)
        gauge("num_requests_waiting", "Answers that wait", lambda: engine.waiting)
        gauge("kv_cache_usage_perc", "Share of cache blocks in use", lambda: 1 - engine.free_blocks / blocks)
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts")
        self._generation_tokens = counter("generation_tokens", "Tokens of answers")
        self._cached_tokens = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self._queried_tokens = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self._success = prometheus.Counter(
            "vllm:request_success",
            "Finished requests",
            registry=self.registry,
            labelnames=["model_name", "finished_reason"],
        )
        self._first = histogram("time_to_first_token_seconds", "Arrival to the first token", _SECONDS)
        self._between = CountedHistogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of an answer", _SECONDS, model_name
        )
        self.registry.register(self._between)
        self._whole = histogram("e2e_request_latency_seconds", "Arrival to the last token", _SECONDS)
        self._queue = histogram("request_queue_time_seconds", "Arrival to the first step", _SECONDS)
        self._prefill = histogram("request_prefill_time_seconds", "First step to the first token", _SECONDS)
        self._decode = histogram("request_decode_time_seconds", "First to last token", _SECONDS)
        self._prompt_sizes = histogram("request_prompt_tokens", "Tokens of a prompt", _TOKENS)
        self._answer_sizes = histogram("request_generation_tokens", "Tokens of an answer", _TOKENS)
        self._step_sizes = histogram("iteration_tokens_total", "Tokens of a step", _TOKENS)
        self._preemptions = counter("num_preemptions", "Answers that lost their blocks and were computed again")
        self._model_name = model_name
        engine.on_step, engine.on_preempted = self._step_sizes.observe, self._preemptions.inc

    def observer(self) -> RequestObserver:
        """Return the observer of a request that arrives now."""
        return RequestObserver(self)

    def text(self) -> tuple[bytes, str]:
        """Return all figures in Prometheus' text format, and its content type."""
        return self._prometheus.generate_latest(self.registry), self._prometheus.CONTENT_TYPE_LATEST


class CountedHistogram:
    """A histogram to which many equal values are added at once: the tokens of one event."""

    def __init__(self, name: str, text: str, buckets: tuple[float, ...], model_name: str) -> None:
        self._name, self._text, self._buckets, self._model_name = name, text, buckets, model_name
        self._counts, self._sum = [0] * (len(buckets) + 1), 0.0

    def observe(self, value: float, count: int) -> None:
        """Add `count` values."""
        self._counts[bisect.bisect_left(self._buckets, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[Any]:
        """Yield the figures in Prometheus' form."""
        from prometheus_client.core import HistogramMetricFamily

        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        bounds = [*(str(float(bound)) for bound in self._buckets), "+Inf"]
        sums = itertools.accumulate(self._counts)
        family.add_metric([self._model_name], list(zip(bounds, sums, strict=True)), self._sum)
        yield family


class RequestObserver:
    """Times one request by its events."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._arrived = time.perf_counter()
        self._first: float | None = None
        self._last: dict[int, float] = {}

    def see(self, event: RequestOutput) -> None:
        """Record one event."""
        now, metrics = time.perf_counter(), self._metrics
        for delta in event.deltas:
            if not delta.token_ids:
                continue
            if self._first is None:
                self._first = now
                metrics._first.observe(now - self._arrived)
                if event.scheduled_at is not None:
                    metrics._queue.observe(event.scheduled_at - self._arrived)
                    metrics._prefill.observe(now - event.scheduled_at)
            before = self._last.get(delta.index)
            if before is not None:
                count = len(delta.token_ids)
                metrics._between.observe((now - before) / count, count)
            self._last[delta.index] = now
            metrics._generation_tokens.inc(len(delta.token_ids))
        if event.finished:
            self._finish(event, now)

    def _finish(self, event: RequestOutput, now: float) -> None:
        metrics = self._metrics
        metrics._prompt_tokens.inc(len(event.prompt_token_ids))
        metrics._queried_tokens.inc(len(event.prompt_token_ids))
        metrics._cached_tokens.inc(event.cached_tokens)
        metrics._prompt_sizes.observe(len(event.prompt_token_ids))
        metrics._whole.observe(now - self._arrived)
        if self._first is not None:
            metrics._decode.observe(now - self._first)
        for completion in event.completions:
            metrics._answer_sizes.observe(len(completion.token_ids))
            metrics._success.labels(metrics._model_name, completion.finish_reason or "unknown").inc()
