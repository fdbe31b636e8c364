-- Keep leases that are still mine; return those that are not.
-- JUSTID resets the idle time without counting a delivery. Without the owner check a slow worker
-- would steal back what a rescuer already works on.
-- KEYS: in|retry   ARGV: worker, entry ids
local lost = {}
for i = 2, #ARGV do
  local pending = redis.call('XPENDING', KEYS[1], 'farm', ARGV[i], ARGV[i], 1)
  if #pending == 1 and pending[1][2] == ARGV[1] then
    redis.call('XCLAIM', KEYS[1], 'farm', ARGV[1], 0, ARGV[i], 'JUSTID')
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
