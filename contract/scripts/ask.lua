-- Put a request into its lane, piece by piece, and wake its workers; unless there are enough pieces in the lane,
-- lanes, or bytes in all lanes. What nobody can be waiting for any more makes room first.
-- KEYS: lane, lanes, wakeups, sizes
-- ARGV: engine, request id, pieces at most, lanes at most, bytes at most, life of a piece in ms,
--       then the pieces
-- Answers 'asked' and the entries' IDs, or 'full' and for how many ms the oldest has waited.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local dead = now - ARGV[6]
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', dead - 1)) do
  redis.pcall('HINCRBY', KEYS[4], ARGV[1], -#(entry[2][4] or ''))
end
redis.call('XTRIM', KEYS[1], 'MINID', dead)
for _, engine in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', '(' .. dead)) do
  redis.call('HDEL', KEYS[4], engine)
end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', '(' .. dead)
-- Nothing for what no lane can hold: another program's.
local function number(size)
  return size and #size < 16 and string.find(size, '^%-?%d+$') and tonumber(size)
end
local known = redis.call('EXISTS', KEYS[1]) == 1
if not known or not number(redis.call('HGET', KEYS[4], ARGV[1])) then
  redis.call('HDEL', KEYS[4], ARGV[1])
end
local grown = 0
for i = 7, #ARGV do grown = grown + #ARGV[i] end
local bytes = grown
for _, size in ipairs(redis.call('HVALS', KEYS[4])) do
  bytes = bytes + math.max(0, number(size) or 0)
end
local full = bytes > tonumber(ARGV[5])
if known then
  full = full or redis.call('XLEN', KEYS[1]) + #ARGV - 6 > tonumber(ARGV[3])
else
  full = full or redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[4])
end
if full then
  local oldest = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
  return {'full', oldest and tostring(now - string.match(oldest[1], '%d+')) or '1000'}
end
if not known then redis.call('XGROUP', 'CREATE', KEYS[1], 'farm', '0', 'MKSTREAM') end
local answer = {'asked'}
for i = 7, #ARGV do
  answer[#answer + 1] = redis.call('XADD', KEYS[1], '*', 'id', ARGV[2], 'piece', ARGV[i])
end
redis.call('PEXPIRE', KEYS[1], ARGV[6])
redis.call('HINCRBY', KEYS[4], ARGV[1], grown)
redis.call('PEXPIRE', KEYS[4], ARGV[6])
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[6])
redis.call('XADD', KEYS[3], 'MAXLEN', 64, '*', 'engine', ARGV[1])
return answer
