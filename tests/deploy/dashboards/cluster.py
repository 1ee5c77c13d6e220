"""The whole cluster: what clients get, and whether anything is wrong. The first page to look at."""

from __future__ import annotations

from tests.deploy.dashboards.panels import Dashboard, Panel, Query, Row, quantiles

_NOW = Row(
    title="Now",
    panels=(
        Panel(
            title="Ready decode workers",
            kind="stat",
            width=4,
            unit="short",
            description="0: every request gets 503. Runbook PdserveNoDecodeWorker.",
            queries=(Query(expr='max(pdserve_workers_ready{$model, tier="decode"})'),),
        ),
        Panel(
            title="Ready prefill workers",
            kind="stat",
            width=4,
            unit="short",
            description="0 although some are expected: decode workers prefill. Runbook PdserveNoPrefillWorker.",
            queries=(Query(expr='max(pdserve_workers_ready{$model, tier="prefill"})'),),
        ),
        Panel(
            title="Requests per second",
            kind="stat",
            width=4,
            unit="reqps",
            description="Requests on arrival, refused ones included.",
            queries=(Query(expr="sum(rate(pdserve_requests_received_total{$model}[$__rate_interval]))"),),
        ),
        Panel(
            title="Failed requests",
            kind="stat",
            width=4,
            unit="percentunit",
            red_from=0.01,
            description="Share of the requests that ended. Above 1 %: runbook PdserveRequestsFailing.",
            queries=(
                Query(
                    expr='sum(rate(pdserve_request_outcomes_total{$model, outcome="failed"}[$__rate_interval]))'
                    " / (sum(rate(pdserve_request_outcomes_total{$model}[$__rate_interval])) > 0)"
                ),
            ),
        ),
        Panel(
            title="Degraded",
            kind="stat",
            width=4,
            unit="short",
            red_from=1,
            description="Number of subsystems that any router calls degraded; the row Health names them.",
            queries=(Query(expr="sum(max by (subject) (pdserve_degraded{$model}))"),),
        ),
        Panel(
            title="Processes restarted within an hour",
            kind="stat",
            width=4,
            unit="short",
            red_from=1,
            description="Routers and workers. Without a rollout: runbooks PdserveCrashLoop and PdserveWorkerFailed.",
            queries=(Query(expr="sum(changes(pdserve_start_time_seconds{$model}[1h]))"),),
        ),
    ),
)

_REQUESTS = Row(
    title="Requests",
    panels=(
        Panel(
            title="Ended, by outcome",
            unit="reqps",
            stack="normal",
            description="failed: look for request_ended state=failed in the router's log. Many cancelled: clients give "
            "up waiting; look at the latencies below.",
            queries=(
                Query(
                    expr="sum by (outcome) (rate(pdserve_request_outcomes_total{$model}[$__rate_interval]))",
                    legend="{{outcome}}",
                ),
            ),
        ),
        Panel(
            title="Refused, by reason",
            unit="reqps",
            stack="normal",
            description="Anything but draining: the cluster is too small or a tier is away. "
            "Runbook PdserveRequestsRefused.",
            queries=(
                Query(
                    expr="sum by (reason) (rate(pdserve_admission_rejections_total{$model}[$__rate_interval]))",
                    legend="{{reason}}",
                ),
            ),
        ),
        Panel(
            title="Running and waiting at the routers",
            unit="short",
            description="Waiting that rises: runbook PdserveQueueGrows.",
            queries=(
                Query(expr='sum(pdserve_num_requests_running{$model, tier="router"})', legend="running"),
                Query(expr='sum(pdserve_num_requests_waiting{$model, tier="router"})', legend="waiting"),
            ),
        ),
        Panel(
            title="Tokens",
            unit="suffix: tokens/s",
            description="Prompt tokens of requests with a first token, those of them from prefix caches, and tokens "
            "sent to clients.",
            queries=(
                Query(
                    expr='sum(rate(pdserve_prompt_tokens_total{$model, tier="router"}[$__rate_interval]))',
                    legend="prompt",
                ),
                Query(expr="sum(rate(pdserve_prompt_tokens_cached_total{$model}[$__rate_interval]))", legend="cached"),
                Query(
                    expr='sum(rate(pdserve_generation_tokens_total{$model, tier="router"}[$__rate_interval]))',
                    legend="generated",
                ),
            ),
        ),
        Panel(
            title="Share of time by phase",
            unit="percentunit",
            stack="percent",
            description="Where requests spend their time. The dashboard Tiers says which tier is short.",
            queries=(
                Query(
                    expr="sum by (phase) (rate(pdserve_request_phase_seconds_sum{$model}[$__rate_interval]))",
                    legend="{{phase}}",
                ),
            ),
        ),
        Panel(
            title="Attempts repeated",
            unit="reqps",
            stack="normal",
            description="Attempts that were given up, by error. Runbook PdserveAttemptsRepeated.",
            queries=(
                Query(
                    expr="sum by (reason) (rate(pdserve_request_retries_total{$model}[$__rate_interval]))",
                    legend="{{reason}}",
                ),
            ),
        ),
    ),
)

_LATENCY = Row(
    title="Latency",
    panels=(
        Panel(
            title="Time to first token",
            unit="s",
            width=6,
            description="Runbook PdserveFirstTokensSlow. A point with an exemplar leads to a request or its trace.",
            queries=quantiles("pdserve_time_to_first_token_seconds"),
        ),
        Panel(
            title="Time between tokens",
            unit="s",
            width=6,
            description="Runbook PdserveTokensSlow.",
            queries=quantiles("pdserve_inter_token_latency_seconds"),
        ),
        Panel(
            title="Mean time per output token of a request",
            unit="s",
            width=6,
            description="Rises with the batch of the decode workers; compare with the sequences on Capacity.",
            queries=quantiles("pdserve_request_time_per_output_token_seconds"),
        ),
        Panel(
            title="Whole request",
            unit="s",
            width=6,
            description="Depends on the length of answers; compare with the lengths on Capacity.",
            queries=quantiles("pdserve_e2e_request_latency_seconds"),
        ),
    ),
)

_HEALTH = Row(
    title="Health",
    panels=(
        Panel(
            title="Degraded subsystems",
            unit="short",
            description="redis: runbook PdserveRedisAway. prefill: PdserveNoPrefillWorker. "
            "layout: PdserveLayoutsDiffer. transport: PdserveTransportDegraded.",
            queries=(Query(expr="max by (subject) (pdserve_degraded{$model})", legend="{{subject}}"),),
        ),
        Panel(
            title="Ready processes",
            unit="short",
            stack="normal",
            description="Processes that accept work. A tier that shrinks without a scale-down: restarts, or runbook "
            "PdserveWorkerNotReady.",
            queries=(Query(expr="sum by (tier) (pdserve_ready{$model})", legend="{{tier}}"),),
        ),
        Panel(
            title="Failed heartbeats and reads of the registry",
            unit="cps",
            description="Redis away: all processes. One process only: runbook PdserveHeartbeatsLost.",
            queries=(
                Query(
                    expr="sum by (tier) (rate(pdserve_registry_failures_total{$model}[$__rate_interval]))",
                    legend="{{tier}}",
                ),
            ),
        ),
        Panel(
            title="Clocks against that of Redis",
            unit="s",
            description="Lines that are more than a second from each other: runbook PdserveClockSkew.",
            queries=(Query(expr="pdserve_clock_skew_seconds{$model}", legend="{{tier}} {{instance}}"),),
        ),
        Panel(
            title="Workers",
            kind="table",
            unit="short",
            width=16,
            description="Two versions for more than a rollout: runbook PdserveVersionSkew.",
            queries=(
                Query(
                    expr="count by (tier, worker_id, instance, version, transport, device, dtype, block_size)"
                    " (pdserve_worker_info{$model})"
                ),
            ),
        ),
    ),
)

DASHBOARD = Dashboard(
    name="cluster",
    title="pdserve / Cluster",
    description="What clients get, and whether anything is wrong.",
    rows=(_NOW, _REQUESTS, _LATENCY, _HEALTH),
)
