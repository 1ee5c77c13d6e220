"""Recovery: how requests outlive what fails, and what was refused so that no token is wrong."""

from __future__ import annotations

from tests.deploy.dashboards.panels import Dashboard, Panel, Query, Row, quantiles


def _by(metric: str, *labels: str) -> tuple[Query, ...]:
    """Events per second of a counter, by labels."""
    return (
        Query(
            expr=f"sum by ({', '.join(labels)}) (rate({metric}{{$model}}[$__rate_interval]))",
            legend=" ".join(f"{{{{{label}}}}}" for label in labels),
        ),
    )


_STREAMS = Row(
    title="Streams",
    panels=(
        Panel(
            title="Pauses of a second or more, by reason",
            unit="cps",
            stack="normal",
            description="What clients notice. recovery: see the errors next to it. move: see Moves below. other: busy "
            "or stopped workers, or slow clients. Runbook PdserveStreamsStall.",
            queries=_by("pdserve_stream_stalls_total", "reason"),
        ),
        Panel(
            title="Outputs that went on behind a failure, by error",
            unit="cps",
            stack="normal",
            description="peer_lost: a worker is gone; look for processes restarted on Cluster. "
            "Runbook PdserveAttemptsRepeated.",
            queries=_by("pdserve_recoveries_total", "reason"),
        ),
        Panel(
            title="Pause behind a failure",
            unit="s",
            description="From the last token before it to the next. Near the silence timeout: workers stand still "
            "rather than end. Longer: no worker was ready; runbook PdserveNoDecodeWorker.",
            queries=quantiles("pdserve_stream_pause_seconds"),
        ),
        Panel(
            title="Streams resumed at a router",
            unit="cps",
            description="By clients, behind a lost connection. not kept: a resume would compute more again; look at "
            "Redis, runbook PdserveRedisAway.",
            queries=(
                Query(expr="sum(rate(pdserve_streams_resumed_total{$model}[$__rate_interval]))", legend="resumed"),
                Query(expr="sum(rate(pdserve_streams_taken_total{$model}[$__rate_interval]))", legend="taken"),
                Query(expr="sum(rate(pdserve_streams_not_kept_total{$model}[$__rate_interval]))", legend="not kept"),
            ),
        ),
        Panel(
            title="Requests ended by their clients",
            unit="reqps",
            stack="normal",
            description="Many deadline_exceeded: clients expect more than the cluster gives; look at latencies on "
            "Cluster.",
            queries=_by("pdserve_requests_ended_early_total", "reason"),
        ),
        Panel(
            title="Answers that changed their numerics class",
            unit="cps",
            description="No decode worker of their class was left. Give all decode workers the same "
            "--instruction-set and kernels.",
            queries=(Query(expr="sum(rate(pdserve_numerics_changes_total{$model}[$__rate_interval]))"),),
        ),
    ),
)

_MOVES = Row(
    title="Moves and roles",
    panels=(
        Panel(
            title="Moves by reason and outcome",
            unit="cps",
            stack="normal",
            description="drain: a rollout. full: blocks run short; runbook PdserveKvCacheFull. failed: the request "
            "stays; runbook PdserveMovesFail.",
            queries=_by("pdserve_migrations_total", "reason", "outcome"),
        ),
        Panel(
            title="Pause of a move",
            unit="s",
            description="The longest time between tokens while a request moved. Far above the time between tokens: "
            "workers compute too much at once, or the wire is slow.",
            queries=quantiles("pdserve_migration_pause_seconds"),
        ),
        Panel(
            title="Changes of roles",
            unit="cps",
            description="By the policy, again and again: a tier loses its workers; look for restarts on Cluster.",
            queries=_by("pdserve_role_changes_total", "role", "reason"),
        ),
        Panel(
            title="Requests of a former role",
            unit="short",
            description="By worker. It does not fall: these requests are long, and no other worker takes them.",
            queries=(Query(expr="pdserve_former_role_requests{$model}", legend="{{instance}}"),),
        ),
    ),
)

_COPIES = Row(
    title="Copies",
    panels=(
        Panel(
            title="Copies sent, by outcome",
            unit="cps",
            stack="normal",
            description="no_free_blocks: the other worker is full, which costs nothing. Other errors: runbook "
            "PdserveCopiesFail.",
            queries=_by("pdserve_replications_total", "outcome"),
        ),
        Panel(
            title="Blocks that were not computed again",
            unit="short",
            description="Blocks of output that requests found as copies when they went on, within the interval. 0 "
            "beside outputs that went on: copies are off, late or evicted.",
            queries=(
                Query(
                    expr="sum by (instance) (increase(pdserve_replica_blocks_used_total{$model}[$__rate_interval]))",
                    legend="{{instance}}",
                ),
            ),
        ),
    ),
)

_REFUSED = Row(
    title="Refused",
    panels=(
        Panel(
            title="Stale messages",
            unit="cps",
            stack="normal",
            description="Messages of older attempts, processes and transfers, which were dropped. Some follow each "
            "failure. Many without one: a worker or router stands still and wakes up again.",
            queries=_by("pdserve_stale_messages_total", "tier", "message", "reason"),
        ),
        Panel(
            title="Reservations that ended with their lease",
            unit="cps",
            stack="normal",
            description="By what had arrived until then. Runbook PdserveTransferTimeouts.",
            queries=_by("pdserve_leases_expired_total", "arrived"),
        ),
        Panel(
            title="Damaged transfers",
            unit="cps",
            description="By both workers of each. Any at all: runbook PdserveDigestMismatch.",
            queries=(
                Query(
                    expr="sum by (tier, instance)"
                    ' (rate(pdserve_kv_transfers_total{$model, outcome="digest_mismatch"}[$__rate_interval]))',
                    legend="{{tier}} {{instance}}",
                ),
            ),
        ),
        Panel(
            title="Messages of strangers",
            unit="cps",
            stack="normal",
            description="Runbook PdservePeersRefused.",
            queries=_by("pdserve_peer_messages_refused_total", "tier", "reason"),
        ),
    ),
)

DASHBOARD = Dashboard(
    name="recovery",
    title="pdserve / Recovery",
    description="How requests outlive what fails, and what was refused so that no token is wrong.",
    rows=(_STREAMS, _MOVES, _COPIES, _REFUSED),
)
