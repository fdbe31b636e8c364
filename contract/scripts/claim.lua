#!lua flags=allow-oom
-- Take leases over: those that are mine, at once, and others once nobody has renewed them for long.
-- Whose they are is looked at here: since the worker looked, somebody else may have taken them.
-- KEYS: in|retry   ARGV: worker, lease in ms, entry ids
-- Answers the entries.
local taken = {}
for i = 3, #ARGV do
  local pending = redis.call('XPENDING', KEYS[1], 'farm', ARGV[i], ARGV[i], 1)[1]
  if pending and (pending[2] == ARGV[1] or pending[3] >= tonumber(ARGV[2])) then
    for _, entry in ipairs(redis.call('XCLAIM', KEYS[1], 'farm', ARGV[1], 0, ARGV[i])) do
      taken[#taken + 1] = entry
    end
  end
end
return taken
