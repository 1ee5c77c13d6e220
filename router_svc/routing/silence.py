"""How long a worker may be silent on a stream before it counts as lost.

A worker that announces keep-alives sends something each second while it lives and computes: its silence of some seconds
means a hang. The silence of a worker of an older version means nothing for much longer.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.peers.workers import WorkerRecord

#: Keep-alives that may be late or lost in any case.
_MISSED = 3
#: Share of a ticket's lease for which a prefill worker may be silent. The rest is for renewing the ticket in time.
_SHARE_OF_LEASE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class SilenceLimits:
    """Seconds without a message after which a worker is given up."""

    #: For workers that send keep-alives.
    silence_timeout_s: float
    #: For others, while nothing but a token is due.
    token_timeout_s: float

    def of_decode(self, worker: WorkerRecord, *, has_started: bool) -> float | None:
        """The limit for a decode worker's stream; None while milestones alone have deadlines."""
        if worker.keep_alive_s is None:
            return self.token_timeout_s if has_started else None
        return max(self.silence_timeout_s, _MISSED * worker.keep_alive_s)

    def of_prefill(self, worker: WorkerRecord, lease_s: float | None) -> float:
        """The limit for a prefill worker's stream. `lease_s` is the ticket's, if there is one."""
        limit_s = self.token_timeout_s
        if worker.keep_alive_s is not None:
            limit_s = max(self.silence_timeout_s, _MISSED * worker.keep_alive_s)
        return limit_s if lease_s is None else min(limit_s, lease_s * _SHARE_OF_LEASE)

    def of_start(self, worker: WorkerRecord) -> float | None:
        """Limit for the time from the command, or the commit, to the start of decoding; None: as long as it lives."""
        return self.token_timeout_s if worker.keep_alive_s is None else None


def means_hang(worker: WorkerRecord, silence_s: float) -> bool:
    """Whether a silence of that length says that the worker itself has stopped."""
    return worker.keep_alive_s is not None and silence_s >= _MISSED * worker.keep_alive_s
