"""The scripts that keep resumable streams in Redis.

`stream:{owner}:{id}` is a hash: the sealed `request`, the `nonce` of the stream, the `fence` of the router that runs
it, its `state` (running, left, complete), what was `charged`, and the `lease` of its limits.
`stream-output:{owner}:{id}` lists sealed pieces of the output. A router that resumes a stream raises the fence; the one
before finds out with its next write. Every write renews both keys.
"""

from __future__ import annotations

# What a writer's call answers unless it is ''.
#: There is no such stream: Redis has lost it, or its time is over.
GONE = b"gone"
#: Another stream of the same client has this id now.
REPLACED = b"replaced"
#: Another router runs it.
TAKEN = b"taken"

# KEYS: stream, output. ARGV: nonce, fence, time to live in ms, request, charged, lease.
BEGIN = """
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('HSET', KEYS[1], 'nonce', ARGV[1], 'fence', ARGV[2], 'request', ARGV[4], 'charged', ARGV[5],
  'lease', ARGV[6], 'state', 'running')
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return ''
"""

_CHECK = """
local found = redis.pcall('HMGET', KEYS[1], 'nonce', 'fence')
if found.err or not found[1] then return 'gone' end
if found[1] ~= ARGV[1] then return 'replaced' end
if found[2] ~= ARGV[2] then return 'taken' end
"""
_RENEW = """
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return ''
"""

# KEYS: stream, output. ARGV: nonce, fence, time to live in ms, index of the piece, piece. One that is there already
# was written by a call whose answer was lost.
APPEND = (
    _CHECK
    + """
local length = redis.call('LLEN', KEYS[2])
if length < tonumber(ARGV[4]) then return 'gone' end
if length == tonumber(ARGV[4]) then redis.call('RPUSH', KEYS[2], ARGV[5]) end
"""
    + _RENEW
)

# KEYS: stream, output. ARGV: nonce, fence, time to live in ms.
RENEW = _CHECK + _RENEW

# KEYS: stream, output. ARGV: nonce, fence, time to live in ms, state, charged.
LEAVE = _CHECK + "redis.call('HSET', KEYS[1], 'state', ARGV[4], 'charged', ARGV[5])" + _RENEW

# KEYS: stream, output. ARGV: nonce, fence. The request has failed: there is nothing to resume.
FORGET = _CHECK + "redis.call('DEL', KEYS[1], KEYS[2]) return ''"

# KEYS: stream, output. ARGV: start of the nonce, time to live in ms. Returns nothing if there is no such stream, else
# nonce, fence, state, charged, lease, request and the pieces of the output. Only a complete one stays as it is.
TAKE = """
local found = redis.pcall('HMGET', KEYS[1], 'nonce', 'fence', 'state', 'charged', 'lease', 'request')
if found.err then return {} end
for i = 1, 6 do if not found[i] then return {} end end
if string.sub(found[1], 1, #ARGV[1]) ~= ARGV[1] then return {} end
if found[3] ~= 'complete' then
  found[2] = tostring(redis.call('HINCRBY', KEYS[1], 'fence', 1))
  redis.call('HSET', KEYS[1], 'state', 'running')
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
for _, piece in ipairs(redis.call('LRANGE', KEYS[2], 0, -1)) do found[#found + 1] = piece end
return found
"""
