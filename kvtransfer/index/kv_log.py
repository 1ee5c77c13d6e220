"""Workers' blocks in Redis: a set per incarnation, which is the truth, and a stream of changes to follow.

    pd:blocks:{worker}:{epoch}   set of 16-byte hashes, expires; holds an empty string so that an empty cache exists
    pd:kv-workers                hash: worker -> "epoch resync": its current incarnation, and how often that was reset
    pd:kv-events                 stream of batches (worker, epoch, kind, added, removed), trimmed
    pd:kv-head                   hash: generation and sequence of the newest entry

One script changes set and stream together. Stream ids are `generation-sequence` without gaps, so that a follower sees
from the ids alone that entries were trimmed, or that Redis lost its data (a new generation: the time in microseconds,
so that no two are equal).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from kvtransfer.index.prefix_index import KvEvent, KvEventKind
from pdserve.base.block_hash import HASH_BYTES
from pdserve.base.errors import StoreError
from pdserve.base.ids import BlockHash, Epoch, WorkerId
from pdserve.redis.store import Argument, Reply, Store, as_bytes, as_fields, as_list, script_command

BLOCKS_KEY = "blocks:"
WORKERS_KEY = "kv-workers"
STREAM_KEY = "kv-events"
HEAD_KEY = "kv-head"

#: Hashes in one stream entry, 8 KiB.
MAX_BATCH = 512

# Whoever writes to Redis may have left anything under these keys: scripts replace or skip what is not theirs.
_CHECKS = """
local function is_number(text)
  return text == '0' or type(text) == 'string' and #text <= 19 and string.match(text, '^[1-9]%d*$') ~= nil
end
local function epoch_of(stored)
  local epoch, resync = string.match(stored or '', '^(%d+) (%d+)$')
  if is_number(epoch) and is_number(resync) then return epoch, tonumber(resync) end
end
-- Generation and sequence; nothing without a head.
local function head_of(key)
  local head = redis.pcall('HMGET', key, 'generation', 'sequence')
  if not head.err and is_number(head[1]) and is_number(head[2]) and #head[2] < 16 then return head[1], head[2] end
end
"""

# Adds an entry to the stream. KEYS[3]: head, KEYS[4]: stream. A stream that does not take it starts again.
_APPEND = (
    _CHECKS
    + """
local function append(kind, added, removed)
  if not head_of(KEYS[3]) then
    redis.call('DEL', KEYS[3])
    local now = redis.call('TIME')
    local generation = string.format('%d%06d', tonumber(now[1]), tonumber(now[2]))
    redis.call('HSET', KEYS[3], 'generation', generation, 'sequence', 0)
  end
  local sequence = string.format('%.0f', redis.call('HINCRBY', KEYS[3], 'sequence', 1))
  local entry = {'XADD', KEYS[4], 'MAXLEN', '~', ARGV[4], head_of(KEYS[3]) .. '-' .. sequence,
                 'worker', ARGV[1], 'epoch', ARGV[2], 'kind', kind, 'added', added, 'removed', removed}
  if type(redis.pcall(unpack(entry))) == 'table' then
    redis.call('DEL', KEYS[4])
    redis.call(unpack(entry))
  end
end
local stored = redis.pcall('HGET', KEYS[2], ARGV[1])
if type(stored) == 'table' then
  redis.call('DEL', KEYS[2])
  stored = nil
end
"""
)

# KEYS: set, workers, head, stream. ARGV: worker, epoch, resync, stream's length, prefix of sets, TTL in ms, kind,
# added, removed. Returns 'ok', or 'lost' when Redis does not have what the batch builds on.
_WRITE = (
    _APPEND
    + """
local mine = ARGV[2] .. ' ' .. ARGV[3]
if ARGV[7] == 'reset' then
  local epoch, resync = epoch_of(stored or nil)
  if epoch and epoch ~= ARGV[2] then
    redis.call('DEL', ARGV[5] .. ARGV[1] .. ':' .. epoch)
  elseif epoch and resync >= tonumber(ARGV[3]) then
    return 'lost'
  end
  redis.call('HSET', KEYS[2], ARGV[1], mine)
  redis.call('DEL', KEYS[1])
  redis.call('SADD', KEYS[1], '')
elseif stored ~= mine or redis.call('EXISTS', KEYS[1]) == 0 then
  return 'lost'
end
local function each(command, packed)
  if #packed > 0 then
    local hashes = {}
    for i = 1, #packed, 16 do hashes[#hashes + 1] = string.sub(packed, i, i + 15) end
    redis.call(command, KEYS[1], unpack(hashes))
  end
end
each('SREM', ARGV[9])
each('SADD', ARGV[8])
redis.call('PEXPIRE', KEYS[1], ARGV[6])
if ARGV[7] == 'reset' or #ARGV[8] + #ARGV[9] > 0 then append(ARGV[7], ARGV[8], ARGV[9]) end
return 'ok'
"""
)

# KEYS: set, workers, head, stream. ARGV: worker, epoch, unused, stream's length.
_REMOVE = (
    _APPEND
    + """
redis.call('DEL', KEYS[1])
if epoch_of(stored or nil) == ARGV[2] then
  redis.call('HDEL', KEYS[2], ARGV[1])
  append('gone', '', '')
end
return 'ok'
"""
)

# KEYS: workers, head. ARGV: prefix of sets. Returns {generation, sequence, worker, epoch, worker, epoch, ...}, and
# removes the workers whose set has expired.
_LIST = (
    _CHECKS
    + """
local generation, sequence = head_of(KEYS[2])
local answer = {generation or '0', sequence or '0'}
local workers = redis.pcall('HGETALL', KEYS[1])
for i = 1, #workers, 2 do
  local epoch = epoch_of(workers[i + 1])
  if epoch and redis.call('EXISTS', ARGV[1] .. workers[i] .. ':' .. epoch) == 1 then
    answer[#answer + 1] = workers[i]
    answer[#answer + 1] = epoch
  else
    redis.call('HDEL', KEYS[1], workers[i])
  end
end
return answer
"""
)

# KEYS: set. ARGV: cursor. Returns {next cursor, hashes in one string}: one string is parsed much faster than many.
_SCAN = """
local page = redis.pcall('SSCAN', KEYS[1], ARGV[1], 'COUNT', 1000)
if page.err then return {'0', ''} end
local hashes = {}
for _, member in ipairs(page[2]) do
  if #member == 16 then hashes[#hashes + 1] = member end
end
return {page[1], table.concat(hashes)}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventBatch:
    """Changes written as one stream entry, at most `MAX_BATCH` hashes. `reset`: the worker holds nothing else."""

    reset: bool = False
    added: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class StreamPosition:
    """A position in the stream; (0, 0) precedes its first entry. A Redis that starts empty starts a new generation."""

    generation: int = 0
    sequence: int = 0

    def precedes(self, other: StreamPosition) -> bool:
        """Whether `other` directly follows this position, with nothing lost between them."""
        same_generation = self.generation in (0, other.generation)
        return same_generation and other.sequence == self.sequence + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredIncarnations:
    """The incarnations whose blocks Redis holds, and the stream's newest position at the same time."""

    position: StreamPosition
    epochs: dict[WorkerId, Epoch]


class KvLog:
    """Commands on the keys above. Every method raises `StoreError` when Redis cannot be used."""

    def __init__(self, store: Store, *, max_entries: int = 4096, ttl_s: float = 30.0) -> None:
        """The stream keeps about `max_entries` batches; a worker's set expires `ttl_s` after its last write."""
        self._store = store
        self._max_entries = max_entries
        self._ttl_s = ttl_s

    async def write(self, worker_id: WorkerId, epoch: Epoch, resync: int, batches: Sequence[KvEventBatch]) -> bool:
        """Writes batches of one incarnation, in order; a batch without hashes only renews the TTL.

        `resync` counts its resets: a batch that arrives after a newer reset is refused. False means that Redis does not
        hold what a batch builds on, because it lost data or another incarnation took over: start over with a reset.
        """
        keys = self._keys(worker_id, epoch)
        sets = self._store.key(BLOCKS_KEY)
        shared: list[Argument] = [worker_id, epoch, resync, self._max_entries, sets, int(self._ttl_s * 1000)]
        commands = []
        for batch in batches:
            assert len(batch.added) + len(batch.removed) <= MAX_BATCH
            kind = KvEventKind.RESET if batch.reset else KvEventKind.DELTA
            arguments = [*shared, kind, b"".join(batch.added), b"".join(batch.removed)]
            commands.append(script_command(_WRITE, keys=keys, arguments=arguments))
        return all(reply == b"ok" for reply in await self._store.pipeline(commands))

    async def remove(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """Removes an incarnation's blocks."""
        keys = self._keys(worker_id, epoch)
        await self._store.script(_REMOVE, keys=keys, arguments=[worker_id, epoch, 0, self._max_entries])

    async def incarnations(self) -> StoredIncarnations:
        """The incarnations whose blocks Redis holds now."""
        workers, head, sets = (self._store.key(name) for name in (WORKERS_KEY, HEAD_KEY, BLOCKS_KEY))
        reply = await self._store.script(_LIST, keys=[workers, head], arguments=[sets])
        generation, sequence, *pairs = [as_bytes(item).decode(errors="replace") for item in as_list(reply)]
        try:
            return StoredIncarnations(
                position=StreamPosition(generation=int(generation), sequence=int(sequence)),
                epochs={WorkerId(name): Epoch(int(epoch)) for name, epoch in zip(pairs[::2], pairs[1::2], strict=True)},
            )
        except ValueError as error:
            raise StoreError(
                f"The keys {workers} and {head} cannot be read: {error}. Delete them: workers rewrite them."
            ) from error

    async def hashes(self, worker_id: WorkerId, epoch: Epoch) -> AsyncIterator[tuple[BlockHash, ...]]:
        """All blocks of an incarnation, in pages.

        Concurrent changes may or may not be included. Following the stream from before the first page corrects that.
        """
        cursor = b"0"
        while True:
            reply = await self._store.script(_SCAN, keys=self._keys(worker_id, epoch)[:1], arguments=[cursor])
            next_cursor, packed = as_list(reply)
            yield _unpack(as_bytes(packed))
            cursor = as_bytes(next_cursor)
            if cursor == b"0":
                return

    async def read(
        self, after: StreamPosition, *, block_s: float, count: int = 16
    ) -> list[tuple[StreamPosition, KvEvent]]:
        """The entries after a position. Waits up to `block_s` for the first one; empty when none came.

        `count` bounds the entries of a reply, and so how long a router is busy with it: 8192 hashes take 4 ms.
        """
        reply = await self._store.call(
            *("XREAD", "COUNT", count, "BLOCK", int(block_s * 1000)),
            *("STREAMS", self._store.key(STREAM_KEY), f"{after.generation}-{after.sequence}"),
            block_s=block_s,
        )
        if reply is None:
            return []
        [stream] = as_list(reply)
        _, entries = as_list(stream)
        return [_entry(entry) for entry in as_list(entries)]

    def _keys(self, worker_id: WorkerId, epoch: Epoch) -> list[str]:
        """The incarnation's set, workers, head and stream."""
        names = (f"{BLOCKS_KEY}{worker_id}:{epoch}", WORKERS_KEY, HEAD_KEY, STREAM_KEY)
        return [self._store.key(name) for name in names]


def _unpack(packed: bytes) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(packed[start : start + HASH_BYTES]) for start in range(0, len(packed), HASH_BYTES))


def _entry(entry: Reply) -> tuple[StreamPosition, KvEvent]:
    entry_id, content = as_list(entry)
    fields = as_fields(content)
    try:
        if any(len(fields[name]) > MAX_BATCH * HASH_BYTES for name in ("added", "removed")):
            raise ValueError(f"it has more than {MAX_BATCH} hashes")
        generation, _, sequence = as_bytes(entry_id).partition(b"-")
        event = KvEvent(
            worker_id=WorkerId(fields["worker"].decode()),
            epoch=Epoch(int(fields["epoch"])),
            kind=KvEventKind(fields["kind"].decode()),
            added=_unpack(fields["added"]),
            removed=_unpack(fields["removed"]),
        )
        return StreamPosition(generation=int(generation), sequence=int(sequence)), event
    except (KeyError, ValueError) as error:
        raise StoreError(
            f"An entry of the stream {STREAM_KEY} cannot be read: {error!r:.300}. Delete the stream: it is rewritten."
        ) from error
