"""The handover: how KV blocks travel, what that costs, and what goes wrong."""

from __future__ import annotations

from tests.deploy.dashboards.panels import Dashboard, Panel, Query, Row, quantiles

_COST = Row(
    title="What it costs",
    panels=(
        Panel(
            title="Time not hidden by computing",
            unit="s",
            description="From the end of a prompt's last step to its last byte: what the handover adds. Rises: look at "
            "the path below, then at --layer-groups.",
            queries=quantiles("pdserve_kv_transfer_exposed_seconds"),
        ),
        Panel(
            title="From the first token to the second",
            unit="s",
            description="The first comes from prefill, the second from decode: what a user sees of the handover.",
            queries=quantiles("pdserve_handover_gap_seconds"),
        ),
        Panel(
            title="Time in the phase wire",
            unit="s",
            description="Wait for KV after the first token. It should be near 0.",
            queries=quantiles("pdserve_request_phase_seconds", '$model, phase="wire"'),
        ),
        Panel(
            title="Time on the wire",
            unit="s",
            description="Time with at least one block on the wire, per transfer. Compare with the bandwidth.",
            queries=quantiles("pdserve_kv_transfer_seconds", '$model, tier="prefill"'),
        ),
        Panel(
            title="Bandwidth while sending",
            unit="Bps",
            description="Bytes by time on the wire, by sender. Far below what pdserve doctor measures: "
            "runbook PdserveTransportDegraded.",
            queries=(
                Query(
                    expr="sum by (instance)"
                    ' (rate(pdserve_kv_transfer_bytes_total{$model, direction="sent"}[$__rate_interval]))'
                    " / (sum by (instance)"
                    ' (rate(pdserve_kv_transfer_seconds_sum{$model, tier="prefill"}[$__rate_interval])) > 0)',
                    legend="{{instance}}",
                ),
            ),
        ),
        Panel(
            title="KV bytes",
            unit="Bps",
            description="By direction and transport. Sent without received: transfers fail.",
            queries=(
                Query(
                    expr="sum by (direction, transport)"
                    " (rate(pdserve_kv_transfer_bytes_total{$model}[$__rate_interval]))",
                    legend="{{direction}} {{transport}}",
                ),
            ),
        ),
    ),
)

_FAILURES = Row(
    title="What goes wrong",
    panels=(
        Panel(
            title="Transfers by outcome",
            unit="cps",
            stack="normal",
            description="peer_lost, transfer_timeout: runbook PdserveTransferTimeouts. digest_mismatch: "
            "PdserveDigestMismatch. layout_mismatch: PdserveLayoutMismatch. Other errors: PdserveTransfersFail.",
            queries=(
                Query(
                    expr="sum by (outcome) (rate(pdserve_kv_transfers_total{$model}[$__rate_interval]))",
                    legend="{{outcome}}",
                ),
            ),
        ),
        Panel(
            title="Corrupted transfers within 6 hours",
            unit="short",
            description="By receiver. Any at all: runbook PdserveDigestMismatch.",
            queries=(
                Query(
                    expr="sum by (tier, instance)"
                    ' (increase(pdserve_kv_transfers_total{$model, outcome="digest_mismatch"}[6h]))',
                    legend="{{tier}} {{instance}}",
                ),
            ),
        ),
        Panel(
            title="Attempts given up, by error",
            unit="reqps",
            stack="normal",
            description="Runbook PdserveAttemptsRepeated.",
            queries=(
                Query(
                    expr="sum by (reason) (rate(pdserve_request_retries_total{$model}[$__rate_interval]))",
                    legend="{{reason}}",
                ),
            ),
        ),
        Panel(
            title="Prompts that fell back to decode workers",
            unit="reqps",
            stack="normal",
            description="No prefill worker could compute them. Runbooks PdserveNoPrefillWorker and "
            "PdserveAttemptsRepeated.",
            queries=(
                Query(
                    expr="sum by (reason) (rate(pdserve_prefill_fallbacks_total{$model}[$__rate_interval]))",
                    legend="{{reason}}",
                ),
            ),
        ),
        Panel(
            title="Transfers in progress",
            unit="short",
            description="By worker. Above 0 without requests: blocks wait for their lease; if that does not end, "
            "report it.",
            queries=(Query(expr="pdserve_kv_transfers_active{$model}", legend="{{tier}} {{instance}}"),),
        ),
        Panel(
            title="Slower path than expected",
            unit="short",
            description="1: UCX fell back, for example to TCP. Runbook PdserveTransportDegraded.",
            queries=(Query(expr="pdserve_transport_degraded{$model}", legend="{{tier}} {{instance}}"),),
        ),
        Panel(
            title="Paths",
            kind="table",
            unit="short",
            width=16,
            description="Expected and actual path of each pair of workers.",
            queries=(Query(expr="count by (instance, peer, expected, actual) (pdserve_transport_path_info{$model})"),),
        ),
    ),
)

DASHBOARD = Dashboard(
    name="handover",
    title="pdserve / Handover",
    description="How KV blocks travel, what that costs, and what goes wrong.",
    rows=(_COST, _FAILURES),
)
