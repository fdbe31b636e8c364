#!lua flags=allow-oom
-- Put a job on the list of those that have ended, and count its end, however often that is asked for.
-- Answers 1 the first time, then 0.
-- KEYS: ended, jobs, endings   ARGV: job, unix seconds, how it ended
local new = redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
if new == 1 then redis.call('HINCRBY', KEYS[3], ARGV[3], 1) end
redis.call('ZREM', KEYS[2], ARGV[1])
return new
