#!lua flags=allow-oom
-- Note something about a job, unless it is gone: a late note must not leave half a job behind.
-- KEYS: meta   ARGV: HSET, or HSETNX where the first note counts; field, value (HSET takes several)
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
redis.call(ARGV[1], KEYS[1], unpack(ARGV, 2))
return redis.call('HGET', KEYS[1], ARGV[2])
