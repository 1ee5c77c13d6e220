"""Settings of the router. Names follow `vllm serve` where the meaning is the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pdserve.base.config import option, repeated_option, words_option
from pdserve.base.model_names import models_by_alias, models_by_name
from pdserve.base.option_values import parse_bytes
from pdserve.base.shared_options import ServiceOptions
from pdserve.net.hosts import parse_names, parse_origins
from pdserve.redis.redis_keys import DEFAULT_PREFIX, parse_prefix
from router_svc.message_formats import AUTO, FORMAT_NAMES, NONE

LOCAL_PREFILL = ("auto", "threshold")
#: As `vllm serve` names them.
SCHEDULING_POLICIES = ("fcfs", "priority")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(ServiceOptions):
    """The router's settings."""

    model: tuple[str, ...] = repeated_option(
        help="directory of a model, as `pdserve up` prepared it; once for each model", metavar="DIR"
    )
    redis_url: str = option(help="Redis with the worker registry and the prefix index", metavar="URL")
    redis_prefix: str = option(
        DEFAULT_PREFIX, help="what the names of all keys in Redis begin with", metavar="PREFIX", parse=parse_prefix
    )
    served_model_name: tuple[str, ...] = repeated_option(
        (), help="name that clients use; once for each --model, in their order; default: the directory's name"
    )
    alias: tuple[str, ...] = repeated_option(
        (), help="further name that clients can use for a model; once for each alias", metavar="NAME=MODEL"
    )
    host: str = option("127.0.0.1", help="address to listen on", metavar="ADDRESS")
    port: int = option(8000, help="port of the HTTP API; 0 takes a free one", minimum=0)
    grpc_port: int | None = option(
        None, help="port of the gRPC API; 0 takes a free one; default: one above --port", minimum=0
    )
    admin_port: int | None = option(
        None,
        help="port of its own for metrics, the cluster, traces and the console; 0 takes a free one; default: --port",
        minimum=0,
    )
    admin_host: str | None = option(
        None, help="address that the admin port listens on; default: --host", metavar="ADDRESS"
    )
    api_key: tuple[str, ...] = words_option(
        (),
        help="keys that clients need; better in the environment: flags are seen by all users",
        parse=parse_names,
        metavar="KEY",
    )
    api_keys_file: str | None = option(
        None, help="TOML or JSON file of API keys, as SHA-256, with their tenants; read again on change", metavar="FILE"
    )
    ssl_certfile: str | None = option(None, help="certificate chain for HTTP and gRPC (PEM)", metavar="FILE")
    ssl_keyfile: str | None = option(None, help="its private key; default: in --ssl-certfile", metavar="FILE")
    ssl_ca_certs: str | None = option(None, help="authorities that clients' certificates are from", metavar="FILE")
    ssl_cert_reqs: int = option(
        0, help="certificates of clients: 0 none, 1 checked if there is one (HTTP only), 2 required", minimum=0
    )
    allowed_hosts: tuple[str, ...] = words_option(
        (),
        help="names in Host headers to take besides localhost and addresses; on loopback, others are refused; *: any",
        parse=parse_names,
        metavar="NAME",
    )
    allowed_origins: tuple[str, ...] = words_option(
        (),
        help="origins of web pages that may call the API (CORS), such as https://chat.example.com; *: any",
        parse=parse_origins,
        metavar="ORIGIN",
    )
    prefill_expected: int = option(
        1,
        help="number of prefill workers in the cluster; with 0, decode workers prefill, which is then no fallback",
        minimum=0,
    )
    role_policy: str = option(
        "off",
        help="whether a tier without a ready worker gets one of the other tier (auto); such workers change their role",
        choices=("off", "auto"),
    )
    role_policy_after_s: float = option(
        5.0, help="seconds for which a tier has no ready worker before --role-policy acts", minimum=0.5
    )
    local_prefill_threshold: int = option(
        64, help="prompts with at most this many uncached tokens are prefilled by the decode worker", minimum=0
    )
    local_prefill: str = option(
        "auto",
        help="when decode workers prefill longer prompts: if that is clearly sooner (auto), or never (threshold)",
        choices=LOCAL_PREFILL,
    )
    max_num_queued_reqs: int = option(
        512, help="largest number of waiting requests; further ones get 429 and a Retry-After", minimum=0
    )
    scheduling_policy: str = option(
        "fcfs",
        help="order of waiting requests: fair between clients (fcfs), or first by their field priority (priority)",
        choices=SCHEDULING_POLICIES,
    )
    max_body: int = option(8 * 1024**2, help="largest request body, such as 8MiB", parse=parse_bytes, minimum=1024)
    max_file: int = option(
        100 * 1024**2, help="largest file of /v1/files, such as 100MiB", parse=parse_bytes, minimum=1024
    )
    batch_max_num_seqs: int = option(
        16, help="number of requests of batches that this router runs at a time, with the lowest priority", minimum=1
    )
    request_timeout_s: float = option(
        3600.0, help="seconds that a request may take which sets no timeout of its own", minimum=0.1
    )
    max_request_timeout_s: float = option(86_400.0, help="largest timeout that a request may set", minimum=0.1)
    queue_timeout_s: float = option(120.0, help="seconds a request may wait in the queue", minimum=0.1)
    reserve_timeout_s: float = option(
        600.0, help="seconds a request may wait for blocks on decode workers", minimum=0.1
    )
    worker_return_timeout_s: float = option(
        60.0,
        help="seconds after the last decode worker was ready during which a new request waits for one",
        minimum=0.0,
    )
    max_lost_workers: int = option(
        100, help="workers that one request may lose before it ends with an error, whatever ends them", minimum=1
    )
    on_numerics_change: str = option(
        "continue",
        help="when an answer has begun and only workers that compute other bits are left: go on, or end with an error",
        choices=("continue", "error"),
    )
    resume_timeout_s: float = option(
        0.0,
        help="seconds for which clients can resume a stream after its end or loss, on any router; 0: never",
        minimum=0.0,
    )
    silence_timeout_s: float = option(
        10.0, help="seconds without any message, not even a keep-alive, after which a worker counts as lost", minimum=1
    )
    token_timeout_s: float = option(
        300.0, help="the same for workers of a version that sends no keep-alives: seconds without a token", minimum=0.1
    )
    trace_capacity: int = option(1000, help="number of requests whose records are kept in memory", minimum=1)
    special_tokens_in_text: bool = option(
        True, help="a text of a client that spells a special token of the model has that token, as in vLLM"
    )
    message_format: str = option(
        AUTO,
        help="how the model writes tool calls and thinking; auto: as its files say; none: messages are plain text",
        choices=(AUTO, NONE, *FORMAT_NAMES),
    )
    unknown_fields: str = option(
        "refuse",
        help="unknown fields of requests; refuse: the request fails; warn: they are ignored, and named in a header",
        choices=("refuse", "warn"),
    )
    trust_request_chat_template: bool = option(
        False, help="chats may bring a chat template of their own, which is rendered in a sandbox"
    )
    state_url: str | None = option(
        None,
        help="where responses and files are stored: a Redis of their own (redis://...), or for a single router a "
        "directory (file:DIR); default: nowhere",
        metavar="URL",
    )
    state_ttl_s: float = option(
        30 * 86_400.0, help="seconds for which a response is stored after its end, and a file", minimum=60.0
    )
    console: bool = option(True, help="serve the console, a page that shows the cluster and its requests, at /console")
    console_clients: int = option(32, help="number of consoles that may be open at the same time", minimum=1)
    trace_sample_ratio: float | None = option(
        None, help="share of the requests to trace, 0 to 1, unless the caller has decided; default: 1", minimum=0
    )

    @property
    def models(self) -> dict[str, Path]:
        """The directory of each model by the name that clients use. Raises `SetupError`."""
        return models_by_name([Path(each) for each in self.model], self.served_model_name)

    @property
    def aliases(self) -> dict[str, str]:
        """The model's name by each alias. Raises `SetupError`."""
        return models_by_alias(self.alias, self.models)

    @property
    def effective_grpc_port(self) -> int:
        """The gRPC port to bind; 0 takes a free one."""
        if self.grpc_port is not None:
            return self.grpc_port
        return self.port + 1 if self.port else 0
