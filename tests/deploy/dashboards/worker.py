"""One worker: what it is, what it does, and what limits it."""

from __future__ import annotations

from tests.deploy.dashboards.panels import Dashboard, Panel, Query, Row, quantiles

_IDENTITY = Row(
    title="What it is",
    panels=(
        Panel(
            title="Ready",
            kind="stat",
            width=4,
            unit="bool_yes_no",
            description="No: it loads, drains or hangs. Runbook PdserveWorkerNotReady.",
            queries=(Query(expr="pdserve_ready{$worker}"),),
        ),
        Panel(
            title="Up for",
            kind="stat",
            width=4,
            unit="s",
            description="Time since its process started. Short without a rollout: see its last exit.",
            queries=(Query(expr="time() - pdserve_start_time_seconds{$worker}"),),
        ),
        Panel(
            title="Without progress for",
            kind="stat",
            width=4,
            unit="s",
            red_from=60,
            description="Age of the running step while there is work. Runbook PdserveStepLoopHung.",
            queries=(Query(expr="pdserve_step_loop_stalled_seconds{$worker}"),),
        ),
        Panel(
            title="Last exit",
            kind="table",
            width=12,
            unit="short",
            description="How its previous process ended; empty on a first start. Runbooks PdserveWorkerFailed and "
            "PdserveOutOfMemoryUnderLoad.",
            queries=(Query(expr="count by (reason, during) (pdserve_last_exit_info{$worker})"),),
        ),
        Panel(
            title="Worker",
            kind="table",
            width=12,
            unit="short",
            description="Its settings. They must be those of the other workers.",
            queries=(
                Query(
                    expr="count by (worker_id, epoch, version, transport, device, dtype, block_size,"
                    " tensor_parallel_size) (pdserve_worker_info{$worker})"
                ),
            ),
        ),
        Panel(
            title="Kernels",
            kind="table",
            width=12,
            unit="short",
            description="A reason is why the fast ones are not used. Runbook PdserveSlowKernels.",
            queries=(
                Query(
                    expr="count by (kernels, instruction_set, quantization, mode, reason)"
                    " (pdserve_kernels_info{$worker})"
                ),
            ),
        ),
    ),
)

_WORK = Row(
    title="What it does",
    panels=(
        Panel(
            title="Requests",
            unit="short",
            description="Many waiting and few running: blocks are short, or a long prompt is computed.",
            queries=(
                Query(expr="pdserve_num_requests_running{$worker}", legend="running"),
                Query(expr="pdserve_num_requests_waiting{$worker}", legend="waiting"),
            ),
        ),
        Panel(
            title="Tokens",
            unit="suffix: tokens/s",
            description="Prompt tokens computed, and tokens generated.",
            queries=(
                Query(expr="rate(pdserve_prompt_tokens_total{$worker}[$__rate_interval])", legend="prompt"),
                Query(expr="rate(pdserve_generation_tokens_total{$worker}[$__rate_interval])", legend="generated"),
            ),
        ),
        Panel(
            title="Backlog",
            unit="s",
            description="Time that its queued prompts will take at its measured rate.",
            queries=(Query(expr="pdserve_prefill_backlog_seconds{$worker}", legend="backlog"),),
        ),
        Panel(
            title="Step time by phase",
            unit="s",
            stack="normal",
            description="Mean per step. forward (on a CPU) or sample (on a GPU) should dominate.",
            queries=(
                Query(
                    expr="rate(pdserve_engine_step_seconds_sum{$worker}[$__rate_interval])"
                    " / (rate(pdserve_engine_step_seconds_count{$worker}[$__rate_interval]) > 0)",
                    legend="{{phase}}",
                ),
            ),
        ),
        Panel(
            title="Tokens per step",
            unit="short",
            description="The batch; of prefill, the chunks.",
            queries=quantiles("pdserve_iteration_tokens", "$worker"),
        ),
        Panel(
            title="Time in steps",
            unit="percentunit",
            description="Share of time in which the step thread works. Near 1: this worker is the limit.",
            queries=(
                Query(expr="sum(rate(pdserve_engine_step_seconds_sum{$worker}[$__rate_interval]))", legend="in steps"),
            ),
        ),
        Panel(
            title="KV blocks",
            unit="short",
            stack="normal",
            description="No free ones: runbook PdserveKvCacheFull.",
            queries=(
                Query(expr="pdserve_kv_blocks_held{$worker}", legend="held"),
                Query(expr="pdserve_kv_blocks_reserved{$worker}", legend="reserved"),
                Query(expr="pdserve_kv_blocks_free{$worker}", legend="free"),
            ),
        ),
        Panel(
            title="Preemptions and requests ended by NaN",
            unit="cps",
            description="Runbooks PdservePreemptions and PdserveInvalidLogits.",
            queries=(
                Query(expr="rate(pdserve_num_preemptions_total{$worker}[$__rate_interval])", legend="preemptions"),
                Query(expr="rate(pdserve_sampling_failures_total{$worker}[$__rate_interval])", legend="NaN"),
            ),
        ),
        Panel(
            title="Hits of the prefix cache",
            unit="percentunit",
            description="Share of prompt tokens.",
            queries=(
                Query(
                    expr="rate(pdserve_prefix_cache_hits_total{$worker}[$__rate_interval])"
                    " / (rate(pdserve_prefix_cache_queries_total{$worker}[$__rate_interval]) > 0)",
                    legend="hits",
                ),
            ),
        ),
    ),
)

_SURROUNDINGS = Row(
    title="Handover, memory, cores, Redis",
    panels=(
        Panel(
            title="Transfers by outcome",
            unit="cps",
            stack="normal",
            description="Errors on this worker alone: restart it, then look at its machine.",
            queries=(
                Query(
                    expr="sum by (outcome) (rate(pdserve_kv_transfers_total{$worker}[$__rate_interval]))",
                    legend="{{outcome}}",
                ),
            ),
        ),
        Panel(
            title="Time of transfers",
            unit="s",
            description="Prefill: on the wire. Decode: from the first block to the last, computing included.",
            queries=quantiles("pdserve_kv_transfer_seconds", "$worker"),
        ),
        Panel(
            title="KV bytes",
            unit="Bps",
            description="Sent or received, by transport.",
            queries=(
                Query(
                    expr="sum by (direction, transport)"
                    " (rate(pdserve_kv_transfer_bytes_total{$worker}[$__rate_interval]))",
                    legend="{{direction}} {{transport}}",
                ),
            ),
        ),
        Panel(
            title="Memory",
            unit="bytes",
            description="What the process holds, and what it can still allocate. Runbook PdserveMemoryLow.",
            queries=(
                Query(expr="process_resident_memory_bytes{$worker}", legend="held"),
                Query(expr="pdserve_memory_available_bytes{$worker}", legend="available"),
            ),
        ),
        Panel(
            title="Cores",
            unit="short",
            description="In use, and those of them borrowed.",
            queries=(
                Query(expr="rate(process_cpu_seconds_total{$worker}[$__rate_interval])", legend="in use"),
                Query(expr="rate(pdserve_borrowed_core_seconds_total{$worker}[$__rate_interval])", legend="borrowed"),
            ),
        ),
        Panel(
            title="Work computed again",
            unit="cps",
            description="Thousands: other programs use its cores.",
            queries=(Query(expr="rate(pdserve_redone_units_total{$worker}[$__rate_interval])", legend="units"),),
        ),
        Panel(
            title="Failures towards Redis",
            unit="cps",
            description="Heartbeats, KV events, and connections. Runbook PdserveHeartbeatsLost.",
            queries=(
                Query(expr="rate(pdserve_registry_failures_total{$worker}[$__rate_interval])", legend="heartbeats"),
                Query(expr="rate(pdserve_kv_event_failures_total{$worker}[$__rate_interval])", legend="KV events"),
                Query(expr="rate(pdserve_redis_outages_total{$worker}[$__rate_interval])", legend="connections"),
            ),
        ),
        Panel(
            title="Open files",
            unit="short",
            description="Against the limit. Near it: raise ulimit -n.",
            queries=(
                Query(expr="process_open_fds{$worker}", legend="open"),
                Query(expr="process_max_fds{$worker}", legend="limit"),
            ),
        ),
    ),
)

DASHBOARD = Dashboard(
    name="worker",
    title="pdserve / Worker",
    description="One worker: what it is, what it does, and what limits it.",
    rows=(_IDENTITY, _WORK, _SURROUNDINGS),
    of_one_worker=True,
)
