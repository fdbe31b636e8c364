#!lua flags=allow-oom
-- Forget results that are safe on disk, and tell the producer that there is room.
-- KEYS: res, meta, room   ARGV: first index that is not on disk, owner or "", start indices
if ARGV[2] ~= '' and redis.call('HGET', KEYS[2], 'owner') ~= ARGV[2] then return 'gone' end
local grown = 0  -- counted down: Redis 7.0 takes -0, the negative of 0, for no integer
for i = 3, #ARGV do
  grown = grown - redis.call('HSTRLEN', KEYS[1], ARGV[i])
  redis.call('HDEL', KEYS[1], ARGV[i])
end
if redis.call('EXISTS', KEYS[2]) == 0 then return 'gone' end
redis.call('HINCRBY', KEYS[2], 'result_bytes', grown)
redis.call('HSET', KEYS[2], 'drained_upto', ARGV[1])
redis.call('LPUSH', KEYS[3], '1')
redis.call('LTRIM', KEYS[3], '0', '0')
return 'drained'
