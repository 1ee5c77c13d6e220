"""The answers for operators as types, which the OpenAPI document shows: probes, the cluster, requests, the console."""

from __future__ import annotations

from typing import Literal, NotRequired

# Python 3.11 has one that pydantic cannot read.
from typing_extensions import TypedDict

from pdserve.base.ids import WorkerId
from pdserve.peers.workers import Tier
from router_svc.api.console.load import TierLoad
from router_svc.api.console.problems import Problem
from router_svc.records.decisions import ComputedChunk, Decision, Incident
from router_svc.records.migration import Migration
from router_svc.records.milestones import Milestone
from router_svc.records.pauses import Pause
from router_svc.records.request_state import RequestState
from router_svc.records.timeline import Phase, PhaseStart
from router_svc.routing.local_prefill import LocalPrefillReason


class HealthState(TypedDict):
    """The answer of the probes. `degraded` has reasons by subject, such as `redis`."""

    status: Literal["ready", "not_ready", "dead", "stalled", "hung"]
    reason: str | None
    degraded: dict[str, str]


class RouterState(HealthState):
    """The state of this router. `running` and `queued` count prompts; `model_revision` is the commit at a hub."""

    version: str
    model: str
    model_revision: str | None
    running: int
    queued: int


class RedisState(TypedDict):
    """Whether this router reaches Redis."""

    available: bool


class WorkerTransport(TypedDict):
    """The paths that a worker's blocks take: connected peers by path, and why one is slow."""

    paths: dict[str, int]
    degraded: str | None


class Worker(TypedDict):
    """A worker as its last heartbeat described it."""

    worker_id: WorkerId
    tier: Tier
    ready: bool
    epoch: int
    grpc_address: str
    http_address: str
    stream_address: str
    model: str
    max_num_seqs: int
    max_model_len: int
    total_blocks: int
    free_blocks: int
    running: int
    waiting: int
    queued_tokens: int
    prefill_tokens_per_s: float | None
    transport: WorkerTransport


class ClusterDescription(TypedDict):
    """The answer of `GET /v1/cluster`."""

    router: RouterState
    redis: RedisState
    workers: list[Worker]


class Outcome(TypedDict):
    """How a request ended, as far as it has."""

    finish_reasons: list[str]
    error: str | None
    completion_tokens: int
    cached_tokens: int


class _Request(TypedDict):
    request_id: str
    endpoint: str
    accepted_at: float
    prompt_tokens: int
    max_tokens: int
    n: int
    state: RequestState
    attempt: int
    outcome: Outcome
    phases: dict[Milestone, float]
    timeline: list[PhaseStart]
    prefilled_by: Literal["prefill", "decode"] | None
    local_prefill_reason: LocalPrefillReason | None


class RequestBrief(_Request):
    """A request in a list of requests. It has no text of a prompt or an answer."""

    workers: list[str]
    retries: list[str]
    fallbacks: list[str]


class RequestList(TypedDict):
    """The answer of `GET /v1/requests`, the latest request first."""

    requests: list[RequestBrief]


class EntryCounts(TypedDict):
    """How many entries there were, with those that the lists of a long record leave out."""

    decisions: int
    retries: int
    fallbacks: int
    migrations: int


class DecisionRecord(_Request):
    """The decision record of a request. Times are seconds since `accepted_at`, which is Unix time."""

    tenant: str
    trace_id: str | None
    router: str
    seconds_in: dict[Phase, float]
    chunks: list[ComputedChunk]
    decisions: list[Decision]
    retries: list[Incident]
    fallbacks: list[Incident]
    migrations: list[Migration]
    pauses: list[Pause]
    counts: EntryCounts
    grammar_sha256: str | None
    resumed_tokens: int | None
    reported: dict[str, float]


class LostRequest(TypedDict):
    """What is known of a request whose router was lost before it ended."""

    request_id: str
    accepted_at: float
    state: RequestState
    attempt: int
    story: str
    prefill_worker: str | None
    decode_worker: str | None


AnyRecord = DecisionRecord | LostRequest


class ConsoleWorker(Worker):
    """A worker with the number of its blocks in the prefix index."""

    cached_blocks: int


class ConsoleLimits(TypedDict):
    """What the figures are measured against."""

    max_queued: int
    expects_prefill: bool


class PrefixState(TypedDict):
    """The router's copy of the prefix index."""

    blocks: int
    copies: int
    dropped: int
    current: bool


class ConsoleState(TypedDict):
    """What the console shows."""

    router: RouterState
    redis: RedisState
    limits: ConsoleLimits
    tiers: dict[Tier, TierLoad]
    problems: list[Problem]
    prefix: PrefixState
    workers: dict[str, ConsoleWorker]
    requests: dict[str, RequestBrief]


class History(TypedDict):
    """The load of the last ten minutes: names of columns, and a row for every five seconds."""

    columns: list[str]
    rows: list[list[float]]


class ConsoleEvent(TypedDict):
    """The data of an event: `state` has a whole state, `patch` a merge patch (RFC 7386) of the version before."""

    version: int
    now: float
    interval_s: NotRequired[float]
    state: NotRequired[ConsoleState]
    history: NotRequired[History]
    patch: NotRequired[dict[str, object]]
    sample: NotRequired[list[float] | None]
