#!lua flags=allow-oom
-- Forget results that are safe on disk, and tell the producer that there is room.
-- KEYS: res, meta, room   ARGV: first index that is not on disk, owner or "", start indices
-- Answers 'behind', and changes nothing, where more was drained than is on disk: a crash has brought back
-- the record of an earlier try that was further on. Who collects loses the job from its disk's end on.
local drained, owner = unpack(redis.call('HMGET', KEYS[2], 'drained_upto', 'owner'))
if not drained or (ARGV[2] ~= '' and owner ~= ARGV[2]) then return 'gone' end
if tonumber(ARGV[1]) < tonumber(drained) then return 'behind' end
local grown = 0  -- counted down: Redis 7.0 takes -0, the negative of 0, for no integer
for i = 3, #ARGV do
  grown = grown - redis.call('HSTRLEN', KEYS[1], ARGV[i])
  redis.call('HDEL', KEYS[1], ARGV[i])
end
redis.call('HINCRBY', KEYS[2], 'result_bytes', grown)
redis.call('HSET', KEYS[2], 'drained_upto', ARGV[1])
redis.call('LPUSH', KEYS[3], '1')
redis.call('LTRIM', KEYS[3], '0', '0')
return 'drained'
