-- Give a new job a place on the list, unless there are so many unfinished ones already; 0, or how many.
-- KEYS: jobs   ARGV: job, unix seconds, most unfinished jobs, then listed jobs that have ended
if redis.call('ZSCORE', KEYS[1], ARGV[1]) then return 0 end
local unfinished = redis.call('ZCARD', KEYS[1])
for i = 4, #ARGV do
  if redis.call('ZSCORE', KEYS[1], ARGV[i]) then unfinished = unfinished - 1 end
end
if unfinished >= tonumber(ARGV[3]) then return unfinished end
redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
return 0
