-- Make a job that exists not yet; a second call changes nothing.
-- KEYS: in, retry, meta   ARGV: spec, first chunk that is still wanted, unix ms
if redis.call('EXISTS', KEYS[3]) == 0 then
  redis.call('HSET', KEYS[3], 'spec', ARGV[1], 'state', 'open',
    'first_chunk', ARGV[2], 'pushed_upto', ARGV[2], 'drained_upto', ARGV[2],
    'created_ms', ARGV[3])
end
for i = 1, 2 do
  local made = redis.pcall('XGROUP', 'CREATE', KEYS[i], 'farm', '0', 'MKSTREAM')
  if type(made) == 'table' and made.err and not string.find(made.err, 'BUSYGROUP') then
    return made
  end
end
return redis.call('HGET', KEYS[3], 'state')
