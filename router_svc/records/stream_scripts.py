"""The scripts that keep resumable streams in Redis.

`stream:{owner}:{id}` is a hash: the sealed `request`, the `nonce` of the stream, the `fence` of the router that runs
it, its `state` (running, left, complete), what was `charged`, and the `lease` of its limits.
`stream-output:{owner}:{id}` lists sealed pieces of the output. A router that resumes a stream raises the fence; the
router before it finds out with its next write. Every write renews both keys.
"""

from __future__ import annotations

# Answers to a write that was refused. The answer to any other is ''.
#: There is no such stream: Redis has lost it, or its time is over.
GONE = b"gone"
#: Another stream of the same client has this id now.
REPLACED = b"replaced"
#: Another router runs it.
TAKEN = b"taken"

#: Kinds of writes. Beside nonce and fence, `start` has the request, what was charged, and the lease; `append` the index
#: of a piece of the output, and the piece; `leave` the state, and what was charged; `renew` and `forget` have nothing.
START, APPEND, RENEW, LEAVE, FORGET = "start", "append", "renew", "leave", "forget"
#: Arguments of each write: kind, nonce, fence and up to three others.
ARGUMENTS = 6

# Many streams at once, since a call costs more than what it does. KEYS: stream and output of each. ARGV: time to live
# in ms, then the arguments of each. Returns an answer for each. All writes can be repeated: a piece that is there
# already was written by a call whose answer was lost.
WRITE = """
local ttl = ARGV[1]
local function write(stream, output, kind, nonce, fence, first, second, third)
  if kind == 'start' then
    -- After Redis has lost a stream, the router that runs it now may have written it again first.
    local known = redis.pcall('HMGET', stream, 'nonce', 'fence')
    if not known.err and known[1] == nonce and tonumber(known[2] or 0) > tonumber(fence) then return 'taken' end
    redis.call('DEL', stream, output)
    redis.call('HSET', stream, 'nonce', nonce, 'fence', fence, 'request', first, 'charged', second, 'lease', third,
      'state', 'running')
    redis.call('PEXPIRE', stream, ttl)
    return ''
  end
  local found = redis.pcall('HMGET', stream, 'nonce', 'fence')
  if found.err or not found[1] then return 'gone' end
  if found[1] ~= nonce then return 'replaced' end
  if found[2] ~= fence then return 'taken' end
  if kind == 'forget' then
    redis.call('DEL', stream, output)
    return ''
  end
  if kind == 'append' then
    local length = redis.pcall('LLEN', output)
    if type(length) == 'table' or length < tonumber(first) then return 'gone' end
    if length == tonumber(first) then redis.call('RPUSH', output, second) end
  elseif kind == 'leave' then
    redis.call('HSET', stream, 'state', first, 'charged', second)
  end
  redis.call('PEXPIRE', stream, ttl)
  redis.call('PEXPIRE', output, ttl)
  return ''
end
local answers = {}
for i = 1, #KEYS / 2 do answers[i] = write(KEYS[2 * i - 1], KEYS[2 * i], unpack(ARGV, 6 * i - 4, 6 * i + 1)) end
return answers
"""

#: What a reader does: it looks whether there is such a stream, and takes it when it can run it.
LOOK, TAKE = "look", "take"

# KEYS: stream, output. ARGV: what to do, start of the nonce, time to live in ms, largest size of the answer. Returns
# nothing if there is no such stream, and only its size if that is too large. Else it returns nonce, fence, state,
# charged, lease, request and, if the stream is taken or complete, the pieces of the output. Only `take` changes the
# state of a stream, and only if it is not complete.
READ = """
local found = redis.pcall('HMGET', KEYS[1], 'nonce', 'fence', 'state', 'charged', 'lease', 'request')
if found.err then return {} end
for i = 1, 6 do if not found[i] then return {} end end
if string.sub(found[1], 1, #ARGV[2]) ~= ARGV[2] then return {} end
local size = 0
for i = 1, 6 do size = size + #found[i] end
if found[3] == 'complete' or ARGV[1] == 'take' then
  for _, piece in ipairs(redis.call('LRANGE', KEYS[2], 0, -1)) do
    size = size + #piece
    found[#found + 1] = piece
  end
end
if size > tonumber(ARGV[4]) then return {tostring(size)} end
if found[3] ~= 'complete' and ARGV[1] == 'take' then
  found[2] = tostring(redis.call('HINCRBY', KEYS[1], 'fence', 1))
  redis.call('HSET', KEYS[1], 'state', 'running')
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return found
"""
