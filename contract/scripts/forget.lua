#!lua flags=allow-oom
-- Delete what is left of a job that has ended; one that was made anew under its name stays.
-- KEYS: meta, and all other keys of the job   ARGV: none
local state = redis.call('HGET', KEYS[1], 'state')
if state and state ~= 'finished' and state ~= 'failed' then return 'stays' end
for i = 1, #KEYS do redis.call('UNLINK', KEYS[i]) end
return 'forgotten'
