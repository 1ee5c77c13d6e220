"""One transfer at the prefill worker, free of I/O: events in, effects out, time is an argument.

SENDING --finish--> COMMITTING --answer--> CLOSED
either --abort, send failed, lease over, commit refused--> DRAINING --nothing outstanding--> CLOSED
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from kvtransfer.handover.events import (
    Aborted,
    AllSent,
    CommitAnswered,
    Disconnect,
    Effect,
    Event,
    LeaseKept,
    Released,
    SendDone,
    SendStarted,
    TimePassed,
)
from kvtransfer.handover.layer_groups import message_name, messages
from pdserve.base.errors import InvalidTransition, PdserveError, PeerLost, TransferTimeout


class SendState(Enum):
    """Where a transfer is at the prefill worker."""

    SENDING = "sending"
    COMMITTING = "committing"
    DRAINING = "draining"
    CLOSED = "closed"


class SendMachine:
    """One transfer at the prefill worker: blocks are its to read until `Released`.

    A group of layers goes out bundle by bundle; how far one group is does not bind another.
    """

    def __init__(self, *, num_bundles: int, layer_groups: int, lease_s: float, now: float, unit: str = "block") -> None:
        self.state = SendState.SENDING
        self.deadline = now + lease_s
        self.num_sent = 0
        self.error: PdserveError | None = None
        self._num_bundles = num_bundles
        self._layer_groups = layer_groups
        self._unit = unit
        self._lease_s = lease_s
        #: Of each group.
        self._next_bundle = [0] * layer_groups
        self._outstanding: set[int] = set()
        self._disconnected = False

    @property
    def num_outstanding(self) -> int:
        """Messages the transport reads at the moment."""
        return len(self._outstanding)

    @property
    def num_unsent(self) -> int:
        """Messages that were not handed to the transport yet."""
        return self._num_bundles * self._layer_groups - sum(self._next_bundle)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Moves on.

        Raises: InvalidTransition, with the machine unchanged.
        """
        handler = _SEND_TABLE.get((self.state, type(event)))
        if handler is None:
            raise InvalidTransition(f"a transfer that is {self.state.value} does not take {event!r}")
        return handler(self, event, now)

    def _on_started(self, event: Event, now: float) -> list[Effect]:
        assert isinstance(event, SendStarted)
        bundle, group = divmod(event.index, self._layer_groups)
        if bundle != self._next_bundle[group] or bundle >= self._num_bundles:
            name = message_name(event.index, self._layer_groups, self._unit)
            raise InvalidTransition(
                f"{self._unit} {self._next_bundle[group]} of {self._num_bundles} is next, not {name}"
            )
        self._next_bundle[group] += 1
        self._outstanding.add(event.index)
        return []

    def _on_done(self, event: Event, now: float) -> list[Effect]:
        assert isinstance(event, SendDone)
        if event.index not in self._outstanding:
            raise InvalidTransition(f"{message_name(event.index, self._layer_groups, self._unit)} is not outstanding")
        self._outstanding.remove(event.index)
        if event.error is None:
            self.num_sent += 1
        if self.state is SendState.DRAINING:
            return self._try_release()
        if event.error is not None:
            return self._drain(event.error)
        self._renew(now)
        return []

    def _on_all_sent(self, event: Event, now: float) -> list[Effect]:
        if self.num_unsent:
            raise InvalidTransition(f"{self.num_unsent} of {self._messages} were not sent")
        self._renew(now)
        self.state = SendState.COMMITTING
        return []

    def _on_answer(self, event: Event, now: float) -> list[Effect]:
        assert isinstance(event, CommitAnswered)
        return self._drain(event.error)

    def _on_kept(self, event: Event, now: float) -> list[Effect]:
        self._renew(now)
        return []

    def _on_abort(self, event: Event, now: float) -> list[Effect]:
        return self._drain(None)

    def _on_time(self, event: Event, now: float) -> list[Effect]:
        if now < self.deadline:
            return []
        return self._drain(
            TransferTimeout(f"no progress for {self._lease_s:g} s; {self.num_sent} of {self._messages} had got through")
        )

    def _on_time_draining(self, event: Event, now: float) -> list[Effect]:
        if now < self.deadline or self._disconnected:
            return []
        self._disconnected = True
        self.error = self.error or PeerLost("the peer does not take what was sent")
        return [Disconnect()]

    def _ignore(self, event: Event, now: float) -> list[Effect]:
        return []

    def _drain(self, error: PdserveError | None) -> list[Effect]:
        self.state = SendState.DRAINING
        self.error = error
        # The decode worker drains what it no longer wants. One that did not make progress for a whole lease will not.
        if isinstance(error, TransferTimeout | PeerLost) and self._outstanding:
            self._disconnected = True
            return [Disconnect()]
        return self._try_release()

    def _try_release(self) -> list[Effect]:
        if self._outstanding:
            return []
        self.state = SendState.CLOSED
        return [Released(error=self.error)]

    @property
    def _messages(self) -> str:
        return messages(self._num_bundles, self._layer_groups, self._unit)

    def _renew(self, now: float) -> None:
        self.deadline = max(self.deadline, now + self._lease_s)


_SendHandler = Callable[[SendMachine, Event, float], list[Effect]]

_S = SendMachine
_SEND_TABLE: dict[tuple[SendState, type[Event]], _SendHandler] = {
    (SendState.SENDING, SendStarted): _S._on_started,
    (SendState.SENDING, SendDone): _S._on_done,
    (SendState.SENDING, AllSent): _S._on_all_sent,
    (SendState.SENDING, LeaseKept): _S._on_kept,
    (SendState.SENDING, Aborted): _S._on_abort,
    (SendState.SENDING, TimePassed): _S._on_time,
    (SendState.COMMITTING, SendDone): _S._on_done,
    (SendState.COMMITTING, CommitAnswered): _S._on_answer,
    (SendState.COMMITTING, LeaseKept): _S._on_kept,
    (SendState.COMMITTING, Aborted): _S._on_abort,
    (SendState.COMMITTING, TimePassed): _S._on_time,
    (SendState.DRAINING, SendDone): _S._on_done,
    (SendState.DRAINING, CommitAnswered): _S._ignore,
    (SendState.DRAINING, LeaseKept): _S._ignore,
    (SendState.DRAINING, Aborted): _S._ignore,
    (SendState.DRAINING, TimePassed): _S._on_time_draining,
    (SendState.CLOSED, CommitAnswered): _S._ignore,
    (SendState.CLOSED, LeaseKept): _S._ignore,
    (SendState.CLOSED, Aborted): _S._ignore,
    (SendState.CLOSED, TimePassed): _S._ignore,
}
