#!lua flags=allow-oom
-- Pause, resume or cancel a job. What was cancelled stays so, and of a job whose blocks are all done
-- nothing is left to pause. A job that has taken as much as it may is not resumed: 'limited'; 'raise' resumes
-- it if it has paused itself for that (`commit`), and may take more now, and answers 'same' otherwise.
-- KEYS: meta   ARGV: pause, resume, raise or cancel
local state, count, blocks_in, blocks_done = unpack(redis.call('HMGET', KEYS[1],
  'state', 'chunk_count', 'blocks_in', 'blocks_done'))
local braked, max_hours, max_cost, device_us, cost = unpack(redis.call('HMGET', KEYS[1],
  'braked', 'max_hours', 'max_cost', 'device_us', 'cost_micros'))
local hours_left = tonumber(max_hours or 0) == 0 or tonumber(device_us or 0) < max_hours * 3.6e9
local cost_left = tonumber(max_cost or 0) == 0 or tonumber(cost or 0) < max_cost * 1e6
if not state then return 'gone' end
if ARGV[1] == 'raise' and not (state == 'paused' and (braked or '') ~= '' and hours_left and cost_left) then return 'same' end
if state == 'cancelled' or state == 'finished' or state == 'failed' then return state end
if ARGV[1] == 'cancel' then
  state = 'cancelled'
elseif ARGV[1] == 'resume' or ARGV[1] == 'raise' then
  if state == 'paused' then
    if not (hours_left and cost_left) then return 'limited' end
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
if braked then redis.call('HSET', KEYS[1], 'braked', '') end
return state
