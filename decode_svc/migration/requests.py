"""Requests on their way from one decode worker to another: blocks that leave and arrive, and tokens of others. Pure.

The blocks of a transfer are those of the prompt, then those behind them of each choice that goes on, in the order of
choices. Only full blocks move:

    prompt        choice 0      choice 2
    | 0 | 1 | 2 | | 3 | 4 | 5 | | 3 | 4 |        partial blocks are computed again

Blocks that have arrived are in the prefix cache like any others. The choices then start as preempted ones do, and find
them there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items

from decode_svc.request import DecodeMove, DecodePhase, ScheduledRequest
from pdserve.base.block_hash import hash_blocks
from pdserve.base.errors import Diverged, RequestError, StaleError
from pdserve.base.ids import AttemptId, BlockHash, BlockId, RequestId
from pdserve.base.sampling import ChoiceTokens, check_vocabulary
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.running import RunningSet
from pdserve.engine.sequence import Sequence
from pdserve.engine.sequence_limits import SequenceLimits


def num_full_blocks(num_tokens: int, block_size: int) -> int:
    """Full blocks of a choice with so many tokens of prompt and output. The KV of its last token is not computed."""
    return (num_tokens - 1) // block_size


def moving_hashes(request: ScheduledRequest, block_size: int) -> list[BlockHash]:
    """Hashes of the blocks that move with a request: those of its prompt and of the output that it came with."""
    job, prompt = request.job, request.prompt_sequence
    hashes = list(prompt.hash_full_blocks(block_size))
    num_shared = len(hashes)
    moving = hashes[:]
    for _, output in sorted(job.output.items()):
        tokens = (*job.prompt_token_ids, *output)
        num_blocks = num_full_blocks(len(tokens), block_size)
        moving += hash_blocks(job.hash_key, tokens[: num_blocks * block_size], block_size, hashes)[num_shared:]
    return moving


class MigratingRequests:
    """Requests that leave or arrive. Changes requests and blocks only between steps, as all commands do."""

    def __init__(
        self,
        requests: Mapping[RequestId, ScheduledRequest],
        blocks: BlockManager,
        running: RunningSet,
        limits: SequenceLimits,
        on_freed: Callable[[], None],
    ) -> None:
        """`on_freed` is called when blocks may be free that a request here waits for."""
        self._requests = requests
        self._blocks = blocks
        self._running = running
        self._limits = limits
        self._on_freed = on_freed
        #: Blocks that are being sent, each with a reference.
        self._leaving: dict[RequestId, list[BlockId]] = {}

    @property
    def held(self) -> Iterator[list[BlockId]]:
        """The blocks that are being sent, by request."""
        return iter(self._leaving.values())

    # At the worker that a request leaves.
    def hold(self, request_id: RequestId, num_output: Mapping[int, int], first_block: int) -> list[BlockId]:
        """The blocks of a transfer from `first_block` on, held until `let_go`.

        `num_output` are the numbers of tokens that the other worker knows, by choice; 0 for one that is over. Raises
        `StaleError` when this worker does not have the blocks, or not any more.
        """
        request, block_size = self._requests.get(request_id), self._blocks.pool.block_size
        if request is None or request.phase is not DecodePhase.RUNNING or request_id in self._leaving:
            raise StaleError(f"Request {request_id} does not run on this worker, or is being sent already.")
        if request.is_isolated:
            raise StaleError(f"Request {request_id} has blocks of another numerics class.")
        num_prompt = request.prompt_sequence.num_prompt
        num_shared, blocks = num_prompt // block_size, list[int]()
        for choice, count in sorted(num_output.items()):
            if not count:
                continue
            sequence = request.sequences.get(choice)
            num_blocks = num_full_blocks(num_prompt + count, block_size)
            if sequence is None or sequence.num_computed < num_blocks * block_size:
                raise StaleError(f"Choice {choice} of request {request_id} has ended here, or was preempted.")
            blocks += sequence.block_table[num_shared if blocks else 0 : num_blocks]
        held = self._leaving[request_id] = [BlockId(block) for block in blocks[first_block:]]
        self._blocks.pool.share(held)
        return held

    def let_go(self, request_id: RequestId) -> None:
        """Nothing reads the blocks of this request any more. No effect if none are held."""
        self._blocks.pool.release(reversed(self._leaving.pop(request_id, [])))
        self._on_freed()

    def tokens_left(self) -> dict[AttemptId, int]:
        """The most tokens that a choice of each running request may still have, in the order of admission."""
        running = [each for each in self._requests.values() if each.phase is DecodePhase.RUNNING and each.sequences]
        running.sort(key=lambda request: next(iter(request.sequences.values())).admission_order)
        return {
            request.attempt_id: max(
                min(each.params.max_tokens - each.num_output, self._limits.max_model_len - each.num_tokens)
                for each in request.sequences.values()
            )
            for request in running
        }

    def running(self) -> dict[AttemptId, tuple[int, int]]:
        """`tokens_left` and the number of sequences, of each running request."""
        tokens_left = self.tokens_left()
        return {each: (count, len(self._requests[each.request_id].sequences)) for each, count in tokens_left.items()}

    def waiting(self) -> list[AttemptId]:
        """The requests that wait for blocks, and hold none yet."""
        return [each.attempt_id for each in self._requests.values() if each.phase is DecodePhase.WAITING]

    # At the worker that a request goes to.
    def isolate(self, request_id: RequestId, hash_key: bytes) -> None:
        """Another numerics class has computed the blocks that arrive: no other request may find them.

        What the request adds to the prefix cache is hashed with `hash_key`, a key of its own. No effect on a request
        that is not here. Raises `StaleError` for a request that moves: its blocks can be computed again.
        """
        request = self._requests.get(request_id)
        if request is None or request.is_isolated:
            return
        if request.job.is_moving:
            raise StaleError(f"The blocks of request {request_id} come from a worker of another numerics class.")
        request.is_isolated, prompt = True, request.prompt_sequence
        del prompt.hashes[prompt.num_registered :]
        prompt.hash_key = hash_key

    def start(self, request: ScheduledRequest) -> list[Sequence]:
        """The sequences of a request whose blocks have arrived. They find the blocks in the prefix cache at their turn.

        Choices that were stopped meanwhile are left out.
        """
        carrier = request.prompt_sequence
        for block, block_hash in zip(carrier.block_table, request.moved, strict=True):
            self._blocks.pool.register(BlockId(block), block_hash)
        carrier.admission_order = self._running.next_admission_order()
        return self._resume(request)

    def resume(self, request: ScheduledRequest) -> list[Sequence]:
        """Run a request whose choices all have tokens of another worker, without computing its prompt first.

        Each choice computes what is behind its last cached block, in one chunk with what is left of the prompt.
        Returns no sequence, and changes nothing, if no choice goes on, if a choice has no tokens, or if a full block of
        the prompt is not cached.
        """
        prompt, known = request.prompt_sequence, request.output.keys() | request.stopped
        if request.output.keys() <= request.stopped:  # No choice goes on.
            return []
        size = self._blocks.pool.block_size
        num_cached = self._blocks.count_cached(prompt, recompute_last=False)
        if len(known) < request.job.params.n or num_cached + size <= prompt.num_prompt:
            return []
        request.advance(DecodeMove.RUN)
        sequences = self._resume(request)
        for sequence in sequences:
            self._blocks.num_reused_blocks += (self._blocks.count_cached(sequence) - num_cached) // size
        self._running.resume()
        return sequences

    def _resume(self, request: ScheduledRequest) -> list[Sequence]:
        carrier, sequences = request.prompt_sequence, list[Sequence]()
        self._blocks.free(carrier)
        for choice, output in sorted(request.output.items()):
            if choice in request.stopped:
                continue
            sequence = request.job.new_sequence()
            sequence.choice_index, sequence.admission_order = choice, carrier.admission_order
            sequence.tokens.extend(output)
            sequence.sampling = self._limits.sample_row(sequence, choice)
            self._running.queue(sequence)
            sequences.append(sequence)
        return sequences

    def catch_up(self, request_id: RequestId, known: Items[ChoiceTokens]) -> None:
        """The client has these tokens from another worker: go on behind them. Tokens that are known here are skipped.

        A request or choice that is over is ignored. Raises `Diverged` when this worker has other tokens,
        `RequestError` for tokens that the request cannot have.
        """
        request = self._requests.get(request_id)
        for each in known if request is not None else ():
            assert request is not None
            if each.choice_index in request.stopped:
                continue
            sequence = request.sequences.get(each.choice_index)
            if request.phase is not DecodePhase.RUNNING:
                output = request.output.get(each.choice_index, ())
                request.output[each.choice_index] = (*output, *self._new(request, each, output))
            elif sequence is not None:
                sequence.tokens.extend(self._new(request, each, tuple(sequence.tokens[sequence.num_prompt :])))

    def _new(self, request: ScheduledRequest, known: ChoiceTokens, output: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens of `known` that follow `output`."""
        first, tokens = known.first_index, known.token_ids
        end = first + len(tokens)
        room = min(request.job.params.max_tokens, self._limits.max_model_len - request.prompt_sequence.num_prompt)
        if not 0 <= first <= len(output) or end >= room:
            raise RequestError(
                f"Tokens {first} to {end} of choice {known.choice_index} do not follow its {len(output)} tokens, of at "
                f"most {room - 1} that go on.",
                param="catch_up",
            )
        check_vocabulary("catch_up", tokens, self._limits.vocab_size)
        if output[first:end] != tokens[: len(output) - first]:
            raise Diverged(
                f"Choice {known.choice_index} of request {request.request_id} has other tokens here than at the "
                "worker that it comes from. Do their kernels compute alike?"
            )
        return tokens[len(output) - first :]
