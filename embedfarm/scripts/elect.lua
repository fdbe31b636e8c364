#!lua flags=allow-oom
-- Take or keep the scheduler's lock. Each new holder gets a higher fence.
-- KEYS: scheduler, fence   ARGV: token, ttl in ms
local holder = redis.call('HGET', KEYS[1], 'token')
if not holder then
  redis.call('HSET', KEYS[1], 'token', ARGV[1], 'fence', redis.call('INCR', KEYS[2]))
  holder = ARGV[1]
end
if holder ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return tonumber(redis.call('HGET', KEYS[1], 'fence'))
