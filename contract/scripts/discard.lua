#!lua flags=allow-oom
-- Take an entry off its stream that is no work of its job; nothing is counted. One that was put in its
-- place since it was read, when the job was made anew, stays.
-- KEYS: in|retry   ARGV: entry id, generation that it carries
local entry = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1]
local generation = ''
for i = 1, entry and #entry[2] or 0, 2 do
  if entry[2][i] == 'generation' then generation = entry[2][i + 1] end
end
if entry and generation ~= ARGV[2] then return 'stays' end
redis.call('XACK', KEYS[1], 'farm', ARGV[1])
redis.call('XDEL', KEYS[1], ARGV[1])
return 'discarded'
