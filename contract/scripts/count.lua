#!lua flags=allow-oom
-- Note what a count of all jobs has found of the farm's window, if the turn is still the caller's.
-- KEYS: window   ARGV: turn, bytes of the window, bytes that are used, bytes of results among these, ms that
--       all of this is kept, fair share of a job whose tenant has nothing here, then each tenant and the
--       share of one of its jobs
local turn, taken, before, refused = unpack(redis.call('HMGET', KEYS[1],
  'turn', 'taken', 'before', 'refused'))
if turn ~= ARGV[1] then return 'late' end
local free = ARGV[2] - ARGV[3] - taken - before
redis.call('UNLINK', KEYS[1])
local clock = redis.call('TIME')
redis.call('HSET', KEYS[1], 'counted', clock[1] * 1000 + math.floor(clock[2] / 1000),
  'taken', taken, 'before', before, 'refused', refused or 0, 'max', ARGV[2], 'free', free, 'used', ARGV[3], 'results', ARGV[4], 'share', ARGV[6])
for i = 7, #ARGV, 2 do redis.call('HSET', KEYS[1], 'share:' .. ARGV[i], ARGV[i + 1]) end
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return 'counted'
