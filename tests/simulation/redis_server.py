"""A Redis in memory: the commands that the product uses, from itself and from its Lua scripts, which run unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lupa.lua51 as lupa


class RedisFailure(Exception):
    """An error reply."""


_WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
Value = Any


def _bytes(value: Any) -> bytes:
    if type(value) is bytes:
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).encode()


def _score(text: bytes) -> float:
    return {b"-inf": float("-inf"), b"+inf": float("inf")}.get(text, 0.0) or float(text)


class RedisServer:
    """Keys, their values and their ends of life. `clock`: Unix time in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.keys: dict[bytes, Value] = {}
        self.expires: dict[bytes, float] = {}
        self._lua = lupa.LuaRuntime(encoding=None, register_eval=False)
        self._scripts: dict[bytes, Any] = {}
        #: Called after each new entry of a stream or list, once.
        self.on_entry: list[Callable[[], None]] = []
        self._prepare()

    def flush(self) -> None:
        """All data is lost."""
        self.keys.clear()
        self.expires.clear()

    def execute(self, name: str, *arguments: Any) -> Any:
        """One command. Raises `RedisFailure`."""
        command = getattr(self, f"_{name.lower()}", None)
        if command is None:
            raise RedisFailure(f"ERR unknown command '{name}'")
        return command(*map(_bytes, arguments))

    # Keys.
    def _get_value(self, key: bytes, kind: type) -> Any:
        if key in self.expires and self.expires[key] <= self._clock():
            self.keys.pop(key, None)
            del self.expires[key]
        value = self.keys.get(key)
        if value is not None and type(value) is not kind:
            raise RedisFailure(_WRONG_TYPE)
        return value

    def _make(self, key: bytes, kind: type) -> Any:
        value = self._get_value(key, kind)
        if value is None:
            value = self.keys[key] = kind()
        return value

    def _drop_if_empty(self, key: bytes) -> None:
        if not self.keys.get(key, True):
            self._del(key)

    def _exists(self, key: bytes) -> int:
        try:
            return int(self._get_value(key, bytes) is not None)
        except RedisFailure:
            return 1

    def _type(self, key: bytes) -> Any:
        if not self._exists(key):
            return {"ok": b"none"}
        names = {bytes: b"string", dict: b"hash", set: b"set", list: b"list", Stream: b"stream", SortedSet: b"zset"}
        return {"ok": names.get(type(self.keys[key]), b"set")}

    def _del(self, *keys: bytes) -> int:
        count = 0
        for key in keys:
            count += self._exists(key)
            self.keys.pop(key, None)
            self.expires.pop(key, None)
        return count

    _unlink = _del

    def _pexpire(self, key: bytes, milliseconds: bytes) -> int:
        if not self._exists(key):
            return 0
        self.expires[key] = self._clock() + int(milliseconds) / 1000
        return 1

    def _expire(self, key: bytes, seconds: bytes) -> int:
        return self._pexpire(key, b"%d" % (int(seconds) * 1000))

    def _ping(self) -> bytes:
        return b"PONG"

    def _time(self) -> list[bytes]:
        now = self._clock()
        return [b"%d" % int(now), b"%d" % int(now % 1 * 1e6)]

    def _info(self, section: bytes = b"") -> bytes:
        return b"# Memory\r\nused_memory:1000000\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\n"

    # Strings.
    def _get(self, key: bytes) -> bytes | None:
        return self._get_value(key, bytes)

    def _set(self, key: bytes, value: bytes, *options: bytes) -> bytes:
        self._del(key)
        self.keys[key] = value
        if options and options[0].upper() in (b"EX", b"PX"):
            self._pexpire(key, b"%d" % (int(options[1]) * (1000 if options[0].upper() == b"EX" else 1)))
        return b"OK"

    # Hashes.
    def _hset(self, key: bytes, *pairs: bytes) -> int:
        fields = self._make(key, dict)
        before = len(fields)
        fields.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(fields) - before

    def _hget(self, key: bytes, field: bytes) -> bytes | None:
        return (self._get_value(key, dict) or {}).get(field)

    def _hmget(self, key: bytes, *fields: bytes) -> list[bytes | None]:
        found = self._get_value(key, dict) or {}
        return [found.get(field) for field in fields]

    def _hgetall(self, key: bytes) -> list[bytes]:
        return [text for pair in (self._get_value(key, dict) or {}).items() for text in pair]

    def _hvals(self, key: bytes) -> list[bytes]:
        return list((self._get_value(key, dict) or {}).values())

    def _hlen(self, key: bytes) -> int:
        return len(self._get_value(key, dict) or {})

    def _hdel(self, key: bytes, *fields: bytes) -> int:
        found = self._get_value(key, dict) or {}
        count = sum(found.pop(field, None) is not None for field in fields)
        self._drop_if_empty(key)
        return count

    def _hincrby(self, key: bytes, field: bytes, amount: bytes) -> int:
        fields = self._make(key, dict)
        total = int(fields.get(field, b"0")) + int(amount)
        fields[field] = b"%d" % total
        return total

    def _hscan(self, key: bytes, cursor: bytes, *options: bytes) -> list[Any]:
        return [b"0", self._hgetall(key)]

    # Sets, which are dictionaries inside: their order is that of insertion in each run.
    def _sadd(self, key: bytes, *members: bytes) -> int:
        found = self._make(key, Members)
        before = len(found)
        found.update(dict.fromkeys(members))
        return len(found) - before

    def _srem(self, key: bytes, *members: bytes) -> int:
        found = self._get_value(key, Members) or {}
        count = sum(member in found for member in members)
        for member in members:
            found.pop(member, None)
        self._drop_if_empty(key)
        return count

    def _smembers(self, key: bytes) -> list[bytes]:
        return list(self._get_value(key, Members) or {})

    def _sscan(self, key: bytes, cursor: bytes, *options: bytes) -> list[Any]:
        return [b"0", self._smembers(key)]

    # Lists.
    def _lpush(self, key: bytes, *items: bytes) -> int:
        found = self._make(key, list)
        for item in items:
            found.insert(0, item)
        return len(found)

    def _rpush(self, key: bytes, *items: bytes) -> int:
        found = self._make(key, list)
        found.extend(items)
        count = len(found)
        self._wake()
        return count

    def _blpop(self, key: bytes, seconds: bytes) -> list[bytes] | None:
        """What is there now. The caller waits for more."""
        found = self._get_value(key, list)
        popped = [key, found.pop(0)] if found else None
        self._drop_if_empty(key)
        return popped

    def _rpop(self, key: bytes) -> bytes | None:
        found = self._get_value(key, list)
        popped = found.pop() if found else None
        self._drop_if_empty(key)
        return popped

    def _llen(self, key: bytes) -> int:
        return len(self._get_value(key, list) or ())

    def _lrem(self, key: bytes, count: bytes, item: bytes) -> int:
        found = self._get_value(key, list) or []
        if item not in found:
            return 0
        found.remove(item)
        self._drop_if_empty(key)
        return 1

    def _lrange(self, key: bytes, first: bytes, last: bytes) -> list[bytes]:
        found = self._get_value(key, list) or []
        stop = int(last) + 1
        return list(found[int(first) : stop or None])

    # Sorted sets.
    def _zadd(self, key: bytes, score: bytes, member: bytes) -> int:
        found = self._make(key, SortedSet)
        is_new = member not in found
        found[member] = float(score)
        return int(is_new)

    def _zremrangebyscore(self, key: bytes, low: bytes, high: bytes) -> int:
        found = self._get_value(key, SortedSet) or {}
        gone = [member for member, score in found.items() if _score(low) <= score <= _score(high)]
        for member in gone:
            del found[member]
        self._drop_if_empty(key)
        return len(gone)

    def _zremrangebyrank(self, key: bytes, first: bytes, last: bytes) -> int:
        found = self._get_value(key, SortedSet) or {}
        ranked = sorted(found, key=lambda member: (found[member], member))
        gone = ranked[int(first) : (int(last) + 1) or None]
        for member in gone:
            del found[member]
        self._drop_if_empty(key)
        return len(gone)

    def _zrevrange(self, key: bytes, first: bytes, last: bytes, *options: bytes) -> list[bytes]:
        found = self._get_value(key, SortedSet) or {}
        ranked = sorted(found, key=lambda member: (found[member], member), reverse=True)
        chosen = ranked[int(first) : (int(last) + 1) or None]
        return [text for member in chosen for text in ((member, _bytes(found[member])) if options else (member,))]

    # Streams.
    def _xadd(self, key: bytes, *arguments: bytes) -> bytes:
        stream: Stream = self._make(key, Stream)
        limit = 0
        if arguments[0].upper() == b"MAXLEN":
            limit = int(arguments[2])
            arguments = arguments[3:]
        given = self._next_id(stream) if arguments[0] == b"*" else arguments[0]
        position = tuple(map(int, given.split(b"-")))
        if stream.entries and position <= stream.entries[-1][0]:
            raise RedisFailure("ERR The ID specified in XADD is equal or smaller than the target stream top item")
        stream.entries.append((position, list(arguments[1:])))
        if limit and len(stream.entries) > limit:
            del stream.entries[:-limit]
        self._wake()
        return given

    def _next_id(self, stream: Stream) -> bytes:
        now = int(self._clock() * 1000)
        last, count = stream.entries[-1][0] if stream.entries else (0, 0)
        return b"%d-%d" % ((last, count + 1) if last >= now else (now, 0))

    def _wake(self) -> None:
        waiting, self.on_entry = self.on_entry, []
        for wake in waiting:
            wake()

    def _xread(self, *arguments: bytes) -> list[Any] | None:
        """What is there now. The caller waits for more."""
        options = {arguments[i].upper(): int(arguments[i + 1]) for i in range(0, arguments.index(b"STREAMS"), 2)}
        key, after_id = arguments[-2:]
        after = tuple(map(int, after_id.split(b"-")))
        stream = self._get_value(key, Stream)
        entries = [each for each in (stream.entries if stream else ()) if each[0] > after][: options.get(b"COUNT")]
        return [[key, [[b"%d-%d" % entry_id, fields] for entry_id, fields in entries]]] if entries else None

    # Scripts.
    def _prepare(self) -> None:
        self._lua.execute(b"redis = {} ; KEYS = {} ; ARGV = {}")
        redis = self._lua.globals()[b"redis"]
        redis[b"raw"] = self._from_lua
        self._lua.execute(
            b"""
            function redis.pcall(...) return redis.raw(...) end
            function redis.call(...)
              local reply = redis.raw(...)
              if type(reply) == 'table' and reply.err then error(reply.err, 0) end
              return reply
            end
            function redis.error_reply(text) return {err = text} end
            function redis.status_reply(text) return {ok = text} end
            """
        )

    def _from_lua(self, name: bytes, *arguments: Any) -> Any:
        try:
            return self._to_lua(self.execute(name.decode(), *arguments))
        except RedisFailure as failure:
            return self._lua.table_from({b"err": str(failure).encode()})

    def _to_lua(self, reply: Any) -> Any:
        if reply is None:
            return False
        if isinstance(reply, dict):
            return self._lua.table_from({name.encode(): value for name, value in reply.items()})
        if isinstance(reply, list):
            return self._lua.table_from([self._to_lua(item) for item in reply])
        return reply

    def _eval(self, source: bytes, num_keys: bytes, *arguments: bytes) -> Any:
        script = self._scripts.get(source)
        if script is None:
            script = self._scripts[source] = self._lua.execute(b"return function(KEYS, ARGV)\n" + source + b"\nend")
        count = int(num_keys)
        keys, rest = self._lua.table_from(arguments[:count]), self._lua.table_from(arguments[count:])
        try:
            return self._reply(script(keys, rest))
        except lupa.LuaError as error:
            raise RedisFailure(f"ERR {error}") from error

    def _reply(self, value: Any) -> Any:
        """As Redis converts what a script returns."""
        if value is None or value is False:
            return None
        if value is True:
            return 1
        if isinstance(value, float):
            return int(value)
        if isinstance(value, bytes | int):
            return value
        if value[b"err"] is not None:
            raise RedisFailure(value[b"err"].decode())
        if value[b"ok"] is not None:
            return value[b"ok"]
        return [self._reply(value[index]) for index in range(1, len(value) + 1)]


class Members(dict[bytes, None]):
    """A set."""


class SortedSet(dict[bytes, float]):
    """Members with their scores."""


class Stream:
    """Entries in the order of their ids."""

    def __init__(self) -> None:
        self.entries: list[tuple[tuple[int, ...], list[bytes]]] = []
