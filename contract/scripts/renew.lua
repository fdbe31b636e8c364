#!lua flags=allow-oom
-- Keep leases that are still mine; return those that are not.
-- JUSTID resets the idle time without counting a delivery. Without the owner check a slow worker
-- would steal back what a rescuer already works on. Of a cancelled job nothing is kept: its worker
-- stops in the middle and commits nothing, so that this is where its blocks are freed.
-- KEYS: in|retry, meta, which a lane has not   ARGV: worker, entry ids
local cancelled = KEYS[2] and redis.call('HGET', KEYS[2], 'state') == 'cancelled'
local lost = {}
for i = 2, #ARGV do
  local pending = redis.call('XPENDING', KEYS[1], 'farm', ARGV[i], ARGV[i], 1)
  local mine = #pending == 1 and pending[1][2] == ARGV[1]
  if mine and not cancelled then
    redis.call('XCLAIM', KEYS[1], 'farm', ARGV[1], 0, ARGV[i], 'JUSTID')
  else
    lost[#lost + 1] = ARGV[i]
  end
  if mine and cancelled then
    redis.call('XACK', KEYS[1], 'farm', ARGV[i])
    redis.call('XDEL', KEYS[1], ARGV[i])
  end
end
return lost
