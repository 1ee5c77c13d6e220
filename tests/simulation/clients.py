"""Clients of a simulated cluster: their requests, what they received, and what they should have received."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from pdserve.base.ids import RequestId
from pdserve.base.sampling import FinishReason, SamplingParams, TokenLogprobs
from router_svc.generation import Generation, TextRules
from tests.simulation.loop import Process
from tests.simulation.model import Expected
from tests.simulation.network import End, Network
from tests.simulation.router import PORT, CancelRequest, ClientRequest
from tests.simulation.vocabulary import VOCAB_SIZE, letters, restrictions

#: How requests end that their clients end.
ENDED_BY_CLIENT = ("left", "cancelled", "deadline")
#: Virtual seconds after which a request has not ended, whatever happens.
HANGS_AFTER_S = 400.0
#: Virtual seconds for which a client reads nothing, in all: far from those.
_MAX_PAUSED_S = 100.0
#: Virtual seconds within which an end by the client reaches everyone, while nothing else happens: a step, and messages.
CALM_S = 0.25
#: The same at the router, and where it has to write to Redis that the stream is over.
ANSWER_S, WRITE_S = 0.005, 0.1
#: How a router that ends refuses requests.
_ROUTER_ENDS = "Draining: The router is shutting down."


@dataclass(frozen=True)
class Behaviour:
    """What a client does besides reading."""

    #: Leaves this long after its request.
    leaves_after_s: float | None = None
    #: Asks any router so long after its request to cancel it.
    cancels_after_s: float | None = None
    #: Number of events after which its connection breaks; 0: it does not.
    breaks_after: int = 0
    #: Deadline that the request has.
    timeout_s: float | None = None
    #: Reads nothing for so long at first and after some deltas, and has room for this number of items then.
    pauses_s: float = 0.0
    window: int = 48


@dataclass
class ChoiceReceived:
    """One choice as the client has it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class Workload:
    """Makes the requests of one episode."""

    def __init__(self, chance: Random, longest_prompt: int, longest_output: int, *, impatience: float) -> None:
        """`impatience`: share of the clients that end their requests early."""
        self._chance = chance
        self._impatience = impatience
        self._longest = longest_prompt
        self._longest_output = longest_output
        self._prefixes = [self._tokens(16) for _ in range(4)]

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._chance.randrange(2, VOCAB_SIZE) for _ in range(count))

    def prompt(self) -> tuple[int, ...]:
        """Half of the prompts share a prefix with others, some a whole prompt."""
        chance = self._chance
        prefix = chance.choice(self._prefixes)[: chance.choice((0, 4, 8, 12, 16, 16))]
        tokens = prefix + self._tokens(chance.randrange(0 if prefix else 1, self._longest - 16))
        return tokens[: self._longest]

    def arrival(self, duration_s: float) -> float:
        """When a request comes: half of them come in crowds."""
        chance = self._chance
        if chance.random() < 0.5:
            return chance.uniform(0.0, duration_s)
        return chance.randrange(max(1, int(duration_s))) + 0.05 * chance.random()

    def prompts(self, number: int) -> tuple[Generation, ...]:
        """One request. Some have several prompts, which share a stream and go their own ways through the cluster."""
        generations: list[Generation] = []
        first_choice = 0
        for index in range(self._chance.choice((1, 1, 1, 1, 1, 2, 3))):
            name = RequestId(f"r{number}-p{index}" if index else f"r{number}")
            generations.append(self._generation(name, first_choice))
            first_choice += generations[-1].sampling.n
        return tuple(generations)

    def _generation(self, request_id: RequestId, first_choice: int) -> Generation:
        """A prompt with a random choice of features."""
        chance = self._chance
        max_tokens = chance.choice((1, 2, 3, 4, 4, 5, 6, 8, 12))
        if chance.random() < 0.1:  # Long enough to have copies, and to move to another worker.
            max_tokens = chance.randrange(max(12, self._longest_output // 2), self._longest_output)
        n = chance.choice((1, 1, 1, 1, 1, 1, 2, 3))
        sampled = chance.random() < 0.6
        stop = ()
        if chance.random() < 0.2:
            stop = tuple(letters(list(self._tokens(1))) for _ in range(chance.randrange(1, 4)))
        sampling = SamplingParams(
            temperature=round(chance.uniform(0.1, 1.9), 2) if sampled else 0.0,
            top_p=chance.choice((1.0, 0.9)),
            top_k=chance.choice((0, 0, 20)),
            repetition_penalty=chance.choice((1.0, 1.0, 1.1)),
            presence_penalty=chance.choice((0.0, 0.0, 0.5)),
            stop_token_ids=tuple(self._tokens(1)) if chance.random() < 0.1 else (),
            ignore_eos=chance.random() < 0.7,
            min_tokens=chance.choice((0, 0, 0, 2)) if not stop and max_tokens > 2 else 0,
            max_tokens=max_tokens,
            seed=chance.getrandbits(40),
            logprobs=chance.choice((None, None, None, 2)),
            n=n,
        )
        # By a chance of their own: all else of the workload stays as it is when these change.
        sampling = replace(sampling, **restrictions(Random(sampling.seed)))
        return Generation(
            request_id=request_id,
            worker_request_id=request_id,
            prompt=self.prompt(),
            sampling=sampling,
            text=TextRules(stop=stop),
            first_choice=first_choice,
            endpoint="simulation",
        )

    def behaviour(self, num_prompts: int) -> Behaviour:
        """Most clients read to the end at once. Slow ones matter most where the prompts of a request share a stream."""
        chance = self._chance
        kind = chance.random()
        early_s = chance.random() ** 2 * chance.choice((0.01, 0.05, 2.0))
        if kind < self._impatience:
            pauses_s = chance.choice((0.0, 0.0, 0.0, 1.0))
            return chance.choice(
                (
                    Behaviour(leaves_after_s=early_s),
                    Behaviour(cancels_after_s=early_s, pauses_s=pauses_s),
                    Behaviour(timeout_s=0.001 + early_s, pauses_s=pauses_s),
                )
            )
        if kind < self._impatience + 0.05:
            return Behaviour(breaks_after=chance.choice((1, 1, 2, 3, 6)))
        if kind < self._impatience + (0.11 if num_prompts == 1 else 0.35):
            # Where several prompts of a request wait for its client, others wait long in the queue.
            pauses_s = chance.choice((0.2, 0.2, 1.0, 1.0, 5.0, 14.0) if num_prompts == 1 else (0.2, 0.5, 1.0))
            return Behaviour(pauses_s=pauses_s, window=chance.choice((0, 0, 4, 48)))
        return Behaviour()


class Client:
    """One request, which is sent again when its router dies."""

    def __init__(
        self,
        network: Network,
        process: Process,
        prompts: tuple[Generation, ...],
        behaviour: Behaviour,
        *,
        may_resume: bool,
    ) -> None:
        """`may_resume`: routers keep streams, so that others go on with them."""
        self._network = network
        self._may_resume = may_resume
        self._process = process
        self.prompts = prompts
        self.behaviour = behaviour
        self.choices = self._no_choices()
        self.usage: Any = None
        #: "" while it runs, then how it ended.
        self.outcome = ""
        self.error = ""
        self.lost_routers = 0
        #: How often it got the rest of its stream from a router, or all of it again.
        self.resumed = 0
        #: How often it had the head of that already.
        self.joined = 0
        #: `id` of the last event of the present stream; None: there is nothing to go on with.
        self._last_event_id: str | None = None
        self._tries = 0
        self._events = 0
        self._is_resuming = self._is_joining = False
        #: Routers that could not say whether they have taken its stream: they may have, later than it seems.
        self._unsure = 0
        #: How often a router refused it because of a long queue, before anything was done for it.
        self.refusals = 0
        #: How often a router did so because it ended.
        self.turned_away = 0
        self._paused_s = 0.0
        #: Whether a router has answered that it has cancelled the request; None: no router has answered.
        self.is_cancelled: bool | None = None
        #: Since when the request is open, for the attempt that is under way.
        self.sent_at = 0.0
        self.ended_at = 0.0
        #: When a router has answered that it has, or has not, cancelled it.
        self.answered_at = 0.0

    @property
    def request_id(self) -> RequestId:
        """The id of the request, which is that of its first prompt."""
        return self.prompts[0].request_id

    def _no_choices(self) -> list[ChoiceReceived]:
        return [ChoiceReceived() for prompt in self.prompts for _ in range(prompt.sampling.n)]

    async def run(self, routers: list[str]) -> None:
        """Returns when the request has ended for the client. `routers`: by preference."""
        cancelling = self._network.loop.create_task(self._cancel(routers[::-1]), name="cancel")
        try:
            async with asyncio.timeout(HANGS_AFTER_S):
                attempt = 0
                while not self.outcome:
                    router = routers[attempt % len(routers)]
                    attempt += 1
                    await self._try(router)
        except TimeoutError:
            self.outcome, self.error = "hung", f"no end after {HANGS_AFTER_S} s"
        finally:
            cancelling.cancel()

    async def _cancel(self, routers: list[str]) -> None:
        if self.behaviour.cancels_after_s is None:
            return
        await asyncio.sleep(self.behaviour.cancels_after_s)
        while self.is_cancelled is None:
            routers = [*routers[1:], routers[0]]
            self.is_cancelled = await self._ask_to_cancel(routers[0])
            self.answered_at = self._network.loop.time()

    async def _ask_to_cancel(self, router: str) -> bool | None:
        """Whether there was such a request; None without an answer."""
        try:
            end = await self._network.connect(f"{router}:{PORT}", "http")
        except OSError:
            await asyncio.sleep(0.1)
            return None
        answered, answers = asyncio.Event(), list[tuple[str, Any]]()
        end.on_item = lambda item: (answers.append(item), answered.set())
        end.on_lost = lambda error: answered.set()
        end.send(CancelRequest(request_id=self.request_id))
        await answered.wait()
        return answers[0][1] if answers and answers[0][0] == "cancelled" else None

    async def _try(self, router: str) -> None:
        try:
            end = await self._network.connect(f"{router}:{PORT}", "http")
        except OSError:
            await asyncio.sleep(0.1)
            return
        end.peer.window = self.behaviour.window
        if not self._last_event_id:
            self.choices = self._no_choices()
        over = asyncio.Event()
        end.on_item = lambda item: self._take(end, over, *item)
        end.on_lost = lambda error: over.set()
        end.send(self._request())
        self._pause(end)
        self.sent_at = self._network.loop.time()
        try:
            async with asyncio.timeout(self.behaviour.leaves_after_s):
                await over.wait()
        except TimeoutError:
            self.outcome = "left"
            self.ended_at = self._network.loop.time()
            end.reset()
            return
        if self._is_turned_away():
            await asyncio.sleep(0.1)
            self.outcome = "cancelled" if self.is_cancelled else ""
            return
        if self._is_to_resume():
            await asyncio.sleep(0.2)
            return
        if self.outcome == "error" and self.error.startswith("Overloaded") and not self._has_tokens:
            self.outcome, self.error = "", ""
            self.refusals += 1
            await asyncio.sleep(2.0)
        elif not self.outcome:
            self.lost_routers += 1
        if self.is_cancelled and not self.outcome:
            self.outcome = "cancelled"

    @property
    def _has_tokens(self) -> bool:
        """Whether it has tokens of this stream that came with this request."""
        return not self._is_resuming and any(choice.token_ids for choice in self.choices)

    def _request(self) -> ClientRequest:
        """A new request has an id of its own at the workers."""
        self._tries += 1
        self._is_resuming, self._is_joining = self._last_event_id is not None, bool(self._last_event_id)
        return ClientRequest(
            prompts=tuple(
                replace(prompt, worker_request_id=RequestId(f"{prompt.request_id}-{self._tries}"))
                for prompt in self.prompts
            ),
            timeout_s=self.behaviour.timeout_s,
            last_event_id=self._last_event_id,
        )

    def _is_turned_away(self) -> bool:
        """Whether the router has refused the request because it ends: the client turns to another one."""
        if self.outcome != "error" or not self.error.startswith(_ROUTER_ENDS) or self._has_tokens:
            return False
        self.outcome = self.error = ""
        self.turned_away += 1
        return True

    def _is_to_resume(self) -> bool:
        """Whether the stream goes on elsewhere, or starts anew since no router can go on with it."""
        self._unsure += self._is_resuming and (not self.outcome or self.error.startswith("StoreError"))
        if self._last_event_id is not None and self.outcome == "error" and not self.is_cancelled:
            error = self.error.partition(":")[0]
            if error in ("NotFound", "StoreError") or (error == "StaleError" and self._unsure):
                self._unsure -= error == "StaleError"
                self.outcome = self.error = ""
                self._last_event_id = None if error == "NotFound" else self._last_event_id
                return True
        if self.is_cancelled and self._is_resuming and self.error.startswith(("StoreError", "NotFound")):
            self.outcome, self.error = "cancelled", ""  # It does not ask again how the request has ended.
        if not self.outcome and self._may_resume:
            self._last_event_id = self._last_event_id or ""
        return False

    def _take(self, end: End, over: asyncio.Event, kind: str, content: Any) -> None:
        if kind == "deltas":
            for delta, event_id in content:
                self._add(delta)
                if event_id is not None:
                    self._last_event_id = event_id
                self._events += 1
                if self._events == self.behaviour.breaks_after:
                    end.reset()
                    over.set()
                    return
            if self._network.chance.random() < 0.3:
                self._pause(end)
            return
        if kind == "keep-alive":
            return
        self.resumed += kind == "done" and self._is_resuming
        self.joined += kind == "done" and self._is_joining
        self.outcome = kind
        if kind == "done":
            self.usage = content
        else:
            self.error = content
        for error, outcome in (("Cancelled", "cancelled"), ("DeadlineExceeded", "deadline")):
            if self.outcome == "error" and self.error.startswith(error):
                self.outcome, self.error = outcome, ""
        self.ended_at = self._network.loop.time()
        over.set()

    def _pause(self, end: End) -> None:
        pauses_s = self.behaviour.pauses_s
        if pauses_s and self._paused_s < _MAX_PAUSED_S:
            self._paused_s += pauses_s
            end.pause()
            self._network.loop.call_later(pauses_s, end.resume)

    def _add(self, delta: Any) -> None:
        choice = self.choices[delta.choice_index]
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        choice.logprobs += delta.logprobs
        if choice.finish_reason is not None:
            self.error = f"choice {delta.choice_index} has ended twice"
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason

    def fault_in_calm(self, arrived_at: float, ended_at: float) -> str | None:
        """What is wrong if nothing but the client disturbs the request, which a router had for that time."""
        behaviour = self.behaviour
        slack_s = WRITE_S if self._may_resume else ANSWER_S
        if behaviour.timeout_s is not None and ended_at > arrived_at + behaviour.timeout_s + slack_s:
            return f"it went on for {ended_at - arrived_at:.3f} s, beyond {behaviour.timeout_s:.3f} s"
        if self.is_cancelled and ended_at > self.answered_at:
            return f"it went on for {ended_at - self.answered_at:.3f} s after it was cancelled"
        if self.is_cancelled is False and not self.refusals and ended_at > self.answered_at + CALM_S:
            return "it went on, and no router had it to cancel"
        return None

    def fault(self) -> str | None:
        """Why what was received is wrong; None if it is not."""
        if self.outcome not in ("done", "slow", *ENDED_BY_CLIENT):
            return f"{self.outcome}: {self.error}"
        if self.outcome == "cancelled" and self.behaviour.cancels_after_s is None:
            return "it was cancelled, and its client has not"
        if self.outcome == "deadline" and self.ended_at < self.sent_at + (self.behaviour.timeout_s or HANGS_AFTER_S):
            return f"its deadline was over after {self.ended_at - self.sent_at:.3f} s"
        if self.error and self.outcome != "slow":
            return self.error
        is_done = self.outcome == "done"
        for prompt in self.prompts:
            for index in range(prompt.sampling.n):
                choice = self.choices[prompt.first_choice + index]
                wrong = difference(prompt, index, choice, is_done=is_done)
                if wrong is not None:
                    return f"choice {index} of {prompt.request_id}: {wrong}"
        return self._fault_of_usage() if is_done else None

    def _fault_of_usage(self) -> str | None:
        total = sum(len(choice.token_ids) for choice in self.choices)
        if self.usage.completion_tokens != total:
            return f"usage counts {self.usage.completion_tokens} tokens, and {total} were received"
        prompt_tokens = sum(len(prompt.prompt) for prompt in self.prompts)
        if self.usage.prompt_tokens != prompt_tokens:
            return f"usage counts {self.usage.prompt_tokens} prompt tokens of {prompt_tokens}"
        return None


def difference(generation: Generation, index: int, choice: ChoiceReceived, *, is_done: bool) -> str | None:
    """What differs from the expected choice, or from the head of it when the client has left."""
    expected = Expected(generation.prompt, generation.sampling, index)
    tokens, reason = expected.token_ids, expected.finish_reason
    is_stopped_by_token = reason is FinishReason.STOP
    text = letters(tokens[:-1] if is_stopped_by_token else tokens)
    stop_reason: str | int | None = None
    if is_stopped_by_token and tokens[-1] in generation.sampling.stop_token_ids:
        stop_reason = tokens[-1]
    cut = _cut_at_stop(tokens[:-1] if is_stopped_by_token else tokens, generation.text.stop)
    if cut is not None:
        count, text, stop_reason = cut
        tokens, reason = tokens[:count], FinishReason.STOP
    if not is_done:
        count = len(choice.token_ids)
        is_head = choice.token_ids == tokens[:count] and text.startswith(choice.text)
        return None if is_head else f"{choice.token_ids} is no head of {tokens}"
    if choice.token_ids != tokens:
        return f"tokens {choice.token_ids} instead of {tokens}"
    if choice.text != text:
        return f"text {choice.text!r} instead of {text!r}"
    if (choice.finish_reason, choice.stop_reason) != (reason, stop_reason):
        return f"ended by {choice.finish_reason} ({choice.stop_reason!r}), expected {reason} ({stop_reason!r})"
    if choice.logprobs != expected.logprobs[: len(tokens)]:
        return f"log-probabilities {choice.logprobs} instead of {expected.logprobs}"
    return None


def _cut_at_stop(tokens: list[int], stops: tuple[str, ...]) -> tuple[int, str, str] | None:
    """Number of tokens, text and stop string, where one occurs. Stop strings here are single letters."""
    text = ""
    for count, token in enumerate(tokens, 1):
        letter = letters([token])
        if letter and letter in stops:
            return count, text, letter
        text += letter
    return None
