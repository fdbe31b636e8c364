#!lua flags=allow-oom
-- Announce a worker. The newest incarnation owns the name; an older one is told to stop.
-- KEYS: worker, workers   ARGV: name, incarnation, heartbeat, ttl in ms
local owner = redis.call('HGET', KEYS[1], 'incarnation')
if owner and owner > ARGV[2] then return 'superseded' end
local now = redis.call('TIME')
redis.call('HSET', KEYS[1], 'incarnation', ARGV[2], 'heartbeat', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('ZADD', KEYS[2], now[1] + math.floor(now[2] / 1000) / 1000, ARGV[1])
return 'alive'
