-- Forget results that are safe on disk, and tell the producer that there is room.
-- KEYS: res, meta, room   ARGV: first index that is not on disk, start indices
local freed = 0
for i = 2, #ARGV do
  freed = freed + redis.call('HSTRLEN', KEYS[1], ARGV[i])
  redis.call('HDEL', KEYS[1], ARGV[i])
end
if redis.call('EXISTS', KEYS[2]) == 1 then
  redis.call('HINCRBY', KEYS[2], 'result_bytes', -freed)
  redis.call('HSET', KEYS[2], 'drained_upto', ARGV[1])
end
redis.call('LPUSH', KEYS[3], '1')
redis.call('LTRIM', KEYS[3], '0', '0')
return freed
