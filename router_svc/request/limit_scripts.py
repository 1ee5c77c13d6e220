"""The scripts that keep limits in Redis, where all routers share them. Their arithmetic is that of `limits`.

`limits:{key id}` is a hash: the time `t` in ms, requests `r` and tokens `k` that were left then, the start `p` of the
budget's period, and the tokens `b` used in it. `leases:{key id}` has the open requests, each with the time at which it
is given up unless its router renews it. A lease is named `{id}:{tokens}:{period}`, so that it can be given back by
whoever finds it.
"""

from __future__ import annotations

# KEYS: state, leases. ARGV: requests and tokens per minute, parallel, budget, lease in ms, id, tokens, starts of
# periods in s. Returns what refuses it or '', the wait in ms, what is left of requests, tokens and budget, the period.
RESERVE = """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local rpm, tpm, parallel, budget = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local lease, need = tonumber(ARGV[5]), tonumber(ARGV[7])
local period, ends = 0, now + 86400000
for i = 8, #ARGV do
  local at = tonumber(ARGV[i]) * 1000
  if at > now then ends = at break end
  period = at
end
local state = redis.call('HMGET', KEYS[1], 't', 'r', 'k', 'p', 'b')
local since = math.max(now - (tonumber(state[1]) or now), 0) / 60000
local requests = math.min((tonumber(state[2]) or rpm) + since * rpm, rpm)
local tokens = math.min((tonumber(state[3]) or tpm) + since * tpm, tpm)
local used = tonumber(state[4]) == period and tonumber(state[5]) or 0
for _, lost in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do
  local back, of = string.match(lost, ':(%d+):(%d+)$')
  tokens = math.min(tokens + (tonumber(back) or 0), tpm)
  if tonumber(of) == period then used = math.max(used - tonumber(back), 0) end
  redis.call('ZREM', KEYS[2], lost)
end
local reason, wait = '', 0
if parallel > 0 and redis.call('ZCARD', KEYS[2]) >= parallel then
  reason, wait = 'parallel', 1000
elseif rpm > 0 and requests < 1 then
  reason, wait = 'requests_per_minute', (1 - requests) * 60000 / rpm
elseif tpm > 0 and tokens < math.min(need, tpm) then
  reason, wait = 'tokens_per_minute', (math.min(need, tpm) - tokens) * 60000 / tpm
elseif budget > 0 and used >= budget then
  reason, wait = 'budget', ends - now
else
  if rpm > 0 then requests = requests - 1 end
  if tpm > 0 then tokens = tokens - need end
  used = used + need
  redis.call('ZADD', KEYS[2], now + lease, ARGV[6] .. ':' .. need .. ':' .. string.format('%.0f', period))
end
local function text(number) return string.format('%.3f', number) end
redis.call('HSET', KEYS[1], 't', string.format('%.0f', now), 'r', rpm > 0 and text(requests) or '',
  'k', tpm > 0 and text(tokens) or '', 'p', string.format('%.0f', period), 'b', string.format('%.0f', used))
local ttl = 600000
if tpm > 0 then ttl = math.max(ttl, 2 * (tpm - tokens) * 60000 / tpm) end
if budget > 0 then ttl = math.max(ttl, ends - now + 600000) end
if budget > 0 and period == 0 then redis.call('PERSIST', KEYS[1])
else redis.call('PEXPIRE', KEYS[1], string.format('%.0f', ttl)) end
redis.call('PEXPIRE', KEYS[2], string.format('%.0f', math.max(ttl, 2 * lease)))
return {reason, text(wait), text(requests), text(tokens), text(budget - used), string.format('%.0f', period)}
"""

# KEYS: state, leases. ARGV: tokens per minute, lease's name, tokens reserved, tokens used, period, and 1 if nothing is
# charged once the lease is gone. Else all tokens used are charged then, since a lease that is gone was given back.
SETTLE = """
local had = redis.call('ZREM', KEYS[2], ARGV[2])
if had == 0 and ARGV[6] == '1' then return 0 end
local back = had * tonumber(ARGV[3]) - tonumber(ARGV[4])
local state = redis.call('HMGET', KEYS[1], 'k', 'p', 'b')
if tonumber(state[1]) then
  local tokens = math.min(tonumber(state[1]) + back, tonumber(ARGV[1]))
  redis.call('HSET', KEYS[1], 'k', string.format('%.3f', tokens))
end
if tonumber(state[3]) and tonumber(state[2]) == tonumber(ARGV[5]) then
  redis.call('HSET', KEYS[1], 'b', string.format('%.0f', math.max(tonumber(state[3]) - back, 0)))
end
return 1
"""

# KEYS: leases. ARGV: lease in ms, names of leases.
RENEW = """
local time = redis.call('TIME')
local ends = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000) + tonumber(ARGV[1])
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], 'XX', string.format('%.0f', ends), ARGV[i]) end
if redis.call('PTTL', KEYS[1]) < 2 * tonumber(ARGV[1]) then redis.call('PEXPIRE', KEYS[1], 2 * ARGV[1]) end
return 1
"""

# KEYS: leases. ARGV: lease in ms, parallel, name of a lease, name of another one. Keeps the first lease if it still
# counts, else adds the other one in its place. Returns the name of the lease that is there, or '' for too many leases.
ADOPT = """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local ends = string.format('%.0f', now + tonumber(ARGV[1]))
if (tonumber(redis.call('ZSCORE', KEYS[1], ARGV[3])) or 0) > now then
  redis.call('ZADD', KEYS[1], ends, ARGV[3])
  return ARGV[3]
end
local parallel = tonumber(ARGV[2])
if parallel > 0 and redis.call('ZCOUNT', KEYS[1], now, '+inf') >= parallel then return '' end
redis.call('ZADD', KEYS[1], ends, ARGV[4])
if redis.call('PTTL', KEYS[1]) < 2 * tonumber(ARGV[1]) then redis.call('PEXPIRE', KEYS[1], 2 * ARGV[1]) end
return ARGV[4]
"""
