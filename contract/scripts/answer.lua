#!lua flags=allow-oom
-- Answer a piece of a request, unless that was done before, or the caller has given up.
-- A size that is no number is not counted on: `ask` puts it right.
-- KEYS: lane, reply, sizes   ARGV: entry id, engine, answer, life of the answer in ms
local entry = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1]
if not entry then return 'duplicate' end
redis.call('XACK', KEYS[1], 'farm', ARGV[1])
redis.call('XDEL', KEYS[1], ARGV[1])
redis.pcall('HINCRBY', KEYS[3], ARGV[2], -#(entry[2][4] or ''))
redis.call('RPUSH', KEYS[2], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return 'answered'
