#!lua flags=allow-oom
-- Write plans, if the fence still belongs to the active scheduler, and wake workers that wait.
-- KEYS: scheduler, plan keys, wake keys   ARGV: fence, ttl in ms, plans
if redis.call('HGET', KEYS[1], 'fence') ~= ARGV[1] then return 'fenced' end
for i = 2, #KEYS do
  if ARGV[i + 1] then
    redis.call('SET', KEYS[i], ARGV[i + 1], 'PX', ARGV[2])
  else
    redis.call('LPUSH', KEYS[i], '1')
    redis.call('LTRIM', KEYS[i], '0', '0')
    redis.call('PEXPIRE', KEYS[i], ARGV[2])
  end
end
return 'published'
