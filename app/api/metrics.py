"""``/metrics`` for Prometheus, with the names that llama-server and vLLM use."""

from __future__ import annotations

import time
from collections.abc import Iterator

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.api.service import Service
from app.worker.messages import Report

LLAMA, VLLM = "llamacpp:", "vllm:"
_STARTED = time.time()


def routes(service: Service) -> APIRouter:
    """The route that ``service`` answers."""
    router = APIRouter()

    @router.get("/metrics")
    async def metrics() -> Response:
        registry = CollectorRegistry()
        registry.register(_Found(service.backend.report()))
        response = Response(generate_latest(registry), media_type="text/plain; version=0.0.4")
        # Spelled as llama-server does, for clients that compare letter by letter.
        response.raw_headers.append((b"Process-Start-Time-Unix", str(int(_STARTED)).encode()))
        return response

    return router


class _Found(Collector):
    """Turns a report into metrics. A counter's name ends in ``_total``."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        report = self._report
        for name, what, value in (
            ("prompt_tokens", "Prompt tokens read, without cached ones", report.n_read),
            ("prompt_tokens_cached", "Prompt tokens found in the cache", report.n_reused),
            ("prompt_seconds", "Time of reading prompts", report.prefill_seconds),
            ("tokens_predicted", "Tokens written", report.n_tokens),
            ("tokens_predicted_seconds", "Time of writing tokens", report.decode_seconds),
            ("n_decode", "Steps of all texts", report.n_steps),
        ):
            yield CounterMetricFamily(LLAMA + name, what, value)
        for prefix in (LLAMA, VLLM):
            for name, what, value in (
                ("spec_decode_num_draft_tokens", "Draft tokens", report.n_drafted),
                ("spec_decode_num_accepted_tokens", "Accepted draft tokens", report.n_accepted),
                ("spec_decode_num_drafts", "Steps with drafts", report.n_drafts),
            ):
                yield CounterMetricFamily(prefix + name, what, value)
            counts = CounterMetricFamily(
                f"{prefix}spec_decode_num_accepted_tokens_per_pos",
                "Steps that accepted the draft at this position",
                labels=["position"],
            )
            for position, n_steps in enumerate(report.accepted or [0]):
                counts.add_metric([str(position)], n_steps)
            yield counts
        n_running = len(report.running)
        speeds = (
            ("prompt_tokens_seconds", report.n_read, report.prefill_seconds),
            ("predicted_tokens_seconds", report.n_later, report.decode_seconds),
        )
        for name, n_tokens, seconds in speeds:
            value = n_tokens / seconds if seconds else 0.0
            yield GaugeMetricFamily(LLAMA + name, "Tokens per second since the start", value)
        for name, what, value in (
            (f"{LLAMA}n_tokens_max", "Longest prompt and reply, in tokens", report.n_longest),
            (f"{LLAMA}requests_processing", "Requests that are written", n_running),
            (f"{LLAMA}requests_deferred", "Requests that wait", report.n_waiting),
            (f"{LLAMA}n_busy_slots_per_decode", "Texts in a step now", n_running),
            (f"{VLLM}num_requests_running", "Requests that are written", n_running),
            (f"{VLLM}num_requests_waiting", "Requests that wait", report.n_waiting),
        ):
            yield GaugeMetricFamily(name, what, value)
