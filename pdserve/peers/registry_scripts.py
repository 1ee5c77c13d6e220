"""The scripts with which Redis changes and lists the records of workers."""

# KEYS: record, ids. ARGV: TTL in ms, id, field, value, ... Returns the previous epoch. Replaces whatever else is there.
REGISTER = """
local before = redis.pcall('HGET', KEYS[1], 'epoch')
if type(before) ~= 'string' then before = '' end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], unpack(ARGV, 3))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
local added = redis.pcall('SADD', KEYS[2], ARGV[2])
if type(added) == 'table' then redis.call('DEL', KEYS[2]); redis.call('SADD', KEYS[2], ARGV[2]) end
return before
"""

# KEYS: record, ids. ARGV: epoch, id. Keeps the record of a later incarnation.
REMOVE = """
if redis.call('HGET', KEYS[1], 'epoch') == ARGV[1] then
  redis.call('DEL', KEYS[1])
  redis.call('SREM', KEYS[2], ARGV[2])
end
return ''
"""

# KEYS: ids, mark. ARGV: prefix of the records' keys, a new mark, which is set if there is none of its length. Returns
# the mark, and {id, {field, value, ...}} for each. Removes ids without a record: it has expired, or something else is
# there.
LIST = """
local workers = {}
local mark = redis.pcall('GET', KEYS[2])
if type(mark) ~= 'string' or #mark ~= #ARGV[2] then
  mark = ARGV[2]
  redis.call('SET', KEYS[2], mark)
end
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local fields = redis.pcall('HGETALL', ARGV[1] .. id)
  if not fields.err and #fields > 0 then
    workers[#workers + 1] = {id, fields}
  else
    redis.call('SREM', KEYS[1], id)
  end
end
return {mark, workers}
"""
