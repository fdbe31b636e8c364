#!lua flags=allow-oom
-- Note something about a job, unless it is gone: a late note must not leave half a job behind.
-- KEYS: meta   ARGV: HSET, or HSETNX where the first note counts; owner or generation that is meant, "" for any;
--       field, value and so on: HSETNX sets the further ones with the first only, where that was not there
local state, owner, generation = unpack(redis.call('HMGET', KEYS[1], 'state', 'owner', 'generation'))
if not state or (ARGV[2] ~= '' and ARGV[2] ~= owner and ARGV[2] ~= generation) then return false end
if ARGV[1] == 'HSET' or redis.call('HSETNX', KEYS[1], ARGV[3], ARGV[4]) == 1 then
  redis.call('HSET', KEYS[1], unpack(ARGV, 3))
end
return redis.call('HGET', KEYS[1], ARGV[3])
