"""The choices of completions: texts, with the prompt in front if the client requested it, streamed and whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from pdserve.base.sampling import TokenLogprobs
from pdserve.model.tokenizer import Tokenizer
from router_svc.api.json_pieces import integers_to_json, text_to_json, to_json
from router_svc.api.openai.answers import CompletionChunkChoice, CompletionLogprobs
from router_svc.api.openai.choices import CollectedChoice, ending
from router_svc.api.openai.generation_request import GenerationRequest
from router_svc.api.openai.logprobs import (
    TextOffsets,
    completion_chunks,
    completion_logprobs,
    completion_logprobs_pieces,
    entry_pieces,
    logprob_entries,
)
from router_svc.api.openai.prompt_logprobs import EchoedPrompt, ScoredPrompt
from router_svc.generation import Generation
from router_svc.request.output import ChoiceDelta, detokenizer_of


class CompletionFormat:
    """Choices with `text`."""

    chunk_object = "text_completion"
    whole_object = "text_completion"
    counts_reasoning = False
    reasoning_tokens = 0

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._choices_per_prompt = request.generations[0].sampling.n
        self._echoes = [echo for echo in request.echoes for _ in range(self._choices_per_prompt)]
        #: The token ids of each choice's prompt, if the client requested them.
        self._prompts = request.prompts_of_choices
        #: Where the next token of each choice starts in its text, for log-probabilities.
        self._offsets: dict[int, TextOffsets] = {}

    def opening(self, index: int) -> CompletionChunkChoice | None:
        """The prompt, if the client requested an echo or its tokens. `scored` makes it if it has log-probabilities."""
        if not (self._echoes or self._prompts) or self._request.echo_logprobs is not None:
            return None
        return self._opening(index)

    def _opening(self, index: int) -> CompletionChunkChoice:
        text = self._echoes[index] if self._echoes else ""
        opening: CompletionChunkChoice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        if self._prompts:
            opening |= {"prompt_token_ids": [*self._prompts[index]], "token_ids": []}
        return opening

    def scored(self, delta: ChoiceDelta) -> Iterator[bytes]:
        """The prompt, with its log-probabilities."""
        echoed = self._echoed(delta.choice_index, delta.prompt_logprobs or ())
        assert echoed is not None, "scores are streamed in echoes alone"
        self._offsets[delta.choice_index] = self._new_offsets(delta.choice_index, len(echoed.text))
        before, after = to_json(self._opening(delta.choice_index)).split(b'"logprobs":null')
        yield before + b'"logprobs":'
        yield from completion_logprobs_pieces(echoed.chunks(self._tokenizer))
        yield after

    def shared_fields(self) -> Iterator[bytes]:
        """Nothing: all is in the choices."""
        yield from ()

    def chunk(self, delta: ChoiceDelta) -> CompletionChunkChoice:
        """New text."""
        index = delta.choice_index
        logprobs = self._logprobs(index, delta.token_ids, delta.logprobs)
        ends = ending(delta)
        chunk: CompletionChunkChoice = {
            "index": index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": ends["finish_reason"],
            "stop_reason": ends["stop_reason"],
        }
        if self._prompts:
            chunk["token_ids"] = [*delta.token_ids]
            if delta.logprobs:
                chunk["logprob_entries"] = logprob_entries(delta.token_ids, delta.logprobs, self._tokenizer)
        return chunk

    def whole(self, index: int, collected: CollectedChoice) -> Iterator[bytes]:
        """The whole text, after the prompt if the client requested an echo."""
        text = "".join([*self._echoes[index : index + 1], *collected.text])
        yield b'{"index":%d,"text":%b,"logprobs":' % (index, text_to_json(text))
        echoed = self._echoed(index, collected.prompt_logprobs)
        if collected.logprobs or echoed is not None:
            offsets = self._new_offsets(index, 0 if echoed is None else len(echoed.text))
            output = completion_chunks(collected.token_ids, collected.logprobs, self._tokenizer, offsets)
            prompt = () if echoed is None else echoed.chunks(self._tokenizer)
            yield from completion_logprobs_pieces(chain(prompt, output))
        else:
            yield b"null"
        if (alternatives := self._request.prompt_logprobs) is not None:
            yield b',"prompt_logprobs":'
            scored = ScoredPrompt(token_ids=self._generation(index).prompt, alternatives=alternatives)
            yield from scored.pieces(collected.prompt_logprobs, self._tokenizer)
        if self._prompts:
            yield b',"prompt_token_ids":%b' % integers_to_json(self._prompts[index])
            yield b',"token_ids":%b' % integers_to_json(collected.token_ids)
            if collected.logprobs:
                yield b',"logprob_entries":'
                yield from entry_pieces(collected.token_ids, collected.logprobs, self._tokenizer)
        yield b"," + to_json(ending(collected))[1:]

    def _generation(self, index: int) -> Generation:
        return self._request.generations[index // self._choices_per_prompt]

    def _echoed(self, index: int, scores: Sequence[TokenLogprobs]) -> EchoedPrompt | None:
        """The choice's prompt, if the client requested log-probabilities in the echo."""
        if self._request.echo_logprobs is None:
            return None
        generation = self._generation(index)
        return EchoedPrompt(
            token_ids=generation.prompt,
            text=self._echoes[index],
            scores=scores,
            alternatives=self._request.echo_logprobs,
            listed=generation.sampling.logprob_token_ids,
        )

    def _logprobs(
        self, index: int, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]
    ) -> CompletionLogprobs | None:
        if not entries:
            return None
        if index not in self._offsets:
            self._offsets[index] = self._new_offsets(index)
        return completion_logprobs(token_ids, entries, self._tokenizer, self._offsets[index])

    def _new_offsets(self, index: int, start: int = 0) -> TextOffsets:
        return TextOffsets(detokenizer_of(self._generation(index).text, self._tokenizer), start)
