"""``/metrics`` for Prometheus, with the names that llama-server uses."""

from __future__ import annotations

import time
from collections.abc import Iterator

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.api.service import Engine
from app.worker.messages import Report

router = APIRouter()

PREFIX = "llamacpp:"
_STARTED = time.time()


@router.get("/metrics")
async def metrics(service: Engine) -> Response:
    registry = CollectorRegistry()
    registry.register(_Metrics(service.backend.report()))
    response = Response(generate_latest(registry), media_type="text/plain; version=0.0.4")
    # Spelled as llama-server does, for clients that compare letter by letter.
    response.raw_headers.append((b"Process-Start-Time-Unix", str(int(_STARTED)).encode()))
    return response


class _Metrics(Collector):
    """Turns a report into metrics. A counter's name ends in ``_total``."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        report, n_running = self._report, len(self._report.running)
        for name, what, value in (
            ("prompt_tokens", "Prompt tokens read, without cached ones", report.n_read),
            ("prompt_tokens_cached", "Prompt tokens found in the cache", report.n_reused),
            ("prompt_seconds", "Time of reading prompts", report.prefill_seconds),
            ("tokens_predicted", "Tokens written", report.n_tokens),
            ("tokens_predicted_seconds", "Time of writing tokens", report.decode_seconds),
            ("n_decode", "Steps of all texts", report.n_steps),
            ("spec_decode_num_draft_tokens", "Draft tokens", report.n_drafted),
            ("spec_decode_num_accepted_tokens", "Accepted draft tokens", report.n_accepted),
            ("spec_decode_num_drafts", "Steps with drafts", report.n_drafts),
        ):
            yield CounterMetricFamily(PREFIX + name, what, value)
        counts = CounterMetricFamily(
            f"{PREFIX}spec_decode_num_accepted_tokens_per_pos",
            "Steps that accepted the draft at this position",
            labels=["position"],
        )
        for position, n_steps in enumerate(report.accepted or [0]):
            counts.add_metric([str(position)], n_steps)
        yield counts
        read = report.n_read / report.prefill_seconds if report.prefill_seconds else 0.0
        written = report.n_later / report.decode_seconds if report.decode_seconds else 0.0
        for name, what, value in (
            ("prompt_tokens_seconds", "Prompt tokens read per second", read),
            ("predicted_tokens_seconds", "Tokens written per second", written),
            ("n_tokens_max", "Longest prompt and reply, in tokens", report.n_longest),
            ("requests_processing", "Requests that are written", n_running),
            ("requests_deferred", "Requests that wait", report.n_waiting),
            ("n_busy_slots_per_decode", "Texts in a step now", n_running),
        ):
            yield GaugeMetricFamily(PREFIX + name, what, value)
