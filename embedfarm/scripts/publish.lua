-- Write plans, if the fence still belongs to the active scheduler.
-- KEYS: scheduler, plan keys   ARGV: fence, ttl in ms, plans
if redis.call('HGET', KEYS[1], 'fence') ~= ARGV[1] then return 'fenced' end
for i = 2, #KEYS do redis.call('SET', KEYS[i], ARGV[i + 1], 'PX', ARGV[2]) end
return 'published'
