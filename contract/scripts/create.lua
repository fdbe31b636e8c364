-- Make a job that exists not yet, or say from which chunk on an existing one is still wanted: what a
-- restarted server has lost, but the disk has, is not asked for again. One that has ended is made anew,
-- and so is one of which somebody has deleted `meta`: what is left of it belongs to nobody.
-- Each making is a generation of its own. Its blocks carry it, so that the commit of a worker that still
-- holds a block of an earlier one changes nothing.
-- KEYS: in, retry, meta, failed, res
-- ARGV: spec, first chunk that is still wanted, unix ms, then name and value of each of its terms and of
--       what else is noted: `owner` names the output that it fills, and nobody else may have it
-- Answers the state, or 'taken' if the job is another owner's.
local noted = {}
for i = 4, #ARGV, 2 do noted[ARGV[i]] = ARGV[i + 1] end
local state, before, owner, out, ended =
  unpack(redis.call('HMGET', KEYS[3], 'state', 'generation', 'owner', 'out', 'ended_ms'))
if state == 'finished' or state == 'failed' or (state == 'cancelled' and ended) then state = false end
if not state then
  for i = 1, #KEYS do redis.call('UNLINK', KEYS[i]) end
  redis.call('XGROUP', 'CREATE', KEYS[1], 'farm', '0', 'MKSTREAM')
  redis.call('XGROUP', 'CREATE', KEYS[2], 'farm', '0', 'MKSTREAM')
  local now = redis.call('TIME')
  local generation = string.format('%d', now[1] * 1000 + math.floor(now[2] / 1000))
  if generation == before then generation = generation .. '+' end
  redis.call('HSET', KEYS[3], 'spec', ARGV[1], 'state', 'open', 'generation', generation,
    'first_chunk', ARGV[2], 'pushed_upto', ARGV[2], 'drained_upto', ARGV[2],
    'created_ms', ARGV[3], unpack(ARGV, 4))
  return 'open'
end
if noted.owner and noted.owner ~= '' and owner ~= noted.owner then
  if owner or (out and out ~= '' and out ~= noted.out) then return 'taken' end
  redis.call('HSET', KEYS[3], 'owner', noted.owner)
end
if tonumber(redis.call('HGET', KEYS[3], 'pushed_upto')) < tonumber(ARGV[2]) then
  redis.call('HSET', KEYS[3], 'pushed_upto', ARGV[2])
end
return state
