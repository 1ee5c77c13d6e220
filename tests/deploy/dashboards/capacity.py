"""Capacity: blocks, sequences, memory and cores, against what requests ask for."""

from __future__ import annotations

from tests.deploy.dashboards.panels import Dashboard, Panel, Query, Row, quantiles

_BLOCKS = Row(
    title="KV blocks",
    panels=(
        Panel(
            title="Blocks of the decode tier",
            unit="short",
            stack="normal",
            width=12,
            description="No free ones for long: runbook PdserveKvCacheFull. Mostly reserved: the prefill tier is slow, "
            "and waiting requests hold blocks.",
            queries=(
                Query(expr='sum(pdserve_kv_blocks_held{$model, tier="decode"})', legend="held"),
                Query(expr='sum(pdserve_kv_blocks_reserved{$model, tier="decode"})', legend="reserved"),
                Query(expr='sum(pdserve_kv_blocks_free{$model, tier="decode"})', legend="free"),
            ),
        ),
        Panel(
            title="Blocks that waiting requests need",
            unit="short",
            width=12,
            description="Above 0 for long: add decode workers, or raise --kv-cache-memory.",
            queries=(Query(expr='sum(pdserve_kv_blocks_waiting{$model, tier="decode"})', legend="waiting"),),
        ),
        Panel(
            title="Use by worker",
            unit="percentunit",
            description="Uneven for long: long requests on one worker, or routers that do not see each other's work.",
            queries=(Query(expr="pdserve_kv_cache_usage_perc{$model}", legend="{{tier}} {{instance}}"),),
        ),
        Panel(
            title="Preemptions",
            unit="cps",
            description="Sequences that gave up their blocks. Runbook PdservePreemptions.",
            queries=(
                Query(
                    expr="sum by (instance) (rate(pdserve_num_preemptions_total{$model}[$__rate_interval]))",
                    legend="{{instance}}",
                ),
            ),
        ),
        Panel(
            title="Hits of the prefix caches",
            unit="percentunit",
            description="Share of prompt tokens that a worker had, by tier. Low although prompts repeat: too few "
            "blocks, or different salts.",
            queries=(
                Query(
                    expr="sum by (tier) (rate(pdserve_prefix_cache_hits_total{$model}[$__rate_interval]))"
                    " / (sum by (tier) (rate(pdserve_prefix_cache_queries_total{$model}[$__rate_interval])) > 0)",
                    legend="{{tier}}",
                ),
            ),
        ),
    ),
)

_DEMAND = Row(
    title="Demand",
    panels=(
        Panel(
            title="Arrivals",
            unit="reqps",
            width=6,
            description="Requests on arrival, refused ones included.",
            queries=(
                Query(expr="sum(rate(pdserve_requests_received_total{$model}[$__rate_interval]))", legend="arrivals"),
            ),
        ),
        Panel(
            title="Prompt tokens that arrive",
            unit="suffix: tokens/s",
            width=6,
            description="All of them, and those that no prefill worker has cached: the work of the prefill tier.",
            queries=(
                Query(expr="sum(rate(pdserve_received_prompt_tokens_total{$model}[$__rate_interval]))", legend="all"),
                Query(
                    expr="sum(rate(pdserve_received_uncached_tokens_total{$model}[$__rate_interval]))",
                    legend="uncached",
                ),
            ),
        ),
        Panel(
            title="Prompt length",
            unit="suffix: tokens",
            width=6,
            description="Longer prompts need more prefill workers.",
            queries=quantiles("pdserve_request_prompt_tokens"),
        ),
        Panel(
            title="Completion length",
            unit="suffix: tokens",
            width=6,
            description="Longer answers need more decode workers. max_new_tokens bounds them.",
            queries=quantiles("pdserve_request_generation_tokens"),
        ),
    ),
)

_SCALING = Row(
    title="What tiers are scaled by",
    panels=(
        Panel(
            title="Backlog of the prefill tier",
            unit="s",
            description="The recording rule that prefill workers are scaled by, summed over them. No value: a worker "
            "is not scraped, and nothing is scaled; runbook PdserveWorkersNotScraped.",
            queries=(Query(expr="pdserve:prefill_backlog:seconds{$model}", legend="seconds"),),
        ),
        Panel(
            title="Demand for decode workers",
            unit="short",
            description="The recording rule that decode workers are scaled by: workers that requests would fill, "
            "against those that are ready.",
            queries=(
                Query(expr="pdserve:decode_kv_demand:workers{$model}", legend="wanted"),
                Query(expr='max(pdserve_workers_ready{$model, tier="decode"})', legend="ready"),
            ),
        ),
        Panel(
            title="Requests at the routers",
            unit="short",
            description="The recording rule that routers are scaled by.",
            queries=(Query(expr="pdserve:router_streams:sum{$model}", legend="requests"),),
        ),
    ),
)

_MACHINES = Row(
    title="Memory and cores",
    panels=(
        Panel(
            title="Memory that can still be allocated",
            unit="bytes",
            description="Near 0: the process will be killed. Runbook PdserveMemoryLow.",
            queries=(Query(expr="pdserve_memory_available_bytes{$model}", legend="{{tier}} {{instance}}"),),
        ),
        Panel(
            title="Memory of the processes",
            unit="bytes",
            description="Rises for hours without load: a leak; report it.",
            queries=(
                Query(
                    expr="process_resident_memory_bytes * on (job, instance) group_left (tier)"
                    " (pdserve_ready{$model} >= bool 0)",
                    legend="{{tier}} {{instance}}",
                ),
            ),
        ),
        Panel(
            title="Cores in use",
            unit="short",
            description="Processor seconds per second. All cores in use: the machine is the limit.",
            queries=(
                Query(
                    expr="rate(process_cpu_seconds_total[$__rate_interval]) * on (job, instance) group_left (tier)"
                    " (pdserve_ready{$model} >= bool 0)",
                    legend="{{tier}} {{instance}}",
                ),
            ),
        ),
        Panel(
            title="Borrowed cores",
            unit="short",
            description="Idle cores of other workers in use. 0 under load on a machine with several workers: see slow "
            "tokens in the troubleshooting page.",
            queries=(
                Query(
                    expr="sum by (tier) (rate(pdserve_borrowed_core_seconds_total{$model}[$__rate_interval]))",
                    legend="{{tier}}",
                ),
            ),
        ),
        Panel(
            title="Work computed again",
            unit="cps",
            description="Units whose thread lost its core. Thousands: other programs use the workers' cores.",
            queries=(
                Query(
                    expr="sum by (tier) (rate(pdserve_redone_units_total{$model}[$__rate_interval]))",
                    legend="{{tier}}",
                ),
            ),
        ),
        Panel(
            title="Steps launched ahead",
            unit="percentunit",
            description="GPUs only: share of steps without a wait for the host. Low under load: the host is slow.",
            queries=(
                Query(
                    expr="sum by (tier) (rate(pdserve_steps_ahead_total{$model}[$__rate_interval]))"
                    " / (sum by (tier) (rate(pdserve_iteration_tokens_count{$model}[$__rate_interval])) > 0)",
                    legend="{{tier}}",
                ),
            ),
        ),
    ),
)

DASHBOARD = Dashboard(
    name="capacity",
    title="pdserve / Capacity",
    description="Blocks, sequences, memory and cores, against what requests ask for.",
    rows=(_BLOCKS, _DEMAND, _SCALING, _MACHINES),
)
