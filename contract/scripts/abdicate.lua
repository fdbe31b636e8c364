-- Give the scheduler's lock up, if it is still the caller's.
-- KEYS: scheduler   ARGV: fence
if redis.call('HGET', KEYS[1], 'fence') ~= ARGV[1] then return 'fenced' end
redis.call('UNLINK', KEYS[1])
return 'free'
