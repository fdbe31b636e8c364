#!lua flags=allow-oom
-- Answer a request, unless that was done before, or the asker has given up.
-- KEYS: lane, reply   ARGV: entry id, answer, life of the answer in ms
if redis.call('EXISTS', KEYS[1]) == 0 then return 'duplicate' end
if #redis.call('XPENDING', KEYS[1], 'farm', ARGV[1], ARGV[1], 1) == 0 then return 'duplicate' end
redis.call('XACK', KEYS[1], 'farm', ARGV[1])
redis.call('XDEL', KEYS[1], ARGV[1])
redis.call('RPUSH', KEYS[2], ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return 'answered'
