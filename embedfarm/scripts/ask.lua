-- Put a request into its lane and ring, unless the lane is full, or is new where there are enough.
-- What nobody can be waiting for any more makes room first.
-- KEYS: lane, lanes, bell
-- ARGV: engine, request id, request, requests at most, lanes at most, life of a request in ms
-- Answers 'asked' and the entry's ID, or 'full' and for how many ms the oldest request has waited.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - ARGV[6])
redis.call('XTRIM', KEYS[1], 'MINID', now - ARGV[6])
if redis.call('EXISTS', KEYS[1]) == 0 then
  if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[5]) then return {'full', '1000'} end
  redis.call('XGROUP', 'CREATE', KEYS[1], 'farm', '0', 'MKSTREAM')
elseif redis.call('XLEN', KEYS[1]) >= tonumber(ARGV[4]) then
  local oldest = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1][1]
  return {'full', tostring(now - string.match(oldest, '%d+'))}
end
local id = redis.call('XADD', KEYS[1], '*', 'id', ARGV[2], 'request', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[6])
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('XADD', KEYS[3], 'MAXLEN', 64, '*', 'engine', ARGV[1])
return {'asked', id}
