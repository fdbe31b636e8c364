-- Make a job that exists not yet, or say from which chunk on an existing one is still wanted: what a
-- restarted server has lost, but the disk has, is not asked for again. One that has ended is made anew.
-- KEYS: in, retry, meta, failed   ARGV: spec, first chunk that is still wanted, unix ms,
--       then name and value of each of its terms and of what else is noted
local state = redis.call('HGET', KEYS[3], 'state')
if state == 'finished' or state == 'failed' then redis.call('UNLINK', KEYS[3], KEYS[4]) end
if redis.call('EXISTS', KEYS[3]) == 0 then
  redis.call('XGROUP', 'CREATE', KEYS[1], 'farm', '0', 'MKSTREAM')
  redis.call('XGROUP', 'CREATE', KEYS[2], 'farm', '0', 'MKSTREAM')
  redis.call('HSET', KEYS[3], 'spec', ARGV[1], 'state', 'open',
    'first_chunk', ARGV[2], 'pushed_upto', ARGV[2], 'drained_upto', ARGV[2],
    'created_ms', ARGV[3], unpack(ARGV, 4))
elseif tonumber(redis.call('HGET', KEYS[3], 'pushed_upto')) < tonumber(ARGV[2]) then
  redis.call('HSET', KEYS[3], 'pushed_upto', ARGV[2])
end
return redis.call('HGET', KEYS[3], 'state')
