#!lua flags=allow-oom
-- Note something about a job, unless it is gone: a late note must not leave half a job behind.
-- KEYS: meta   ARGV: HSET, or HSETNX where the first note counts; owner or generation that is meant, "" for any;
--       field, value (HSET takes several)
local state, owner, generation = unpack(redis.call('HMGET', KEYS[1], 'state', 'owner', 'generation'))
if not state or (ARGV[2] ~= '' and ARGV[2] ~= owner and ARGV[2] ~= generation) then return false end
redis.call(ARGV[1], KEYS[1], unpack(ARGV, 3))
return redis.call('HGET', KEYS[1], ARGV[3])
