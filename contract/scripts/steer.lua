#!lua flags=allow-oom
-- Pause, resume or cancel a job. What was cancelled stays so, and of a job whose blocks are all done
-- nothing is left to pause.
-- KEYS: meta   ARGV: pause, resume or cancel
local state, count, blocks_in, blocks_done =
  unpack(redis.call('HMGET', KEYS[1], 'state', 'chunk_count', 'blocks_in', 'blocks_done'))
if not state then return 'gone' end
if state == 'cancelled' or state == 'finished' or state == 'failed' then return state end
if ARGV[1] == 'cancel' then
  state = 'cancelled'
elseif ARGV[1] == 'resume' then
  if state == 'paused' then
    local now = redis.call('TIME')
    redis.call('HSET', KEYS[1], 'resumed_ms', now[1] * 1000 + math.floor(now[2] / 1000))
  end
  state = count and 'closed' or 'open'
elseif count and tonumber(blocks_done or 0) >= tonumber(blocks_in or 0) then
  return 'finished'
else
  state = 'paused'
end
redis.call('HSET', KEYS[1], 'state', state)
return state
