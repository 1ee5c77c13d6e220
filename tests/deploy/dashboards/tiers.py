"""The two tiers: which of them is short, and which waits for the other."""

from __future__ import annotations

from tests.deploy.dashboards.panels import Dashboard, Panel, Query, Row, quantiles

_PHASES = Row(
    title="Which tier is short",
    panels=(
        Panel(
            title="Share of time by phase",
            unit="percentunit",
            stack="percent",
            width=12,
            description="queue and reserve: the decode tier is short, add decode workers. prefill: the prefill tier is "
            "short, add prefill workers. wire: neither; look at Handover. decode: what should dominate.",
            queries=(
                Query(
                    expr="sum by (phase) (rate(pdserve_request_phase_seconds_sum{$model}[$__rate_interval]))",
                    legend="{{phase}}",
                ),
            ),
        ),
        Panel(
            title="Mean time of a request in each phase",
            unit="s",
            width=12,
            description="A phase that grows while the load does not: its tier lost workers or speed.",
            queries=(
                Query(
                    expr="sum by (phase) (rate(pdserve_request_phase_seconds_sum{$model}[$__rate_interval]))"
                    " / (sum by (phase) (rate(pdserve_request_phase_seconds_count{$model}[$__rate_interval])) > 0)",
                    legend="{{phase}}",
                ),
            ),
        ),
        Panel(
            title="Ready workers",
            unit="short",
            description="As routers see them. Fewer than configured: pdserve status, and the alerts on restarts.",
            queries=(Query(expr="max by (tier) (pdserve_workers_ready{$model})", legend="{{tier}}"),),
        ),
        Panel(
            title="Prompts by the tier that prefilled them",
            unit="reqps",
            stack="normal",
            description="More on decode workers than usual: see the reasons next to it.",
            queries=(
                Query(expr="sum by (tier) (rate(pdserve_prefills_total{$model}[$__rate_interval]))", legend="{{tier}}"),
            ),
        ),
        Panel(
            title="Reasons for prefill on decode workers",
            unit="reqps",
            stack="normal",
            description="load: the prefill tier is short. fallback: it failed; runbook PdserveAttemptsRepeated.",
            queries=(
                Query(
                    expr="sum by (reason) (rate(pdserve_local_prefills_total{$model}[$__rate_interval]))",
                    legend="{{reason}}",
                ),
            ),
        ),
    ),
)

_PREFILL = Row(
    title="Prefill tier",
    panels=(
        Panel(
            title="Backlog",
            unit="s",
            description="Time that each worker needs for its queued prompts, and the routers' queue. Above your TTFT: "
            "runbook PdservePrefillBacklog.",
            queries=(
                Query(
                    expr='pdserve_prefill_backlog_seconds{$model, tier=~"prefill|router"}',
                    legend="{{tier}} {{instance}}",
                ),
            ),
        ),
        Panel(
            title="Rate while computing",
            unit="suffix: tokens/s",
            description="Prompt tokens per second of the steps that computed them. One worker below the others: other "
            "programs on its cores, or a throttled machine.",
            queries=(Query(expr='pdserve_prefill_tokens_per_second{$model, tier="prefill"}', legend="{{instance}}"),),
        ),
        Panel(
            title="Demand against rate",
            unit="suffix: tokens/s",
            description="Uncached prompt tokens that arrive, against the rates of all prefill workers. Demand near the "
            "rate: add prefill workers.",
            queries=(
                Query(
                    expr="sum(rate(pdserve_received_uncached_tokens_total{$model}[$__rate_interval]))", legend="demand"
                ),
                Query(expr='sum(pdserve_prefill_tokens_per_second{$model, tier="prefill"})', legend="rate"),
            ),
        ),
        Panel(
            title="Queued prompt tokens",
            unit="short",
            description="Accepted and not yet computed, by worker. Uneven for long: routers see stale loads; look at "
            "Redis.",
            queries=(Query(expr='pdserve_queued_prompt_tokens{$model, tier="prefill"}', legend="{{instance}}"),),
        ),
        Panel(
            title="Prompts found in prefix caches",
            unit="percentunit",
            description="Share of prompt tokens. A fall means more work for the prefill tier: changed system prompts "
            "or salts, or an emptied index.",
            queries=(
                Query(
                    expr="sum(rate(pdserve_prompt_tokens_cached_total{$model}[$__rate_interval]))"
                    ' / (sum(rate(pdserve_prompt_tokens_total{$model, tier="router"}[$__rate_interval])) > 0)',
                    legend="cached",
                ),
            ),
        ),
        Panel(
            title="Time in the phase prefill",
            unit="s",
            description="Queued or computed at the prefill tier. Grows with backlog and prompt length.",
            queries=quantiles("pdserve_request_phase_seconds", '$model, phase="prefill"'),
        ),
    ),
)

_DECODE = Row(
    title="Decode tier",
    panels=(
        Panel(
            title="Sequences against their limit",
            unit="short",
            description="Running requests of all decode workers, and the sum of --max-num-seqs. At the limit with free "
            "blocks: raise it. Otherwise add decode workers.",
            queries=(
                Query(expr='sum(pdserve_num_requests_running{$model, tier="decode"})', legend="running"),
                Query(expr='sum(pdserve_max_num_seqs{$model, tier="decode"})', legend="limit"),
            ),
        ),
        Panel(
            title="Wait for blocks",
            unit="short",
            description="Requests that wait for blocks or for a step, by worker. Runbook PdserveKvCacheFull.",
            queries=(Query(expr='pdserve_num_requests_waiting{$model, tier="decode"}', legend="{{instance}}"),),
        ),
        Panel(
            title="Time in the phase reserve",
            unit="s",
            description="Wait for a decode worker. If it dominates, the decode tier is short, whatever prefill does.",
            queries=quantiles("pdserve_request_phase_seconds", '$model, phase="reserve"'),
        ),
        Panel(
            title="Step time by phase",
            unit="s",
            stack="normal",
            description="Mean per step. forward (on a CPU) or sample (on a GPU) should dominate; otherwise the host is "
            "slow. Runbook PdserveTokensSlow.",
            queries=(
                Query(
                    expr="sum by (phase)"
                    ' (rate(pdserve_engine_step_seconds_sum{$model, tier="decode"}[$__rate_interval]))'
                    " / (sum by (phase)"
                    ' (rate(pdserve_engine_step_seconds_count{$model, tier="decode"}[$__rate_interval])) > 0)',
                    legend="{{phase}}",
                ),
            ),
        ),
        Panel(
            title="Tokens per step",
            unit="short",
            description="The batch. Low with many waiting requests: blocks or --max-num-seqs limit it.",
            queries=quantiles("pdserve_iteration_tokens", '$model, tier="decode"'),
        ),
        Panel(
            title="Generated tokens",
            unit="suffix: tokens/s",
            description="By worker. One worker far below the others: look at its dashboard.",
            queries=(
                Query(
                    expr="sum by (instance)"
                    ' (rate(pdserve_generation_tokens_total{$model, tier="decode"}[$__rate_interval]))',
                    legend="{{instance}}",
                ),
            ),
        ),
    ),
)

DASHBOARD = Dashboard(
    name="tiers",
    title="pdserve / Tiers",
    description="Which tier is short, and which waits for the other.",
    rows=(_PHASES, _PREFILL, _DECODE),
)
