#!lua flags=allow-oom
-- Note the newest run of a recurring job; only the holder of the lock may, and only forwards.
-- What is no time there is written over, and so is one later than the last that may be true.
-- KEYS: lock, newest run   ARGV: fence, unix seconds of the run, ttl in s, last that may be true
if redis.call('HGET', KEYS[1], 'fence') ~= ARGV[1] then return 0 end
local newest, due = tonumber(redis.call('GET', KEYS[2]) or 0), tonumber(ARGV[2])
if not (newest and due <= newest and newest <= tonumber(ARGV[4])) then
  redis.call('SET', KEYS[2], ARGV[2])
end
redis.call('EXPIRE', KEYS[2], ARGV[3])
return 1
