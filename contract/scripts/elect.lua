#!lua flags=allow-oom
-- Take or keep the scheduler's lock. Each new holder gets a higher fence, also where another
-- program has written over the counter: no time is less than a number of elections.
-- KEYS: scheduler, fence   ARGV: token, ttl in ms
local holder = redis.call('HGET', KEYS[1], 'token')
if not holder then
  local fence = redis.pcall('INCR', KEYS[2])
  if type(fence) == 'table' then
    fence = redis.call('TIME')[1]
    redis.call('SET', KEYS[2], fence)
  end
  redis.call('HSET', KEYS[1], 'token', ARGV[1], 'fence', fence)
  holder = ARGV[1]
end
if holder ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return tonumber(redis.call('HGET', KEYS[1], 'fence'))
