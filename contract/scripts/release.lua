#!lua flags=allow-oom
-- Hand leases that are still mine back at once: any worker's next rescue finds them expired.
-- The delivery is taken back too, since nobody tried.
-- KEYS: in|retry   ARGV: worker, entry ids
for i = 2, #ARGV do
  local pending = redis.call('XPENDING', KEYS[1], 'farm', ARGV[i], ARGV[i], 1)
  if #pending == 1 and pending[1][2] == ARGV[1] then
    redis.call('XCLAIM', KEYS[1], 'farm', ARGV[1], 0, ARGV[i],
      'IDLE', 86400000, 'RETRYCOUNT', pending[1][4] - 1, 'JUSTID')
  end
end
return 'released'
